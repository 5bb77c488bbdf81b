// GPUs in a build without CUDA: there are none.
#include <fmt/format.h>

#include "base/check.h"
#include "base/gpus.h"

namespace heddle {

GpuList ListGpus() {
  return {.gpus = {}, .why_none = "heddle was built without CUDA (CMake option WITH_CUDA)"};
}

int GpuCount() { return 0; }

std::string WhyNoGpu(int id) { return fmt::format("gpu({}): {}", id, ListGpus().why_none); }

void WaitForDefaultStream(int id) { CHECK(false, "{}", WhyNoGpu(id)); }

}  // namespace heddle
