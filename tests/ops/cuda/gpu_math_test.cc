// The functions of ops/math.h on a GPU against those of the CPU: what the compiler and the hardware
// make of what emulated_math_test.cc compares thoroughly.
#include <cmath>

#include "ops/cuda/math.h"
#include "ops/gpu_scratch.h"
#include "ops/math.h"
#include "ops/reduce.h"
#include "tests/ops/cuda/device_array.h"

namespace heddle::ops::cuda {
namespace {

using GpuMath = GpuKernelTest;

// The same bits or, for functions that the GPU computes itself, within 1e-6 and one rounding.
template <typename T>
void ExpectClose(DeviceArray<T>& found, Array<T>& expected, bool exact) {
  if (exact) return found.ExpectSameAs(expected);
  Array<T> host(found.size());
  found.CopyTo(host);
  const double rounding = sizeof(T) == 2 ? (std::is_same_v<T, BFloat16> ? 0x1p-7 : 0x1p-10) : 0;
  const double least = std::is_same_v<T, Float16> ? 0x1p-24 : 1e-37;  // between subnormal ones
  for (std::size_t i = 0; i < host.size(); ++i) {
    const double a = ToDouble(host[i]);
    const double b = ToDouble(expected[i]);
    if (SameBits(host[i], expected[i])) continue;
    ASSERT_NEAR(a, b, (1e-6 + rounding) * std::abs(b) + least) << "element " << i;
  }
}

TEST_F(GpuMath, FunctionsOfElementsAreThoseOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    constexpr DType kDType = kDTypeOf<T>;
    const std::size_t count = RandomCountOfBlocks();
    Array<T> a(count);
    Array<T> b(count);
    Array<T> expected(count);
    Array<std::uint8_t> expected_bools(count);
    Randomize(a, random_);
    Randomize(b, random_);
    DeviceArray<T> device_a(a);
    DeviceArray<T> device_b(b);
    DeviceArray<T> out(a);
    DeviceArray<std::uint8_t> bools(expected_bools);
    for (const UnaryOp op : {UnaryOp::kNegative, UnaryOp::kAbs, UnaryOp::kSign, UnaryOp::kSquare,
                             UnaryOp::kSqrt, UnaryOp::kExp, UnaryOp::kLog}) {
      if (!IsFloating(kDType) && op >= UnaryOp::kSqrt) continue;
      ops::Unary(op, kDType, a.data(), expected.data(), count);
      Unary(op, kDType, device_a.data(), out.data(), count, nullptr);
      ExpectClose(out, expected, op < UnaryOp::kExp);
    }
    for (const PairOp op :
         {PairOp::kMaximum, PairOp::kMinimum, PairOp::kPower, PairOp::kRemainder}) {
      ops::Pair(op, kDType, a.data(), b.data(), expected.data(), count);
      Pair(op, kDType, device_a.data(), device_b.data(), out.data(), count, nullptr);
      ExpectClose(out, expected, op != PairOp::kPower || !IsFloating(kDType));
    }
    for (const CompareOp op : {CompareOp::kEqual, CompareOp::kLess, CompareOp::kGreaterEqual}) {
      ops::Compare(op, kDType, a.data(), b.data(), expected_bools.data(), count);
      Compare(op, kDType, device_a.data(), device_b.data(), bools.data(), count, nullptr);
      bools.ExpectSameAs(expected_bools);
      ops::CompareWithScalar(op, kDType, a.data(), 0.5, expected_bools.data(), count);
      CompareWithScalar(op, kDType, device_a.data(), 0.5, bools.data(), count, nullptr);
      bools.ExpectSameAs(expected_bools);
    }
  });
}

TEST_F(GpuMath, SumsProductsAndNormsHaveTheBitsOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    constexpr DType kDType = kDTypeOf<T>;
    const std::size_t outer = 1 + Below(3);
    const std::size_t length = Below(2) == 0 ? Below(100) : 4096 + Below(6000);
    const std::size_t inner = 1 + Below(200);
    Array<T> a(outer * length * inner);
    Randomize(a, random_);
    DeviceArray<T> device_a(a);
    const std::size_t bytes = std::max({ops::SumAxisScratchBytes(outer, length, inner),
                                        ops::MatrixProductScratchBytes(outer, length, inner),
                                        ops::NormScratchBytes(a.size()), std::size_t{8}});
    Array<double> host_scratch(bytes / 8);
    DeviceArray<double> scratch(host_scratch);

    Array<T> expected(outer * inner);
    DeviceArray<T> out(expected);
    ops::SumAxis(kDType, a.data(), outer, length, inner, 7, expected.data());
    SumAxis(kDType, device_a.data(), outer, length, inner, 7, out.data(), scratch.data(), nullptr);
    out.ExpectSameAs(expected, "sum");
    // The front of the array is both factors.
    ops::MatrixProduct(kDType, a.data(), a.data(), outer, length, inner, expected.data());
    MatrixProduct(kDType, device_a.data(), device_a.data(), outer, length, inner, out.data(),
                  scratch.data(), nullptr);
    out.ExpectSameAs(expected, "product");

    if constexpr (!std::is_integral_v<T>) {
      std::vector<double> blocks(ReductionBlocks(a.size()));
      ops::SquaredNormBlocks(kDType, a.data(), a.size(), blocks.data());
      Array<T> expected_norm(1);
      expected_norm[0] = Convert<T>(std::sqrt(ops::AddBlocks(blocks)));
      DeviceArray<T> norm(expected_norm);
      Norm(kDType, device_a.data(), a.size(), norm.data(), scratch.data(), nullptr);
      norm.ExpectSameAs(expected_norm, "norm");
    }
  });
}

TEST_F(GpuMath, PartsAreGatheredAndScattered) {
  Array<float> array(300 * 40);
  Randomize(array, random_);
  DeviceArray<float> device_array(array);
  const StridedPart turned{.axes = 2, .offset = 39, .extents = {40, 150}, .strides = {-1, 80}};
  Array<float> packed(40 * 150);
  DeviceArray<float> device_packed(packed);
  ops::Gather(4, array.data(), turned, packed.data());
  Gather(4, device_array.data(), turned, device_packed.data(), nullptr);
  device_packed.ExpectSameAs(packed, "gather");
  const StridedPart rows{.axes = 2, .offset = 8, .extents = {200, 30}, .strides = {40, 1}};
  ops::Scatter(4, packed.data(), rows, array.data());
  Scatter(4, device_packed.data(), rows, device_array.data(), nullptr);
  device_array.ExpectSameAs(array, "scatter");
}

}  // namespace
}  // namespace heddle::ops::cuda
