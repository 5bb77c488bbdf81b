// Whether a process uses a GPU.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "base/cuda/check.h"

namespace heddle {

// As nvidia-smi would count them: every context holds memory of its device.
inline bool HasContext(int device) {
  void* call = nullptr;
  cudaDriverEntryPointQueryResult answer{};
#if CUDART_VERSION >= 12050
  CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &call, 12000,
                                              cudaEnableDefault, &answer));
#else
  CUDA_CHECK(
      cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &call, cudaEnableDefault, &answer));
#endif
  unsigned flags = 0;
  int active = 0;
  EXPECT_EQ(reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(call)(device, &flags, &active),
            CUDA_SUCCESS);
  return active != 0;
}

}  // namespace heddle
