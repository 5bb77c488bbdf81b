// GPU ops that fail after others behind them have been issued. Kernels wait for a latch until all
// is issued; each wait has a deadline, so that what hangs fails.
#include <heddle/engine.h>

#include <exception>
#include <latch>
#include <memory>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

class GpuLateFailureTest : public testing::Test {
 protected:
  // An op that fails when its kernel has ended, which waits for Finish().
  void PushFailing(const Var& var) {
    struct Body {
      std::latch* end;
      void operator()(GpuStream stream) const {
        SimGpu::Launch(stream, [end = end] { end->wait(); });
      }
      void Finish() const { throw std::runtime_error("late"); }
    };
    engine.PushGpu({.name = "first", .writes = {var}, .device = Gpu(0)}, Body{&end_});
  }
  // Lets it end once all that `var` waits for, pushed so far, has been issued.
  void EndWhenIssued(const Var& var) {
    engine.PushGpu({.name = "issued",
                    .reads = {var},
                    .writes = {engine.NewVar()},
                    .device = Gpu(1),
                    .run_when_poisoned = true},
                   [&](GpuStream) { issued_.count_down(); });
    issued_.wait();
    end_.count_down();
  }
  void ExpectError(const Var& var, const char* message) {
    EXPECT_THAT([&] { engine.WaitForVar(var, kSoon); },
                testing::ThrowsMessage<std::runtime_error>(message));
  }

  std::latch end_{1}, issued_{1};
  Engine engine{[] {
    EngineOptions options;
    options.num_workers = 2;
    options.worker_host = WorkerHost::kThreads;
    options.gpu_driver = std::make_shared<SimGpu>(2, BaseSeed());
    return options;
  }()};
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
};

// What it has read is no result, and its body could not know.
TEST_F(GpuLateFailureTest, FailsAlsoWhatRunsWhenPoisonedIfItWasIssuedBefore) {
  PushFailing(x);
  engine.PushGpu(
      {.name = "behind", .reads = {x}, .writes = {y}, .device = Gpu(1), .run_when_poisoned = true},
      [&](GpuStream) { EXPECT_EQ(engine.ErrorOf(x), nullptr); });
  EndWhenIssued(y);
  ExpectError(y, "late");
  // It is there to be seen now: the body answers for it.
  const Var z = engine.NewVar("z");
  engine.PushGpu(
      {.name = "later", .reads = {x}, .writes = {z}, .device = Gpu(1), .run_when_poisoned = true},
      [&](GpuStream) { EXPECT_NE(engine.ErrorOf(x), nullptr); });
  engine.WaitForVar(z, kSoon);
  EXPECT_THROW(engine.WaitForAll(kSoon), std::runtime_error);
}

// The body that answers for an error it sees does not answer for one that came before that, late.
TEST_F(GpuLateFailureTest, IsNotTheFailureThatABodyBehindItKnew) {
  PushFailing(x);
  const OpOptions options{
      .name = "behind", .reads = {x}, .writes = {x}, .device = Gpu(1), .run_when_poisoned = true};
  engine.PushGpu(options, [](GpuStream) { throw std::runtime_error("early"); });
  engine.PushGpu(options, [&](GpuStream) { EXPECT_NE(engine.ErrorOf(x), nullptr); });
  EndWhenIssued(x);
  ExpectError(x, "late");
  EXPECT_THROW(engine.WaitForAll(kSoon), std::runtime_error);
}

// Overwritten without a look it is cured, whenever that was issued.
TEST_F(GpuLateFailureTest, IsCuredByAPureWrite) {
  PushFailing(x);
  engine.PushGpu({.name = "cure", .writes = {x}, .device = Gpu(1)}, [](GpuStream) {});
  EndWhenIssued(x);
  engine.WaitForVar(x, kSoon);
  EXPECT_THROW(engine.WaitForAll(kSoon), std::runtime_error);
}

}  // namespace
}  // namespace heddle::engine_test
