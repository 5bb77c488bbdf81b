// How many lines others may cause in the log: so many in a period, then only their number.
//
//   if (const auto left_out = limit.Take(now)) Log(..., "... ({} more like it were left out)",
//   *left_out);
//
// Threads: one call at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

namespace heddle {

class LogLimit {
 public:
  using Clock = std::chrono::steady_clock;

  LogLimit(int lines_max, Clock::duration period) : lines_max_(lines_max), period_(period) {}

  // Whether a line may be written, and then how many were not since the last that was.
  std::optional<std::uint64_t> Take(Clock::time_point now) {
    if (lines_ == 0 || now - begin_ >= period_) {
      begin_ = now;
      lines_ = 0;
    }
    if (lines_ == lines_max_) {
      ++left_out_;
      return std::nullopt;
    }
    ++lines_;
    return std::exchange(left_out_, 0);
  }

 private:
  const int lines_max_;
  const Clock::duration period_;
  Clock::time_point begin_{};
  int lines_ = 0;  // since begin_
  std::uint64_t left_out_ = 0;
};

}  // namespace heddle
