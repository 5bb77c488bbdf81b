// How close the n-way sum comes to what the machine's memory allows.
//
//   bench_sum_roofline [--json FILE] [--quick]
//
// For 2 to 16 inputs of 4 KiB to 64 MiB, float32 and bfloat16, one thread: ours against the best of
// the plain loops of the same SIMD target, made for just that number of inputs, with ordinary and
// with streaming stores. The bytes moved are N reads and one write. For arrays beyond the caches
// memcpy between the inputs checks the loops: if it moves a byte 10% faster than they do, they are
// no limit, and it is. Nobody reads the sum of these lines, so ours too runs with either kind of
// stores, and the better one counts. The lines "and a copy of it" read it, as a pull does: there
// ours runs as it chooses by itself. All run in one process over the same arrays, in turn, and each
// round gives one ratio; what counts is the median. A line stands for the number of inputs that
// comes out worst. Status 1: a bar falls short.
#include <heddle/dtype.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "benchmarks/support/bars.h"
#include "benchmarks/support/roofline.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/ops/sum_roofline.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"
#include "ops/sum.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

template <std::size_t kInputs, bool kStream, typename T>
void PlainLoop(std::span<const void* const> inputs, T* out, std::size_t count) {
  const hn::ScalableTag<float> d;
  const T* in[kInputs];
  for (std::size_t k = 0; k < kInputs; ++k) in[k] = static_cast<const T*>(inputs[k]);
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
    auto sum = LoadAs(d, in[0] + i);
    for (std::size_t k = 1; k < kInputs; ++k) sum = hn::Add(sum, LoadAs(d, in[k] + i));
    StoreAs<kStream>(sum, d, out + i);
  }
  if (kStream) hwy::FlushStream();
}

template <bool kStream, typename T, std::size_t... kIndices>
void PlainLoopOf(std::span<const void* const> inputs, T* out, std::size_t count,
                 std::index_sequence<kIndices...>) {
  using Loop = void (*)(std::span<const void* const>, T*, std::size_t);
  static constexpr Loop kLoops[] = {&PlainLoop<kIndices + 2, kStream, T>...};
  kLoops[inputs.size() - 2](inputs, out, count);
}

// The arrays are whole vectors long.
void PlainSum(DType dtype, std::span<const void* const> inputs, void* out, std::size_t count,
              bool streaming) {
  const auto run = [&](auto* typed_out) HWY_ATTR {
    constexpr std::make_index_sequence<15> kFrom2To16;
    if (streaming) {
      PlainLoopOf<true>(inputs, typed_out, count, kFrom2To16);
    } else {
      PlainLoopOf<false>(inputs, typed_out, count, kFrom2To16);
    }
  };
  if (dtype == DType::kFloat32) {
    run(static_cast<float*>(out));
  } else {
    run(static_cast<BFloat16*>(out));
  }
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(PlainSum);

namespace {

constexpr double kBar = 0.9;
constexpr double kLoopsCheck = 1.1;  // from here on memcpy shows the loops to be slow
constexpr std::size_t kBeyondCaches = std::size_t{4} << 20;

// The arrays of one size: 16 inputs, an output and a copy of that, page-aligned.
class Arrays {
 public:
  explicit Arrays(std::size_t bytes) {
    for (int k = 0; k <= 17; ++k) {
      memory_.emplace_back(bytes, k + 1);  // small numbers in both formats
      pointers_.push_back(memory_.back().data());
    }
  }
  std::span<const void* const> inputs(std::size_t n) const { return {pointers_.data(), n}; }
  void* input(std::size_t k) const { return memory_[k].data(); }
  void* out() const { return memory_[16].data(); }
  void* copy() const { return memory_[17].data(); }

 private:
  std::vector<bench::Memory> memory_;
  std::vector<const void*> pointers_;
};

template <typename F>
double SecondsPerCall(std::size_t calls, const F& call) {
  const double start = bench::ThreadSeconds();
  for (std::size_t i = 0; i < calls; ++i) call();
  return (bench::ThreadSeconds() - start) / static_cast<double>(calls);
}

struct Result {
  std::size_t inputs = 0;
  double ours = 0;  // GB/s, as the next two
  double limit = 0;
  double memcpy = 0;
  std::string stores;  // of ours
  std::string limit_name;
  double ratio = 0;  // median over the rounds
  std::vector<double> spread;
};

// Of the sum alone, or with a copy of it.
enum class Then { kNothing, kCopy };

Result Measure(DType dtype, std::size_t inputs, std::size_t bytes, Then then, const Arrays& arrays,
               int rounds) {
  const auto in = arrays.inputs(inputs);
  void* const out = arrays.out();
  const std::size_t count = bytes / SizeOf(dtype);
  const double moved = static_cast<double>((then == Then::kCopy ? inputs + 3 : inputs + 1) * bytes);
  const std::size_t calls =
      std::max<std::size_t>(1, (std::size_t{64} << 20) / ((inputs + 1) * bytes));

  enum { kOurs, kOursCached, kOursStreaming, kPlain, kStreaming, kMemcpy, kContenders };
  const auto time = [&](const auto& sum) {
    return SecondsPerCall(calls, [&] {
      sum();
      if (then == Then::kCopy) std::memcpy(arrays.copy(), out, bytes);
    });
  };
  const std::size_t pairs = (inputs + 1) / 2;
  const auto array = [&](std::size_t k) { return k < inputs ? arrays.input(k) : out; };
  const auto run = [&](int contender) {
    switch (contender) {
      case kOurs:
        return time([&] { Sum(dtype, in, out, count); });
      case kOursCached:
        return time([&] { Sum(dtype, in, out, count, StoreMode::kCached); });
      case kOursStreaming:
        return time([&] { Sum(dtype, in, out, count, StoreMode::kStreaming); });
      case kPlain:
        return time([&] { HWY_DYNAMIC_DISPATCH(PlainSum)(dtype, in, out, count, false); });
      case kStreaming:
        return time([&] { HWY_DYNAMIC_DISPATCH(PlainSum)(dtype, in, out, count, true); });
      default:
        // Over the arrays of the sum, so that as much of them lies in the caches; per byte moved,
        // as if it had moved as many as the sum.
        return SecondsPerCall(calls,
                              [&] {
                                for (std::size_t pair = 0; pair < pairs; ++pair) {
                                  std::memcpy(array(2 * pair + 1), array(2 * pair), bytes);
                                }
                              }) *
               moved / static_cast<double>(2 * pairs * bytes);
    }
  };
  std::vector<std::function<double()>> measure;
  for (int contender = 0; contender < kContenders; ++contender) {
    measure.emplace_back([&run, contender] { return run(contender); });
  }
  const std::vector<std::vector<double>> seconds = bench::MeasureInTurn(measure, rounds);

  const auto fastest = [&](std::initializer_list<int> contenders) {
    return std::min(contenders, [&](int a, int b) {
      return bench::Median(seconds[a]) < bench::Median(seconds[b]);
    });
  };
  int best = fastest({kPlain, kStreaming});
  if (bytes >= kBeyondCaches &&
      bench::Median(seconds[kMemcpy]) < bench::Median(seconds[best]) / kLoopsCheck) {
    best = kMemcpy;
  }
  const int ours = then == Then::kCopy ? kOurs : fastest({kOursCached, kOursStreaming});
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    ratios.push_back(seconds[best][round] / seconds[ours][round]);
  }
  const auto rate = [&](int contender) { return moved / bench::Median(seconds[contender]) / 1e9; };
  constexpr const char* kNames[] = {"by itself",  "ordinary",       "streaming",
                                    "plain loop", "streaming loop", "memcpy"};
  return {.inputs = inputs,
          .ours = rate(ours),
          .limit = rate(best),
          .memcpy = rate(kMemcpy),
          .stores = kNames[ours],
          .limit_name = kNames[best],
          .ratio = bench::Median(ratios),
          .spread = bench::Spread(ratios)};
}

nlohmann::json CaseOf(const Result& result) {
  return {{"inputs", result.inputs},      {"ours", result.ours},    {"stores", result.stores},
          {"against", result.limit_name}, {"limit", result.limit},  {"memcpy", result.memcpy},
          {"ratio", result.ratio},        {"spread", result.spread}};
}

nlohmann::json BarOf(DType dtype, std::size_t bytes, Then then,
                     const std::vector<Result>& results) {
  const Result& worst =
      *std::min_element(results.begin(), results.end(),
                        [](const Result& a, const Result& b) { return a.ratio < b.ratio; });
  nlohmann::json cases = nlohmann::json::array();
  for (const Result& result : results) cases.push_back(CaseOf(result));
  return {
      {"what", fmt::format("sum of {} to {} {} arrays of {}{}, worst at {}", results.front().inputs,
                           results.back().inputs, Name(dtype), bench::BytesText(bytes),
                           then == Then::kCopy ? " and a copy of it" : "", worst.inputs)},
      {"ours", worst.ours},
      {"unit", "GB/s"},
      {"against", worst.limit_name},
      {"limit", worst.limit},
      {"ratio", worst.ratio},
      {"spread", worst.spread},
      {"bar", fmt::format(">= {:g}", kBar)},
      {"holds", worst.ratio >= kBar},
      {"cases", cases}};
}

int Main(int argc, char** argv) {
  bench::BarReport report;
  const auto arguments = bench::ParseArguments(argc, argv, report);
  if (!arguments) return 2;
  const bool quick = arguments->quick;
  const int rounds = quick ? 1 : 5;
  const std::vector<std::size_t> sizes_kib =
      quick ? std::vector<std::size_t>{4, 1024, 16384}
            : std::vector<std::size_t>{4, 16, 64, 256, 1024, 4096, 16384, 65536};
  for (std::size_t kib : sizes_kib) {
    const std::size_t bytes = kib << 10;
    const Arrays arrays(bytes);
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (Then then : {Then::kNothing, Then::kCopy}) {
        if (then == Then::kCopy && bytes >= kBeyondCaches) continue;
        std::vector<Result> results;
        for (std::size_t inputs = 2; inputs <= 16; ++inputs) {
          if (quick && (inputs & (inputs - 1)) != 0) continue;
          results.push_back(Measure(dtype, inputs, bytes, then, arrays, rounds));
        }
        report.Add(BarOf(dtype, bytes, then, results));
      }
    }
  }
  return report.all_hold() ? 0 : 1;
}

}  // namespace
}  // namespace heddle::ops

int main(int argc, char** argv) { return heddle::ops::Main(argc, argv); }
#endif  // HWY_ONCE
