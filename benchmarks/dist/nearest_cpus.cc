#include "benchmarks/dist/nearest_cpus.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>

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

// Work that keeps a core busy: in registers, and little of it depends on what was just before.
double TimeOfWorkNs() {
  constexpr std::uint64_t kSteps = 20'000;
  static std::atomic<std::uint64_t> result;  // so that nothing is left out
  std::uint64_t a = 1, b = 2, c = 3, d = 4, e = 5, f = 6;
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    a = (a ^ step) + a;
    b = (b ^ step) + b;
    c = (c ^ step) + c;
    d = (d ^ step) + d;
    e = (e ^ step) + e;
    f = (f ^ step) + f;
  }
  result.store(a + b + c + d + e + f, std::memory_order_relaxed);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
}

// The least of several runs: others want these CPUs, too.
template <class Run>
double LeastOf(Run run) {
  constexpr int kRuns = 5;
  double least = run();
  for (int i = 1; i < kRuns; ++i) least = std::min(least, run());
  return least;
}

CpuPair MeasurePair(int first, int second) {
  constexpr std::uint32_t kTrips = 200;
  constexpr std::uint32_t kWork = 0xffff'fffe;
  constexpr std::uint32_t kEnd = 0xffff'ffff;
  constexpr double kSlowdownOfOneCore = 1.3;  // it was 1.5 to 1.8
  Lines lines;
  std::thread other([&] {
    PinThisThread(second);
    std::uint32_t asked = 0;
    for (std::uint32_t trip = 1; asked < kWork; ++trip) {
      while ((asked = lines.asked.load(std::memory_order_acquire)) < trip) Pause();
      lines.answered.store(asked, std::memory_order_release);
    }
    while (lines.asked.load(std::memory_order_acquire) != kEnd) TimeOfWorkNs();
  });
  PinThisThread(first);
  std::uint32_t trip = 0;
  const auto ask = [&](std::uint32_t what) {
    lines.asked.store(what, std::memory_order_release);
    while (lines.answered.load(std::memory_order_acquire) != what) Pause();
  };
  const double round_trip_ns = LeastOf([&] {
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint32_t i = 0; i < kTrips; ++i) ask(++trip);
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    return time.count() / kTrips;
  });
  ask(kWork);
  const double together_ns = LeastOf(TimeOfWorkNs);
  lines.asked.store(kEnd, std::memory_order_release);
  other.join();
  return {.first = first,
          .second = second,
          .round_trip_ns = round_trip_ns,
          .one_core = together_ns > kSlowdownOfOneCore * LeastOf(TimeOfWorkNs)};
}

}  // namespace

CpuPair NearestCpus() {
  constexpr int kCpusMax = 8;
  cpu_set_t before;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  const int cpus = std::min(NumCpus(), kCpusMax);
  std::optional<CpuPair> nearest;
  const auto rank = [](const CpuPair& pair) {
    return std::pair(pair.one_core, pair.round_trip_ns);
  };
  for (int first = 0; first < cpus; ++first) {
    for (int second = first + 1; second < cpus; ++second) {
      const CpuPair pair = MeasurePair(first, second);
      if (!nearest || rank(pair) < rank(*nearest)) nearest = pair;
    }
  }
  CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
  return nearest.value_or(CpuPair{.second = 0});  // the only one there is
}

void NearbyPlaces::Take() {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  CpuPair now = NearestCpus();
  while ((now.one_core || now.round_trip_ns > kNearNs) && std::chrono::steady_clock::now() < end) {
    now = NearestCpus();
  }
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
