// Every allocator of the registry keeps its books and its cap; the pool reuses.
#include "storage/allocator.h"

#include <heddle/error.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle::storage {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

class EveryAllocator : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Allocator> Make(std::int64_t bytes_max = std::int64_t{1} << 40) {
    return MakeAllocator({.allocator = GetParam(), .bytes_max = bytes_max});
  }
};

TEST_P(EveryAllocator, BlocksAreAlignedDisjointAndWritable) {
  auto allocator = Make();
  std::vector<std::pair<unsigned char*, std::int64_t>> blocks;
  for (const std::int64_t bytes :
       {std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{65}, std::int64_t{512},
        std::int64_t{513}, std::int64_t{4096}, 2 * kMiB - 1, 2 * kMiB, 5 * kMiB + 3}) {
    auto* block = static_cast<unsigned char*>(allocator->Allocate(bytes));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % kBlockAlignment, 0u) << bytes;
    std::memset(block, static_cast<int>(blocks.size()), static_cast<std::size_t>(bytes));
    blocks.emplace_back(block, bytes);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(blocks[i].first[0], i);
    EXPECT_EQ(blocks[i].first[blocks[i].second - 1], i);
    allocator->Free(blocks[i].first, blocks[i].second);
  }
}

TEST_P(EveryAllocator, CountsUsedAndPeak) {
  auto allocator = Make();
  void* a = allocator->Allocate(kMiB);
  void* b = allocator->Allocate(kMiB);
  EXPECT_EQ(allocator->stats().used, 2 * kMiB);
  allocator->Free(a, kMiB);
  EXPECT_EQ(allocator->stats().used, kMiB);
  allocator->Free(b, kMiB);
  EXPECT_EQ(allocator->stats().used, 0);
  EXPECT_EQ(allocator->stats().peak, 2 * kMiB);
}

TEST_P(EveryAllocator, BlockBytesAreWhatAnAllocationCountsAs) {
  auto allocator = Make();
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{64}, std::int64_t{65},
                                   std::int64_t{513}, 4 * kMiB, 4 * kMiB + 1}) {
    EXPECT_GE(allocator->BlockBytes(bytes), bytes);
    void* block = allocator->Allocate(bytes);
    EXPECT_EQ(allocator->stats().used, allocator->BlockBytes(bytes)) << bytes;
    allocator->Free(block, bytes);
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(allocator->BlockBytes(kMost), kMost);
}

TEST_P(EveryAllocator, RefusesWhatExceedsTheCapAndNamesTheBytes) {
  auto allocator = Make(4 * kMiB);
  void* block = allocator->Allocate(3 * kMiB);
  const std::string message = MessageOf<OutOfMemory>([&] { (void)allocator->Allocate(2 * kMiB); });
  EXPECT_NE(message.find("2097152"), std::string::npos) << message;  // asked
  EXPECT_NE(message.find("3145728"), std::string::npos) << message;  // used
  EXPECT_NE(message.find("4194304"), std::string::npos) << message;  // cap
  EXPECT_EQ(allocator->stats().used, 3 * kMiB);
  allocator->Free(block, 3 * kMiB);
  block = allocator->Allocate(2 * kMiB);  // the cached 3 MiB make room
  EXPECT_LE(allocator->stats().used + allocator->stats().cached, 4 * kMiB);
  allocator->Free(block, 2 * kMiB);
  EXPECT_THROW((void)allocator->Allocate(std::int64_t{1} << 62), OutOfMemory);
}

TEST_P(EveryAllocator, FollowsAChangedCap) {
  auto allocator = Make();
  void* block = allocator->Allocate(kMiB);
  allocator->set_bytes_max(kMiB);
  EXPECT_EQ(allocator->stats().bytes_max, kMiB);
  EXPECT_THROW((void)allocator->Allocate(64), OutOfMemory);
  allocator->set_bytes_max(2 * kMiB);
  void* other = allocator->Allocate(64);
  allocator->Free(other, 64);
  allocator->Free(block, kMiB);
}

TEST_P(EveryAllocator, SaysWhenTheSystemHasNoMore) {
  auto allocator = Make(std::int64_t{1} << 62);
  EXPECT_THROW((void)allocator->Allocate(std::int64_t{1} << 55), OutOfMemory);
  EXPECT_EQ(allocator->stats().used, 0);
  EXPECT_EQ(allocator->stats().cached, 0);
}

// Threads allocate, fill and free; a block that two of them hold at once would show a foreign mark.
TEST_P(EveryAllocator, ServesManyThreads) {
  auto allocator = Make();
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937_64 random(engine_test::BaseSeed() + static_cast<unsigned>(id));
      std::vector<std::pair<unsigned char*, std::int64_t>> held;
      for (int step = 0; step < 2000; ++step) {
        if (held.size() < 8 && random() % 2 == 0) {
          const auto bytes = static_cast<std::int64_t>(1 + random() % 2000);
          auto* block = static_cast<unsigned char*>(allocator->Allocate(bytes));
          std::memset(block, id, static_cast<std::size_t>(bytes));
          held.emplace_back(block, bytes);
        } else if (!held.empty()) {
          const auto [block, bytes] = held.back();
          held.pop_back();
          for (std::int64_t i = 0; i < bytes; ++i) ASSERT_EQ(block[i], id);
          allocator->Free(block, bytes);
        }
        if (step % 500 == 0) allocator->Trim();
      }
      for (const auto& [block, bytes] : held) allocator->Free(block, bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(allocator->stats().used, 0);
  allocator->Trim();
  EXPECT_EQ(allocator->stats().cached, 0);
}

INSTANTIATE_TEST_SUITE_P(All, EveryAllocator, testing::ValuesIn(AllocatorNames()),
                         [](const auto& param) { return param.param; });

TEST(PoolAllocator, HandsOutTheBlockFreedLast) {
  auto pool = MakeAllocator({.allocator = "pool"});
  void* a = pool->Allocate(1000);
  void* b = pool->Allocate(1000);
  pool->Free(a, 1000);
  pool->Free(b, 1000);
  EXPECT_EQ(pool->Allocate(1000), b);
  EXPECT_EQ(pool->Allocate(990), a);  // the same size class
  pool->Free(a, 990);
  pool->Free(b, 1000);
}

TEST(PoolAllocator, TrimGivesCachedBlocksBack) {
  auto pool = MakeAllocator({.allocator = "pool"});
  void* used = pool->Allocate(kMiB);
  void* freed = pool->Allocate(8 * kMiB);
  pool->Free(freed, 8 * kMiB);
  EXPECT_EQ(pool->stats().cached, 8 * kMiB);
  EXPECT_EQ(pool->Trim(), 8 * kMiB);
  EXPECT_EQ(pool->stats().cached, 0);
  EXPECT_EQ(pool->stats().used, kMiB);
  EXPECT_EQ(pool->Trim(), 0);
  pool->Free(used, kMiB);
}

// Such blocks are in no list, but still on the books: who needed room just then was refused.
TEST(PoolAllocator, ABlockOnItsWayBackIsWaitedForBeforeAnAllocationFails) {
  constexpr int kBlocks = 1 << 17;  // small ones, so that giving all of them back takes a while
  constexpr std::int64_t kBytes = kBlocks * kBlockAlignment;
  for (const bool by_trim : {true, false}) {
    SCOPED_TRACE(by_trim ? "beside a Trim" : "beside another allocation");
    auto pool = MakeAllocator({.allocator = "pool", .bytes_max = kBytes});
    std::vector<void*> blocks;
    for (int i = 0; i < kBlocks; ++i) blocks.push_back(pool->Allocate(kBlockAlignment));
    for (void* block : blocks) pool->Free(block, kBlockAlignment);
    ASSERT_EQ(pool->stats().cached, kBytes);
    void* half = nullptr;
    std::thread other([&] {
      if (by_trim) {
        pool->Trim();
      } else {
        EXPECT_NO_THROW(half = pool->Allocate(kBytes / 2));
      }
    });
    while (pool->stats().cached == kBytes) std::this_thread::yield();  // the first has gone back
    void* rest = nullptr;
    EXPECT_NO_THROW(rest = pool->Allocate(kBytes / 2));
    other.join();
    for (void* block : {half, rest}) {
      if (block != nullptr) pool->Free(block, kBytes / 2);
    }
  }
}

TEST(PoolAllocator, NamesTheBlockThatDidNotFitBesideTheBytesAskedFor) {
  auto pool = MakeAllocator({.allocator = "pool", .bytes_max = 4 * kMiB + kMiB / 4});
  std::string message = MessageOf<OutOfMemory>([&] { (void)pool->Allocate(4 * kMiB + 1); });
  for (const char* part : {"4194305", "4718592", "4456448"}) {  // asked, its class, the cap
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  pool->set_bytes_max(std::int64_t{1} << 62);
  const std::int64_t bytes = (std::int64_t{1} << 55) + 1;  // more than there is
  message = MessageOf<OutOfMemory>([&] { (void)pool->Allocate(bytes); });
  EXPECT_NE(message.find(std::to_string(bytes)), std::string::npos) << message;
  EXPECT_NE(message.find(std::to_string(pool->BlockBytes(bytes))), std::string::npos) << message;
}

TEST(PoolAllocator, SizeClassesWasteLessThanAnEighth) {
  auto pool = MakeAllocator({.allocator = "pool"});
  for (std::int64_t bytes = 513; bytes < 3 * kMiB; bytes += bytes / 7 + 1) {
    void* block = pool->Allocate(bytes);
    const std::int64_t used = pool->stats().used;
    EXPECT_GE(used, bytes);
    EXPECT_LT(used - bytes, bytes / 8 + 64) << bytes;
    pool->Free(block, bytes);
    EXPECT_EQ(pool->stats().used, 0) << bytes;
    pool->Trim();
  }
}

TEST(MakeAllocator, RefusesUnknownNamesAndListsTheKnown) {
  const std::string message =
      MessageOf<InvalidArgument>([] { (void)MakeAllocator({.allocator = "slab"}); });
  EXPECT_NE(message.find("slab"), std::string::npos) << message;
  EXPECT_NE(message.find("pool, system"), std::string::npos) << message;
  EXPECT_THROW((void)MakeAllocator({.bytes_max = 0}), InvalidArgument);
}

}  // namespace
}  // namespace heddle::storage
