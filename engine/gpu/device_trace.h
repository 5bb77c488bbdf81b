// What devices did and when, for traces: between the engine and whatever watches a device.
#pragma once

#include <cstdint>

namespace heddle::internal {

// A piece of work of an op on a device.
struct DeviceWork {
  enum class Kind : std::uint8_t { kKernel = 0, kCopy = 1, kFill = 2 };

  std::uint64_t op = 0;  // what Begin was given
  // By the device, on the host's steady clock.
  std::uint64_t started_ns = 0, ended_ns = 0;
  Kind kind{};
  int device = 0;
  std::uint32_t stream = 0;    // a number, each of one device has its own
  std::uint64_t bytes = 0;     // of copies and fills
  const char* name = nullptr;  // of a kernel, as linkers have it; lives as long as the process
};

class DeviceWorkSink {
 public:
  virtual ~DeviceWorkSink() = default;
  // Any thread, in any order, some time after the work is done.
  virtual void OnWork(const DeviceWork& work) noexcept = 0;
};

// One that runs. Threads: all methods, any thread.
class DeviceTrace {
 public:
  virtual ~DeviceTrace() = default;  // has been stopped

  // What the calling thread issues until End is of `op`. They come in pairs, none inside another.
  virtual void Begin(std::uint64_t op) noexcept = 0;
  virtual void End() noexcept = 0;
  // Hands the sink what is done by now, and nothing any more once it returns; does not wait for
  // devices. Begin and End do nothing from then on.
  virtual void Stop() noexcept = 0;
};

}  // namespace heddle::internal
