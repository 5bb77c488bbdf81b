// Completions called in a batch: ops of several engines, waits that sleep, nested batches, and an
// engine that goes before the batch does.
#include "engine/completion_batch.h"

#include <heddle/engine.h>

#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

class CompletionBatchTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, CompletionBatchTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

// An op that has begun to write `var`, and is complete when `*done` is called.
void StartHeld(Engine& engine, const Var& var, std::optional<Completion>* done) {
  engine.PushAsync({.name = "held", .writes = {var}, .start_inline = true},
                   [done](Completion its) { *done = std::move(its); });
  // Serial and seeded engines start ops in waits.
  while (!done->has_value()) {
    EXPECT_THROW(engine.WaitForVar(var, std::chrono::milliseconds(1)), TimeoutError);
  }
}

TEST_P(CompletionBatchTest, WaitersAndDependentsOfAllEnginesGoOnWhenItEnds) {
  constexpr std::size_t kOps = 20;
  Engine engines[] = {Engine(GetParam().options), Engine(GetParam().options)};
  for (int round = 0; round < 5; ++round) {
    std::vector<Var> vars;
    std::vector<std::optional<Completion>> done(kOps);
    std::vector<int> seen(kOps, 0);
    for (std::size_t i = 0; i < kOps; ++i) {
      Engine& engine = engines[i % 2];
      vars.push_back(engine.NewVar("x"));
      StartHeld(engine, vars[i], &done[i]);
      engine.Push({.name = "dependent", .reads = {vars[i]}, .writes = {vars[i]}},
                  [&seen, i] { seen[i] = 1; });
    }
    std::thread completer([&] {
      const engine::CompletionBatch batch;
      for (std::size_t i = 0; i < kOps; ++i) {
        const engine::CompletionBatch inner;
        (*done[i])();
      }
    });
    for (std::size_t i = 0; i < kOps; ++i) engines[i % 2].WaitForVar(vars[i]);
    completer.join();
    EXPECT_EQ(seen, std::vector<int>(kOps, 1));
  }
}

TEST_P(CompletionBatchTest, ItsEngineMayGoBeforeIt) {
  auto engine = std::make_unique<Engine>(GetParam().options);
  const Var x = engine->NewVar("x");
  std::optional<Completion> done;
  StartHeld(*engine, x, &done);
  std::latch called(1), gone(1);
  std::thread completer([&] {
    const engine::CompletionBatch batch;
    (*done)();
    called.count_down();
    gone.wait();
  });
  called.wait();
  engine->WaitForVar(x);  // finds it without being woken
  engine.reset();
  gone.count_down();
  completer.join();
}

}  // namespace
}  // namespace heddle::engine_test
