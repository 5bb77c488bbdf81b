// Passes that compute the direction of a step, only for its norm.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_SUMS_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_SUMS_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_SUMS_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "kvstore/optimizer/norms.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

// Block sums of squares: in block_sums[0] of the weights before the pass, in block_sums[k + 1] of
// direction k. Calls apply(arrays, directions) block by block; it writes kDirections arrays of
// float, or of double for float64, which the first level cache holds.
template <int kDirections, class ApplyBlock>
HWY_INLINE void SumDirections(const internal::UpdateRun& run, const ApplyBlock& apply) {
  SumWeights(run, run.block_sums[0]);
  const DType dtype = run.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const std::size_t element_bytes = SizeOf(run.dtype);
  const std::size_t state_bytes = run.master != nullptr ? sizeof(float) : element_bytes;
  alignas(64) double buffers[kDirections][ops::kReductionBlock];
  void* directions[kDirections];
  for (int k = 0; k < kDirections; ++k) directions[k] = buffers[k];
  for (std::size_t i = 0; i < run.count; i += ops::kReductionBlock) {
    const auto at = [i](void* base, std::size_t bytes) -> void* {
      return base != nullptr ? static_cast<std::byte*>(base) + i * bytes : nullptr;
    };
    ops::UpdateArrays block = run;
    block.weight = at(run.weight, element_bytes);
    block.gradient = at(const_cast<void*>(run.gradient), element_bytes);
    if (run.master != nullptr) block.master = run.master + i;
    for (std::size_t k = 0; k < run.states.size(); ++k) {
      block.states[k] = at(run.states[k], state_bytes);
    }
    block.count = std::min(ops::kReductionBlock, run.count - i);
    apply(block, directions);
    for (int k = 0; k < kDirections; ++k) {
      ops::SquaredNormBlocks(dtype, directions[k], block.count,
                             run.block_sums[k + 1] + i / ops::kReductionBlock);
    }
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
