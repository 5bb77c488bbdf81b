// How fast updates by one optimizer are, as the last ones were.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace heddle::kvstore::dist {

// Threads: any.
class UpdatePace {
 public:
  // Whether an update of so many bytes takes no longer than `time`; not as long as none is known.
  bool Takes(std::int64_t bytes, std::chrono::nanoseconds time) const {
    const double pace = ns_per_byte_.load(std::memory_order_relaxed);
    return pace > 0 && pace * static_cast<double>(bytes) <= static_cast<double>(time.count());
  }
  // One that has waited for a CPU says little: each counts for an eighth.
  void Note(std::int64_t bytes, std::chrono::nanoseconds took) {
    const double now = static_cast<double>(took.count()) / static_cast<double>(bytes);
    const double before = ns_per_byte_.load(std::memory_order_relaxed);
    ns_per_byte_.store(before > 0 ? before + (now - before) / 8 : now, std::memory_order_relaxed);
  }

 private:
  std::atomic<double> ns_per_byte_{0};
};

}  // namespace heddle::kvstore::dist
