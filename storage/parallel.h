// Large kernels, split over the engine's workers.
#pragma once

#include <heddle/engine.h>

#include <algorithm>
#include <cstdint>
#include <functional>

#include "ops/store_mode.h"

namespace heddle::storage {

// Bytes that one block touches, and from which an array is split at all. Handing a block to another
// thread costs a few microseconds, in which one core moves some 50 KiB.
inline constexpr std::int64_t kBlockBytes = 256 << 10;
inline constexpr std::int64_t kSplitBytesMin = 2 * kBlockBytes;

// Calls kernel(begin, end, mode) so that [0, count) is covered: once if the elements are few, else
// in blocks on this thread and on idle workers. `element_bytes`: what the kernel reads and writes
// for one element. For use inside op bodies. The kernel's results must not depend on the cut.
template <class Kernel>
void ForBlocks(Engine& engine, std::int64_t count, std::int64_t element_bytes, Kernel&& kernel) {
  const std::int64_t bytes = count * element_bytes;
  const ops::StoreMode mode = ops::StoreModeFor(static_cast<std::size_t>(bytes));
  if (bytes < kSplitBytesMin) {
    kernel(std::int64_t{0}, count, mode);
    return;
  }
  // Whole cache lines of even one-byte elements, so that no two blocks write to one.
  constexpr std::int64_t kLine = 64;
  const std::int64_t grain = std::max(kLine, kBlockBytes / element_bytes / kLine * kLine);
  const auto body = [&](std::int64_t begin, std::int64_t end) { kernel(begin, end, mode); };
  engine.ParallelFor(count, grain, std::ref(body));  // a reference: std::function allocates nothing
}

}  // namespace heddle::storage
