// Interleavings that went wrong once: each is brought about step by step.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "engine/room.h"
#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

class InterleavingTest : public EveryEngine {
 protected:
  static void WaitUntil(const std::function<bool()>& reached) {
    while (!reached()) std::this_thread::yield();
  }
};
INSTANTIATE_TEST_SUITE_P(Threaded, InterleavingTest, testing::ValuesIn(ThreadedConfigs()),
                         ConfigLabel);

// The engine has gone to sleep; the wait looked at it and left again.
TEST_P(InterleavingTest, APushAfterAWaitOnASleepingEngineIsRun) {
  EngineOptions options = GetParam().options;
  options.watchdog = milliseconds(0);
  Engine engine(options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "hold", .writes = {x}});
  std::this_thread::sleep_for(milliseconds(50));  // longer than it takes to fall asleep
  EXPECT_THROW(engine.WaitForAll(milliseconds(20)), TimeoutError);
  std::atomic<bool> ran = false;
  engine.Push({.name = "after"}, [&] { ran = true; });
  WaitUntil([&] { return ran.load(); });
}

// The first op after a quiet time has the engine to itself: nobody else is awake.
TEST_P(InterleavingTest, APushDuringTheFirstOpAfterAQuietTimeIsRun) {
  EngineOptions options = GetParam().options;
  if (options.num_workers == 1) GTEST_SKIP() << "the one worker is busy";
  options.watchdog = milliseconds(0);
  Engine engine(options);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(milliseconds(20));  // longer than it takes to fall asleep
    std::atomic<bool> started = false;
    std::atomic<bool> second_ran = false;
    std::atomic<bool> ended = false;
    engine.Push({.name = "first"}, [&] {
      started = true;
      WaitUntil([&] { return second_ran.load(); });
      ended = true;
    });
    if (round > 0) WaitUntil([&] { return started.load(); });
    engine.Push({.name = "second"}, [&] { second_ran = true; });
    WaitUntil([&] { return ended.load(); });
  }
}

// The first op after a quiet time runs with nobody awake beside it. Whoever comes meanwhile and
// goes again leaves somebody who looks out for what is pushed later.
class FirstOpTest : public InterleavingTest {
 protected:
  static EngineOptions Options() {
    EngineOptions options = GetParam().options;
    options.watchdog = milliseconds(0);
    return options;
  }
  // `during` is called while the first op runs, which ends when an op that is pushed after has run.
  static void Run(Engine& engine, const Var& x, const std::function<void()>& during) {
    std::this_thread::sleep_for(milliseconds(20));  // longer than it takes to fall asleep
    std::atomic<bool> started = false;
    std::atomic<bool> last_ran = false;
    std::atomic<bool> ended = false;
    engine.Push({.name = "first", .writes = {x}}, [&] {
      started = true;
      WaitUntil([&] { return last_ran.load(); });
      ended = true;
    });
    WaitUntil([&] { return started.load(); });
    during();
    std::this_thread::sleep_for(milliseconds(20));  // long enough to come and go
    engine.Push({.name = "last"}, [&] { last_ran = true; });
    WaitUntil([&] { return ended.load(); });
  }
};
INSTANTIATE_TEST_SUITE_P(Threaded, FirstOpTest, testing::ValuesIn(ThreadedConfigs()), ConfigLabel);

TEST_P(FirstOpTest, APushAfterABlockedOneIsRun) {
  if (GetParam().options.num_workers == 1) GTEST_SKIP() << "the one worker is busy";
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  Run(engine, x, [&] { engine.Push({.name = "blocked", .writes = {x}}, [] {}); });
  engine.WaitForAll();
}

TEST_P(FirstOpTest, APushAfterAWaitForAllIsRun) {
  if (GetParam().options.num_workers == 1) GTEST_SKIP() << "the one worker is busy";
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  Run(engine, x, [&] { EXPECT_THROW(engine.WaitForAll(milliseconds(20)), TimeoutError); });
}

// Ops have been so short that one worker is faster than two.
TEST_P(FirstOpTest, APushAfterShortOpsIsRun) {
  if (GetParam().options.num_workers == 1) GTEST_SKIP() << "the one worker is busy";
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 20'000; ++i) engine.Push({.name = "short", .writes = {x}}, [] {});
  engine.WaitForAll();
  Run(engine, x, [] {});
}

// The first op's own thread would run it, but for the first op.
TEST_P(FirstOpTest, WhatItPushesItselfIsRun) {
  if (GetParam().options.num_workers == 1) GTEST_SKIP() << "the one worker is busy";
  Engine engine(Options());
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(milliseconds(20));  // longer than it takes to fall asleep
    std::atomic<bool> ran = false;
    std::atomic<bool> ended = false;
    engine.Push({.name = "first"}, [&] {
      engine.Push({.name = "pushed"}, [&] { ran = true; });
      WaitUntil([&] { return ran.load(); });
      ended = true;
    });
    WaitUntil([&] { return ended.load(); });
  }
}

// Ops that need no push to become ready, in each of the ways in which a thread that runs no
// workers' ops may bring that about.
TEST_P(FirstOpTest, WhatOthersMakeReadyIsRun) {
  if (GetParam().options.num_workers == 1) GTEST_SKIP() << "the one worker is busy";
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  enum class Way { kCompletion, kStats, kInlineStart, kWaitForVar };
  for (const Way way : {Way::kCompletion, Way::kStats, Way::kInlineStart, Way::kWaitForVar}) {
    std::atomic<bool> ran = false;
    std::atomic<bool> ended = false;
    Hold hold(engine, {.name = "hold", .writes = {x}});
    engine.Push({.name = "blocked", .reads = {x}}, [&] { ran = true; });
    std::this_thread::sleep_for(milliseconds(20));  // longer than it takes to fall asleep
    engine.Push({.name = "first"}, [&] {
      std::thread other([&] {
        hold.Release();
        const Var y = engine.NewVar("y");
        if (way == Way::kStats) (void)engine.stats();
        if (way == Way::kInlineStart) {
          engine.Push({.name = "inline", .writes = {y}, .start_inline = true}, [] {});
        }
        if (way == Way::kWaitForVar) {
          engine.Push({.name = "waited_for", .writes = {y}}, [] {});
          engine.WaitForVar(y);
        }
      });
      WaitUntil([&] { return ran.load(); });
      other.join();
      ended = true;
    });
    WaitUntil([&] { return ended.load(); });
    engine.WaitForAll();
  }
}

// A pusher at the bound runs ops in the place of the only worker, who comes for what their bodies
// push, finds no place and goes again. Used to be left lying when the pusher ran no more of them.
TEST_P(InterleavingTest, APushThatStopRefusesLeavesNoReadyOpBehind) {
  if (GetParam().options.num_workers != 1) GTEST_SKIP() << "another worker has a place";
  std::atomic<bool> started = false, stopping = false, child_ran = false;
  EngineOptions options = GetParam().options;
  options.watchdog = milliseconds(0);
  options.max_pending_ops = 1;
  Engine engine(options);
  std::this_thread::sleep_for(milliseconds(20));  // longer than it takes to fall asleep
  std::thread pusher([&] {
    engine.Push({.name = "first"}, [&] {
      started = true;
      WaitUntil([&] { return stopping.load(); });
      engine.Push({.name = "child"}, [&] { child_ran = true; });
      std::this_thread::sleep_for(milliseconds(20));  // long enough to come and go
    });
    try {
      engine.Push({.name = "second"}, [] {});  // most likely runs the first
    } catch (const InvalidState&) {
    }
  });
  WaitUntil([&] { return started.load(); });
  std::thread stopper([&] { EXPECT_NO_THROW(engine.Stop(kSoon)); });
  WaitUntil([&] {
    try {
      engine.ParallelFor(0, 1, [](std::int64_t, std::int64_t) {});
      return false;
    } catch (const InvalidState&) {
      return true;
    }
  });
  std::this_thread::sleep_for(milliseconds(20));  // longer than it takes Stop to fall asleep
  stopping = true;
  stopper.join();
  pusher.join();
  EXPECT_TRUE(child_ran);
}

// The same where the pusher has found room, and pushes only when it has done something else.
TEST_P(InterleavingTest, WhoHasWaitedForRoomLeavesNoReadyOpBehind) {
  if (GetParam().options.num_workers != 1) GTEST_SKIP() << "another worker has a place";
  std::atomic<bool> child_ran = false;
  EngineOptions options = GetParam().options;
  options.watchdog = milliseconds(0);
  options.max_pending_ops = 2;
  Engine engine(options);
  const Var x = engine.NewVar("x");
  std::this_thread::sleep_for(milliseconds(20));  // longer than it takes to fall asleep
  engine.Push({.name = "first"}, [&] {
    engine.Push({.name = "child"}, [&] { child_ran = true; });
    std::this_thread::sleep_for(milliseconds(20));  // long enough to come and go
  });
  engine.Push({.name = "second"}, [] {});
  engine::AwaitRoom(x, "third");
  const auto give_up = steady_clock::now() + kSoon;
  WaitUntil([&] { return child_ran || steady_clock::now() > give_up; });
  EXPECT_TRUE(child_ran);
}

// Calls `while_waiting` on another thread while the calling thread runs an op of its WaitForAll,
// which has begun for certain then; returns when the wait has. False: workers took the op each
// time.
bool CallInsideWaitForAll(Engine& engine, const Var& x,
                          const std::function<void()>& while_waiting) {
  const std::thread::id waiter = std::this_thread::get_id();
  bool called = false;
  for (int round = 0; round < 50 && !called; ++round) {
    engine.Push({.name = "last", .reads = {x}, .writes = {x}}, [&] {
      if (std::this_thread::get_id() != waiter) return;
      called = true;
      std::thread(while_waiting).join();
    });
    engine.WaitForAll();
  }
  return called;
}

TEST_P(InterleavingTest, WaitForAllRunsNothingPushedAfterItBegan) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::atomic<bool> returned = false;
  std::atomic<int> runs = 0;
  const bool called = CallInsideWaitForAll(engine, x, [&] {
    // The wait would never return if it ran this one.
    engine.Push({.name = "later"}, [&] {
      WaitUntil([&] { return returned.load(); });
      ++runs;
    });
  });
  returned = true;
  if (!called) GTEST_SKIP() << "workers took every op";
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 1);
}

// The same, where the later op is made ready by the one that the waiting thread has just run.
TEST_P(InterleavingTest, WaitForAllRunsNoLaterOpThatItMadeReady) {
  if (GetParam().options.num_workers == 1) GTEST_SKIP() << "the later op holds a worker up";
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::atomic<bool> returned = false;
  std::atomic<int> runs = 0;
  Hold hold(engine, {.name = "hold"});  // keeps the wait going after its last op
  std::thread releaser;
  int pushed = 0;
  engine.Push({.name = "last", .writes = {x}}, [&, waiter = std::this_thread::get_id()] {
    if (std::this_thread::get_id() == waiter) {
      ++pushed;
      std::thread([&] {
        engine.Push({.name = "later", .writes = {x}}, [&] {
          WaitUntil([&] { return returned.load(); });
          ++runs;
        });
        (void)engine.stats();  // registers it behind `last`
      }).join();
    }
    releaser = std::thread([&] {
      std::this_thread::sleep_for(milliseconds(20));  // time for the wait to take the wrong op
      hold.Release();
    });
  });
  engine.WaitForAll();
  returned = true;
  releaser.join();
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), pushed);
}

TEST_P(InterleavingTest, AgeingCountsOpsThatComeStraightFromTheInbox) {
  if (GetParam().options.num_workers != 1) GTEST_SKIP() << "counts what one worker does";
  EngineOptions options = GetParam().options;
  options.ageing = 10;
  Engine engine(options);
  Blocker gate(engine);
  int ran = 0;
  int overtaken_by = -1;
  engine.Push({.name = "low", .priority = -1}, [&] { overtaken_by = ran; });
  for (int i = 0; i < 1000; ++i) engine.Push({.name = "normal"}, [&] { ++ran; });
  gate.Release();
  engine.WaitForAll();
  EXPECT_LE(overtaken_by, 2 * (10 + 2));  // the bound that ready_queue.h gives
}

TEST_P(InterleavingTest, BlocksOfAParallelForMayPushAtTheBound) {
  EngineOptions options = GetParam().options;
  options.max_pending_ops = 4;
  Engine engine(options);
  std::atomic<int> runs = 0;
  engine.ParallelFor(40, 1, [&](std::int64_t, std::int64_t) {
    for (int i = 0; i < 5; ++i) {
      engine.Push({.name = "pushed"}, [&] {
        std::this_thread::sleep_for(
            std::chrono::microseconds(200));  // so that pushers meet the bound
        ++runs;
      });
    }
  });
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 200);
}

// Copies take their time and then throw.
struct ThrowsWhenCopied {
  ThrowsWhenCopied() = default;
  ThrowsWhenCopied(const ThrowsWhenCopied&) {
    std::this_thread::sleep_for(milliseconds(50));  // time for others to wait for its bytes
    throw std::runtime_error("copied");
  }
  void operator()() const {}
};

TEST_P(InterleavingTest, APushThatThrowsGivesItsBytesToThoseWhoWait) {
  EngineOptions options = GetParam().options;
  options.max_pending_bytes = 100;
  Engine engine(options);
  std::atomic<bool> throwing = false;
  std::thread thrower([&] {
    const ThrowsWhenCopied body;
    throwing = true;
    EXPECT_THROW(engine.Push({.name = "throws", .temporary_bytes = 100}, body), std::runtime_error);
  });
  WaitUntil([&] { return throwing.load(); });
  std::this_thread::sleep_for(milliseconds(10));  // the bytes are taken; either order is right
  engine.Push({.name = "next", .temporary_bytes = 100}, [] {});
  thrower.join();
  engine.WaitForAll();
}

TEST_P(InterleavingTest, AnEngineMayEndInsideAnOpOfAnother) {
  Engine engine(GetParam().options);
  int runs = 0;
  engine.Push({.name = "outer"}, [&] {
    Engine inner(GetParam().options);
    for (int i = 0; i < 10; ++i) inner.Push({.name = "inner"}, [] {});
    ++runs;
  });
  engine.WaitForAll();
  EXPECT_EQ(runs, 1);
}

TEST_P(InterleavingTest, OpsMayMakeVariablesWhileTheEngineDrains) {
  std::string outcome = "not run";
  {
    Engine engine(GetParam().options);
    std::atomic<bool> running = false;
    engine.Push({.name = "late"}, [&] {
      running = true;
      std::this_thread::sleep_for(milliseconds(20));  // the destructor has begun
      try {
        const Var x = engine.NewVar("x");
        engine.Push({.name = "uses_it", .writes = {x}}, [&] { outcome = "run"; });
      } catch (const std::exception& error) {
        outcome = error.what();
      }
    });
    WaitUntil([&] { return running.load(); });
  }
  EXPECT_EQ(outcome, "run");
}

TEST_P(InterleavingTest, AnUrgentOpGoesBeforeTheBlocksOfAParallelFor) {
  if (GetParam().options.num_workers != 2)
    GTEST_SKIP() << "one worker in the op, one that becomes free";
  Engine engine(GetParam().options);
  Blocker busy(engine);
  std::atomic<int> blocks = 0;
  std::atomic<int> at = -1;
  std::atomic<bool> enough = false;
  engine.Push({.name = "parallel"}, [&] {
    engine.ParallelFor(100'000, 1, [&](std::int64_t, std::int64_t) {
      ++blocks;
      if (!enough) std::this_thread::sleep_for(milliseconds(1));  // the job outlasts the push
    });
  });
  WaitUntil([&] { return blocks > 0; });
  engine.Push({.name = "urgent", .priority = 9}, [&] {
    at = blocks.load();
    enough = true;
  });
  busy.Release();
  engine.WaitForAll();
  EXPECT_LT(at, 50'000);
}

}  // namespace
}  // namespace heddle::engine_test
