// Conversions of row-sparse arrays that do not leave their GPU. Arguments fit, as the callers have
// checked: shapes, dtypes and engines are equal, and devices, which are a GPU.
#pragma once

#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

namespace heddle::storage {

// dst = src, with zeros where no row is: one op.
void PushToDenseOnGpu(const RowSparseNDArray& src, const NDArray& dst, int priority);

// out = the rows of `dense` that have an element other than zero. The GPU counts them, in the first
// step of gpu_steps.h. Nobody else has `out` yet.
void PushFromDenseOnGpu(const NDArray& dense, const RowSparseNDArray& out, int priority);

// out = the rows of src that RowSparseNDArray::Retain says. `row_ids` lies on the host, which sorts
// them and so knows how many there are. Nobody else has `out` yet.
void PushRetainOnGpu(const RowSparseNDArray& src, const NDArray& row_ids,
                     const RowSparseNDArray& out, int priority);

}  // namespace heddle::storage
