// Guests: several engines and the host program share few CPUs and all advance; idle engines use no
// CPU.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#include <sys/resource.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

// Keeps an engine busy with chains of ops that push their successors, until told to stop.
class BusyEngine {
 public:
  BusyEngine(const EngineOptions& options, std::latch& advanced)
      : engine_(options), advanced_(advanced) {}
  void Start() {
    for (int chain = 0; chain < 2; ++chain) PushNext();
  }
  void Finish() {
    stop_ = true;
    engine_.WaitForAll();
  }

 private:
  static constexpr int kEnough = 300;

  void PushNext() {
    engine_.Push({.name = "busy"}, [this] {
      volatile int work = 0;
      for (int i = 0; i < 5000; ++i) work = work + i;
      if (++ops_ == kEnough) advanced_.count_down();
      if (!stop_) PushNext();
    });
  }

  Engine engine_;
  std::latch& advanced_;
  std::atomic<int> ops_ = 0;
  std::atomic<bool> stop_ = false;
};

void EightEnginesAndAParallelFor(WorkerHost worker_host, int num_workers) {
  constexpr int kEngines = 8, kLoops = 30;
  std::latch advanced(kEngines + 1);
  EngineOptions options;
  options.worker_host = worker_host;
  options.num_workers = num_workers;
  std::vector<std::unique_ptr<BusyEngine>> engines;
  for (int i = 0; i < kEngines; ++i) {
    engines.push_back(std::make_unique<BusyEngine>(options, advanced));
  }
  for (const auto& engine : engines) engine->Start();
  std::thread host([&] {
    for (int loop = 0; loop < kLoops; ++loop) {
      std::atomic<int> sum = 0;
      tbb::parallel_for(0, 1000, [&](int i) { sum += i; });
      ASSERT_EQ(sum.load(), 499'500);
    }
    advanced.count_down();
  });
  advanced.wait();  // no wait of an engine: the workers alone must do it, while all stay busy
  host.join();
  for (const auto& engine : engines) engine->Finish();
}

TEST(EngineChild, EightBusyTbbEnginesAndAParallelForAllAdvance) {
  if (!InChild()) GTEST_SKIP() << "runs in a child process";
  EightEnginesAndAParallelFor(WorkerHost::kTbb, 0);
  EightEnginesAndAParallelFor(WorkerHost::kTbb, 2);
}

TEST(EngineChild, EightBusyEnginesOnPlainThreadsAndAParallelForAllAdvance) {
  if (!InChild()) GTEST_SKIP() << "runs in a child process";
  EightEnginesAndAParallelFor(WorkerHost::kThreads, 0);
}

TEST(FairnessTest, EightBusyEnginesAndTheHostsParallelForAllAdvanceOnOneCpu) {
  if (!kTbbAllowed) GTEST_SKIP() << "no oneTBB under this sanitizer";
  EXPECT_EQ(RunInChild("EngineChild.EightBusyTbbEnginesAndAParallelForAllAdvance", {}, true), 0);
  EXPECT_EQ(
      RunInChild("EngineChild.EightBusyEnginesOnPlainThreadsAndAParallelForAllAdvance", {}, true),
      0);
}

TEST(FairnessTest, EightBusyEnginesAndTheHostsParallelForAllAdvance) {
  if (!kTbbAllowed) GTEST_SKIP() << "no oneTBB under this sanitizer";
  EXPECT_EQ(RunInChild("EngineChild.EightBusyTbbEnginesAndAParallelForAllAdvance", {}, false), 0);
}

// The host's own tasks use an engine: its waits and pushes must not depend on free oneTBB threads.
TEST(FairnessTest, TasksOfTheHostMayPushAndWait) {
  if (!kTbbAllowed) GTEST_SKIP() << "no oneTBB under this sanitizer";
  Engine engine;
  std::atomic<int> runs = 0;
  tbb::parallel_for(0, 64, [&](int) {
    const Var x = engine.NewVar();
    int value = 0;
    for (int i = 0; i < 20; ++i) {
      engine.Push({.name = "add", .reads = {x}, .writes = {x}}, [&] { ++value, ++runs; });
    }
    engine.WaitForVar(x);
    ASSERT_EQ(value, 20);
  });
  EXPECT_EQ(runs.load(), 64 * 20);
}

// Tasks of the host that would wait for the engine, say, and have all of oneTBB's threads.
TEST(FairnessTest, AStopDoesNotWaitForThreadsThatTheHostKeeps) {
  if (!kTbbAllowed) GTEST_SKIP() << "the thread sanitizer's engines run on plain threads";
  EngineOptions options;
  options.num_workers = 3;
  auto engine = std::make_unique<Engine>(options);  // lets oneTBB have as many threads
  constexpr int kTasks = 64;
  const std::shared_ptr<std::latch> may_end = std::make_shared<std::latch>(1);
  const auto started = std::make_shared<std::atomic<int>>(0);
  const auto ended = std::make_shared<std::atomic<int>>(0);
  tbb::task_arena arena(kTasks, /*reserved_for_masters=*/0);
  for (int i = 0; i < kTasks; ++i) {
    arena.enqueue([may_end, started, ended] {
      ++*started;
      may_end->wait();
      ++*ended;
    });
  }
  // Nothing tells how many threads oneTBB has: all have come when no more do.
  int before = -1;
  while (*started != std::exchange(before, *started) || before == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  for (int i = 0; i < 30; ++i) {  // long enough that the engine asks for further workers
    engine->Push({.name = "long"},
                 [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  }
  EXPECT_NO_THROW(engine->Stop(kSoon));
  engine.reset();
  may_end->count_down();
  while (*ended < kTasks) std::this_thread::yield();
  // Those that were taken back do no harm when their turn comes, which is before these.
  Engine another(options);
  std::latch together(options.num_workers);
  for (int i = 0; i < options.num_workers; ++i) {
    another.Push({.name = "together"}, [&] { together.arrive_and_wait(); });
  }
  another.WaitForAll();
}

TEST(FairnessTest, OpsMayUseTheHostsParallelFor) {
  if (!kTbbAllowed) GTEST_SKIP() << "no oneTBB under this sanitizer";
  Engine engine;
  std::atomic<int> sum = 0;
  for (int op = 0; op < 200; ++op) {
    engine.Push({.name = "parallel"}, [&] { tbb::parallel_for(0, 100, [&](int) { ++sum; }); });
  }
  engine.WaitForAll();
  EXPECT_EQ(sum.load(), 20'000);
}

class IdleTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, IdleTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

double ProcessCpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The bound is generous; the benchmarks hold the tight one. A spinning or polling worker misses it.
TEST_P(IdleTest, AnIdleEngineUsesNoCpu) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 1000; ++i) engine.Push({.name = "op", .writes = {x}}, [] {});
  engine.WaitForAll();
  Hold hold(engine, {.name = "hold", .writes = {x}});  // nor one that waits for a completion
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(100)), TimeoutError);
  const double before = ProcessCpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));  // the idle time that is judged
  EXPECT_LT(ProcessCpuSeconds() - before, 0.1);
}

TEST_P(IdleTest, AnIdleEngineWithAShortWatchdogUsesNoCpu) {
  for (const int watchdog_ms : {1, 3}) {
    EngineOptions options = GetParam().options;
    options.watchdog = std::chrono::milliseconds(watchdog_ms);
    Engine engine(options);
    std::this_thread::sleep_for(
        std::chrono::milliseconds(50));  // longer than it takes to fall asleep
    const double before = ProcessCpuSeconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the idle time that is judged
    EXPECT_LT(ProcessCpuSeconds() - before, 0.05) << watchdog_ms;
  }
}

TEST_P(IdleTest, AWaitingThreadUsesNoCpu) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "hold", .writes = {x}});
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(50)), TimeoutError);
  const double before = ProcessCpuSeconds();
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(400)), TimeoutError);
  EXPECT_LT(ProcessCpuSeconds() - before, 0.1);
}

std::int64_t Switches(int who) {
  rusage usage;
  getrusage(who, &usage);
  return usage.ru_nvcsw;
}

// A thread in WaitForAll is called to help, but not with what was pushed after its wait began.
TEST(WaitingTest, AWaitForAllSleepsOnWhileOnlyLaterOpsRun) {
  EngineOptions options;
  options.num_workers = 8;
  options.worker_host = WorkerHost::kThreads;
  Engine engine(options);
  Hold hold(engine, {.name = "hold"});
  std::latch begins(1);
  std::atomic<std::int64_t> switches = -1;
  std::thread waiter([&] {
    const std::int64_t before = Switches(RUSAGE_THREAD);
    begins.count_down();
    engine.WaitForAll();
    switches = Switches(RUSAGE_THREAD) - before;
  });
  begins.wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it sleeps
  // They come from the inbox, and from the ready queue.
  constexpr int kOps = 2000;
  const Var gate = engine.NewVar("gate");
  std::atomic<int> runs = 0;
  const auto work = [&] {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    ++runs;
  };
  for (int i = 0; i < kOps; ++i) engine.Push({.name = "work"}, work);
  Hold closed(engine, {.name = "closed", .writes = {gate}});
  for (int i = 0; i < kOps; ++i) engine.Push({.name = "work", .reads = {gate}}, work);
  closed.Release();
  while (runs < 2 * kOps) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(switches, -1);
  hold.Release();
  waiter.join();
  EXPECT_LT(switches, 30);
}

// A thread that waits for a variable runs the op in the place of the only worker. What is pushed
// meanwhile is for that one, afterwards.
TEST(WaitingTest, NobodyComesForAnOpWhileAWaitHasTheOnlyPlace) {
  EngineOptions options;
  options.num_workers = 1;
  options.watchdog = std::chrono::milliseconds(0);
  Engine engine(options);
  const Var x = engine.NewVar("x");
  const std::thread::id self = std::this_thread::get_id();
  std::atomic<bool> later_ran = false;
  bool by_the_wait = false;
  for (int tries = 0; tries < 100 && !by_the_wait; ++tries) {
    std::int64_t switches = 0;
    // The lookout is awake.
    const auto warm_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (std::chrono::steady_clock::now() < warm_until) {
      for (int i = 0; i < 50; ++i) engine.Push({.name = "short"}, [] {});
      engine.WaitForAll();
    }
    engine.Push({.name = "long", .writes = {x}}, [&] {
      by_the_wait = std::this_thread::get_id() == self;
      if (!by_the_wait) return;
      std::thread([&] { engine.Push({.name = "later"}, [&] { later_ran = true; }); }).join();
      const std::int64_t before = Switches(RUSAGE_SELF);
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      switches = Switches(RUSAGE_SELF) - before;
    });
    engine.WaitForVar(x);
    EXPECT_LT(switches, 1000);  // 20 a millisecond when a worker comes at each look
  }
  ASSERT_TRUE(by_the_wait);
  while (!later_ran) std::this_thread::yield();
}

}  // namespace
}  // namespace heddle::engine_test
