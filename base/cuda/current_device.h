// The device that a thread's calls of CUDA go to.
//
// DESIGN. By contexts and not by cudaSetDevice: a thread that never chose a device has none, though
// cudaGetDevice says 0 there, and cudaSetDevice(0) at the end of a scope would make a context on
// gpu(0), some hundred MiB of it, in every process that uses another one. The contexts are the
// runtime's own (primary) ones, so its calls go by them.
#pragma once

#include <cuda.h>

namespace heddle {

// Makes `device` the calling thread's current one, for good or until LeaveDevice. The first call
// makes its context. Returns the outer context, null if the thread had none. Throws CudaError.
CUcontext EnterDevice(int device);
// Silent when the driver is being unloaded; else logs what fails.
void LeaveDevice(CUcontext outer) noexcept;

// Enters a device for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : outer_(EnterDevice(device)) {}
  ~DeviceGuard() { LeaveDevice(outer_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const CUcontext outer_;
};

}  // namespace heddle
