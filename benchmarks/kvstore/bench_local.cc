// How fast the store `local` is: small arrays against fixed limits, large ones against the memory.
//
//   bench_local [--json FILE] [--quick]
//
// Small: push and pull of 4 KiB of float32 under a string key, one device, default updater, until
// the
//   output is readable. Each run gives the medians of the two calls and of the whole.
// Large: push of 4 arrays of 16 MiB and pull to 4 others. The least to move is 5 arrays each: 4
//   reads and 1 write, then 1 read and 4 writes. The limit is the time in which plain loops of the
//   same reads and writes, on as many threads as the engine has workers, move them: the best of
//   loops with and without streaming stores, and of memcpy between the 4 arrays per byte. All run
//   in one process over the same arrays, in turn, and each round gives one ratio; what counts is
//   the median.
// Status 1: a bar falls short.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/support/bars.h"
#include "benchmarks/support/team.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/kvstore/bench_local.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace heddle::bench_local::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <bool kStream, class D>
HWY_INLINE void StoreTo(hn::Vec<D> v, D d, float* p) {
  if constexpr (kStream) {
    hn::Stream(v, d, p);
  } else {
    hn::Store(v, d, p);
  }
}

// out[0] = the sum of 4 inputs. Whole cache lines of stores in a row, apart from the loads.
template <bool kStream>
void SumLoop(const float* const* in, float* const* out, std::size_t begin, std::size_t end) {
  const hn::ScalableTag<float> d;
  constexpr std::size_t kUnroll = 4;
  const std::size_t step = kUnroll * hn::Lanes(d);
  for (std::size_t i = begin; i < end; i += step) {
    hn::Vec<decltype(d)> sum[kUnroll];
    for (std::size_t u = 0; u < kUnroll; ++u) {
      const std::size_t at = i + u * hn::Lanes(d);
      sum[u] = hn::Add(hn::Add(hn::Load(d, in[0] + at), hn::Load(d, in[1] + at)),
                       hn::Add(hn::Load(d, in[2] + at), hn::Load(d, in[3] + at)));
    }
    for (std::size_t u = 0; u < kUnroll; ++u) {
      StoreTo<kStream>(sum[u], d, out[0] + i + u * hn::Lanes(d));
    }
  }
  if (kStream) hwy::FlushStream();
}

// 4 outputs = in[0].
template <bool kStream>
void FanLoop(const float* const* in, float* const* out, std::size_t begin, std::size_t end) {
  const hn::ScalableTag<float> d;
  constexpr std::size_t kUnroll = 4;
  const std::size_t step = kUnroll * hn::Lanes(d);
  for (std::size_t i = begin; i < end; i += step) {
    hn::Vec<decltype(d)> v[kUnroll];
    for (std::size_t u = 0; u < kUnroll; ++u) v[u] = hn::Load(d, in[0] + i + u * hn::Lanes(d));
    for (std::size_t k = 0; k < 4; ++k) {
      for (std::size_t u = 0; u < kUnroll; ++u) {
        StoreTo<kStream>(v[u], d, out[k] + i + u * hn::Lanes(d));
      }
    }
  }
  if (kStream) hwy::FlushStream();
}

void PlainLoop(bool sum, bool stream, const float* const* in, float* const* out, std::size_t begin,
               std::size_t end) {
  if (sum) {
    (stream ? &SumLoop<true> : &SumLoop<false>)(in, out, begin, end);
  } else {
    (stream ? &FanLoop<true> : &FanLoop<false>)(in, out, begin, end);
  }
}

}  // namespace heddle::bench_local::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::bench_local {

HWY_EXPORT(PlainLoop);

namespace {

using bench::BarReport;
using bench::Median;
using bench::Spread;
using bench::Team;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// ---- Small

void AddLimit(BarReport& report, const std::string& what, const std::vector<double>& runs_us,
              double limit_us) {
  std::vector<double> ratios;
  for (double run : runs_us) ratios.push_back(run / limit_us);
  const double ours = Median(runs_us);
  report.Add({{"what", what},
              {"ours", ours},
              {"unit", "us"},
              {"against", "limit"},
              {"limit", limit_us},
              {"ratio", ours / limit_us},
              {"spread", Spread(ratios)},
              {"bar", fmt::format("<= {:g} us", limit_us)},
              {"holds", ours <= limit_us}});
}

void MeasureSmall(BarReport& report, bool quick) {
  Engine engine;
  const auto store = KVStore::Create("local", engine);
  const Shape shape{1024};
  const NDArray gradient = NDArray::Ones(shape, DType::kFloat32, Cpu(), engine);
  const NDArray out = NDArray::Zeros(shape, DType::kFloat32, Cpu(), engine);
  const std::string key = "layer3.weight";
  store->Init(key, gradient);
  engine.WaitForAll();

  const int runs = 5;
  const int rounds = quick ? 5'000 : 40'000;
  std::vector<double> push_us;
  std::vector<double> pull_us;
  std::vector<double> readable_us;
  for (int run = -1; run < runs; ++run) {  // the first warms up
    std::vector<double> push;
    std::vector<double> pull;
    std::vector<double> readable;
    for (int round = 0; round < rounds; ++round) {
      const Clock::time_point start = Clock::now();
      store->Push(key, gradient);
      const Clock::time_point pushed = Clock::now();
      store->Pull(key, out);
      const Clock::time_point pulled = Clock::now();
      out.WaitToRead();
      const Clock::time_point end = Clock::now();
      const auto us = [](Clock::duration d) {
        return std::chrono::duration<double, std::micro>(d).count();
      };
      push.push_back(us(pushed - start));
      pull.push_back(us(pulled - pushed));
      readable.push_back(us(end - start));
    }
    if (run < 0) continue;
    push_us.push_back(Median(std::move(push)));
    pull_us.push_back(Median(std::move(pull)));
    readable_us.push_back(Median(std::move(readable)));
  }
  AddLimit(report, "push + pull of 4 KiB, one device, until readable, median", readable_us, 1.5);
  AddLimit(report, "the push call of 4 KiB, median", push_us, 0.3);
  AddLimit(report, "the pull call of 4 KiB, median", pull_us, 0.3);
}

// ---- Large

enum Contender { kOurs, kPlain, kStreaming, kMemcpy, kContenders };

// Seconds of the two halves: 4 -> 1 and 1 -> 4.
struct Halves {
  double push = 0;
  double pull = 0;
};

class Large {
 public:
  static constexpr std::size_t kArrays = 4;
  static constexpr std::size_t kBytes = std::size_t{16} << 20;
  static constexpr std::size_t kCount = kBytes / sizeof(float);

  explicit Large(Engine& engine) : engine_(engine), store_(KVStore::Create("local", engine)) {
    for (std::size_t i = 0; i < kArrays; ++i) {
      gradients_.push_back(NewArray(static_cast<int>(i)));
      outs_.push_back(NewArray(static_cast<int>(i)));
      in_pointers_.push_back(gradients_.back().data<float>());
      out_pointers_.push_back(outs_.back().data<float>());
    }
    middle_ = NewArray(0);
    store_->Init("weight", middle_);
  }

  // Our push and pull are timed as one: the pull's op follows the push's without a wait between.
  double Ours() {
    const Clock::time_point start = Clock::now();
    store_->Push("weight", gradients_);
    store_->Pull("weight", outs_);
    for (const NDArray& out : outs_) out.WaitToRead();
    return SecondsSince(start);
  }

  Halves Loops(Contender contender, Team& team) {
    float* const middle = middle_.data<float>();
    const float* const from_middle = middle;
    const auto half = [&](bool push) {
      const float* const* in = push ? in_pointers_.data() : &from_middle;
      float* const* out = push ? &middle : out_pointers_.data();
      // All of them hold the same numbers.
      float* const* const all = push ? in_pointers_.data() : out_pointers_.data();
      const Clock::time_point start = Clock::now();
      team.Run([&](int index) {
        const std::size_t part = kCount / static_cast<std::size_t>(team.size()) / 1024 * 1024;
        const std::size_t begin = static_cast<std::size_t>(index) * part;
        const std::size_t end = index + 1 == team.size() ? kCount : begin + part;
        if (contender == kMemcpy) {
          for (std::size_t i = 0; i < kArrays; i += 2) {
            std::memcpy(all[i + 1] + begin, all[i] + begin, (end - begin) * sizeof(float));
          }
        } else {
          HWY_DYNAMIC_DISPATCH(PlainLoop)(push, contender == kStreaming, in, out, begin, end);
        }
      });
      // memcpy moves 4 arrays: as if it had moved 5.
      return SecondsSince(start) * (contender == kMemcpy ? 1.25 : 1);
    };
    const double push = half(true);
    return {push, half(false)};
  }

 private:
  NDArray NewArray(int device) const {
    const NDArray array =
        NDArray::Ones({static_cast<std::int64_t>(kCount)}, DType::kFloat32, Cpu(device), engine_);
    array.WaitToRead();
    return array;
  }

  Engine& engine_;
  std::unique_ptr<KVStore> store_;
  std::vector<NDArray> gradients_;
  std::vector<NDArray> outs_;
  NDArray middle_;
  std::vector<float*> in_pointers_;
  std::vector<float*> out_pointers_;
};

void MeasureLarge(BarReport& report, bool quick) {
  Engine engine;
  Large large(engine);
  const int rounds = quick ? 7 : 25;
  std::vector<double> ours;
  std::vector<Halves> loops[kContenders];
  for (int round = -2; round < rounds; ++round) {  // the first two warm up
    const double seconds = large.Ours();
    if (round >= 0) ours.push_back(seconds);
    // The engine's workers have gone to sleep before the team measures, and the other way round.
    Team team(engine.options().num_workers);
    for (Contender contender : {kPlain, kStreaming, kMemcpy}) {
      const Halves halves = large.Loops(contender, team);
      if (round >= 0) loops[contender].push_back(halves);
    }
  }

  const auto best_of = [&](double Halves::*half) {
    Contender best = kPlain;
    double least = 0;
    for (Contender contender : {kPlain, kStreaming, kMemcpy}) {
      std::vector<double> seconds;
      for (const Halves& halves : loops[contender]) seconds.push_back(halves.*half);
      const double median = Median(std::move(seconds));
      if (least == 0 || median < least) {
        least = median;
        best = contender;
      }
    }
    return best;
  };
  constexpr const char* kNames[] = {"ours", "plain loop", "streaming loop", "memcpy"};
  const Contender push = best_of(&Halves::push);
  const Contender pull = best_of(&Halves::pull);
  std::vector<double> limits;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    limits.push_back(loops[push][i].push + loops[pull][i].pull);
    ratios.push_back(limits.back() / ours[i]);
  }
  const double gigabytes = 10.0 * static_cast<double>(Large::kBytes) / 1e9;
  report.Add(
      {{"what", "push of 4 arrays of 16 MiB + pull to 4"},
       {"ours", gigabytes / Median(ours)},
       {"unit", "GB/s"},
       {"against", fmt::format("{} for the sum, {} for the copies", kNames[push], kNames[pull])},
       {"limit", gigabytes / Median(limits)},
       {"ratio", Median(ratios)},
       {"spread", Spread(ratios)},
       {"bar", ">= 0.9"},
       {"holds", Median(ratios) >= 0.9},
       {"milliseconds", Median(ours) * 1e3}});
}

int Main(int argc, char** argv) {
  BarReport report;
  const auto arguments = bench::ParseArguments(argc, argv, report);
  if (!arguments) return 2;
  MeasureSmall(report, arguments->quick);
  MeasureLarge(report, arguments->quick);
  return report.all_hold() ? 0 : 1;
}

}  // namespace
}  // namespace heddle::bench_local

int main(int argc, char** argv) { return heddle::bench_local::Main(argc, argv); }
#endif  // HWY_ONCE
