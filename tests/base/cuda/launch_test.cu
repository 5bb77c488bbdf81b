// The kernels of this build run on the GPU that is here: its architectures, the C++20 flag, the
// link.
#include <concepts>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "base/cuda/check.h"
#include "base/gpus.h"

namespace heddle {
namespace {

template <std::integral Int>
__global__ void Square(Int* values, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] *= values[i];
}

TEST(CudaBuild, KernelsRunOnTheGpuThatIsHere) {
  if (GpuCount() == 0) GTEST_SKIP() << "no GPU: " << WhyNoGpu(0);
  constexpr int kCount = 1000;
  std::vector<int> values(kCount);
  for (int i = 0; i < kCount; ++i) values[i] = i;
  int* device = nullptr;
  CUDA_CHECK(cudaMalloc(&device, kCount * sizeof(int)));
  CUDA_CHECK(cudaMemcpy(device, values.data(), kCount * sizeof(int), cudaMemcpyHostToDevice));
  Square<<<(kCount + 127) / 128, 128>>>(device, kCount);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaMemcpy(values.data(), device, kCount * sizeof(int), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaFree(device));
  for (int i = 0; i < kCount; ++i) ASSERT_EQ(values[i], i * i);
}

}  // namespace
}  // namespace heddle
