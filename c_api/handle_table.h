// The objects behind the opaque handles of the C API.
//
// A handle is a number, never an address: generation (32 bits), index (28) and the tag of its kind
// (4). Freeing raises the generation of the index, so an old handle finds nothing, whatever lies at
// its index now (until 2^32 later frees of that very index). Objects are counted handles
// themselves, so a lookup gives a copy, and a handle may be freed while another thread uses it.
//
// Threads: all methods, any thread. Objects are destroyed outside of the locks.
#pragma once

#include <heddle/error.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace heddle::c_api {

template <class Object>
class HandleTable {
 public:
  // Tags are 1 to 15, another one for each table.
  explicit constexpr HandleTable(std::uint64_t tag) : tag_(tag) {}

  // Never 0. OutOfMemory when 2^28 objects are there.
  std::uint64_t Insert(Object object) {
    // relaxed: only spreads the objects
    const std::uint64_t turn = next_shard_.fetch_add(1, std::memory_order_relaxed) % kShards;
    Shard& shard = shards_[turn];
    MutexLock lock(shard.mutex);
    if (shard.free.empty()) GrowLocked(shard);
    const std::uint32_t place = shard.free.back();
    Slot& slot = shard.slots[place];
    slot.object.emplace(std::move(object));
    shard.free.pop_back();
    return std::uint64_t{slot.generation} << 32 | (place * kShards + turn) << kTagBits | tag_;
  }

  std::optional<Object> Find(std::uint64_t handle) {
    Shard& shard = ShardOf(handle);
    MutexLock lock(shard.mutex);
    const Slot* slot = FindLocked(shard, handle);
    return slot != nullptr ? slot->object : std::nullopt;
  }

  // Finds it for the last time.
  std::optional<Object> Take(std::uint64_t handle) {
    Shard& shard = ShardOf(handle);
    MutexLock lock(shard.mutex);
    Slot* slot = FindLocked(shard, handle);
    if (slot == nullptr) return std::nullopt;
    ++slot->generation;
    shard.free.push_back(PlaceOf(handle));  // GrowLocked has made room
    return std::exchange(slot->object, std::nullopt);
  }

  bool HasTag(std::uint64_t handle) const { return (handle & kTagMask) == tag_; }

 private:
  static constexpr std::uint64_t kTagBits = 4;
  static constexpr std::uint64_t kTagMask = (1 << kTagBits) - 1;
  static constexpr std::uint64_t kShards = 16;
  static constexpr std::uint64_t kIndices = std::uint64_t{1} << 28;

  struct Slot {
    std::uint32_t generation = 1;
    std::optional<Object> object;
  };
  struct alignas(64) Shard {
    Mutex mutex;
    std::deque<Slot> slots GUARDED_BY(mutex);
    std::vector<std::uint32_t> free GUARDED_BY(mutex);  // has room for all slots
  };

  static std::uint64_t IndexOf(std::uint64_t handle) { return (handle & 0xFFFF'FFFF) >> kTagBits; }
  static std::uint32_t PlaceOf(std::uint64_t handle) {
    return static_cast<std::uint32_t>(IndexOf(handle) / kShards);
  }
  Shard& ShardOf(std::uint64_t handle) { return shards_[IndexOf(handle) % kShards]; }

  Slot* FindLocked(Shard& shard, std::uint64_t handle) const REQUIRES(shard.mutex) {
    const std::uint32_t place = PlaceOf(handle);
    if (!HasTag(handle) || place >= shard.slots.size()) return nullptr;
    Slot& slot = shard.slots[place];
    return slot.generation == handle >> 32 && slot.object ? &slot : nullptr;
  }

  static void GrowLocked(Shard& shard) REQUIRES(shard.mutex) {
    const std::size_t count = shard.slots.size();
    if (count == kIndices / kShards)
      throw OutOfMemory("expected fewer than 2^28 handles of a kind");
    if (shard.free.capacity() <= count) shard.free.reserve(2 * count + 16);
    shard.slots.emplace_back();
    shard.free.push_back(static_cast<std::uint32_t>(count));
  }

  const std::uint64_t tag_;
  std::atomic<std::uint64_t> next_shard_{0};
  std::array<Shard, kShards> shards_;
};

}  // namespace heddle::c_api
