// Push and pull measured as a training program meets them.
#pragma once

#include <heddle/engine.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace heddle::tools {

struct BenchOptions {
  EngineOptions engine;
  std::vector<std::string> stores;
  std::vector<int> devices;             // logical devices, cpu(0) to cpu(n - 1)
  std::vector<std::int64_t> bytes;      // of one array, multiples of 4
  std::chrono::milliseconds time{200};  // for each measurement; at least kRoundsMin rounds
};

// One store, number of devices and array size. Times are medians in microseconds unless they say
// otherwise.
struct BenchResult {
  std::string store;
  int devices = 0;
  std::int64_t bytes = 0;
  int rounds = 0;
  double push_call_us = 0, pull_call_us = 0;  // until the calls return
  double latency_us = 0,
         latency_p99_us = 0;  // from push until all pulled arrays are readable, one key at a time
  double bandwidth_gb_s =
      0;  // bytes of all devices pushed and pulled, several keys in flight; 10^9 bytes
};

// Measures every combination, stores outermost. `done` hears of each as it ends.
// Errors: InvalidArgument for an unknown store or a size that is not a positive multiple of 4.
std::vector<BenchResult> RunBench(const BenchOptions& options,
                                  const std::function<void(const BenchResult&)>& done);

// By nearest rank: the least of the values that `percent` (1 to 100) of 100 of them do not exceed.
// So the 99th percentile of fewer than 100 values is the largest. There has to be one.
double Percentile(std::vector<double> values, int percent);

// "4 KiB", "1.5 MiB".
std::string BytesText(std::int64_t bytes);

}  // namespace heddle::tools
