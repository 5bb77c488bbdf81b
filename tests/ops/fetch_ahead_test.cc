#include "ops/fetch_ahead.h"

#include <algorithm>
#include <cstddef>

#include <gtest/gtest.h>
#include <unistd.h>

namespace heddle::ops {
namespace {

// Or it would drive out what is at work.
TEST(FetchAheadTest, ItIsNoMoreThanAThirdOfTheFirstLevelCache) {
  const long cache = ::sysconf(_SC_LEVEL1_DCACHE_SIZE);  // 0: not known
  EXPECT_LE(3 * FetchAheadBytes(), static_cast<std::size_t>(std::max(cache, 0L)));
}

}  // namespace
}  // namespace heddle::ops
