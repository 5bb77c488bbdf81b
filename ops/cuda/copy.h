// ops/copy.h and ops/fill.h on a GPU, for many arrays at once. One large copy is cudaMemcpyAsync's.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <span>

#include "ops/convert.h"
#include "ops/cuda/stream.h"
#include "ops/gpu_tasks.h"

namespace heddle::ops::cuda {

// Copies `bytes` bytes from source to out for each task.
//
// Aliasing: within a task the same pointer twice; no other overlap of an output with anything.
// Errors:   CudaError if a launch fails.
// Cost:     a launch for each hundred tasks. 16 bytes at a time where source and out are aligned
//           alike, else as many as their alignment has in common, 4 at most.
void Copy(std::span<const CopyTask> tasks, Stream stream);

struct FillTask {
  void* out;
  std::size_t count;
};

// Sets every element of each output, of `dtype`, to `value` as ops::Fill converts it. Errors, cost:
// as of Copy.
void Fill(DType dtype, Scalar value, std::span<const FillTask> tasks, Stream stream);

}  // namespace heddle::ops::cuda
