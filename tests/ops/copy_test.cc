#include "ops/copy.h"

#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::ops {
namespace {

class CopyTest : public KernelTest {};

TEST_F(CopyTest, CopiesBytesAndNothingElse) {
  for (int round = 0; round < Scaled(100); ++round) {
    const std::size_t bytes = round % 10 > 0 ? RandomCount() : (std::size_t{1} << 20) + Below(5000);
    Array<std::uint8_t> source(bytes, Below(100));
    Randomize(source, random_);
    OnEveryTarget([&] {
      for (StoreMode mode : kEveryStoreMode) {
        Array<std::uint8_t> out(bytes, Below(100));
        Copy(source.data(), out.data(), bytes, mode);
        EXPECT_EQ(std::memcmp(out.data(), source.data(), bytes), 0);
      }
    });
  }
}

TEST_F(CopyTest, OntoItselfChangesNothing) {
  std::vector<int> values = {1, 2, 3};
  Copy(values.data(), values.data(), 3 * sizeof(int));
  EXPECT_EQ(values, (std::vector<int>{1, 2, 3}));
}

TEST_F(CopyTest, NothingNeedsNoMemory) { Copy(nullptr, nullptr, 0); }

}  // namespace
}  // namespace heddle::ops
