// Kernels over whole row-sparse arrays, for the bodies of ops that name their vars: the work is
// shared with the engine's workers, the bits do not depend on their number. Shapes, dtypes and
// engines fit, as the callers have checked; devices are all cpu(i).
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

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

// Casts to out's dtype. `out` is another array.
void CopyRowSparse(const RowSparseNDArray& from, const RowSparseNDArray& out);
void RowSparseToDense(const RowSparseNDArray& from, const NDArray& out);
void DenseToRowSparse(const NDArray& from, const RowSparseNDArray& out);

void AddToDense(const RowSparseNDArray& from, const NDArray& out);

// The values of an array of numbers, sorted, each once. InvalidArgument for a value that is no
// whole number in [0, num_rows).
std::vector<std::int64_t> SortedRowIds(const NDArray& ids, std::int64_t num_rows);

// Each output gets the rows of `row_ids`, sorted and unique, cast to its dtype; zeros where `from`
// has none. If it has none at all, neither have the outputs. No output is `from`.
void GatherRowSparse(const RowSparseNDArray& from, std::span<const std::int64_t> row_ids,
                     std::span<const RowSparseNDArray> out);

// Cuts the ids of some values into ranges of about `rows` rows in all: bounds, of which neighbours
// are the ends of a range. The first is 0, the last above all ids.
std::vector<std::int64_t> CutIds(std::span<const ops::SparseRows> values, std::int64_t rows);

// The ranges in which values with rows of `row_bytes` are shared with the workers, when each row
// costs `row_bytes` of memory traffic: one range if they are few.
std::vector<std::int64_t> CutForWorkers(std::span<const ops::SparseRows> values,
                                        std::int64_t row_bytes);

}  // namespace heddle::storage
