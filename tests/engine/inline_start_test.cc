// OpOptions::start_inline: when a body runs inside its push, and that it disturbs nothing else.
#include <heddle/engine.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle::engine_test {
namespace {

class InlineStartTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, InlineStartTest, testing::ValuesIn(AllConfigs()), ConfigLabel);
class ThreadedInlineStartTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, ThreadedInlineStartTest, testing::ValuesIn(ThreadedConfigs()),
                         ConfigLabel);

TEST_P(ThreadedInlineStartTest, AReadyOpRunsInsideThePushOnThePushingThread) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  // Every worker is occupied, and the queue is not empty.
  std::vector<std::unique_ptr<Blocker>> blockers;
  for (int i = 0; i < engine.options().num_workers; ++i) {
    blockers.push_back(std::make_unique<Blocker>(engine));
  }
  engine.Push({.name = "elsewhere", .writes = {y}, .priority = 5}, [] {});
  std::thread::id ran_on;
  std::uint64_t running = 0;
  std::optional<Completion> done;
  engine.PushAsync({.name = "send", .writes = {x}, .start_inline = true},
                   [&](Completion completion) {
                     ran_on = std::this_thread::get_id();
                     running = engine.stats().running;
                     done = std::move(completion);
                   });
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_EQ(running, blockers.size() + 1);
  EXPECT_EQ(engine.stats().running, blockers.size() + 1);  // in flight
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(10)), TimeoutError);
  (*done)();
  engine.WaitForVar(x);

  ran_on = {};
  engine.Push({.name = "short", .writes = {x}, .start_inline = true},
              [&] { ran_on = std::this_thread::get_id(); });
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_EQ(engine.version(x), 2u);  // done already
  EXPECT_EQ(engine.version(y), 0u);
  blockers.clear();
  engine.WaitForVar(y);
}

TEST_P(ThreadedInlineStartTest, TryPushStartsInlineToo) {
  Engine engine(GetParam().options);
  bool ran = false, ran_async = false;
  EXPECT_TRUE(engine.TryPush({.start_inline = true}, [&] { ran = true; }));
  EXPECT_TRUE(ran);
  EXPECT_TRUE(engine.TryPushAsync({.start_inline = true}, [&](const Completion& done) {
    ran_async = true;
    done();
  }));
  EXPECT_TRUE(ran_async);
}

TEST_P(InlineStartTest, AnOpWhoseInputIsPendingRunsLater) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  for (const bool written_by_async_op : {true, false}) {
    std::vector<int> order;
    std::optional<Hold> hold;
    if (written_by_async_op) hold.emplace(engine, OpOptions{.name = "hold", .writes = {x}});
    engine.Push({.name = "before", .reads = {x}, .writes = {y}}, [&] { order.push_back(1); });
    engine.PushAsync({.name = "send", .reads = {y}, .writes = {x}, .start_inline = true},
                     [&](const Completion& done) {
                       order.push_back(2);
                       done();
                     });
    engine.Push({.name = "after", .reads = {y}, .writes = {y}}, [&] { order.push_back(3); });
    if (hold) hold->Release();
    engine.WaitForVar(x);
    engine.WaitForVar(y);
    EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  }
}

TEST_P(InlineStartTest, AnExceptionOfTheBodyPoisonsAndDoesNotLeaveThePush) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.PushAsync({.name = "fails", .writes = {x}, .start_inline = true},
                   [](const Completion&) { throw std::runtime_error("no route"); });
  bool ran = false;
  auto token = std::make_shared<int>(0);
  engine.PushAsync({.name = "skipped", .reads = {x}, .writes = {y}, .start_inline = true},
                   [&ran, token](const Completion&) { ran = true; });
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(y); }), "no route");
  EXPECT_FALSE(ran);
  EXPECT_EQ(token.use_count(), 1);
  EXPECT_EQ(engine.FailureOf(y)->op, "fails");
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(InlineStartTest, ACompletionDroppedInTheBodyFailsTheOp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.PushAsync({.name = "drops", .writes = {x}, .start_inline = true}, [](Completion) {});
  EXPECT_THROW(engine.WaitForVar(x), OpError);
}

TEST_P(InlineStartTest, AWaitInTheBodyThrows) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.Push({.name = "waits", .writes = {x}, .start_inline = true},
              [&] { engine.WaitForVar(y); });
  EXPECT_TRUE(Contains(MessageOf<InvalidState>([&] { engine.WaitForVar(x); }), "'waits'"));
}

// Nothing runs on top of another body, and nothing inside a push under a NoWaitScope.
TEST_P(InlineStartTest, InsideOpsAndUnderANoWaitScopeItIsAnOrdinaryOp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  int depth = 0, deepest = 0, runs = 0;
  std::function<void()> push = [&] {
    engine.Push({.name = "nested", .reads = {x}, .writes = {x}, .start_inline = true}, [&] {
      deepest = std::max(deepest, ++depth);
      if (++runs < 100) push();
      --depth;
    });
  };
  push();
  engine.WaitForAll();
  EXPECT_EQ(deepest, 1);
  EXPECT_EQ(runs, 100);

  bool pushing = true;  // written and read by this thread alone
  std::atomic<bool> ran_inside = false, ran = false;
  const std::thread::id self = std::this_thread::get_id();
  {
    const NoWaitScope no_wait;
    engine.Push({.name = "under", .writes = {x}, .start_inline = true}, [&] {
      ran = true;
      if (std::this_thread::get_id() == self) ran_inside = pushing;
    });
    pushing = false;
  }
  engine.WaitForVar(x);
  EXPECT_TRUE(ran);
  EXPECT_FALSE(ran_inside);
}

TEST(SeededInlineStartTest, RunsOnlyInsideWaitsAsEveryOp) {
  EngineOptions options;
  options.type = "seeded";
  Engine engine(options);
  bool ran = false;
  engine.Push({.start_inline = true}, [&] { ran = true; });
  EXPECT_FALSE(ran);
  engine.WaitForAll();
  EXPECT_TRUE(ran);
}

// What an inline op makes ready is a worker's, also when the engine has slept deeply meanwhile.
TEST_P(ThreadedInlineStartTest, DependentsOfALongBodyRunThoughNobodyWaits) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::latch dependent_ran{1};
  std::latch pushed{1};
  std::thread other;
  engine.Push({.name = "long", .writes = {x}, .start_inline = true}, [&] {
    other = std::thread([&] {
      engine.Push({.name = "dependent", .reads = {x}}, [&] { dependent_ran.count_down(); });
      pushed.count_down();
    });
    pushed.wait();
    // Longer than the lookout stays awake; the test is right whatever the machine makes of it.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
  });
  dependent_ran.wait();
  other.join();
}

}  // namespace
}  // namespace heddle::engine_test
