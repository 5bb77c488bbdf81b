// Updates by row-sparse gradients, for the bodies of the store's ops.
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>
#include <heddle/shape.h>

#include <span>

#include "kvstore/part_rows.h"
#include "kvstore/update_state.h"

namespace heddle::kvstore {

// All passes of `update` with the sum of the inputs as the gradient. A lazy rule costs the rows
// that one input has at least, which the engine's workers share; the sum does not reach memory as a
// whole. Any other rule updates all rows.
// A row-sparse weight gets rows of zeros where an update meets none: a lazy one for the rows of the
// gradient, any other one for all.
void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const NDArray& weight);
void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const RowSparseNDArray& weight);

// Of a weight that is a part of an array: the inputs are windows of `rows`, their ids counted from
// its first one.
void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const NDArray& weight, const PartRows& rows);
// The last pass alone, of a lazy rule.
void UpdateRows(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
                const NDArray& weight, const PartRows& rows);
// The sum of the inputs, such windows as well, with zeros where no row is: an array of that shape.
NDArray DenseSum(std::span<const RowSparseNDArray> inputs, const Shape& shape,
                 const PartRows& rows);

}  // namespace heddle::kvstore
