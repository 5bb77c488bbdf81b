// Order: per variable, accesses take effect in the order of the pushes, whoever pushed.
#include <heddle/engine.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

class OrderTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, OrderTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(OrderTest, WritesOfOneVarRunInPushOrder) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::vector<int> order;
  for (int i = 0; i < 2000; ++i) {
    engine.Push({.name = "write", .writes = {x}}, [&order, i] { order.push_back(i); });
  }
  engine.WaitForVar(x);
  ASSERT_EQ(order.size(), 2000u);
  for (int i = 0; i < 2000; ++i) ASSERT_EQ(order[i], i);
}

TEST_P(OrderTest, AReadNeverOvertakesAWriteNorAWriteAReadQueuedBefore) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  constexpr int kBlocks = 300;
  int value = -1;
  std::array<std::array<int, 4>, kBlocks> seen{};
  {
    Hold hold(engine, {.name = "hold", .writes = {x}});  // so that all of it is pending at once
    for (int i = 0; i < kBlocks; ++i) {
      engine.Push({.name = "write", .writes = {x}}, [&value, i] { value = i; });
      for (int reader = 0; reader < 4; ++reader) {
        // Priorities must not reorder what a variable orders.
        engine.Push({.name = "read", .reads = {x}, .priority = i * reader},
                    [&value, &out = seen[i][reader]] { out = value; });
      }
    }
  }
  engine.WaitForReadsAndWrites(x);
  for (int i = 0; i < kBlocks; ++i) {
    for (int reader = 0; reader < 4; ++reader) ASSERT_EQ(seen[i][reader], i);
  }
}

TEST_P(OrderTest, AWriteRunsAlone) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::atomic<int> readers = 0, writers = 0, violations = 0;
  for (int i = 0; i < 3000; ++i) {
    if (i % 4 == 0) {
      engine.Push({.name = "write", .writes = {x}}, [&] {
        if (writers.fetch_add(1, std::memory_order_relaxed) != 0) ++violations;
        if (readers.load(std::memory_order_relaxed) != 0) ++violations;
        std::this_thread::yield();
        if (readers.load(std::memory_order_relaxed) != 0) ++violations;
        writers.fetch_sub(1, std::memory_order_relaxed);
      });
    } else {
      engine.Push({.name = "read", .reads = {x}}, [&] {
        readers.fetch_add(1, std::memory_order_relaxed);
        if (writers.load(std::memory_order_relaxed) != 0) ++violations;
        std::this_thread::yield();
        readers.fetch_sub(1, std::memory_order_relaxed);
      });
    }
  }
  engine.WaitForAll();
  EXPECT_EQ(violations.load(), 0);
}

TEST_P(OrderTest, AVarSeveralTimesInTheListsCountsOnce) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  int runs = 0;
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "write", .writes = {x, x, x}}, [&] { ++runs; });
    engine.Push({.name = "modify", .reads = {x, y, x}, .writes = {x, x}}, [&] { ++runs; });
    engine.Push({.name = "read", .reads = {x, x, x, x, x, x}, .writes = {y}}, [&] { ++runs; });
    engine.Push({.name = "both", .reads = {y, x}, .writes = {x, y}}, [&] { ++runs; });
  }
  engine.WaitForAll();
  EXPECT_EQ(runs, 400);
  EXPECT_EQ(engine.version(x), 300u);
  EXPECT_EQ(engine.version(y), 200u);
}

TEST_P(OrderTest, TicketsRiseInTheOrderOfTheVariables) {
  constexpr int kThreads = 3;
  constexpr int kPushes = 300;
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::array<std::vector<std::uint64_t>, kThreads> tickets;
  std::vector<std::pair<int, int>> order;  // thread and push, as the ops have run
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kPushes; ++i) {
        const auto note = [&order, thread, i] { order.emplace_back(thread, i); };
        const OpOptions options{.name = "note", .writes = {x}, .start_inline = i % 4 == 0};
        tickets[thread].push_back(i % 2 == 0 ? engine.PushAsync(options,
                                                                [note](const Completion& done) {
                                                                  note();
                                                                  done();
                                                                })
                                             : engine.Push(options, note));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  engine.WaitForVar(x);
  ASSERT_EQ(order.size(), static_cast<std::size_t>(kThreads * kPushes));
  for (std::size_t i = 1; i < order.size(); ++i) {
    const auto ticket_of = [&](const std::pair<int, int>& op) {
      return tickets[op.first][op.second];
    };
    ASSERT_LT(ticket_of(order[i - 1]), ticket_of(order[i])) << "op " << i;
  }
  Hold hold(engine, {.name = "hold", .writes = {x}});
  const std::uint64_t ticket = engine.Push({.name = "named", .reads = {x}}, [] {});
  EXPECT_TRUE(Contains(engine.DumpState(), "#" + std::to_string(ticket) + " 'named'"));
}

TEST_P(OrderTest, AReadModifyIsOrderedAsAWrite) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  long sum =
      0;  // not atomic: two at a time would lose updates, and the thread sanitizer would see it
  for (int i = 1; i <= 1000; ++i) {
    engine.Push({.name = "add", .reads = {x}, .writes = {x}},
                [&sum, i] { sum = 3 * sum % 1009 + i; });
  }
  engine.WaitForVar(x);
  long expected = 0;
  for (int i = 1; i <= 1000; ++i) expected = 3 * expected % 1009 + i;
  EXPECT_EQ(sum, expected);
}

TEST_P(OrderTest, AnOpMayNameHundredsOfVars) {
  Engine engine(GetParam().options);
  std::vector<Var> all, even, odd;
  std::vector<int> values(300, 0);
  for (int i = 0; i < 300; ++i) {
    all.push_back(engine.NewVar());
    (i % 2 == 0 ? even : odd).push_back(all.back());
  }
  for (int i = 0; i < 300; ++i) {
    engine.Push({.name = "one", .writes = {all[i]}}, [&values, i] { values[i] = i; });
  }
  const std::vector<Var> once = even;
  even.insert(even.end(), once.begin(), once.end());  // each twice
  long sum = 0;
  engine.Push({.name = "even_to_odd", .reads = even, .writes = odd}, [&] {
    for (int i = 0; i < 300; i += 2) values[i + 1] += values[i];
  });
  engine.Push({.name = "sum", .reads = all}, [&] {
    for (const int value : values) sum += value;
  });
  for (int i = 0; i < 300; ++i) {
    engine.Push({.name = "clear", .writes = {all[i]}}, [&values, i] { values[i] = 0; });
  }
  engine.WaitForAll();
  EXPECT_EQ(sum, 299 * 300 / 2 + 298 * 150 / 2);
  for (const Var& var : odd) EXPECT_EQ(engine.version(var), 3u);
  for (const Var& var : even) EXPECT_EQ(engine.version(var), 2u);
}

TEST_P(OrderTest, ALongListMayNameAVarSeveralTimesAndInBothLists) {
  Engine engine(GetParam().options);
  std::vector<Var> all;
  for (int i = 0; i < 40; ++i) all.push_back(engine.NewVar());
  std::vector<Var> reads = all;
  reads.insert(reads.end(), all.begin(), all.end());
  std::vector<Var> writes(all.begin(), all.begin() + 20);
  writes.insert(writes.end(), all.begin() + 10, all.begin() + 30);
  int runs = 0;  // not atomic: all write the same variables
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "both", .reads = reads, .writes = writes}, [&runs] { ++runs; });
  }
  engine.Push({.name = "fail", .reads = reads, .writes = writes},
              [] { throw std::runtime_error("failed"); });
  for (int i = 0; i < 40; ++i) {
    if (i < 30) {
      EXPECT_THROW(engine.WaitForVar(all[i]), std::runtime_error);
    } else {
      engine.WaitForVar(all[i]);
    }
    EXPECT_EQ(engine.version(all[i]), i < 30 ? 101U : 0U);
  }
  EXPECT_EQ(runs, 100);
}

TEST_P(OrderTest, DroppedHandlesDoNotDisturbPushedOps) {
  Engine engine(GetParam().options);
  int value = 0;
  {
    auto hold = std::make_unique<Hold>(engine, OpOptions{.name = "hold"});
    Var x = engine.NewVar("x");
    const Var gate = engine.NewVar("gate");
    Hold gate_hold(engine, {.name = "hold", .writes = {gate}});
    engine.Push({.name = "first", .reads = {gate}, .writes = {x}}, [&] { value = 1; });
    engine.Push({.name = "second", .reads = {x}, .writes = {x}}, [&] { value = value * 10 + 2; });
    x = Var();
  }
  engine.WaitForAll();
  EXPECT_EQ(value, 12);
}

TEST_P(OrderTest, AFreshVarKnowsNothingOfDroppedOnes) {
  LogCapture log;  // keeps the many errors that nobody sees off the terminal
  Engine engine(GetParam().options);
  for (int i = 0; i < 500; ++i) {
    const Var x = engine.NewVar("fresh");
    ASSERT_EQ(engine.version(x), 0u);
    ASSERT_FALSE(engine.FailureOf(x).has_value());
    engine.Push({.name = "fail", .writes = {x}}, [] { throw std::runtime_error("old"); });
    if (i % 2 == 0) {
      EXPECT_THROW(engine.WaitForVar(x), std::runtime_error);
    }
  }
}

// Threads that push ops over the same variables in opposite list orders: an engine that takes the
// variables one by one deadlocks, or lets the ops pass each other on one of them. A long run, so
// that each pair of threads pushes at once very often; HEDDLE_TEST_ROUNDS makes it longer.
TEST_P(OrderTest, OppositeListOrdersFromSeveralThreadsNeitherDeadlockNorDisagree) {
  for (const int threads : {2, 4, 8}) {
    SCOPED_TRACE(std::to_string(threads) + " threads");
    EngineOptions options = GetParam().options;
    options.max_pending_ops = 1000;
    Engine engine(options);
    const int kOps = Rounds(240'000) / threads;
    const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
    std::int64_t in_x = 0, in_y = 0, in_z = 0, disagreements = 0;
    std::atomic<std::int64_t> torn = 0;
    std::latch all_there(threads);
    std::vector<std::thread> pushers;
    for (int thread = 0; thread < threads; ++thread) {
      pushers.emplace_back([&, thread] {
        const auto write = [&] {
          if (in_x != in_y || in_y != in_z) ++disagreements;
          ++in_x, ++in_y, ++in_z;
        };
        const auto read = [&] {
          if (in_x != in_y || in_y != in_z) ++torn;
        };
        all_there.arrive_and_wait();
        for (int i = 0; i < kOps; ++i) {
          const bool forward = thread % 2 == 0;
          if (i % 16 == 0) {
            engine.Push({.name = "look", .reads = forward ? VarList{x, y, z} : VarList{z, y, x}},
                        read);
          } else if (forward) {
            engine.Push({.name = "forward", .reads = {x, y, z}, .writes = {x, y, z}}, write);
          } else {
            engine.Push({.name = "backward", .reads = {z, x}, .writes = {z, y, x}}, write);
          }
          if (i % 5000 == 0) engine.WaitForVar(forward ? x : z);
        }
      });
    }
    for (std::thread& pusher : pushers) pusher.join();
    engine.WaitForAll();
    EXPECT_EQ(disagreements, 0);
    EXPECT_EQ(torn.load(), 0);
    EXPECT_EQ(in_x, std::int64_t{threads} * (kOps - (kOps + 15) / 16));
  }
}

// Each thread overwrites its variable, raises a flag, and reads the other's once that flag is up.
// An engine that keeps only each pusher's own order misses some of them.
TEST_P(OrderTest, AnOpPushedAfterAnotherThreadsPushWasSignalledRunsAfterIt) {
  Engine engine(GetParam().options);
  const int kRounds = Rounds(4'000);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  int in_x = -1, in_y = -1;
  std::vector<int> y_seen(kRounds), x_seen(kRounds);
  std::atomic<int> x_pushed = -1, y_pushed = -1;
  const auto wait_until = [](std::atomic<int>& flag, int round) {
    while (flag.load(std::memory_order_acquire) < round) std::this_thread::yield();
  };
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      wait_until(x_pushed, i);  // pushed: in_x = i
      engine.Push({.name = "read_x", .reads = {x}}, [&, i] { x_seen[i] = in_x; });
      engine.Push({.name = "write_y", .writes = {y}}, [&, i] { in_y = i; });
      y_pushed.store(i, std::memory_order_release);
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    engine.Push({.name = "write_x", .writes = {x}}, [&, i] { in_x = i; });
    x_pushed.store(i, std::memory_order_release);
    wait_until(y_pushed, i);  // pushed: reads of round i, in_y = i
    engine.Push({.name = "read_y", .reads = {y}}, [&, i] { y_seen[i] = in_y; });
  }
  other.join();
  engine.WaitForAll();
  for (int i = 0; i < kRounds; ++i) {
    ASSERT_EQ(x_seen[i], i);
    ASSERT_EQ(y_seen[i], i);
  }
}

TEST_P(OrderTest, PushesFromInsideOpsComeAfterWhatWasPushedBeforeTheOp) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::vector<int> order;
  engine.Push({.name = "first", .writes = {x}}, [&] { order.push_back(1); });
  engine.Push({.name = "parent", .writes = {x}}, [&] {
    engine.Push({.name = "child", .writes = {x}}, [&] {
      order.push_back(3);
      engine.Push({.name = "grandchild", .writes = {x}}, [&] { order.push_back(4); });
    });
    order.push_back(2);  // the child writes x, so it waits for its parent
  });
  engine.WaitForAll();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 4}));
}

TEST_P(OrderTest, WhatAnOpWroteIsVisibleToTheWaiterWithoutFurtherSynchronisation) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  std::vector<int> data(64);
  for (int round = 0; round < 300; ++round) {
    engine.Push({.name = "write", .writes = {x}}, [&data, round] { data.assign(64, round); });
    engine.WaitForVar(x);
    ASSERT_EQ(data[round % 64], round);
    data.assign(64, -1);  // nothing pending may read or write it now
  }
}

// Plain threads are there for certain; oneTBB may have no more threads than there are CPUs.
TEST(ThreadedOrderTest, ReadsBetweenTwoWritesRunTogether) {
  EngineOptions options;
  options.worker_host = WorkerHost::kThreads;
  options.num_workers = 2;
  Engine engine(options);
  const Var x = engine.NewVar("x");
  std::latch both(2);
  engine.Push({.name = "write", .writes = {x}}, [] {});
  for (int i = 0; i < 2; ++i) {
    engine.Push({.name = "read", .reads = {x}}, [&] { both.arrive_and_wait(); });
  }
  both.wait();  // not a wait of the engine: this thread must not stand in for a worker
  engine.WaitForAll();
}

TEST(ThreadedOrderTest, UnrelatedOpsRunTogether) {
  EngineOptions options;
  options.worker_host = WorkerHost::kThreads;
  options.num_workers = 4;
  Engine engine(options);
  std::latch all(4);
  for (int i = 0; i < 4; ++i) {
    engine.Push({.name = "meet", .writes = {engine.NewVar()}}, [&] { all.arrive_and_wait(); });
  }
  all.wait();
  engine.WaitForAll();
}

}  // namespace
}  // namespace heddle::engine_test
