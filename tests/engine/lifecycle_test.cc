// Life: stop and destroy with work pending, use after stop, vars that outlive their engine, several
// engines, and what bad input to Push and friends gives.
#include <heddle/engine.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/block_pool.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"
#include "tools/testing/temp_folder.h"

namespace heddle::engine_test {
namespace {

using std::chrono::milliseconds;

class LifecycleTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, LifecycleTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(LifecycleTest, StopRunsEverythingPending) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), gate = engine.NewVar("gate");
  std::atomic<int> runs = 0;
  Hold hold(engine, {.name = "hold", .writes = {gate}});
  for (int i = 0; i < 1000; ++i) {
    engine.Push({.name = "add", .reads = {gate}, .writes = {x}}, [&] { ++runs; });
  }
  std::thread releaser([&] { hold.Release(); });
  engine.Stop();
  EXPECT_EQ(runs.load(), 1000);
  EXPECT_EQ(engine.version(x), 1000u);
  releaser.join();
}

// An exception that left the destructor would end the process.
TEST_P(LifecycleTest, NoCheckLeavesADestructor) {
  std::atomic<int> runs = 0;
  const WaitCheckScope checked(std::chrono::milliseconds(0),
                               [] { throw std::runtime_error("left"); });
  {
    Engine engine(GetParam().options);
    const NoWaitScope no_wait;  // so that the serial engine has some left, too
    for (int i = 0; i < 20; ++i) {
      engine.Push({.name = "op"}, [&] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
        while (std::chrono::steady_clock::now() < end) {
        }
        ++runs;
      });
    }
  }
  EXPECT_EQ(runs, 20);
}

TEST_P(LifecycleTest, DestructionRunsEverythingPending) {
  std::atomic<int> runs = 0;
  auto token = std::make_shared<int>(0);
  {
    Engine engine(GetParam().options);
    const Var x = engine.NewVar("x");
    for (int i = 0; i < 1000; ++i) {
      engine.Push({.name = "add", .writes = {x}}, [&runs, token] { ++runs; });
    }
  }
  EXPECT_EQ(runs.load(), 1000);
  EXPECT_EQ(token.use_count(), 1);
}

// Resident memory of this process.
long ResidentKiB() {
  std::ifstream statm("/proc/self/statm");
  long total_pages = 0, resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * (sysconf(_SC_PAGESIZE) / 1024);
}

TEST_P(LifecycleTest, MemoryDoesNotGrowWithTheOpsThatHaveRun) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep records of their own";
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const auto run = [&](int num_ops) {
    for (int i = 0; i < num_ops; ++i) {
      engine.Push({.writes = {x}}, [] {});
      engine.WaitForVar(x);
    }
  };
  run(1000);
  const long before = ResidentKiB();
  run(100'000);
  EXPECT_LE(ResidentKiB() - before, 256);
}

// Their blocks are not those of a pool.
TEST_P(LifecycleTest, MemoryDoesNotGrowWithOpsOfManyVariables) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep records of their own";
  Engine engine(GetParam().options);
  std::vector<Var> vars;
  for (int i = 0; i < 100; ++i) vars.push_back(engine.NewVar());
  const auto run = [&](int num_ops) {
    for (int i = 0; i < num_ops; ++i) engine.Push({.writes = vars}, [] {});
    engine.WaitForAll();
  };
  run(100);
  const long before = ResidentKiB();
  for (int i = 0; i < 100; ++i) run(100);
  EXPECT_LE(ResidentKiB() - before, 4096);  // 20 MB of blocks
}

TEST_P(LifecycleTest, OpsMayPushWhileTheEngineStops) {
  Engine engine(GetParam().options);
  std::atomic<int> runs = 0;
  std::function<void()> next = [&] {
    if (++runs < 500) engine.Push({.name = "next"}, next);
  };
  engine.Push({.name = "next"}, next);
  engine.Stop();
  EXPECT_EQ(runs.load(), 500);
}

TEST_P(LifecycleTest, StopMayBeRepeated) {
  Engine engine(GetParam().options);
  engine.Push({.name = "op"}, [] {});
  engine.Stop();
  engine.Stop();
  engine.Stop(milliseconds(1000));
  std::thread([&] { engine.Stop(); }).join();
}

TEST_P(LifecycleTest, SeveralThreadsMayStopAtOnce) {
  Engine engine(GetParam().options);
  std::atomic<int> runs = 0;
  for (int i = 0; i < 300; ++i) engine.Push({.name = "op"}, [&] { ++runs; });
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      engine.Stop();
      EXPECT_EQ(runs.load(), 300);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(LifecycleTest, AStopThatIsLateSaysSoAndMayBeCalledAgain) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  Hold hold(engine, {.name = "late_op", .writes = {x}});
  const std::string message = MessageOf<TimeoutError>([&] { engine.Stop(milliseconds(30)); });
  EXPECT_TRUE(Contains(message, "late_op")) << message;
  EXPECT_THROW(engine.Push({.name = "op"}, [] {}), InvalidState);  // still stopping
  hold.Release();
  engine.Stop();
  EXPECT_EQ(engine.version(x), 1u);
}

// Blocks of a ParallelFor outside of ops are no ops, but workers run them.
TEST_P(LifecycleTest, AStopKeepsItsDeadlineWhileWorkersAreInBlocks) {
  if (GetParam().options.type != "threaded" || GetParam().options.num_workers < 2) {
    GTEST_SKIP() << "no worker helps";
  }
  Engine engine(GetParam().options);
  std::atomic<bool> ends = false;
  std::atomic<int> inside = 0;
  std::thread caller([&] {
    engine.ParallelFor(2, 1, [&](std::int64_t, std::int64_t) {
      ++inside;
      while (!ends) std::this_thread::yield();
    });
  });
  while (inside < 2) std::this_thread::yield();
  std::thread ender([&] {  // for the test to fail where it would hang
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!ends && std::chrono::steady_clock::now() < late) std::this_thread::yield();
    ends = true;
  });
  const std::string message = MessageOf<TimeoutError>([&] { engine.Stop(milliseconds(30)); });
  EXPECT_TRUE(Contains(message, "ParallelFor")) << message;
  EXPECT_FALSE(ends);
  ends = true;
  engine.Stop();
  caller.join();
  ender.join();
}

TEST_P(LifecycleTest, AStopKeepsItsDeadlineWhileAnotherThreadStopsTheEngine) {
  Engine engine(GetParam().options);
  Hold hold(engine, {.name = "late_op"});
  std::thread other([&] { engine.Stop(); });
  const auto is_stopping = [&] {
    try {
      engine.Push({.name = "op"}, [] {});
      return false;
    } catch (const InvalidState&) {
      return true;
    }
  };
  while (!is_stopping()) std::this_thread::yield();
  EXPECT_THROW(engine.Stop(milliseconds(30)), TimeoutError);
  hold.Release();
  other.join();
  engine.Stop(milliseconds(0));
}

// Stops the engine when it is copied, which is when it is pushed.
struct StopsWhenCopied {
  StopsWhenCopied(Engine* engine, std::function<void(Completion)> body)
      : engine(engine), body(std::move(body)) {}
  StopsWhenCopied(const StopsWhenCopied& other) : engine(other.engine), body(other.body) {
    std::thread([this] { engine->Stop(); }).join();  // this one may be in an op
  }
  void operator()(Completion done) const { body(std::move(done)); }

  Engine* engine;
  std::function<void(Completion)> body;
};

TEST_P(LifecycleTest, ACompletionOfAPushThatRacedWithStopMayOutliveItsEngine) {
  auto engine = std::make_unique<Engine>(GetParam().options);
  std::optional<Completion> saved;
  const StopsWhenCopied body(engine.get(), [&saved](Completion done) { saved = std::move(done); });
  LogCapture log;
  engine->PushAsync({.name = "late"}, body);
  engine.reset();
  if (saved) (*saved)(std::make_exception_ptr(std::runtime_error("unheard")));
  log.WaitForLine({"late", "unheard"});
}

// No op runs on top of another one's body, after Stop either: a chain would overflow the stack.
TEST_P(LifecycleTest, WhatAnOpThatRacedWithStopPushesRunsBehindIt) {
  constexpr int kOps = 20'000;
  Engine engine(GetParam().options);
  int inside = 0, deepest = 0, runs = 0;
  const std::function<void()> chain = [&] {
    deepest = std::max(deepest, ++inside);
    Var dropped = engine.NewVar("dropped");
    if (++runs < kOps) engine.Push({.name = "next"}, [&] { chain(); });
    dropped = Var();
    --inside;
  };
  const StopsWhenCopied body(&engine, [&](const Completion& done) {
    chain();
    done();
  });
  engine.PushAsync({.name = "late"}, body);
  EXPECT_EQ(runs, kOps);
  EXPECT_EQ(deepest, 1);
}

TEST_P(LifecycleTest, AnOpThatRacedWithStopRunsOnNoBodyOfAnotherEngine) {
  Engine other(GetParam().options), engine(GetParam().options);
  static thread_local bool inside;
  std::atomic<int> runs = 0, nested = 0;
  const StopsWhenCopied body(&engine, [&](const Completion& done) {
    if (inside) ++nested;
    ++runs;
    done();
  });
  other.Push({.name = "outer"}, [&] {
    inside = true;
    engine.PushAsync({.name = "late"}, body);
    inside = false;
  });
  other.WaitForAll();
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(nested, 0);
}

TEST_P(LifecycleTest, AnErrorOfAPushThatRacedWithStopIsLogged) {
  LogCapture log;
  auto engine = std::make_unique<Engine>(GetParam().options);
  const StopsWhenCopied body(engine.get(),
                             [](const Completion&) { throw std::runtime_error("unheard"); });
  engine->PushAsync({.name = "late"}, body);
  engine.reset();
  log.WaitForLine({"late", "unheard"});
}

TEST_P(LifecycleTest, AnOpMayHaveTheLastHandleOfItsEngine) {
  if (GetParam().options.type != "threaded") GTEST_SKIP() << "nobody would run the op";
  std::latch ran(2);
  std::optional<Hold> hold;
  {
    const auto engine = std::make_shared<Engine>(GetParam().options);
    const Var x = engine->NewVar("x");
    hold.emplace(*engine, OpOptions{.name = "hold", .writes = {x}});
    engine->Push({.name = "keeps", .writes = {x}}, [engine, &ran] { ran.count_down(); });
    engine->Push({.name = "behind", .reads = {x}}, [&ran] { ran.count_down(); });
  }
  hold->Release();
  ran.wait();
}

TEST_P(LifecycleTest, AfterStopEverythingButTheAccessorsThrowsInvalidState) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), y = engine.NewVar("y");
  engine.Push({.name = "write", .writes = {x}}, [] {});
  engine.Push({.name = "fails", .writes = {y}}, [] { throw std::runtime_error("failed"); });
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  engine.Stop();

  auto token = std::make_shared<int>(0);
  const std::string message = MessageOf<InvalidState>(
      [&] { engine.Push({.name = "pushed_late", .writes = {x}}, [token] {}); });
  EXPECT_TRUE(Contains(message, "pushed_late")) << message;
  EXPECT_THROW((void)engine.TryPush({.name = "op"}, [token] {}), InvalidState);
  EXPECT_THROW(engine.PushAsync({.name = "op"}, [token](const Completion&) {}), InvalidState);
  EXPECT_THROW((void)engine.TryPushAsync({.name = "op"}, [token](const Completion&) {}),
               InvalidState);
  EXPECT_EQ(token.use_count(), 1);
  EXPECT_THROW(engine.NewVar("z"), InvalidState);
  EXPECT_THROW(engine.WaitForVar(x), InvalidState);
  EXPECT_THROW(engine.WaitForVar(x, milliseconds(1)), InvalidState);
  EXPECT_THROW(engine.WaitForReadsAndWrites(x), InvalidState);
  EXPECT_THROW(engine.WaitForReadsAndWrites(x, milliseconds(1)), InvalidState);
  EXPECT_THROW(engine.WaitForAll(), InvalidState);
  EXPECT_THROW(engine.WaitForAll(milliseconds(1)), InvalidState);
  EXPECT_THROW(engine.ClearError(y), InvalidState);
  EXPECT_THROW(engine.ParallelFor(10, 1, [](std::int64_t, std::int64_t) {}), InvalidState);
  const tools::TempFolder folder;
  EXPECT_THROW(engine.StartTrace(folder / "late.trace"), InvalidState);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  engine.StopTrace();

  EXPECT_EQ(engine.version(x), 1u);
  EXPECT_EQ(engine.FailureOf(y)->op, "fails");
  EXPECT_NE(engine.ErrorOf(y), nullptr);
  EXPECT_EQ(engine.stats().pushed, 2u);
  EXPECT_EQ(engine.options().type, GetParam().options.type);
  (void)engine.DumpState();
}

TEST_P(LifecycleTest, PushesThatRaceWithStopEitherRunOrThrow) {
  for (int round = 0; round < Scaled(30); ++round) {
    Engine engine(GetParam().options);
    std::atomic<int> runs = 0, accepted = 0;
    std::vector<std::thread> pushers;
    for (int thread = 0; thread < 2; ++thread) {
      pushers.emplace_back([&] {
        try {
          for (;;) {
            engine.Push({.name = "op"}, [&] { ++runs; });
            ++accepted;
          }
        } catch (const InvalidState&) {
        }
      });
    }
    while (accepted < 10) std::this_thread::yield();
    engine.Stop();
    for (std::thread& pusher : pushers) pusher.join();
    EXPECT_EQ(runs.load(), accepted.load());
  }
}

// The pusher wakes the engine and finds its op done by the thread that stops it, or by its own
// wait; what it looks at after that was gone at times.
TEST_P(LifecycleTest, PushesOntoASleepingEngineThatRaceWithStopEitherRunOrThrow) {
  for (int round = 0; round < 40; ++round) {
    Engine engine(GetParam().options);
    std::atomic<int> runs = 0, accepted = 0;
    std::this_thread::sleep_for(milliseconds(3));  // longer than it takes to fall asleep
    std::thread pusher([&] {
      try {
        for (;;) {
          engine.Push({.name = "op"}, [&] { ++runs; });
          ++accepted;
          engine.WaitForAll();
        }
      } catch (const InvalidState&) {
      }
    });
    while (accepted < round % 5) std::this_thread::yield();
    engine.Stop();
    pusher.join();
    EXPECT_EQ(runs.load(), accepted.load());
  }
}

TEST_P(LifecycleTest, VarsMayOutliveTheirEngine) {
  std::vector<Var> vars;
  Var unnamed;
  {
    Engine engine(GetParam().options);
    for (int i = 0; i < 100; ++i) vars.push_back(engine.NewVar("outlives"));
    unnamed = engine.NewVar();
    for (const Var& var : vars) engine.Push({.name = "write", .writes = {var}}, [] {});
    engine.Push({.name = "fails", .writes = {vars[0]}}, [] { throw std::runtime_error("fails"); });
    EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  }
  const Var copy = vars[3];
  EXPECT_EQ(copy.name(), "outlives");
  EXPECT_TRUE(unnamed.name().starts_with("var")) << unnamed.name();
  EXPECT_TRUE(copy == vars[3]);
  EXPECT_FALSE(copy == vars[4]);
  vars.clear();
  EXPECT_TRUE(static_cast<bool>(copy));
  EXPECT_FALSE(static_cast<bool>(Var()));
}

TEST_P(LifecycleTest, VarsMayBeDroppedByOpsAndByOtherThreads) {
  Engine engine(GetParam().options);
  std::atomic<int> runs = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        Var x = engine.NewVar("x");
        const OpOptions options{.name = "holds_its_var", .writes = {x}};
        engine.Push(options, [&runs, x = std::move(x)]() mutable {
          x = Var();  // the last handle goes inside the very op that writes it
          ++runs;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  engine.WaitForAll();
  EXPECT_EQ(runs.load(), 900);
}

TEST_P(LifecycleTest, SeveralEnginesWorkSideBySide) {
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<Var> vars;
  std::array<int, 5> values{};
  for (int i = 0; i < 5; ++i) {
    engines.push_back(std::make_unique<Engine>(GetParam().options));
    vars.push_back(engines.back()->NewVar());
  }
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < 5; ++i) {
      engines[i]->Push({.name = "add", .reads = {vars[i]}, .writes = {vars[i]}},
                       [&values, i] { ++values[i]; });
    }
  }
  for (int i = 0; i < 5; ++i) {
    engines[i]->WaitForVar(vars[i]);
    EXPECT_EQ(values[i], 200);
    if (i % 2 == 0) engines[i].reset();
  }
}

TEST_P(LifecycleTest, ManyEnginesMayComeAndGo) {
  for (int i = 0; i < 50; ++i) {
    Engine engine(GetParam().options);
    if (i % 3 == 0) continue;  // never used
    bool ran = false;
    const Var x = engine.NewVar();
    engine.Push({.name = "op", .writes = {x}}, [&] { ran = true; });
    if (i % 3 == 1) engine.WaitForVar(x);
    engine.Stop();
    EXPECT_TRUE(ran);
  }
}

// --- Bad input: a typed error on the calling thread that names what is wrong; nothing is queued.
// ---

class BadInputTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, BadInputTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(BadInputTest, ANullBody) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  const OpOptions options{.name = "null_body", .writes = {x}};
  const std::function<void()> empty;
  const std::function<void(Completion)> empty_async;
  void (*null_function)() = nullptr;
  const std::vector<std::function<void()>> calls = {
      [&] { engine.Push(options, empty); },
      [&] { engine.Push(options, null_function); },
      [&] { (void)engine.TryPush(options, empty); },
      [&] { engine.PushAsync(options, empty_async); },
      [&] { (void)engine.TryPushAsync(options, empty_async); },
  };
  for (const auto& call : calls) {
    const std::string message = MessageOf<InvalidArgument>(call);
    EXPECT_TRUE(Contains(message, "null_body")) << message;
  }
  engine.WaitForAll();
  EXPECT_EQ(engine.stats().pushed, 0u);
  EXPECT_EQ(engine.version(x), 0u);
}

TEST_P(BadInputTest, AnEmptyVar) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x"), empty;
  for (const bool in_reads : {true, false}) {
    OpOptions options{.name = "empty_var", .writes = {x}};
    if (in_reads) {
      options.reads = {x, empty};
    } else {
      options.writes = {x, x, x, x, x, empty};
    }
    auto token = std::make_shared<int>(0);
    std::string message =
        MessageOf<InvalidArgument>([&] { engine.Push(options, [token] { ++*token; }); });
    EXPECT_TRUE(Contains(message, "empty_var")) << message;
    message = MessageOf<InvalidArgument>(
        [&] { engine.PushAsync(options, [token](const Completion&) { ++*token; }); });
    EXPECT_TRUE(Contains(message, "empty_var")) << message;
    EXPECT_EQ(token.use_count(), 1);
  }
  EXPECT_THROW(engine.WaitForVar(empty), InvalidArgument);
  EXPECT_THROW(engine.WaitForVar(empty, milliseconds(1)), InvalidArgument);
  EXPECT_THROW(engine.WaitForReadsAndWrites(empty), InvalidArgument);
  EXPECT_THROW((void)engine.version(empty), InvalidArgument);
  EXPECT_THROW((void)engine.FailureOf(empty), InvalidArgument);
  EXPECT_THROW((void)engine.ErrorOf(empty), InvalidArgument);
  EXPECT_THROW(engine.ClearError(empty), InvalidArgument);
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 0u);
  EXPECT_EQ(engine.stats().pushed, 0u);
}

TEST_P(BadInputTest, AVarOfAnotherEngine) {
  Engine engine(GetParam().options), other(GetParam().options);
  const Var x = engine.NewVar("x"), foreign = other.NewVar("foreign_var");
  std::string message = MessageOf<InvalidArgument>(
      [&] { engine.Push({.name = "mixes_engines", .reads = {x}, .writes = {foreign}}, [] {}); });
  EXPECT_TRUE(Contains(message, "mixes_engines")) << message;
  EXPECT_TRUE(Contains(message, "foreign_var")) << message;
  message = MessageOf<InvalidArgument>(
      [&] { engine.Push({.name = "mixes_engines", .reads = {foreign}, .writes = {x}}, [] {}); });
  EXPECT_TRUE(Contains(message, "foreign_var")) << message;
  const std::vector<std::function<void()>> calls = {
      [&] { engine.WaitForVar(foreign); },
      [&] { engine.WaitForVar(foreign, milliseconds(1)); },
      [&] { engine.WaitForReadsAndWrites(foreign); },
      [&] { (void)engine.version(foreign); },
      [&] { (void)engine.FailureOf(foreign); },
      [&] { (void)engine.ErrorOf(foreign); },
      [&] { engine.ClearError(foreign); },
  };
  for (const auto& call : calls) {
    message = MessageOf<InvalidArgument>(call);
    EXPECT_TRUE(Contains(message, "foreign_var")) << message;
  }
  engine.WaitForAll();
  EXPECT_EQ(engine.version(x), 0u);
  EXPECT_EQ(other.version(foreign), 0u);
}

TEST_P(BadInputTest, ADeviceThatIsNotBuiltIn) {
  Engine engine(GetParam().options);
  const std::string message =
      MessageOf<InvalidArgument>([&] { engine.Push({.name = "on_gpu", .device = Gpu(3)}, [] {}); });
  EXPECT_TRUE(Contains(message, "on_gpu")) << message;
  EXPECT_TRUE(Contains(message, "gpu(3)")) << message;
  const std::string negative = MessageOf<InvalidArgument>(
      [&] { engine.Push({.name = "nowhere", .device = Cpu(-1)}, [] {}); });
  EXPECT_TRUE(Contains(negative, "nowhere")) << negative;
}

TEST_P(BadInputTest, NegativeTemporaryBytes) {
  Engine engine(GetParam().options);
  const std::string message = MessageOf<InvalidArgument>(
      [&] { engine.Push({.name = "negative", .temporary_bytes = -5}, [] {}); });
  EXPECT_TRUE(Contains(message, "negative")) << message;
  EXPECT_TRUE(Contains(message, "-5")) << message;
  EXPECT_EQ(engine.stats().pending_bytes, 0u);
}

TEST_P(BadInputTest, ABodyWhoseConstructorThrows) {
  struct ThrowsWhenCopied {
    explicit ThrowsWhenCopied(bool* ran) : ran(ran) {}
    ThrowsWhenCopied(const ThrowsWhenCopied&) : ran(nullptr) { throw std::bad_alloc(); }
    void operator()() const { *ran = true; }
    bool* ran;
  };
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  bool ran = false, after = false;
  const ThrowsWhenCopied body(&ran);
  for (int i = 0; i < 10; ++i) {
    EXPECT_THROW(engine.Push({.name = "throws", .writes = {x}, .temporary_bytes = 10}, body),
                 std::bad_alloc);
  }
  engine.Push({.name = "after", .reads = {x}, .writes = {x}}, [&] { after = true; });
  engine.WaitForAll();
  EXPECT_FALSE(ran);
  EXPECT_TRUE(after);
  EXPECT_EQ(engine.version(x), 1u);
  EXPECT_EQ(engine.stats().pending_bytes, 0u);
  EXPECT_EQ(engine.stats().pushed, 1u);
}

// A child has none of the engine's threads and may have its locks held for ever: everything is
// refused before it could hang, and what is dropped is left alone.
TEST_P(LifecycleTest, AForkedChildIsRefusedAtOnce) {
  if (kSanitized) GTEST_SKIP() << "a lock of the sanitizer's allocator may be held for ever too";
  auto engine = std::make_unique<Engine>(GetParam().options);
  Var x = engine->NewVar("x");
  struct NoPoller final : WaitPoller {
    bool RunOne(Clock::time_point /*until*/) noexcept override { return false; }
    void Interrupt() noexcept override {}
  } poller;
  std::atomic<bool> over = false;
  std::thread busy([&] {
    while (!over) {
      engine->Push({.name = "busy", .writes = {x}}, [] {});
      engine->WaitForVar(x);
    }
  });
  const pid_t child = fork();
  if (child == 0) {
    int refused = 0;
    const auto try_out = [&](auto&& call) {
      try {
        call();
      } catch (const InvalidState&) {
        ++refused;
      }
    };
    try_out([&] { engine->NewVar("y"); });
    try_out([&] { engine->Push({.name = "lost", .writes = {x}}, [] {}); });
    try_out([&] { engine->WaitForVar(x); });
    try_out([&] { engine->WaitForReadsAndWrites(x); });
    try_out([&] { engine->WaitForAll(); });
    try_out([&] { engine->ClearError(x); });
    try_out([&] { engine->DumpState(); });
    try_out([&] { engine->stats(); });
    try_out([&] { engine->StopTrace(); });
    try_out([&] { engine->StartTrace("child.trace"); });
    try_out([&] { engine->RemovePoller(poller); });
    try_out([&] { Engine another; });
    x = Var();
    engine.reset();
    _exit(refused == 12 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  over = true;
  busy.join();
  engine->WaitForAll();  // the parent works on
}

// The child's only thread gives back what it keeps for itself, to nobody that could be locked.
TEST(ForkedChild, EndsWhileThreadsOfTheParentTakeMemory) {
  if (kSanitized) GTEST_SKIP() << "children of sanitized programs may not end by exit()";
  const Engine engine;
  std::atomic<bool> over = false;
  const auto take_and_free = [] {
    std::array<void*, 300> blocks;  // more than a thread keeps
    for (void*& block : blocks) block = engine::AllocateBlock(0, 64);
    for (void* block : blocks) engine::FreeBlock(block, 0);
  };
  std::vector<std::thread> busy;
  for (int t = 0; t < 3; ++t) {
    busy.emplace_back([&] {
      while (!over) take_and_free();
    });
  }
  take_and_free();
  for (int i = 0; i < 50; ++i) {
    std::fflush(stdout);  // or the child prints it too
    const pid_t child = fork();
    if (child == 0) std::exit(0);
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  over = true;
  for (std::thread& thread : busy) thread.join();
}

TEST_P(BadInputTest, BodiesMayBeLargeMoveOnlyAndOverAligned) {
  Engine engine(GetParam().options);
  const Var x = engine.NewVar("x");
  struct alignas(64) Aligned {
    std::uintptr_t Address() const { return reinterpret_cast<std::uintptr_t>(this); }
    char bytes[64] = {};
  };
  std::array<std::int64_t, 1000> large{};
  large[999] = 5;
  std::int64_t sum = 0;
  for (int i = 0; i < 100; ++i) {
    engine.Push({.name = "large", .writes = {x}}, [large, &sum] { sum += large[999]; });
    engine.Push({.name = "move_only", .writes = {x}},
                [value = std::make_unique<int>(2), &sum] { sum += *value; });
    engine.Push({.name = "aligned", .writes = {x}}, [aligned = Aligned(), &sum] {
      sum += aligned.Address() % 64 == 0 ? 1 : 1'000'000;
    });
    std::array<char, 200> medium{};
    medium[199] = 3;
    engine.Push({.name = "medium", .writes = {x}}, [medium, &sum] { sum += medium[199]; });
  }
  engine.WaitForVar(x);
  EXPECT_EQ(sum, 100 * (5 + 2 + 1 + 3));
}

}  // namespace
}  // namespace heddle::engine_test
