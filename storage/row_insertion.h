// Rows of zeros that are inserted into a row-sparse array on a GPU, for the two steps of
// storage/gpu_steps.h: how many are missing is the GPU's to count and the host's to know before it
// takes the memory.
//
// Cost: the rows that are there are moved to memory of its own, if one row is missing at least: for
//       a while both are taken.
#pragma once

#include <heddle/gpu.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <span>

#include "ops/gpu_tasks.h"
#include "storage/row_sparse_state.h"

namespace heddle::storage {

class RowInsertion {
 public:
  // First step. `wanted`: ids in memory of the array's GPU, where they stay until the second one.
  void Count(const internal::RowSparseState& array, const ops::GpuIds& wanted, GpuStream stream);
  // Second step: the rows of `wanted` are there from now on, those that were not as zeros. Returns
  // the memory that has been replaced, to be kept until the step is done.
  [[nodiscard]] internal::RowStorage Insert(internal::RowSparseState& array,
                                            GpuStream stream) const;

 private:
  ops::GpuIds wanted_ = {};
  NDArray before_;  // empty: no row is missing
  NDArray scratch_;
  NDArray missing_;  // pinned
};

// Of arrays of one GPU, shape and dtype, as checked: to += other, and Sum of heddle/row_sparse.h.
void PushAddOnGpu(const RowSparseNDArray& to, const RowSparseNDArray& other);
void PushSumOnGpu(std::span<const RowSparseNDArray> inputs, const RowSparseNDArray& out,
                  int priority);

}  // namespace heddle::storage
