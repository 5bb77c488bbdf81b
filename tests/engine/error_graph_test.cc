// Random graphs with failing ops against a model of poison: which ops run, which variables are
// poisoned by whom, what they hold, their versions, and what WaitForAll reports, in which order.
//
// One thread pushes, so the model simply does the ops one by one in that order. Where an op has
// several poisoned inputs the contract leaves open which error it passes on: the model keeps all
// candidates.
#include <heddle/engine.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

enum class Kind {
  kNormal,
  kAsync,       // completes inside its body, with the error if it fails
  kRecover,     // run_when_poisoned: writes good values whatever came in
  kPassOn,      // run_when_poisoned: rethrows the error of its first poisoned read
  kClearError,  // Engine::ClearError of writes[0], no op
};

struct GraphOp {
  Kind kind = Kind::kNormal;
  std::vector<int> reads, writes;
  bool fails = false;
};

struct GraphError : std::runtime_error {
  explicit GraphError(int op) : std::runtime_error("op" + std::to_string(op)), op(op) {}
  int op;
};

constexpr int kVars = 10;

struct Outcome {
  std::vector<bool> ran;  // by op
  std::vector<std::set<int>> poison =
      std::vector<std::set<int>>(kVars);  // by var: the ops that may be named; empty: healthy
  std::vector<std::int64_t> values = std::vector<std::int64_t>(kVars);  // of healthy vars
  std::vector<std::uint64_t> versions = std::vector<std::uint64_t>(kVars);
  std::vector<int> reported;  // by WaitForAll, in this order
  std::uint64_t failed = 0;
};

bool Has(const std::vector<int>& list, int var) { return std::ranges::count(list, var) != 0; }

std::vector<GraphOp> MakeGraph(std::mt19937_64& random, int size, int percent_failing) {
  std::vector<GraphOp> graph(size);
  for (GraphOp& op : graph) {
    const auto draw = [&](int most) {
      std::vector<int> vars(random() % (most + 1));
      for (int& var : vars) var = static_cast<int>(random() % kVars);
      return vars;
    };
    op.reads = draw(3);
    op.writes = draw(2);
    if (!op.writes.empty() && random() % 3 == 0) op.reads.push_back(op.writes[0]);  // read-modify
    const int dice = static_cast<int>(random() % 20);
    if (dice < 3) op.kind = Kind::kAsync;
    if (dice == 3 || dice == 4) op.kind = dice == 3 ? Kind::kRecover : Kind::kPassOn;
    if (dice == 5 && !op.writes.empty()) op.kind = Kind::kClearError;
    if (op.kind == Kind::kRecover || op.kind == Kind::kPassOn) {
      std::erase_if(op.writes, [&](int var) { return Has(op.reads, var); });  // pure overwrites
    }
    const bool may_fail = op.kind == Kind::kNormal || op.kind == Kind::kAsync;
    op.fails = may_fail && static_cast<int>(random() % 100) < percent_failing;
  }
  return graph;
}

// What op `index` computes for `var` from what it read.
std::int64_t Value(const GraphOp& op, int index, int var, const std::vector<std::int64_t>& values) {
  std::int64_t sum = index * 31 + var;
  for (const int read : op.reads) sum = (sum * 7 + values[read]) % 1'000'003;
  return sum;
}

void Compute(const GraphOp& op, int index, std::vector<std::int64_t>& values) {
  std::vector<std::int64_t> results;
  for (const int var : op.writes) results.push_back(Value(op, index, var, values));
  for (std::size_t i = 0; i < op.writes.size(); ++i) values[op.writes[i]] = results[i];
}

Outcome Model(const std::vector<GraphOp>& graph) {
  Outcome outcome;
  outcome.ran.resize(graph.size());
  for (int index = 0; index < static_cast<int>(graph.size()); ++index) {
    const GraphOp& op = graph[index];
    if (op.kind == Kind::kClearError) {
      outcome.poison[op.writes[0]].clear();
      // The value is whatever the last successful write left: nothing wrote since, so it is
      // unchanged.
      continue;
    }
    std::set<int> inherited;
    std::optional<int> first_poisoned;
    for (const int var : op.reads) {
      if (outcome.poison[var].empty()) continue;
      if (!first_poisoned) first_poisoned = var;
      inherited.insert(outcome.poison[var].begin(), outcome.poison[var].end());
    }
    const std::set<int> written(op.writes.begin(), op.writes.end());
    for (const int var : written) ++outcome.versions[var];
    const bool looks = op.kind == Kind::kRecover || op.kind == Kind::kPassOn;
    outcome.ran[index] = inherited.empty() || looks;
    std::set<int> error;
    if (!outcome.ran[index]) {
      error = inherited;
    } else if (op.fails) {
      error = {index};
      outcome.reported.push_back(index);
    } else if (op.kind == Kind::kPassOn && first_poisoned) {
      error = outcome.poison[*first_poisoned];
    } else {
      Compute(op, index, outcome.values);
    }
    if (!error.empty()) ++outcome.failed;
    for (const int var : written) outcome.poison[var] = error;
  }
  return outcome;
}

class GraphRun {
 public:
  GraphRun(const EngineOptions& options, const std::vector<GraphOp>& graph)
      : graph_(graph), engine_(options) {
    outcome_.ran.resize(graph.size());
    ran_.resize(graph.size());
    for (int i = 0; i < kVars; ++i) vars_.push_back(engine_.NewVar("v" + std::to_string(i)));
  }

  Outcome Run() {
    for (int index = 0; index < static_cast<int>(graph_.size()); ++index) PushOne(index);
    for (;;) {
      try {
        engine_.WaitForAll();
        break;
      } catch (const GraphError& error) {
        outcome_.reported.push_back(error.op);
      }
    }
    for (std::size_t i = 0; i < ran_.size(); ++i) outcome_.ran[i] = ran_[i] != 0;
    for (int var = 0; var < kVars; ++var) {
      outcome_.versions[var] = engine_.version(vars_[var]);
      CheckErrorOf(var);
    }
    outcome_.failed = engine_.stats().failed;
    EXPECT_EQ(engine_.stats().done, engine_.stats().pushed);
    return outcome_;
  }

 private:
  void Body(int index) {
    const GraphOp& op = graph_[index];
    ran_[index] = 1;
    if (op.fails) throw GraphError(index);
    if (op.kind == Kind::kPassOn) {
      for (const int var : op.reads) {
        if (std::exception_ptr error = engine_.ErrorOf(vars_[var])) std::rethrow_exception(error);
      }
    }
    Compute(op, index, outcome_.values);
  }

  void PushOne(int index) {
    const GraphOp& op = graph_[index];
    if (op.kind == Kind::kClearError) {
      engine_.ClearError(vars_[op.writes[0]]);
      return;
    }
    std::vector<Var> reads, writes;
    for (const int var : op.reads) reads.push_back(vars_[var]);
    for (const int var : op.writes) writes.push_back(vars_[var]);
    OpOptions options{.name = "op" + std::to_string(index), .reads = reads, .writes = writes};
    options.priority = index * 7919 % 5;
    options.run_when_poisoned = op.kind == Kind::kRecover || op.kind == Kind::kPassOn;
    if (op.kind == Kind::kAsync) {
      engine_.PushAsync(options, [this, index](const Completion& done) {
        std::exception_ptr error;
        try {
          Body(index);
        } catch (...) {
          error = std::current_exception();
        }
        done(error);
      });
    } else {
      engine_.Push(options, [this, index] { Body(index); });
    }
  }

  // All ways to ask for the error of a var agree, and its fields name the op that failed.
  void CheckErrorOf(int var) {
    const std::optional<Failure> failure = engine_.FailureOf(vars_[var]);
    EXPECT_EQ(failure.has_value(), engine_.ErrorOf(vars_[var]) != nullptr);
    try {
      engine_.WaitForVar(vars_[var]);
      EXPECT_FALSE(failure.has_value());
    } catch (const GraphError& error) {
      outcome_.poison[var] = {error.op};
      ASSERT_TRUE(failure.has_value());
      EXPECT_EQ(failure->op, "op" + std::to_string(error.op));
      EXPECT_EQ(failure->message, error.what());
      const std::vector<int>& writes = graph_[error.op].writes;
      EXPECT_EQ(failure->var, writes.empty() ? "" : "v" + std::to_string(writes[0]));
    }
  }

  Outcome outcome_;
  std::vector<char> ran_;  // not vector<bool>: ops write neighbours at the same time
  std::vector<Var> vars_;
  const std::vector<GraphOp>& graph_;
  Engine engine_;
};

void Compare(const Outcome& seen, const Outcome& expected) {
  EXPECT_EQ(seen.ran, expected.ran);
  EXPECT_EQ(seen.versions, expected.versions);
  EXPECT_EQ(seen.reported, expected.reported);
  EXPECT_EQ(seen.failed, expected.failed);
  for (int var = 0; var < kVars; ++var) {
    ASSERT_EQ(seen.poison[var].empty(), expected.poison[var].empty()) << "var " << var;
    if (seen.poison[var].empty()) {
      EXPECT_EQ(seen.values[var], expected.values[var]) << "var " << var;
    } else {
      EXPECT_TRUE(expected.poison[var].contains(*seen.poison[var].begin())) << "var " << var;
    }
  }
}

class ErrorGraphTest : public EveryEngine {};
INSTANTIATE_TEST_SUITE_P(All, ErrorGraphTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

TEST_P(ErrorGraphTest, AnOpThatThrowsAtEveryPosition) {
  std::mt19937_64 random(BaseSeed());
  for (int round = 0; round < Rounds(3); ++round) {
    SCOPED_TRACE("HEDDLE_TEST_SEED=" + std::to_string(BaseSeed()) + " round " +
                 std::to_string(round));
    std::vector<GraphOp> graph = MakeGraph(random, 60, /*percent_failing=*/0);
    for (GraphOp& op : graph) {
      if (op.kind == Kind::kClearError) continue;
      op.fails = true;
      Compare(GraphRun(GetParam().options, graph).Run(), Model(graph));
      if (HasFailure()) return;
      op.fails = false;
    }
  }
}

TEST_P(ErrorGraphTest, ManyFailuresInLargeGraphs) {
  std::mt19937_64 random(BaseSeed() + 1);
  for (int round = 0; round < Rounds(10); ++round) {
    SCOPED_TRACE("HEDDLE_TEST_SEED=" + std::to_string(BaseSeed()) + " round " +
                 std::to_string(round));
    const std::vector<GraphOp> graph = MakeGraph(random, 1000, /*percent_failing=*/round % 10 * 3);
    Compare(GraphRun(GetParam().options, graph).Run(), Model(graph));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace heddle::engine_test
