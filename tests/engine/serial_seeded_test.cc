// What only the serial and the seeded engine promise: where and when their ops run, and that a seed
// gives the same order again.
#include <heddle/engine.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

EngineOptions Serial() {
  EngineOptions options;
  options.type = "serial";
  return options;
}

EngineOptions Seeded(std::uint64_t seed) {
  EngineOptions options;
  options.type = "seeded";
  options.seed = seed;
  return options;
}

TEST(SerialEngineTest, AnOpRunsInsidePushOnThePushingThread) {
  Engine engine(Serial());
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) {
    std::thread::id ran_on;
    engine.Push({.name = "op", .writes = {x}}, [&] { ran_on = std::this_thread::get_id(); });
    ASSERT_EQ(ran_on, std::this_thread::get_id());
    ASSERT_EQ(engine.version(x), static_cast<std::uint64_t>(i + 1));
  }
  std::thread([&] {
    std::thread::id ran_on;
    engine.Push({.name = "op", .writes = {x}}, [&] { ran_on = std::this_thread::get_id(); });
    ASSERT_EQ(ran_on, std::this_thread::get_id());
  }).join();
}

TEST(SerialEngineTest, NestedPushesQueueBehindTheRunningOpInPushOrder) {
  Engine engine(Serial());
  std::vector<std::string> order;
  engine.Push({.name = "parent"}, [&] {
    engine.Push({.name = "first"}, [&] {
      engine.Push({.name = "nested"}, [&] { order.push_back("nested"); });
      order.push_back("first");
    });
    engine.Push({.name = "second"}, [&] { order.push_back("second"); });
    order.push_back("parent");
  });
  EXPECT_EQ(order, (std::vector<std::string>{"parent", "first", "second", "nested"}));
}

// The order in which a seeded engine runs a fixed set of ops, some of them ordered by a variable.
std::vector<int> OrderOfSeed(std::uint64_t seed) {
  Engine engine(Seeded(seed));
  const Var x = engine.NewVar("x");
  std::vector<int> order;
  for (int i = 0; i < 40; ++i) {
    OpOptions options{.name = "op"};
    if (i % 5 == 0) options.writes = {x};
    if (i % 5 == 1) options.reads = {x};
    engine.Push(options, [&order, i] { order.push_back(i); });
  }
  engine.WaitForAll();
  return order;
}

TEST(SeededEngineTest, OpsRunOnlyInsideWaitsOnTheWaitingThread) {
  Engine engine(Seeded(1));
  const Var x = engine.NewVar("x");
  std::thread::id ran_on;
  engine.Push({.name = "op", .writes = {x}}, [&] { ran_on = std::this_thread::get_id(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // nothing else may run it meanwhile
  EXPECT_EQ(ran_on, std::thread::id());
  engine.WaitForVar(x);
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

TEST(SeededEngineTest, ASeedGivesTheSameOrderAgainAndSeedsDiffer) {
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int> order = OrderOfSeed(seed);
    EXPECT_EQ(order, OrderOfSeed(seed)) << seed;
    orders.insert(order);
  }
  EXPECT_GE(orders.size(), 15u);
}

// A completion from elsewhere is an event that the seed picks, too: it takes effect inside a wait.
TEST(SeededEngineTest, ForeignCompletionsQueueUntilAWaitPicksThem) {
  Engine engine(Seeded(1));
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "hold", .writes = {x}});
  bool ran = false;
  engine.Push({.name = "dependent", .reads = {x}}, [&] { ran = true; });
  EXPECT_THROW(engine.WaitForVar(x, std::chrono::milliseconds(10)), TimeoutError);
  std::thread([&] { hold.Release(); }).join();
  EXPECT_EQ(engine.version(x), 0u);
  EXPECT_FALSE(ran);
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 1u);
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace heddle::engine_test
