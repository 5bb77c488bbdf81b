// The GPUs that this build can use, in CUDA's order. Asking makes no context on any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace heddle {

struct GpuInfo {
  std::string name;
  std::int64_t memory_bytes = 0;
  int major = 0;  // compute capability
  int minor = 0;
};

struct GpuList {
  std::vector<GpuInfo> gpus;
  std::string why_none;  // if there are none: what is missing, the build option or the device
};

GpuList ListGpus();

// gpu(0) to gpu(count - 1) are there. Asks the driver once a process.
int GpuCount();

// For error messages: "gpu(3): there are 2 GPUs", "gpu(0): heddle was built without CUDA (the CMake
// option WITH_CUDA)".
std::string WhyNoGpu(int id);

// Returns when what anybody has issued so far on the default stream of a GPU that is there, or on
// streams that wait for it, is done. CudaError if the device has failed.
void WaitForDefaultStream(int id);

}  // namespace heddle
