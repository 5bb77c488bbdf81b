// Updates by row-sparse gradients, for the bodies of the store's ops.
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <span>

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

}  // namespace heddle::kvstore
