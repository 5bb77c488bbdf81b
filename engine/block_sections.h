// Which thread takes which blocks of a ParallelFor.
//
// The blocks lie in sections, and each CPU has a section that it begins with. So of an array that
// several ops go over, one after another, a CPU mostly gets the part that its caches have: push and
// pull of arrays of the size of the caches take up to a third less time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace heddle::engine {

// Threads: all methods, any thread.
class BlockSections {
 public:
  static constexpr std::int64_t kSectionsMax = 16;

  // Blocks [0, blocks). At least one section, at most kSectionsMax.
  BlockSections(std::int64_t blocks, std::int64_t sections)
      : sections_(std::clamp(sections, std::int64_t{1}, kSectionsMax)), left_(blocks) {
    for (std::int64_t i = 0; i < sections_; ++i) {
      Section& section = section_[static_cast<std::size_t>(i)];
      section.next.store(Bound(blocks, i), std::memory_order_relaxed);
      section.end = Bound(blocks, i + 1);
    }
  }

  // Calls run(block) for one block after another that nobody has taken, until there are none or it
  // says false: those of the section `home`, modulo their number, then of others that nobody has
  // begun with, then what is left of the rest.
  template <class Run>
  void TakeAll(std::uint32_t home, const Run& run) {
    for (const bool begun : {false, true}) {
      for (std::int64_t i = 0; i < sections_; ++i) {
        Section& section = section_[static_cast<std::size_t>((home + i) % sections_)];
        if (!begun && section.begun.exchange(true, std::memory_order_relaxed)) continue;
        while (left_.load(std::memory_order_relaxed) > 0) {
          const std::int64_t block = section.next.fetch_add(1, std::memory_order_relaxed);
          if (block >= section.end) break;
          left_.fetch_sub(1, std::memory_order_relaxed);
          if (!run(block)) return;
        }
      }
    }
  }

  bool AnyLeft() const { return left_.load(std::memory_order_relaxed) > 0; }
  // Hands out no further block, but for those that threads are about to take.
  void Drop() { left_.store(0, std::memory_order_relaxed); }

 private:
  struct Section {
    std::atomic<std::int64_t> next;
    std::int64_t end;
    std::atomic<bool> begun{false};
  };

  // Where section i begins. No product of two large numbers.
  std::int64_t Bound(std::int64_t blocks, std::int64_t i) const {
    return blocks / sections_ * i + std::min(i, blocks % sections_);
  }

  const std::int64_t sections_;
  std::atomic<std::int64_t> left_;
  std::array<Section, kSectionsMax> section_;
};

}  // namespace heddle::engine
