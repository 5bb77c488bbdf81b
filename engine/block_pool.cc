#include "engine/block_pool.h"

#include <array>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#include "base/prefetch.h"
#include "base/sanitizers.h"
#include "engine/fork.h"
#include "engine/tls.h"

namespace heddle::engine {
namespace {

// The sanitizer finds a use after free only in memory of its own.
constexpr bool kUseHeap = kAddressSanitizer;

constexpr int kMagazineSizeMax = 64;
// Blocks that few ops have are kept by the dozen: what a thread keeps others cannot have, and one
// that seldom frees takes minutes to come to all that it keeps.
constexpr int kMagazineSizeOfLarge = 16;
constexpr std::size_t kLargeBytes = 320;
constexpr std::size_t kSlabBytes = std::size_t{256} << 10;
constexpr int kPrefetchDistance = 4;

void* HeapAllocate(std::size_t bytes) {
  return ::operator new (bytes, std::align_val_t{kBlockAlign});
}

struct Magazine {
  explicit Magazine(std::size_t block_bytes)
      : size(block_bytes < kLargeBytes ? kMagazineSizeMax : kMagazineSizeOfLarge) {}

  Magazine* next = nullptr;
  int count = 0;
  const int size;
  std::array<void*, kMagazineSizeMax> blocks;
};

// Full and empty magazines of one size, and the slab that new blocks are cut from.
class Depot {
 public:
  void SetBlockBytes(std::size_t bytes) { block_bytes_ = bytes; }

  // Takes `empty` (may be null) and returns a magazine with at least one block.
  Magazine* ExchangeEmpty(Magazine* empty) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (full_ != nullptr) {
      if (empty != nullptr) Link(empty_, empty);
      return Unlink(full_);
    }
    if (empty == nullptr) empty = TakeEmptyLocked();
    if (slab_left_ < block_bytes_) {
      slab_ = static_cast<std::byte*>(HeapAllocate(kSlabBytes));
      slab_left_ = kSlabBytes;
    }
    while (empty->count < empty->size && slab_left_ >= block_bytes_) {
      slab_left_ -= block_bytes_;
      // From the high end down: blocks are handed out from the top of the magazine, so in rising
      // order.
      empty->blocks[static_cast<std::size_t>(empty->count++)] = slab_ + slab_left_;
    }
    return empty;
  }

  // Takes `full` (may be null) and returns a magazine with room.
  Magazine* ExchangeFull(Magazine* full) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (full != nullptr) Link(full_, full);
    return TakeEmptyLocked();
  }

  void Return(Magazine* magazine) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Link(magazine->count > 0 ? full_ : empty_, magazine);
  }

 private:
  Magazine* TakeEmptyLocked() {
    return empty_ != nullptr ? Unlink(empty_) : new Magazine(block_bytes_);
  }

  static void Link(Magazine*& list, Magazine* magazine) {
    magazine->next = list;
    list = magazine;
  }
  static Magazine* Unlink(Magazine*& list) {
    Magazine* magazine = list;
    list = magazine->next;
    return magazine;
  }

  std::size_t block_bytes_ = 0;
  std::mutex mutex_;
  Magazine* full_ = nullptr;
  Magazine* empty_ = nullptr;
  std::byte* slab_ = nullptr;
  std::size_t slab_left_ = 0;
};

// Never destroyed: threads that end after static destruction still return their magazines.
std::array<Depot, kBlockClasses>& Depots() {
  static auto* depots = [] {
    auto* made = new std::array<Depot, kBlockClasses>;
    for (std::size_t c = 0; c < made->size(); ++c) (*made)[c].SetBlockBytes((c + 1) * kBlockAlign);
    return made;
  }();
  return *depots;
}

// Two magazines a size, so that a thread that alternates at a magazine's edge does not visit the
// depot each time.
struct Cache {
  struct Pair {
    Magazine* active = nullptr;
    Magazine* spare = nullptr;
  };
  std::array<Pair, kBlockClasses> pairs;
};

HEDDLE_TLS Cache* tls_cache = nullptr;
HEDDLE_TLS bool tls_cache_closed = false;

struct CacheCloser {
  ~CacheCloser() {
    tls_cache_closed = true;
    Cache* cache = std::exchange(tls_cache, nullptr);
    if (cache == nullptr || InForkedChild()) return;  // the depots may be locked for ever
    for (std::size_t c = 0; c < cache->pairs.size(); ++c) {
      for (Magazine* magazine : {cache->pairs[c].active, cache->pairs[c].spare}) {
        if (magazine != nullptr) Depots()[c].Return(magazine);
      }
    }
    delete cache;
  }
};

// Null once the thread is exiting: then every call goes to the depot.
Cache* OpenCache() {
  if (tls_cache_closed) return nullptr;
  static thread_local CacheCloser closer;
  (void)closer;
  tls_cache = new Cache;
  return tls_cache;
}

void* AllocateSlow(Cache* cache, std::size_t c) {
  if (cache == nullptr) cache = OpenCache();
  if (cache == nullptr) {
    Magazine* magazine = Depots()[c].ExchangeEmpty(nullptr);
    void* block = magazine->blocks[static_cast<std::size_t>(--magazine->count)];
    Depots()[c].Return(magazine);
    return block;
  }
  Cache::Pair& pair = cache->pairs[c];
  std::swap(pair.active, pair.spare);
  if (pair.active == nullptr || pair.active->count == 0) {
    pair.active = Depots()[c].ExchangeEmpty(pair.active);
  }
  return pair.active->blocks[static_cast<std::size_t>(--pair.active->count)];
}

void FreeSlow(Cache* cache, void* block, std::size_t c) {
  if (cache == nullptr) cache = OpenCache();
  if (cache == nullptr) {
    Magazine* magazine = Depots()[c].ExchangeFull(nullptr);
    magazine->blocks[0] = block;
    magazine->count = 1;
    Depots()[c].Return(magazine);
    return;
  }
  Cache::Pair& pair = cache->pairs[c];
  std::swap(pair.active, pair.spare);
  if (pair.active == nullptr || pair.active->count == pair.active->size) {
    pair.active = Depots()[c].ExchangeFull(pair.active);
  }
  pair.active->blocks[static_cast<std::size_t>(pair.active->count++)] = block;
}

}  // namespace

void* AllocateBlock(int block_class, std::size_t bytes) {
  if (kUseHeap || block_class >= kBlockClasses) return HeapAllocate(bytes);
  const auto c = static_cast<std::size_t>(block_class);
  Cache* cache = tls_cache;
  if (cache == nullptr) return AllocateSlow(nullptr, c);
  Magazine* magazine = cache->pairs[c].active;
  if (magazine == nullptr || magazine->count == 0) return AllocateSlow(cache, c);
  const int index = --magazine->count;
  if (index >= kPrefetchDistance) {
    void* soon = magazine->blocks[static_cast<std::size_t>(index - kPrefetchDistance)];
    for (std::size_t line = 0; line <= c; ++line) {
      PrefetchForWrite(static_cast<std::byte*>(soon) + line * kBlockAlign);
    }
  }
  return magazine->blocks[static_cast<std::size_t>(index)];
}

void FreeBlock(void* block, int block_class) noexcept {
  if (kUseHeap || block_class >= kBlockClasses) {
    ::operator delete (block, std::align_val_t{kBlockAlign});
    return;
  }
  const auto c = static_cast<std::size_t>(block_class);
  Cache* cache = tls_cache;
  if (cache == nullptr) return FreeSlow(nullptr, block, c);
  Magazine* magazine = cache->pairs[c].active;
  if (magazine == nullptr || magazine->count == magazine->size) return FreeSlow(cache, block, c);
  magazine->blocks[static_cast<std::size_t>(magazine->count++)] = block;
}

}  // namespace heddle::engine
