// Starts kernels.
#pragma once

#include <cuda_runtime.h>

#include "base/cuda/check.h"
#include "ops/cuda/table.h"

namespace heddle::ops::cuda {

template <class AnyTable>
__global__ void __launch_bounds__(kBlockThreads) RunTable(const __grid_constant__ AnyTable table) {
  static_assert(sizeof(AnyTable) <= kParameterBytes);
  RunTableThread(table, blockIdx.x, threadIdx.x);
}

// Throws CudaError, naming `kernel`, if the launch fails.
template <class AnyTable>
void LaunchTable(const char* kernel, const AnyTable& table, cudaStream_t stream) {
  RunTable<<<table.blocks(), kBlockThreads, 0, stream>>>(table);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) ThrowCudaError(error, kernel);
}

}  // namespace heddle::ops::cuda
