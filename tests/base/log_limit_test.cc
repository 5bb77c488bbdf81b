#include "base/log_limit.h"

#include <gtest/gtest.h>

namespace heddle {
namespace {

using std::chrono::seconds;

TEST(LogLimit, LeavesOutWhatIsTooMuchAndSaysHowMuch) {
  LogLimit limit(2, seconds(10));
  const LogLimit::Clock::time_point start(seconds(1000));
  EXPECT_EQ(limit.Take(start), 0u);
  EXPECT_EQ(limit.Take(start + seconds(1)), 0u);
  for (int i = 2; i < 9; ++i) EXPECT_EQ(limit.Take(start + seconds(i)), std::nullopt);
  EXPECT_EQ(limit.Take(start + seconds(10)), 7u);
  EXPECT_EQ(limit.Take(start + seconds(11)), 0u);
  EXPECT_EQ(limit.Take(start + seconds(12)), std::nullopt);
}

TEST(LogLimit, APeriodBeginsWithItsFirstLine) {
  LogLimit limit(1, seconds(10));
  const LogLimit::Clock::time_point start(seconds(1000));
  EXPECT_EQ(limit.Take(start), 0u);
  EXPECT_EQ(limit.Take(start + seconds(25)), 0u);
  EXPECT_EQ(limit.Take(start + seconds(34)), std::nullopt);
  EXPECT_EQ(limit.Take(start + seconds(35)), 1u);
}

}  // namespace
}  // namespace heddle
