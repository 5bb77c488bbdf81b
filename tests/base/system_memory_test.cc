// Goal: memory of the system is aligned, whole and given back, and large blocks do not all begin at
// the same place of a page.
#include "base/system_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

struct Block {
  explicit Block(std::int64_t bytes) : bytes(bytes), data(TakeFromSystem(bytes)) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { ReturnToSystem(data, bytes); }

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data); }

  const std::int64_t bytes;
  void* const data;
};

std::int64_t MappedPages() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

// Around the sizes from which blocks are taken in another way.
class SystemMemory : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(SystemMemory, BlocksAreAlignedAndApart) {
  const std::int64_t bytes = GetParam();
  std::vector<std::unique_ptr<Block>> blocks;
  for (int i = 0; i < 40; ++i) {
    blocks.push_back(std::make_unique<Block>(bytes));
    ASSERT_NE(blocks.back()->data, nullptr);
    EXPECT_EQ(blocks.back()->address() % 64, 0u);
    std::memset(blocks.back()->data, i, static_cast<std::size_t>(bytes));
  }
  for (int i = 0; i < 40; ++i) {
    const auto* const data = static_cast<const unsigned char*>(blocks[i]->data);
    EXPECT_TRUE(std::all_of(data, data + bytes, [i](unsigned char byte) { return byte == i; }));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, SystemMemory,
                         ::testing::Values(1, 100, 65'535, 65'536, 70'000, (2 << 20) - 1, 2 << 20,
                                           (2 << 20) + 1, 4 << 20));

TEST(SystemMemoryTest, LargeBlocksBeginAtDifferentPlacesOfAPage) {
  for (const std::int64_t bytes : {64 << 10, 1 << 20, 2 << 20, 3 << 20}) {
    std::vector<std::unique_ptr<Block>> blocks;
    std::set<std::uintptr_t> places;
    for (int i = 0; i < 16; ++i) {
      blocks.push_back(std::make_unique<Block>(bytes));
      places.insert(blocks.back()->address() % 4096);
    }
    EXPECT_EQ(places.size(), 16u) << bytes << " bytes";
  }
}

TEST(SystemMemoryTest, WhatIsReturnedIsMappedNoMore) {
  const Block first(5 << 20);  // what the process needs once
  const std::int64_t before = MappedPages();
  for (int i = 0; i < 100; ++i) {
    const Block block((5 << 20) - i);
    std::memset(block.data, 1, static_cast<std::size_t>(block.bytes));
  }
  EXPECT_LT(MappedPages(), before + 20);  // less than a page a block
}

TEST(SystemMemoryTest, MoreThanThereIsIsNull) {
  EXPECT_EQ(TakeFromSystem(std::int64_t{1} << 60), nullptr);
}

}  // namespace
}  // namespace heddle
