// Time for the watchdog of a group of devices.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "kvstore/nccl/device_group.h"

namespace heddle::kvstore_test {

// A clock that stands still, or goes on by a minute whenever somebody looks.
class FakeClock {
 public:
  kvstore::DeviceGroupOptions WithDeadline() {
    return {.deadline = std::chrono::milliseconds(50), .now = [this] {
              const int minutes = runs_ ? ++minutes_ : minutes_.load();
              return kvstore::DeviceGroup::Clock::time_point() + std::chrono::minutes(minutes);
            }};
  }
  void Run(bool run = true) { runs_ = run; }
  void AwaitLooks(int looks) const {
    for (const int from = minutes_; minutes_ < from + looks;) std::this_thread::yield();
  }

 private:
  std::atomic<bool> runs_{false};
  std::atomic<int> minutes_{0};
};

}  // namespace heddle::kvstore_test
