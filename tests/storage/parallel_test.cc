// ForBlocks: every element once, in blocks that lie alike in the sections of all kernels.
#include "storage/parallel.h"

#include <heddle/engine.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "engine/block_sections.h"

namespace heddle::storage {
namespace {

// Where the second section begins: what the CPU of number 1 takes first.
std::int64_t BeginOfSecondSection(std::int64_t count, std::int64_t element_bytes, int workers) {
  const std::int64_t grain = BlockElements(count, element_bytes, workers);
  const std::int64_t blocks = count / grain + (count % grain != 0 ? 1 : 0);
  std::int64_t first = -1;
  engine::BlockSections(blocks, workers).TakeAll(1, [&](std::int64_t block) {
    first = block;
    return false;
  });
  return first * grain;
}

TEST(ForBlocksTest, SectionsOfAnArrayAreTheSameForAllKernels) {
  for (const int workers : {2, 3, 4, 7, 16}) {
    for (const std::int64_t count : {1 << 18, (1 << 20) + 17, 1'000'003, 1 << 24}) {
      // Bytes an element of a fill, a copy, an update of three arrays, sums of four and sixteen.
      for (const std::int64_t element_bytes : {4, 8, 12, 20, 68}) {
        if (count * element_bytes < workers * kBlockBytes) continue;  // not enough for all workers
        // Blocks are rounded up to lines.
        const std::int64_t blocks = count / BlockElements(count, element_bytes, workers) + 1;
        const std::int64_t slack = kBlockElementsMin * (blocks / workers + 1);
        EXPECT_NEAR(BeginOfSecondSection(count, element_bytes, workers), count / workers, slack)
            << count << " elements of " << element_bytes << " bytes, " << workers << " workers";
      }
    }
  }
}

TEST(ForBlocksTest, BlocksHaveAboutTheBytesThatPayForThem) {
  for (const int workers : {1, 2, 16, 64}) {
    for (const std::int64_t element_bytes : {1, 4, 12, 68}) {
      for (std::int64_t count = kSplitBytesMin / element_bytes + 1; count < 1 << 26;
           count = count * 3 + 1) {
        const std::int64_t bytes = BlockElements(count, element_bytes, workers) * element_bytes;
        const std::int64_t slack = kBlockElementsMin * element_bytes;
        EXPECT_LE(bytes, kBlockBytes + slack) << count;
        EXPECT_GE(bytes, kBlockBytes / 2 - slack) << count;
      }
    }
  }
}

TEST(ForBlocksTest, CoversEveryElementOnce) {
  for (const int workers : {1, 2, 5}) {
    EngineOptions options;
    options.num_workers = workers;
    Engine engine(options);
    for (const std::int64_t count : {0, 1, 63, (1 << 16) - 1, 100'001, (1 << 20) + 5}) {
      std::vector<int> times(static_cast<std::size_t>(count));
      const Var var = engine.NewVar("array");
      engine.Push({.name = "cover", .writes = {var}}, [&] {
        ForBlocks(engine, count, 12, [&](std::int64_t begin, std::int64_t end, ops::StoreMode) {
          for (std::int64_t i = begin; i < end; ++i) ++times[static_cast<std::size_t>(i)];
        });
      });
      engine.WaitForAll();
      EXPECT_EQ(std::ranges::count(times, 1), count)
          << count << " elements, " << workers << " workers";
    }
  }
}

}  // namespace
}  // namespace heddle::storage
