// What only the serial and the seeded engine promise: where and when their ops run, and that a seed
// gives the same order again.
#include <heddle/engine.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <latch>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"

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

// --- Both: while one thread is in a body all others wait for their turn ---

class WithoutWorkersTest : public EveryEngine {
 protected:
  static EngineOptions Bounded() {
    EngineOptions options = GetParam().options;
    options.max_pending_ops = 2;
    return options;
  }
};

std::vector<Config> ConfigsWithoutWorkers() {
  std::vector<Config> configs = AllConfigs();
  std::erase_if(configs, [](const Config& config) { return config.options.type == "threaded"; });
  return configs;
}

INSTANTIATE_TEST_SUITE_P(All, WithoutWorkersTest, testing::ValuesIn(ConfigsWithoutWorkers()),
                         ConfigLabel);

// A thread that is in the body of an op.
class BusyThread {
 public:
  explicit BusyThread(Engine& engine)
      : thread_([this, &engine] {
          const Var y = engine.NewVar("y");
          engine.Push({.name = "busy", .writes = {y}}, [this] {
            started_.count_down();
            released_.wait();
          });
          if (engine.options().type == "seeded") engine.WaitForVar(y);
        }) {
    started_.wait();
  }
  ~BusyThread() {
    released_.count_down();
    thread_.join();
  }
  BusyThread(const BusyThread&) = delete;
  BusyThread& operator=(const BusyThread&) = delete;

 private:
  std::latch started_{1};
  std::latch released_{1};
  std::thread thread_;
};

// Pushes an op, on the serial engine too, without waiting for one's turn to run it.
template <class Body>
void PushOnly(Engine& engine, const OpOptions& options, Body body) {
  const NoWaitScope no_wait;
  engine.Push(options, std::move(body));
}

TEST_P(WithoutWorkersTest, ADeadlineHoldsWhileAnotherThreadIsInABody) {
  constexpr std::chrono::milliseconds kShort(10);
  Engine engine(Bounded());
  const Var x = engine.NewVar("the_var");
  bool ran = false;
  {
    const BusyThread busy(engine);
    PushOnly(engine, {.name = "next", .writes = {x}}, [&] { ran = true; });
    const auto expect_late = [](const std::string& what, const std::function<void()>& call) {
      const std::string message = MessageOf<TimeoutError>(call);
      EXPECT_TRUE(Contains(message, what)) << message;
      EXPECT_TRUE(Contains(message, "'busy'")) << message;
    };
    expect_late("'the_var'", [&] { engine.WaitForVar(x, kShort); });
    expect_late("'the_var'", [&] { engine.WaitForReadsAndWrites(x, kShort); });
    expect_late("waiting for all ops", [&] { engine.WaitForAll(kShort); });
    expect_late("'pushed_late'", [&] {
      engine.Push(
          {.name = "pushed_late"}, [] { FAIL(); }, kShort);
    });
    expect_late("stopping the engine", [&] { engine.Stop(kShort); });
    EXPECT_FALSE(ran);
  }
  engine.Stop();
  EXPECT_TRUE(ran);
  EXPECT_EQ(engine.version(x), 1u);
}

// They have no bodies, so they need not take turns with those.
TEST_P(WithoutWorkersTest, WaitsForReadsAndClearedErrorsDoNotWaitForBodies) {
  constexpr std::chrono::seconds kPatience(20);
  Engine engine(Bounded());
  const Var x = engine.NewVar("x"), failed = engine.NewVar("failed");
  engine.Push({.name = "fails", .writes = {failed}}, [] { throw std::runtime_error("failed"); });
  EXPECT_THROW(engine.WaitForVar(failed), std::runtime_error);
  {
    const BusyThread busy(engine);
    EXPECT_NO_THROW(engine.WaitForReadsAndWrites(x, kPatience));
    engine.ClearError(failed);
    EXPECT_NO_THROW(engine.WaitForVar(failed, kPatience));
  }
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(WithoutWorkersTest, ACheckMayLeaveAWaitWhileAnotherThreadIsInABody) {
  struct Left : std::exception {};
  Engine engine(Bounded());
  const Var x = engine.NewVar("x");
  int runs = 0;
  {
    const BusyThread busy(engine);
    PushOnly(engine, {.name = "next", .writes = {x}}, [&] { ++runs; });
    WaitCheckScope checked(std::chrono::milliseconds(1), [] { throw Left(); });
    EXPECT_THROW(engine.WaitForVar(x), Left);
    EXPECT_THROW(engine.WaitForReadsAndWrites(x), Left);
    EXPECT_THROW(engine.WaitForAll(), Left);
    // At the bound, and on the serial engine to be run by its own thread.
    engine.Push({.name = "pushed", .writes = {x}}, [&] { ++runs; });
    const std::exception_ptr kept = checked.TakeError();
    ASSERT_NE(kept, nullptr);
    EXPECT_THROW(std::rethrow_exception(kept), Left);
    EXPECT_EQ(runs, 0);
  }
  engine.WaitForAll();
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(engine.version(x), 2u);
}

// Whoever runs them gives up its turn after each, which wakes the wait, and takes it at once again.
TEST_P(WithoutWorkersTest, ShortOpsOfAnotherThreadDoNotKeepAWaitFromItsCheck) {
  struct Left : std::exception {};
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "hold", .writes = {x}});
  std::atomic<bool> running = false, left = false, ended = false;
  std::thread other([&] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!left && std::chrono::steady_clock::now() < end) {
      const Var y = engine.NewVar("y");
      engine.Push({.name = "short", .writes = {y}}, [] {
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(3);
        while (std::chrono::steady_clock::now() < until) {
        }
      });
      engine.WaitForVar(y);
      running = true;
    }
    ended = true;
  });
  while (!running) std::this_thread::yield();
  {
    const WaitCheckScope checked(std::chrono::milliseconds(20), [] { throw Left(); });
    EXPECT_THROW(engine.WaitForVar(x), Left);
  }
  EXPECT_FALSE(ended);
  left = true;
  other.join();
  hold.Release();
  engine.WaitForAll();
}

}  // namespace
}  // namespace heddle::engine_test
