// Steady time as a plain number, for records and deadlines that are compared often.
#pragma once

#include <chrono>
#include <cstdint>

namespace heddle {

// Nanoseconds of the steady clock; only differences mean anything.
inline std::int64_t SteadyNowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace heddle
