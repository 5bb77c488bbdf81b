// The bound on pending ops and on their temporary bytes: it holds, and it never deadlocks.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

class BoundTest : public EveryEngine {
 protected:
  static EngineOptions Bounded(std::int64_t max_pending_ops) {
    EngineOptions options = GetParam().options;
    options.max_pending_ops = max_pending_ops;
    return options;
  }
  // An op that writes `var` and can go on without anybody's help, but does not before Release(). (A
  // Hold would not do: when all that is pending waits for completions the bound lets pushers
  // through.) Null on the serial engine, which leaves nothing of the kind pending.
  static std::unique_ptr<Blocker> Occupy(Engine& engine, const Var& var, std::int64_t bytes) {
    const OpOptions options{.name = "busy", .writes = {var}, .temporary_bytes = bytes};
    if (GetParam().options.type == "serial") return nullptr;
    return std::make_unique<Blocker>(engine, options,
                                     /*until_started=*/GetParam().options.type != "seeded");
  }
};
INSTANTIATE_TEST_SUITE_P(All, BoundTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(BoundTest, APusherAtTheBoundWaitsAndCarriesOn) {
  for (const int bound : {1, 2, 10}) {
    Engine engine(Bounded(bound));
    const Var x = engine.NewVar("x");
    int runs = 0;
    for (int i = 0; i < 5000; ++i) {
      engine.Push({.name = "add", .reads = {x}, .writes = {x}}, [&] { ++runs; });
      const EngineStats stats = engine.stats();
      ASSERT_LE(stats.pushed - stats.done, static_cast<std::uint64_t>(bound));
    }
    engine.WaitForAll();
    EXPECT_EQ(runs, 5000);
  }
}

TEST_P(BoundTest, TryPushSaysNoAtTheBoundAndQueuesNothing) {
  constexpr int kBound = 10;
  Engine engine(Bounded(kBound));
  const Var gate = engine.NewVar("gate");
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  if (busy == nullptr) GTEST_SKIP() << "all that the serial engine can run has run";
  int accepted = 0, runs = 0;
  auto token = std::make_shared<int>(0);
  for (int i = 0; i < 3 * kBound; ++i) {
    accepted += engine.TryPush({.name = "blocked", .reads = {gate}, .writes = {gate}},
                               [&runs, token] { ++runs; });
  }
  EXPECT_EQ(accepted, kBound - 1);             // the running op counts
  EXPECT_EQ(token.use_count(), 1 + accepted);  // refused bodies are gone
  EXPECT_EQ(engine.stats().pushed, static_cast<std::uint64_t>(kBound));
  EXPECT_FALSE(engine.TryPushAsync({.name = "blocked", .writes = {gate}},
                                   [](const Completion& done) { done(); }));
  busy->Release();
  engine.WaitForAll();
  EXPECT_EQ(runs, accepted);
  EXPECT_TRUE(engine.TryPush({.name = "again", .writes = {gate}}, [&] { ++runs; }));
  EXPECT_TRUE(engine.TryPushAsync({.name = "again", .writes = {gate}}, [&](const Completion& done) {
    ++runs;
    done();
  }));
  engine.WaitForAll();
  EXPECT_EQ(runs, accepted + 2);
}

TEST_P(BoundTest, PushesFromInsideOpsNeverWait) {
  Engine engine(Bounded(1));
  std::atomic<int> runs = 0;
  engine.Push({.name = "parent"}, [&] {
    for (int i = 0; i < 100; ++i) {
      engine.Push({.name = "child"}, [&] {
        ++runs;
        engine.PushAsync({.name = "grandchild"}, [&](const Completion& done) {
          ++runs;
          done();
        });
      });
    }
  });
  engine.Push({.name = "after"}, [&] { ++runs; });
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 201);
}

TEST_P(BoundTest, UnderANoWaitScopePushesNeverWait) {
  Engine engine(Bounded(1));
  const Var gate = engine.NewVar("gate");
  Hold hold(engine, {.name = "hold", .writes = {gate}});
  int runs = 0;
  {
    const NoWaitScope outer;
    for (int i = 0; i < 100; ++i) {
      const NoWaitScope inner;
      engine.Push({.name = "blocked", .reads = {gate}, .writes = {gate}}, [&] { ++runs; });
    }
    engine.Push({.name = "blocked", .reads = {gate}, .writes = {gate}}, [&] { ++runs; });
  }
  EXPECT_EQ(engine.stats().pushed - engine.stats().done, 102u);
  hold.Release();
  engine.WaitForAll();
  EXPECT_EQ(runs, 101);
}

// A host's signals are not deaf to a push at the bound: the call that pushes is completed, beyond
// the bound, and what the check threw comes back at its next wait, or when the host asks.
TEST_P(BoundTest, AnExceptionOfTheCheckEndsTheWaitForRoomAndIsKept) {
  if (GetParam().options.type != "threaded")
    GTEST_SKIP() << "a push at the bound runs what is busy";
  struct Left : std::exception {};
  Engine engine(Bounded(3));
  const Var gate = engine.NewVar("gate");
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  int runs = 0;
  const auto push = [&] {
    engine.Push({.name = "blocked", .reads = {gate}, .writes = {gate}}, [&] { ++runs; });
  };
  static thread_local int calls;
  calls = 0;
  {
    WaitCheckScope checked(std::chrono::milliseconds(1), [] {
      if (++calls == 3) throw Left();
    });
    push();
    push();
    push();  // one too many
    EXPECT_EQ(calls, 3);
    push();
    EXPECT_EQ(calls, 3);
    {
      const WaitCheckScope inner(std::chrono::milliseconds(1), [] {});
      push();
      EXPECT_THROW(engine.WaitForVar(gate), Left);
    }
    EXPECT_EQ(checked.TakeError(), nullptr);  // it has been seen
    calls = 1;
    {
      const WaitCheckScope inner(std::chrono::milliseconds(1), [] {
        if (++calls == 3) throw Left();
      });
      push();
    }
    EXPECT_EQ(calls, 3);
    {
      const WaitCheckScope unchecked(std::chrono::milliseconds(1), nullptr);
      EXPECT_THROW(engine.WaitForVar(gate, std::chrono::milliseconds(20)), TimeoutError);
    }
    const std::exception_ptr kept = checked.TakeError();
    ASSERT_NE(kept, nullptr);
    EXPECT_THROW(std::rethrow_exception(kept), Left);
  }
  busy->Release();
  engine.WaitForAll();
  EXPECT_EQ(runs, 6);
}

// The check of a push with a deadline pushes without one. That gave up when the deadline passed.
TEST_P(BoundTest, ThePushOfACheckHasNoDeadline) {
  if (GetParam().options.type != "threaded")
    GTEST_SKIP() << "a push at the bound runs what is busy";
  static thread_local Engine* pushed_to;
  Engine engine(Bounded(2));
  const Var gate = engine.NewVar("gate");
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  engine.Push({.name = "blocked", .reads = {gate}, .writes = {gate}}, [] {});
  const Deadline deadline = std::chrono::milliseconds(20);
  std::thread releaser([&] {
    while (Deadline::Clock::now() < deadline.time() + std::chrono::milliseconds(30)) {
      std::this_thread::yield();
    }
    busy->Release();
  });
  {
    WaitCheckScope checked(std::chrono::milliseconds(1), [] {
      if (Engine* const to = std::exchange(pushed_to, nullptr))
        to->Push({.name = "of_check"}, [] {});
    });
    pushed_to = &engine;
    try {
      engine.Push(
          {.name = "late"}, [] {}, deadline);
    } catch (const TimeoutError&) {  // or there is room by now
    }
    EXPECT_EQ(checked.TakeError(), nullptr);
  }
  releaser.join();
}

// A deadline bounds the wait for room and nothing else: a push that finds room does not look at it.
TEST_P(BoundTest, APushWithADeadlineGivesUpNamingTheOpThatHoldsItUp) {
  constexpr int kBound = 3;
  Engine engine(Bounded(kBound));
  const Var gate = engine.NewVar("gate");
  const Deadline past = std::chrono::milliseconds(-1000);
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  if (GetParam().options.type != "threaded")
    GTEST_SKIP() << "a push at the bound runs what is busy";
  int runs = 0;
  const auto token = std::make_shared<int>(0);
  const OpOptions options{.name = "pushed_late", .reads = {gate}, .writes = {gate}};
  const auto push = [&](Deadline deadline) {
    engine.Push(
        options, [&runs, token] { ++runs; }, deadline);
  };
  const auto push_async = [&](Deadline deadline) {
    engine.PushAsync(
        options,
        [&runs, token](const Completion& done) {
          ++runs;
          done();
        },
        deadline);
  };
  push(past);
  push_async(past);
  for (const Deadline deadline : {past, Deadline(std::chrono::milliseconds(30))}) {
    for (const std::string& message : {MessageOf<TimeoutError>([&] { push(deadline); }),
                                       MessageOf<TimeoutError>([&] { push_async(deadline); })}) {
      EXPECT_TRUE(Contains(message, "pushed_late")) << message;
      EXPECT_TRUE(Contains(message, "busy")) << message;
    }
  }
  EXPECT_EQ(token.use_count(), kBound);  // the refused bodies are gone
  EXPECT_EQ(engine.stats().pushed, static_cast<std::uint64_t>(kBound));
  std::thread releaser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // most likely, the push waits then
    busy->Release();
  });
  push(std::chrono::hours::max());
  releaser.join();
  engine.WaitForAll();
  EXPECT_EQ(runs, kBound);
}

// Engines without workers run what makes room inside the push; a deadline ends that, too.
TEST_P(BoundTest, APushWithADeadlineRunsNoMoreOpsOnceItHasPassed) {
  if (GetParam().options.type != "seeded") GTEST_SKIP() << "others have workers, or nothing to run";
  Engine engine(Bounded(2));
  int runs = 0;
  for (int i = 0; i < 2; ++i) engine.Push({.name = "waits_its_turn"}, [&] { ++runs; });
  const Deadline past = std::chrono::milliseconds(-1000);
  const std::string message = MessageOf<TimeoutError>([&] {
    engine.Push(
        {.name = "pushed_late"}, [] { FAIL(); }, past);
  });
  EXPECT_TRUE(Contains(message, "pushed_late")) << message;
  EXPECT_TRUE(Contains(message, "waits_its_turn")) << message;
  EXPECT_EQ(runs, 0);
  engine.Push(
      {.name = "pushed"}, [&] { ++runs; }, std::chrono::hours::max());
  engine.WaitForAll();
  EXPECT_EQ(runs, 3);
}

// Nobody knows how long a body takes.
TEST_P(BoundTest, APushWithADeadlineRunsNoOpItself) {
  if (GetParam().options.type != "threaded") GTEST_SKIP() << "others have no workers";
  constexpr int kBound = 4;
  for (int round = 0; round < 10; ++round) {
    Engine engine(Bounded(kBound));
    std::latch over(1);
    std::atomic<int> run_here = 0;
    for (int i = 0; i < kBound; ++i) {
      engine.Push({.name = "slow"}, [&, pusher = std::this_thread::get_id()] {
        if (std::this_thread::get_id() == pusher) {
          ++run_here;
        } else {
          over.wait();
        }
      });
    }
    std::string message;
    if (round % 2 == 0) {
      message = MessageOf<TimeoutError>([&] {
        engine.Push(
            {.name = "late"}, [] {}, std::chrono::milliseconds(5));
      });
      EXPECT_TRUE(Contains(message, "slow")) << message;
    } else {
      std::thread releaser([&] { over.count_down(); });
      engine.Push(
          {.name = "in_time"}, [] {}, kSoon);
      releaser.join();
    }
    EXPECT_EQ(run_here, 0);
    if (round % 2 == 0) over.count_down();
    engine.WaitForAll();
  }
}

// Nor does a push that runs ops, to make room, keep signals waiting.
TEST_P(BoundTest, AnExceptionOfTheCheckEndsAPushThatRunsOpsForRoom) {
  struct Left : std::exception {};
  constexpr int kOps = 2000;
  static std::atomic<bool> left;
  left = false;
  EngineOptions options = GetParam().options;
  options.max_pending_bytes = kOps;
  Engine engine(options);
  const Var x = engine.NewVar("x");
  {
    const NoWaitScope no_wait;
    for (int i = 0; i < kOps; ++i) {
      engine.Push({.name = "busy", .reads = {x}, .writes = {x}, .temporary_bytes = 1}, [] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
        while (!left && std::chrono::steady_clock::now() < end) {
        }
      });
    }
  }
  WaitCheckScope checked(std::chrono::milliseconds(2), [] {
    left = true;
    throw Left();
  });
  engine.Push({.name = "large", .temporary_bytes = kOps}, [] {});
  const std::exception_ptr kept = checked.TakeError();
  ASSERT_NE(kept, nullptr);
  EXPECT_THROW(std::rethrow_exception(kept), Left);
  const WaitCheckScope unchecked(std::chrono::milliseconds(1), nullptr);
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), static_cast<std::uint64_t>(kOps));
}

// Nor does one that sleeps, since workers have taken all places, and is woken by each op that they
// run, more often than its check is due.
TEST_P(BoundTest, AnExceptionOfTheCheckEndsAPushThatIsWokenAllTheTime) {
  if (GetParam().options.type != "threaded") GTEST_SKIP() << "others have no workers";
  struct Left : std::exception {};
  constexpr int kOps = 2000;
  static std::atomic<bool> left;
  left = false;
  EngineOptions options = GetParam().options;
  options.max_pending_bytes = kOps;
  Engine engine(options);
  const Var x = engine.NewVar("x");
  std::vector<std::unique_ptr<Blocker>> places;
  for (int i = 1; i < options.num_workers; ++i) {
    places.push_back(Occupy(engine, engine.NewVar("gate"), /*bytes=*/0));
  }
  std::latch started(1);
  engine.Push({.reads = {x}, .writes = {x}, .temporary_bytes = 1}, [&] { started.count_down(); });
  started.wait();
  for (int i = 1; i < kOps; ++i) {
    engine.Push({.name = "busy", .reads = {x}, .writes = {x}, .temporary_bytes = 1}, [] {
      if (!left) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  WaitCheckScope checked(std::chrono::milliseconds(20), [] {
    left = true;
    throw Left();
  });
  engine.Push({.name = "large", .temporary_bytes = kOps}, [] {});
  EXPECT_NE(checked.TakeError(), nullptr);
  places.clear();
  const WaitCheckScope unchecked(std::chrono::milliseconds(1), nullptr);
  engine.WaitForAll();
}

// Nobody else would say why a program does not come out of its pushes.
TEST_P(BoundTest, TheWatchdogSpeaksWhileAPushWaitsForRoom) {
  if (GetParam().options.type != "threaded")
    GTEST_SKIP() << "a push at the bound runs what is busy";
  LogCapture log;
  EngineOptions options = Bounded(1);
  options.watchdog = std::chrono::milliseconds(50);
  Engine engine(options);
  const Var gate = engine.NewVar("gate");
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  std::thread pusher([&] { engine.Push({.name = "pushed_late"}, [] {}); });
  log.WaitForLine({"watchdog", "busy", "gate"});
  busy->Release();
  pusher.join();
  engine.WaitForAll();
}

// Each of these async ops ends only when the op pushed after it runs.
TEST_P(BoundTest, AnAsyncOpCountsOnlyUntilItsBodyHasReturned) {
  Engine engine(Bounded(1));
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 500; ++i) {
    auto hold = std::make_shared<Hold>(engine, OpOptions{.name = "hold", .writes = {x}});
    engine.Push({.name = "finisher"}, [hold] { hold->Release(); });
  }
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 500u);
}

TEST_P(BoundTest, AThreadThatCompletesMayPushUnderANoWaitScope) {
  Engine engine(Bounded(1));
  const Var x = engine.NewVar("x");
  std::atomic<int> runs = 0;
  std::vector<std::thread> completers;
  for (int i = 0; i < 50; ++i) {
    engine.PushAsync({.name = "async", .writes = {x}}, [&](Completion done) {
      completers.emplace_back([&, done = std::move(done)] {
        const NoWaitScope no_wait;
        for (int child = 0; child < 3; ++child)
          engine.Push({.name = "pushed_late"}, [&] { ++runs; });
        done();
      });
    });
  }
  engine.WaitForVar(x);
  for (std::thread& completer : completers) completer.join();
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 150);
}

// With room for one op, b fills it while it waits for a; but a is finished by an op pushed later
// still.
TEST_P(BoundTest, APusherEntersWhenAllThatIsPendingWaitsForCompletions) {
  Engine engine(Bounded(1));
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) {
    int value = 0, copy = 0;
    auto a = std::make_shared<Hold>(engine, OpOptions{.name = "a", .writes = {x}});
    engine.Push({.name = "b", .reads = {x}}, [&] { copy = value; });
    engine.Push({.name = "c"}, [&, a] {
      value = 9;
      a->Release();
    });
    engine.WaitForReadsAndWrites(x);
    engine.WaitForAll();
    ASSERT_EQ(copy, 9);
  }
}

TEST_P(BoundTest, TwoThreadsWhoseLoopsNeedEachOthersPushesCarryOn) {
  Engine engine(Bounded(1));
  const int kRounds = Scaled(100);
  std::vector<std::shared_ptr<Hold>> mine(kRounds), theirs(kRounds);
  std::vector<Var> x, y;
  for (int i = 0; i < kRounds; ++i) {
    x.push_back(engine.NewVar("x"));
    y.push_back(engine.NewVar("y"));
  }
  std::atomic<int> mine_pushed = -1, theirs_pushed = -1, runs = 0;
  // Each thread: an unfinished op, one behind it that fills the only room, then the op that
  // finishes the other thread's.
  const auto loop = [&](std::vector<Var>& vars, std::vector<std::shared_ptr<Hold>>& holds,
                        std::vector<std::shared_ptr<Hold>>& other_holds, std::atomic<int>& pushed,
                        std::atomic<int>& other_pushed) {
    for (int i = 0; i < kRounds; ++i) {
      holds[i] = std::make_shared<Hold>(engine, OpOptions{.name = "hold", .writes = {vars[i]}});
      pushed.store(i, std::memory_order_release);
      engine.Push({.name = "behind", .reads = {vars[i]}}, [&] { ++runs; });
      while (other_pushed.load(std::memory_order_acquire) < i) std::this_thread::yield();
      engine.Push({.name = "finisher"}, [hold = other_holds[i]] { hold->Release(); });
    }
  };
  std::thread other([&] { loop(y, theirs, mine, theirs_pushed, mine_pushed); });
  loop(x, mine, theirs, mine_pushed, theirs_pushed);
  other.join();
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 2 * kRounds);
}

// A pusher that finds the inbox full empties it itself, while its own op is not in it yet. Here
// that finishes the last op of an epoch whose ops have pushed ops.
TEST_P(BoundTest, APusherThatFindsTheInboxFullFinishesWhatItFindsThere) {
  constexpr int kMoreThanTheInboxHolds = 300'000;
  Engine engine(Bounded(10 * kMoreThanTheInboxHolds));
  const Var x = engine.NewVar("x");
  const Var gate = engine.NewVar("gate");
  std::atomic<int> runs = 0;
  Hold hold(engine, {.name = "hold", .writes = {x}});
  engine.Push({.name = "parent"}, [&] { engine.Push({.name = "child"}, [&] { ++runs; }); });
  EXPECT_THROW(engine.WaitForAll(std::chrono::milliseconds(20)), TimeoutError);  // ends the epoch
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  hold.Release();
  for (int i = 0; i < kMoreThanTheInboxHolds; ++i) {
    engine.Push({.name = "more", .reads = {gate}}, [&] { ++runs; });
  }
  if (busy != nullptr) busy->Release();
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 1 + kMoreThanTheInboxHolds);
}

// Ops of two engines that push into each other: inside an op of either, no push waits.
TEST_P(BoundTest, OpsMayPushIntoAnotherEngineAtItsBound) {
  Engine a(Bounded(1)), b(Bounded(1));
  std::atomic<int> runs = 0;
  for (int i = 0; i < 100; ++i) {
    a.Push({.name = "in_a"}, [&] {
      for (int child = 0; child < 3; ++child) {
        b.Push({.name = "in_b"}, [&] { a.Push({.name = "back_in_a"}, [&] { ++runs; }); });
      }
    });
  }
  a.WaitForAll();
  b.WaitForAll();
  a.WaitForAll();
  EXPECT_EQ(runs.load(), 300);
}

TEST_P(BoundTest, SeveralThreadsShareTheBound) {
  Engine engine(Bounded(3));
  std::atomic<int> runs = 0;
  std::vector<std::thread> pushers;
  const int kOps = Scaled(2000);
  for (int thread = 0; thread < 4; ++thread) {
    pushers.emplace_back([&] {
      const Var x = engine.NewVar("x");
      for (int i = 0; i < kOps; ++i) {
        engine.Push({.name = "add", .writes = {x}}, [&] { ++runs; });
        if (i % 7 == 0) engine.WaitForVar(x);
      }
    });
  }
  for (std::thread& pusher : pushers) pusher.join();
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 4 * kOps);
}

// --- Temporary bytes ---

class ByteBoundTest : public BoundTest {
 protected:
  static EngineOptions BytesBounded(std::int64_t max_pending_bytes) {
    EngineOptions options = GetParam().options;
    options.max_pending_bytes = max_pending_bytes;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(All, ByteBoundTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(ByteBoundTest, TemporaryBytesOfPendingOpsAreBounded) {
  Engine engine(BytesBounded(100));
  const Var gate = engine.NewVar("gate");
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  if (busy == nullptr) GTEST_SKIP() << "all that the serial engine can run has run";
  const auto try_push = [&](std::int64_t bytes) {
    return engine.TryPush({.name = "blocked", .reads = {gate}, .temporary_bytes = bytes}, [] {});
  };
  EXPECT_TRUE(try_push(60));
  EXPECT_EQ(engine.stats().pending_bytes, 60u);
  EXPECT_FALSE(try_push(41));
  EXPECT_EQ(engine.stats().pending_bytes, 60u);
  EXPECT_TRUE(try_push(40));
  EXPECT_FALSE(try_push(1));
  EXPECT_TRUE(try_push(0));  // needs no bytes
  EXPECT_EQ(engine.stats().pending_bytes, 100u);
  busy->Release();
  engine.WaitForAll();
  EXPECT_EQ(engine.stats().pending_bytes, 0u);
  EXPECT_TRUE(try_push(100));
  engine.WaitForAll();
}

TEST_P(ByteBoundTest, AnOpLargerThanTheBoundEntersAlone) {
  Engine engine(BytesBounded(100));
  const Var gate = engine.NewVar("gate");
  const std::unique_ptr<Blocker> busy = Occupy(engine, gate, /*bytes=*/0);
  if (busy == nullptr) GTEST_SKIP() << "all that the serial engine can run has run";
  const auto try_push = [&](std::int64_t bytes) {
    return engine.TryPush({.name = "blocked", .reads = {gate}, .temporary_bytes = bytes}, [] {});
  };
  EXPECT_TRUE(try_push(1000));
  EXPECT_FALSE(try_push(1000));
  EXPECT_FALSE(try_push(1));
  busy->Release();
  engine.WaitForAll();
  int runs = 0;
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 200; ++i) {
    engine.Push({.name = "large", .writes = {x}, .temporary_bytes = i % 3 == 0 ? 1000 : 40},
                [&] { ++runs; });
  }
  engine.WaitForAll();
  EXPECT_EQ(runs, 200);
}

TEST_P(ByteBoundTest, PushesFromInsideOpsAndUnderANoWaitScopeNeverWaitForBytes) {
  Engine engine(BytesBounded(10));
  std::atomic<int> runs = 0;
  engine.Push({.name = "parent", .temporary_bytes = 10}, [&] {
    for (int i = 0; i < 50; ++i)
      engine.Push({.name = "child", .temporary_bytes = 7}, [&] { ++runs; });
  });
  const Var gate = engine.NewVar("gate");
  Hold hold(engine, {.name = "hold", .writes = {gate}, .temporary_bytes = 10});
  {
    const NoWaitScope no_wait;
    engine.Push({.name = "blocked", .reads = {gate}, .temporary_bytes = 10}, [&] { ++runs; });
    engine.Push({.name = "blocked", .reads = {gate}, .temporary_bytes = 20}, [&] { ++runs; });
  }
  hold.Release();
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 52);
  EXPECT_EQ(engine.stats().pending_bytes, 0u);
}

TEST_P(ByteBoundTest, BytesAreGivenBackByFailedAndSkippedOps) {
  Engine engine(BytesBounded(100));
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "fails", .writes = {x}, .temporary_bytes = 60},
                [] { throw std::runtime_error("fails"); });
    engine.Push({.name = "skipped", .reads = {x}, .temporary_bytes = 60}, [] {});
    engine.PushAsync({.name = "dropped", .reads = {x}, .temporary_bytes = 60},
                     [](const Completion&) {});
  }
  EXPECT_THROW(engine.WaitForVar(x), std::runtime_error);
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  EXPECT_EQ(engine.stats().pending_bytes, 0u);
}

}  // namespace
}  // namespace heddle::engine_test
