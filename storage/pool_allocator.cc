// The caching allocator. Free blocks wait in one list per size class, last freed first, because its
// lines are the likeliest to be in a cache still.
//
// The link of a list lies in the free block itself: freeing needs no memory and cannot fail.
//
// Under AddressSanitizer free blocks are poisoned, except for the link, which the leak check
// follows, and so is what a block has beyond the bytes asked for.
#include <array>
#include <cstddef>
#include <utility>

#include "base/check.h"
#include "base/mutex.h"
#include "base/sanitizers.h"
#include "base/system_memory.h"
#include "storage/allocator.h"
#include "storage/memory_budget.h"
#include "storage/size_class.h"

#if HEDDLE_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace heddle::storage {
namespace {

struct FreeBlock {
  FreeBlock* next;
};

class PoolAllocator final : public Allocator {
 public:
  explicit PoolAllocator(std::int64_t bytes_max) : budget_(bytes_max, "array memory") {}
  ~PoolAllocator() override { Trim(); }

  void* Allocate(std::int64_t bytes) override {
    if (bytes > kBlockBytesMax) budget_.ThrowOverCap(bytes, bytes);
    const SizeClass size = ClassOf(bytes);
    void* block = Pop(size);
    if (block == nullptr) block = TakeFresh(size.bytes, bytes);
    budget_.Use(size.bytes);
    ASAN_UNPOISON_MEMORY_REGION(block, static_cast<std::size_t>(bytes));
    return block;
  }

  std::int64_t BlockBytes(std::int64_t bytes) const override { return PoolBlockBytes(bytes); }

  void Free(void* block, std::int64_t bytes) noexcept override {
    const SizeClass size = ClassOf(bytes);
    budget_.Unuse(size.bytes);
    auto* const free = static_cast<FreeBlock*>(block);
    List& list = lists_[static_cast<std::size_t>(size.index)];
    // What was asked for may be shorter than the link.
    ASAN_UNPOISON_MEMORY_REGION(block, sizeof(FreeBlock));
    MutexLock lock(list.mutex);
    free->next = list.first;
    list.first = free;
    ASAN_POISON_MEMORY_REGION(free + 1, static_cast<std::size_t>(size.bytes) - sizeof(FreeBlock));
  }

  std::int64_t Trim() override {
    MutexLock lock(trim_mutex_);
    return TrimLocked();
  }

  void set_bytes_max(std::int64_t bytes_max) override { budget_.set_bytes_max(bytes_max); }
  MemoryStats stats() const override { return budget_.stats(); }

 private:
  struct alignas(64) List {
    Mutex mutex;
    FreeBlock* first GUARDED_BY(mutex) = nullptr;
  };

  void* Pop(SizeClass size) {
    List& list = lists_[static_cast<std::size_t>(size.index)];
    MutexLock lock(list.mutex);
    FreeBlock* const block = list.first;
    if (block == nullptr) return nullptr;
    list.first = block->next;
    return block;
  }

  // Under the lock to its end: whoever then finds the cap reached, or the system empty, knows that
  // no block which another thread took off its list is still on its way back.
  std::int64_t TrimLocked() REQUIRES(trim_mutex_) {
    std::int64_t trimmed = 0;
    for (int index = 0; index < kSizeClasses; ++index) {
      const std::int64_t bytes = BytesOfClass(index);
      FreeBlock* block = nullptr;
      {
        List& list = lists_[static_cast<std::size_t>(index)];
        MutexLock lock(list.mutex);
        block = std::exchange(list.first, nullptr);
      }
      while (block != nullptr) {
        ASAN_UNPOISON_MEMORY_REGION(block, static_cast<std::size_t>(bytes));
        FreeBlock* const next = block->next;
        ReturnToSystem(block, bytes);
        budget_.Unreserve(bytes);
        trimmed += bytes;
        block = next;
      }
    }
    return trimmed;
  }

  // When the cap or the system refuses, cached blocks of other classes make room: those that others
  // are giving back already, then the rest. Another thread may free a block meanwhile, hence the
  // loops.
  void* TakeFresh(std::int64_t class_bytes, std::int64_t asked) {
    if (!budget_.Reserve(class_bytes)) ReserveAfterTrim(class_bytes, asked);
    void* block = TakeFromSystem(class_bytes);
    if (block == nullptr) block = TakeAfterTrim(class_bytes);
    if (block == nullptr) {
      budget_.Unreserve(class_bytes);
      budget_.ThrowSystemEmpty(asked, class_bytes);
    }
    ASAN_POISON_MEMORY_REGION(block, static_cast<std::size_t>(class_bytes));
    return block;
  }

  void ReserveAfterTrim(std::int64_t class_bytes, std::int64_t asked) EXCLUDES(trim_mutex_) {
    MutexLock lock(trim_mutex_);
    while (!budget_.Reserve(class_bytes)) {
      if (TrimLocked() == 0) budget_.ThrowOverCap(asked, class_bytes);
    }
  }

  // Null: there is no more.
  void* TakeAfterTrim(std::int64_t class_bytes) EXCLUDES(trim_mutex_) {
    MutexLock lock(trim_mutex_);
    for (;;) {
      void* const block = TakeFromSystem(class_bytes);
      if (block != nullptr || TrimLocked() == 0) return block;
    }
  }

  MemoryBudget budget_;
  // Held while blocks go back to the system; the lists' mutexes are taken under it. Neither blocks
  // that are cached nor fresh ones that fit need it.
  Mutex trim_mutex_;
  std::array<List, kSizeClasses> lists_;
};

}  // namespace

std::unique_ptr<Allocator> MakePoolAllocator(std::int64_t bytes_max) {
  return std::make_unique<PoolAllocator>(bytes_max);
}

}  // namespace heddle::storage
