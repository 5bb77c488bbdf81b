// Checked calls of the CUDA runtime.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

namespace heddle {

// "cudaErrorMemoryAllocation (out of memory)"
std::string DescribeCudaError(cudaError_t error);

// Throws CudaError: "<call>: <error>".
[[noreturn]] void ThrowCudaError(cudaError_t error, const char* call);

// For destructors: logs instead. Silent when the driver is being unloaded: the process ends.
void LogIfFailed(cudaError_t error, const char* call) noexcept;

// Is the driver gone, with all contexts, because the process ends?
inline bool IsShuttingDown(cudaError_t error) {
  return error == cudaErrorCudartUnloading || error == cudaErrorContextIsDestroyed;
}

}  // namespace heddle

// Throws CudaError unless the call succeeds.
#define CUDA_CHECK(call)                                 \
  do {                                                   \
    const cudaError_t cuda_check_error = (call);         \
    if (cuda_check_error != cudaSuccess) [[unlikely]] {  \
      ::heddle::ThrowCudaError(cuda_check_error, #call); \
    }                                                    \
  } while (false)
