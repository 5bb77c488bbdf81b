// Waits: what they wait for, what they leave alone, deadlines, and that none works inside an op.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <ctime>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

class WaitTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, WaitTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(WaitTest, WaitForVarLeavesPendingReadsAndOtherVarsAlone) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  int value = 0;
  Hold unrelated(engine, {.name = "unrelated", .writes = {y}});
  engine.Push({.name = "write", .writes = {x}}, [&] { value = 7; });
  Hold reader(engine, {.name = "reader", .reads = {x}});
  engine.WaitForVar(x);  // would hang if it waited for either hold
  EXPECT_EQ(value, 7);
}

TEST_P(WaitTest, WaitForReadsAndWritesWaitsForPendingReads) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold reader(engine, {.name = "reader", .reads = {x}});
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(20)), TimeoutError);
  reader.Release();
  engine.WaitForReadsAndWrites(x);

  std::vector<int> data(100, 1);
  long sum = 0;
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "read", .reads = {x}, .writes = {engine.NewVar()}},
                [&data, out = std::make_shared<long>(0)] {
                  for (const int value : data) *out += value;
                });
  }
  engine.WaitForReadsAndWrites(x);
  data.assign(100, 2);  // no pending op looks at it now: the thread sanitizer watches
  engine.Push({.name = "read", .reads = {x}}, [&] {
    for (const int value : data) sum += value;
  });
  engine.WaitForReadsAndWrites(x);
  EXPECT_EQ(sum, 200);
}

TEST_P(WaitTest, WaitsOnFreshVarsAndIdleEnginesReturnAtOnce) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.WaitForVar(x);
  engine.WaitForReadsAndWrites(x);
  engine.WaitForAll();
  const Deadline past = steady_clock::now() - milliseconds(1000);
  engine.WaitForVar(x, past);  // nothing to wait for, so nothing is late
  engine.WaitForReadsAndWrites(x, past);
  engine.WaitForAll(past);
}

// What a host with signals of its own needs: a wait that sleeps calls the check, and an exception
// of the check leaves the wait with everything as it was.
TEST_P(WaitTest, ACheckMayLeaveASleepingWait) {
  struct Left : std::exception {};
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold held(engine, {.name = "held", .writes = {x}});
  static thread_local int calls;
  calls = 0;
  const auto third_call = [] {
    if (++calls % 3 == 0) throw Left();
  };
  {
    const WaitCheckScope checked(milliseconds(1), third_call);
    EXPECT_THROW(engine.WaitForVar(x), Left);
    EXPECT_THROW(engine.WaitForReadsAndWrites(x), Left);
    EXPECT_THROW(engine.WaitForAll(), Left);
    EXPECT_EQ(calls, 9);
    // Nested scopes: the innermost counts, and the outer one is back after it.
    {
      const WaitCheckScope unchecked(milliseconds(1), nullptr);
      EXPECT_THROW(engine.WaitForVar(x, milliseconds(20)), TimeoutError);
      EXPECT_EQ(calls, 9);
    }
    EXPECT_THROW(engine.WaitForVar(x), Left);
  }
  EXPECT_THROW(engine.WaitForVar(x, milliseconds(20)), TimeoutError);
  EXPECT_EQ(calls, 12);
  held.Release();
  engine.WaitForVar(x);
  engine.WaitForAll();
}

// It need not sleep for that: whoever runs ops itself calls the check between two of them.
TEST_P(WaitTest, ACheckMayLeaveAWaitThatRunsOpsItself) {
  struct Left : std::exception {};
  constexpr int kOps = 300;
  for (int kind = 0; kind < 3; ++kind) {
    Engine engine(GetParam().options);
    const Var x = engine.NewVar("x");
    {
      const NoWaitScope no_wait;  // nor does the serial engine run them inside the pushes
      for (int i = 0; i < kOps; ++i) {
        engine.Push({.name = "busy", .reads = {x}, .writes = {x}}, [] {
          const auto end = steady_clock::now() + milliseconds(1);
          while (steady_clock::now() < end) {
          }
        });
      }
    }
    const WaitCheckScope checked(milliseconds(2), [] { throw Left(); });
    const auto wait = [&] {
      if (kind == 0) engine.WaitForVar(x);
      if (kind == 1) engine.WaitForReadsAndWrites(x);
      if (kind == 2) engine.WaitForAll();
    };
    EXPECT_THROW(wait(), Left);
    EXPECT_LT(engine.version(x), kOps) << kind;
    const WaitCheckScope unchecked(milliseconds(1), nullptr);
    engine.WaitForAll();
    EXPECT_EQ(engine.version(x), kOps);
  }
}

// However often it is to be called, the wait gets on.
TEST_P(WaitTest, ACheckThatIsAlwaysDueMayPushAndHoldsUpNothing) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  static thread_local std::function<void()>* push;
  static thread_local int calls;
  std::function<void()> push_some = [&] {
    if (++calls % 10 == 0) engine.Push({.name = "of_the_check", .writes = {x}}, [] {});
  };
  push = &push_some;
  calls = 0;
  constexpr std::uint64_t kOps = 100;
  {
    const NoWaitScope no_wait;
    for (std::uint64_t i = 0; i < kOps; ++i) {
      engine.Push({.name = "op", .reads = {x}, .writes = {x}}, [] {});
    }
  }
  const WaitCheckScope checked(milliseconds(0), [] { (*push)(); });
  engine.WaitForVar(x);
  engine.WaitForAll();
  EXPECT_GE(engine.version(x), kOps);
}

TEST_P(WaitTest, WaitForAllIncludesWhatPendingOpsPush) {
  Engine engine(GetParam().options);
  std::atomic<int> runs = 0;
  std::function<void(int)> push = [&](int depth) {
    engine.Push({.name = "nested"}, [&, depth] {
      std::this_thread::yield();
      if (depth > 0) {
        push(depth - 1);
        push(depth - 1);
      }
      ++runs;
    });
  };
  for (int round = 1; round <= 20; ++round) {
    push(6);
    engine.WaitForAll();
    ASSERT_EQ(runs.load(), round * 127);
  }
}

TEST_P(WaitTest, WaitForAllIncludesWhatTheBodiesOfAsyncOpsPush) {
  Engine engine(GetParam().options);
  bool child_ran = false;
  std::thread completer;
  engine.PushAsync({.name = "parent"}, [&](Completion done) {
    engine.Push({.name = "child"}, [&] { child_ran = true; });
    completer = std::thread([done = std::move(done)] { done(); });
  });
  engine.WaitForAll();
  EXPECT_TRUE(child_ran);
  completer.join();
}

// The other thread always has at least one unfinished op, so that an engine which waits for a
// moment without pending ops waits for ever.
TEST_P(WaitTest, WaitForAllReturnsWhileAnotherThreadPushesForever) {
  EngineOptions options = GetParam().options;
  options.max_pending_ops = 1000;
  Engine engine(options);
  std::atomic<bool> stop = false;
  std::atomic<long> pushed = 0;
  std::thread forever([&] {
    const Var x = engine.NewVar("x");
    auto held = std::make_unique<Hold>(engine, OpOptions{.name = "held"});
    while (!stop) {
      auto next = std::make_unique<Hold>(engine, OpOptions{.name = "held"});
      held = std::move(next);  // the former ends only now
      engine.Push({.name = "forever", .reads = {x}, .writes = {x}}, [] {});
      ++pushed;
    }
  });
  while (pushed == 0) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) {
    bool mine = false;
    engine.Push({.name = "mine"}, [&] { mine = true; });
    engine.WaitForAll();
    EXPECT_TRUE(mine);
  }
  stop = true;
  forever.join();
  engine.WaitForAll();
}

TEST_P(WaitTest, WaitForVarReturnsWhileAnotherThreadWritesTheVarForever) {
  EngineOptions options = GetParam().options;
  options.max_pending_ops = 1000;
  Engine engine(options);
  const Var x = engine.NewVar("x");
  std::atomic<bool> stop = false;
  std::atomic<long> pushed = 0;
  std::thread forever([&] {
    auto held = std::make_unique<Hold>(engine, OpOptions{.name = "held", .writes = {x}});
    while (!stop) {
      auto next = std::make_unique<Hold>(engine, OpOptions{.name = "held", .writes = {x}});
      held = std::move(next);
      ++pushed;
    }
  });
  while (pushed == 0) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) {
    engine.WaitForVar(x);
    engine.WaitForReadsAndWrites(x);
  }
  stop = true;
  forever.join();
  engine.WaitForAll();
}

// Calls `wait` on a thread of its own, and `meanwhile` once that sleeps.
void WhileAsleep(const std::function<void()>& wait, const std::function<void()>& meanwhile) {
  static std::atomic<bool> asleep;
  asleep = false;
  std::thread waiter([&] {
    const WaitCheckScope checked(milliseconds(1), [] {
      asleep = true;
      asleep.notify_all();
    });
    EXPECT_NO_THROW(wait());
  });
  asleep.wait(false);
  meanwhile();
  waiter.join();
}

// The op that ends the wait comes from a thread that does not wait itself. Used to be left lying on
// engines without workers, where only the sleeping thread could run it.
TEST_P(WaitTest, ASleepingWaitSeesWhatOtherThreadsPush) {
  constexpr std::chrono::seconds kPatience(20);
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const std::vector<std::function<void()>> waits = {
      [&] { engine.WaitForVar(x, kPatience); },
      [&] { engine.WaitForReadsAndWrites(x, kPatience); },
      [&] { engine.WaitForAll(kPatience); },
  };
  for (const bool no_wait : {false, true}) {
    for (std::size_t i = 0; i < waits.size(); ++i) {
      SCOPED_TRACE("wait " + std::to_string(i) + (no_wait ? ", under a NoWaitScope" : ""));
      Hold hold(engine, {.name = "hold", .writes = {x}});
      WhileAsleep(waits[i], [&] {
        std::optional<NoWaitScope> scope;
        if (no_wait) scope.emplace();
        engine.Push({.name = "finisher"}, [&] { hold.Release(); });
      });
      engine.WaitForAll(kPatience);
    }
  }
}

// All that the other thread pushes comes after the wait has begun.
TEST_P(WaitTest, WaitForReadsAndWritesLeavesOutWhatIsPushedLater) {
  constexpr std::chrono::seconds kPatience(20);
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  for (const bool first_reads : {false, true}) {
    for (const bool later_reads : {false, true}) {
      SCOPED_TRACE(testing::Message() << first_reads << later_reads);
      const auto options = [&](const char* name, bool reads) {
        OpOptions of{.name = std::string_view(name)};
        (reads ? of.reads : of.writes) = {x};
        return of;
      };
      Hold first(engine, options("first", first_reads));
      std::optional<Hold> later;
      WhileAsleep([&] { engine.WaitForReadsAndWrites(x, kPatience); },
                  [&] {
                    later.emplace(engine, options("later", later_reads));
                    first.Release();
                  });
      later->Release();
      engine.WaitForAll(kPatience);
    }
  }
}

// Several wait for reads of one variable, and some give up: the others keep their places.
TEST_P(WaitTest, ThreadsThatWaitForReadsAndGiveUpLeaveTheOthersInOrder) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      while (!stop) {
        try {
          engine.WaitForReadsAndWrites(x, std::chrono::microseconds(20 * thread));
        } catch (const TimeoutError&) {
        }
      }
    });
  }
  const int kRounds = Scaled(300);
  int value = 0;  // of x
  for (int i = 1; i <= kRounds; ++i) {
    Hold reader(engine, {.name = "reads", .reads = {x}});
    engine.Push({.name = "writes", .reads = {x}, .writes = {x}}, [&] { ++value; });
    const Var y = engine.NewVar("y");
    bool seen = false;
    engine.Push({.name = "looks", .reads = {x}, .writes = {y}}, [&, i] { seen = value == i; });
    if (i % 2 == 0) std::this_thread::yield();
    reader.Release();
    engine.WaitForVar(y);
    ASSERT_TRUE(seen);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  engine.WaitForReadsAndWrites(x, kSoon);
  EXPECT_EQ(engine.version(x), static_cast<std::uint64_t>(kRounds));
}

// The engine cannot know for which op a thread pushes that is in the body of none.
TEST_P(WaitTest, WaitForAllLeavesOutWhatIsPushedLaterByWhoCompletesAnOp) {
  Engine engine(GetParam().options);
  Hold parent(engine, {.name = "parent"});
  std::optional<Hold> child;
  WhileAsleep([&] { engine.WaitForAll(kSoon); },
              [&] {
                child.emplace(engine, OpOptions{.name = "child"});
                parent.Release();
              });
  child->Release();
  engine.WaitForAll(kSoon);
}

TEST_P(WaitTest, SeveralThreadsMayWaitAtOnce) {
  Engine engine(GetParam().options);
  const int kRounds = Scaled(300);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const Var x = engine.NewVar("x");
      int value = 0;
      for (int i = 1; i <= kRounds; ++i) {
        engine.Push({.name = "add", .reads = {x}, .writes = {x}}, [&] { ++value; });
        if (thread % 2 == 0) {
          engine.WaitForVar(x);
        } else {
          engine.WaitForAll();
        }
        ASSERT_EQ(value, i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(WaitTest, WaitsInsideAnOpThrowAndNameTheOp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  const milliseconds long_enough(60'000);
  const std::vector<std::function<void()>> waits = {
      [&] { engine.WaitForVar(x); },
      [&] { engine.WaitForVar(x, long_enough); },
      [&] { engine.WaitForVar(y); },
      [&] { engine.WaitForReadsAndWrites(x); },
      [&] { engine.WaitForReadsAndWrites(x, long_enough); },
      [&] { engine.WaitForAll(); },
      [&] { engine.WaitForAll(long_enough); },
      [&] { engine.Stop(); },
      [&] { engine.Stop(long_enough); },
  };
  for (const auto& wait : waits) {
    std::string message;
    engine.Push({.name = "waits_inside", .writes = {x}},
                [&] { message = MessageOf<InvalidState>(wait); });
    engine.WaitForVar(x);
    EXPECT_TRUE(Contains(message, "waits_inside")) << message;
    message.clear();
    engine.PushAsync({.name = "waits_inside", .writes = {x}}, [&](Completion done) {
      message = MessageOf<InvalidState>(wait);
      done();
    });
    engine.WaitForVar(x);
    EXPECT_TRUE(Contains(message, "waits_inside")) << message;
  }
  // Nothing of it lingers: waits work outside, also on the thread that ran the op while waiting.
  engine.Push({.name = "after", .writes = {x}}, [] {});
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 2 * waits.size() + 1);
}

TEST_P(WaitTest, AWaitThatThrowsOutOfAnOpFailsTheOp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "waits_inside", .writes = {x}}, [&] { engine.WaitForAll(); });
  const std::string message = MessageOf<InvalidState>([&] { engine.WaitForVar(x); });
  EXPECT_TRUE(Contains(message, "waits_inside")) << message;
}

TEST_P(WaitTest, ADeadlineErrorNamesWhatWasWaitedForAndTheOpThatHoldsItUp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("the_var"), y = engine.NewVar("other_var");
  Hold culprit(engine, {.name = "culprit", .writes = {y}});
  bool ran = false;
  engine.Push({.name = "victim", .reads = {y}, .writes = {x}}, [&] { ran = true; });

  const steady_clock::time_point before = steady_clock::now();
  std::string message = MessageOf<TimeoutError>([&] { engine.WaitForVar(x, milliseconds(50)); });
  EXPECT_GE(steady_clock::now() - before, milliseconds(50));
  EXPECT_TRUE(Contains(message, "the_var")) << message;
  EXPECT_TRUE(Contains(message, "culprit")) << message;

  message = MessageOf<TimeoutError>(
      [&] { engine.WaitForVar(x, steady_clock::now() + milliseconds(10)); });
  EXPECT_TRUE(Contains(message, "culprit")) << message;

  message = MessageOf<TimeoutError>([&] { engine.WaitForReadsAndWrites(y, milliseconds(10)); });
  EXPECT_TRUE(Contains(message, "other_var")) << message;
  EXPECT_TRUE(Contains(message, "culprit")) << message;

  message = MessageOf<TimeoutError>([&] { engine.WaitForAll(milliseconds(10)); });
  EXPECT_TRUE(Contains(message, "culprit")) << message;

  // An expired deadline changes nothing.
  culprit.Release();
  engine.WaitForVar(x, milliseconds(60'000));
  EXPECT_TRUE(ran);
  engine.WaitForAll(milliseconds(60'000));
}

// Each held the lock for as long as it takes to look at all of them: 17 ms. The bound is generous.
TEST_P(WaitTest, ALateWaitCostsNoMoreWhenManyOpsArePending) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "oldest", .writes = {x}});
  const Var gate = engine.NewVar("gate");
  Hold closed(engine, {.name = "closed", .writes = {gate}});
  const int ops = Scaled(20'000);
  // Of this thread: what others of the machine do matters little.
  const auto cpu_seconds = [] {
    timespec time = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  double took[2];  // with some pending, and with ten times as many
  for (const int times : {1, 10}) {
    for (int i = 0; i < times * ops; ++i) engine.Push({.name = "op", .reads = {gate}}, [] {});
    EXPECT_THROW(engine.WaitForAll(milliseconds(0)), TimeoutError);  // all are registered
    const double before = cpu_seconds();
    for (int i = 0; i < 200; ++i) {
      const std::string message =
          MessageOf<TimeoutError>([&] { engine.WaitForAll(milliseconds(0)); });
      ASSERT_TRUE(Contains(message, "oldest")) << message;
    }
    took[times == 10] = cpu_seconds() - before;
  }
  EXPECT_LT(took[1], 5 * took[0]);
  hold.Release();
  const std::string message = MessageOf<TimeoutError>([&] { engine.WaitForAll(milliseconds(0)); });
  EXPECT_TRUE(Contains(message, "closed")) << message;
}

// On engines without workers the thread that waits had run the parent, and waited for ever for
// somebody to take the child from the inbox.
TEST_P(WaitTest, ALateWaitEndsAlthoughTheOpThatItRanHasPushed) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  const std::function<void(Deadline)> waits[] = {
      [&](Deadline deadline) { engine.WaitForAll(deadline); },
      [&](Deadline deadline) { engine.WaitForVar(z, deadline); },
      [&](Deadline deadline) { engine.WaitForReadsAndWrites(z, deadline); },
  };
  for (const auto& wait : waits) {
    Hold start(engine, {.name = "start", .writes = {x}});
    Hold stuck(engine, {.name = "stuck", .writes = {y}});
    const Deadline deadline = milliseconds(50);
    engine.Push({.name = "parent", .reads = {x}, .writes = {x}}, [&] {
      while (Deadline::Clock::now() < deadline.time()) std::this_thread::yield();
      engine.Push({.name = "child"}, [] {});
    });
    engine.Push({.name = "last", .reads = {x, y}, .writes = {z}}, [] {});
    start.Release();
    EXPECT_THROW(wait(deadline), TimeoutError);
    stuck.Release();
    engine.WaitForAll();
  }
}

TEST_P(WaitTest, ADeadlineInThePastStillSeesWhatIsPending) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "hold", .writes = {x}});
  const Deadline past = steady_clock::now() - milliseconds(1000);
  EXPECT_THROW(engine.WaitForVar(x, past), TimeoutError);
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, past), TimeoutError);
  EXPECT_THROW(engine.WaitForAll(past), TimeoutError);
}

TEST_P(WaitTest, ADeadlineTooFarForTheClockDoesNotPass) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const std::vector<Deadline> far = {std::chrono::nanoseconds::max(),
                                     milliseconds::max(),
                                     std::chrono::hours::max(),
                                     std::chrono::duration<double>(1e300),
                                     std::chrono::duration<float>(INFINITY),
                                     steady_clock::time_point::max()};
  static thread_local Hold* held;
  const auto goes_on = [&](const std::function<void()>& wait) {
    Hold hold(engine, {.name = "hold", .writes = {x}});
    held = &hold;
    // Called in the wait, once that has found its deadline ahead.
    const WaitCheckScope releases(milliseconds(1), [] {
      if (held != nullptr) std::exchange(held, nullptr)->Release();
    });
    EXPECT_NO_THROW(wait());
    EXPECT_EQ(held, nullptr);
  };
  for (const Deadline deadline : far) {
    goes_on([&] { engine.WaitForVar(x, deadline); });
    goes_on([&] { engine.WaitForReadsAndWrites(x, deadline); });
    goes_on([&] { engine.WaitForAll(deadline); });
  }
  Hold hold(engine, {.name = "hold", .writes = {x}});
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::hours::min()), TimeoutError);
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::duration<double>(-1e300)), TimeoutError);
  hold.Release();
  engine.Stop(std::chrono::hours::max());
}

// Whether the waiting thread runs the ops itself or not.
TEST_P(WaitTest, ADeadlinePassesWhileOpsKeepFinishing) {
  if (GetParam().options.type == "serial")
    GTEST_SKIP() << "pushes run all that could be waited for";
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  constexpr int kOps = 200;
  const auto push_all = [&] {
    for (int i = 0; i < kOps; ++i) {
      engine.Push({.name = "busy", .reads = {x}, .writes = {x}}, [] {
        const auto end = steady_clock::now() + milliseconds(1);
        while (steady_clock::now() < end) {
        }
      });
    }
  };
  push_all();
  EXPECT_THROW(engine.WaitForVar(x, milliseconds(5)), TimeoutError);
  EXPECT_LT(engine.version(x), kOps);
  EXPECT_THROW(engine.WaitForAll(milliseconds(5)), TimeoutError);
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), kOps);
}

// Nobody knows how long a body takes.
TEST_P(WaitTest, AWaitWithADeadlineRunsNoOpItself) {
  if (GetParam().options.type != "threaded") GTEST_SKIP() << "others have no workers";
  for (int kind = 0; kind < 4; ++kind) {
    for (int round = 0; round < 20; ++round) {
      Engine engine(GetParam().options);
      const Var x = engine.NewVar("x");
      std::latch over(1);
      std::atomic<bool> waits = true, ran_here = false;
      engine.Push({.name = "slow", .writes = {x}}, [&, waiter = std::this_thread::get_id()] {
        if (std::this_thread::get_id() != waiter) return over.wait();
        if (waits) ran_here = true;
      });
      const Deadline deadline(milliseconds(round % 2 == 0 ? -1 : 1));
      const std::string message = MessageOf<TimeoutError>([&] {
        if (kind == 0) engine.WaitForVar(x, deadline);
        if (kind == 1) engine.WaitForReadsAndWrites(x, deadline);
        if (kind == 2) engine.WaitForAll(deadline);
        if (kind == 3) engine.Stop(deadline);
      });
      EXPECT_TRUE(Contains(message, "slow")) << message;
      waits = false;
      over.count_down();
      engine.Stop();
      ASSERT_FALSE(ran_here) << "kind " << kind;
    }
  }
}

// A wait abandoned by its deadline must leave nothing behind that a later completion touches.
TEST_P(WaitTest, ManyExpiredWaitsDisturbNothing) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  for (int round = 0; round < 20; ++round) {
    Hold hold(engine, {.name = "hold", .writes = {x}});
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < 5; ++i) {
          try {
            if (thread == 0) engine.WaitForVar(x, milliseconds(i));
            if (thread == 1) engine.WaitForReadsAndWrites(x, milliseconds(i));
            if (thread == 2) engine.WaitForAll(milliseconds(i));
          } catch (const TimeoutError&) {
          }
        }
      });
    }
    if (round % 2 == 0) hold.Release();
    for (std::thread& thread : threads) thread.join();
    hold.Release();
    engine.WaitForAll();
    ASSERT_EQ(engine.version(x), static_cast<std::uint64_t>(round + 1));
  }
}

// Nor may it hold up others: what a wait for reads puts into the order of the variable is for that
// wait alone.
TEST_P(WaitTest, AnExpiredWaitForReadsHoldsUpNobody) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "reads", .reads = {x}});
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(10)), TimeoutError);
  EXPECT_NO_THROW(engine.WaitForVar(x, kSoon));
  const Var ran = engine.NewVar("ran");
  engine.Push({.name = "reads_too", .reads = {x}, .writes = {ran}}, [] {});
  EXPECT_NO_THROW(engine.WaitForVar(ran, kSoon));
  // Behind a write and between fences of other threads, too.
  Hold write(engine, {.name = "writes", .writes = {x}});
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(1)), TimeoutError);
  Hold second(engine, {.name = "reads_again", .reads = {x}});
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(1)), TimeoutError);
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(1)), TimeoutError);
  engine.Push({.name = "reads_last", .reads = {x}, .writes = {ran}}, [] {});
  EXPECT_THROW(engine.WaitForVar(x, milliseconds(1)), TimeoutError);
  hold.Release();
  write.Release();
  EXPECT_NO_THROW(engine.WaitForVar(x, kSoon));
  EXPECT_NO_THROW(engine.WaitForVar(ran, kSoon));
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(1)), TimeoutError);
  second.Release();
  engine.WaitForReadsAndWrites(x);
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 1u);
}

// Nor leave anything behind: who polls would fill the engine's bound.
TEST_P(WaitTest, ExpiredWaitsBehindAWriteLeaveNothingBehind) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::optional<Completion> write;
  std::atomic<bool> started = false;
  engine.PushAsync({.name = "writes", .writes = {x}}, [&](Completion done) {
    write.emplace(std::move(done));
    started = true;
  });
  engine.Push({.name = "reads", .reads = {x}}, [] {});
  while (!started) EXPECT_THROW(engine.WaitForVar(x, milliseconds(1)), TimeoutError);
  const EngineStats before = engine.stats();
  for (int i = 0; i < 20; ++i) {
    EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(0)), TimeoutError);
  }
  const EngineStats after = engine.stats();
  EXPECT_EQ(after.pushed, before.pushed);
  EXPECT_EQ(after.done, before.done);
  EXPECT_THAT(engine.DumpState(), testing::Not(testing::HasSubstr("wait_for_reads")));
  (*write)();
  engine.WaitForReadsAndWrites(x);
  engine.WaitForAll();
}

// A waiter may run ops, but only such as its wait needs: never the one that waits for what comes
// later.
class ThreadedWaitTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(Threaded, ThreadedWaitTest, testing::ValuesIn(ThreadedConfigs()),
                         ConfigLabel);

TEST_P(ThreadedWaitTest, WaitForVarNeverRunsAnOpThatTheWaitDoesNotNeed) {
  Engine engine(GetParam().options);
  const std::thread::id waiter = std::this_thread::get_id();
  std::atomic<int> run_by_waiter = 0;
  for (int round = 0; round < 200; ++round) {
    const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
    engine.Push({.name = "needed_first", .writes = {y}}, [] {});
    engine.Push({.name = "unneeded", .writes = {z}, .priority = 10}, [&] {
      if (std::this_thread::get_id() == waiter) ++run_by_waiter;
    });
    engine.Push({.name = "needed", .reads = {y}, .writes = {x}}, [] {});
    engine.Push({.name = "unneeded_reader", .reads = {x}, .writes = {z}}, [&] {
      if (std::this_thread::get_id() == waiter) ++run_by_waiter;
    });
    engine.WaitForVar(x);
  }
  const int judged = run_by_waiter;  // WaitForAll needs every op and may run those left over
  engine.WaitForAll();
  EXPECT_EQ(judged, 0);
}

// They have no bodies, so they need no worker's place.
TEST_P(ThreadedWaitTest, WaitsForReadsAndClearedErrorsDoNotWaitForBusyWorkers) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), failed = engine.NewVar("failed");
  engine.Push({.name = "fails", .writes = {failed}}, [] { throw std::runtime_error("failed"); });
  EXPECT_THROW(engine.WaitForVar(failed), std::runtime_error);
  Hold reader(engine, {.name = "reader", .reads = {x}});
  std::vector<std::unique_ptr<Blocker>> blockers;
  for (int i = 0; i < GetParam().options.num_workers; ++i) {
    blockers.push_back(std::make_unique<Blocker>(engine));
  }
  constexpr std::chrono::seconds kPatience(20);
  EXPECT_NO_THROW(engine.WaitForReadsAndWrites(engine.NewVar("idle"), kPatience));
  engine.ClearError(failed);
  EXPECT_NO_THROW(engine.WaitForVar(failed, kPatience));
  EXPECT_NO_THROW(engine.WaitForReadsAndWrites(failed, kPatience));
  WhileAsleep([&] { engine.WaitForReadsAndWrites(x, kPatience); }, [&] { reader.Release(); });
  blockers.clear();
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

}  // namespace
}  // namespace heddle::engine_test
