#include "tools/heddle/bench.h"

#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include <fmt/format.h>

#include "kvstore/registry.h"

namespace heddle::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRoundsMin = 5, kRoundsMax = 100'000;
constexpr int kKeysInFlight = 4;

double Us(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

// One key with an array to push and one to pull into on every device.
class Cell {
 public:
  Cell(KVStore& store, std::string key, int devices, std::int64_t bytes)
      : store_(store), key_(std::move(key)) {
    const Shape shape{bytes / static_cast<std::int64_t>(sizeof(float))};
    for (int d = 0; d < devices; ++d) {
      pushed_.push_back(NDArray::Ones(shape, DType::kFloat32, Cpu(d), store.engine()));
      pulled_.push_back(NDArray::Zeros(shape, DType::kFloat32, Cpu(d), store.engine()));
    }
    store_.Init(key_, pulled_[0]);
  }

  void Push() { store_.Push(key_, pushed_); }
  void Pull() { store_.Pull(key_, pulled_); }
  void Wait() const {
    for (const NDArray& array : pulled_) array.WaitToRead();
  }

 private:
  KVStore& store_;
  const std::string key_;
  std::vector<NDArray> pushed_, pulled_;
};

void MeasureLatency(Cell& cell, std::chrono::milliseconds time, BenchResult& result) {
  std::vector<double> push_calls, pull_calls, latencies;
  const Clock::time_point end = Clock::now() + time;
  while (result.rounds < kRoundsMin || (Clock::now() < end && result.rounds < kRoundsMax)) {
    const Clock::time_point started = Clock::now();
    cell.Push();
    const Clock::time_point pushed = Clock::now();
    cell.Pull();
    const Clock::time_point pulled = Clock::now();
    cell.Wait();
    latencies.push_back(Us(Clock::now() - started));
    push_calls.push_back(Us(pushed - started));
    pull_calls.push_back(Us(pulled - pushed));
    ++result.rounds;
  }
  result.push_call_us = Percentile(std::move(push_calls), 50);
  result.pull_call_us = Percentile(std::move(pull_calls), 50);
  result.latency_us = Percentile(latencies, 50);
  result.latency_p99_us = Percentile(std::move(latencies), 99);
}

void MeasureBandwidth(std::vector<Cell>& cells, std::chrono::milliseconds time,
                      BenchResult& result) {
  std::vector<double> rounds_us;
  const Clock::time_point end = Clock::now() + time;
  while (rounds_us.size() < kRoundsMin || (Clock::now() < end && rounds_us.size() < kRoundsMax)) {
    const Clock::time_point started = Clock::now();
    for (Cell& cell : cells) cell.Push();
    for (Cell& cell : cells) cell.Pull();
    for (const Cell& cell : cells) cell.Wait();
    rounds_us.push_back(Us(Clock::now() - started));
  }
  const double bytes =
      2.0 * static_cast<double>(result.bytes) * result.devices * static_cast<double>(cells.size());
  result.bandwidth_gb_s = bytes / Percentile(std::move(rounds_us), 50) / 1e3;
}

BenchResult Measure(KVStore& store, int devices, std::int64_t bytes,
                    std::chrono::milliseconds time) {
  BenchResult result{.store = store.type(), .devices = devices, .bytes = bytes};
  std::vector<Cell> cells;
  for (int k = 0; k < kKeysInFlight; ++k) {
    cells.emplace_back(store, fmt::format("{} devices, {} bytes, {}", devices, bytes, k), devices,
                       bytes);
  }
  for (int round = 0; round < 3; ++round) {  // takes memory, wakes workers
    for (Cell& cell : cells) cell.Push();
    for (Cell& cell : cells) cell.Pull();
  }
  store.engine().WaitForAll();
  MeasureLatency(cells[0], time, result);
  MeasureBandwidth(cells, time, result);
  return result;
}

}  // namespace

std::vector<BenchResult> RunBench(const BenchOptions& options,
                                  const std::function<void(const BenchResult&)>& done) {
  for (const std::int64_t bytes : options.bytes) {
    if (bytes <= 0 || bytes % static_cast<std::int64_t>(sizeof(float)) != 0) {
      throw InvalidArgument(
          fmt::format("array size: expected a positive multiple of 4 bytes, got {}", bytes));
    }
  }
  for (const int devices : options.devices) {
    if (devices < 1) {
      throw InvalidArgument(fmt::format("devices: expected 1 or more, got {}", devices));
    }
  }
  for (const std::string& type : options.stores) {
    // Each size takes a store of its own, and as many rounds as fit into the time: workers of a job
    // would wait for each other's.
    if (kvstore::LowerCase(type).starts_with("dist")) {
      throw InvalidArgument(fmt::format(
          "store: expected a type for one process, such as local, device or nccl, got {}", type));
    }
  }
  std::vector<BenchResult> results;
  for (const std::string& type : options.stores) {
    Engine engine(options.engine);
    for (const int devices : options.devices) {
      for (const std::int64_t bytes : options.bytes) {
        // A store for each size: its values go back to the pool before the next.
        const std::unique_ptr<KVStore> store = KVStore::Create(type, engine);
        results.push_back(Measure(*store, devices, bytes, options.time));
        done(results.back());
      }
    }
  }
  return results;
}

double Percentile(std::vector<double> values, int percent) {
  // Whole numbers: 0.99 * n may round to just above the rank.
  const std::size_t rank = (values.size() * static_cast<std::size_t>(percent) + 99) / 100;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(rank - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

std::string BytesText(std::int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.4g} {}", value, kUnits[unit]);
}

}  // namespace heddle::tools
