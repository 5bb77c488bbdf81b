// BlockSections: each block once, and each thread's own section first.
#include "engine/block_sections.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle::engine {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<std::int64_t> AllOf(BlockSections& blocks, std::uint32_t home) {
  std::vector<std::int64_t> taken;
  blocks.TakeAll(home, [&](std::int64_t block) {
    taken.push_back(block);
    return true;
  });
  return taken;
}

TEST(BlockSectionsTest, AThreadAloneTakesAllAndItsOwnSectionFirst) {
  for (const std::uint32_t home : {1u, 4u, 3'000'000'001u}) {  // modulo 3 all the same
    BlockSections blocks(8, 3);
    EXPECT_THAT(AllOf(blocks, home), ElementsAre(3, 4, 5, 6, 7, 0, 1, 2)) << home;
    EXPECT_FALSE(blocks.AnyLeft());
  }
}

TEST(BlockSectionsTest, WhatAThreadHasBegunWithOthersTakeLast) {
  BlockSections blocks(12, 3);
  std::vector<std::int64_t> first;
  std::vector<std::int64_t> second;
  blocks.TakeAll(0, [&](std::int64_t block) {
    first.push_back(block);
    if (second.empty()) second = AllOf(blocks, 2);
    return true;
  });
  EXPECT_THAT(first, ElementsAre(0));
  EXPECT_THAT(second, ElementsAre(8, 9, 10, 11, 4, 5, 6, 7, 1, 2, 3));
}

TEST(BlockSectionsTest, AfterDropNoneIsTaken) {
  BlockSections blocks(9, 2);
  std::vector<std::int64_t> taken;
  blocks.TakeAll(0, [&](std::int64_t block) {
    taken.push_back(block);
    if (block == 1) blocks.Drop();
    return true;
  });
  EXPECT_THAT(taken, ElementsAre(0, 1));
  EXPECT_FALSE(blocks.AnyLeft());
  EXPECT_THAT(AllOf(blocks, 1), IsEmpty());
}

TEST(BlockSectionsTest, AThreadThatStopsLeavesTheRestToOthers) {
  BlockSections blocks(8, 2);
  std::vector<std::int64_t> taken;
  blocks.TakeAll(1, [&](std::int64_t block) {
    taken.push_back(block);
    return block != 5;
  });
  EXPECT_THAT(taken, ElementsAre(4, 5));
  EXPECT_TRUE(blocks.AnyLeft());
  EXPECT_THAT(AllOf(blocks, 1), ElementsAre(0, 1, 2, 3, 6, 7));
}

TEST(BlockSectionsTest, NumbersOfSectionsAreLimitedAndSomeMayBeEmpty) {
  BlockSections none(0, 4);
  EXPECT_FALSE(none.AnyLeft());
  EXPECT_THAT(AllOf(none, 0), IsEmpty());
  BlockSections few(2, 5);
  EXPECT_THAT(AllOf(few, 1), ElementsAre(1, 0));
  BlockSections one(3, 0);
  EXPECT_THAT(AllOf(one, 7), ElementsAre(0, 1, 2));
  BlockSections many(BlockSections::kSectionsMax * 2, BlockSections::kSectionsMax * 3);
  EXPECT_EQ(AllOf(many, 1).front(), 2);
}

TEST(BlockSectionsTest, ManyThreadsTakeEachBlockOnce) {
  for (const std::int64_t num_blocks : {1, 7, 64, 1001}) {
    for (const std::int64_t sections : {1, 2, 5, 16}) {
      for (int round = 0; round < 20; ++round) {
        BlockSections blocks(num_blocks, sections);
        std::vector<std::atomic<int>> times(static_cast<std::size_t>(num_blocks));
        std::vector<std::thread> threads;
        for (std::uint32_t home = 0; home < 4; ++home) {
          threads.emplace_back([&, home] {
            blocks.TakeAll(home * static_cast<std::uint32_t>(round), [&](std::int64_t block) {
              ++times[static_cast<std::size_t>(block)];
              return true;
            });
          });
        }
        for (std::thread& thread : threads) thread.join();
        for (const std::atomic<int>& each : times) {
          ASSERT_EQ(each.load(), 1) << num_blocks << " blocks in " << sections << " sections";
        }
        EXPECT_FALSE(blocks.AnyLeft());
      }
    }
  }
}

}  // namespace
}  // namespace heddle::engine
