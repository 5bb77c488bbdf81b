// Async ops: completions dropped, called twice, from foreign threads and inside the body; when
// captures die; where dependents run.
#include <heddle/engine.h>

#include <atomic>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

class AsyncTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, AsyncTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(AsyncTest, AnOpFinishesOnlyWhenItsCompletionIsCalled) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  bool dependent_ran = false;
  Hold hold(engine, {.name = "hold", .writes = {x}});
  engine.Push({.name = "dependent", .reads = {x}}, [&] { dependent_ran = true; });
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, std::chrono::milliseconds(30)), TimeoutError);
  EXPECT_FALSE(dependent_ran);
  EXPECT_EQ(engine.version(x), 0u);
  hold.Release();
  engine.WaitForReadsAndWrites(x);
  EXPECT_TRUE(dependent_ran);
  EXPECT_EQ(engine.version(x), 1u);
}

// Also the serial engine must not wait in Push for a completion that the same thread calls later.
TEST_P(AsyncTest, PushNeverWaitsForAnInputThatIsNotYetComplete) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::vector<int> order;
  Hold hold(engine, {.name = "hold", .writes = {x}});
  for (int i = 0; i < 10; ++i) {
    engine.Push({.name = "dependent", .reads = {x}, .writes = {x}}, [&, i] { order.push_back(i); });
  }
  hold.Release();
  engine.WaitForVar(x);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST_P(AsyncTest, WhatTheCompletingThreadWroteIsVisibleToDependentsAndWaiters) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  for (int round = 0; round < 100; ++round) {
    int value = 0, copy = 0;
    std::thread completer;
    engine.PushAsync({.name = "write", .writes = {x}}, [&](Completion done) {
      completer = std::thread([&value, done = std::move(done)] {
        value = 42;
        done();
      });
    });
    engine.Push({.name = "copy", .reads = {x}, .writes = {x}}, [&] { copy = value; });
    engine.WaitForVar(x);
    ASSERT_EQ(copy, 42);
    ASSERT_EQ(value, 42);
    completer.join();
  }
}

TEST_P(AsyncTest, ACompletionCalledInsideTheBodyFinishesTheOpOnlyWhenTheBodyHasReturned) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  for (int round = 0; round < 100; ++round) {
    bool body_over = false, seen_over = false, seen_alive = true;
    auto token = std::make_shared<int>(0);
    engine.PushAsync({.name = "early", .writes = {x}},
                     [&body_over, token = token](const Completion& done) {
                       done();
                       for (int i = 0; i < 20; ++i) std::this_thread::yield();
                       body_over = true;
                     });
    std::weak_ptr<int> watch = token;
    token.reset();
    engine.Push({.name = "dependent", .reads = {x}, .writes = {x}}, [&, watch] {
      seen_over = body_over;
      seen_alive = !watch.expired();
    });
    engine.WaitForVar(x);
    ASSERT_TRUE(seen_over);
    ASSERT_FALSE(seen_alive);
  }
}

TEST_P(AsyncTest, CapturesAreDestroyedBeforeDependentsStartAndBeforeWaitsReturn) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  struct SlowToDie {  // a capture whose destruction takes a while
    explicit SlowToDie(std::atomic<bool>* dead) : dead(dead) {}
    SlowToDie(const SlowToDie&) = delete;
    SlowToDie& operator=(const SlowToDie&) = delete;
    std::atomic<bool>* dead;
    ~SlowToDie() {
      for (int i = 0; i < 20; ++i) std::this_thread::yield();
      *dead = true;
    }
  };
  for (int round = 0; round < 100; ++round) {
    std::atomic<bool> dead = false, async_dead = false, seen = false, async_seen = false;
    engine.Push({.name = "sync", .writes = {x}},
                [capture = std::make_unique<SlowToDie>(&dead)] { (void)capture; });
    engine.Push({.name = "dependent", .reads = {x}, .writes = {x}}, [&] { seen = dead.load(); });
    engine.WaitForVar(x);
    ASSERT_TRUE(seen);
    std::thread completer;
    engine.PushAsync(
        {.name = "async", .writes = {x}},
        [&completer, capture = std::make_unique<SlowToDie>(&async_dead)](Completion done) {
          completer = std::thread([done = std::move(done)] { done(); });
        });
    if (round % 2 == 0) {
      engine.Push({.name = "dependent", .reads = {x}, .writes = {x}},
                  [&] { async_seen = async_dead.load(); });
      engine.WaitForVar(x);
      ASSERT_TRUE(async_seen);
    } else {
      engine.WaitForAll();
      ASSERT_TRUE(async_dead);
    }
    completer.join();
  }
}

TEST_P(AsyncTest, ADroppedCompletionFailsTheOpByName) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.PushAsync({.name = "drops_it", .writes = {x}}, [](const Completion&) {});
  const std::string message = MessageOf<OpError>([&] { engine.WaitForVar(x); });
  EXPECT_TRUE(Contains(message, "drops_it")) << message;
  EXPECT_EQ(engine.FailureOf(x)->op, "drops_it");
  EXPECT_EQ(engine.version(x), 1u);
}

TEST_P(AsyncTest, ACompletionDroppedOnAForeignThreadFailsTheOp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::thread dropper;
  engine.PushAsync({.name = "drops_it", .writes = {x}}, [&](const Completion& done) {
    dropper = std::thread([copies = std::vector<Completion>(3, done)]() mutable {
      while (!copies.empty()) {
        std::this_thread::yield();
        copies.pop_back();
      }
    });
  });
  const std::string message = MessageOf<OpError>([&] { engine.WaitForVar(x); });
  EXPECT_TRUE(Contains(message, "drops_it")) << message;
  dropper.join();
}

TEST_P(AsyncTest, DroppingCopiesOfACalledCompletionIsNoError) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) {
    engine.PushAsync({.name = "copies", .writes = {x}}, [](const Completion& done) {
      std::vector<Completion> copies(3, done);
      copies[1]();
    });
  }
  engine.WaitForVar(x);
  EXPECT_EQ(engine.stats().late_completions, 0u);
}

TEST_P(AsyncTest, TheFirstCallWinsAndLaterOnesAreCountedAndLogged) {
  LogCapture log;
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::optional<Completion> kept;
  engine.PushAsync({.name = "called_twice", .writes = {x}}, [&](const Completion& done) {
    kept = done;
    done();
    done(std::make_exception_ptr(std::runtime_error("too late")));
  });
  engine.PushAsync({.name = "fails_first", .writes = {y}}, [](const Completion& done) {
    done(std::make_exception_ptr(std::runtime_error("first")));
    done();
  });
  engine.WaitForVar(x);
  EXPECT_THROW(engine.WaitForVar(y), std::runtime_error);
  EXPECT_EQ(engine.stats().late_completions, 2u);
  EXPECT_TRUE(log.HasLine({"completion"})) << log.Text();

  std::thread([&] { (*kept)(std::make_error_code(std::errc::io_error)); }).join();
  EXPECT_EQ(engine.stats().late_completions, 3u);
  engine.WaitForVar(x);  // still healthy
}

TEST_P(AsyncTest, ManyThreadsThatRaceToCompleteFinishTheOpOnce) {
  LogCapture log;  // keeps the late calls off the terminal
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const int kRounds = Scaled(50);
  int dependents = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> racers;
    engine.PushAsync({.name = "race", .writes = {x}}, [&](const Completion& done) {
      for (int i = 0; i < 4; ++i) racers.emplace_back([done] { done(); });
    });
    engine.Push({.name = "dependent", .reads = {x}, .writes = {x}}, [&] { ++dependents; });
    engine.WaitForVar(x);
    for (std::thread& racer : racers) racer.join();
    ASSERT_EQ(engine.version(x), 2u * (round + 1));
  }
  EXPECT_EQ(dependents, kRounds);
  EXPECT_EQ(engine.stats().late_completions, 3u * kRounds);
}

TEST_P(AsyncTest, ErrorsReachTheWaitUnchanged) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const auto complete_with = [&](auto error) {
    engine.PushAsync({.name = "fails", .writes = {x}},
                     [error](const Completion& done) { done(error); });
  };
  const std::exception_ptr error = std::make_exception_ptr(std::logic_error("mine"));
  complete_with(error);
  try {
    engine.WaitForVar(x);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::logic_error&) {
    EXPECT_EQ(std::current_exception(), error);
  }
  complete_with(std::make_error_code(std::errc::connection_reset));
  try {
    engine.WaitForVar(x);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::system_error& system_error) {
    EXPECT_EQ(system_error.code(), std::errc::connection_reset);
  }
  complete_with(std::error_code());
  engine.WaitForVar(x);
  complete_with(std::exception_ptr());
  engine.WaitForVar(x);
}

// The completion dies while the exception leaves the body: the op must fail with the exception, not
// with the complaint about a dropped completion.
TEST_P(AsyncTest, ABodyThatThrowsFailsWithItsException) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const std::exception_ptr error = std::make_exception_ptr(std::logic_error("body"));
  engine.PushAsync({.name = "throws", .writes = {x}}, [error](Completion done) {
    const Completion owned = std::move(done);
    std::rethrow_exception(error);
  });
  try {
    engine.WaitForVar(x);
    ADD_FAILURE() << "nothing was thrown";
  } catch (...) {
    EXPECT_EQ(std::current_exception(), error);
  }
}

TEST_P(AsyncTest, ABodyThatThrowsAfterHandingItsCompletionOnFails) {
  LogCapture log;
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::optional<Completion> kept;
  engine.PushAsync({.name = "throws", .writes = {x}}, [&](const Completion& done) {
    kept = done;
    throw std::logic_error("body");
  });
  EXPECT_THROW(engine.WaitForVar(x), std::logic_error);  // no completion will come; none is needed
  (*kept)();
  EXPECT_EQ(engine.stats().late_completions, 1u);
  EXPECT_THROW(engine.WaitForVar(x), std::logic_error);
}

TEST_P(AsyncTest, ACompletionNeverRunsOpBodiesOnAForeignThread) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::mutex mutex;
  std::set<std::thread::id> ran_on;
  const int kRounds = Scaled(200);
  std::vector<std::unique_ptr<Hold>> holds;
  for (int i = 0; i < kRounds; ++i) {
    const Var y = engine.NewVar("y");
    holds.push_back(std::make_unique<Hold>(engine, OpOptions{.name = "hold", .writes = {y}}));
    engine.Push({.name = "dependent", .reads = {y}, .writes = {x}}, [&] {
      const std::lock_guard lock(mutex);
      ran_on.insert(std::this_thread::get_id());
    });
  }
  std::thread foreign([&] {
    for (const auto& hold : holds) hold->Release();
  });
  const std::thread::id foreign_id = foreign.get_id();
  engine.WaitForVar(x);
  foreign.join();
  EXPECT_FALSE(ran_on.contains(foreign_id));
  EXPECT_FALSE(ran_on.empty());
}

TEST_P(AsyncTest, AnAsyncOpHoldsNoWorkerWhileItIsUnfinished) {
  Engine engine(GetParam().options);
  std::vector<std::unique_ptr<Hold>> holds;
  for (int i = 0; i < 100; ++i) {  // more than there are workers
    holds.push_back(std::make_unique<Hold>(engine, OpOptions{.name = "hold"}));
  }
  const Var x = engine.NewVar("x");
  bool ran = false;
  engine.Push({.name = "other", .writes = {x}}, [&] { ran = true; });
  engine.WaitForVar(x);
  EXPECT_TRUE(ran);
}

TEST_P(AsyncTest, AnOpMayCompleteAnotherOne) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::optional<Completion> kept;
  engine.PushAsync({.name = "first", .writes = {x, y}}, [&](Completion done) {
    kept = std::move(done);
    engine.Push({.name = "finisher"}, [&] { (*kept)(); });
  });
  int value = 0;
  engine.Push({.name = "dependent", .reads = {x}, .writes = {x}}, [&] { value = 1; });
  engine.WaitForVar(x);
  EXPECT_EQ(value, 1);
}

TEST_P(AsyncTest, ACompletionMayOutliveItsEngine) {
  LogCapture log;
  std::optional<Completion> kept;
  {
    Engine engine(GetParam().options);
    engine.PushAsync({.name = "op", .writes = {engine.NewVar()}}, [&](const Completion& done) {
      kept = done;
      done();
    });
    engine.WaitForAll();
  }
  (*kept)();  // too late for anything, but harmless
  kept.reset();
}

TEST_P(AsyncTest, RunningCountsAsyncOpsUntilTheyAreComplete) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  Hold hold(engine, {.name = "hold", .writes = {x}});
  engine.Push({.name = "after", .writes = {y}}, [] {});
  engine.WaitForVar(y);
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(20)), TimeoutError);  // body has run
  EXPECT_EQ(engine.stats().running, 1u);
  EXPECT_EQ(engine.stats().done, 1u);
  hold.Release();
  engine.WaitForAll();
  EXPECT_EQ(engine.stats().running, 0u);
  EXPECT_EQ(engine.stats().done, 2u);
}

class ThreadedAsyncTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(Threaded, ThreadedAsyncTest, testing::ValuesIn(ThreadedConfigs()),
                         ConfigLabel);

// However many ops wait for one completion, and however few finish meanwhile, those behind that do
// not are found: by a worker, or by a thread that waits for everything.
TEST_P(ThreadedAsyncTest, OpsBehindManyThatWaitForACompletionRun) {
  for (const bool waits : {false, true}) {
    Engine engine(GetParam().options);
    const Var x = engine.NewVar("x"), y = engine.NewVar("y");
    Hold hold(engine, {.name = "hold", .writes = {x}});
    std::thread waiter;
    std::latch others(20);
    for (int i = 0; i < 20; ++i) {
      for (int j = 0; j < 500; ++j) engine.Push({.name = "dependent", .reads = {x}}, [] {});
      engine.Push({.name = "other", .writes = {y}}, [&] { others.count_down(); });
    }
    if (waits) waiter = std::thread([&] { engine.WaitForAll(); });
    others.wait();
    EXPECT_EQ(engine.version(x), 0u);
    hold.Release();
    if (waits) waiter.join();
    engine.WaitForAll();
  }
}

std::atomic<bool> wait_sleeps = false;

// Finishing the op needs no worker; used to be left to one whose body went on and on.
TEST_P(ThreadedAsyncTest, AWaitForACompletionReturnsThoughEveryWorkerIsInABody) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::optional<Completion> done;
  engine.PushAsync({.name = "async", .writes = {x}},
                   [&](Completion completion) { done = std::move(completion); });
  std::vector<std::unique_ptr<Blocker>> blockers;  // started by workers that have left that body
  for (int i = 0; i < GetParam().options.num_workers; ++i) {
    blockers.push_back(std::make_unique<Blocker>(engine));
  }
  wait_sleeps = false;
  std::thread waiter([&] {
    const WaitCheckScope checked(std::chrono::milliseconds(1), [] {
      wait_sleeps = true;
      wait_sleeps.notify_all();
    });
    EXPECT_NO_THROW(engine.WaitForVar(x, std::chrono::seconds(10)));
  });
  wait_sleeps.wait(false);
  (*done)();
  waiter.join();
}

}  // namespace
}  // namespace heddle::engine_test
