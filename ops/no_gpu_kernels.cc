// Kernels of GPUs in a build without CUDA: nobody has a device to ask for.
#include "base/check.h"
#include "ops/gpu_kernels.h"
#include "ops/gpu_row_kernels.h"

namespace heddle::ops {

const GpuKernels& CudaKernels() {
  ::heddle::internal::CheckFailed(__FILE__, __LINE__,
                                  "kernels of GPUs are used in a build without CUDA");
}

const GpuRowKernels& CudaRowKernels() {
  ::heddle::internal::CheckFailed(__FILE__, __LINE__,
                                  "kernels of GPUs are used in a build without CUDA");
}

}  // namespace heddle::ops
