#include "base/system_memory.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include <sys/mman.h>

#include "base/check.h"

namespace heddle {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kStaggeredMin = std::size_t{64} << 10;

std::size_t RoundUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::byte* RoundDown(void* block, std::size_t unit) {
  return static_cast<std::byte*>(block) - reinterpret_cast<std::uintptr_t>(block) % unit;
}

// Where in its first page a large block begins. What lies at the same place of its page shares a
// set of the first-level cache, which has 8 to 12 lines: kernels that go through more arrays than
// that side by side, all from the start of a page, lose lines before they use them.
std::size_t NextStart() {
  constexpr std::size_t kStep = 256;
  static std::atomic<std::size_t> blocks{0};
  // relaxed: any order is as good
  return blocks.fetch_add(1, std::memory_order_relaxed) * kStep % kPage;
}

// Not from malloc: it would keep large blocks that were freed, and its alignment to huge pages
// leaves holes. Huge pages, and behind them a small one.
std::byte* MapHuge(std::size_t bytes) {
  const std::size_t huge = RoundUp(bytes, kHugePage);
  const std::size_t mapped = huge + kHugePage;
  if (mapped < bytes) return nullptr;
  void* const map =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::byte*>(map);
  const std::size_t before = RoundUp(reinterpret_cast<std::uintptr_t>(start), kHugePage) -
                             reinterpret_cast<std::uintptr_t>(start);
  const std::size_t after = kHugePage - before - kPage;
  if (before > 0) munmap(start, before);
  if (after > 0) munmap(start + before + huge + kPage, after);
  // A wish: kernels without transparent huge pages refuse it.
  (void)madvise(start + before, huge, MADV_HUGEPAGE);
  return start + before;
}

}  // namespace

void* TakeFromSystem(std::int64_t bytes) noexcept {
  DCHECK(bytes > 0);
  const auto size = static_cast<std::size_t>(bytes);
  if (size < kStaggeredMin) return std::aligned_alloc(kAlignment, RoundUp(size, kAlignment));
  const std::size_t start = NextStart();
  if (size >= kHugePage) {
    std::byte* const map = MapHuge(size);
    return map == nullptr ? nullptr : map + start;
  }
  void* block = nullptr;
  if (posix_memalign(&block, kPage, start + size) != 0) return nullptr;
  return static_cast<std::byte*>(block) + start;
}

void ReturnToSystem(void* block, std::int64_t bytes) noexcept {
  const auto size = static_cast<std::size_t>(bytes);
  if (size < kStaggeredMin) {
    std::free(block);
  } else if (size < kHugePage) {
    std::free(RoundDown(block, kPage));
  } else {
    CHECK(munmap(RoundDown(block, kHugePage), RoundUp(size, kHugePage) + kPage) == 0);
  }
}

}  // namespace heddle
