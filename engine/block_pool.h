// Memory for ops: blocks of a few sizes, recycled across threads without touching the heap.
//
// One thread (the pusher) allocates what another (a worker) frees, so each thread keeps magazines
// of 64 block pointers a size (16 of the larger ones) and trades full for empty ones with a depot:
// one short lock in as many calls. Pointers lie in the magazine and not in the blocks, so that a
// block last written by another core can be prefetched. Blocks are never returned to the system: a
// steady state allocates nothing. Threads: all functions, any thread, also while the thread exits.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace heddle::engine {

inline constexpr std::size_t kBlockAlign = 64;
// Processors fetch lines in pairs: what two threads write lies so far apart.
inline constexpr std::size_t kNoSharing = 128;
inline constexpr int kBlockClasses = 15;  // class c holds (c + 1) * 64 bytes

// The smallest class that holds `bytes`; kBlockClasses if none does.
constexpr int BlockClassOf(std::size_t bytes) {
  const std::size_t units = (bytes + kBlockAlign - 1) / kBlockAlign;
  return units == 0 ? 0 : units <= kBlockClasses ? static_cast<int>(units) - 1 : kBlockClasses;
}

// Aligned to kBlockAlign. `bytes` matters only for class kBlockClasses, which comes from the heap.
void* AllocateBlock(int block_class, std::size_t bytes);
void FreeBlock(void* block, int block_class) noexcept;

// For std::allocate_shared of what one thread makes and another one lets go of.
template <class T>
struct BlockAllocator {
  using value_type = T;

  BlockAllocator() = default;
  template <class U>
  BlockAllocator(const BlockAllocator<U>& /*other*/) {}  // NOLINT(google-explicit-constructor)

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    return static_cast<T*>(AllocateBlock(BlockClassOf(bytes), bytes));
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    FreeBlock(memory, BlockClassOf(count * sizeof(T)));
  }
  friend bool operator==(const BlockAllocator&, const BlockAllocator&) { return true; }
};

struct DeleteInBlock {
  template <class T>
  void operator()(T* object) const noexcept {
    object->~T();
    FreeBlock(object, BlockClassOf(sizeof(T)));
  }
};
// Likewise, with one owner.
template <class T>
using BlockPtr = std::unique_ptr<T, DeleteInBlock>;
template <class T>  // its constructor does not throw
BlockPtr<T> MakeInBlock() {
  return BlockPtr<T>(new (AllocateBlock(BlockClassOf(sizeof(T)), sizeof(T))) T());
}

}  // namespace heddle::engine
