// Kernels of the tests that run the engine on real GPUs. Each is one launch on the stream.
#pragma once

#include <cuda_runtime_api.h>

namespace heddle::engine_test {

// Ends when *flag, in pinned memory, is not 0 any more; after 20 s at the latest.
void LaunchAwaitFlag(const int* flag, cudaStream_t stream);
// Takes some `microseconds`, then adds 1 to *value.
void LaunchSlowIncrement(int* value, int microseconds, cudaStream_t stream);
// Writes where no memory is, which spoils the device for the process.
void LaunchIllegalWrite(cudaStream_t stream);
// More threads a block than any GPU takes: the launch reports it.
void LaunchTooManyThreads(cudaStream_t stream);

}  // namespace heddle::engine_test
