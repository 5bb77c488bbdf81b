// What benchmarks/python/store.py measures, from C++, and what the machine allows: push, then pull,
// until all outputs can be read, of the stores `local` and `device`, one device and four, with and
// without SGD.
//
//   bench_cases [--quick] [case, or how some begin...]
//
// Prints one JSON object, {case: {"us": median microseconds, "limit_us": the same of the limit}}; a
// case is "store/devices/bytes/updater", as there. The limit: loops that move the bytes that must
// move, on as many threads as the engine has workers, in turn with ours over arrays of their own;
// the faster one of ordinary and streaming stores. A push reads an array a device and writes the
// stored value, with SGD it reads that too; a pull reads the value and writes an array a device.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "benchmarks/support/bars.h"
#include "benchmarks/support/roofline.h"
#include "benchmarks/support/team.h"

namespace heddle::bench {
namespace {

using Clock = std::chrono::steady_clock;

double MicrosecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

struct Case {
  std::string store;
  int devices;
  std::size_t bytes;
  bool sgd;

  std::string name() const {
    return fmt::format("{}/{}/{}/{}", store, devices, bytes, sgd ? "sgd" : "none");
  }
};

class Ours {
 public:
  explicit Ours(const Case& one) : store_(KVStore::Create(one.store, engine_)) {
    const Shape shape{static_cast<std::int64_t>(one.bytes / sizeof(float))};
    store_->Init(3, NDArray::Zeros(shape, DType::kFloat32, Cpu(), engine_));
    if (one.sgd) store_->SetOptimizer(Sgd({.learning_rate = 0.1}));
    for (int device = 0; device < one.devices; ++device) {
      gradients_.push_back(NDArray::Ones(shape, DType::kFloat32, Cpu(device), engine_));
      outs_.push_back(NDArray::Zeros(shape, DType::kFloat32, Cpu(device), engine_));
    }
    engine_.WaitForAll();
  }

  int workers() const { return engine_.options().num_workers; }

  double Run() {
    const Clock::time_point start = Clock::now();
    store_->Push(3, gradients_);
    store_->Pull(3, outs_);
    for (const NDArray& out : outs_) out.WaitToRead();
    return MicrosecondsSince(start);
  }

 private:
  Engine engine_{EngineOptions::FromEnvironment()};
  std::unique_ptr<KVStore> store_;
  std::vector<NDArray> gradients_;
  std::vector<NDArray> outs_;
};

// The same bytes.
class Loops {
 public:
  explicit Loops(const Case& one) {
    const auto devices = static_cast<std::size_t>(one.devices);
    for (std::size_t array = 0; array < 2 * devices + 1; ++array) memory_.emplace_back(one.bytes);
    const auto stream = [&](std::size_t array, Stream::Use use) {
      return Stream{memory_[array].data(), one.bytes, use};
    };
    push_.push_back(stream(2 * devices, one.sgd ? Stream::Use::kUpdate : Stream::Use::kWrite));
    pull_.push_back(stream(2 * devices, Stream::Use::kRead));
    for (std::size_t device = 0; device < devices; ++device) {
      push_.push_back(stream(device, Stream::Use::kRead));
      pull_.push_back(stream(devices + device, Stream::Use::kWrite));
    }
  }

  double Run(Team& team, StoreKind stores) const {
    const Clock::time_point start = Clock::now();
    for (const std::vector<Stream>* streams : {&push_, &pull_}) {
      team.Run([&](int index) {
        MoveBytes(*streams, stores, static_cast<std::size_t>(index),
                  static_cast<std::size_t>(team.size()));
      });
    }
    return MicrosecondsSince(start);
  }

 private:
  std::vector<Memory> memory_;
  std::vector<Stream> push_;
  std::vector<Stream> pull_;
};

nlohmann::json Measure(const Case& one, bool quick) {
  Ours ours(one);
  const Loops loops(one);
  // Each round takes the median of a stretch of runs, so that neither contender begins in the
  // caches of the other.
  const int rounds = quick ? 2 : 3;
  const std::size_t stretch =
      std::clamp<std::size_t>((std::size_t{64} << 20) / one.bytes, 4, 1000) / (quick ? 4 : 1);
  const auto median_of = [stretch](const std::function<double()>& run) {
    std::vector<double> times;
    for (std::size_t i = 0; i < stretch + stretch / 4; ++i) {
      const double taken = run();
      if (i >= stretch / 4) times.push_back(taken);  // the first ones warm up
    }
    return Median(std::move(times));
  };
  const auto loop = [&](StoreKind stores) {
    return [&, stores] {
      // The engine's workers have gone to sleep before the team measures, and the other way round.
      Team team(ours.workers());
      return median_of([&] { return loops.Run(team, stores); });
    };
  };
  const std::vector<std::function<double()>> contenders = {
      [&] { return median_of([&] { return ours.Run(); }); }, loop(StoreKind::kCached),
      loop(StoreKind::kStreaming)};
  const std::vector<std::vector<double>> times = MeasureInTurn(contenders, rounds);
  return {{"us", Median(times[0])}, {"limit_us", std::min(Median(times[1]), Median(times[2]))}};
}

int Main(int argc, char** argv) {
  std::vector<std::string> wanted(argv + 1, argv + argc);
  const bool quick = std::erase(wanted, "--quick") > 0;
  std::vector<std::size_t> sizes = {4096, 32768, std::size_t{1} << 20};
  if (!quick) sizes.insert(sizes.end(), {std::size_t{16} << 20, std::size_t{64} << 20});
  nlohmann::json all = nlohmann::json::object();
  for (const char* const store : {"local", "device"}) {
    for (const int devices : {1, 4}) {
      for (const std::size_t bytes : sizes) {
        for (const bool sgd : {false, true}) {
          const Case one{.store = store, .devices = devices, .bytes = bytes, .sgd = sgd};
          const bool is_wanted = std::ranges::any_of(
              wanted, [&](const std::string& start) { return one.name().starts_with(start); });
          if (is_wanted || wanted.empty()) all[one.name()] = Measure(one, quick);
        }
      }
    }
  }
  fmt::print("{}\n", all.dump());
  return 0;
}

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) { return heddle::bench::Main(argc, argv); }
