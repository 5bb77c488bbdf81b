// Functions of heddle/math.h on simulated GPUs: as on the CPUs, with their order and errors.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/math.h>
#include <heddle/ndarray.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/gpus.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/storage/gpu_arrays.h"

namespace heddle::storage_test {
namespace {

using engine_test::BaseSeed;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Function {
  const char* name;
  std::function<NDArray(const NDArray& a, const NDArray& b)> call;
  bool floating_only = false;
};

const std::vector<std::int64_t> kTurned = {1, 0};
const std::vector<AxisRange> kPart = {{.begin = 2, .step = -2, .count = 2},
                                      {.begin = 1, .count = 3}};

// Bools hold 1.
Scalar NumberFor(const NDArray& array, int number) {
  return array.dtype() == DType::kBool ? 1 : number;
}

// Of two arrays of shape (3, 5).
const std::vector<Function>& Functions() {
  static const auto* const functions = new std::vector<Function>{
      {"Compare", [](auto& a, auto& b) { return Compare(Comparison::kLess, a, b); }},
      {"Compare, 2", [](auto& a, auto&) { return Compare(Comparison::kGreaterEqual, a, 2); }},
      {"Negative", [](auto& a, auto&) { return Negative(a); }},
      {"Abs", [](auto& a, auto&) { return Abs(a); }},
      {"Sign", [](auto& a, auto&) { return Sign(a); }},
      {"Square", [](auto& a, auto&) { return Square(a); }},
      {"Sqrt", [](auto& a, auto&) { return Sqrt(a); }, true},
      {"Exp", [](auto& a, auto&) { return Exp(a); }, true},
      {"Log", [](auto& a, auto&) { return Log(a); }, true},
      {"Maximum", [](auto& a, auto& b) { return Maximum(a, b); }},
      {"Maximum, 1", [](auto& a, auto&) { return Maximum(a, 1); }},
      {"Minimum", [](auto& a, auto& b) { return Minimum(a, b); }},
      {"Power", [](auto& a, auto& b) { return Power(a, b); }},
      {"Power, 2", [](auto& a, auto&) { return Power(a, NumberFor(a, 2)); }},
      {"1, Power", [](auto&, auto& b) { return Power(1, b); }},
      {"Remainder", [](auto& a, auto& b) { return Remainder(a, b); }},
      {"3, Remainder", [](auto&, auto& b) { return Remainder(NumberFor(b, 3), b); }},
      {"SumAlong 0", [](auto& a, auto&) { return SumAlong(a, 0); }},
      {"MeanAlong 1", [](auto& a, auto&) { return MeanAlong(a, 1); }},
      {"SumAlong", [](auto& a, auto&) { return SumAlong(a, std::nullopt); }},
      {"Norm", [](auto& a, auto&) { return Norm(a); }, true},
      {"Dot", [](auto& a, auto& b) { return Dot(a, Transpose(b, kTurned)); }},
      {"CopyPart", [](auto& a, auto&) { return CopyPart(a, kPart); }},
      {"AssignPart",
       [](auto& a, auto& b) {
         AssignPart(a, kPart, CopyPart(b, kPart));
         return a;
       }},
      {"Transpose", [](auto& a, auto&) { return Transpose(a, kTurned); }},
      {"BroadcastTo",
       [](auto& a, auto&) {
         return BroadcastTo(a, {2, 3, 5});
       }},
  };
  return *functions;
}

class GpuMath : public GpuArrays {
 protected:
  NDArray Random(Shape shape, DType dtype, Device device = Cpu()) {
    std::vector<double> values(static_cast<std::size_t>(shape.size()));
    for (double& value : values) value = static_cast<double>(random_() % 900) / 100 - 1;
    return NDArray::FromVector(values, std::move(shape), dtype, Cpu(), *engine_).Copy(device);
  }

  static void ExpectEqual(const NDArray& found, const NDArray& expected) {
    EXPECT_EQ(found.shape(), expected.shape());
    EXPECT_EQ(found.dtype(), expected.dtype());
    const std::vector<double> a = found.ToVector<double>();
    const std::vector<double> b = expected.ToVector<double>();
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (std::isnan(a[i]) && std::isnan(b[i])) continue;
      ASSERT_EQ(a[i], b[i]) << "element " << i;
    }
  }

  std::mt19937_64 random_{BaseSeed()};
};

INSTANTIATE_TEST_SUITE_P(All, GpuMath, testing::ValuesIn(engine_test::OneConfigOfEachKind()),
                         engine_test::ConfigLabel);

TEST_P(GpuMath, EveryFunctionGivesWhatItGivesOnTheCpu) {
  for (const DType dtype : kAllDTypes) {
    const NDArray a = Random({3, 5}, dtype);
    const NDArray b = Random({3, 5}, dtype);
    for (const Function& function : Functions()) {
      if (function.floating_only && !IsFloating(dtype)) continue;
      SCOPED_TRACE(
          fmt::format("{} of {}, HEDDLE_TEST_SEED={}", function.name, Name(dtype), BaseSeed()));
      const NDArray found = function.call(a.Copy(Gpu(1)), b.Copy(Gpu(1)));
      EXPECT_EQ(found.device(), Gpu(1));
      ExpectEqual(found, function.call(a.Copy(), b));
    }
  }
}

// Where sums have memory of their own, and where there is nothing to do.
TEST_P(GpuMath, LongSumsAndEmptyArraysDoToo) {
  for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
    const NDArray a = Random({9001, 3}, dtype);
    const NDArray b = Random({3, 9001}, dtype);
    const auto same = [&](auto&& call) { ExpectEqual(call(Gpu(0)), call(Cpu())); };
    same([&](Device device) { return SumAlong(a.Copy(device), 0); });
    same([&](Device device) { return MeanAlong(a.Copy(device), std::nullopt); });
    same([&](Device device) { return Dot(b.Copy(device), a.Copy(device)); });
    for (const Shape& shape : {Shape({0, 3}), Shape({3, 0})}) {
      same([&](Device device) { return SumAlong(Random(shape, dtype, device), 0); });
      same([&](Device device) { return Square(Random(shape, dtype, device)); });
      same([&](Device device) { return Transpose(Random(shape, dtype, device), kTurned); });
    }
    same([&](Device device) {
      return Dot(Random({2, 0}, dtype, device), Random({0, 3}, dtype, device));
    });
  }
  const NDArray x = Random({20'000}, DType::kFloat32);
  ExpectEqual(Norm(x.Copy(Gpu(0))), Norm(x));
  ExpectEqual(Norm(Random({0}, DType::kFloat32, Gpu(0))), NDArray::Zeros({1}));
  engine_->WaitForAll();
  EXPECT_EQ(storage::Gpus::Of(*engine_).Stats(DeviceType::kGpu).used, 0) << "all is given back";
}

TEST_P(GpuMath, PartsAreOrderedLikeAnyOp) {
  const NDArray a = Random({4, 6}, DType::kFloat32);
  const NDArray there = a.Copy(Gpu(0));
  const std::vector<AxisRange> column = {{.count = 4}, {.begin = 1, .count = 1, .keep = false}};
  const std::vector<AxisRange> none = {{.count = 0}, {.count = 6}};
  for (const NDArray& array : {a, there}) {
    const NDArray before = Sqrt(array);
    AssignPart(array, column, NDArray::Full({4}, -1, DType::kFloat32, array.device(), *engine_));
    AssignPart(array, none, NDArray::Zeros({0, 6}, DType::kFloat32, array.device(), *engine_));
    // The values lie in the array itself.
    AssignPart(array, std::vector<AxisRange>{{.count = 1, .keep = false}, {.count = 6}},
               array.Slice(2, 3).Reshape({6}));
    array *= 2;
    array += before;
  }
  ExpectEqual(there, a);
}

TEST_P(GpuMath, WhatDoesNotFitIsRefusedAndPushesNothing) {
  const NDArray a = Random({2, 2}, DType::kFloat32, Gpu(1));
  const NDArray integers = Random({2, 2}, DType::kInt32, Gpu(1));
  const NDArray elsewhere = Random({2, 2}, DType::kFloat32, Gpu(0));
  const NDArray longer = Random({2, 3}, DType::kFloat32, Gpu(1));
  engine_->WaitForAll();
  const std::uint64_t pushed = engine_->stats().pushed;
  const auto refused = [](const char* name, auto&& call) {
    EXPECT_THAT(MessageOf<InvalidArgument>(call), HasSubstr(name));
  };
  refused("Exp", [&] { Exp(integers); });
  refused("Norm", [&] { Norm(integers); });
  refused("Maximum", [&] { Maximum(a, longer); });
  refused("Compare", [&] { Compare(Comparison::kLess, a, elsewhere); });
  refused("gpu(0)", [&] { Dot(a, elsewhere); });
  refused("Power", [&] { Power(integers, 0.5); });
  refused("Sum", [&] { SumAlong(a, 2); });
  refused("AssignPart", [&] { AssignPart(a, kPart, longer); });
  EXPECT_EQ(engine_->stats().pushed, pushed);
}

TEST_P(GpuMath, FailuresPassThrough) {
  const NDArray a = Random({2, 2}, DType::kFloat32, Gpu(1));
  engine_->PushGpu({.name = "bad", .writes = {a.var()}, .device = Gpu(1)},
                   [](GpuStream) { throw std::runtime_error("bad"); });
  const NDArray norm = Norm(Exp(Dot(a, a)));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { norm.WaitToRead(); }), "bad");
  EXPECT_THROW(engine_->WaitForAll(), std::runtime_error);

  gpu_->set_device_bytes(gpu_->bytes_used(Gpu(1)));
  storage::Gpus::Of(*engine_).Trim(DeviceType::kGpu);
  const NDArray big = NDArray::Zeros({1 << 20}, DType::kFloat32, Gpu(1), *engine_);
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { Square(big).WaitToRead(); }), HasSubstr("gpu(1)"));
  EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
}

}  // namespace
}  // namespace heddle::storage_test
