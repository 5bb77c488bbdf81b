// Kernels over whole row-sparse arrays, for the bodies of ops that name their vars: the work is
// shared with the engine's workers, the bits do not depend on their number. Shapes, dtypes and
// engines fit, as the callers have checked; devices are all cpu(i).
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/row_sparse.h"

namespace heddle::storage {

// out = inputs[0] + inputs[1] + ..., in list order; inputs may be `out` itself.
void SumRowSparse(std::span<const RowSparseNDArray> inputs, const RowSparseNDArray& out);

// Adds the input to rows in place, which inserts those that are not there. Not for an array to
// itself.
void AddInPlace(const RowSparseNDArray& to, const RowSparseNDArray& input);

// The rows of `row_ids`, sorted and unique, are there from now on: those that were not, as zeros.
// Cost: a search for the ids; if some are inserted, the rows behind the first of them move.
void InsertRows(const RowSparseNDArray& array, std::span<const std::int64_t> row_ids);

// Casts to out's dtype. `out` may be `from`.
void CopyRowSparse(const RowSparseNDArray& from, const RowSparseNDArray& out);
void RowSparseToDense(const RowSparseNDArray& from, const NDArray& out);
void DenseToRowSparse(const NDArray& from, const RowSparseNDArray& out);

void AddToDense(const RowSparseNDArray& from, const NDArray& out);

// The values of an array of numbers, sorted, each once. InvalidArgument for a value that is no
// whole number in [0, num_rows).
std::vector<std::int64_t> SortedRowIds(const NDArray& ids, std::int64_t num_rows);

// Each output gets the rows of `row_ids`, sorted and unique, cast to its dtype; zeros where `from`
// has none. If it has none at all, neither have the outputs. `from` may be one of them.
void GatherRowSparse(const RowSparseNDArray& from, std::span<const std::int64_t> row_ids,
                     std::span<const RowSparseNDArray> out);

// Ranges of ids in which the rows of some values are shared with the workers: one if they are few.
// The ranges do not depend on the number of workers; each has about as many rows as the others.
class RowRanges {
 public:
  // `row_bytes`: of a row; `traffic`: what the work on a row costs, in bytes read and written.
  RowRanges(std::span<const ops::SparseRows> values, std::int64_t row_bytes, std::int64_t traffic);

  std::int64_t count() const { return ranges_; }
  // The rows of range i of each value.
  std::vector<ops::SparseRows> Part(std::int64_t i) const;
  // The rows of all values in the ranges before range i, which may be count().
  std::size_t RowsBefore(std::int64_t i) const;

 private:
  std::span<const ops::SparseRows> values_;
  std::int64_t row_bytes_;
  std::int64_t ranges_;
  std::vector<std::size_t> places_;  // of each value count() + 1: where its ranges begin, and end
};

}  // namespace heddle::storage
