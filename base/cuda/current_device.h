// The device that a thread's calls of CUDA go to.
//
// DESIGN. By contexts and not by cudaSetDevice: a thread that never chose a device has none, though
// cudaGetDevice says 0 there, and cudaSetDevice(0) at the end of a scope would make a context on
// gpu(0), some hundred MiB of it, in every process that uses another one. The contexts are the
// runtime's own (primary) ones, so its calls go by them.
//
// A capture (of a CUDA graph) in CUDA's default mode forbids all threads of the process the calls
// that it holds for unsafe, event queries and allocations among them, and such a call spoils it.
// What heddle calls has nothing to do with anybody's capture, so a thread that has entered a device
// is exempt.
#pragma once

#include <cuda.h>

namespace heddle {

// What a thread was in before it entered a device.
struct OuterDevice {
  CUcontext context = nullptr;  // null: none
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

// Makes `device` the calling thread's current one, for good or until LeaveDevice. The first call
// makes its context. Throws CudaError.
OuterDevice EnterDevice(int device);
// Silent when the driver is being unloaded; else logs what fails.
void LeaveDevice(OuterDevice outer) noexcept;

// Enters a device for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : outer_(EnterDevice(device)) {}
  ~DeviceGuard() { LeaveDevice(outer_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const OuterDevice outer_;
};

}  // namespace heddle
