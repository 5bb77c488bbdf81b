#include "tests/kvstore/dist/counted_memory.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include <malloc.h>

namespace {
std::atomic<std::int64_t> live_bytes = 0;
thread_local std::int64_t left_to_give = -1;
}  // namespace

std::int64_t LiveBytes() { return live_bytes.load(std::memory_order_relaxed); }

void GiveAllocations(std::int64_t count) { left_to_give = count; }

void* operator new(std::size_t bytes) {
  void* const block = left_to_give == 0 ? nullptr : std::malloc(bytes);
  if (left_to_give >= 0) --left_to_give;
  if (block == nullptr) throw std::bad_alloc();
  live_bytes.fetch_add(static_cast<std::int64_t>(malloc_usable_size(block)),
                       std::memory_order_relaxed);
  return block;
}

void operator delete(void* block) noexcept {
  if (block == nullptr) return;
  live_bytes.fetch_sub(static_cast<std::int64_t>(malloc_usable_size(block)),
                       std::memory_order_relaxed);
  std::free(block);
}

void operator delete(void* block, std::size_t /*bytes*/) noexcept { operator delete(block); }
