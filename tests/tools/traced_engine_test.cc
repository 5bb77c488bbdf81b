// What a real engine records, as the reader sees it.
#include <heddle/engine.h>
#include <heddle/error.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/trace.h"
#include "tools/heddle/trace_file.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using engine::TraceAccess;
using engine::TraceOutcome;
using engine::TraceWait;

class TracedEngineTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Runs a program on an engine of the type under test and returns its trace.
  TraceFile TraceOf(const std::function<void(Engine&)>& program) {
    const std::string path = folder_ / "t.trace";
    {
      EngineOptions options = EngineOptions::FromEnvironment();
      options.type = GetParam();
      options.num_workers = 2;
      options.trace_file = path;
      Engine engine(options);
      program(engine);
      engine.Stop();
    }
    TraceFile trace = ReadTraceFile(path);
    EXPECT_TRUE(trace.closed);
    EXPECT_EQ(trace.damaged_bytes, 0u);
    EXPECT_EQ(trace.dropped, 0u);
    return trace;
  }

  static const TracedOp* Find(const TraceFile& trace, const std::string& name) {
    const auto found = std::find_if(trace.ops.begin(), trace.ops.end(),
                                    [&](const TracedOp& op) { return trace.NameOf(op) == name; });
    return found == trace.ops.end() ? nullptr : &*found;
  }

  const TempFolder folder_;
};

TEST_P(TracedEngineTest, EnginesThatReadTheEnvironmentHaveAFileEach) {
  setenv("HEDDLE_TRACE", (folder_ / "run.trace").c_str(), /*overwrite=*/1);
  const auto run = [](Engine& engine, const char* op) {
    engine.Push({.name = op}, [] {});
    engine.WaitForAll();
  };
  EngineOptions options = EngineOptions::FromEnvironment();
  options.type = GetParam();
  {
    Engine first(options), second(options);
    run(first, "of_first");
    run(second, "of_second");
  }
  Engine third(options);
  unsetenv("HEDDLE_TRACE");
  run(third, "of_third");
  third.Stop();
  std::vector<std::string> ops;
  for (const auto& file : std::filesystem::directory_iterator(folder_.path())) {
    const TraceFile trace = ReadTraceFile(file.path());
    ASSERT_EQ(trace.ops.size(), 1u) << file.path();
    ops.push_back(trace.NameOf(trace.ops[0]));
  }
  EXPECT_THAT(ops, testing::UnorderedElementsAre("of_first", "of_second", "of_third"));
}

TEST_P(TracedEngineTest, OpsCarryWhatTheyWerePushedWith) {
  const TraceFile trace = TraceOf([](Engine& engine) {
    const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
    engine.Push({.name = "mix",
                 .reads = {x, y},
                 .writes = {y, z},
                 .device = Cpu(3),
                 .lane = Lane::kCopy,
                 .priority = -7},
                [] {});
  });
  const TracedOp* const op = Find(trace, "mix");
  ASSERT_NE(op, nullptr);
  EXPECT_EQ(op->device, Cpu(3));
  EXPECT_EQ(op->lane, Lane::kCopy);
  EXPECT_EQ(op->priority, -7);
  std::vector<std::pair<std::string, TraceAccess>> accesses;
  for (const TraceAccessTo& access : trace.AccessesOf(*op)) {
    accesses.emplace_back(trace.VarName(access.var), access.access);
  }
  std::sort(accesses.begin(), accesses.end());
  const std::vector<std::pair<std::string, TraceAccess>> expected = {
      {"x", TraceAccess::kRead}, {"y", TraceAccess::kReadWrite}, {"z", TraceAccess::kWrite}};
  EXPECT_EQ(accesses, expected);
  ASSERT_TRUE(op->run);
  EXPECT_LE(op->pushed_ns, op->run->started_ns);
  EXPECT_LE(op->run->started_ns, op->run->ended_ns);
  EXPECT_GE(op->pushed_ns, trace.started_ns);
}

TEST_P(TracedEngineTest, OutcomesAreThoseOfTheOps) {
  const TraceFile trace = TraceOf([](Engine& engine) {
    const Var x = engine.NewVar("x"), y = engine.NewVar("y");
    engine.Push({.name = "good", .writes = {y}}, [] {});
    engine.Push({.name = "bad", .writes = {x}}, [] { throw OpError("no"); });
    engine.Push({.name = "behind bad", .reads = {x}}, [] {});
    EXPECT_THROW(engine.WaitForVar(x), OpError);
    EXPECT_NO_THROW(engine.WaitForVar(y));
  });
  for (const auto& [name, outcome] :
       {std::pair{"good", TraceOutcome::kOk}, std::pair{"bad", TraceOutcome::kFailed},
        std::pair{"behind bad", TraceOutcome::kSkipped}}) {
    const TracedOp* const op = Find(trace, name);
    ASSERT_TRUE(op != nullptr && op->run) << name;
    EXPECT_EQ(op->run->outcome, outcome) << name;
  }
}

TEST_P(TracedEngineTest, AsyncOpsEndWithTheirCompletion) {
  const TraceFile trace = TraceOf([](Engine& engine) {
    const Var x = engine.NewVar("x");
    std::thread completer;
    engine.PushAsync({.name = "send", .writes = {x}}, [&completer](Completion done) {
      completer = std::thread(
          [done = std::move(done)] { done(std::make_error_code(std::errc::io_error)); });
    });
    EXPECT_THROW(engine.WaitForVar(x), std::system_error);
    completer.join();
  });
  const TracedOp* const send = Find(trace, "send");
  ASSERT_NE(send, nullptr);
  ASSERT_TRUE(send->run && send->completion);
  EXPECT_EQ(send->run->outcome, TraceOutcome::kOk);
  EXPECT_EQ(send->completion->outcome, TraceOutcome::kFailed);
  EXPECT_GE(send->completion->completed_ns, send->run->started_ns);
}

TEST_P(TracedEngineTest, WaitsAreRecorded) {
  const TraceFile trace = TraceOf([](Engine& engine) {
    const Var x = engine.NewVar("x");
    const auto push = [&] { engine.Push({.name = "op", .writes = {x}}, [] {}); };
    push();
    engine.WaitForVar(x);
    push();
    engine.WaitForReadsAndWrites(x);
    push();
    engine.WaitForAll();
  });
  for (const TraceWait kind : {TraceWait::kVar, TraceWait::kVarReads, TraceWait::kAll}) {
    const auto wait = std::find_if(trace.waits.begin(), trace.waits.end(),
                                   [&](const TracedWait& w) { return w.kind == kind; });
    ASSERT_NE(wait, trace.waits.end()) << static_cast<int>(kind);
    EXPECT_LE(wait->started_ns, wait->ended_ns);
    EXPECT_EQ(wait->var == 0 ? "" : trace.VarName(wait->var), kind == TraceWait::kAll ? "" : "x");
  }
}

// The one that begins sees the variable, or whoever makes that sees the trace.
TEST_P(TracedEngineTest, NamesOfVariablesMadeWhileATraceStartsAreRecorded) {
  constexpr int kRounds = 100;
  EngineOptions options;
  options.type = GetParam();
  options.num_workers = 2;
  Engine engine(options);
  for (int round = 0; round < kRounds; ++round) {
    const std::string path = folder_ / "n.trace";
    Var x;
    std::atomic<bool> go = false;
    std::thread maker([&] {
      while (!go) {
      }
      x = engine.NewVar("named");
    });
    go = true;
    engine.StartTrace(path);
    maker.join();
    engine.Push({.name = "op", .writes = {x}}, [] {});
    engine.WaitForAll();
    engine.StopTrace();
    const TraceFile trace = ReadTraceFile(path);
    const TracedOp* const op = Find(trace, "op");
    ASSERT_NE(op, nullptr);
    EXPECT_EQ(trace.VarName(trace.AccessesOf(*op)[0].var), "named");
  }
}

// From the call on, though it waits for writes first.
TEST_P(TracedEngineTest, AWaitForReadsIsRecordedWhole) {
  std::int64_t took_ns = 0;
  const TraceFile trace = TraceOf([&](Engine& engine) {
    const Var x = engine.NewVar("x");
    static std::optional<Completion> write;
    engine.PushAsync({.name = "write", .writes = {x}},
                     [](Completion done) { write.emplace(std::move(done)); });
    const WaitCheckScope releases(std::chrono::milliseconds(50), [] {
      if (write.has_value()) (*std::exchange(write, std::nullopt))();
    });
    const auto started = std::chrono::steady_clock::now();
    engine.WaitForReadsAndWrites(x);
    took_ns = (std::chrono::steady_clock::now() - started) / std::chrono::nanoseconds(1);
  });
  ASSERT_EQ(trace.waits.size(), 1u);
  EXPECT_EQ(trace.waits[0].kind, TraceWait::kVarReads);
  const auto recorded_ns =
      static_cast<std::int64_t>(trace.waits[0].ended_ns - trace.waits[0].started_ns);
  EXPECT_GE(2 * recorded_ns, took_ns);
}

// The arrows that the reader derives are the order that the engine kept.
TEST_P(TracedEngineTest, OpsStartAfterThoseThatAnArrowComesFrom) {
  constexpr std::uint64_t kOps = 5000;
  const TraceFile trace = TraceOf([](Engine& engine) {
    std::vector<Var> vars;
    for (int i = 0; i < 20; ++i) vars.push_back(engine.NewVar());
    std::uint32_t random = 1;
    const auto next = [&] { return vars[(random = random * 1664525 + 1013904223) >> 16 & 15]; };
    for (std::uint64_t i = 0; i < kOps; ++i) {
      engine.Push({.name = "op", .reads = {next(), next()}, .writes = {next()}}, [] {});
    }
    engine.WaitForAll();
  });
  ASSERT_EQ(trace.ops.size(), kOps);
  const std::vector<TraceArrow> arrows = Dependencies(trace);
  EXPECT_GT(arrows.size(), kOps);
  for (const TraceArrow& arrow : arrows) {
    ASSERT_TRUE(trace.ops[arrow.from].run && trace.ops[arrow.to].run);
    ASSERT_LE(trace.ops[arrow.from].run->ended_ns, trace.ops[arrow.to].run->started_ns)
        << "ops " << arrow.from << " and " << arrow.to;
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, TracedEngineTest,
                         ::testing::Values("threaded", "serial", "seeded"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace heddle::tools
