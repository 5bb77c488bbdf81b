// The engine under several pushers, with a million pending ops, and with none.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include "benchmarks/engine/modes.h"

namespace heddle::bench {
namespace {

double NanosecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double, std::nano>(SteadyClock::now() - start).count();
}

// Each function below runs a workload once and returns its nanoseconds per op.

double TimePushers(Engine& engine, const std::vector<Var>& vars, Workload& workload, int pushers) {
  std::latch ready(pushers);
  const auto push_share = [&](int first) {
    ready.arrive_and_wait();
    for (int i = first; i < workload.num_ops(); i += pushers) {
      PushOp(engine, vars, workload.op(i), [&workload, i] { workload.RunBody(i); });
    }
  };
  std::vector<std::thread> threads;
  for (int first = 1; first < pushers; ++first) threads.emplace_back(push_share, first);
  const auto start = SteadyClock::now();
  push_share(0);
  for (std::thread& thread : threads) thread.join();
  engine.WaitForAll();
  return NanosecondsSince(start) / workload.num_ops();
}

double TimePushesInsideOps(Engine& engine, const std::vector<Var>& vars, Workload& workload) {
  constexpr int kPushesPerOp = 64;
  const auto start = SteadyClock::now();
  for (int first = 0; first < workload.num_ops(); first += kPushesPerOp) {
    engine.Push({.name = "pusher"}, [&, first] {
      const int end = std::min(first + kPushesPerOp, workload.num_ops());
      for (int i = first; i < end; ++i) {
        PushOp(engine, vars, workload.op(i), [&workload, i] { workload.RunBody(i); });
      }
    });
  }
  engine.WaitForAll();
  return NanosecondsSince(start) / workload.num_ops();
}

// Ops hand their completions to a thread that calls them, in the order in which they started.
class Completer {
 public:
  explicit Completer(int count)
      : slots_(std::make_unique<Slot[]>(static_cast<std::size_t>(count))),
        thread_([this, count] { CompleteAll(count); }) {}
  ~Completer() { thread_.join(); }
  Completer(const Completer&) = delete;
  Completer& operator=(const Completer&) = delete;

  void Take(Completion done) {
    Slot& slot = slots_[next_.fetch_add(1, std::memory_order_relaxed)];
    slot.done = std::move(done);
    slot.filled.store(true, std::memory_order_release);  // pairs with the acquire in CompleteAll
  }

 private:
  struct Slot {
    std::optional<Completion> done;
    std::atomic<bool> filled{false};
  };

  // A poll that finds nothing looks away for so long, as a thread that completes I/O does: one that
  // never took its eyes off the next slot would take the line that the worker is about to write.
  static constexpr std::chrono::nanoseconds kRest{2'000};

  void CompleteAll(int count) {
    for (int i = 0; i < count; ++i) {
      Slot& slot = slots_[static_cast<std::size_t>(i)];
      while (!slot.filled.load(std::memory_order_acquire)) {
        SpinFor(kRest);
        std::this_thread::yield();
      }
      std::exchange(slot.done, std::nullopt).value()();
    }
  }

  std::unique_ptr<Slot[]> slots_;
  std::atomic<std::size_t> next_{0};
  std::thread thread_;
};

double TimeAsyncOps(Engine& engine, const std::vector<Var>& vars, Workload& workload) {
  Completer completer(workload.num_ops());
  const auto start = SteadyClock::now();
  const auto body = [&completer](Completion done) { completer.Take(std::move(done)); };
  for (int i = 0; i < workload.num_ops(); ++i) {
    const OpSpec& spec = workload.op(i);
    if (spec.shape == Shape::kWrite) {  // independent
      engine.PushAsync({.writes = {vars[spec.vars[0]]}}, body);
    } else {  // random
      engine.PushAsync(
          {.reads = {vars[spec.vars[0]], vars[spec.vars[1]]}, .writes = {vars[spec.vars[2]]}},
          body);
    }
  }
  engine.WaitForAll();
  return NanosecondsSince(start) / workload.num_ops();
}

std::int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total_pages = 0, resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

double CpuMilliseconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) / 1e3;
  };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

}  // namespace

void MeasurePushers(const HarnessOptions& options) {
  Engine engine(OptionsFor(options.workers));
  Workload workload("random", options.ops, Workload::Body::kEmpty, 0);
  const std::vector<Var> vars = MakeVars(engine, workload.num_vars());
  // Of which no op waits for another one's trip to the completing thread and back.
  Workload apart("independent", options.ops, Workload::Body::kEmpty, 0);
  const std::vector<Var> vars_apart = MakeVars(engine, apart.num_vars());
  std::vector<double> one, two, four, inside, async, one_apart, async_apart;
  for (int run = 0; run <= options.runs; ++run) {
    const auto keep = [&](std::vector<double>& times, double time) {
      if (run > 0) times.push_back(time);  // the first is for warming up
    };
    keep(one, TimePushers(engine, vars, workload, 1));
    keep(two, TimePushers(engine, vars, workload, 2));
    keep(four, TimePushers(engine, vars, workload, 4));
    keep(inside, TimePushesInsideOps(engine, vars, workload));
    keep(async, TimeAsyncOps(engine, vars, workload));
    keep(one_apart, TimePushers(engine, vars_apart, apart, 1));
    keep(async_apart, TimeAsyncOps(engine, vars_apart, apart));
  }
  std::printf("{\"one_ns\":%.2f,\"two_ns\":%.2f,\"four_ns\":%.2f,", Median(one), Median(two),
              Median(four));
  std::printf("\"inside_ns\":%.2f,\"async_ns\":%.2f,", Median(inside), Median(async));
  std::printf("\"one_independent_ns\":%.2f,\"async_independent_ns\":%.2f}\n", Median(one_apart),
              Median(async_apart));
}

void MeasureMemory(const HarnessOptions& options) {
  constexpr int kPending = 1'000'000;
  EngineOptions engine_options = OptionsFor(options.workers);
  engine_options.max_pending_ops = 2 * kPending;
  Engine engine(engine_options);
  const Workload workload("random", kPending, Workload::Body::kEmpty, 0);
  const std::vector<Var> vars = MakeVars(engine, workload.num_vars());
  std::atomic<int> sink{0};
  std::atomic<int>*a = &sink, *b = &sink, *c = &sink;
  const auto body = [a, b, c] { a->store(*b + *c, std::memory_order_relaxed); };
  static_assert(sizeof(body) == 3 * sizeof(void*));

  Gate gate(engine, vars);
  const std::int64_t before = ResidentBytes();
  for (int i = 0; i < kPending; ++i) PushOp(engine, vars, workload.op(i), body);
  const std::int64_t after = ResidentBytes();
  gate.Open();
  engine.WaitForAll();
  std::printf("{\"bytes_per_op\":%.1f}\n", static_cast<double>(after - before) / kPending);
}

void MeasureIdle(const HarnessOptions& options) {
  Engine engine(OptionsFor(options.workers));
  const Var var = engine.NewVar();
  for (int i = 0; i < 1000; ++i) engine.Push({.writes = {var}}, [] {});
  engine.WaitForAll();
  const double before = CpuMilliseconds();
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(options.budget_ms));
  std::printf("{\"cpu_ms\":%.2f,\"wall_ms\":%.0f}\n", CpuMilliseconds() - before,
              options.budget_ms);
}

}  // namespace heddle::bench
