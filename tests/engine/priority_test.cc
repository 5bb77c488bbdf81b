// Priority: a worker that becomes free takes the ready op of highest priority, the oldest among
// equals; ageing bounds how often an op is overtaken. One worker, held up while the ops are pushed,
// so that the order in which they run is exact. No wait of the engine runs meanwhile: waiters may
// help.
#include <heddle/engine.h>

#include <algorithm>
#include <barrier>
#include <climits>
#include <cstdint>
#include <functional>
#include <latch>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine/inbox.h"
#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

class PriorityTest : public EveryEngine {
 protected:
  static EngineOptions Options(int ageing) {
    EngineOptions options = GetParam().options;
    options.ageing = ageing;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(OneWorker, PriorityTest, testing::ValuesIn(ThreadedConfigs(1)),
                         ConfigLabel);

// The order in which ops of these priorities run if all are ready when the worker becomes free.
std::vector<int> OrderOf(Engine& engine, const std::vector<int>& priorities,
                         bool vary_device = false) {
  std::vector<int> order;
  std::latch done(static_cast<std::ptrdiff_t>(priorities.size()));
  Blocker blocker(engine);
  for (int i = 0; i < static_cast<int>(priorities.size()); ++i) {
    OpOptions options{.name = "ranked", .priority = priorities[i]};
    if (vary_device) {
      options.device = Cpu(i % 4);
      options.lane = static_cast<Lane>(i % 3);
    }
    engine.Push(options, [&, i] {
      order.push_back(i);
      done.count_down();
    });
  }
  blocker.Release();
  done.wait();
  return order;
}

// An engine may look at pushes as late as it likes; to list all that is pending it must know them
// all.
void KnowAll(const Engine& engine) { EXPECT_FALSE(engine.DumpState().empty()); }

std::vector<int> ExpectedOrder(const std::vector<int>& priorities) {
  std::vector<int> order(priorities.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return priorities[a] > priorities[b]; });
  return order;
}

TEST_P(PriorityTest, ReadyOpsRunByPriorityAndTheOldestFirstAmongEquals) {
  std::mt19937_64 random(BaseSeed());
  for (int round = 0; round < Rounds(20); ++round) {
    Engine engine(Options(/*ageing=*/0));
    const int spread = std::vector{1, 2, 10, 2000}[round % 4];
    std::vector<int> priorities(1000);
    for (int& priority : priorities) priority = static_cast<int>(random() % spread) - spread / 2;
    ASSERT_EQ(OrderOf(engine, priorities), ExpectedOrder(priorities));
    ASSERT_EQ(OrderOf(engine, priorities), ExpectedOrder(priorities));  // and once more, warm
  }
}

TEST_P(PriorityTest, PrioritiesThatWereInUseBeforeDoNotMatter) {
  std::mt19937_64 random(BaseSeed());
  Engine engine(Options(/*ageing=*/0));
  for (int round = 0; round < Rounds(40); ++round) {
    // Of many at once, then of a few far apart, and the other way round.
    const int used = std::vector{600, 3, 40, 2}[round % 4];
    std::vector<int> priorities(700);
    for (int& priority : priorities) priority = static_cast<int>(random() % used) * (600 / used);
    ASSERT_EQ(OrderOf(engine, priorities), ExpectedOrder(priorities)) << "round " << round;
  }
}

TEST_P(PriorityTest, TheWholeRangeOfIntCounts) {
  Engine engine(Options(/*ageing=*/0));
  const std::vector<int> priorities = {0,           INT_MIN,     INT_MAX, -1,     1,
                                       INT_MAX - 1, INT_MIN + 1, 0,       70'000, 65'536,
                                       65'535,      -70'000,     INT_MAX, INT_MIN};
  EXPECT_EQ(OrderOf(engine, priorities), ExpectedOrder(priorities));
}

// Layers of a network, one round after another: mostly each op is below the one before it.
std::vector<int> MostlyFalling(std::mt19937_64& random, int count, int step_max) {
  std::vector<int> priorities;
  std::int64_t priority = 0;
  for (int i = 0; i < count; ++i) {
    const bool rises = random() % 32 == 0;
    priority += rises ? static_cast<std::int64_t>(random() % (20 * std::int64_t{step_max}))
                      : -static_cast<std::int64_t>(random() % step_max);
    priorities.push_back(static_cast<int>(std::clamp<std::int64_t>(priority, INT_MIN, INT_MAX)));
    if (rises && random() % 8 == 0) priority = 0;
  }
  return priorities;
}

TEST_P(PriorityTest, FallingPrioritiesWithSomeThatRise) {
  std::mt19937_64 random(BaseSeed());
  Engine engine(Options(/*ageing=*/0));
  // The inbox' first lap ends on the way.
  for (std::uint64_t i = engine::Inbox::kSlots - 5000; i > 0; --i) {
    engine.Push({.name = "filler"}, [] {});
  }
  engine.WaitForAll();
  for (int round = 0; round < Rounds(60); ++round) {
    const int step_max = std::vector{1, 2, 40, 3000, 50'000'000}[round % 5];
    const std::vector<int> priorities = MostlyFalling(random, 600, step_max);
    ASSERT_EQ(OrderOf(engine, priorities), ExpectedOrder(priorities))
        << "seed " << BaseSeed() << ", round " << round;
  }
}

// Variables that go between pushes leave messages among the ops.
TEST_P(PriorityTest, DroppedVariablesAmongFallingPriorities) {
  std::mt19937_64 random(BaseSeed());
  Engine engine(Options(/*ageing=*/0));
  for (int round = 0; round < Rounds(60); ++round) {
    const int step_max = std::vector{2, 40, 3000}[round % 3];
    const std::vector<int> priorities = MostlyFalling(random, 300, step_max);
    std::vector<int> order;
    std::latch done(static_cast<std::ptrdiff_t>(priorities.size()));
    {
      Blocker blocker(engine);
      for (int i = 0; i < static_cast<int>(priorities.size()); ++i) {
        for (auto drops = random() % 4; drops > 1; --drops) engine.NewVar("dropped");
        engine.Push({.name = "ranked", .priority = priorities[i]}, [&, i] {
          order.push_back(i);
          done.count_down();
        });
      }
    }
    done.wait();
    ASSERT_EQ(order, ExpectedOrder(priorities)) << "seed " << BaseSeed() << ", round " << round;
  }
}

// What runs pushes further ops, so that each choice is made among other ones.
TEST_P(PriorityTest, OpsPushedByBodiesTakeTheirPlace) {
  std::mt19937_64 random(BaseSeed());
  for (int round = 0; round < Rounds(40); ++round) {
    constexpr int kOps = 1500;
    const std::vector<int> priorities =
        MostlyFalling(random, kOps, std::vector{1, 3, 100}[round % 3]);
    std::vector<int> children(kOps);  // of each op, in the order in which they run
    for (int& count : children) count = static_cast<int>(random() % 3);

    // One by one: the highest priority, of these the first pushed.
    std::vector<int> expected;
    std::set<std::pair<std::int64_t, int>> ready;
    int pushed = 0;
    const auto push_some = [&](int count, const auto& push) {
      for (; count > 0 && pushed < kOps; --count) push(pushed++);
    };
    const auto get_ready = [&](int op) { ready.emplace(-std::int64_t{priorities[op]}, op); };
    push_some(20, get_ready);
    while (!ready.empty()) {
      const int op = ready.begin()->second;
      ready.erase(ready.begin());
      push_some(children[expected.size()], get_ready);
      expected.push_back(op);
    }

    Engine engine(Options(/*ageing=*/0));
    std::vector<int> order;
    std::latch done(static_cast<std::ptrdiff_t>(expected.size()));
    pushed = 0;
    std::function<void(int)> push = [&](int op) {
      engine.Push({.name = "ranked", .priority = priorities[op]}, [&, op] {
        push_some(children[order.size()], push);
        order.push_back(op);
        done.count_down();
      });
    };
    {
      Blocker blocker(engine);
      push_some(20, push);
    }
    done.wait();
    ASSERT_EQ(order, expected) << "seed " << BaseSeed() << ", round " << round;
  }
}

// Each thread's priorities fall; where one's op lies beside the other's they may rise.
TEST_P(PriorityTest, ThreadsWhosePrioritiesFallEachBySteps) {
  std::mt19937_64 random(BaseSeed());
  Engine engine(Options(/*ageing=*/0));
  for (int round = 0; round < Rounds(100); ++round) {
    constexpr int kThreads = 3;
    constexpr int kOpsEach = 100;
    std::vector<int> order, expected;
    std::latch done(kThreads * kOpsEach);
    {
      Blocker blocker(engine);
      std::barrier start(kThreads);
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < kThreads; ++thread) {
        std::vector<int> priorities;
        int step = 0;
        for (int i = 0; i < kOpsEach; ++i) {
          step += static_cast<int>(random() % 3);
          priorities.push_back(-step * kThreads - thread);  // no other thread's
        }
        expected.insert(expected.end(), priorities.begin(), priorities.end());
        threads.emplace_back([&, priorities] {
          start.arrive_and_wait();
          for (const int priority : priorities) {
            engine.Push({.name = "ranked", .priority = priority}, [&, priority] {
              order.push_back(priority);
              done.count_down();
            });
          }
        });
      }
    }
    done.wait();
    std::ranges::sort(expected, std::greater<>());
    ASSERT_EQ(order, expected) << "seed " << BaseSeed() << ", round " << round;
  }
}

TEST_P(PriorityTest, AllCpuDevicesAndLanesShareOneOrder) {
  Engine engine(Options(/*ageing=*/0));
  std::mt19937_64 random(BaseSeed());
  std::vector<int> priorities(200);
  for (int& priority : priorities) priority = static_cast<int>(random() % 50);
  EXPECT_EQ(OrderOf(engine, priorities, /*vary_device=*/true), ExpectedOrder(priorities));
}

// Ops that one finished op makes ready together compete by priority, too, also with those ready
// before.
TEST_P(PriorityTest, OpsThatBecomeReadyTogetherRunByPriority) {
  Engine engine(Options(/*ageing=*/0));
  const Var x = engine.NewVar("x");
  std::vector<int> order;
  std::latch done(9);
  Blocker blocker(engine, {.name = "blocker", .writes = {x}});
  const auto push = [&](OpOptions options) {
    const int priority = options.priority;
    engine.Push(options, [&, priority] {
      order.push_back(priority);
      done.count_down();
    });
  };
  for (const int priority : {4, 2, 8, 6})
    push({.name = "blocked", .reads = {x}, .priority = priority});
  for (const int priority : {3, 9, 1, 7, 5}) push({.name = "free", .priority = priority});
  KnowAll(engine);
  blocker.Release();
  done.wait();
  EXPECT_EQ(order, (std::vector<int>{9, 8, 7, 6, 5, 4, 3, 2, 1}));
}

// What arrives while others wait in the ready queue is considered at the next pick.
TEST_P(PriorityTest, AnUrgentOpPushedLaterRunsNext) {
  Engine engine(Options(/*ageing=*/0));
  std::vector<int> order;
  std::latch done(102);
  Blocker blocker(engine);
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "ordinary", .priority = 0}, [&, i] {
      order.push_back(i);
      if (i == 30) {
        engine.Push({.name = "urgent", .priority = 5}, [&] {
          order.push_back(1000);
          done.count_down();
        });
        engine.Push({.name = "patient", .priority = -5}, [&] {
          order.push_back(2000);
          done.count_down();
        });
      }
      done.count_down();
    });
  }
  blocker.Release();
  done.wait();
  std::vector<int> expected;
  for (int i = 0; i < 100; ++i) {
    expected.push_back(i);
    if (i == 30) expected.push_back(1000);
  }
  expected.push_back(2000);
  EXPECT_EQ(order, expected);
}

// A worker may go on with what it just made ready, but only a bounded number of times in a row, and
// never before something more urgent.
TEST_P(PriorityTest, AChainDoesNotKeepAnOlderEqualOpWaitingForLong) {
  Engine engine(Options(/*ageing=*/0));
  const Var x = engine.NewVar("x");
  constexpr int kLinks = 5000;
  int links = 0, links_before_older = -1;
  std::latch done(kLinks + 1);
  {
    Blocker blocker(engine, {.name = "blocker", .writes = {x}});
    engine.Push({.name = "first_link", .reads = {x}, .writes = {x}}, [&] {
      ++links;
      done.count_down();
    });
    engine.Push({.name = "older"}, [&] {
      links_before_older = links;
      done.count_down();
    });
    for (int i = 1; i < kLinks; ++i) {
      engine.Push({.name = "link", .reads = {x}, .writes = {x}}, [&] {
        ++links;
        done.count_down();
      });
    }
    KnowAll(engine);
  }
  done.wait();
  EXPECT_GE(links_before_older, 0);
  EXPECT_LE(links_before_older, 256);
}

TEST_P(PriorityTest, AChainDoesNotOvertakeAMoreUrgentOp) {
  Engine engine(Options(/*ageing=*/0));
  const Var x = engine.NewVar("x");
  constexpr int kLinks = 100;
  int links = 0, links_before_urgent = -1;
  std::latch done(kLinks + 1);
  {
    Blocker blocker(engine, {.name = "blocker", .writes = {x}});
    for (int i = 0; i < kLinks; ++i) {
      engine.Push({.name = "link", .reads = {x}, .writes = {x}}, [&] {
        ++links;
        done.count_down();
      });
    }
    engine.Push({.name = "urgent", .priority = 1}, [&] {
      links_before_urgent = links;
      done.count_down();
    });
    KnowAll(engine);
  }
  done.wait();
  EXPECT_EQ(links_before_urgent, 0);
}

TEST_P(PriorityTest, AnOpJustMadeReadyDoesNotOvertakeAMoreUrgentOne) {
  Engine engine(Options(/*ageing=*/0));
  const Var x = engine.NewVar("x");
  std::vector<int> order;
  std::latch done(3);
  {
    Blocker blocker(engine);
    const auto push = [&](const OpOptions& options) {
      engine.Push(options, [&order, &done, priority = options.priority] {
        order.push_back(priority);
        done.count_down();
      });
    };
    push({.name = "first", .writes = {x}, .priority = 2});
    push({.name = "made_ready_by_first", .reads = {x}, .priority = 0});
    push({.name = "second", .priority = 1});
    KnowAll(engine);
  }
  done.wait();
  EXPECT_EQ(order, (std::vector<int>{2, 1, 0}));
}

// What the running op has pushed lies in the inbox when it ends, beside the op that it made ready.
TEST_P(PriorityTest, AnOpJustMadeReadyDoesNotOvertakeAMoreUrgentOneThatWasJustPushed) {
  for (const int urgent : {-1, -2, -3}) {
    Engine engine(Options(/*ageing=*/0));
    const Var x = engine.NewVar("x");
    std::vector<int> order;
    std::latch done(3);
    const auto note = [&](int what) {
      order.push_back(what);
      done.count_down();
    };
    {
      Blocker blocker(engine);
      engine.Push({.name = "first", .writes = {x}, .priority = -2}, [&, urgent] {
        engine.Push({.name = "pushed", .priority = urgent}, [&] { note(2); });
        note(0);
      });
      engine.Push({.name = "made_ready_by_first", .reads = {x}, .priority = -2}, [&] { note(1); });
      KnowAll(engine);
    }
    done.wait();
    const bool overtakes = urgent > -2;
    EXPECT_EQ(order, overtakes ? (std::vector<int>{0, 2, 1}) : (std::vector<int>{0, 1, 2}));
  }
}

// An op of low priority runs once `ageing` more urgent ones have overtaken it, not before and not
// later.
TEST_P(PriorityTest, AnOpRunsNextOnceAgeingMoreUrgentOnesHaveOvertakenIt) {
  for (const int ageing : {1, 7, 100}) {
    Engine engine(Options(ageing));
    std::vector<int> priorities(1000, 1);
    priorities[0] = 0;
    const std::vector<int> order = OrderOf(engine, priorities);
    const auto low = std::ranges::find(order, 0) - order.begin();
    EXPECT_EQ(low, ageing);
    // The others keep their order.
    std::vector<int> rest = order;
    rest.erase(rest.begin() + low);
    EXPECT_TRUE(std::ranges::is_sorted(rest));
  }
}

TEST_P(PriorityTest, WithoutAgeingTheLeastUrgentRunsLast) {
  Engine engine(Options(/*ageing=*/0));
  std::vector<int> priorities(5000, 1);
  priorities[0] = 0;
  EXPECT_EQ(OrderOf(engine, priorities).back(), 0);
}

// Two ops that re-push themselves at high priority for ever would starve the low one without
// ageing.
TEST_P(PriorityTest, AgeingLetsLowPrioritiesThroughAnEndlessStreamOfUrgentOps) {
  Engine engine(Options(/*ageing=*/50));
  std::atomic<bool> low_ran = false;
  std::latch over(2);
  std::function<void()> again = [&] {
    if (low_ran) {
      over.count_down();
    } else {
      engine.Push({.name = "urgent", .priority = 10}, again);
    }
  };
  {
    Blocker blocker(engine);
    engine.Push({.name = "urgent", .priority = 10}, again);
    engine.Push({.name = "urgent", .priority = 10}, again);
    engine.Push({.name = "low", .priority = -10}, [&] { low_ran = true; });
  }
  over.wait();
  engine.WaitForAll();
  EXPECT_TRUE(low_ran);
}

// The low op lies among others of which each is pushed by the one before.
TEST_P(PriorityTest, AgeingCountsBelowZeroToo) {
  constexpr int kAgeing = 50;
  Engine engine(Options(kAgeing));
  int ran = 0, ran_before_low = 0;
  std::latch over(1);
  std::function<void()> again = [&] {
    if (++ran == 40 * kAgeing) {
      over.count_down();
    } else {
      engine.Push({.name = "high", .priority = -1}, again);
    }
  };
  {
    Blocker blocker(engine);
    engine.Push({.name = "high", .priority = -1}, again);
    engine.Push({.name = "low", .priority = -2}, [&] { ran_before_low = ran; });
  }
  over.wait();
  engine.WaitForAll();
  EXPECT_EQ(ran_before_low, kAgeing + 1) << "the first one was pushed before";
}

}  // namespace
}  // namespace heddle::engine_test
