// Arrays in a GPU's memory for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "base/cuda/check.h"
#include "base/gpus.h"
#include "tests/ops/ops_testing.h"

namespace heddle::ops::cuda {

// A copy of `host`, as many elements past a boundary of 256 bytes, with guards on both sides.
template <typename T>
class DeviceArray {
 public:
  using Stored = StorageType<T>;

  explicit DeviceArray(Array<T>& host, std::size_t offset = 0)
      : count_(host.size()), first_(kGuard + offset * sizeof(T)) {
    bytes_ = first_ + count_ * sizeof(T) + kGuard;
    CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&memory_), bytes_));
    CUDA_CHECK(cudaMemset(memory_, kGuardByte, bytes_));
    CUDA_CHECK(cudaMemcpy(data(), host.data(), count_ * sizeof(T), cudaMemcpyDefault));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() {
    std::vector<std::uint8_t> all(bytes_);
    LogIfFailed(cudaMemcpy(all.data(), memory_, bytes_, cudaMemcpyDefault), "cudaMemcpy");
    for (std::size_t i = 0; i < bytes_; ++i) {
      const bool inside = i >= first_ && i < first_ + count_ * sizeof(T);
      if (!inside && all[i] != kGuardByte) {
        ADD_FAILURE() << "wrote outside of the array, at byte "
                      << static_cast<std::ptrdiff_t>(i - first_);
        break;
      }
    }
    LogIfFailed(cudaFree(memory_), "cudaFree");
  }

  Stored* data() { return reinterpret_cast<Stored*>(memory_ + first_); }
  std::size_t size() const { return count_; }

  // Waits for the GPU.
  void CopyTo(Array<T>& host) {
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(host.data(), data(), count_ * sizeof(T), cudaMemcpyDefault));
  }
  void ExpectSameAs(Array<T>& expected, const char* what = "") {
    Array<T> host(count_);
    CopyTo(host);
    ExpectSame(host, expected, what);
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr std::uint8_t kGuardByte = 0xA5;

  std::size_t count_;
  std::size_t first_;
  std::size_t bytes_ = 0;
  std::uint8_t* memory_ = nullptr;
};

// Skips its tests, saying why, where there is no GPU.
class GpuKernelTest : public KernelTest {
 protected:
  void SetUp() override {
    if (GpuCount() == 0) GTEST_SKIP() << "no GPU: " << WhyNoGpu(0);
  }

  // Now and then many blocks.
  std::size_t RandomCountOfBlocks() { return Below(3) == 0 ? Below(3000000) : RandomCount(); }
};

}  // namespace heddle::ops::cuda
