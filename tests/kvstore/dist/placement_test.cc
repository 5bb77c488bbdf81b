// Where the parts of keys go. What must hold for any array is checked for random ones; golden
// values hold the promise that nodes of different builds agree.
#include "kvstore/dist/protocol/placement.h"

#include <heddle/dtype.h>
#include <heddle/shape.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/random_bodies.h"

namespace heddle::kvstore::dist_test {
namespace {

using namespace dist;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kMiB = 1 << 20;

std::vector<PlacedPart> PlaceDense(std::uint64_t key, std::int64_t elements, DType dtype,
                                   const PlacementOptions& options) {
  return PlaceKey(key, Shape({elements}), dtype, /*row_sparse=*/false, options);
}

// Every place once, in order; parts numbered in order; servers exist; each server's parts adjoin.
void ExpectCovers(const std::vector<PlacedPart>& parts, std::int64_t places,
                  std::int32_t num_servers) {
  ASSERT_FALSE(parts.empty());
  std::int64_t end = 0;
  int changes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    ASSERT_EQ(parts[i].part, i);
    ASSERT_EQ(parts[i].begin, end);
    ASSERT_TRUE(parts[i].begin < parts[i].end || places == 0);
    ASSERT_GE(parts[i].server, 0);
    ASSERT_LT(parts[i].server, num_servers);
    changes += i > 0 && parts[i].server != parts[i - 1].server ? 1 : 0;
    end = parts[i].end;
  }
  EXPECT_EQ(end, places);
  EXPECT_LT(changes, num_servers);
}

std::map<std::int32_t, std::int64_t> PlacesByServer(const std::vector<PlacedPart>& parts) {
  std::map<std::int32_t, std::int64_t> places;
  for (const PlacedPart& part : parts) places[part.server] += part.end - part.begin;
  return places;
}

TEST(Placement, CutsAnyDenseArrayIntoAlignedPartsOnAllServersEvenly) {
  Random random(TestSeed());
  for (int round = 0; round < 3000; ++round) {
    PlacementOptions options;
    options.num_servers = static_cast<std::int32_t>(1 + Below(random, 9));
    options.cut_bytes = static_cast<std::int64_t>(Below(random, 8 * kMiB));
    options.slice_bytes = static_cast<std::int64_t>(1 + Below(random, 2 * kMiB));
    const DType dtype = kAllDTypes[Below(random, kAllDTypes.size())];
    const std::int64_t elements = static_cast<std::int64_t>(random() >> (38 + Below(random, 26)));
    SCOPED_TRACE(testing::Message() << elements << " " << Name(dtype) << " on "
                                    << options.num_servers << " servers, cut above "
                                    << options.cut_bytes << ", slices of " << options.slice_bytes);
    const auto parts = PlaceDense(random(), elements, dtype, options);
    ASSERT_NO_FATAL_FAILURE(ExpectCovers(parts, elements, options.num_servers));
    const auto size = static_cast<std::int64_t>(SizeOf(dtype));
    for (const PlacedPart& part : parts) {
      ASSERT_EQ(part.begin % 4096, 0);
      ASSERT_LE((part.end - part.begin) * size, std::max(options.slice_bytes, 4096 * size));
    }
    const auto by_server = PlacesByServer(parts);
    if (elements * size <= options.cut_bytes) {
      ASSERT_EQ(by_server.size(), 1u);
    } else {
      const std::int64_t blocks = (elements + 4095) / 4096;
      ASSERT_EQ(static_cast<std::int64_t>(by_server.size()),
                std::min<std::int64_t>(blocks, options.num_servers));
      const auto [least, most] =
          std::minmax_element(by_server.begin(), by_server.end(),
                              [](const auto& a, const auto& b) { return a.second < b.second; });
      ASSERT_LE(most->second - least->second, 2 * 4096);
    }
  }
}

TEST(Placement, SmallerArraysHaveSmallerParts) {
  const PlacementOptions options{.num_servers = 1};
  for (const PlacedPart& part : PlaceDense(1, kMiB, DType::kFloat32, options)) {  // 4 MiB
    EXPECT_LE((part.end - part.begin) * 4, kMiB / 4);
  }
  EXPECT_EQ(PlaceDense(1, kMiB, DType::kFloat32, options).size(), 16u);
  EXPECT_EQ(PlaceDense(1, 16 * kMiB, DType::kFloat32, options).size(), 64u);
}

TEST(Placement, SpreadsSmallKeysEvenly) {
  const PlacementOptions options{.num_servers = 5};
  for (const bool numbers : {false, true}) {
    std::map<std::int32_t, std::int64_t> keys;
    for (std::int64_t i = 0; i < 10000; ++i) {
      const Key key = numbers ? Key(i) : Key("layer" + std::to_string(i) + "_weight");
      const auto parts = PlaceDense(KeyId(key), 100, DType::kFloat32, options);
      ASSERT_EQ(parts.size(), 1u);
      ++keys[parts[0].server];
    }
    ASSERT_EQ(keys.size(), 5u);
    for (const auto& [server, count] : keys) {  // 2000 +- 40 is one standard deviation
      EXPECT_NEAR(static_cast<double>(count), 2000, 240) << "server " << server;
    }
  }
}

TEST(Placement, RemaindersOfCutKeysDoNotAllGoToTheSameServer) {
  const PlacementOptions options{.num_servers = 4, .cut_bytes = 0};
  std::map<std::int32_t, int> first;
  for (std::int64_t i = 0; i < 1000; ++i) {
    ++first[PlaceDense(KeyId(i), 5 * 4096, DType::kFloat32, options)[0].server];
  }
  for (std::int32_t server = 0; server < 4; ++server) EXPECT_GT(first[server], 150);
}

TEST(Placement, EmptyArraysHaveOnePart) {
  for (const bool row_sparse : {false, true}) {
    const auto parts =
        PlaceKey(7, Shape({0, 5}), DType::kFloat32, row_sparse, {.num_servers = 3, .cut_bytes = 0});
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0].begin, 0);
    EXPECT_EQ(parts[0].end, 0);
    EXPECT_EQ(parts[0].server, 7 % 3);
  }
  const auto scalar = PlaceKey(7, Shape{}, DType::kFloat32, false, {.num_servers = 3});
  ASSERT_EQ(scalar.size(), 1u);
  EXPECT_EQ(scalar[0].end, 1);
}

// Nobody has 2^63 - 1 doubles, but the arithmetic is for 64-bit sizes, and the number of parts has
// a bound.
TEST(Placement, ReachesTheEndOf64Bits) {
  for (const std::int64_t elements :
       {INT64_MAX, INT64_MAX - 4096, std::int64_t{1} << 62, (std::int64_t{1} << 40) + 1}) {
    for (const std::int32_t servers : {1, 3}) {
      const auto parts = PlaceDense(2, elements, DType::kFloat64, {.num_servers = servers});
      ASSERT_NO_FATAL_FAILURE(ExpectCovers(parts, elements, servers));
      EXPECT_LE(parts.size(), static_cast<std::size_t>(kShardPartsMax) * servers);
      for (const PlacedPart& part : parts) ASSERT_EQ(part.begin % 4096, 0);
    }
  }
}

TEST(Placement, CutsRowSparseArraysByRowsIntoAPartAServer) {
  constexpr std::int64_t kRows = 1'000'000'000'000;
  const Shape shape({kRows, 64});
  const auto parts = PlaceKey(5, shape, DType::kFloat32, true, {.num_servers = 7});
  ASSERT_NO_FATAL_FAILURE(ExpectCovers(parts, kRows, 7));
  ASSERT_EQ(parts.size(), 7u);
  for (const auto& [server, rows] : PlacesByServer(parts)) {
    EXPECT_NEAR(static_cast<double>(rows), kRows / 7.0, 1.0) << server;
  }
  // More elements than 64 bits count bytes of them.
  const auto most = PlaceKey(5, Shape({INT64_MAX, 1}), DType::kFloat64, true, {.num_servers = 2});
  ASSERT_NO_FATAL_FAILURE(ExpectCovers(most, INT64_MAX, 2));
  EXPECT_EQ(most.size(), 2u);
  const auto few = PlaceKey(5, Shape({3, 1 << 20}), DType::kFloat32, true, {.num_servers = 7});
  ASSERT_NO_FATAL_FAILURE(ExpectCovers(few, 3, 7));
  EXPECT_EQ(few.size(), 3u);
  EXPECT_EQ(PlaceKey(5, Shape({1000, 2}), DType::kFloat32, true, {.num_servers = 7}).size(), 1u);
}

TEST(Placement, RowsOfEveryIdBelongToOnePart) {
  Random random(TestSeed());
  for (int round = 0; round < 300; ++round) {
    const auto rows = static_cast<std::int64_t>(1 + Below(random, 100000));
    const auto servers = static_cast<std::int32_t>(1 + Below(random, 9));
    const auto parts = PlaceKey(random(), Shape({rows, 3}), DType::kFloat32, true,
                                {.num_servers = servers, .cut_bytes = 1000});
    ASSERT_NO_FATAL_FAILURE(ExpectCovers(parts, rows, servers));
    ASSERT_EQ(PlacesByServer(parts).size(), parts.size());
  }
}

TEST(Placement, WholeKeysAreOnePart) {
  PlacementOptions options{.num_servers = 4};
  options.whole_keys = true;
  for (const std::int64_t elements : {std::int64_t{0}, std::int64_t{1}, 100 * kMiB, INT64_MAX}) {
    const auto parts = PlaceDense(6, elements, DType::kFloat32, options);
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0].begin, 0);
    EXPECT_EQ(parts[0].end, elements);
    EXPECT_EQ(parts[0].server, 2);
  }
}

TEST(KeyId, TellsKindsApart) {
  EXPECT_NE(KeyId(7), KeyId("7"));
  EXPECT_NE(KeyId(0), KeyId(std::string(8, '\0')));
  EXPECT_EQ(KeyId(Key(std::int64_t{7})), KeyId(7));
}

// A key's later lives are keys of their own, also beside its neighbours.
TEST(KeyId, NeighboursAndTheirLaterLivesAllDiffer) {
  std::set<std::uint64_t> ids;
  std::size_t count = 0;
  const auto add = [&](KeyRef key) {
    for (std::uint64_t removals = 0; removals <= 8; ++removals, ++count) {
      ids.insert(KeyId(key, removals));
    }
  };
  for (int i = 0; i < 1000; ++i) {
    add(i);
    for (const std::string prefix : {"", "w", "fc", "conv", "layer"}) {
      add(prefix + std::to_string(i));
    }
  }
  for (char a = ' '; a <= '~'; ++a) {
    for (char b = ' '; b <= '~'; ++b) {
      add(std::string({'~', a, b}));  // no digits in front: these are there already
    }
  }
  EXPECT_EQ(ids.size(), count);
}

TEST(KeyId, IsTheSameForEverAndEverywhere) {
  // Computed with the xxhash package of PyPI, version 4.1.0: xxh3_64_intdigest(bytes, seed).
  EXPECT_EQ(KeyId(""), 0x2d06800538d394c2u);
  EXPECT_EQ(KeyId("weight"), 0x21027da43643e999u);
  EXPECT_EQ(KeyId(0), 0x9e51ad6d2f3e695cu);
  EXPECT_EQ(KeyId(-1), 0x7b016d4ccc01c9bfu);
  EXPECT_EQ(KeyId(std::string(300, 'x')), 0xa5d1b4607dc83554u);
  EXPECT_EQ(KeyId("fc2", 1), 0x433c20bc90988efeu);
  EXPECT_EQ(KeyId("weight", 3), 0xd2a65353a592048eu);
}

TEST(Placement, IsTheSameForEverAndEverywhere) {
  const auto parts = PlaceDense(KeyId("weight"), 2 * kMiB + 5, DType::kFloat32, {.num_servers = 3});
  std::vector<std::tuple<std::int32_t, std::int64_t, std::int64_t>> got;
  for (const PlacedPart& part : parts) got.emplace_back(part.server, part.begin, part.end);
  // 513 blocks of 4096 elements: 171 a server, in 57s, since a quarter of a MiB has 64.
  const decltype(got) expected = {
      {0, 0, 233472},        {0, 233472, 466944},   {0, 466944, 700416},
      {1, 700416, 933888},   {1, 933888, 1167360},  {1, 1167360, 1400832},
      {2, 1400832, 1634304}, {2, 1634304, 1867776}, {2, 1867776, 2097157}};
  EXPECT_EQ(got, expected);
}

}  // namespace
}  // namespace heddle::kvstore::dist_test
