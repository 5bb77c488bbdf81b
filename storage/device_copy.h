// Copies to, from and between GPUs as ops. docs/gpu.md, "Arrays", says which way each takes.
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <cstdint>

namespace heddle::storage {

// Memory that a GPU cannot reach by itself goes through pinned memory in slices of so many bytes.
// One slice takes some 40 us at 25 GB/s, against which the few microseconds of its two ops are
// little; kStagingSlots of them are on their way at a time.
inline constexpr std::int64_t kStagingBytes = 1 << 20;
inline constexpr int kStagingSlots = 4;

// How `count` elements of `element_bytes` each are cut: into as few slices of kStagingBytes at most
// as possible, about equal, which begin at whole 256 bytes.
struct StagingPlan {
  std::int64_t count = 0;
  std::int64_t slice = 0;   // elements; of all slices but the last
  std::int64_t slices = 0;  // 0 for no elements

  std::int64_t begin(std::int64_t i) const { return i * slice; }
  std::int64_t size(std::int64_t i) const { return i + 1 < slices ? slice : count - begin(i); }
};
StagingPlan PlanStaging(std::int64_t count, std::int64_t element_bytes);

// NDArray::CopyTo, as checked, if `src` or `dst` lies on a GPU.
void PushDeviceCopy(const NDArray& src, const NDArray& dst, int priority);
// RowSparseNDArray::CopyTo likewise: whole, through pinned memory where a GPU does not reach it.
void PushDeviceCopy(const RowSparseNDArray& src, const RowSparseNDArray& dst, int priority);

}  // namespace heddle::storage
