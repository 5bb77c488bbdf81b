#include "ops/reduce.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/reduce.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// The partial sums of a block. Enough that wide vectors overlap their additions, few enough that
// the 256-bit registers hold them.
inline constexpr std::size_t kPartialSums = 32;

template <typename T>
double DotBlock(const T* a, const T* b, std::size_t count) {
  const hn::CappedTag<double, kPartialSums> d;
  constexpr std::size_t kLanes = hn::MaxLanes(hn::CappedTag<double, kPartialSums>());
  constexpr std::size_t kVectors = kPartialSums / kLanes;
  hn::Vec<decltype(d)> sums[kVectors];
  for (auto& sum : sums) sum = hn::Zero(d);
  const auto add_products = [&](const T* x, const T* y) HWY_ATTR {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const auto product = hn::Mul(LoadAs(d, x + v * kLanes), LoadAs(d, y + v * kLanes));
      sums[v] = hn::Add(sums[v], product);
    }
  };
  std::size_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums) add_products(a + i, b + i);
  if (i < count) {
    T x[kPartialSums] = {};
    T y[kPartialSums] = {};
    std::copy(a + i, a + count, x);
    std::copy(b + i, b + count, y);
    add_products(x, y);
  }
  HWY_ALIGN double partial[kPartialSums];
  for (std::size_t v = 0; v < kVectors; ++v) hn::Store(sums[v], d, partial + v * kLanes);
  for (std::size_t half = kPartialSums / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) partial[j] += partial[j + half];
  }
  return partial[0];
}

void DotBlocksForTarget(DType dtype, const void* a, const void* b, std::size_t count,
                        double* blocks) {
  DispatchFloating(dtype, [&](auto type) HWY_ATTR {
    using T = typename decltype(type)::type;
    const T* x = static_cast<const T*>(a);
    const T* y = static_cast<const T*>(b);
    for (std::size_t i = 0; i < count; i += kReductionBlock) {
      blocks[i / kReductionBlock] = DotBlock(x + i, y + i, std::min(kReductionBlock, count - i));
    }
  });
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(DotBlocksForTarget);

void DotBlocks(DType dtype, const void* a, const void* b, std::size_t count, double* blocks) {
  RequireFloating("dot product", dtype);
  HWY_DYNAMIC_DISPATCH(DotBlocksForTarget)(dtype, a, b, count, blocks);
}

void SquaredNormBlocks(DType dtype, const void* x, std::size_t count, double* blocks) {
  RequireFloating("squared norm", dtype);
  HWY_DYNAMIC_DISPATCH(DotBlocksForTarget)(dtype, x, x, count, blocks);
}

double AddBlocks(std::span<const double> blocks) {
  double sum = 0;
  for (double block : blocks) sum += block;
  return sum;
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
