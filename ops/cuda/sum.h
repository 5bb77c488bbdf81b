// ops/sum.h on a GPU.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <span>

#include "ops/cuda/stream.h"
#include "ops/gpu_tasks.h"

namespace heddle::ops::cuda {

// out[i] = inputs[0][i] + inputs[1][i] + ... for each task, as ops::Sum adds: the same bits (of a
// NaN, only that it is one).
//
// Shapes:   arrays as of ops::Sum, in memory that the stream's device reaches. Outputs of different
//           tasks do not overlap, nor an output with another task's input.
// Errors:   InvalidArgument for no inputs, and for more than kGpuSumInputsMax without a carry,
// before
//           any launch; CudaError if a launch fails.
// Cost:     one pass over the inputs; a launch for each 48 tasks, or 288 inputs. A sum of more is
//           put aside and taken up again between its launches.
void Sum(DType dtype, std::span<const SumTask> tasks, Stream stream);

}  // namespace heddle::ops::cuda
