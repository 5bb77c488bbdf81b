// What the engine promises of GPU ops, on simulated devices. Kernels that must not end yet wait for
// a latch; each wait has a deadline, so that what hangs fails.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/fail_write.h"
#include "engine/gpu/given_up.h"
#include "engine/held_up.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using engine::HeldUpBy;
using engine::kNoOp;
using engine::kUnknownOps;
using engine::OpVars;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Ne;

class GpuTest : public testing::Test {
 protected:
  EngineOptions Options() {
    EngineOptions options;
    options.num_workers = 2;
    options.worker_host = WorkerHost::kThreads;
    options.gpu_driver = gpu_;
    return options;
  }

  std::shared_ptr<SimGpu> gpu_ = std::make_shared<SimGpu>(3, BaseSeed());
};

// A push that had looked at the engine before it stopped used streams that were gone after it.
TEST_F(GpuTest, PushesThatRaceWithStopEitherRunOrThrow) {
  for (const std::string type : {"threaded", "serial", "seeded"}) {
    for (int round = 0; round < Scaled(12); ++round) {
      EngineOptions options = Options();
      options.type = type;
      options.max_pending_ops = 50;
      Engine engine(options);
      std::atomic<int> runs = 0, accepted = 0;
      std::vector<std::thread> pushers;
      for (int thread = 0; thread < 2; ++thread) {
        pushers.emplace_back([&] {
          try {
            for (;;) {
              engine.PushGpu({.name = "late", .device = Gpu(0)},
                             [&](GpuStream stream) { SimGpu::Launch(stream, [&] { ++runs; }); });
              ++accepted;
            }
          } catch (const InvalidState&) {
          }
        });
      }
      while (accepted < 10) std::this_thread::yield();
      engine.Stop();
      for (std::thread& pusher : pushers) pusher.join();
      EXPECT_EQ(runs.load(), accepted.load()) << type;
    }
  }
}

// The same, with Stop in the midst of the push: while the body is copied.
TEST_F(GpuTest, AnOpThatIsBeingPushedWhenTheEngineStopsRuns) {
  Engine engine(Options());
  const auto is_closed = [&engine] {
    try {
      engine.Push({.name = "probe"}, [] {});
      return false;
    } catch (const InvalidState&) {
      return true;
    }
  };
  struct Body {
    std::function<void()> when_copied;
    std::atomic<int>* runs;

    Body(std::function<void()> when_copied, std::atomic<int>* runs)
        : when_copied(std::move(when_copied)), runs(runs) {}
    Body(const Body& other) : when_copied(other.when_copied), runs(other.runs) { when_copied(); }
    void operator()(GpuStream stream) const {
      SimGpu::Launch(stream, [runs = runs] { ++*runs; });
    }
  };
  std::latch copying(1);
  std::atomic<int> runs = 0;
  const Body body(
      [&] {
        copying.count_down();
        while (!is_closed()) std::this_thread::yield();
        // Only for Stop to go wrong: either order is right.
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      },
      &runs);
  std::thread pusher([&] { engine.PushGpu({.name = "late", .device = Gpu(0)}, body); });
  copying.wait();
  engine.Stop();
  EXPECT_EQ(runs, 1);
  pusher.join();
}

TEST_F(GpuTest, APushWithADeadlineGivesUpAtTheBound) {
  EngineOptions options = Options();
  options.max_pending_ops = 1;
  Engine engine(options);
  const Var x = engine.NewVar("x");
  Blocker busy(engine, {.name = "busy", .writes = {x}});
  int runs = 0;
  const auto push = [&](Deadline deadline) {
    engine.PushGpu(
        {.name = "pushed_late", .writes = {x}, .device = Gpu(0)},
        [&](GpuStream stream) { SimGpu::Launch(stream, [&] { ++runs; }); }, deadline);
  };
  const std::string message = MessageOf<TimeoutError>([&] { push(std::chrono::milliseconds(10)); });
  EXPECT_THAT(message, HasSubstr("pushed_late"));
  EXPECT_THAT(message, HasSubstr("busy"));
  busy.Release();
  push(std::chrono::hours::max());
  engine.WaitForAll();
  EXPECT_EQ(runs, 1);
}

// All that is pending waits for a kernel, and that for what is pushed last.
TEST_F(GpuTest, APusherEntersWhenAllThatIsPendingWaitsForAGpu) {
  for (const std::string type : {"threaded", "serial", "seeded"}) {
    EngineOptions options = Options();
    options.type = type;
    options.max_pending_ops = 2;
    Engine engine(options);
    const Var x = engine.NewVar("x");
    std::latch end{1};
    engine.PushGpu({.name = "collective", .writes = {x}, .device = Gpu(0)},
                   [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
    std::atomic<int> reads = 0;
    const auto enters = [&](const char* name, const std::function<void()>& body, VarList reads) {
      try {
        engine.Push({.name = name, .reads = reads}, body, std::chrono::seconds(20));
      } catch (const TimeoutError& error) {
        ADD_FAILURE() << type << ": " << error.what();
        end.count_down();
      }
    };
    for (int i = 0; i < 2; ++i) enters("reader", [&] { ++reads; }, {x});
    bool ended = false;
    enters("lets_it_end",
           [&] {
             end.count_down();
             ended = true;
           },
           {});
    engine.WaitForAll(kSoon);
    EXPECT_TRUE(ended) << type;
    EXPECT_EQ(reads, 2) << type;
  }
}

// While kernels end one after another it waits for its place among those that the bound allows.
TEST_F(GpuTest, APusherWaitsWhileAGpuGetsOn) {
  EngineOptions options = Options();
  options.max_pending_ops = 4;
  options.gpu.issued_ahead = 1;
  Engine engine(options);
  std::atomic<int> pushed = 0, ended = 0, most = 0;
  for (int i = 0; i < 40; ++i) {
    engine.PushGpu({.name = "kernel", .device = Gpu(0)}, [&](GpuStream stream) {
      SimGpu::Launch(stream, [&] {
        // Longer than a pusher waits for completions of ops that are not of GPUs.
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        most = std::max(most.load(), pushed - ended);
        ++ended;
      });
    });
    ++pushed;
  }
  engine.WaitForAll(kSoon);
  // Those pending, the one that is issued, and the one that has ended and is not yet seen to have;
  // and some where the machine is so busy that nothing moved for long.
  EXPECT_LE(most, 4 + 2 + 4);
}

TEST_F(GpuTest, ADependentIsIssuedWhileItsPredecessorStillRuns) {
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::latch issued{2};
  int value = 0, copy = 0, other = 0;
  engine.PushGpu({.name = "long", .writes = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    SimGpu::Launch(stream, [&] {
      issued.wait();  // for ever, if the two below waited for this one on the host
      value = 7;
    });
  });
  engine.PushGpu({.name = "other stream",
                  .reads = {x},
                  .writes = {y},
                  .device = Gpu(0),
                  .lane = Lane::kCopyOut},
                 [&](GpuStream stream) {
                   SimGpu::Launch(stream, [&] { copy = value; });
                   issued.count_down();
                 });
  engine.PushGpu({.name = "other device", .reads = {x, y}, .writes = {y}, .device = Gpu(1)},
                 [&](GpuStream stream) {
                   SimGpu::Launch(stream, [&] { other = value + copy; });
                   issued.count_down();
                 });
  engine.WaitForVar(y, kSoon);
  EXPECT_EQ(other, 14);
}

TEST_F(GpuTest, ACpuOpAndTheVersionWaitForTheEvent) {
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  std::latch end{1};
  std::latch launched{1};
  bool kernel_done = false;
  bool seen = false;
  engine.PushGpu({.name = "kernel", .writes = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    SimGpu::Launch(stream, [&] {
      end.wait();
      kernel_done = true;
    });
    launched.count_down();
  });
  engine.Push({.name = "reader", .reads = {x}}, [&] { seen = kernel_done; });
  launched.wait();
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(1)), TimeoutError);
  EXPECT_EQ(engine.version(x), 0u);
  EXPECT_THAT(engine.DumpState(), HasSubstr("'kernel' gpu(0) priority 0, issued writes [x]"));
  EXPECT_THAT(engine.DumpState(), HasSubstr("'reader' cpu(0) priority 0, blocked reads [x]"));
  end.count_down();
  engine.WaitForAll(kSoon);
  EXPECT_TRUE(seen);
  EXPECT_EQ(engine.version(x), 1u);
}

// One op writes three variables, two of them fail alone: what is issued behind them sees that
// before the kernel has ended, and what runs on the host when it has.
TEST_F(GpuTest, AnOpFailsForSingleVariables) {
  Engine engine(Options());
  const Var good = engine.NewVar("good"), bad = engine.NewVar("bad"), old = engine.NewVar("old");
  engine.Push({.name = "first", .writes = {old}}, [] { throw std::runtime_error("old"); });
  std::latch end{1};
  engine.PushGpu(
      {.name = "batch", .writes = {good, bad, old}, .device = Gpu(0), .run_when_poisoned = true},
      [&](GpuStream stream) {
        engine::FailWrite(old, engine.ErrorOf(old));
        engine::FailWrite(bad, std::make_exception_ptr(std::runtime_error("bad")));
        engine::FailWrite(bad, std::make_exception_ptr(std::runtime_error("later")));
        SimGpu::Launch(stream, [&] { end.wait(); });
      });
  std::mutex mutex;
  std::vector<std::string> seen;
  std::latch issued{3};
  for (const Var& var : {bad, old, good}) {
    engine.PushGpu({.name = "behind", .writes = {var}, .device = Gpu(1), .run_when_poisoned = true},
                   [&, var](GpuStream) {
                     const std::exception_ptr error = engine.ErrorOf(var);
                     {
                       const std::lock_guard lock(mutex);
                       seen.push_back(error != nullptr ? engine.FailureOf(var)->message : "none");
                     }
                     issued.count_down();
                     if (error != nullptr) std::rethrow_exception(error);
                   });
  }
  issued.wait();  // while the kernel runs
  end.count_down();
  EXPECT_THAT([&] { engine.WaitForVar(bad, kSoon); },
              testing::ThrowsMessage<std::runtime_error>("bad"));
  EXPECT_THAT([&] { engine.WaitForVar(old, kSoon); },
              testing::ThrowsMessage<std::runtime_error>("old"));
  engine.WaitForVar(good, kSoon);
  EXPECT_THAT(seen, testing::UnorderedElementsAre("bad", "old", "none"));
  EXPECT_EQ(engine.FailureOf(bad)->op, "batch");
  EXPECT_EQ(engine.FailureOf(bad)->var, "bad");
  EXPECT_EQ(engine.FailureOf(old)->op, "first");
  EXPECT_EQ(engine.FailureOf(good), std::nullopt);
  EXPECT_EQ(engine.version(good), 2U);
  EXPECT_EQ(engine.version(old), 3U);
  // Each failure once, the earliest first.
  EXPECT_THAT([&] { engine.WaitForAll(kSoon); }, testing::ThrowsMessage<std::runtime_error>("old"));
  EXPECT_THAT([&] { engine.WaitForAll(kSoon); }, testing::ThrowsMessage<std::runtime_error>("bad"));
  engine.WaitForAll(kSoon);
}

TEST_F(GpuTest, FailWriteIsForWhatTheBodyOfAGpuOpWrites) {
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  const auto error = std::make_exception_ptr(std::runtime_error("some"));
  EXPECT_THROW(engine::FailWrite(x, error), InvalidState);
  engine.Push({.name = "cpu", .writes = {x}},
              [&] { EXPECT_THROW(engine::FailWrite(x, error), InvalidState); });
  engine.PushGpu({.name = "gpu", .reads = {y}, .writes = {x}, .device = Gpu(0)}, [&](GpuStream) {
    EXPECT_THROW(engine::FailWrite(y, error), InvalidArgument);
    EXPECT_THROW(engine::FailWrite(x, nullptr), InvalidArgument);
  });
  engine.WaitForAll(kSoon);
  EXPECT_EQ(engine.FailureOf(x), std::nullopt);
}

// A write waits for all reads, of CPUs and GPUs, and for nothing else.
TEST_F(GpuTest, AWriteIsIssuedBehindReadersOnGpusAndWaitsForThoseOnCpus) {
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  std::latch cpu_may_end{1}, gpu_may_end{1};
  std::atomic<bool> cpu_read{false}, gpu_read{false};
  bool both = false;
  engine.PushGpu({.name = "gpu reader", .reads = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    SimGpu::Launch(stream, [&] {
      gpu_may_end.wait();
      gpu_read = true;
    });
  });
  engine.Push({.name = "cpu reader", .reads = {x}}, [&] {
    cpu_may_end.wait();
    cpu_read = true;
  });
  engine.PushGpu({.name = "writer", .writes = {x}, .device = Gpu(1)}, [&](GpuStream stream) {
    both = cpu_read;
    SimGpu::Launch(stream, [&] { both = both && gpu_read; });
    gpu_may_end.count_down();  // the reader on the GPU still runs when this is issued
  });
  cpu_may_end.count_down();
  engine.WaitForVar(x, kSoon);
  EXPECT_TRUE(both);
}

TEST_F(GpuTest, BeyondThoseIssuedAheadTheMostUrgentIsNext) {
  EngineOptions options = Options();
  options.gpu.issued_ahead = 2;
  options.num_workers = 1;
  Engine engine(options);
  std::latch end{1};
  std::mutex mutex;
  std::vector<int> order;
  std::vector<Var> vars;
  const auto push = [&](int priority, bool waits) {
    vars.push_back(engine.NewVar());
    engine.PushGpu({.name = "op", .writes = {vars.back()}, .device = Gpu(0), .priority = priority},
                   [&, priority, waits](GpuStream stream) {
                     if (waits) SimGpu::Launch(stream, [&] { end.wait(); });
                     const std::lock_guard lock(mutex);
                     order.push_back(priority);
                   });
  };
  push(0, true);
  push(-1, false);
  const auto launched = [&] {
    const std::lock_guard lock(mutex);
    return order.size();
  };
  while (launched() < 2) std::this_thread::yield();  // both places are taken
  for (const int priority : {-5, -3, -9, -4}) push(priority, false);
  EXPECT_THAT(engine.DumpState(), HasSubstr("held back"));
  {
    const std::lock_guard lock(mutex);
    EXPECT_THAT(order, ElementsAre(0, -1));
  }
  end.count_down();
  engine.WaitForAll(kSoon);
  EXPECT_THAT(order, ElementsAre(0, -1, -3, -4, -5, -9));
}

// A failed launch is of the op that it belongs to, also if that one has failed already.
TEST_F(GpuTest, WhatABodyLeavesIsNotFoundByTheNextOp) {
  EngineOptions options = Options();
  options.num_workers = 1;
  Engine engine(options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.PushGpu({.name = "bad", .writes = {x}, .device = Gpu(0)}, [](GpuStream) {
    SimGpu::FailLaunch("cudaErrorMemoryAllocation");
    throw std::runtime_error("mine");
  });
  engine.PushGpu({.name = "good", .writes = {y}, .device = Gpu(0)}, [](GpuStream) {});
  EXPECT_NO_THROW(engine.WaitForVar(y));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(x); }), "mine");
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_F(GpuTest, AFailedLaunchPoisonsBeforeItsDependentsAreIssued) {
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::latch end{1};
  bool ran = false;
  engine.PushGpu({.name = "before", .writes = {x}, .device = Gpu(0)},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
  engine.PushGpu({.name = "bad", .reads = {x}, .writes = {x}, .device = Gpu(0)},
                 [](GpuStream) { SimGpu::FailLaunch("cudaErrorInvalidConfiguration"); });
  engine.PushGpu({.name = "after", .reads = {x}, .writes = {y}, .device = Gpu(1)},
                 [&](GpuStream) { ran = true; });
  end.count_down();
  EXPECT_THAT(MessageOf<CudaError>([&] { engine.WaitForVar(y, kSoon); }),
              HasSubstr("cudaErrorInvalidConfiguration"));
  EXPECT_FALSE(ran);
  EXPECT_EQ(engine.FailureOf(y)->op, "bad");
  EXPECT_EQ(engine.FailureOf(y)->var, "x");
  EXPECT_EQ(engine.version(x), 2u);
  // The device is as good as before, and an overwrite cures.
  engine.PushGpu({.name = "cure", .writes = {y}, .device = Gpu(0)}, [](GpuStream) {});
  engine.WaitForVar(y, kSoon);
  EXPECT_THROW(engine.WaitForAll(kSoon), CudaError);
  engine.WaitForAll(kSoon);  // once
}

// A failure that stays is that of its op: not what was there while an overwrite before it was
// issued,
TEST_F(GpuTest, AnOverwriteThatWasIssuedBeforeAFailureIsKeptCures) {
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  std::latch end{1}, failed{1};
  engine.Push({.name = "update", .writes = {x}}, [] { throw std::runtime_error("broken update"); });
  engine.PushGpu({.name = "reset", .writes = {x}, .device = Gpu(0), .run_when_poisoned = true},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
  engine.PushGpu({.name = "merge", .writes = {x}, .device = Gpu(0), .run_when_poisoned = true},
                 [&](GpuStream) {
                   engine::KeepFailure();
                   failed.count_down();
                   throw std::runtime_error("bad gradient");
                 });
  engine.PushGpu({.name = "settle", .writes = {x}, .device = Gpu(0), .run_when_poisoned = true},
                 [](GpuStream) {});
  failed.wait();
  end.count_down();
  engine.WaitForVar(x, kSoon);
  EXPECT_THROW(engine.WaitForAll(kSoon), std::runtime_error);
}

// What is skipped because of another input leaves it, both while the ops are issued ahead and after
// the first has finished.
TEST_F(GpuTest, AFailureThatIsKeptOutlivesOpsThatOtherFailuresSkip) {
  for (const bool ahead : {false, true}) {
    Engine engine(Options());
    const Var x = engine.NewVar("x"), other = engine.NewVar("other");
    std::latch end{1};
    std::atomic<int> runs = 0;
    engine.Push({.name = "fail", .writes = {other}}, [] { throw std::runtime_error("other"); });
    EXPECT_THROW(engine.WaitForVar(other, kSoon), std::runtime_error);
    engine.PushGpu({.name = "busy", .writes = {x}, .device = Gpu(0)},
                   [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
    engine.PushGpu({.name = "merge", .writes = {x}, .device = Gpu(0), .run_when_poisoned = true},
                   [&](GpuStream) {
                     engine::KeepFailure();
                     throw std::runtime_error("kept");
                   });
    if (!ahead) {
      end.count_down();
      EXPECT_THROW(engine.WaitForVar(x, kSoon), std::runtime_error);
    }
    for (int i = 0; i < 2; ++i) {
      engine.PushGpu({.name = "copy", .reads = {other}, .writes = {x}, .device = Gpu(0)},
                     [&](GpuStream) { ++runs; });
      engine.PushGpu({.name = "overwrite", .writes = {x}, .device = Gpu(0)},
                     [&](GpuStream) { ++runs; });
    }
    if (ahead) end.count_down();
    engine.Push({.name = "overwrite on a CPU", .writes = {x}}, [&] { ++runs; });
    EXPECT_THAT([&] { engine.WaitForVar(x, kSoon); },
                testing::ThrowsMessage<std::runtime_error>("kept"));
    EXPECT_EQ(runs, 0);
    for (int i = 0; i < 2; ++i) EXPECT_THROW(engine.WaitForAll(kSoon), std::runtime_error);
  }
}

// nor does it end with an earlier one.
TEST_F(GpuTest, AFailureIsKeptWhileAnEarlierOneIsSettled) {
  Engine engine(Options());
  const Var x = engine.NewVar("x");
  std::latch end{1}, second_failed{1};
  const auto merge = [&](std::latch* failed) {
    engine.PushGpu({.name = "merge", .writes = {x}, .device = Gpu(0), .run_when_poisoned = true},
                   [failed](GpuStream) {
                     engine::KeepFailure();
                     if (failed != nullptr) failed->count_down();
                     throw std::runtime_error("bad gradient");
                   });
  };
  merge(nullptr);
  engine.PushGpu({.name = "settle", .writes = {x}, .device = Gpu(0), .run_when_poisoned = true},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
  merge(&second_failed);
  second_failed.wait();
  end.count_down();
  while (engine.version(x) < 3) std::this_thread::yield();
  std::atomic<int> overwrites = 0;
  for (int i = 0; i < 2; ++i) {
    engine.PushGpu({.name = "overwrite", .writes = {x}, .device = Gpu(0)},
                   [&](GpuStream) { ++overwrites; });
  }
  engine.Push({.name = "overwrite on a CPU", .writes = {x}}, [&] { ++overwrites; });
  engine.PushGpu({.name = "settle", .writes = {x}, .device = Gpu(0), .run_when_poisoned = true},
                 [](GpuStream) {});
  engine.WaitForVar(x, kSoon);
  EXPECT_EQ(overwrites, 0);
  EXPECT_THROW(engine.WaitForAll(kSoon), std::runtime_error);
}

// All of it is issued while the device has not begun with the first op.
TEST_F(GpuTest, ABodySeesTheFailuresOfWhatIsIssuedAndOfNothingThatIsCured) {
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::latch end{1};
  std::vector<bool> failed;
  const auto look = [&](GpuStream) {
    failed.push_back(engine.ErrorOf(x) != nullptr);
    EXPECT_EQ(engine.FailureOf(x).has_value(), failed.back());
  };
  const OpOptions options{
      .name = "look", .reads = {x}, .writes = {y}, .device = Gpu(0), .run_when_poisoned = true};
  engine.PushGpu({.name = "before", .writes = {x}, .device = Gpu(0)},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
  engine.PushGpu(options, look);
  engine.PushGpu({.name = "bad", .writes = {x}, .device = Gpu(1)},
                 [](GpuStream) { SimGpu::FailLaunch("cudaErrorInvalidConfiguration"); });
  engine.PushGpu(options, look);
  engine.PushGpu({.name = "cure", .writes = {x}, .device = Gpu(0)}, [](GpuStream) {});
  engine.PushGpu(options, look);
  engine.PushGpu({.name = "all issued", .reads = {y}, .writes = {y}, .device = Gpu(0)},
                 [&](GpuStream) { end.count_down(); });
  engine.WaitForVar(y, kSoon);
  EXPECT_THAT(failed, ElementsAre(false, true, false));
  EXPECT_THROW(engine.WaitForAll(kSoon), CudaError);
}

TEST_F(GpuTest, AnErrorThatTheDeviceReportsPoisonsWhatWasIssuedAndFailsTheDevice) {
  gpu_->set_patience(std::chrono::milliseconds(20));  // with what was issued elsewhere
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  std::latch issued{1};
  bool cpu_ran = false;
  engine.PushGpu({.name = "bad", .writes = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    SimGpu::Launch(stream, [&] {
      issued.wait();
      throw 1;
    });
  });
  // Issued on another device before anything is known of the error.
  engine.PushGpu({.name = "elsewhere", .reads = {x}, .writes = {y}, .device = Gpu(1)},
                 [&](GpuStream) { issued.count_down(); });
  engine.Push({.name = "cpu", .reads = {y}}, [&] { cpu_ran = true; });
  for (const Var& var : {x, y}) {
    EXPECT_THAT(MessageOf<CudaError>([&] { engine.WaitForVar(var, kSoon); }),
                HasSubstr("cudaErrorIllegalAddress"));
    EXPECT_EQ(engine.FailureOf(var)->op, "bad");
    EXPECT_EQ(engine.version(var), 1u);
  }
  bool ran = false;
  engine.PushGpu({.name = "too late", .writes = {z}, .device = Gpu(0)},
                 [&](GpuStream) { ran = true; });
  EXPECT_THROW(engine.WaitForVar(z, kSoon), CudaError);
  EXPECT_FALSE(ran);
  engine.PushGpu({.name = "on a good one", .writes = {y}, .device = Gpu(2)},
                 [&](GpuStream) { ran = true; });
  engine.WaitForVar(y, kSoon);
  EXPECT_TRUE(ran);
  EXPECT_FALSE(cpu_ran);
}

// The event of the failed device never happens: what waits for it on the device, and behind that,
// did not end, and neither did the waits and Stop.
TEST_F(GpuTest, WhatWaitsForADeviceThatFailsEndsAndTheRestGoesOn) {
  gpu_->set_patience(std::chrono::milliseconds(100));
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  const Var behind = engine.NewVar("behind"), other = engine.NewVar("other");
  std::latch issued{4}, end{1};
  bool ran = false;
  engine.PushGpu({.name = "bad", .writes = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    SimGpu::Launch(stream, [&] {
      issued.wait();
      throw 1;
    });
  });
  const auto no_kernel_runs = [&](GpuStream stream) {
    SimGpu::Launch(stream, [] { ADD_FAILURE() << "behind what never comes"; });
    issued.count_down();
  };
  engine.PushGpu({.name = "waits", .reads = {x}, .writes = {y}, .device = Gpu(1)}, no_kernel_runs);
  engine.PushGpu({.name = "waits for that", .reads = {y}, .writes = {z}, .device = Gpu(2)},
                 no_kernel_runs);
  engine.PushGpu({.name = "same stream", .reads = {y}, .writes = {behind}, .device = Gpu(1)},
                 no_kernel_runs);
  engine.PushGpu(
      {.name = "another stream", .writes = {other}, .device = Gpu(1), .lane = Lane::kCopyOut},
      [&](GpuStream stream) {
        SimGpu::Launch(stream, [&] {
          end.wait();
          ran = true;
        });
        issued.count_down();
      });
  for (const Var& var : {x, y, z, behind}) {
    EXPECT_THAT(MessageOf<CudaError>([&] { engine.WaitForVar(var, kSoon); }),
                HasSubstr("cudaErrorIllegalAddress"));
    EXPECT_EQ(engine.FailureOf(var)->op, "bad");
    EXPECT_EQ(engine.version(var), 1u);
  }
  // It uses its memory until it has ended.
  EXPECT_THROW(engine.WaitForVar(other, std::chrono::milliseconds(1)), TimeoutError);
  end.count_down();
  engine.WaitForVar(other, kSoon);
  EXPECT_TRUE(ran);
  for (const int device : {1, 2}) {
    const Var late = engine.NewVar("late");
    engine.PushGpu({.name = "late", .writes = {late}, .device = Gpu(device)}, [](GpuStream) {});
    EXPECT_THAT(MessageOf<CudaError>([&] { engine.WaitForVar(late, kSoon); }),
                testing::AllOf(HasSubstr("gpu(" + std::to_string(device) + ") waits"),
                               HasSubstr("cudaErrorIllegalAddress")));
  }
  engine.Stop();
}

// That event happened before: what waited for it runs on, and its device is as good as ever.
TEST_F(GpuTest, WhatADeviceThatFailsHasDoneBeforeIsDone) {
  gpu_->set_patience(std::chrono::minutes(10));
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), bad = engine.NewVar("bad");
  std::latch may_end{1}, issued{1}, running{1}, end{1};
  engine.PushGpu({.name = "good", .writes = {x}, .device = Gpu(0)},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { may_end.wait(); }); });
  engine.PushGpu({.name = "waits", .reads = {x}, .writes = {y}, .device = Gpu(1)},
                 [&](GpuStream stream) {
                   SimGpu::Launch(stream, [&] {
                     running.count_down();
                     end.wait();
                   });
                   issued.count_down();
                 });
  issued.wait();
  may_end.count_down();
  running.wait();
  engine.WaitForVar(x, kSoon);  // of what is not known to be done nobody can say so any more
  engine.PushGpu({.name = "bad", .writes = {bad}, .device = Gpu(0)},
                 [](GpuStream stream) { SimGpu::Launch(stream, [] { throw 1; }); });
  EXPECT_THROW(engine.WaitForVar(bad, kSoon), CudaError);
  EXPECT_THROW(engine.WaitForVar(y, std::chrono::milliseconds(1)), TimeoutError);
  end.count_down();
  engine.WaitForVar(y, kSoon);
  engine.PushGpu({.name = "next", .writes = {y}, .device = Gpu(1)}, [](GpuStream) {});
  engine.WaitForVar(y, kSoon);
}

// What only its body knows that it waits for.
TEST_F(GpuTest, AnOpThatIsGivenUpEndsWithItsStream) {
  gpu_->set_patience(std::chrono::milliseconds(1));
  std::latch launched{1}, end{1};  // the kernel runs on for a while
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  const auto given_up = std::make_shared<engine::GivenUp>();
  engine.PushGpu({.name = "hopeless", .writes = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    engine::EndsOrIsGivenUp(given_up);
    SimGpu::Launch(stream, [&] { end.wait(); });
    launched.count_down();
  });
  engine.PushGpu({.name = "behind", .writes = {y}, .device = Gpu(0)}, [](GpuStream) {});
  launched.wait();
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(20)), TimeoutError);
  given_up->Set(std::make_exception_ptr(std::runtime_error("nobody comes")));
  for (const Var& var : {x, y}) {
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(var, kSoon); }),
              "nobody comes");
  }
  end.count_down();
}

// An op that fails on a device that takes none has no event, so nothing on a device waits for it.
// What read its output was taken to, and its healthy device to be lost with the other one.
TEST_F(GpuTest, WhatReadsTheOutputOfALostDevicesOpWaitsForNothingThere) {
  gpu_->set_patience(std::chrono::milliseconds(1));
  std::latch end{1}, end_slow{1}, end_reader{1}, issued{1};
  Engine engine(Options());
  const Var x = engine.NewVar("x"), slow = engine.NewVar("slow");
  const Var failed = engine.NewVar("failed"), read = engine.NewVar("read");
  const auto given_up = std::make_shared<engine::GivenUp>();
  given_up->Set(std::make_exception_ptr(std::runtime_error("nobody comes")));
  engine.PushGpu({.name = "hopeless", .writes = {x}, .device = Gpu(1)}, [&](GpuStream stream) {
    engine::EndsOrIsGivenUp(given_up);
    SimGpu::Launch(stream, [&] { end.wait(); });
  });
  EXPECT_THROW(engine.WaitForVar(x, kSoon), std::runtime_error);
  // Until this one ends the next has not finished.
  engine.PushGpu({.name = "slow", .writes = {slow}, .device = Gpu(2), .lane = Lane::kCopyOut},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end_slow.wait(); }); });
  engine.PushGpu({.name = "fails", .reads = {slow}, .writes = {failed}, .device = Gpu(1)},
                 [](GpuStream) { ADD_FAILURE() << "on a device that takes no ops"; });
  engine.PushGpu({.name = "reader",
                  .reads = {failed},
                  .writes = {read},
                  .device = Gpu(2),
                  .run_when_poisoned = true},
                 [&](GpuStream stream) {
                   SimGpu::Launch(stream, [&] { end_reader.wait(); });
                   issued.count_down();
                 });
  issued.wait();
  end_slow.count_down();
  EXPECT_THROW(engine.WaitForVar(failed, kSoon), std::runtime_error);
  EXPECT_THROW(engine.WaitForVar(read, std::chrono::milliseconds(30)), TimeoutError);
  end.count_down();
  end_reader.count_down();
  engine.WaitForVar(read, kSoon);
  const Var late = engine.NewVar("late");
  engine.PushGpu({.name = "late", .writes = {late}, .device = Gpu(2)}, [](GpuStream) {});
  engine.WaitForVar(late, kSoon);
}

// The line says that a stream is lost, which its lock guards.
TEST_F(GpuTest, ALogSinkMayWaitForAnOpOfTheStreamThatIsLost) {
  gpu_->set_patience(std::chrono::milliseconds(1));
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  std::promise<void> promise;
  std::shared_future<void> waited = promise.get_future().share();
  std::atomic<bool> logged = false, in_time = false;
  SetLogSink([&](LogLevel, std::string_view line) {
    if (line.find("takes no more ops") == std::string_view::npos || logged.exchange(true)) return;
    in_time = waited.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  });
  std::latch end{1}, issued{1};
  engine.PushGpu({.name = "fails", .writes = {x}, .device = Gpu(1)}, [&](GpuStream stream) {
    SimGpu::Launch(stream, [&] {
      end.wait();
      throw std::runtime_error("illegal address");
    });
  });
  engine.PushGpu({.name = "waits", .reads = {x}, .writes = {y}, .device = Gpu(0)},
                 [&](GpuStream stream) {
                   SimGpu::Launch(stream, [] {});
                   issued.count_down();
                 });
  issued.wait();
  end.count_down();
  while (!logged) std::this_thread::yield();
  EXPECT_THROW(engine.WaitForVar(y, kSoon), CudaError);
  promise.set_value();
  EXPECT_THROW(engine.WaitForAll(kSoon), CudaError);
  engine.Stop();
  SetLogSink({});
  EXPECT_TRUE(in_time);
}

// Had an op been issued before the other one ended, that was held against it when the other's
// device failed later.
TEST_F(GpuTest, WhatEndedBeforeItsDeviceFailedRaisesNoDoubt) {
  gpu_->set_patience(std::chrono::milliseconds(1));
  std::latch may_end{1}, issued{1}, end{1};
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), bad = engine.NewVar("bad");
  engine.PushGpu({.name = "good", .writes = {x}, .device = Gpu(0)},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { may_end.wait(); }); });
  engine.PushGpu({.name = "waits", .reads = {x}, .writes = {y}, .device = Gpu(1)},
                 [&](GpuStream stream) {
                   SimGpu::Launch(stream, [&] { end.wait(); });
                   issued.count_down();
                 });
  issued.wait();
  may_end.count_down();
  engine.WaitForVar(x, kSoon);
  engine.PushGpu({.name = "bad", .writes = {bad}, .device = Gpu(0)},
                 [](GpuStream stream) { SimGpu::Launch(stream, [] { throw 1; }); });
  EXPECT_THROW(engine.WaitForVar(bad, kSoon), CudaError);
  EXPECT_THROW(engine.WaitForVar(y, std::chrono::milliseconds(30)), TimeoutError);
  end.count_down();
  engine.WaitForVar(y, kSoon);
}

TEST_F(GpuTest, ADeviceThatNobodyNamesIsLeftAlone) {
  Engine engine(Options());
  EXPECT_EQ(gpu_->devices_entered(), std::set<int>{});
  const Var x = engine.NewVar();
  engine.PushGpu({.writes = {x}, .device = Gpu(1)}, [](GpuStream) {});
  engine.WaitForAll(kSoon);
  EXPECT_EQ(gpu_->devices_entered(), std::set<int>{1});
}

TEST_F(GpuTest, TheSteadyStateMakesNoStreamsOrEvents) {
  Engine engine(Options());
  const Var x = engine.NewVar(), y = engine.NewVar();
  const auto run = [&] {
    for (int i = 0; i < 60; ++i) {
      engine.PushGpu({.reads = {x}, .writes = {x}, .device = Gpu(0)}, [](GpuStream) {});
      engine.PushGpu({.reads = {x}, .writes = {y}, .device = Gpu(0), .lane = Lane::kCopyOut},
                     [](GpuStream) {});
    }
    engine.WaitForAll(kSoon);
  };
  run();
  const int ahead = engine.options().gpu.issued_ahead;
  EXPECT_LE(gpu_->streams_made(), 2);  // and none to signal by, which would take connections
  EXPECT_LE(gpu_->events_made(), 2 * ahead);
  run();
  EXPECT_LE(gpu_->streams_made(), 2);
  EXPECT_LE(gpu_->events_made(), 2 * ahead);
}

TEST_F(GpuTest, ABodyMayPushAndItsCapturesLiveUntilTheDeviceIsDone) {
  Engine engine(Options());
  const Var x = engine.NewVar();
  auto capture = std::make_shared<std::atomic<int>>(0);
  const std::weak_ptr<std::atomic<int>> watch = capture;
  std::atomic<int> ran{0};
  std::latch launched{1}, end{1};
  engine.PushGpu({.writes = {x}, .device = Gpu(0)},
                 [&, x, capture = std::move(capture)](GpuStream stream) {
                   engine.PushGpu({.writes = {x}, .device = Gpu(2)}, [&](GpuStream) { ++ran; });
                   SimGpu::Launch(stream, [&, memory = capture.get()] {
                     end.wait();
                     ran += ++*memory;
                   });
                   launched.count_down();
                 });
  launched.wait();
  EXPECT_FALSE(watch.expired());
  end.count_down();
  engine.WaitForVar(x, kSoon);
  EXPECT_EQ(ran, 2);
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(engine.version(x), 2u);
}

// Asked on variables that ops hold, with and without others behind them.
TEST_F(GpuTest, WhatHoldsUpAnOpIsSeenBeforeItIsPushed) {
  Engine engine(Options());
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  const auto held_up_by = [](const VarList& reads, const VarList& writes) {
    const OpVars vars{reads, writes};
    return HeldUpBy({&vars, 1})[0];
  };
  EXPECT_EQ(held_up_by({x}, {y}), kNoOp);

  Hold writer(engine, {.writes = {x, y}});
  const std::uint64_t by_writer = held_up_by({x}, {});
  EXPECT_NE(by_writer, kNoOp);
  EXPECT_NE(by_writer, kUnknownOps);
  EXPECT_EQ(held_up_by({}, {x}), by_writer);
  EXPECT_EQ(held_up_by({x, z}, {y}), by_writer);
  EXPECT_EQ(held_up_by({z}, {}), kNoOp);

  Hold other(engine, {.writes = {z}});
  EXPECT_NE(held_up_by({z}, {}), by_writer);
  EXPECT_THAT(held_up_by({x, z}, {}), AllOf(Ne(kUnknownOps), Ne(kNoOp), Ne(by_writer)));

  Hold reader(engine, {.reads = {x}});  // behind the writer
  EXPECT_EQ(held_up_by({x}, {}), by_writer);
  const std::uint64_t by_reader = held_up_by({}, {x});
  EXPECT_NE(by_reader, by_writer);
  EXPECT_NE(by_reader, kUnknownOps);
  Hold second_reader(engine, {.reads = {x}});
  EXPECT_EQ(held_up_by({}, {x}), kUnknownOps);
  Hold second_writer(engine, {.writes = {x}});
  EXPECT_EQ(held_up_by({x}, {}), held_up_by({}, {x}));
  Hold third_reader(engine, {.reads = {x}});
  EXPECT_NE(held_up_by({x}, {}), held_up_by({}, {x}));

  writer.Release();  // both readers run
  engine.WaitForVar(y, kSoon);
  EXPECT_EQ(held_up_by({y}, {}), kNoOp);
  EXPECT_NE(held_up_by({x}, {}), kNoOp);
  reader.Release();
  second_reader.Release();
  second_writer.Release();
  engine.WaitForVar(x, kSoon);
  EXPECT_EQ(held_up_by({x}, {}), kNoOp);  // beside the third reader
  EXPECT_NE(held_up_by({}, {x}), kNoOp);
  third_reader.Release();
  other.Release();
  engine.WaitForAll(kSoon);
  EXPECT_EQ(held_up_by({x, y, z}, {x}), kNoOp);
}

// A device waits for what has been issued; a reader on a CPU has to end, and one of a GPU that has
// still to be issued is one more to wait for.
TEST_F(GpuTest, WhatHasBeenIssuedHoldsUpNothing) {
  Engine engine(Options());
  const Var x = engine.NewVar("x"), gate = engine.NewVar("gate");
  const auto held_up_by = [](const VarList& reads, const VarList& writes) {
    const OpVars vars{reads, writes};
    return HeldUpBy({&vars, 1})[0];
  };
  std::latch end{1};
  engine.PushGpu({.name = "writer", .writes = {x}, .device = Gpu(0)},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
  while (held_up_by({x}, {}) != kNoOp) std::this_thread::yield();
  EXPECT_EQ(held_up_by({}, {x}), kNoOp);

  engine.PushGpu({.name = "early", .reads = {x}, .device = Gpu(1)}, [](GpuStream) {});
  while (held_up_by({}, {x}) != kNoOp) std::this_thread::yield();

  Hold hold(engine, {.writes = {gate}});
  engine.PushGpu({.name = "gated", .reads = {gate, x}, .device = Gpu(1)}, [](GpuStream) {});
  EXPECT_EQ(held_up_by({x}, {}), kNoOp);
  EXPECT_THAT(held_up_by({}, {x}), AllOf(Ne(kNoOp), Ne(kUnknownOps)));
  engine.Push({.name = "reader", .reads = {x}}, [] {});
  EXPECT_EQ(held_up_by({}, {x}), kUnknownOps);

  // Behind a write that is still to be issued there is one reader; that others are not done is
  // nothing to it.
  const Var y = engine.NewVar("y");
  engine.PushGpu({.name = "writer", .writes = {y}, .device = Gpu(0)},
                 [&](GpuStream stream) { SimGpu::Launch(stream, [&] { end.wait(); }); });
  engine.PushGpu({.name = "early", .reads = {y}, .device = Gpu(1)}, [](GpuStream) {});
  while (held_up_by({}, {y}) != kNoOp) std::this_thread::yield();
  engine.PushGpu({.name = "gated", .reads = {gate}, .writes = {y}, .device = Gpu(0)},
                 [](GpuStream) {});
  const std::uint64_t by_writer = held_up_by({}, {y});
  engine.PushGpu({.name = "late", .reads = {y}, .device = Gpu(1)}, [](GpuStream) {});
  EXPECT_EQ(held_up_by({y}, {}), by_writer);
  EXPECT_THAT(held_up_by({}, {y}), AllOf(Ne(kNoOp), Ne(kUnknownOps), Ne(by_writer)));
  end.count_down();
  hold.Release();
  engine.WaitForAll(kSoon);
}

// Whoever looks asks for few of the ops that are issued: for the oldest, too.
TEST_F(GpuTest, AnOpIsSeenToEndHoweverManyRunBehindIt) {
  for (int behind = 1; behind < 16; ++behind) {
    Engine engine(Options());
    const Var x = engine.NewVar("x");
    std::latch begin{1}, end{1};
    std::atomic<int> issued = 0;
    std::promise<void> seen;
    engine.PushGpu({.name = "short", .writes = {x}, .device = Gpu(0)},
                   [&](GpuStream stream) { SimGpu::Launch(stream, [&] { begin.wait(); }); });
    for (int i = 0; i < behind; ++i) {
      engine.PushGpu({.name = "long", .device = Gpu(0)}, [&](GpuStream stream) {
        SimGpu::Launch(stream, [&] { end.wait(); });
        ++issued;
      });
    }
    engine.Push({.name = "host", .reads = {x}}, [&] { seen.set_value(); });
    while (issued < behind) std::this_thread::yield();
    begin.count_down();
    EXPECT_EQ(seen.get_future().wait_for(kSoon), std::future_status::ready) << behind << " behind";
    end.count_down();
    engine.WaitForAll(kSoon);
  }
}

TEST_F(GpuTest, AnEngineIsDestroyedWithWorkPending) {
  std::atomic<int> ran{0};
  {
    Engine engine(Options());
    const Var x = engine.NewVar();
    for (int i = 0; i < 100; ++i) {
      engine.PushGpu({.reads = {x}, .writes = {x}, .device = Gpu(i % 3)},
                     [&](GpuStream stream) { SimGpu::Launch(stream, [&] { ++ran; }); });
    }
  }
  EXPECT_EQ(ran, 100);
}

TEST(GpuChild, ThreadsRunOut) {
  if (!InChild()) GTEST_SKIP() << "runs in a child process";
  EngineOptions options;
  options.num_workers = 2;
  options.worker_host = WorkerHost::kThreads;
  options.gpu_driver = std::make_shared<SimGpu>(1, BaseSeed());
  Engine engine(options);
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) engine.Push({.name = "warm", .writes = {x}}, [] {});
  engine.WaitForAll();
  const auto push = [&] {
    engine.PushGpu({.name = "kernel", .writes = {x}, .device = Gpu(0)}, [](GpuStream) {});
  };
  std::ifstream statm("/proc/self/statm");
  std::size_t pages = 0;
  statm >> pages;
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
  // Memory for all but a stack, of 8 MiB usually.
  const rlimit low{pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + (1 << 20),
                   limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &low), 0);
  EXPECT_THROW(push(), std::system_error);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  EXPECT_EQ(engine.stats().pushed, 100u);
  push();
  engine.WaitForVar(x, kSoon);
  EXPECT_EQ(engine.version(x), 101u);
}

// The op used to stay ready for ever; on a worker it would have ended the process.
TEST(GpuThreadLimitTest, APushThatCannotHaveTheThreadThatFinishesOpsIsRefused) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need more address space than may be given here";
  EXPECT_EQ(RunInChild("GpuChild.ThreadsRunOut", {}, /*one_cpu=*/false), 0);
}

TEST_F(GpuTest, WhatCannotWorkIsRefusedWithExpectedAndGiven) {
  Engine engine(Options());
  const Var x = engine.NewVar();
  const auto body = [](GpuStream) {};
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { engine.PushGpu({.name = "a"}, body); }),
              testing::AllOf(HasSubstr("'a'"), HasSubstr("cpu(0)"), HasSubstr("expected gpu(i)")));
  EXPECT_THAT(MessageOf<InvalidArgument>(
                  [&] { engine.PushGpu({.name = "a", .writes = {x}, .device = Gpu(3)}, body); }),
              testing::AllOf(HasSubstr("gpu(3)"), HasSubstr("there are 3")));
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { engine.Push({.device = Gpu(0)}, [] {}); }),
              testing::AllOf(HasSubstr("gpu(0)"), HasSubstr("expected cpu(i)")));
  EXPECT_EQ(engine.stats().pushed, 0u);
  EngineOptions options = Options();
  options.gpu.issued_ahead = 0;
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { Engine bad(options); }),
              testing::AllOf(HasSubstr("gpu.issued_ahead is 0"), HasSubstr("expected 1")));
  options = Options();
  options.gpu.lanes[1].streams = 0;
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { Engine bad(options); }), HasSubstr("streams is 0"));
}

}  // namespace
}  // namespace heddle::engine_test
