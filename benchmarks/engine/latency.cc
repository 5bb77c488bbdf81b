// How long single calls take: Push itself, a round trip, waking the engine.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <latch>
#include <thread>
#include <vector>

#include "benchmarks/engine/allocation_count.h"
#include "benchmarks/engine/modes.h"

namespace heddle::bench {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

double Nanoseconds(std::uint64_t ticks) {
  return static_cast<double>(ticks) / TicksPerNanosecond();
}

double Quantile(std::vector<double>& samples, double quantile) {
  const auto at = samples.begin() +
                  static_cast<std::ptrdiff_t>(quantile * static_cast<double>(samples.size() - 1));
  std::nth_element(samples.begin(), at, samples.end());
  return *at;
}

struct PushCall {
  double median_ns;
  double allocations_per_1000_ops;
};

// Returns when all workers have run at once: oneTBB makes a thread when it first needs it.
void StartWorkers(Engine& engine, int workers) {
  std::latch all(workers);
  for (int i = 0; i < workers; ++i) engine.Push({}, [&all] { all.arrive_and_wait(); });
  while (!all.try_wait()) std::this_thread::sleep_for(milliseconds(1));  // it would help in a wait
  engine.WaitForAll();
}

// Pushes behind a gate in batches that are long against the clock's cost. The first rounds grow the
// engine's memory, which ends after about ten of them, and are not counted.
template <class Body>
PushCall TimePushCall(int workers, int ops, int rounds, const OpSpec& spec, const Body& body) {
  constexpr int kBatch = 16;
  constexpr int kWarmUpRounds = 16;
  Engine engine(OptionsFor(workers));
  StartWorkers(engine, workers);
  const std::vector<Var> vars = MakeVars(engine, 4);
  std::vector<double> samples;
  samples.reserve(static_cast<std::size_t>(rounds * (ops / kBatch + 1)));
  std::uint64_t allocations = 0;
  for (int round = 0; round < kWarmUpRounds + rounds; ++round) {
    Gate gate(engine, vars);
    const bool counted = round >= kWarmUpRounds;
    const std::uint64_t allocations_before = AllocationCount();
    for (int batch = 0; batch < ops / kBatch; ++batch) {
      const std::uint64_t start = Ticks();
      for (int i = 0; i < kBatch; ++i) PushOp(engine, vars, spec, body);
      const std::uint64_t ticks = Ticks() - start;
      if (counted) samples.push_back(Nanoseconds(ticks) / kBatch);
    }
    if (counted) allocations += AllocationCount() - allocations_before;
    gate.Open();
    engine.WaitForAll();
  }
  return {Quantile(samples, 0.5), 1000.0 * static_cast<double>(allocations) / (rounds * ops)};
}

void PrintTrips(const char* name, std::vector<double>& trips) {
  std::printf("\"%s_p50_ns\":%.1f,\"%s_p99_ns\":%.1f", name, Quantile(trips, 0.5), name,
              Quantile(trips, 0.99));
}

// Time from just before Push until WaitForVar has returned.
std::vector<double> TimeTrips(Engine& engine, const Var& var, int count, microseconds quiet,
                              bool waits_for_all = false) {
  std::vector<double> trips;
  trips.reserve(static_cast<std::size_t>(count));
  std::uint64_t runs = 0;
  for (int i = 0; i < count; ++i) {
    if (quiet.count() > 0) SpinFor(quiet);
    const std::uint64_t start = Ticks();
    engine.Push({.writes = {var}}, [&runs] { ++runs; });
    waits_for_all ? engine.WaitForAll() : engine.WaitForVar(var);
    trips.push_back(Nanoseconds(Ticks() - start));
  }
  return trips;
}

// A thread that sleeps, woken by one system call: what Push onto a sleeping engine cannot do
// without.
class Sleeper {
 public:
  Sleeper() : thread_([this] { Loop(); }) {}
  ~Sleeper() {
    stop_.store(true, std::memory_order_relaxed);
    Wake();
    thread_.join();
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  void Wake() {
    wakes_.fetch_add(1, std::memory_order_release);
    wakes_.notify_one();
  }

 private:
  void Loop() {
    for (std::uint32_t seen = 0; !stop_.load(std::memory_order_relaxed);) {
      wakes_.wait(seen, std::memory_order_acquire);
      seen = wakes_.load(std::memory_order_acquire);
    }
  }

  std::atomic<std::uint32_t> wakes_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

struct Wake {
  double call_ns;
  double start_ns;
  double bare_ns;  // waking a plain thread, in turn with the engine
};

// After Push the pusher computes until the op has started, or sleeps for a while.
Wake TimeWake(Engine& engine, const Var& var, int count, bool pusher_computes) {
  Sleeper sleeper;
  std::vector<double> calls, starts, bare;
  for (int i = 0; i < count; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
    const std::uint64_t bare_start = Ticks();
    sleeper.Wake();
    bare.push_back(Nanoseconds(Ticks() - bare_start));
    std::this_thread::sleep_for(milliseconds(10));  // longer than any worker lingers
    std::atomic<std::uint64_t> started{0};
    const std::uint64_t before = Ticks();
    engine.Push({.writes = {var}},
                [&started] { started.store(Ticks(), std::memory_order_release); });
    const std::uint64_t after = Ticks();
    while (started.load(std::memory_order_acquire) == 0) {
      if (pusher_computes) {
        SpinFor(microseconds(1));
      } else {
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
    calls.push_back(Nanoseconds(after - before));
    starts.push_back(Nanoseconds(started.load(std::memory_order_relaxed) - before));
  }
  engine.WaitForAll();
  return {Quantile(calls, 0.5), Quantile(starts, 0.5), Quantile(bare, 0.5)};
}

// When an op starts that is pushed `quiet` after the engine has had work for a while. The pusher
// computes before and after the push.
double TimeStartAfterWork(Engine& engine, const Var& var, int count, microseconds quiet) {
  std::vector<double> starts;
  for (int i = 0; i < count; ++i) {
    const auto work_ends = SteadyClock::now() + microseconds(500);
    while (SteadyClock::now() < work_ends) {
      engine.Push({.writes = {var}}, [] { SpinFor(microseconds(2)); });
      SpinFor(microseconds(2));
    }
    engine.WaitForAll();
    SpinFor(quiet);
    std::atomic<std::uint64_t> started{0};
    const std::uint64_t before = Ticks();
    engine.Push({.writes = {var}},
                [&started] { started.store(Ticks(), std::memory_order_release); });
    while (started.load(std::memory_order_acquire) == 0) SpinFor(microseconds(1));
    starts.push_back(Nanoseconds(started.load(std::memory_order_relaxed) - before));
    engine.WaitForAll();
  }
  return Quantile(starts, 0.5);
}

}  // namespace

void MeasurePushCall(const HarnessOptions& options) {
  const OpSpec one_var{Shape::kWrite, {0}}, three_vars{Shape::kRead2Write, {0, 1, 2}};
  std::atomic<int> sink{0};
  const auto small = [&sink] { sink.store(1, std::memory_order_relaxed); };
  // The largest closure that must not allocate.
  const std::array<char, 64 - sizeof(void*)> payload{};
  const auto large = [&sink, payload] { sink.store(payload[0], std::memory_order_relaxed); };
  static_assert(sizeof(large) == 64);
  const auto time = [&](const OpSpec& spec, const auto& body) {
    return TimePushCall(options.workers, options.ops, options.runs, spec, body);
  };
  const PushCall one = time(one_var, small), three = time(three_vars, small);
  const PushCall one_large = time(one_var, large), three_large = time(three_vars, large);
  std::printf("{\"one_var_ns\":%.2f,\"three_vars_ns\":%.2f,", one.median_ns, three.median_ns);
  std::printf("\"one_var_64_bytes_ns\":%.2f,\"three_vars_64_bytes_ns\":%.2f,", one_large.median_ns,
              three_large.median_ns);
  std::printf("\"allocations_per_1000_ops\":%g}\n",
              std::max({one.allocations_per_1000_ops, three.allocations_per_1000_ops,
                        one_large.allocations_per_1000_ops, three_large.allocations_per_1000_ops}));
}

void MeasurePushWait(const HarnessOptions& options) {
  Engine engine(OptionsFor(options.workers));
  const Var var = engine.NewVar();
  TimeTrips(engine, var, 1000, microseconds(0));  // warm-up
  std::vector<double> back_to_back = TimeTrips(engine, var, options.ops, microseconds(0));
  std::vector<double> quiet =
      TimeTrips(engine, var, std::max(100, options.ops / 100), microseconds(200));
  std::printf("{");
  PrintTrips("back_to_back", back_to_back);
  std::printf(",");
  PrintTrips("quiet", quiet);
  std::printf(",");
  std::vector<double> for_all =
      TimeTrips(engine, var, options.ops, microseconds(0), /*waits_for_all=*/true);
  PrintTrips("for_all", for_all);
  std::printf("}\n");
}

void MeasureWake(const HarnessOptions& options) {
  Engine engine(OptionsFor(options.workers));
  const Var var = engine.NewVar();
  const int count = std::max(10, options.ops / 2000);
  const Wake sleeping = TimeWake(engine, var, count, /*pusher_computes=*/false);
  const Wake computing = TimeWake(engine, var, count, /*pusher_computes=*/true);
  const auto print = [](const char* name, const Wake& wake, const char* end) {
    std::printf("\"%s_call_ns\":%.0f,\"%s_start_ns\":%.0f,\"%s_bare_ns\":%.0f%s", name,
                wake.call_ns, name, wake.start_ns, name, wake.bare_ns, end);
  };
  std::printf("{");
  print("sleeping", sleeping, ",");
  print("computing", computing, ",");
  std::printf("\"after_work_start_ns\":%.0f}\n",
              TimeStartAfterWork(engine, var, 5 * count, microseconds(300)));
}

}  // namespace heddle::bench
