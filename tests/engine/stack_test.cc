// No chain of ops, however long, grows a stack: of running, skipped, async and nested ops, nor does
// looking along one in a wait, a dump or a destructor.
#include <heddle/engine.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

class StackTest : public EveryEngine {
 protected:
  static EngineOptions Unbounded() {
    EngineOptions options = GetParam().options;
    options.max_pending_ops = 4'000'000;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(All, StackTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

// How far apart the stack positions are at which ops run on one thread, over all threads the most.
class StackDepth {
 public:
  void Note() {
    thread_local Range range;
    thread_local StackDepth* owner = nullptr;
    if (owner != this) {
      owner = this;
      range = Range();
    }
    const auto here = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
    range.low = std::min(range.low, here);
    range.high = std::max(range.high, here);
    const std::uintptr_t depth = range.high - range.low;
    std::uintptr_t most = most_.load(std::memory_order_relaxed);
    while (most < depth && !most_.compare_exchange_weak(most, depth)) {
    }
  }
  std::uintptr_t most() const { return most_; }

 private:
  struct Range {
    std::uintptr_t low = UINTPTR_MAX, high = 0;
  };
  std::atomic<std::uintptr_t> most_ = 0;
};

constexpr std::uintptr_t kFewFrames = 64 * 1024;

TEST_P(StackTest, AChainOfAMillionPendingOps) {
  const int kOps = Scaled(1'000'000);
  StackDepth depth;
  Engine engine(Unbounded());
  const Var x = engine.NewVar("x");
  int runs = 0;
  Hold hold(engine, {.name = "hold", .writes = {x}});
  for (int i = 0; i < kOps; ++i) {
    engine.Push({.name = "link", .reads = {x}, .writes = {x}}, [&] {
      ++runs;
      depth.Note();
    });
  }
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(1)), TimeoutError);
  hold.Release();
  engine.WaitForVar(x);
  EXPECT_EQ(runs, kOps);
  EXPECT_LT(depth.most(), kFewFrames);
}

// Each op waits for the one before through a variable of its own, so that a search for what a wait
// needs, if it is recursive, goes a call deeper with each.
TEST_P(StackTest, AChainThroughAsManyVars) {
  const int kOps = Scaled(200'000);
  StackDepth depth;
  Engine engine(Unbounded());
  Var last = engine.NewVar("first");
  int runs = 0;
  Hold hold(engine, {.name = "hold", .writes = {last}});
  for (int i = 0; i < kOps; ++i) {
    Var next = engine.NewVar("next");
    engine.Push({.name = "link", .reads = {last}, .writes = {next}}, [&] {
      ++runs;
      depth.Note();
    });
    last = std::move(next);
  }
  EXPECT_THROW(engine.WaitForVar(last, std::chrono::milliseconds(1)), TimeoutError);
  hold.Release();
  engine.WaitForVar(last);
  EXPECT_EQ(runs, kOps);
  EXPECT_LT(depth.most(), kFewFrames);
}

TEST_P(StackTest, AChainOfSkippedOps) {
  const int kOps = Scaled(300'000);
  Engine engine(Unbounded());
  Var last = engine.NewVar("first");
  int runs = 0;
  {
    Hold hold(engine, {.name = "hold", .writes = {last}});
    for (int i = 0; i < kOps; ++i) {
      Var next = engine.NewVar("next");
      engine.Push({.name = "skipped", .reads = {last}, .writes = {next}}, [&] { ++runs; });
      last = std::move(next);
    }
    hold.Release(std::make_exception_ptr(std::runtime_error("root")));
  }
  EXPECT_THROW(engine.WaitForVar(last), std::runtime_error);
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  EXPECT_EQ(runs, 0);
}

TEST_P(StackTest, AChainOfAsyncOpsThatFinishInsideTheirBodies) {
  const int kOps = Scaled(200'000);
  StackDepth depth;
  Engine engine(Unbounded());
  const Var x = engine.NewVar("x");
  int runs = 0;
  Hold hold(engine, {.name = "hold", .writes = {x}});
  for (int i = 0; i < kOps; ++i) {
    engine.PushAsync({.name = "link", .reads = {x}, .writes = {x}}, [&](const Completion& done) {
      ++runs;
      depth.Note();
      done();
    });
  }
  hold.Release();
  engine.WaitForVar(x);
  EXPECT_EQ(runs, kOps);
  EXPECT_LT(depth.most(), kFewFrames);
}

TEST_P(StackTest, OpsThatEachPushTheNext) {
  const int kOps = Scaled(300'000);
  StackDepth depth;
  Engine engine(GetParam().options);
  int runs = 0;
  std::function<void()> next = [&] {
    depth.Note();
    if (++runs < kOps) engine.Push({.name = "next"}, [&] { next(); });
  };
  engine.Push({.name = "next"}, [&] { next(); });
  engine.WaitForAll();
  EXPECT_EQ(runs, kOps);
  EXPECT_LT(depth.most(), kFewFrames);
}

TEST_P(StackTest, ManyReadersReleasedByOneWriter) {
  const int kOps = Scaled(200'000);
  StackDepth depth;
  Engine engine(Unbounded());
  const Var x = engine.NewVar("x");
  std::atomic<int> runs = 0;
  Hold hold(engine, {.name = "hold", .writes = {x}});
  for (int i = 0; i < kOps; ++i) {
    engine.Push({.name = "reader", .reads = {x}}, [&] {
      ++runs;
      depth.Note();
    });
  }
  hold.Release();
  engine.WaitForReadsAndWrites(x);
  EXPECT_EQ(runs.load(), kOps);
  EXPECT_LT(depth.most(), kFewFrames);
}

// An op body never runs on top of another one's: neither a push nor a ParallelFor inside an op
// picks up a further op on that thread.
TEST_P(StackTest, NoOpRunsInsideAnother) {
  EngineOptions options = GetParam().options;
  options.max_pending_ops = 8;
  Engine engine(options);
  std::atomic<int> nested = 0, runs = 0;
  const auto body = [&] {
    thread_local bool inside = false;
    if (inside) ++nested;
    inside = true;
    engine.Push({.name = "child"}, [&] {
      if (inside) ++nested;
      ++runs;
    });
    engine.ParallelFor(16, 1, [](std::int64_t, std::int64_t) { std::this_thread::yield(); });
    inside = false;
    ++runs;
  };
  for (int i = 0; i < 200; ++i) engine.Push({.name = "outer"}, body);
  engine.WaitForAll();
  EXPECT_EQ(nested.load(), 0);
  EXPECT_EQ(runs.load(), 400);
}

}  // namespace
}  // namespace heddle::engine_test
