// Finds what a list names again, in n: a table of places in it, by hash.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace heddle {

class PlaceTable {
 public:
  // Of a list of so many entries at most.
  explicit PlaceTable(std::size_t entries)
      : slots_(std::bit_ceil(2 * entries + 2), kFree),
        shift_(64 - std::countr_zero(slots_.size())) {}

  // The place of the entry that is the same, for which equals(its place), and false; or `place`,
  // which the table knows from now on, and true. `hash`: the same for those that are the same.
  template <class Equals>
  std::pair<std::size_t, bool> Find(std::size_t hash, std::size_t place, const Equals& equals) {
    // Fibonacci hashing: the high bits depend on all, also where `hash` is a number or an address.
    std::size_t slot = (hash * std::uint64_t{0x9E3779B97F4A7C15}) >> shift_;
    for (; slots_[slot] != kFree; slot = (slot + 1) & (slots_.size() - 1)) {
      if (equals(slots_[slot])) return {slots_[slot], false};
    }
    slots_[slot] = static_cast<std::uint32_t>(place);
    return {place, true};
  }

 private:
  static constexpr std::uint32_t kFree = std::numeric_limits<std::uint32_t>::max();

  std::vector<std::uint32_t> slots_;  // a power of two, half of them free at least
  int shift_;
};

}  // namespace heddle
