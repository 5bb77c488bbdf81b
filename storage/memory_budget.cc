#include "storage/memory_budget.h"

#include <heddle/error.h>

#include <algorithm>

#include <fmt/format.h>

namespace heddle::storage {

std::string AskedFor(std::int64_t bytes, std::int64_t block_bytes) {
  return block_bytes == bytes
             ? fmt::format("asked for {} bytes", bytes)
             : fmt::format("asked for {} bytes, which take a block of {}", bytes, block_bytes);
}

bool MemoryBudget::Reserve(std::int64_t bytes) {
  std::int64_t held = held_.load(std::memory_order_relaxed);
  do {
    if (bytes > bytes_max_.load(std::memory_order_relaxed) - held) return false;
  } while (!held_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  return true;
}

void MemoryBudget::Use(std::int64_t bytes) {
  const std::int64_t used = used_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::int64_t peak = peak_.load(std::memory_order_relaxed);
  while (used > peak && !peak_.compare_exchange_weak(peak, used, std::memory_order_relaxed)) {
  }
}

MemoryStats MemoryBudget::stats() const {
  MemoryStats stats;
  stats.used = used_.load(std::memory_order_relaxed);
  stats.cached = std::max<std::int64_t>(0, held_.load(std::memory_order_relaxed) - stats.used);
  stats.peak = peak_.load(std::memory_order_relaxed);
  stats.bytes_max = bytes_max_.load(std::memory_order_relaxed);
  return stats;
}

void MemoryBudget::ThrowOverCap(std::int64_t bytes, std::int64_t block_bytes) const {
  const MemoryStats now = stats();
  throw OutOfMemory(fmt::format("{}: {}, {} in use, cap {} bytes", name_,
                                AskedFor(bytes, block_bytes), now.used, now.bytes_max));
}

void MemoryBudget::ThrowSystemEmpty(std::int64_t bytes, std::int64_t block_bytes) const {
  throw OutOfMemory(fmt::format("{}: {}, {} in use, the system has no more", name_,
                                AskedFor(bytes, block_bytes), stats().used));
}

}  // namespace heddle::storage
