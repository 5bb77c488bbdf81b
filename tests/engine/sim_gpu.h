// Simulated GPUs behind the engine's GpuDriver: a stream is a thread that runs "kernels" in order,
// after latencies drawn from a seed. Kernels are functions over plain memory, so the thread
// sanitizer sees an order that the engine forgot.
#pragma once

#include <heddle/gpu.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/gpu/driver.h"

namespace heddle::engine_test {

class SimGpu final : public internal::GpuDriver {
 public:
  SimGpu(int devices, std::uint64_t seed);
  ~SimGpu() override;  // every stream has been freed

  // From the body of a GPU op. A kernel that throws fails the device: nothing runs on it any more,
  // and its events report cudaErrorIllegalAddress.
  static void Launch(GpuStream stream, std::function<void()> kernel);
  // The next CheckLaunches of this thread throws CudaError with this name.
  static void FailLaunch(std::string name);

  std::set<int> devices_entered() const;
  int streams_made() const { return streams_made_; }
  int events_made() const { return events_made_; }

  int device_count() const override { return static_cast<int>(devices_.size()); }
  std::string WhyNoGpu(int id) const override;
  int Enter(int device) override;
  void Leave(int outer) noexcept override;
  Stream NewStream(bool urgent, int priority) override;
  Event NewEvent() override;
  void Free(int device, Stream stream) noexcept override;
  void FreeEvent(int device, Event event) noexcept override;
  void Record(Event event, Stream stream) override;
  void Wait(Stream stream, Event event) override;
  State Query(Event event) noexcept override;
  void Signal(Stream stream, void (*signal)(void*), void* context) override;
  void CheckLaunches() override;

 private:
  struct SimDevice {
    std::atomic<bool> failed{false};
    std::atomic<bool> entered{false};
  };
  struct SimEvent;
  class SimStream;
  struct Shared;  // by the driver and its streams

  std::vector<std::unique_ptr<SimDevice>> devices_;
  const std::shared_ptr<Shared> shared_;
  std::atomic<std::uint64_t> seed_;
  std::atomic<int> streams_made_{0}, events_made_{0};
  std::atomic<int> streams_left_{0}, events_left_{0};
};

}  // namespace heddle::engine_test
