// The engine's GPUs by the CUDA runtime.
#include <heddle/error.h>

#include <algorithm>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "base/cuda/check.h"
#include "base/gpus.h"
#include "engine/gpu/driver.h"

namespace heddle::internal {
namespace {

cudaStream_t AsStream(GpuDriver::Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(GpuDriver::Event event) { return static_cast<cudaEvent_t>(event); }

class CudaDriver final : public GpuDriver {
 public:
  int device_count() const override { return GpuCount(); }
  std::string WhyNoGpu(int id) const override { return heddle::WhyNoGpu(id); }

  int Enter(int device) override {
    int outer = device;
    CUDA_CHECK(cudaGetDevice(&outer));
    if (outer != device) CUDA_CHECK(cudaSetDevice(device));
    return outer;
  }
  void Leave(int outer) noexcept override {
    int current = outer;
    LogIfFailed(cudaGetDevice(&current), "cudaGetDevice");
    if (current != outer) LogIfFailed(cudaSetDevice(outer), "cudaSetDevice");
  }

  Stream NewStream(bool urgent, int priority) override {
    int least = 0;
    int greatest = 0;  // lower numbers go first
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    const int asked = urgent ? greatest : std::clamp(priority, greatest, least);
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, asked));
    return stream;
  }
  Event NewEvent() override {
    cudaEvent_t event = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void Free(int, Stream stream) noexcept override {
    LogIfFailed(cudaStreamDestroy(AsStream(stream)), "cudaStreamDestroy");
  }
  void FreeEvent(int, Event event) noexcept override {
    LogIfFailed(cudaEventDestroy(AsEvent(event)), "cudaEventDestroy");
  }

  void Record(Event event, Stream stream) override {
    CUDA_CHECK(cudaEventRecord(AsEvent(event), AsStream(stream)));
  }
  void Wait(Stream stream, Event event) override {
    CUDA_CHECK(cudaStreamWaitEvent(AsStream(stream), AsEvent(event), 0));
  }
  State Query(Event event) noexcept override {
    const cudaError_t state = cudaEventQuery(AsEvent(event));
    if (state == cudaSuccess) return {.happened = true};
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // an answer, not an error that a later check of a launch should find
      return {};
    }
    return {.error = std::make_exception_ptr(
                CudaError(fmt::format("the GPU reports {}", DescribeCudaError(state)), state))};
  }
  void Signal(Stream stream, void (*signal)(void*), void* context) override {
    CUDA_CHECK(cudaLaunchHostFunc(AsStream(stream), signal, context));
  }
  void CheckLaunches() override { CUDA_CHECK(cudaGetLastError()); }
};

}  // namespace

std::shared_ptr<GpuDriver> DefaultGpuDriver() { return std::make_shared<CudaDriver>(); }

}  // namespace heddle::internal
