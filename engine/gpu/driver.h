// What the engine and the arrays need of GPUs: the one place between their bookkeeping and CUDA.
// Tests put simulated devices here.
//
// Errors: calls throw CudaError if not said otherwise.
// Threads: all methods, any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "engine/gpu/device_trace.h"

namespace heddle::internal {

// How one device reaches the memory of another one.
struct GpuLink {
  bool access = false;          // by itself, else by way of the host
  bool native_atomics = false;  // NVLink has them, PCIe does not
  int rank = 0;                 // among the links of the machine; 0: the fastest
};

class GpuDriver {
 public:
  using Stream = void*;
  using Event = void*;

  // What a thread is in; as the driver tells it, who alone knows the values.
  struct Context {
    void* device = nullptr;  // the current one's; null: no device is current
    int capture_mode = 0;    // what captures of others forbid the thread
  };
  // What an event says.
  struct State {
    bool happened = false;
    std::exception_ptr error{};  // the device has failed; events on it never happen any more
  };

  virtual ~GpuDriver() = default;

  // gpu(0) to gpu(count - 1) may be named. Makes no context on any.
  virtual int device_count() const = 0;
  virtual std::string WhyNoGpu(int id) const = 0;
  // Of the GPU behind gpu(device), which is there: the same in all processes that have it, and no
  // other GPU's, on whatever host.
  virtual std::string UniqueName(int device) const = 0;

  // Makes `device` the calling thread's current one, and exempts the thread from what captures (of
  // CUDA graphs) forbid; returns what was, for Leave. Neither makes a context on another device.
  virtual Context Enter(int device) = 0;
  virtual void Leave(Context outer) noexcept = 0;

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
  // How long what may wait for an event of a device that has failed is given to end: nobody can
  // tell whether that event had happened before.
  virtual std::chrono::milliseconds patience() const { return std::chrono::seconds(10); }
  // Returns when all that anybody, heddle or others, has issued on the device so far is done, or
  // will never be.
  virtual void AwaitAll(int device) noexcept = 0;
  // Throws what launches of this thread have reported since the last call.
  virtual void CheckLaunches() = 0;

  // Watches what is issued on all devices from now on, for `sink`, which outlives what is returned.
  // Null: it cannot, and has said why in the log, once.
  virtual std::unique_ptr<DeviceTrace> TraceDevices(DeviceWorkSink& /*sink*/) noexcept {
    return nullptr;
  }

  // --- memory. Whatever device is current. ---

  // A block of `device`, which every stream may use from now on; null: it has no more.
  virtual void* AllocateDevice(int device, std::int64_t bytes) = 0;
  // Takes back a block that nothing issued uses any more. Does not wait for the device.
  virtual void FreeDevice(int device, void* block) noexcept = 0;
  // Gives the device what the blocks that were taken back have left.
  virtual void TrimDevice(int device) noexcept = 0;
  // Host memory that all devices copy from and to by themselves; null: there is no more. `near`:
  // the one device that may get a context by this. Slow, and so is giving it back.
  virtual void* AllocatePinned(int near, std::int64_t bytes) = 0;
  virtual void FreePinned(int near, void* block) noexcept = 0;

  // --- copies, in the order of a stream whose device is current ---

  // Lets streams of `device` copy from and to blocks of `peer`, where the two are linked. False:
  // they are not.
  virtual bool EnablePeer(int device, int peer) = 0;
  // Of two different devices; no access where the driver does not tell. Makes no context on either.
  virtual GpuLink LinkOf(int device, int peer) noexcept = 0;
  // Between memory of the stream's device and itself or pinned memory.
  virtual void Copy(Stream stream, void* to, const void* from, std::int64_t bytes) = 0;
  // Between two devices after EnablePeer; the stream is one of `to_device`.
  virtual void CopyPeer(Stream stream, int to_device, void* to, int from_device, const void* from,
                        std::int64_t bytes) = 0;
};

// CUDA's; without CUDA one that has no devices and says why. One a process, never deleted: arrays
// may be dropped by destructors of static objects.
const std::shared_ptr<GpuDriver>& DefaultGpuDriver();

}  // namespace heddle::internal
