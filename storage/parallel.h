// Large kernels, split over the engine's workers.
#pragma once

#include <heddle/engine.h>

#include <algorithm>
#include <cstdint>
#include <functional>

#include "engine/block_sections.h"
#include "ops/store_mode.h"

namespace heddle::storage {

// Bytes that one block touches, and from which an array is split at all. Handing a block to another
// thread costs a few microseconds, in which one core moves some 50 KiB.
inline constexpr std::int64_t kBlockBytes = 256 << 10;
inline constexpr std::int64_t kSplitBytesMin = 2 * kBlockBytes;
// Of a block, at least: whole cache lines of even one-byte elements, so that no two write to one.
inline constexpr std::int64_t kBlockElementsMin = 64;

// Elements of a block, for `count` elements of `element_bytes`, on so many workers. The blocks are
// as many for each section (engine/block_sections.h): so the sections of an array are the same to
// all kernels, whatever else they touch, and a CPU finds the part that it had before.
inline std::int64_t BlockElements(std::int64_t count, std::int64_t element_bytes, int workers) {
  const auto divide_up = [](std::int64_t a, std::int64_t b) {
    return a / b + (a % b != 0 ? 1 : 0);
  };
  const std::int64_t blocks =
      divide_up(count, std::max(kBlockElementsMin, kBlockBytes / element_bytes));
  const std::int64_t sections =
      std::clamp<std::int64_t>(workers, 1, std::min(blocks, engine::BlockSections::kSectionsMax));
  const std::int64_t in_all = divide_up(blocks, sections) * sections;
  return divide_up(divide_up(count, in_all), kBlockElementsMin) * kBlockElementsMin;
}

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
  const std::int64_t grain = BlockElements(count, element_bytes, engine.options().num_workers);
  const auto body = [&](std::int64_t begin, std::int64_t end) { kernel(begin, end, mode); };
  engine.ParallelFor(count, grain, std::ref(body));  // a reference: std::function allocates nothing
}

}  // namespace heddle::storage
