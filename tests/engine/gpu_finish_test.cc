// What takes down the body of a GPU op, its Finish() and its captures' destructors, is a part of
// the op: on whatever thread it runs, it pushes as the body does and may not wait. Pushes that may
// hang have a deadline, so that they fail.
#include <heddle/engine.h>
#include <heddle/error.h>

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/fail_write.h"
#include "tests/engine/gpu_types.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Finishes {
  std::function<void()> finish;
  std::latch* end = nullptr;  // of the kernel

  void operator()(GpuStream stream) const {
    SimGpu::Launch(stream, [end = end] {
      if (end != nullptr) end->wait();
    });
  }
  void Finish() const { finish(); }
};

// Calls `when_gone` once it goes and has not been moved from.
class Guard {
 public:
  explicit Guard(std::function<void()> when_gone) : when_gone_(std::move(when_gone)) {}
  Guard(Guard&& other) noexcept : when_gone_(std::exchange(other.when_gone_, nullptr)) {}
  Guard& operator=(Guard&&) = delete;
  ~Guard() {
    if (when_gone_) when_gone_();
  }

 private:
  std::function<void()> when_gone_;
};

class GpuFinishTest : public GpuTypesTest {
 protected:
  // Of an engine with room for few ops, on a stream that is ahead by fewer: others wait for room
  // while ops finish that push more.
  EngineOptions Bounded() {
    EngineOptions options = Options();
    options.max_pending_ops = 4;
    options.gpu.issued_ahead = 2;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(All, GpuFinishTest, testing::Values("threaded", "serial", "seeded"));

// Each of its ops has a body of its own, in whatever that is stopped.
TEST_P(GpuFinishTest, OpsOfAnEngineThatIsDroppedThereRunAsEver) {
  bool ran = false;
  EngineOptions options;
  options.type = "seeded";
  auto dropped = std::make_shared<Engine>(options);
  dropped->Push({.name = "pending", .writes = {dropped->NewVar()}}, [&ran] {
    engine::KeepFailure();
    ran = true;
  });
  Engine engine(Options());
  engine.PushGpu({.name = "drops", .writes = {engine.NewVar()}, .device = Gpu(0)},
                 [last = std::move(dropped)](GpuStream stream) { SimGpu::Launch(stream, [] {}); });
  engine.WaitForAll();
  EXPECT_TRUE(ran);
}

TEST_P(GpuFinishTest, PushesDoNotWaitForRoom) {
  Engine engine(Bounded());
  const int kOps = Scaled(100);
  std::atomic<int> runs = 0;
  for (int i = 0; i < kOps; ++i) {
    engine.PushGpu({.name = "kernel", .device = Gpu(0)},
                   Finishes{[&] { engine.Push({.name = "after"}, [&] { ++runs; }); }}, kSoon);
  }
  engine.WaitForAll(kSoon);
  EXPECT_EQ(runs, kOps);
}

TEST_P(GpuFinishTest, PushesOfDestructorsDoNotWaitForRoom) {
  Engine engine(Bounded());
  const int kOps = Scaled(100);
  std::atomic<int> runs = 0;
  for (int i = 0; i < kOps; ++i) {
    engine.PushGpu(
        {.name = "kernel", .device = Gpu(0)},
        [guard = Guard([&] { engine.Push({.name = "after"}, [&] { ++runs; }); })](
            GpuStream stream) { SimGpu::Launch(stream, [] {}); },
        kSoon);
  }
  engine.WaitForAll(kSoon);
  EXPECT_EQ(runs, kOps);
}

// No body runs inside: the thread that finishes a stream's ops has others to finish.
TEST_P(GpuFinishTest, WhatItPushesRunsElsewhere) {
  Engine engine(Options());
  std::atomic<bool> inside = false, ran_inside = false;
  std::atomic<std::thread::id> pushed_by{};
  engine.PushGpu({.name = "kernel", .device = Gpu(0)}, Finishes{[&] {
                   pushed_by = std::this_thread::get_id();
                   inside = true;
                   engine.Push({.name = "after", .start_inline = true}, [&] {
                     ran_inside = inside && pushed_by.load() == std::this_thread::get_id();
                   });
                   inside = false;
                 }});
  engine.WaitForAll();
  EXPECT_FALSE(ran_inside);
}

TEST_P(GpuFinishTest, WaitForAllWaitsForWhatItPushes) {
  Engine engine(Options());
  std::atomic<int> runs = 0;
  engine.PushGpu({.name = "kernel", .device = Gpu(0)}, Finishes{[&] {
                   engine.Push({.name = "after"}, [&] {
                     engine.Push({.name = "after_that"}, [&] {
                       // Only for WaitForAll to go wrong.
                       std::this_thread::sleep_for(std::chrono::milliseconds(20));
                       ++runs;
                     });
                   });
                 }});
  engine.WaitForAll();
  EXPECT_EQ(runs, 1);
}

TEST_P(GpuFinishTest, StopRunsWhatItPushes) {
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  std::atomic<int> runs = 0;
  std::latch end{1};
  engine.PushGpu({.name = "kernel", .writes = {x}, .device = Gpu(0)},
                 Finishes{[&] {
                            engine.Push({.name = "after"}, [&] { ++runs; });
                            engine.PushGpu({.name = "gpu_after", .device = Gpu(0)},
                                           Finishes{[&] { ++runs; }});
                          },
                          &end});
  const auto is_closed = [&engine] {
    try {
      engine.NewVar();
      return false;
    } catch (const InvalidState&) {
      return true;
    }
  };
  std::thread stopper([&] { engine.Stop(); });
  while (!is_closed()) std::this_thread::yield();
  end.count_down();
  stopper.join();
  EXPECT_EQ(runs, 2);
  EXPECT_FALSE(engine.FailureOf(x));
}

TEST_P(GpuFinishTest, AWaitThrowsAndNamesTheOp) {
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  engine.PushGpu({.name = "kernel", .writes = {x}, .device = Gpu(0)},
                 Finishes{[&engine, x] { engine.WaitForVar(x, kSoon); }});
  EXPECT_THAT(MessageOf<InvalidState>([&] { engine.WaitForVar(x); }),
              AllOf(HasSubstr("WaitForVar('x')"), HasSubstr("kernel")));
}

// When the op has been issued it is too late.
TEST_P(GpuFinishTest, FailWriteIsForTheBodyAlone) {
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  engine.PushGpu({.name = "kernel", .writes = {x}, .device = Gpu(0)}, Finishes{[x] {
                   engine::FailWrite(x, std::make_exception_ptr(std::runtime_error("late")));
                 }});
  EXPECT_THAT(MessageOf<InvalidState>([&] { engine.WaitForVar(x); }),
              HasSubstr("expected the body of a GPU op"));
}

}  // namespace
}  // namespace heddle::engine_test
