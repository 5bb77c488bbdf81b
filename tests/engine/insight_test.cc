// Insight: dumps, the watchdog, statistics, versions.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <sstream>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

using std::chrono::milliseconds;

class InsightTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, InsightTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

// The line of `dump` that begins with or mentions `op` first among the op names of the test.
std::string LineOf(const std::string& dump, const std::string& op) {
  std::istringstream lines(dump);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find(op);
    if (at == std::string::npos) continue;
    // A line may also name `op` as the one that is waited for; that one is not its own line.
    const std::size_t first_op = line.find("_op");
    if (first_op != std::string::npos && at + op.size() == first_op + 3) return line;
  }
  ADD_FAILURE() << "no line of " << op << " in:\n" << dump;
  return {};
}

TEST_P(InsightTest, DumpStateShowsEveryPendingOpAndWhomItWaitsFor) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("input_var"), y = engine.NewVar("output_var");
  Hold hold(engine, {.name = "holding_op", .writes = {x}});
  engine.Push({.name = "reading_op", .reads = {x}, .writes = {y}}, [] {});
  engine.Push({.name = "last_op", .reads = {y}}, [] {});
  EXPECT_THROW(engine.WaitForVar(x, milliseconds(20)), TimeoutError);  // the hold's body has run

  const std::string dump = engine.DumpState();
  const std::string holding = LineOf(dump, "holding_op"), reading = LineOf(dump, "reading_op"),
                    last = LineOf(dump, "last_op");
  EXPECT_TRUE(Contains(holding, "input_var")) << dump;
  EXPECT_TRUE(Contains(reading, "input_var")) << dump;
  EXPECT_TRUE(Contains(reading, "output_var")) << dump;
  EXPECT_TRUE(Contains(reading, "holding_op")) << dump;
  EXPECT_TRUE(Contains(last, "reading_op")) << dump;
  EXPECT_FALSE(Contains(holding, "reading_op")) << dump;

  hold.Release();
  engine.WaitForAll();
  const std::string idle = engine.DumpState();
  EXPECT_FALSE(Contains(idle, "_op")) << idle;
}

TEST_P(InsightTest, DumpStateMayBeCalledWhileEverythingMoves) {
  Engine engine(GetParam().options);
  std::thread dumper([&] {
    for (int i = 0; i < 50; ++i) (void)engine.DumpState();
  });
  const Var x = engine.NewVar("x");
  std::atomic<int> runs = 0;
  for (int i = 0; i < 2000; ++i) {
    engine.Push({.name = "op", .reads = {x}, .writes = {engine.NewVar()}}, [&] {
      if (++runs % 100 == 0) (void)engine.DumpState();
    });
  }
  dumper.join();
  engine.WaitForAll();
}

TEST_P(InsightTest, StatisticsCountPushedAndDoneOps) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "hold", .writes = {x}});
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "op", .reads = {x}, .temporary_bytes = 3}, [] {});
  }
  EXPECT_EQ(engine.stats().pushed, 101u);
  EXPECT_EQ(engine.stats().done, 0u);
  EXPECT_EQ(engine.stats().pending_bytes, 300u);
  hold.Release();
  engine.WaitForAll();
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.pushed, 101u);
  EXPECT_EQ(stats.done, 101u);
  EXPECT_EQ(stats.failed, 0u);
  EXPECT_EQ(stats.running, 0u);
  EXPECT_EQ(stats.pending_bytes, 0u);
  EXPECT_EQ(stats.late_completions, 0u);
}

TEST_P(InsightTest, ABodyIsRunningOnceHoweverManyHelpIt) {
  Engine engine(GetParam().options);
  const int threads = engine.options().type == "threaded" ? engine.options().num_workers : 1;
  std::uint64_t running = 0;
  std::atomic<int> in = 0;
  engine.Push({.name = "split"}, [&] {
    engine.ParallelFor(threads, 1, [&](std::int64_t begin, std::int64_t /*end*/) {
      ++in;
      const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (in < threads && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
      if (begin == 0) running = engine.stats().running;
      ++in;
      while (in < 2 * threads && std::chrono::steady_clock::now() < patience) {
        std::this_thread::yield();  // all are in their blocks until it has looked
      }
    });
  });
  engine.WaitForAll();
  EXPECT_EQ(running, 1u);
}

TEST_P(InsightTest, AVersionCountsCompletedWritesOfAllKinds) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  EXPECT_EQ(engine.version(x), 0u);
  engine.Push({.name = "write", .writes = {x}}, [] {});
  engine.Push({.name = "modify", .reads = {x}, .writes = {x}}, [] {});
  engine.Push({.name = "read", .reads = {x}}, [] {});
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 2u);
  engine.Push({.name = "fail", .writes = {x}}, [] { throw std::runtime_error("fail"); });
  engine.Push({.name = "skipped", .reads = {x}, .writes = {x}}, [] {});
  engine.ClearError(x);
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  EXPECT_EQ(engine.version(x), 4u);
  Hold hold(engine, {.name = "hold", .writes = {x}});
  EXPECT_EQ(engine.version(x), 4u);  // pushed is not completed
  hold.Release();
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 5u);
}

class WatchdogTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(Threaded, WatchdogTest, testing::ValuesIn(ThreadedConfigs()), ConfigLabel);

TEST_P(WatchdogTest, AStallIsLoggedWithTheBlockedChain) {
  LogCapture log;
  EngineOptions options = GetParam().options;
  options.watchdog = milliseconds(50);
  Engine engine(options);
  const Var x = engine.NewVar("stalled_var");
  Hold hold(engine, {.name = "stalled_op", .writes = {x}});
  engine.Push({.name = "blocked_op", .reads = {x}}, [] {});
  log.WaitForLine({"blocked_op"});  // nobody waits for the engine: the watchdog speaks unasked
  log.WaitForLine({"stalled_op"});
  log.WaitForLine({"stalled_var"});
  log.WaitForLine({"pending for"});  // its age
  hold.Release();
  engine.WaitForAll();
}

TEST_P(WatchdogTest, AStallOfTheFirstOpAfterAQuietTimeIsLogged) {
  LogCapture log;
  EngineOptions options = GetParam().options;
  options.watchdog = milliseconds(50);
  Engine engine(options);
  std::this_thread::sleep_for(milliseconds(20));  // longer than it takes to fall asleep
  const Blocker blocker(engine, {.name = "stalled_op"});
  log.WaitForLine({"stalled_op"});
}

TEST_P(WatchdogTest, NothingIsLoggedWhileOpsFinishOrNoneIsPending) {
  LogCapture log;
  EngineOptions options = GetParam().options;
  options.watchdog = milliseconds(300);
  Engine engine(options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "pending_all_along", .writes = {x}});
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "finishes"}, [] { std::this_thread::sleep_for(milliseconds(5)); });
    if (i % 10 == 0) std::this_thread::sleep_for(milliseconds(10));
  }
  hold.Release();
  engine.WaitForAll();
  std::this_thread::sleep_for(milliseconds(400));  // idle for longer than the watchdog's patience
  EXPECT_EQ(log.Text(), "");
}

TEST_P(WatchdogTest, ZeroTurnsItOffAndTheLongestPatienceNeverEnds) {
  for (const milliseconds patience : {milliseconds(0), milliseconds::max()}) {
    LogCapture log;
    EngineOptions options = GetParam().options;
    options.watchdog = patience;
    Engine engine(options);
    const Var x = engine.NewVar("x");
    Hold hold(engine, {.name = "hold", .writes = {x}});
    EXPECT_THROW(engine.WaitForVar(x, milliseconds(150)), TimeoutError);
    EXPECT_EQ(log.Text(), "");
  }
}

}  // namespace
}  // namespace heddle::engine_test
