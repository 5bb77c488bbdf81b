// Ops of CPUs that push ops of GPUs, on an engine that is being stopped: what the latter push runs,
// or the push throws, whatever comes between.
#include <heddle/engine.h>
#include <heddle/error.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/gpu_types.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using ::testing::HasSubstr;

class GpuStopTest : public GpuTypesTest {
 protected:
  // The device has its streams.
  static void Begin(Engine& engine) {
    engine.PushGpu({.name = "first", .device = Gpu(0)}, [](GpuStream) {});
    engine.WaitForAll();
  }
};
INSTANTIATE_TEST_SUITE_P(All, GpuStopTest, testing::Values("threaded", "serial", "seeded"));

// On whatever thread: who holds the engine's turn must not wait for it.
TEST_P(GpuStopTest, WhatTakesDownABodyMayPush) {
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::atomic<int> ran = 0;
  struct Body {
    std::function<void()> finish;
    void operator()(GpuStream stream) const {
      SimGpu::Launch(stream, [] {});
    }
    void Finish() const { finish(); }
  };
  constexpr int kOps = 50;
  for (int i = 0; i < kOps; ++i) {
    engine.PushGpu({.name = "op", .writes = {x}, .device = Gpu(0)},
                   Body{[&] { engine.Push({.name = "late", .writes = {y}}, [&] { ++ran; }); }});
  }
  engine.WaitForVar(x);
  engine.WaitForAll();
  EXPECT_EQ(ran, kOps);
}

// Who waits for an op looks at its stream, and may still do so when all ops are done.
TEST_P(GpuStopTest, StopWaitsForThoseWhoLookAtAStream) {
  for (int round = 0; round < Scaled(200); ++round) {
    Engine engine(Options());
    const Var x = engine.NewVar("x");
    engine.PushGpu({.name = "op", .writes = {x}, .device = Gpu(0)},
                   [](GpuStream stream) { SimGpu::Launch(stream, [] {}); });
    std::vector<std::thread> waiters;
    for (int i = 0; i < 2; ++i) {
      waiters.emplace_back([&] {
        try {
          engine.WaitForVar(x);
        } catch (const InvalidState&) {
        }
      });
    }
    engine.Stop();
    for (std::thread& waiter : waiters) waiter.join();
  }
}

// Stop comes and goes while the body of an op of a CPU is copied, after the push has seen that the
// engine runs. The op runs on the thread that pushes it; it used streams that were gone.
TEST_P(GpuStopTest, AnOpPushedTooLateMayNotPushForAGpu) {
  struct Body {
    std::function<void()> when_copied, run;
    Body(std::function<void()> when_copied, std::function<void()> run)
        : when_copied(std::move(when_copied)), run(std::move(run)) {}
    Body(const Body& other) : when_copied(other.when_copied), run(other.run) { when_copied(); }
    void operator()() const { run(); }
  };
  Engine engine(Options());
  Begin(engine);
  const Var x = engine.NewVar("x");
  bool child_ran = false;
  const Body body([&] { std::thread([&] { engine.Stop(); }).join(); },
                  [&] {
                    engine.PushGpu({.name = "child", .device = Gpu(0)},
                                   [&](GpuStream) { child_ran = true; });
                  });
  engine.Push({.name = "parent", .writes = {x}}, body);
  const std::optional<Failure> failure = engine.FailureOf(x);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->op, "parent");
  EXPECT_THAT(failure->message, HasSubstr("push of op 'child': the engine has been stopped"));
  EXPECT_FALSE(child_ran);
}

// Before the drain ends they may.
TEST_P(GpuStopTest, AnOpThatStopWaitsForMayPushForAGpu) {
  Engine engine(Options());
  Begin(engine);
  std::atomic<int> runs = 0;
  const auto is_closed = [&engine] {
    try {
      engine.NewVar();
      return false;
    } catch (const InvalidState&) {
      return true;
    }
  };
  const Var x = engine.NewVar("x");
  Hold before(engine, {.name = "before", .writes = {x}});
  engine.Push({.name = "parent", .reads = {x}}, [&] {
    engine.PushGpu({.name = "child", .device = Gpu(0)},
                   [&](GpuStream stream) { SimGpu::Launch(stream, [&] { ++runs; }); });
  });
  std::thread stopper([&] { engine.Stop(); });
  while (!is_closed()) std::this_thread::yield();
  before.Release();
  stopper.join();
  EXPECT_EQ(runs, 1);
}

// Any other moment.
TEST_P(GpuStopTest, ParentsThatRaceWithStopRunAndTheirChildrenRunOrAreRefused) {
  for (int round = 0; round < Scaled(6); ++round) {
    EngineOptions options = Options();
    options.max_pending_ops = 8;
    Engine engine(options);
    Begin(engine);
    std::atomic<int> parents = 0, accepted = 0, refused = 0, runs = 0;
    std::vector<std::thread> pushers;
    std::atomic<int> pushed = 0;
    for (int thread = 0; thread < 2; ++thread) {
      pushers.emplace_back([&] {
        try {
          for (;;) {
            engine.Push({.name = "parent"}, [&] {
              ++parents;
              try {
                engine.PushGpu({.name = "child", .device = Gpu(0)},
                               [&](GpuStream stream) { SimGpu::Launch(stream, [&] { ++runs; }); });
                ++accepted;
              } catch (const InvalidState&) {
                ++refused;
              }
            });
            ++pushed;
          }
        } catch (const InvalidState&) {
        }
      });
    }
    while (pushed < 10) std::this_thread::yield();
    engine.Stop();
    for (std::thread& pusher : pushers) pusher.join();
    EXPECT_EQ(parents.load(), pushed.load());
    EXPECT_EQ(accepted + refused, parents.load());
    EXPECT_EQ(runs.load(), accepted.load());
  }
}

}  // namespace
}  // namespace heddle::engine_test
