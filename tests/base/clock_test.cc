#include "base/clock.h"

#include <chrono>
#include <cstdint>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Clock, CountsNanosecondsOfTheSteadyClock) {
  const auto before = std::chrono::steady_clock::now();
  const std::int64_t now_ns = SteadyNowNs();
  const auto after = std::chrono::steady_clock::now();
  EXPECT_LE(std::chrono::nanoseconds(before.time_since_epoch()).count(), now_ns);
  EXPECT_LE(now_ns, std::chrono::nanoseconds(after.time_since_epoch()).count());
}

}  // namespace
}  // namespace heddle
