// Memory and times on the current GPU.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <cuda_runtime_api.h>

namespace heddle::bench {

// Every byte set, as that of Memory (benchmarks/support/roofline.h): never zeros.
class GpuMemory {
 public:
  explicit GpuMemory(std::size_t bytes);
  GpuMemory(GpuMemory&& other) noexcept;
  GpuMemory& operator=(GpuMemory&&) = delete;
  ~GpuMemory();

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// Runs the contenders in turn, `rounds` times after a first round that does not count: for each,
// the seconds of every round between two events around its `repeats` calls, for one call. They
// enqueue work on `stream`.
std::vector<std::vector<double>> MeasureOnGpu(
    const std::vector<std::function<void(cudaStream_t stream)>>& contenders, int rounds,
    int repeats);

}  // namespace heddle::bench
