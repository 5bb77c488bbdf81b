#include "benchmarks/engine/allocation_count.h"

#include <atomic>
#include <cerrno>
#include <cstddef>

// What glibc's own functions are called behind their public names. operator new calls malloc.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* block, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
}

namespace {
std::atomic<std::uint64_t> count{0};
void Count() { count.fetch_add(1, std::memory_order_relaxed); }
}  // namespace

extern "C" {

void* malloc(std::size_t bytes) {
  Count();
  return __libc_malloc(bytes);
}

void* calloc(std::size_t items, std::size_t bytes) {
  Count();
  return __libc_calloc(items, bytes);
}

void* realloc(void* block, std::size_t bytes) {
  Count();
  return __libc_realloc(block, bytes);
}

void* memalign(std::size_t alignment, std::size_t bytes) {
  Count();
  return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** block, std::size_t alignment, std::size_t bytes) {
  *block = memalign(alignment, bytes);
  return *block == nullptr ? ENOMEM : 0;
}

}  // extern "C"

namespace heddle::bench {

std::uint64_t AllocationCount() { return count.load(std::memory_order_relaxed); }

}  // namespace heddle::bench
