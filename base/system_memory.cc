#include "base/system_memory.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include <sys/mman.h>

#include "base/check.h"

namespace heddle {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kAlignment = 64;

std::size_t RoundUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Not from malloc: it would keep large blocks that were freed, and its alignment to huge pages
// leaves holes.
void* MapHuge(std::size_t bytes) {
  const std::size_t wanted = RoundUp(bytes, kHugePage);
  const std::size_t mapped = wanted + kHugePage;
  if (mapped < bytes) return nullptr;
  void* const map =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::byte*>(map);
  const std::size_t before = RoundUp(reinterpret_cast<std::uintptr_t>(start), kHugePage) -
                             reinterpret_cast<std::uintptr_t>(start);
  if (before > 0) munmap(start, before);
  munmap(start + before + wanted, kHugePage - before);
  // A wish: kernels without transparent huge pages refuse it.
  (void)madvise(start + before, wanted, MADV_HUGEPAGE);
  return start + before;
}

}  // namespace

void* TakeFromSystem(std::int64_t bytes) noexcept {
  DCHECK(bytes > 0);
  const auto size = static_cast<std::size_t>(bytes);
  if (size >= kHugePage) return MapHuge(size);
  return std::aligned_alloc(kAlignment, RoundUp(size, kAlignment));
}

void ReturnToSystem(void* block, std::int64_t bytes) noexcept {
  const auto size = static_cast<std::size_t>(bytes);
  if (size >= kHugePage) {
    CHECK(munmap(block, RoundUp(size, kHugePage)) == 0);
  } else {
    std::free(block);
  }
}

}  // namespace heddle
