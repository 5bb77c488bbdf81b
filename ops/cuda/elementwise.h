// ops/elementwise.h on a GPU.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>

#include "ops/convert.h"
#include "ops/cuda/stream.h"
#include "ops/elementwise.h"

namespace heddle::ops::cuda {

// As the functions of the same names in heddle::ops: the same shapes, aliasing and bits (of a NaN,
// only that it is one). Errors: CudaError if the launch fails.
void Binary(BinaryOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
            Stream stream);
void BinaryWithScalar(BinaryOp op, DType dtype, const void* a, Scalar b, void* out,
                      std::size_t count, Stream stream);
void BinaryWithScalar(BinaryOp op, DType dtype, Scalar a, const void* b, void* out,
                      std::size_t count, Stream stream);

}  // namespace heddle::ops::cuda
