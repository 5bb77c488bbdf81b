// Updates of values on a GPU.
#pragma once

#include <span>

#include "kvstore/optimizer/update_rule.h"
#include "ops/cuda/stream.h"

namespace heddle::kvstore::cuda {

// Whether the rule's updates have kernels for GPUs.
bool HasKernels(const internal::UpdateRule& rule);

// Launches the updates of runs whose arrays lie in the memory of the stream's device: what
// rule.Update does for each, in one pass over its arrays.
//
// Shapes:  as of UpdateRule::Update. A value that appears in several runs of one call has a part in
//          each, without overlap.
// Bits:    those of the CPU, except where a formula takes logarithms or angles (sgld): within 1e-6.
// Errors:  InvalidState if HasKernels is false; nothing is launched then.
//          CudaError if a launch fails: runs may have been updated.
// Cost:    a launch for each 35 to 50 runs of one dtype, with the same states.
void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
            ops::cuda::Stream stream);

}  // namespace heddle::kvstore::cuda
