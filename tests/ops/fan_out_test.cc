#include "ops/fan_out.h"

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

class FanOutTest : public KernelTest {};

TEST_F(FanOutTest, CopiesBytesToEachAndNothingElse) {
  for (int round = 0; round < 100; ++round) {
    const std::size_t bytes = RandomCount();
    const std::size_t count = 1 + Below(5);
    const bool aligned = Below(2) == 0;
    Array<std::uint8_t> source(bytes, Below(100));
    Randomize(source, random_);
    OnEveryTarget([&] {
      for (StoreMode mode : kEveryStoreMode) {
        std::deque<Array<std::uint8_t>> arrays;
        std::vector<void*> out;
        for (std::size_t i = 0; i < count; ++i) {
          arrays.emplace_back(bytes, aligned ? 0 : Below(100));
          out.push_back(arrays.back().data());
        }
        FanOut(source.data(), out, bytes, mode);
        for (void* to : out) EXPECT_EQ(std::memcmp(to, source.data(), bytes), 0);
      }
    });
  }
}

TEST_F(FanOutTest, TheSourceMayBeAnOutputAndAnOutputNamedTwice) {
  Array<std::uint8_t> source(1000, 0);
  Array<std::uint8_t> other(1000, 0);
  Randomize(source, random_);
  const std::vector<std::uint8_t> expected(source.data(), source.data() + 1000);
  for (StoreMode mode : kEveryStoreMode) {
    const std::vector<void*> out = {source.data(), other.data(), other.data()};
    FanOut(source.data(), out, 1000, mode);
    EXPECT_EQ(std::memcmp(source.data(), expected.data(), 1000), 0);
    EXPECT_EQ(std::memcmp(other.data(), expected.data(), 1000), 0);
  }
}

TEST_F(FanOutTest, NothingNeedsNoMemory) { FanOut(nullptr, {}, 0); }

}  // namespace
}  // namespace heddle::ops
