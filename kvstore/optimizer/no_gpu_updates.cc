// Updates on GPUs in a build without CUDA: nobody has a device to ask for.
#include "base/check.h"
#include "kvstore/optimizer/gpu_updates.h"

namespace heddle::kvstore {

const GpuUpdates& CudaUpdates() {
  ::heddle::internal::CheckFailed(__FILE__, __LINE__,
                                  "updates on GPUs are used in a build without CUDA");
}

}  // namespace heddle::kvstore
