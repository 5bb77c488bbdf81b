// A training step's traffic through a store, with the sizes of ResNet-50's 161 parameters: push of
// float32 gradients from four devices with SGD, then pull to four. At least 85% of the bytes over
// the bandwidth; for its 108 small keys alone, at most 1 us a key beyond their bytes.
//
// The least to move is, for a push, 4 gradients read and the weight read and written, for a pull
// the weight read and 4 copies written. The limit: loops that do so with all parameters in one
// piece, on as many threads as the engine has workers.
#include "benchmarks/support/resnet.h"

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/kernels/sections.h"
#include "benchmarks/support/roofline.h"
#include "benchmarks/support/team.h"

namespace heddle::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kDevices = 4;
constexpr std::int64_t kSmallMax = 8192;  // elements
constexpr double kBar = 0.85;
constexpr double kBeyondMaxUs = 1;

// A store with a key for each size, and what is pushed to it and pulled from it.
class Traffic {
 public:
  Traffic(const std::string& type, const std::vector<std::int64_t>& sizes)
      : store_(KVStore::Create(type, engine_)) {
    store_->SetOptimizer(Sgd({.learning_rate = 1e-6}));
    for (std::size_t key = 0; key < sizes.size(); ++key) {
      gradients_.push_back(NewArrays(sizes[key]));
      outs_.push_back(NewArrays(sizes[key]));
      store_->Init(static_cast<int>(key), gradients_.back()[0]);
    }
    engine_.WaitForAll();
  }

  int workers() const { return engine_.options().num_workers; }

  // Seconds from the first push until the last output is readable.
  double Run() {
    const Clock::time_point start = Clock::now();
    for (std::size_t key = 0; key < gradients_.size(); ++key) {
      store_->Push(static_cast<int>(key), gradients_[key], -static_cast<int>(key));
      store_->Pull(static_cast<int>(key), outs_[key], -static_cast<int>(key));
    }
    engine_.WaitForAll();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  std::vector<NDArray> NewArrays(std::int64_t size) {
    std::vector<NDArray> arrays;
    for (int device = 0; device < kDevices; ++device) {
      arrays.push_back(NDArray::Full({size}, 0.5, DType::kFloat32, Cpu(device), engine_));
    }
    return arrays;
  }

  Engine engine_{EngineOptions::FromEnvironment()};
  std::unique_ptr<KVStore> store_;
  std::vector<std::vector<NDArray>> gradients_;
  std::vector<std::vector<NDArray>> outs_;
};

// The same bytes in one piece.
class Loops {
 public:
  explicit Loops(std::size_t bytes) {
    for (int array = 0; array < 2 * kDevices + 1; ++array) memory_.emplace_back(bytes);
    const auto stream = [&](std::size_t array, Stream::Use use) {
      return Stream{memory_[array].data(), bytes, use};
    };
    push_.push_back(stream(2 * kDevices, Stream::Use::kUpdate));
    pull_.push_back(stream(2 * kDevices, Stream::Use::kRead));
    for (std::size_t device = 0; device < kDevices; ++device) {
      push_.push_back(stream(device, Stream::Use::kRead));
      pull_.push_back(stream(kDevices + device, Stream::Use::kWrite));
    }
  }

  std::size_t bytes() const { return BytesMoved(push_) + BytesMoved(pull_); }

  double Run(Team& team, StoreKind stores) const {
    const Clock::time_point start = Clock::now();
    for (const std::vector<Stream>* streams : {&push_, &pull_}) {
      team.Run([&](int index) {
        MoveBytes(*streams, stores, static_cast<std::size_t>(index),
                  static_cast<std::size_t>(team.size()));
      });
    }
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  std::vector<Memory> memory_;
  std::vector<Stream> push_;
  std::vector<Stream> pull_;
};

struct Times {
  std::vector<double> ours;
  std::vector<double> limit;  // of the faster loop
  const char* against = nullptr;
};

Times Measure(Traffic& traffic, const Loops& loops, int rounds, int repeats) {
  const auto repeated = [repeats](const auto& run) {
    double seconds = 0;
    for (int i = 0; i < repeats; ++i) seconds += run();
    return seconds / repeats;
  };
  const auto loop = [&](StoreKind stores) {
    return [&, stores] {
      // The engine's workers have gone to sleep before the team measures, and the other way round.
      Team team(traffic.workers());
      return repeated([&] { return loops.Run(team, stores); });
    };
  };
  const std::vector<std::function<double()>> contenders = {
      [&] { return repeated([&] { return traffic.Run(); }); }, loop(StoreKind::kCached),
      loop(StoreKind::kStreaming)};
  const std::vector<std::vector<double>> seconds = MeasureInTurn(contenders, rounds);
  const bool streaming = Median(seconds[2]) < Median(seconds[1]);
  return {seconds[0], seconds[streaming ? 2 : 1], streaming ? "streaming loop" : "plain loop"};
}

std::size_t Bytes(const std::vector<std::int64_t>& sizes) {
  return static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})) *
         sizeof(float);
}

void MeasureAll(const std::string& type, int rounds, BarReport& report) {
  const std::vector<std::int64_t> sizes = ResNet50();
  Traffic traffic(type, sizes);
  const Loops loops(Bytes(sizes));
  const Times times = Measure(traffic, loops, rounds, 1);
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times.ours.size(); ++i) {
    ratios.push_back(times.limit[i] / times.ours[i]);
  }
  const double moved = static_cast<double>(loops.bytes()) / 1e9;
  report.Add({{"what", fmt::format("{}: push with SGD of ResNet-50's {} keys from {} devices, pull",
                                   type, sizes.size(), kDevices)},
              {"ours", moved / Median(times.ours)},
              {"unit", "GB/s"},
              {"against", times.against},
              {"limit", moved / Median(times.limit)},
              {"ratio", Median(ratios)},
              {"spread", Spread(ratios)},
              {"bar", fmt::format(">= {:g}", kBar)},
              {"holds", Median(ratios) >= kBar},
              {"milliseconds", Median(times.ours) * 1e3}});
}

void MeasureSmall(const std::string& type, int rounds, BarReport& report) {
  std::vector<std::int64_t> sizes = ResNet50();
  std::erase_if(sizes, [](std::int64_t size) { return size > kSmallMax; });
  Traffic traffic(type, sizes);
  const Loops loops(Bytes(sizes));
  const Times times = Measure(traffic, loops, rounds, 50);
  std::vector<double> beyond_us;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times.ours.size(); ++i) {
    beyond_us.push_back((times.ours[i] - times.limit[i]) * 1e6 / static_cast<double>(sizes.size()));
    ratios.push_back(beyond_us.back() / kBeyondMaxUs);
  }
  report.Add({{"what", fmt::format("{}: a key beyond its bytes, the {} small ones alone", type,
                                   sizes.size())},
              {"ours", Median(beyond_us)},
              {"unit", "us"},
              {"against", "limit"},
              {"limit", kBeyondMaxUs},
              {"ratio", Median(ratios)},
              {"spread", Spread(ratios)},
              {"bar", fmt::format("<= {:g} us", kBeyondMaxUs)},
              {"holds", Median(beyond_us) <= kBeyondMaxUs}});
}

}  // namespace

void MeasureResNet(BarReport& report, bool quick) {
  for (const std::string type : {"local", "device"}) {
    MeasureAll(type, quick ? 1 : 7, report);
    MeasureSmall(type, quick ? 1 : 7, report);
  }
}

}  // namespace heddle::bench
