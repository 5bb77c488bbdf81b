// Updates of values on a GPU.
#pragma once

#include <cstddef>
#include <span>

#include "kvstore/optimizer/gpu_updates.h"
#include "kvstore/optimizer/update_rule.h"
#include "ops/cuda/stream.h"

namespace heddle::kvstore::cuda {

// Whether the rule's updates have kernels for GPUs.
bool HasKernels(const internal::UpdateRule& rule);

// Bytes of scratch memory that Update needs: none unless rules sum (passes > 1).
std::size_t ScratchBytes(std::span<const internal::UpdateRun> runs, int passes);

// Launches the updates of runs whose arrays lie in the memory of the stream's device: what
// rule.Update does for each, in these passes. passes.all: what rule.Begin returned, for all runs
// alike. Runs of passes that sum are whole values. Nothing waits for sums: they stay in scratch
// memory.
//
// Shapes:  as of UpdateRule::Update; update->pass and block_sums do not matter. A value that
// appears in several runs of one call has a part in
//          each, without overlap.
// Bits:    those of the CPU, except where a formula takes logarithms or angles (sgld): within 1e-6.
// Errors:  InvalidState if HasKernels is false; nothing is launched then.
//          CudaError if a launch fails: runs may have been updated.
// Scratch: GPU memory, aligned to 8 bytes, in use until the stream is done with it. Null: none.
// Cost:    a pass takes a launch for each 35 to 50 runs of one dtype, with the same states.
void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
            const GpuUpdates::Passes& passes, void* scratch, ops::cuda::Stream stream);

}  // namespace heddle::kvstore::cuda
