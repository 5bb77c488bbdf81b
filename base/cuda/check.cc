#include "base/cuda/check.h"

#include <heddle/error.h>

#include <fmt/format.h>

#include "base/log.h"

namespace heddle {

std::string DescribeCudaError(cudaError_t error) {
  return fmt::format("{} ({})", cudaGetErrorName(error), cudaGetErrorString(error));
}

void ThrowCudaError(cudaError_t error, const char* call) {
  cudaGetLastError();  // reported here: a later check of a launch is not to find it again
  throw CudaError(fmt::format("{}: {}", call, DescribeCudaError(error)), error);
}

void LogIfFailed(cudaError_t error, const char* call) noexcept {
  if (error == cudaSuccess || IsShuttingDown(error)) return;
  cudaGetLastError();  // as above
  Log(LogLevel::kError, "{}: {}", call, DescribeCudaError(error));
}

}  // namespace heddle
