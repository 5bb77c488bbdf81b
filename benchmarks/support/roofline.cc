#include "benchmarks/support/roofline.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include <fmt/format.h>
#include <time.h>

#include "base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/support/roofline.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace heddle::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A run of one array. `sink` keeps reads from being optimised away.
template <bool kStream>
HWY_INLINE void MoveRun(Stream::Use use, std::uint8_t* p, std::size_t bytes, std::uint8_t* sink) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t lanes = hn::Lanes(d);
  constexpr std::size_t kUnroll = 4;
  const std::size_t step = kUnroll * lanes;
  std::size_t i = 0;
  switch (use) {
    case Stream::Use::kRead: {
      hn::Vec<decltype(d)> all[kUnroll];
      for (std::size_t u = 0; u < kUnroll; ++u) all[u] = hn::Load(d, sink);
      for (; i + step <= bytes; i += step) {
        for (std::size_t u = 0; u < kUnroll; ++u) {
          all[u] = hn::Or(all[u], hn::Load(d, p + i + u * lanes));
        }
      }
      for (; i + lanes <= bytes; i += lanes) all[0] = hn::Or(all[0], hn::Load(d, p + i));
      for (std::size_t u = 1; u < kUnroll; ++u) all[0] = hn::Or(all[0], all[u]);
      hn::Store(all[0], d, sink);
      break;
    }
    case Stream::Use::kUpdate: {
      const auto change = hn::Load(d, sink + 64);
      for (; i + step <= bytes; i += step) {
        for (std::size_t u = 0; u < kUnroll; ++u) {
          hn::Store(hn::Xor(hn::Load(d, p + i + u * lanes), change), d, p + i + u * lanes);
        }
      }
      for (; i + lanes <= bytes; i += lanes) {
        hn::Store(hn::Xor(hn::Load(d, p + i), change), d, p + i);
      }
      break;
    }
    case Stream::Use::kWrite: {
      const auto value = hn::Set(d, static_cast<std::uint8_t>(Memory::kSmallNumbers));
      for (; i + lanes <= bytes; i += lanes) {
        if constexpr (kStream) {
          hn::Stream(value, d, p + i);
        } else {
          hn::Store(value, d, p + i);
        }
      }
      break;
    }
  }
}

// All arrays side by side, in runs of a page of the longest.
template <bool kStream>
void MoveAll(std::span<const Stream> streams, std::size_t part, std::size_t parts) {
  // The second half: what updates change, nothing, which the compiler must not know.
  alignas(64) std::array<std::uint8_t, 128> sink = {};
  const volatile int nothing = 0;
  std::memset(sink.data() + 64, nothing, 64);
  std::size_t longest = 0;
  for (const Stream& stream : streams) longest = std::max(longest, stream.bytes);
  constexpr std::size_t kRunBytes = 4096;
  const std::size_t runs = std::max<std::size_t>(1, longest / kRunBytes);
  for (std::size_t run = runs * part / parts; run < runs * (part + 1) / parts; ++run) {
    for (const Stream& stream : streams) {
      const auto bound = [&](std::size_t r) { return stream.bytes * r / runs / 64 * 64; };
      const std::size_t begin = bound(run);
      const std::size_t end = run + 1 == runs ? stream.bytes / 64 * 64 : bound(run + 1);
      MoveRun<kStream>(stream.use, reinterpret_cast<std::uint8_t*>(stream.data) + begin,
                       end - begin, sink.data());
    }
  }
  if (kStream) hwy::FlushStream();
  asm volatile("" : : "r"(sink.data()) : "memory");  // what was read counts as used
}

void Move(std::span<const Stream> streams, bool streaming, std::size_t part, std::size_t parts) {
  (streaming ? &MoveAll<true> : &MoveAll<false>)(streams, part, parts);
}

}  // namespace heddle::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::bench {

HWY_EXPORT(Move);

namespace {

constexpr std::size_t kBeyondCaches = std::size_t{4} << 20;
constexpr std::size_t kBatchesMax = 6;

// Half of the rounds are near the median; all of these say the same of the bar.
bool IsSettled(std::vector<double> ratios, double bar) {
  std::sort(ratios.begin(), ratios.end());
  const double low = ratios[ratios.size() / 4];
  const double high = ratios[ratios.size() * 3 / 4];
  return low >= bar || high < bar;
}

template <typename F>
double SecondsPerCall(std::size_t calls, const F& call) {
  const double start = ThreadSeconds();
  for (std::size_t i = 0; i < calls; ++i) call();
  return (ThreadSeconds() - start) / static_cast<double>(calls);
}

}  // namespace

Memory::Memory(std::size_t bytes, int fill)
    : block_(static_cast<std::byte*>(TakeFromSystem(static_cast<std::int64_t>(bytes))),
             Return{static_cast<std::int64_t>(bytes)}) {
  CHECK(block_ != nullptr, "no memory");
  std::memset(block_.get(), fill, bytes);
}

std::size_t BytesMoved(std::span<const Stream> streams) {
  return std::accumulate(streams.begin(), streams.end(), std::size_t{0},
                         [](std::size_t sum, const Stream& s) { return sum + s.moved(); });
}

void MoveBytes(std::span<const Stream> streams, StoreKind stores, std::size_t part,
               std::size_t parts) {
  HWY_DYNAMIC_DISPATCH(Move)(streams, stores == StoreKind::kStreaming, part, parts);
}

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::vector<std::vector<double>> MeasureInTurn(std::span<const std::function<double()>> measure,
                                               int rounds) {
  constexpr int kTries = 3;
  std::vector<std::vector<double>> times(measure.size());
  for (int turn = -1; turn < rounds * kTries; ++turn) {  // the first warms up
    for (std::size_t i = 0; i < measure.size(); ++i) {
      const std::size_t contender = (i + static_cast<std::size_t>(turn + 1)) % measure.size();
      const double taken = measure[contender]();
      if (turn < 0) continue;
      if (turn % kTries == 0) {
        times[contender].push_back(taken);
      } else {
        times[contender].back() = std::min(times[contender].back(), taken);
      }
    }
  }
  return times;
}

void MeasureKernel(const KernelCase& kernel, int rounds, BarReport& report) {
  const KernelCase::Place* place = &kernel.places.front();
  const std::size_t bytes = BytesMoved(place->streams);
  const double moved = static_cast<double>(bytes + kernel.then_moves);
  const std::size_t calls = std::max<std::size_t>(1, (std::size_t{64} << 20) / bytes);
  const std::size_t longest = static_cast<std::size_t>(
      std::max_element(place->streams.begin(), place->streams.end(),
                       [](const Stream& a, const Stream& b) { return a.bytes < b.bytes; }) -
      place->streams.begin());
  const std::size_t longest_bytes = place->streams[longest].bytes;
  const Memory copy(longest_bytes);
  const double copies = moved / static_cast<double>(2 * longest_bytes);
  const std::size_t arithmetic = kernel.arithmetic_count;

  struct Contender {
    const char* name;
    std::function<double()> measure;  // seconds to move as much as the kernel does
  };
  const auto time = [&](const auto& run) {
    return SecondsPerCall(calls, [&] {
      run();
      if (place->then != nullptr) place->then();
    });
  };
  std::vector<Contender> contenders = {
      {"ours", [&] { return time([&] { place->run(kernel.count); }); }},
      {"plain loop", [&] { return time([&] { MoveBytes(place->streams, StoreKind::kCached); }); }}};
  const auto is_written = [](const Stream& s) { return s.use == Stream::Use::kWrite; };
  if (std::any_of(place->streams.begin(), place->streams.end(), is_written)) {
    contenders.push_back({"streaming loop", [&] {
                            return time([&] { MoveBytes(place->streams, StoreKind::kStreaming); });
                          }});
  }
  if (longest_bytes >= kBeyondCaches) {
    contenders.push_back({"memcpy", [&] {
                            return copies * SecondsPerCall(calls, [&] {
                                     std::memcpy(copy.data(), place->streams[longest].data,
                                                 longest_bytes);
                                   });
                          }});
  }
  const std::size_t loops = contenders.size();
  if (arithmetic != 0) {
    contenders.push_back({"its arithmetic in L1", [&] {
                            const double pieces =
                                static_cast<double>(kernel.count) / static_cast<double>(arithmetic);
                            return pieces * SecondsPerCall(calls * kernel.count / arithmetic,
                                                           [&] { place->run(arithmetic); }) +
                                   (place->then != nullptr ? time([] {}) : 0);
                          }});
  }
  std::vector<std::function<double()>> measure;
  for (const Contender& contender : contenders) measure.push_back(contender.measure);
  std::vector<std::vector<double>> seconds(measure.size());
  std::size_t limit = 1;
  std::vector<double> ratios;
  do {
    for (const KernelCase::Place& each : kernel.places) {
      place = &each;
      const auto more =
          MeasureInTurn(measure, std::max(1, rounds / static_cast<int>(kernel.places.size())));
      for (std::size_t c = 0; c < more.size(); ++c) {
        seconds[c].insert(seconds[c].end(), more[c].begin(), more[c].end());
      }
    }
    limit = 1;  // the fastest of the loops ...
    for (std::size_t c = 2; c < loops; ++c) {
      if (Median(seconds[c]) < Median(seconds[limit])) limit = c;
    }
    // ... unless the arithmetic takes longer
    if (arithmetic != 0 && Median(seconds[loops]) > Median(seconds[limit])) limit = loops;
    ratios.clear();
    for (std::size_t r = 0; r < seconds[0].size(); ++r) {
      ratios.push_back(seconds[limit][r] / seconds[0][r]);
    }
  } while (!IsSettled(ratios, kernel.bar) &&
           ratios.size() < kBatchesMax * static_cast<std::size_t>(rounds));
  const double ratio = Median(ratios);
  nlohmann::json all = nlohmann::json::object();
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    all[contenders[c].name] = moved / Median(seconds[c]) / 1e9;
  }
  report.Add({{"what", kernel.what},
              {"ours", moved / Median(seconds[0]) / 1e9},
              {"unit", "GB/s"},
              {"against", contenders[limit].name},
              {"limit", moved / Median(seconds[limit]) / 1e9},
              {"ratio", ratio},
              {"spread", Spread(ratios)},
              {"bar", fmt::format(">= {:g}", kernel.bar)},
              {"holds", ratio >= kernel.bar},
              {"all", all}});
}

}  // namespace heddle::bench
#endif  // HWY_ONCE
