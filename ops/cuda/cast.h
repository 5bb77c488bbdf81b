// ops/cast.h on a GPU.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <span>

#include "ops/cuda/stream.h"
#include "ops/gpu_tasks.h"

namespace heddle::ops::cuda {

// out[i] = source[i], of dtype `from`, as an element of dtype `to`, for each task: the bits of
// ops::Cast (of a NaN, only that it is one).
//
// Aliasing: none, except that casting an array to its own dtype in place is allowed.
// Errors:   CudaError if a launch fails.
// Cost:     a launch for each hundred tasks. Between float32, float16 and bfloat16, vectors; other
//           pairs go element by element.
void Cast(DType from, DType to, std::span<const CastTask> tasks, Stream stream);

}  // namespace heddle::ops::cuda
