// ops/quantise.h on a GPU, for many arrays at once: the same codes, residuals and values, bit by
// bit.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <span>

#include "ops/cuda/stream.h"

namespace heddle::ops::cuda {

struct QuantiseTask {
  const void* gradient;
  float* residual;
  void* code;
  std::size_t count;
};

// As the functions of the same names in heddle::ops. Of arrays that begin at multiples of 16 bytes
// (gradients of 16 bits: of 8), four elements move at once.
//
// Errors: InvalidArgument for another dtype, before any launch; CudaError if a launch fails.
// Cost:   one pass; a launch for each 60 tasks.
void QuantiseTwoBit(float threshold, DType dtype, std::span<const QuantiseTask> tasks,
                    Stream stream);
void QuantiseOneBit(float threshold, DType dtype, std::span<const QuantiseTask> tasks,
                    Stream stream);

struct DequantiseTask {
  const void* code;
  float* out;
  std::size_t count;
};

void DequantiseTwoBit(float threshold, std::span<const DequantiseTask> tasks, Stream stream);
void DequantiseOneBit(std::span<const DequantiseTask> tasks, Stream stream);

// out, of `dtype`: the sum of what the codes, one at least, stand for, added in their order in
// float32 and rounded once. `carry`: as that of a SumTask.
//
// Errors: InvalidArgument for another dtype or number of codes, before any launch; CudaError if a
//         launch fails.
// Cost:   a launch for each kGpuSumInputsMax codes, one pass over the codes and out.
void SumTwoBit(float threshold, std::span<const void* const> codes, DType dtype, void* out,
               float* carry, std::size_t count, Stream stream);
void SumOneBit(std::span<const void* const> codes, DType dtype, void* out, float* carry,
               std::size_t count, Stream stream);

}  // namespace heddle::ops::cuda
