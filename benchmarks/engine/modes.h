// The measurements of bench_engine. Each prints one JSON object on one line.
#pragma once

#include <heddle/engine.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "benchmarks/peers/harness.h"

namespace heddle::bench {

// latency.cc
void MeasurePushCall(const HarnessOptions& options);
void MeasurePushWait(const HarnessOptions& options);
void MeasureWake(const HarnessOptions& options);
// echo.cc
void MeasureEcho(const HarnessOptions& options);
// load.cc
void MeasurePushers(const HarnessOptions& options);
void MeasureMemory(const HarnessOptions& options);
void MeasureIdle(const HarnessOptions& options);

// What the environment says (a trace, the kind of workers), with the workers asked for.
inline EngineOptions OptionsFor(int workers) {
  EngineOptions options = EngineOptions::FromEnvironment();
  options.num_workers = workers;
  return options;
}

inline std::vector<Var> MakeVars(Engine& engine, int count) {
  std::vector<Var> vars;
  for (int i = 0; i < count; ++i) vars.push_back(engine.NewVar());
  return vars;
}

template <class F>
void PushOp(Engine& engine, const std::vector<Var>& vars, const OpSpec& spec, F&& body) {
  const Var &a = vars[spec.vars[0]], &b = vars[spec.vars[1]], &c = vars[spec.vars[2]],
            &d = vars[spec.vars[3]];
  switch (spec.shape) {
    case Shape::kWrite:
      engine.Push({.writes = {a}}, std::forward<F>(body));
      return;
    case Shape::kRead:
      engine.Push({.reads = {a}}, std::forward<F>(body));
      return;
    case Shape::kRead2Write:
      engine.Push({.reads = {a, b}, .writes = {c}}, std::forward<F>(body));
      return;
    case Shape::kRead3Write:
      engine.Push({.reads = {a, b, c}, .writes = {d}}, std::forward<F>(body));
      return;
  }
}

// Holds back everything pushed later that touches the variables, until Open.
class Gate {
 public:
  Gate(Engine& engine, const std::vector<Var>& vars) {
    engine.PushAsync({.name = "gate", .writes = vars}, [this](Completion done) {
      done_ = std::move(done);
      closed_.store(true, std::memory_order_release);
      closed_.notify_one();
    });
    closed_.wait(false, std::memory_order_acquire);
  }

  void Open() { std::exchange(done_, std::nullopt).value()(); }

 private:
  std::optional<Completion> done_;
  std::atomic<bool> closed_{false};
};

}  // namespace heddle::bench
