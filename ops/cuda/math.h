// ops/math.h and ops/reduce.h on a GPU. All arrays lie in memory that the stream's device reaches.
//
// As the functions of the same names in heddle::ops: the same shapes, aliasing and bits (of a NaN,
// only that it is one), but for kExp, kLog and kPower of floating dtypes: within 1e-6 of the CPU's
// value before it is rounded to float16 or bfloat16.
// Scratch: as many bytes as ops/gpu_scratch.h says, aligned to 8, for nothing else until the stream
// is done.
// Errors: CudaError if a launch fails; InvalidArgument as there, launching nothing.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>

#include "ops/convert.h"
#include "ops/cuda/stream.h"
#include "ops/math.h"

namespace heddle::ops::cuda {

void Compare(CompareOp op, DType dtype, const void* a, const void* b, std::uint8_t* out,
             std::size_t count, Stream stream);
void CompareWithScalar(CompareOp op, DType dtype, const void* a, Scalar b, std::uint8_t* out,
                       std::size_t count, Stream stream);
void Unary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count, Stream stream);
void Pair(PairOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
          Stream stream);
void PairWithScalar(PairOp op, DType dtype, const void* a, Scalar b, void* out, std::size_t count,
                    Stream stream);
void PairWithScalar(PairOp op, DType dtype, Scalar a, const void* b, void* out, std::size_t count,
                    Stream stream);

// One pass, and one over a 4096th of the elements where an axis is longer than a block.
void SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length, std::size_t inner,
             std::size_t divisor, void* out, void* scratch, Stream stream);
// Tiles of 64 x 64 elements. Few of them with a long `inner` share it out by its blocks.
void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows, std::size_t inner,
                   std::size_t columns, void* out, void* scratch, Stream stream);

void DotBlocks(DType dtype, const void* a, const void* b, std::size_t count, double* blocks,
               Stream stream);
// *out = the square root of the sum of all squares, of `dtype`, as SquaredNormBlocks and AddBlocks
// add.
void Norm(DType dtype, const void* x, std::size_t count, void* out, void* scratch, Stream stream);

void Gather(std::size_t element_bytes, const void* array, const StridedPart& part, void* packed,
            Stream stream);
void Scatter(std::size_t element_bytes, const void* packed, const StridedPart& part, void* array,
             Stream stream);

}  // namespace heddle::ops::cuda
