// Bad input to arrays: a typed error on the calling thread that names expected and given, and
// nothing is changed.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/gpus.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle {
namespace {

using engine_test::Contains;
using Floats = std::vector<float>;

class NDArrayErrors : public testing::Test {
 protected:
  // `call` throws InvalidArgument with a message that has all `parts`, and pushes nothing.
  void ExpectRefused(const std::function<void()>& call, const std::vector<std::string>& parts) {
    engine_.WaitForAll();
    const std::uint64_t pushed = engine_.stats().pushed;
    const std::string message = MessageOf<InvalidArgument>(call);
    for (const std::string& part : parts) EXPECT_TRUE(Contains(message, part)) << message;
    EXPECT_EQ(engine_.stats().pushed, pushed) << message;
    EXPECT_EQ(a_.ToVector<float>(), (Floats{1, 2, 3, 4, 5, 6})) << message;
  }

  NDArray Make(Shape shape, DType dtype = DType::kFloat32, Device device = Cpu()) {
    return NDArray(std::move(shape), dtype, device, engine_);
  }

  static EngineOptions TwoWorkers() {
    EngineOptions options = EngineOptions::FromEnvironment();
    options.num_workers = 2;
    return options;
  }

  Engine engine_{TwoWorkers()};
  Engine other_engine_{TwoWorkers()};
  const NDArray a_ =
      NDArray::FromVector(Floats{1, 2, 3, 4, 5, 6}, {2, 3}, DType::kFloat32, Cpu(), engine_);
};

TEST_F(NDArrayErrors, EmptyHandles) {
  const NDArray none;
  for (const auto& use : std::vector<std::function<void()>>{[&] { none.shape(); },
                                                            [&] { none.dtype(); },
                                                            [&] { none.device(); },
                                                            [&] { none.engine(); },
                                                            [&] { none.var(); },
                                                            [&] { none.size(); },
                                                            [&] { none.bytes(); },
                                                            [&] { none.is_partial(); },
                                                            [&] { none.IsSameAs(a_); },
                                                            [&] { a_.IsSameAs(none); },
                                                            [&] { a_.Overlaps(none); },
                                                            [&] { none.data(); },
                                                            [&] { none.data<float>(); },
                                                            [&] { none.Slice(0, 0); },
                                                            [&] { none.Reshape({1}); },
                                                            [&] { none.CopyTo(a_); },
                                                            [&] { a_.CopyTo(none); },
                                                            [&] { none.Copy(); },
                                                            [&] { none.AsType(DType::kInt8); },
                                                            [&] { none.Fill(0); },
                                                            [&] { none.CopyFromHost(Floats{}); },
                                                            [&] { none += a_; },
                                                            [&] { a_ += none; },
                                                            [&] { none *= 2; },
                                                            [&] { (void)(none + a_); },
                                                            [&] { (void)(2 * none); },
                                                            [&] { none.WaitToRead(); },
                                                            [&] { none.WaitToWrite(); },
                                                            [&] { (void)none.ToVector<float>(); },
                                                            [&] { Sum({a_}, none); },
                                                            [&] {
                                                              Sum({a_, none}, a_);
                                                            }}) {
    ExpectRefused(use, {"empty handle"});
  }
}

TEST_F(NDArrayErrors, ShapesThatDiffer) {
  const NDArray b = Make({3, 2});
  ExpectRefused([&] { a_.CopyTo(b); }, {"CopyTo", "(2, 3)", "(3, 2)"});
  ExpectRefused([&] { a_ += b; }, {"Add", "(2, 3)", "(3, 2)"});
  ExpectRefused([&] { (void)(a_ - b); }, {"Subtract", "(2, 3)", "(3, 2)"});
  ExpectRefused([&] { Sum({a_, b}, a_); }, {"Sum", "(2, 3)", "(3, 2)"});
  ExpectRefused([&] { Sum({a_}, b); }, {"Sum", "(2, 3)", "(3, 2)"});
  ExpectRefused([&] { a_.Reshape({4}); }, {"Reshape", "6", "(4,)"});
  ExpectRefused([&] { a_.CopyFromHost(Floats{1}); }, {"CopyFromHost", "6", "1"});
  ExpectRefused([&] { NDArray::FromVector(Floats{1}, {2}, DType::kFloat32, Cpu(), engine_); },
                {"FromVector", "2", "1"});
}

TEST_F(NDArrayErrors, DTypesThatDiffer) {
  const NDArray b = Make({2, 3}, DType::kInt32);
  ExpectRefused([&] { a_ *= b; }, {"Multiply", "float32", "int32"});
  ExpectRefused([&] { (void)(a_ / b); }, {"Divide", "float32", "int32"});
  ExpectRefused([&] { Sum({a_, b}, a_); }, {"Sum", "float32", "int32"});
  ExpectRefused([&] { a_.data<double>(); }, {"data", "float32", "float64"});
}

TEST_F(NDArrayErrors, Devices) {
  const bool none = GpuCount() == 0;  // with GPUs, gpu_arrays_test.cc shows what is refused
  const NDArray b = Make({2, 3}, DType::kFloat32, Cpu(1));
  ExpectRefused([&] { a_ += b; }, {"Add", "cpu(0)", "cpu(1)"});
  ExpectRefused([&] { (void)(a_ + b); }, {"Add", "cpu(0)", "cpu(1)"});
  if (none) {
    ExpectRefused([&] { Make({1}, DType::kFloat32, Gpu(0)); }, {WhyNoGpu(0)});
    ExpectRefused([&] { Make({1}, DType::kFloat32, CpuPinned()); }, {"cpu_pinned(0)", WhyNoGpu(0)});
    ExpectRefused([&] { a_.Copy(Gpu(1)); }, {WhyNoGpu(1)});
  }
  ExpectRefused([&] { Make({1}, DType::kFloat32, Cpu(-1)); }, {"at least 0", "-1"});
  ExpectRefused(
      [&] {
        Make({1}, DType::kFloat32, Device{static_cast<DeviceType>(9), 0});
      },
      {"a type of device", "9"});
  ExpectRefused([&] { Make({1}, static_cast<DType>(9), Cpu()); }, {"a dtype", "9"});
}

TEST_F(NDArrayErrors, ArraysOfAnotherEngine) {
  const NDArray b({2, 3}, DType::kFloat32, Cpu(), other_engine_);
  ExpectRefused([&] { a_.CopyTo(b); }, {"CopyTo", "another engine"});
  ExpectRefused([&] { a_ += b; }, {"Add", "another engine"});
  ExpectRefused([&] { Sum({a_, b}, a_); }, {"Sum", "another engine"});
}

TEST_F(NDArrayErrors, SlicesOutOfRange) {
  ExpectRefused([&] { a_.Slice(0, 3); }, {"Slice", "2", "[0, 3)"});
  ExpectRefused([&] { a_.Slice(-1, 1); }, {"Slice", "2", "[-1, 1)"});
  ExpectRefused([&] { a_.Slice(2, 1); }, {"Slice", "2", "[2, 1)"});
  ExpectRefused([&] { Make({}).Slice(0, 0); }, {"Slice", "()"});
}

TEST_F(NDArrayErrors, ScalarsThatAnArrayOfIntegersCannotHold) {
  const NDArray ints = NDArray::Ones({2}, DType::kInt8, Cpu(), engine_);
  ExpectRefused([&] { ints += 0.5; }, {"Add", "int8", "0.5"});
  ExpectRefused([&] { ints.Fill(128); }, {"Fill", "int8", "128"});
  ExpectRefused([&] { ints *= -129; }, {"Multiply", "int8", "-129"});
  ExpectRefused([&] { ints.Fill(std::numeric_limits<double>::quiet_NaN()); }, {"Fill", "nan"});
  ExpectRefused([&] { ints.Fill(std::numeric_limits<std::uint64_t>::max()); }, {"Fill", "int8"});
  ExpectRefused([&] { NDArray::Full({1}, 2, DType::kBool, Cpu(), engine_); }, {"Full", "bool"});
  ExpectRefused([&] { NDArray::Arange(300, DType::kUInt8, Cpu(), engine_); },
                {"Arange", "uint8", "299"});
  ints += 2.0;  // exactly 2
  EXPECT_EQ(ints.ToVector<int>(), (std::vector<int>{3, 3}));
}

TEST_F(NDArrayErrors, SumOfNothing) {
  ExpectRefused([&] { Sum(std::vector<NDArray>{}, a_); }, {"Sum", "at least one"});
}

TEST_F(NDArrayErrors, ShapesThatCannotBe) {
  ExpectRefused([&] { Make({2, -3}); }, {"-3"});
  ExpectRefused([&] { Make({std::int64_t{1} << 61}, DType::kFloat64); }, {"2^63"});
  ExpectRefused([&] { NDArray::Arange(-1, DType::kInt64, Cpu(), engine_); }, {"-1"});
}

TEST_F(NDArrayErrors, WaitsInsideAnOpNameTheCall) {
  const RowSparseNDArray rows({2, 3}, DType::kFloat32, Cpu(), engine_);
  const std::vector<std::pair<const char*, std::function<void()>>> calls = {
      {"WaitToRead", [&] { a_.WaitToRead(); }},
      {"WaitToWrite", [&] { a_.WaitToWrite(); }},
      {"WaitToRead", [&] { rows.WaitToRead(); }},
      {"WaitToWrite", [&] { rows.WaitToWrite(); }},
      {"ToVector", [&] { (void)a_.ToVector<float>(); }},
      {"ToVectors", [&] { (void)rows.ToVectors<float>(); }},
  };
  for (const auto& [name, call] : calls) {
    std::string message;
    engine_.Push({.name = "outer", .writes = {engine_.NewVar()}},
                 [&, &call = call] { message = MessageOf<InvalidState>(call); });
    engine_.WaitForAll();
    EXPECT_TRUE(Contains(message, std::string(name) + " inside op 'outer'")) << message;
  }
}

TEST_F(NDArrayErrors, AStoppedEngine) {
  const NDArray b({2}, DType::kFloat32, Cpu(), other_engine_);
  other_engine_.Stop();
  EXPECT_THROW(b.Fill(1), InvalidState);
  EXPECT_THROW(b += 1, InvalidState);
  EXPECT_THROW((void)b.ToVector<float>(), InvalidState);
}

}  // namespace
}  // namespace heddle
