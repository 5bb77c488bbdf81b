#include "benchmarks/gpu/timing.h"

#include <utility>

#include "base/cuda/check.h"
#include "benchmarks/support/roofline.h"

namespace heddle::bench {

GpuMemory::GpuMemory(std::size_t bytes) : bytes_(bytes) {
  CUDA_CHECK(cudaMalloc(&data_, bytes));
  CUDA_CHECK(cudaMemset(data_, Memory::kSmallNumbers, bytes));
}

GpuMemory::GpuMemory(GpuMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

GpuMemory::~GpuMemory() {
  if (data_ != nullptr) LogIfFailed(cudaFree(data_), "cudaFree");
}

std::vector<std::vector<double>> MeasureOnGpu(
    const std::vector<std::function<void(cudaStream_t stream)>>& contenders, int rounds,
    int repeats) {
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  std::vector<std::vector<double>> seconds(contenders.size());
  for (int round = -1; round < rounds; ++round) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      CUDA_CHECK(cudaEventRecord(start, stream));
      for (int repeat = 0; repeat < repeats; ++repeat) contenders[i](stream);
      CUDA_CHECK(cudaEventRecord(stop, stream));
      CUDA_CHECK(cudaEventSynchronize(stop));
      float milliseconds = 0;
      CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
      if (round >= 0) seconds[i].push_back(static_cast<double>(milliseconds) * 1e-3 / repeats);
    }
  }
  CUDA_CHECK(cudaEventDestroy(stop));
  CUDA_CHECK(cudaEventDestroy(start));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return seconds;
}

}  // namespace heddle::bench
