// WaitPoller: who runs it, when the one who does comes back, and that nobody is left waiting.
#include <heddle/engine.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/loopback.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Waits that hang fail instead; nothing depends on how long it is.
constexpr std::chrono::seconds kPatience{120};

class PollerTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, PollerTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

// Registers a poller for its scope.
class Registered {
 public:
  Registered(Engine& engine, WaitPoller& poller) : engine_(engine), poller_(poller) {
    EXPECT_TRUE(engine.AddPoller(poller));
  }
  ~Registered() { engine_.RemovePoller(poller_); }

 private:
  Engine& engine_;
  WaitPoller& poller_;
};

// An op that sends and finishes when the answer has come.
void PushRequest(Engine& engine, Loopback& net, const Var& var, std::function<void()> on_answer) {
  engine.PushAsync({.name = "request", .reads = {var}, .writes = {var}, .start_inline = true},
                   [&net, on_answer = std::move(on_answer)](Completion done) {
                     net.Send([on_answer, done = std::move(done)] {
                       on_answer();
                       done();
                     });
                   });
}

TEST_P(PollerTest, AWaitingThreadRunsThePollerThatBringsItsCompletion) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x");
  const std::vector<std::function<void()>> waits = {
      [&] { engine.WaitForVar(x); },
      [&] { engine.WaitForVar(x, kPatience); },
      [&] { engine.WaitForReadsAndWrites(x); },
      [&] { engine.WaitForReadsAndWrites(x, kPatience); },
      [&] { engine.WaitForAll(); },
      [&] { engine.WaitForAll(kPatience); }};
  for (int round = 0; round < 20; ++round) {
    for (const auto& wait : waits) {
      std::thread::id answered_on;
      PushRequest(engine, net, x, [&] { answered_on = std::this_thread::get_id(); });
      wait();
      ASSERT_EQ(answered_on, std::this_thread::get_id());
    }
  }
}

TEST_P(PollerTest, StopRunsThePoller) {
  Loopback net;
  int answers = 0;
  Engine engine(GetParam().options);
  ASSERT_TRUE(engine.AddPoller(net));
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 5; ++i) PushRequest(engine, net, x, [&] { ++answers; });
  engine.Stop(kPatience);
  EXPECT_EQ(answers, 5);
  engine.RemovePoller(net);
}

TEST_P(PollerTest, OpsBetweenRequestsRunWhileOneThreadWaits) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::vector<int> order, expected;
  for (int i = 0; i < 20; ++i) {
    PushRequest(engine, net, x, [&order, i] { order.push_back(3 * i); });
    engine.Push({.name = "compute", .reads = {x}, .writes = {y}},
                [&order, i] { order.push_back(3 * i + 1); });
    engine.Push({.name = "copy", .reads = {x, y}, .writes = {x}},
                [&order, i] { order.push_back(3 * i + 2); });
    for (int k = 0; k < 3; ++k) expected.push_back(3 * i + k);
  }
  engine.WaitForVar(x, kPatience);
  EXPECT_EQ(order, expected);
}

// Its op went in flight after the thread had fallen asleep.
TEST_P(PollerTest, AThreadThatSleptBeforeTheRequestWasSentLeadsToo) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x");
  for (int round = 0; round < 20; ++round) {
    auto gate = std::make_unique<Hold>(engine, OpOptions{.name = "gate", .writes = {x}});
    PushRequest(engine, net, x, [] {});
    std::thread opener([&] {
      std::this_thread::yield();
      gate->Release();
    });
    engine.WaitForVar(x, kPatience);
    opener.join();
  }
}

TEST_P(PollerTest, AnOpThatAnotherThreadFinishesBringsTheLeaderBack) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x"), silent = engine.NewVar("silent");
  net.HoldAnswers();
  PushRequest(engine, net, silent, [] {});
  for (const bool all : {false, true}) {
    Hold hold(engine, {.name = "hold", .writes = {x}});
    const int entered = net.entered();
    std::thread finisher([&] {
      net.AwaitEntered(entered + 1);
      hold.Release();
      if (all) net.ReleaseAnswers();
    });
    if (all) {
      engine.WaitForAll(kPatience);
    } else {
      engine.WaitForVar(x, kPatience);
    }
    finisher.join();
  }
  EXPECT_GT(net.interrupts(), 0);
}

// Calls like stats() and DumpState() take completions, too. If they were called in RunOne, the
// leader used not to notice, and polled on.
TEST_P(PollerTest, OtherThreadsMayTakeWhatTheLeaderCompletes) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  for (int round = 0; round < 20; ++round) {
    bool copied = false;
    engine.PushAsync({.name = "request", .writes = {x}}, [&](Completion done) {
      net.Send([&engine, done = std::move(done)] {
        done();
        std::thread([&engine] { static_cast<void>(engine.stats()); }).join();
      });
    });
    engine.Push({.name = "copy", .reads = {x}, .writes = {y}}, [&] { copied = true; });
    if (round % 2 == 0) {
      engine.WaitForVar(y, kPatience);
    } else {
      engine.WaitForAll(kPatience);
    }
    ASSERT_TRUE(copied);
  }
}

TEST_P(PollerTest, WhenTheLeaderIsDoneAnotherWaitingThreadLeads) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  constexpr int kThreads = 4;
  std::vector<Var> vars;
  for (int i = 0; i < kThreads; ++i) vars.push_back(engine.NewVar());
  for (int round = 0; round < Scaled(50); ++round) {
    net.HoldAnswers();
    std::vector<std::thread> threads;
    std::atomic<int> sent = 0;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        PushRequest(engine, net, vars[i], [] {});
        ++sent;
        engine.WaitForVar(vars[i], kPatience);
      });
    }
    while (sent < kThreads) std::this_thread::yield();
    net.ReleaseAnswers();
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_P(PollerTest, ADeadlineThatPassesWhileAThreadLeadsThrowsAndHandsTheLeadOn) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  net.HoldAnswers();
  PushRequest(engine, net, x, [] {});
  PushRequest(engine, net, y, [] {});
  std::thread other([&] {
    net.AwaitEntered(1);
    engine.WaitForVar(y, kPatience);
  });
  EXPECT_TRUE(Contains(MessageOf<TimeoutError>([&] { engine.WaitForVar(x, milliseconds(20)); }),
                       "'request'"));
  EXPECT_THROW(engine.WaitForAll(milliseconds(5)), TimeoutError);
  EXPECT_THROW(engine.WaitForVar(x, steady_clock::now() - milliseconds(1)), TimeoutError);
  net.ReleaseAnswers();
  other.join();
  engine.WaitForAll(kPatience);
}

// Calls a completion at the last moment of a RunOne.
class LatePoller final : public WaitPoller {
 public:
  void Take(Completion done) { done_ = std::move(done); }
  bool RunOne(Clock::time_point until) noexcept override {
    while (Clock::now() < until) std::this_thread::yield();
    if (done_) (*std::exchange(done_, std::nullopt))();
    return true;
  }
  void Interrupt() noexcept override {}

 private:
  std::optional<Completion> done_;
};

// The leader is woken by nothing that it completes itself. It used to leave, at its deadline or by
// an exception of its check, without a look at what that had made ready for others.
TEST_P(PollerTest, ALeaderThatLeavesItsWaitLeavesNoReadyOpBehind) {
  struct Left : std::exception {};
  static std::atomic<bool> asleep;
  for (const bool by_check : {false, true}) {
    asleep = false;
    EngineOptions options = GetParam().options;
    options.watchdog = milliseconds(0);  // or it would find the op
    Engine engine(options);
    const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
    LatePoller poller;
    Hold hold(engine, {.name = "hold", .writes = {x}});
    engine.PushAsync({.name = "late", .writes = {y}, .start_inline = true},
                     [&](Completion done) { poller.Take(std::move(done)); });
    engine.Push({.name = "behind", .reads = {y}, .writes = {z}}, [] {});
    std::thread other([&] {
      const NoWaitScope never_leads;
      const WaitCheckScope checked(milliseconds(1), [] {
        asleep = true;
        asleep.notify_all();
      });
      EXPECT_NO_THROW(engine.WaitForVar(z, kSoon));
    });
    asleep.wait(false);
    {
      const Registered registered(engine, poller);
      // Longer than it takes the engine to fall asleep.
      if (by_check) {
        const WaitCheckScope checked(milliseconds(20), [] { throw Left(); });
        EXPECT_THROW(engine.WaitForVar(x), Left);
      } else {
        EXPECT_THROW(engine.WaitForVar(x, milliseconds(20)), TimeoutError);
      }
      other.join();
    }
    hold.Release();
    engine.WaitForAll();
  }
}

// Takes a completion each millisecond, which makes an op ready.
class BusyPoller final : public WaitPoller {
 public:
  void Take(Completion done) { waiting_.push_back(std::move(done)); }
  std::size_t taken() const { return waiting_.size(); }  // and not given back
  bool RunOne(Clock::time_point until) noexcept override {
    std::this_thread::sleep_until(std::min(until, Clock::now() + milliseconds(1)));
    if (waiting_.empty()) return true;
    waiting_.back()();
    waiting_.pop_back();
    return true;
  }
  void Interrupt() noexcept override {}
  void Finish() {
    for (Completion& done : std::exchange(waiting_, {})) done();
  }

 private:
  std::vector<Completion> waiting_;
};

// Each makes the leader look for something to run, long before its check is due.
TEST_P(PollerTest, CompletionsThatComeAllTheTimeDoNotKeepALeaderFromItsCheck) {
  struct Left : std::exception {};
  constexpr std::size_t kOps = 2000;
  for (const bool all : {false, true}) {
    Engine engine(GetParam().options);
    const Var x = engine.NewVar("x");
    Hold hold(engine, {.name = "hold", .writes = {x}});
    BusyPoller poller;
    for (std::size_t i = 0; i < kOps; ++i) {
      const Var y = engine.NewVar("y");
      engine.PushAsync({.name = "comes", .writes = {y}, .start_inline = true},
                       [&](Completion done) { poller.Take(std::move(done)); });
      engine.Push({.name = "behind", .reads = {y}, .writes = {y}}, [] {});
    }
    while (poller.taken() < kOps) {  // a seeded engine starts nothing but in a wait
      ASSERT_EQ(GetParam().options.type, "seeded");
      EXPECT_THROW(engine.WaitForVar(x, milliseconds(1)), TimeoutError);
    }
    {
      const Registered registered(engine, poller);
      const WaitCheckScope checked(milliseconds(20), [] { throw Left(); });
      if (all) {
        EXPECT_THROW(engine.WaitForAll(), Left);
      } else {
        EXPECT_THROW(engine.WaitForVar(x), Left);
      }
      EXPECT_LT(engine.stats().done, 3900u);
    }
    hold.Release();
    poller.Finish();
    engine.WaitForAll();
  }
}

TEST_P(PollerTest, WithNoOpInFlightNobodyLeads) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) {
    engine.Push({.reads = {x}, .writes = {x}}, [] {});
    engine.WaitForVar(x);
    engine.Push({}, [] {});
    engine.WaitForAll();
  }
  EXPECT_EQ(net.entered(), 0);
  EXPECT_EQ(net.announced(), 0);
}

TEST_P(PollerTest, AThreadUnderANoWaitScopeNeverLeads) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x");
  PushRequest(engine, net, x, [] {});
  {
    const NoWaitScope no_wait;
    EXPECT_THROW(engine.WaitForVar(x, milliseconds(20)), TimeoutError);
  }
  EXPECT_EQ(net.entered(), 0);
  EXPECT_GT(net.announced(), 0);
  engine.WaitForVar(x, kPatience);
}

TEST_P(PollerTest, EveryThreadThatWaitsForARequestAnnouncesIt) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  net.HoldAnswers();
  PushRequest(engine, net, x, [] {});
  PushRequest(engine, net, y, [] {});
  std::thread first([&] { engine.WaitForVar(x, kPatience); });
  net.AwaitEntered(1);
  const int announced = net.announced();
  std::thread second([&] { engine.WaitForVar(y, kPatience); });
  net.AwaitAnnounced(announced + 1);
  net.ReleaseAnswers();
  first.join();
  second.join();
}

// It used to look again and again for an op that it leaves to a worker, who had yet to come.
TEST_P(PollerTest, AWaitWithADeadlineSleepsUntilAWorkerHasCome) {
  if (GetParam().options.type != "threaded") GTEST_SKIP() << "others have no workers";
  constexpr int kRounds = 200;
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  net.HoldAnswers();
  PushRequest(engine, net, x, [] {});
  for (int i = 0; i < kRounds; ++i) {
    engine.Push({.name = "work", .writes = {y}}, [] {});
    if (i % 3 == 0) engine.WaitForVar(y, kPatience);
    if (i % 3 == 1) engine.WaitForReadsAndWrites(y, kPatience);
    if (i % 3 == 2) {
      EXPECT_THROW(engine.WaitForAll(milliseconds(1)), TimeoutError);
    }
  }
  EXPECT_LT(net.announced(), 10 * kRounds);
  net.ReleaseAnswers();
  engine.WaitForVar(x, kPatience);
}

TEST_P(PollerTest, WhatAPollerCallsMayPushButNotWait) {
  Engine engine(GetParam().options);
  Loopback net;
  const Registered registered(engine, net);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  bool ran = false, ran_inside = false;
  bool polling = true;  // only this thread looks at it
  PushRequest(engine, net, x, [&] {
    const std::thread::id self = std::this_thread::get_id();
    engine.Push({.name = "pushed", .writes = {y}, .start_inline = true}, [&, self] {
      ran = true;
      if (std::this_thread::get_id() == self) ran_inside = polling;
    });
    for (const auto& wait : std::vector<std::function<void()>>{
             [&] { engine.WaitForVar(y); }, [&] { engine.WaitForReadsAndWrites(y); },
             [&] { engine.WaitForAll(); }, [&] { engine.Stop(); },
             [&] { engine.RemovePoller(net); }}) {
      EXPECT_TRUE(Contains(MessageOf<InvalidState>(wait), "RunOne"));
    }
    polling = false;
  });
  engine.WaitForVar(x, kPatience);
  engine.WaitForVar(y, kPatience);
  EXPECT_TRUE(ran);
  EXPECT_FALSE(ran_inside);
}

TEST_P(PollerTest, AnEngineHasOnePollerAtATime) {
  Engine engine(GetParam().options);
  Loopback net, other;
  EXPECT_TRUE(engine.AddPoller(net));
  EXPECT_FALSE(engine.AddPoller(other));
  EXPECT_FALSE(engine.AddPoller(net));
  engine.RemovePoller(other);  // was never added
  EXPECT_FALSE(engine.AddPoller(other));
  engine.RemovePoller(net);
  EXPECT_TRUE(engine.AddPoller(other));
  engine.RemovePoller(other);
  engine.Stop();
  EXPECT_THROW(static_cast<void>(engine.AddPoller(net)), InvalidState);
}

// Added while threads sleep, removed while one leads: they carry on.
TEST_P(PollerTest, APollerMayComeAndGoWhileThreadsWait) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  for (int round = 0; round < Scaled(30); ++round) {
    Loopback net;
    net.HoldAnswers();
    PushRequest(engine, net, x, [] {});
    PushRequest(engine, net, y, [] {});
    std::thread first([&] { engine.WaitForVar(x, kPatience); });
    std::thread second([&] { engine.WaitForVar(y, kPatience); });
    net.AwaitSent(2);
    for (int i = 0; i < 3; ++i) {
      const int entered = net.entered();
      ASSERT_TRUE(engine.AddPoller(net));
      net.AwaitEntered(entered + 1);
      engine.RemovePoller(net);
      ASSERT_EQ(net.inside(), 0);
    }
    net.ReleaseAnswers();
    if (round % 2 == 0) {
      while (net.answered() < 2)
        net.RunOne(steady_clock::time_point::max());  // another thread brings them
    } else {
      ASSERT_TRUE(engine.AddPoller(net));
    }
    first.join();
    second.join();
    engine.RemovePoller(net);
  }
}

class RandomPollerTest : public testing::TestWithParam<std::tuple<Config, bool>> {};
INSTANTIATE_TEST_SUITE_P(All, RandomPollerTest,
                         testing::Combine(testing::ValuesIn(AllConfigs()), testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<Config, bool>>& info) {
                           return std::get<0>(info.param).label +
                                  (std::get<1>(info.param) ? "_own_thread" : "_waits_alone");
                         });

// Several threads push requests and ops over the same variables, and wait. A thread checks after
// each wait that all of its own ops on the variable are done; the memory is plain, so that the
// thread sanitizer sees whether waits make it visible. With a thread of its own the poller comes
// and goes meanwhile; without one, answers come through waiting threads alone.
class RandomRequests {
 public:
  RandomRequests(Engine& engine, Loopback& net, bool own_thread)
      : engine_(engine), net_(net), own_thread_(own_thread) {
    for (int i = 0; i < kVars; ++i) vars_.push_back(engine.NewVar());
  }

  void Run(std::uint64_t seed) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([this, i, seed] { RunThread(i, seed * kThreads + i); });
    }
    if (own_thread_) {
      while (running_ > 0) {
        engine_.RemovePoller(net_);
        std::this_thread::yield();
        ASSERT_TRUE(engine_.AddPoller(net_));
        std::this_thread::yield();
      }
    }
    for (std::thread& thread : threads) thread.join();
    engine_.WaitForAll(kPatience);
    EXPECT_EQ(done_, pushed_);
  }

 private:
  static constexpr int kThreads = 3, kVars = 5;
  using Counts = std::array<std::array<int, kVars>, kThreads>;

  void RunThread(int thread, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto draw = [&random](int count) {
      return static_cast<int>(random() % static_cast<unsigned>(count));
    };
    for (int step = 0; step < Scaled(300); ++step) {
      const int a = draw(kVars), b = draw(kVars);
      if (draw(3) > 0) {
        PushOp(thread, a, b, /*request=*/draw(2) == 0, /*start_inline=*/draw(2) == 0);
      } else {
        Wait(thread, a, draw(3), draw(3) == 0, own_thread_ && draw(4) == 0);
      }
    }
    for (int var = 0; var < kVars; ++var) Wait(thread, var, 0, false, false);
    --running_;
  }

  void PushOp(int thread, int a, int b, bool request, bool start_inline) {
    const auto count = [this, thread, a, b] {
      ++done_[thread][a];
      if (b != a) ++done_[thread][b];
    };
    ++pushed_[thread][a];
    if (b != a) ++pushed_[thread][b];
    const std::vector<VarRef> writes = {vars_[a], vars_[b]};
    const OpOptions options{.writes = writes, .start_inline = start_inline};
    if (request) {
      engine_.PushAsync(options, [this, count](Completion done) {
        net_.Send([count, done = std::move(done)] {
          count();
          done();
        });
      });
    } else {
      engine_.Push(options, count);
    }
  }

  void Wait(int thread, int var, int kind, bool impatient, bool no_wait) {
    std::optional<NoWaitScope> scope;
    if (no_wait) scope.emplace();
    const auto wait = [&](Deadline deadline) {
      if (kind == 0) engine_.WaitForVar(vars_[var], deadline);
      if (kind == 1) engine_.WaitForReadsAndWrites(vars_[var], deadline);
      if (kind == 2) engine_.WaitForAll(deadline);
    };
    try {
      wait(impatient ? Deadline(std::chrono::microseconds(50)) : Deadline(kPatience));
    } catch (const TimeoutError&) {
      EXPECT_TRUE(impatient);
      wait(kPatience);
    }
    EXPECT_EQ(done_[thread][var], pushed_[thread][var]);
  }

  Engine& engine_;
  Loopback& net_;
  const bool own_thread_;
  std::atomic<int> running_ = kThreads;
  std::vector<Var> vars_;
  Counts pushed_{};  // [thread] by that thread
  Counts done_{};    // [thread][var] by that thread's ops on var
};

TEST_P(RandomPollerTest, EveryWaitReturnsWhenItsOpsAreDone) {
  const auto& [config, own_thread] = GetParam();
  for (int round = 0; round < Rounds(5); ++round) {
    const std::uint64_t seed = BaseSeed() + static_cast<std::uint64_t>(round);
    SCOPED_TRACE(seed);
    Engine engine(config.options);
    Loopback net(own_thread ? Loopback::OwnThread::kYes : Loopback::OwnThread::kNo,
                 /*delay_us_max=*/round % 2 == 0 ? 0 : 100, seed);
    const Registered registered(engine, net);
    RandomRequests(engine, net, own_thread).Run(seed);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace heddle::engine_test
