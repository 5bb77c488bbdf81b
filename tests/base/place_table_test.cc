#include "base/place_table.h"

#include <cstddef>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

// The place of the first of each, as a map finds it; also where all hashes are the same.
TEST(PlaceTable, FindsTheFirstOfTheSame) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (const std::size_t hash_bits : {0U, 3U, 64U}) {
    for (const std::size_t entries : {0U, 1U, 2U, 7U, 8U, 300U, 1000U}) {
      const std::uint64_t values = 1 + random() % (entries + 1);
      std::vector<std::uint64_t> kept;
      std::unordered_map<std::uint64_t, std::size_t> oracle;
      PlaceTable places(entries);
      for (std::size_t i = 0; i < entries; ++i) {
        const std::uint64_t value = random() % values * 64;
        const std::size_t hash = hash_bits == 64 ? value : value % (std::size_t{1} << hash_bits);
        const auto found =
            places.Find(hash, kept.size(), [&](std::size_t at) { return kept[at] == value; });
        const auto [expected, is_new] = oracle.emplace(value, kept.size());
        ASSERT_EQ(found.first, expected->second);
        ASSERT_EQ(found.second, is_new);
        if (is_new) kept.push_back(value);
      }
    }
  }
}

}  // namespace
}  // namespace heddle
