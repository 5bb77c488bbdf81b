#include "base/cuda/current_device.h"

#include <atomic>
#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>

#include "base/cuda/check.h"
#include "base/gpus.h"

namespace heddle {
namespace {

// The runtime's codes are the driver's wherever both have one.
cudaError_t AsRuntimeError(CUresult result) { return static_cast<cudaError_t>(result); }

void CheckDriver(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) ThrowCudaError(AsRuntimeError(result), call);
}

template <class Call>
void Find(const char* name, Call* call) {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer{};
#if CUDART_VERSION >= 12050
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &answer));
#else
  CUDA_CHECK(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &answer));
#endif
  if (answer != cudaDriverEntryPointSuccess) ThrowCudaError(cudaErrorSymbolNotFound, name);
  *call = reinterpret_cast<Call>(found);
}

// Of the driver's library, which the runtime loads: nothing links to it, for machines without one.
struct Driver {
  decltype(&cuCtxGetCurrent) get_current = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;
  decltype(&cuDeviceGet) get_device = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode = nullptr;

  Driver() {
    Find("cuCtxGetCurrent", &get_current);
    Find("cuCtxSetCurrent", &set_current);
    Find("cuDeviceGet", &get_device);
    Find("cuDevicePrimaryCtxRetain", &retain);
    Find("cuThreadExchangeStreamCaptureMode", &exchange_capture_mode);
  }
  static const Driver& Get() {
    static const Driver driver;
    return driver;
  }
};

// Made by the first call and kept as long as the process lives.
CUcontext ContextOf(int device) {
  static auto* const contexts =
      new std::vector<std::atomic<CUcontext>>(static_cast<std::size_t>(GpuCount()));
  const auto index = static_cast<std::size_t>(device);
  if (index < contexts->size()) {
    const CUcontext made = (*contexts)[index].load(std::memory_order_acquire);
    if (made != nullptr) return made;
  }
  CUDA_CHECK(cudaInitDevice(device, 0, 0));  // also of what the runtime keeps of it
  const Driver& driver = Driver::Get();
  CUdevice handle = 0;
  CheckDriver(driver.get_device(&handle, device), "cuDeviceGet");
  CUcontext context = nullptr;
  CheckDriver(driver.retain(&context, handle), "cuDevicePrimaryCtxRetain");
  contexts->at(index).store(context, std::memory_order_release);  // by all threads the same one
  return context;
}

}  // namespace

OuterDevice EnterDevice(int device) {
  // When the process ends, the runtime knows that the driver is gone, which is not to be called.
  int unused = 0;
  CUDA_CHECK(cudaGetDevice(&unused));
  const CUcontext context = ContextOf(device);
  const Driver& driver = Driver::Get();
  OuterDevice outer{.capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED};
  CheckDriver(driver.get_current(&outer.context), "cuCtxGetCurrent");
  if (outer.context != context) CheckDriver(driver.set_current(context), "cuCtxSetCurrent");
  LogIfFailed(AsRuntimeError(driver.exchange_capture_mode(&outer.capture_mode)),
              "cuThreadExchangeStreamCaptureMode");
  return outer;
}

// A null context takes away what EnterDevice has set.
void LeaveDevice(OuterDevice outer) noexcept {
  const Driver& driver = Driver::Get();
  LogIfFailed(AsRuntimeError(driver.exchange_capture_mode(&outer.capture_mode)),
              "cuThreadExchangeStreamCaptureMode");
  CUcontext current = nullptr;
  LogIfFailed(AsRuntimeError(driver.get_current(&current)), "cuCtxGetCurrent");
  if (current != outer.context) {
    LogIfFailed(AsRuntimeError(driver.set_current(outer.context)), "cuCtxSetCurrent");
  }
}

}  // namespace heddle
