// What the bodies of the stores' GPU ops do with row-sparse arrays of their GPU.
//
// DESIGN. The host knows how many rows each array has when an op on it is issued
// (storage/row_sparse_state.h). How many different ids several arrays have together, or how many
// rows of a dense array are not zero, only the GPU finds out. Who waits for such a count?
//
//   An update of a dense value: nobody. The sum of the gradients gets memory for as many rows as
//     all of them have together, its count stays in the GPU's memory, and the kernels behind it
//     read it there. The push is one op, issued like any other.
//   What becomes a row-sparse array, such as the sum for an updater: the host, but none of its
//     threads. An op of the GPU fills an array of the store's own (RowsInTheMaking), with room for
//     all rows that there may be, and copies the count to pinned memory. An op of the CPUs behind
//     it, which is ready when the GPU is done, tells the array how many rows it has (QueueCount).
//     What reads the array from there on is issued later and knows the count.
//   A lazy update of a row-sparse value: the host, for it inserts the rows of the gradient that the
//     value lacks, and takes the memory for them. The push is one asynchronous op that holds the
//     value, and has two steps on the GPU (storage/gpu_steps.h, LazyRowUpdate). Any other update
//     leaves all rows there, so the host knows their number, and is one op of the GPU.
//   A pull of rows by their ids: the host, which sorts the ids.
//
// Interleavings of what becomes an array. Nobody but these two ops knows the array until both are
// queued, so whatever another thread queues in between cannot see it half made; and the first op
// alone reads the inputs or the value, so that a write which another thread queues in between comes
// after all of it.
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <cstdint>
#include <span>

#include "kvstore/gpu_work.h"
#include "kvstore/update_state.h"
#include "ops/gpu_tasks.h"
#include "storage/row_insertion.h"

namespace heddle::kvstore {

// All passes of `update` with the sum of the inputs as the gradient: UpdateArray of
// row_sparse_update.h. A lazy rule gathers the rows of weight and states, updates them, and puts
// them back.
void UpdateArray(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
                 const NDArray& weight, const GpuWork& gpu);

// The same for a row-sparse weight, and a rule that is not lazy: all its rows are there afterwards.
void UpdateArray(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
                 const RowSparseNDArray& weight, const GpuWork& gpu);

// A lazy update of a row-sparse weight, in two steps, of which the second comes when the device is
// done with the first. What `gpu` keeps in either lives to the end of both, and so do the inputs.
class LazyRowUpdate {
 public:
  void First(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
             const RowSparseNDArray& weight, const GpuWork& gpu);
  void Second(const RowSparseNDArray& weight, const GpuWork& gpu);

 private:
  ArrayUpdate update_ = {};
  ops::GpuRows gradient_ = {};
  NDArray counted_;  // pinned: how many rows the gradient has; empty: the host knows
  void* scratch_ = nullptr;
  storage::RowInsertion insertion_;
};

// to = from, of one GPU, cast to its dtype; `to` may be `from`.
void CopyRows(const RowSparseNDArray& from, const RowSparseNDArray& to, const GpuWork& gpu);
// With zeros where no row is, cast.
void RowsToDense(const RowSparseNDArray& from, const NDArray& to, const GpuWork& gpu);
// Each output gets `count` rows, cast, as storage::GatherRowSparse; row_ids: in pinned memory.
void GatherRows(const RowSparseNDArray& from, const NDArray& row_ids, std::int64_t count,
                std::span<const RowSparseNDArray> out, const GpuWork& gpu);

// A row-sparse array of a GPU whose rows only the GPU counts.
struct RowsInTheMaking {
  RowSparseNDArray rows;
  NDArray count;  // in pinned memory; it has the Var of `rows`

  // `like`: an array of a GPU, of either kind.
  template <class Array>
  explicit RowsInTheMaking(const Array& like);
};

// In the body of the GPU op that writes rows.var(): they become the sum of the inputs, in list
// order, the rows of `dense` that are not zero, or none.
void SumInto(std::span<const RowSparseNDArray> inputs, const RowsInTheMaking& out,
             const GpuWork& gpu);
void NonZeroRowsInto(const NDArray& dense, const RowsInTheMaking& out, const GpuWork& gpu);
void NoRowsInto(const RowsInTheMaking& out);

// Queues the op that tells the array its count, behind that one.
void QueueCount(const RowsInTheMaking& rows, int priority);

// Queues the sum of arrays of one GPU, several of them.
RowSparseNDArray QueueSumOfRows(std::span<const RowSparseNDArray> inputs, int priority);

}  // namespace heddle::kvstore
