// The memory of simulated GPUs. What the host is given are addresses that nobody can touch; the
// bytes lie elsewhere, and only what runs on a simulated stream finds them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>

namespace heddle::engine_test {

// Checks, and ends the process otherwise: blocks are used within their bounds, by devices that
// reach them, until they are freed, and not freed while something that uses them has not run.
// Threads: all methods, any thread.
class SimMemory {
 public:
  SimMemory();
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  // Of a device, or pinned (kPinned). Null: more than `bytes_max` would be in use there.
  void* Allocate(int device, std::int64_t bytes, std::int64_t bytes_max);
  void Free(int device, const void* block);
  std::int64_t bytes_used(int device) const;

  void Link(int device, int peer);

  // Announces the use of these blocks, until the result is dropped.
  std::shared_ptr<void> Use(std::span<const void* const> addresses);
  // Where `bytes` bytes at `address` lie, for what runs on `device`.
  std::byte* Find(int device, const void* address, std::int64_t bytes) const;

  static constexpr int kPinned = -1;

 private:
  struct Block {
    int device;
    std::int64_t bytes;
    std::unique_ptr<std::byte[]> values;  // null: pinned, the address is good
    int uses = 0;
  };
  using Blocks = std::map<const std::byte*, Block>;

  Blocks::const_iterator FindLocked(const void* address, std::int64_t bytes) const;

  mutable std::mutex mutex_;
  std::byte* const region_;  // that nobody may touch
  std::byte* next_;          // no address is given out twice
  Blocks blocks_;
  std::map<int, std::int64_t> used_;
  std::set<std::pair<int, int>> links_;
};

}  // namespace heddle::engine_test
