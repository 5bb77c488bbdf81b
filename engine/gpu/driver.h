// What the engine needs of GPUs: the one place between its bookkeeping and CUDA. Tests put a
// simulated device here.
//
// Errors: calls throw CudaError if not said otherwise.
// Threads: all methods, any thread.
#pragma once

#include <exception>
#include <memory>
#include <string>

namespace heddle::internal {

class GpuDriver {
 public:
  using Stream = void*;
  using Event = void*;

  // What an event says.
  struct State {
    bool happened = false;
    std::exception_ptr error{};  // the device has failed; events on it never happen any more
  };

  virtual ~GpuDriver() = default;

  // gpu(0) to gpu(count - 1) may be named. Makes no context on any.
  virtual int device_count() const = 0;
  virtual std::string WhyNoGpu(int id) const = 0;

  // Makes `device` the calling thread's current one; returns the outer one, for Leave.
  virtual int Enter(int device) = 0;
  virtual void Leave(int outer) noexcept = 0;

  // On the current device. `urgent`: with the highest priority that the device has.
  virtual Stream NewStream(bool urgent, int priority) = 0;
  virtual Event NewEvent() = 0;
  // Of any device, which may have failed and the driver be gone: logs, if at all.
  virtual void Free(int device, Stream stream) noexcept = 0;
  virtual void FreeEvent(int device, Event event) noexcept = 0;

  virtual void Record(Event event, Stream stream) = 0;
  // What is issued on `stream` from now on waits for `event`, which may be of another device.
  virtual void Wait(Stream stream, Event event) = 0;
  virtual State Query(Event event) noexcept = 0;
  // Calls signal(context) on a thread of the driver when what was issued on `stream` is done; may
  // never do so if the device fails.
  virtual void Signal(Stream stream, void (*signal)(void*), void* context) = 0;
  // Throws what launches of this thread have reported since the last call.
  virtual void CheckLaunches() = 0;
};

// CUDA's; without CUDA one that has no devices and says why.
std::shared_ptr<GpuDriver> DefaultGpuDriver();

}  // namespace heddle::internal
