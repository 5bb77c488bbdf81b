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

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  CUDA_CHECK(cudaGetDevice(&current));
  if (current == device) return;
  CUDA_CHECK(cudaSetDevice(device));
  outer_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (outer_ >= 0) LogIfFailed(cudaSetDevice(outer_), "cudaSetDevice");
}

}  // namespace heddle
