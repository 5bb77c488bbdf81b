// Priority: a worker that becomes free takes the ready op of highest priority, the oldest among
// equals; ageing bounds how often an op is overtaken. One worker, held up while the ops are pushed,
// so that the order in which they run is exact. No wait of the engine runs meanwhile: waiters may
// help.
#include <heddle/engine.h>

#include <algorithm>
#include <climits>
#include <latch>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace heddle::engine_test
