// A cheap clock and a body that computes for a given time.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace heddle::bench {

using SteadyClock = std::chrono::steady_clock;

// Counts at a constant rate; reading it takes a few nanoseconds.
inline std::uint64_t Ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<std::uint64_t>(SteadyClock::now().time_since_epoch().count());
#endif
}

// Measured against steady_clock for 20 ms on first use.
inline double TicksPerNanosecond() {
  static const double rate = [] {
    const auto start = SteadyClock::now();
    const std::uint64_t first = Ticks();
    while (SteadyClock::now() - start < std::chrono::milliseconds(20)) {
    }
    const std::uint64_t ticks = Ticks() - first;
    const auto elapsed = std::chrono::duration<double, std::nano>(SteadyClock::now() - start);
    return static_cast<double>(ticks) / elapsed.count();
  }();
  return rate;
}

inline void SpinTicks(std::uint64_t ticks) {
  const std::uint64_t start = Ticks();
  while (Ticks() - start < ticks) {
  }
}

inline void SpinFor(std::chrono::nanoseconds time) {
  SpinTicks(static_cast<std::uint64_t>(static_cast<double>(time.count()) * TicksPerNanosecond()));
}

}  // namespace heddle::bench
