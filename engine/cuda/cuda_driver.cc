// The engine's GPUs by the CUDA runtime.
#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "base/cuda/check.h"
#include "base/cuda/current_device.h"
#include "base/gpus.h"
#include "base/mutex.h"
#include "engine/cuda/cupti_trace.h"
#include "engine/gpu/driver.h"

namespace heddle::internal {
namespace {

cudaStream_t AsStream(GpuDriver::Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(GpuDriver::Event event) { return static_cast<cudaEvent_t>(event); }

// Of one device. DESIGN. Blocks come from a pool of CUDA's of our own, allocated and freed in the
// order of one stream that does nothing else: unlike cudaFree this never waits for the device, and
// the pool puts freed blocks together again. A block is handed out once its allocation has
// happened, a few microseconds, so that all streams may use it; it is freed after its last use.
// The caches of storage/ lie above: what they give back is free memory again (release threshold
// 0), and in steady state nothing of this is called.
struct DeviceMemory {
  cudaMemPool_t pool = nullptr;
  cudaStream_t stream = nullptr;
};

class CudaDriver final : public GpuDriver {
 public:
  int device_count() const override { return GpuCount(); }
  std::string WhyNoGpu(int id) const override { return heddle::WhyNoGpu(id); }
  std::string UniqueName(int device) const override {
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    std::string name = "GPU-";  // as nvidia-smi -L shows it
    for (std::size_t i = 0; i < sizeof(properties.uuid.bytes); ++i) {
      if (i >= 4 && i <= 10 && i % 2 == 0) name += '-';
      name += fmt::format("{:02x}", static_cast<unsigned char>(properties.uuid.bytes[i]));
    }
    return name;
  }

  // What the thread's own calls have left is no error of what comes now.
  Context Enter(int device) override {
    cudaGetLastError();
    const OuterDevice outer = EnterDevice(device);
    return {.device = outer.context, .capture_mode = outer.capture_mode};
  }
  void Leave(Context outer) noexcept override {
    LeaveDevice({.context = static_cast<CUcontext>(outer.device),
                 .capture_mode = static_cast<CUstreamCaptureMode>(outer.capture_mode)});
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
  void Free(int device, Stream stream) noexcept override {
    On(device, [&] { LogIfFailed(cudaStreamDestroy(AsStream(stream)), "cudaStreamDestroy"); });
  }
  void FreeEvent(int device, Event event) noexcept override {
    On(device, [&] { LogIfFailed(cudaEventDestroy(AsEvent(event)), "cudaEventDestroy"); });
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
  void AwaitAll(int device) noexcept override {
    On(device, [&] { LogIfFailed(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); });
  }
  void CheckLaunches() override { CUDA_CHECK(cudaGetLastError()); }
  std::unique_ptr<DeviceTrace> TraceDevices(DeviceWorkSink& sink) noexcept override {
    return TraceByCupti(sink);
  }

  void* AllocateDevice(int device, std::int64_t bytes) override {
    const DeviceGuard guard(device);
    const DeviceMemory memory = MemoryOf(device);
    void* block = nullptr;
    const cudaError_t error = cudaMallocFromPoolAsync(&block, static_cast<std::size_t>(bytes),
                                                      memory.pool, memory.stream);
    if (IsNoMemory(error)) return nullptr;
    CUDA_CHECK(error);
    CUDA_CHECK(cudaStreamSynchronize(memory.stream));
    return block;
  }
  void FreeDevice(int device, void* block) noexcept override {
    On(device, [&] {
      LogIfFailed(cudaFreeAsync(block, ExistingMemoryOf(device).stream), "cudaFreeAsync");
    });
  }
  void TrimDevice(int device) noexcept override {
    const DeviceMemory memory = ExistingMemoryOf(device);
    if (memory.pool == nullptr) return;
    On(device, [&] {
      LogIfFailed(cudaStreamSynchronize(memory.stream), "cudaStreamSynchronize");
      LogIfFailed(cudaMemPoolTrimTo(memory.pool, 0), "cudaMemPoolTrimTo");
    });
  }
  void* AllocatePinned(int near, std::int64_t bytes) override {
    const DeviceGuard guard(near);
    void* block = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&block, static_cast<std::size_t>(bytes), cudaHostAllocPortable);
    if (IsNoMemory(error)) return nullptr;
    CUDA_CHECK(error);
    return block;
  }
  void FreePinned(int near, void* block) noexcept override {
    On(near, [&] { LogIfFailed(cudaFreeHost(block), "cudaFreeHost"); });
  }

  // Of pools the access is a property, which cudaDeviceEnablePeerAccess does not change.
  bool EnablePeer(int device, int peer) override {
    int linked = 0;
    CUDA_CHECK(cudaDeviceCanAccessPeer(&linked, device, peer));
    if (linked == 0) return false;
    const DeviceGuard guard(peer);
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = device;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    CUDA_CHECK(cudaMemPoolSetAccess(MemoryOf(peer).pool, &access, 1));
    return true;
  }
  GpuLink LinkOf(int device, int peer) noexcept override {
    const auto ask = [&](cudaDeviceP2PAttr attribute) {
      int value = 0;
      LogIfFailed(cudaDeviceGetP2PAttribute(&value, attribute, device, peer),
                  "cudaDeviceGetP2PAttribute");
      return value;
    };
    return {.access = ask(cudaDevP2PAttrAccessSupported) != 0,
            .native_atomics = ask(cudaDevP2PAttrNativeAtomicSupported) != 0,
            .rank = ask(cudaDevP2PAttrPerformanceRank)};
  }
  void Copy(Stream stream, void* to, const void* from, std::int64_t bytes) override {
    CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                               AsStream(stream)));
  }
  void CopyPeer(Stream stream, int /*to_device*/, void* to, int /*from_device*/, const void* from,
                std::int64_t bytes) override {
    // Not cudaMemcpyPeerAsync: what pools let others access, cudaMemPoolSetAccess says to this one.
    Copy(stream, to, from, bytes);
  }

 private:
  // An answer, not an error that a later check of a launch should find.
  static bool IsNoMemory(cudaError_t error) {
    if (error != cudaErrorMemoryAllocation) return false;
    cudaGetLastError();
    return true;
  }

  // Gives something back while `device`, which has a context, is current: on a thread that has none
  // the runtime would make one, on gpu(0).
  template <class Free>
  static void On(int device, Free&& free) noexcept {
    try {
      const DeviceGuard guard(device);
      free();
    } catch (const CudaError& error) {
      LogIfFailed(static_cast<cudaError_t>(error.code()), "entering a device");
    }
  }

  // Made by the first call, on the current device.
  DeviceMemory MemoryOf(int device) {
    const MutexLock lock(mutex_);
    memories_.resize(std::max(memories_.size(), static_cast<std::size_t>(device) + 1));
    DeviceMemory& memory = memories_[static_cast<std::size_t>(device)];
    if (memory.pool == nullptr) {
      if (memory.stream == nullptr) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&memory.stream, cudaStreamNonBlocking));
      }
      cudaMemPoolProps properties{};
      properties.allocType = cudaMemAllocationTypePinned;  // what CUDA calls memory that stays put
      properties.location.type = cudaMemLocationTypeDevice;
      properties.location.id = device;
      CUDA_CHECK(cudaMemPoolCreate(&memory.pool, &properties));
    }
    return memory;
  }
  DeviceMemory ExistingMemoryOf(int device) noexcept {
    const MutexLock lock(mutex_);
    const auto index = static_cast<std::size_t>(device);
    return index < memories_.size() ? memories_[index] : DeviceMemory{};
  }

  Mutex mutex_;
  std::vector<DeviceMemory> memories_ GUARDED_BY(mutex_);  // of devices that had blocks
};

}  // namespace

const std::shared_ptr<GpuDriver>& DefaultGpuDriver() {
  static const auto* const driver = new std::shared_ptr<GpuDriver>(std::make_shared<CudaDriver>());
  return *driver;
}

}  // namespace heddle::internal
