#include "base/gpus.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "base/cuda/check.h"
#include "base/cuda/current_device.h"

namespace heddle {

GpuList ListGpus() {
  GpuList list;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();  // asked and answered: the next check is not to report it
    list.why_none = fmt::format("cudaGetDeviceCount: {}", DescribeCudaError(error));
    return list;
  }
  if (count == 0) list.why_none = "the driver shows no GPU";
  for (int id = 0; id < count; ++id) {
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, id));
    list.gpus.push_back({.name = properties.name,
                         .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
                         .major = properties.major,
                         .minor = properties.minor});
  }
  return list;
}

int GpuCount() {
  static const int count = static_cast<int>(ListGpus().gpus.size());
  return count;
}

std::string WhyNoGpu(int id) {
  const GpuList list = ListGpus();
  return list.gpus.empty()
             ? fmt::format("gpu({}): {}", id, list.why_none)
             : fmt::format("gpu({}): the machine has gpu(0) to gpu({})", id, list.gpus.size() - 1);
}

void WaitForDefaultStream(int id) {
  const DeviceGuard guard(id);
  CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
}

}  // namespace heddle
