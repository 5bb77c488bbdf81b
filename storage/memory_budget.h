// The books of one allocator: how much it holds, how much of that is in use, and the cap.
#pragma once

#include <heddle/memory.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace heddle::storage {

// For errors: how many bytes were asked for, and how many that takes if it is more.
std::string AskedFor(std::int64_t bytes, std::int64_t block_bytes);

// Threads: all methods, any thread. Counters are relaxed: they order nothing, and stats() may see
// an allocation in progress.
class MemoryBudget {
 public:
  // `name`: whose memory it is, for errors.
  MemoryBudget(std::int64_t bytes_max, std::string name)
      : name_(std::move(name)), bytes_max_(bytes_max) {}

  // Books `bytes` taken from the system; false if that would exceed the cap.
  [[nodiscard]] bool Reserve(std::int64_t bytes);
  void Unreserve(std::int64_t bytes) { held_.fetch_sub(bytes, std::memory_order_relaxed); }

  // Books reserved bytes as in use, and no longer so.
  void Use(std::int64_t bytes);
  void Unuse(std::int64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  void set_bytes_max(std::int64_t bytes_max) {
    bytes_max_.store(bytes_max, std::memory_order_relaxed);
  }
  MemoryStats stats() const;

  // A block of `block_bytes`, for the `bytes` asked for, did not fit under the cap; or fitted, and
  // there was no more.
  [[noreturn]] void ThrowOverCap(std::int64_t bytes, std::int64_t block_bytes) const;
  [[noreturn]] void ThrowSystemEmpty(std::int64_t bytes, std::int64_t block_bytes) const;

 private:
  const std::string name_;
  std::atomic<std::int64_t> bytes_max_;
  std::atomic<std::int64_t> held_{0};  // used and cached
  std::atomic<std::int64_t> used_{0};
  std::atomic<std::int64_t> peak_{0};
};

}  // namespace heddle::storage
