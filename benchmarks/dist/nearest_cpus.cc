#include "benchmarks/dist/nearest_cpus.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <thread>

#include <fmt/format.h>
#include <sched.h>

#include "base/check.h"
#include "base/pause.h"
#include "benchmarks/dist/processes.h"
#include "benchmarks/support/bars.h"

namespace heddle::bench_dist {
namespace {

struct Lines {
  alignas(64) std::atomic<std::uint32_t> asked{0};
  alignas(64) std::atomic<std::uint32_t> answered{0};
};

void Await(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  while (word.load(std::memory_order_acquire) != value) Pause();
}

// The least of several runs: others want these CPUs, too.
double RoundTripNs(int first, int second) {
  constexpr int kRuns = 5;
  constexpr std::uint32_t kTrips = 200;
  Lines lines;
  double least = std::numeric_limits<double>::max();
  std::thread echo([&] {
    PinThisThread(second);
    for (std::uint32_t trip = 1; trip <= kRuns * kTrips; ++trip) {
      Await(lines.asked, trip);
      lines.answered.store(trip, std::memory_order_release);
    }
  });
  PinThisThread(first);
  std::uint32_t trip = 0;
  for (int run = 0; run < kRuns; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint32_t i = 0; i < kTrips; ++i) {
      lines.asked.store(++trip, std::memory_order_release);
      Await(lines.answered, trip);
    }
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    least = std::min(least, time.count() / kTrips);
  }
  echo.join();
  return least;
}

}  // namespace

CpuPair NearestCpus() {
  constexpr int kCpusMax = 8;
  cpu_set_t before;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  const int cpus = std::min(NumCpus(), kCpusMax);
  CpuPair nearest{.round_trip_ns = std::numeric_limits<double>::max()};
  for (int first = 0; first < cpus; ++first) {
    for (int second = first + 1; second < cpus; ++second) {
      const double round_trip_ns = RoundTripNs(first, second);
      if (round_trip_ns < nearest.round_trip_ns) nearest = {first, second, round_trip_ns};
    }
  }
  CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
  return nearest;
}

void NearbyPlaces::Take() {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  CpuPair now = NearestCpus();
  while (now.round_trip_ns > kNearNs && std::chrono::steady_clock::now() < end) now = NearestCpus();
  round_trips_ns_.push_back(now.round_trip_ns);
  if (now.first != pair_.first || now.second != pair_.second) {
    PinThisProcess(now.first);
    pin_servers_(now.second);
  }
  pair_ = now;
}

std::string NearbyPlaces::text() const {
  return fmt::format("CPUs {:.2g} us apart", bench::Median(round_trips_ns_) / 1000);
}

}  // namespace heddle::bench_dist
