// ParallelFor: its blocks, its errors, and its use inside ops.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <limits>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::engine_test {
namespace {

using Blocks = std::multiset<std::pair<std::int64_t, std::int64_t>>;

class ParallelForTest : public EveryEngine {
 protected:
  static Blocks BlocksOf(Engine& engine, std::int64_t count, std::int64_t grain) {
    std::mutex mutex;
    Blocks blocks;
    engine.ParallelFor(count, grain, [&](std::int64_t begin, std::int64_t end) {
      const std::lock_guard lock(mutex);
      blocks.emplace(begin, end);
    });
    return blocks;
  }
  static Blocks ExpectedBlocks(std::int64_t count, std::int64_t grain) {
    Blocks blocks;
    for (std::int64_t begin = 0; begin < count; begin += grain) {
      blocks.emplace(begin, std::min(begin + grain, count));
    }
    return blocks;
  }
};
INSTANTIATE_TEST_SUITE_P(All, ParallelForTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(ParallelForTest, TheBlocksAreThoseOfTheGrainForEveryNumberOfWorkers) {
  Engine engine(GetParam().options);
  for (const auto& [count, grain] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 1}, {1, 1}, {10, 3}, {10, 10}, {10, 11}, {1000, 1}, {1001, 10}, {5, 1 << 30}}) {
    EXPECT_EQ(BlocksOf(engine, count, grain), ExpectedBlocks(count, grain))
        << count << " " << grain;
    Blocks inside;
    engine.Push({.name = "op"},
                [&, count = count, grain = grain] { inside = BlocksOf(engine, count, grain); });
    engine.WaitForAll();
    EXPECT_EQ(inside, ExpectedBlocks(count, grain)) << count << " " << grain;
  }
}

TEST_P(ParallelForTest, CountsBeyond32BitsWork) {
  Engine engine(GetParam().options);
  const std::int64_t count = std::int64_t{1} << 40;
  EXPECT_EQ(BlocksOf(engine, count, count / 7), ExpectedBlocks(count, count / 7));
}

TEST_P(ParallelForTest, AnyGrainWorks) {
  Engine engine(GetParam().options);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::vector<std::pair<std::int64_t, std::int64_t>> blocks;
  const auto note = [&](std::int64_t begin, std::int64_t end) { blocks.emplace_back(begin, end); };
  engine.ParallelFor(10, kMost, note);
  EXPECT_EQ(blocks, (std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 10}}));
  std::atomic<std::int64_t> sum = 0;
  engine.ParallelFor(kMost, kMost / 2, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_LT(begin, end);
    sum += end - begin;
  });
  EXPECT_EQ(sum, kMost);
}

TEST_P(ParallelForTest, AllBlocksAreDoneAndVisibleWhenItReturns) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::vector<int> values(10'000);
  long sum = 0;
  for (int round = 1; round <= Scaled(40); ++round) {
    engine.Push({.name = "fill", .writes = {x}}, [&, round] {
      engine.ParallelFor(10'000, 100, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) values[i] += round;
      });
      sum = std::accumulate(values.begin(), values.end(), 0L);
    });
    engine.WaitForVar(x);
    ASSERT_EQ(sum, 10'000L * round * (round + 1) / 2);
  }
}

TEST_P(ParallelForTest, TheExceptionOfABlockComesOutOnceAllStartedBlocksHaveEnded) {
  Engine engine(GetParam().options);
  for (int bad = 0; bad < 20; ++bad) {
    std::atomic<int> running = 0, started = 0;
    const std::string message = MessageOf<std::runtime_error>([&] {
      engine.ParallelFor(20, 1, [&](std::int64_t begin, std::int64_t) {
        ++started;
        ++running;
        std::this_thread::yield();
        --running;
        if (begin == bad) throw std::runtime_error("block " + std::to_string(begin));
      });
    });
    EXPECT_EQ(message, "block " + std::to_string(bad));
    EXPECT_EQ(running.load(), 0);
    EXPECT_LE(started.load(), 20);
  }
  // One of several: any of them, whole.
  EXPECT_THROW(engine.ParallelFor(100, 1, [](std::int64_t, std::int64_t) { throw 5; }), int);
}

TEST_P(ParallelForTest, AnExceptionInsideAnOpFailsTheOp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  engine.Push({.name = "splits", .writes = {x}}, [&] {
    engine.ParallelFor(50, 1, [](std::int64_t begin, std::int64_t) {
      if (begin == 33) throw std::runtime_error("block 33");
    });
  });
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(x); }), "block 33");
  EXPECT_EQ(engine.FailureOf(x)->op, "splits");
}

TEST_P(ParallelForTest, ItNestsAndRunsInManyOpsAtOnce) {
  Engine engine(GetParam().options);
  std::atomic<long> sum = 0;
  for (int op = 0; op < 50; ++op) {
    engine.Push({.name = "outer"}, [&] {
      engine.ParallelFor(4, 1, [&](std::int64_t, std::int64_t) {
        engine.ParallelFor(8, 2, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
      });
    });
  }
  engine.ParallelFor(10, 1, [&](std::int64_t, std::int64_t) {
    engine.ParallelFor(10, 1, [&](std::int64_t, std::int64_t) { ++sum; });
  });
  engine.WaitForAll();
  EXPECT_EQ(sum.load(), 50 * 32 + 100);
}

TEST_P(ParallelForTest, SeveralThreadsMayCallIt) {
  Engine engine(GetParam().options);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        std::atomic<int> sum = 0;
        engine.ParallelFor(100, 7, [&](std::int64_t begin, std::int64_t end) {
          sum += static_cast<int>(end - begin);
        });
        ASSERT_EQ(sum.load(), 100);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The workers may all be busy with something else for ever: the caller does the blocks itself.
TEST_P(ParallelForTest, ItNeedsNoIdleWorker) {
  Engine engine(GetParam().options);
  std::vector<std::unique_ptr<Blocker>> blockers;
  if (GetParam().options.type == "threaded") blockers.push_back(std::make_unique<Blocker>(engine));
  EXPECT_EQ(BlocksOf(engine, 100, 3), ExpectedBlocks(100, 3));
}

TEST_P(ParallelForTest, BlocksOfAnOpMayPushButNotWait) {
  Engine engine(GetParam().options);
  std::atomic<int> refused = 0, runs = 0;
  engine.Push({.name = "splits"}, [&] {
    engine.ParallelFor(20, 1, [&](std::int64_t, std::int64_t) {
      engine.Push({.name = "child"}, [&] { ++runs; });
      try {
        engine.WaitForAll();
      } catch (const InvalidState&) {
        ++refused;
      }
    });
  });
  engine.WaitForAll();
  EXPECT_EQ(refused.load(), 20);
  EXPECT_EQ(runs.load(), 20);
}

// Who waits for an op has a CPU. With a worker in the op there is a place for one more body, which
// any thread may take; so often enough it is the one that waits.
TEST_P(ParallelForTest, AThreadThatWaitsForAnOpHelpsWithItsBlocks) {
  const EngineOptions& options = GetParam().options;
  if (options.type != "threaded" || options.num_workers < 2) GTEST_SKIP() << "nobody else may help";
  Engine engine(options);
  const Var x = engine.NewVar("x");
  const auto helps = [&](const std::function<void()>& wait) {
    for (int round = 0; round < 100; ++round) {
      std::mutex mutex;
      std::set<std::thread::id> threads;
      std::atomic<bool> started = false;
      engine.Push({.name = "splits", .writes = {x}}, [&] {
        started = true;
        // Nothing tells that the other thread has got into its wait.
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        engine.ParallelFor(32, 1, [&](std::int64_t, std::int64_t) {
          const std::lock_guard lock(mutex);
          threads.insert(std::this_thread::get_id());
          // Or this thread would have taken all before another one comes.
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        });
      });
      while (!started) std::this_thread::yield();  // or the wait would run the op
      wait();
      if (threads.contains(std::this_thread::get_id())) return true;
    }
    return false;
  };
  EXPECT_TRUE(helps([&] { engine.WaitForVar(x); }));
  EXPECT_TRUE(helps([&] { engine.WaitForAll(); }));
  const Var copy = engine.NewVar("copy");
  EXPECT_TRUE(helps([&] {
    engine.Push({.name = "copies", .reads = {x}, .writes = {copy}}, [] {});
    engine.WaitForVar(copy);
  }));
}

// What an op that it ran has made ready does not wait for the block that it helps with then.
TEST_P(ParallelForTest, AWaitThatHelpsKeepsNoReadyOpFromOthers) {
  EngineOptions options = GetParam().options;
  if (options.type != "threaded" || options.num_workers < 2) GTEST_SKIP() << "nobody else may help";
  options.num_workers = 3;
  for (int round = 0; round < 20; ++round) {
    Engine engine(options);
    const Var a = engine.NewVar("a"), b = engine.NewVar("b");
    std::latch x_started(1), y_waits(1), helped(1), helper_may_end(1), splitter_may_end(1);
    std::atomic<bool> is_split = false;
    Blocker blocker(engine);
    engine.Push({.name = "splits"}, [&] {
      x_started.wait();
      const auto own = std::this_thread::get_id();
      engine.ParallelFor(2, 1, [&](std::int64_t, std::int64_t) {
        if (std::this_thread::get_id() == own) {
          is_split = true;
          splitter_may_end.wait();
        } else {
          helped.count_down();
          helper_may_end.wait();
        }
      });
    });
    std::thread waiter([&] {
      engine.Push({.name = "x", .writes = {a}}, [&] {
        x_started.count_down();
        y_waits.wait();
        while (!is_split) std::this_thread::yield();
      });
      engine.Push({.name = "y", .reads = {a}, .writes = {b}}, [] {});
      engine.WaitForAll();
    });
    x_started.wait();
    EXPECT_EQ(engine.stats().done, 0u);  // and what was pushed is looked at, so that y waits for x
    y_waits.count_down();
    helped.wait();
    blocker.Release();
    EXPECT_NO_THROW(engine.WaitForVar(b, kSoon));
    helper_may_end.count_down();
    splitter_may_end.count_down();
    waiter.join();
  }
}

// There are blocks for years, until the thread that waits says that it is enough: a wait that
// helped on and on would not come back to say so.
TEST_P(ParallelForTest, AWaitThatHelpsEndsAtItsDeadlineAndByItsCheck) {
  if (GetParam().options.type != "threaded") GTEST_SKIP() << "the wait runs the op itself";
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::atomic<bool> started = false, enough = false;
  engine.Push({.name = "splits", .writes = {x}}, [&] {
    started = true;
    engine.ParallelFor(std::int64_t{1} << 40, 1, [&](std::int64_t, std::int64_t) {
      if (enough) throw std::runtime_error("enough");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the work of a block
    });
  });
  while (!started) std::this_thread::yield();
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(20)), TimeoutError);
  EXPECT_THROW(engine.WaitForAll(std::chrono::milliseconds(20)), TimeoutError);
  {
    struct Left {};
    const WaitCheckScope checked(std::chrono::milliseconds(5), [] { throw Left(); });
    EXPECT_THROW(engine.WaitForVar(x), Left);
    EXPECT_THROW(engine.WaitForAll(), Left);
  }
  enough = true;
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { engine.WaitForVar(x); }), "enough");
}

// It is over sooner each time than the check is due.
TEST_P(ParallelForTest, AWaitThatHelpsAgainAndAgainMakesItsCheck) {
  if (GetParam().options.type != "threaded") GTEST_SKIP() << "the wait runs the op itself";
  struct Left {};
  for (const int round : {0, 1, 2, 3}) {
    const bool all = round % 2 == 0;
    const std::chrono::milliseconds block(round / 2);  // the work of a block
    Engine engine(GetParam().options);
    const Var x = engine.NewVar("x");
    std::atomic<bool> left = false, ended = false;
    std::latch started(1);
    engine.Push({.name = "splits", .writes = {x}}, [&] {
      started.count_down();
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (!left && std::chrono::steady_clock::now() < end) {
        engine.ParallelFor(4, 1, [&](std::int64_t, std::int64_t) {
          if (block.count() > 0) std::this_thread::sleep_for(block);
        });
      }
      ended = true;
    });
    started.wait();
    {
      const WaitCheckScope checked(std::chrono::milliseconds(20), [] { throw Left(); });
      if (all) {
        EXPECT_THROW(engine.WaitForAll(), Left);
      } else {
        EXPECT_THROW(engine.WaitForVar(x), Left);
      }
    }
    EXPECT_FALSE(ended);
    left = true;
    engine.WaitForAll();
  }
}

TEST_P(ParallelForTest, BadArgumentsAreRefused) {
  Engine engine(GetParam().options);
  const auto body = [](std::int64_t, std::int64_t) { ADD_FAILURE() << "it ran"; };
  EXPECT_THROW(engine.ParallelFor(10, 0, body), InvalidArgument);
  EXPECT_THROW(engine.ParallelFor(10, -1, body), InvalidArgument);
  EXPECT_THROW(engine.ParallelFor(-1, 1, body), InvalidArgument);
  EXPECT_THROW(engine.ParallelFor(10, 1, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace heddle::engine_test
