#include "tests/engine/random_program.h"

#include <heddle/error.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace heddle::engine_test {
namespace {

constexpr std::size_t kViolationsMax = 10;  // more would only repeat themselves

std::uint64_t Mix(std::uint64_t hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccd;
  return hash ^ (hash >> 33);
}

bool Has(const std::vector<int>& list, int var) { return std::ranges::count(list, var) != 0; }

std::vector<int> Distinct(std::vector<int> list) {
  std::ranges::sort(list);
  list.erase(std::unique(list.begin(), list.end()), list.end());
  return list;
}

// The semantics of an op, the same for engines and oracles: `read(var)` and `write(var, value)`
// access the cells. Returns the op's own result, which is never 0.
template <class Read, class Write>
std::uint64_t Execute(const ProgramOp& op, int index, Read&& read, Write&& write) {
  std::uint64_t hash = Mix(index + 1, 12345);
  for (const int var : Distinct(op.reads)) hash = Mix(hash, read(var));
  for (const int var : Distinct(op.writes)) write(var, Mix(hash, var));
  return hash | 1;
}

// --- Programs ---

class Maker {
 public:
  Maker(const ProgramOptions& options, std::mt19937_64& random)
      : options_(options), random_(random) {
    program_.num_vars = options.num_vars;
  }

  int Draw(int count) { return static_cast<int>(random_() % count); }
  Program& program() { return program_; }

  // An op over variables [first, first + count).
  int AddOp(int first, int count, int parent) {
    ProgramOp op;
    op.parent = parent;
    const auto draw_vars = [&](int most) {
      std::vector<int> vars(Draw(most + 1));
      for (int& var : vars) var = first + Draw(count);
      return vars;
    };
    op.reads = draw_vars(Draw(20) == 0 ? 12 : 3);
    op.writes = draw_vars(Draw(20) == 0 ? 8 : 2);
    if (!op.writes.empty() && Draw(3) == 0) op.reads.push_back(op.writes[0]);  // read-modify
    if (!op.reads.empty() && Draw(5) == 0) op.reads.push_back(op.reads[0]);    // duplicates
    if (!op.writes.empty() && Draw(5) == 0) op.writes.push_back(op.writes[0]);
    if (Draw(8) == 0)
      op.completes = Draw(2) == 0 ? Completes::kInsideBody : Completes::kOnForeignThread;
    op.priority = Draw(4) == 0 ? Draw(7) - 3 : 0;
    op.spin = Draw(10) == 0 ? Draw(500) : 0;
    const int index = static_cast<int>(program_.ops.size());
    program_.ops.push_back(std::move(op));
    if (parent >= 0) program_.ops[parent].children.push_back(index);
    return index;
  }

  void AddWaits(std::vector<Step>& steps, int first, int count) {
    if (!options_.waits || Draw(100) != 0) return;
    constexpr Step::Kind kKinds[] = {Step::Kind::kWaitForVar, Step::Kind::kWaitForVar,
                                     Step::Kind::kWaitForReadsAndWrites, Step::Kind::kWaitForAll};
    const int within_us = Draw(2) == 0 ? Draw(200) : -1;
    steps.push_back({kKinds[Draw(4)], first + Draw(count), within_us});
  }

 private:
  const ProgramOptions options_;
  std::mt19937_64& random_;
  Program program_;
};

}  // namespace

Program MakeDeterministicProgram(const ProgramOptions& options, std::mt19937_64& random) {
  // The last vars belong to groups: parents write the group's variable, which orders their bodies
  // and so the pushes of the children; children write the second one to the same end for
  // grandchildren.
  constexpr int kGroups = 4,
                kVarsPerGroup = 6;  // 2 for the order, 2 for children, 2 for grandchildren
  const int num_public = options.num_vars - kGroups * kVarsPerGroup;
  Maker maker(options, random);
  maker.program().deterministic = true;
  std::vector<Step>& steps = maker.program().threads.emplace_back();
  auto& ops = maker.program().ops;
  while (static_cast<int>(ops.size()) < options.num_ops) {
    const int root = maker.AddOp(0, num_public, -1);
    steps.push_back({Step::Kind::kPush, root});
    if (maker.Draw(10) == 0) {
      const int group = num_public + maker.Draw(kGroups) * kVarsPerGroup;
      ops[root].writes.push_back(group);
      for (int i = maker.Draw(4); i > 0; --i) {
        const int child = maker.AddOp(group + 2, 2, root);
        if (maker.Draw(2) != 0) continue;
        ops[child].writes.push_back(group + 1);
        for (int j = maker.Draw(3); j > 0; --j) maker.AddOp(group + 4, 2, child);
      }
    }
    maker.AddWaits(steps, 0, num_public);
  }
  return std::move(maker.program());
}

Program MakeFreeProgram(const ProgramOptions& options, std::mt19937_64& random) {
  Maker maker(options, random);
  maker.program().threads.resize(options.num_threads);
  auto& ops = maker.program().ops;
  while (static_cast<int>(ops.size()) < options.num_ops) {
    std::vector<Step>& steps = maker.program().threads[maker.Draw(options.num_threads)];
    const int root = maker.AddOp(0, options.num_vars, -1);
    steps.push_back({Step::Kind::kPush, root});
    if (maker.Draw(10) == 0) {
      for (int i = maker.Draw(4); i > 0; --i) {
        const int child = maker.AddOp(0, options.num_vars, root);
        if (maker.Draw(4) == 0) maker.AddOp(0, options.num_vars, child);
      }
    }
    maker.AddWaits(steps, 0, options.num_vars);
  }
  return std::move(maker.program());
}

// --- Running ---

namespace {

// Runs jobs one by one on a thread of its own: the foreign thread that completes async ops.
class ForeignThread {
 public:
  ~ForeignThread() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
      changed_.notify_one();
    }
    thread_.join();
  }
  void Add(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return over_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool over_ = false;
  std::thread thread_{[this] { Loop(); }};
};

struct alignas(64) Cell {
  std::uint64_t value = 0;                    // plain: ordered by the engine alone
  std::uint64_t version = 0;                  // writes so far
  std::atomic<int> readers = 0, writers = 0;  // relaxed: they watch, they must not order
};

class Runner {
 public:
  Runner(const Program& program, Engine& engine)
      : program_(program), engine_(engine), cells_(program.num_vars) {
    const std::size_t count = program.ops.size();
    out_.results.resize(count);
    out_.seen.resize(count);
    out_.push_begin.resize(count);
    out_.push_end.resize(count);
    for (int i = 0; i < program.num_vars; ++i) vars_.push_back(engine.NewVar());
    if (program.deterministic) expected_.resize(program.num_vars);
  }

  Observation Run() {
    if (program_.threads.size() == 1) {
      RunThread(program_.threads[0]);
    } else {
      std::vector<std::thread> threads;
      for (const std::vector<Step>& steps : program_.threads) {
        threads.emplace_back([this, &steps] { RunThread(steps); });
      }
      for (std::thread& thread : threads) thread.join();
    }
    engine_.WaitForAll();
    for (int var = 0; var < program_.num_vars; ++var) {
      out_.final_values.push_back(cells_[var].value);
      out_.final_versions.push_back(engine_.version(vars_[var]));
      if (cells_[var].version != out_.final_versions.back()) {
        Complain(fmt::format("var {}: {} writes, version {}", var, cells_[var].version,
                             out_.final_versions.back()));
      }
    }
    return std::move(out_);
  }

 private:
  void Complain(std::string text) {
    const std::lock_guard lock(mutex_);
    if (out_.violations.size() < kViolationsMax) out_.violations.push_back(std::move(text));
  }

  void RunThread(const std::vector<Step>& steps) {
    for (const Step& step : steps) {
      switch (step.kind) {
        case Step::Kind::kPush:
          PushOp(step.index);
          if (!expected_.empty()) Expect(step.index);
          break;
        case Step::Kind::kWaitForVar:
          if (!EndsInTime(step, [&](auto... deadline) {
                engine_.WaitForVar(vars_[step.index], deadline...);
              })) {
            break;
          }
          CheckValue(step.index);
          break;
        case Step::Kind::kWaitForReadsAndWrites:
          if (!EndsInTime(step, [&](auto... deadline) {
                engine_.WaitForReadsAndWrites(vars_[step.index], deadline...);
              })) {
            break;
          }
          CheckValue(step.index);
          if (!expected_.empty() && cells_[step.index].readers != 0) {
            Complain(
                fmt::format("var {} is still being read after WaitForReadsAndWrites", step.index));
          }
          break;
        case Step::Kind::kWaitForAll:
          if (EndsInTime(step, [&](auto... deadline) { engine_.WaitForAll(deadline...); }) &&
              !expected_.empty()) {
            for (int var = 0; var < program_.num_vars; ++var) CheckValue(var);
          }
          break;
      }
    }
  }

  template <class Wait>
  static bool EndsInTime(const Step& step, Wait wait) {
    if (step.within_us < 0) {
      wait();
      return true;
    }
    try {
      wait(std::chrono::microseconds(step.within_us));
      return true;
    } catch (const TimeoutError&) {
      return false;
    }
  }

  // Keeps the values as they are when the ops pushed so far have run, for the checks at waits.
  void Expect(int index) {
    Execute(
        program_.ops[index], index, [&](int var) { return expected_[var]; },
        [&](int var, std::uint64_t value) { expected_[var] = value; });
    for (const int child : program_.ops[index].children) Expect(child);
  }

  void CheckValue(int var) {
    if (expected_.empty()) return;  // others may be writing it
    if (cells_[var].value != expected_[var]) {
      Complain(fmt::format("var {} has a wrong value after a wait", var));
    }
  }

  void PushOp(int index) {
    const ProgramOp& op = program_.ops[index];
    std::vector<VarRef> reads, writes;
    for (const int var : op.reads) reads.emplace_back(vars_[var]);
    for (const int var : op.writes) writes.emplace_back(vars_[var]);
    OpOptions options{.name = "random", .reads = reads, .writes = writes, .priority = op.priority};
    options.device = Cpu(index % 4);
    options.lane = static_cast<Lane>(index % 3);
    out_.push_begin[index] = clock_.fetch_add(1);
    if (op.completes == Completes::kSynchronously) {
      engine_.Push(options, [this, index] {
        PushChildren(index);
        RunOp(index);
      });
    } else {
      engine_.PushAsync(options, [this, index](Completion done) {
        PushChildren(index);
        if (program_.ops[index].completes == Completes::kInsideBody) {
          RunOp(index);
          done();
        } else {
          foreign_.Add([this, index, done = std::move(done)] {
            RunOp(index);
            done();
          });
        }
      });
    }
    out_.push_end[index] = clock_.fetch_add(1);
  }

  void PushChildren(int index) {
    for (const int child : program_.ops[index].children) PushOp(child);
  }

  void RunOp(int index) {
    const ProgramOp& op = program_.ops[index];
    if (out_.results[index] != 0) Complain(fmt::format("op {} ran twice", index));
    const std::vector<int> writes = Distinct(op.writes);
    std::vector<int> reads = Distinct(op.reads);
    std::erase_if(reads, [&](int var) { return Has(writes, var); });
    for (const int var : writes) EnterWrite(index, var);
    for (const int var : reads) EnterRead(index, var);
    volatile int spin = 0;
    for (int i = 0; i < op.spin; ++i) spin = spin + i;
    const std::uint64_t result = Execute(
        op, index, [&](int var) { return cells_[var].value; },
        [&](int var, std::uint64_t value) { cells_[var].value = value; });
    out_.results[index] = result;
    for (const int var : reads) cells_[var].readers.fetch_sub(1, std::memory_order_relaxed);
    for (const int var : writes) {
      ++cells_[var].version;
      if (cells_[var].readers.load(std::memory_order_relaxed) != 0) {
        Complain(fmt::format("op {} wrote var {} beside a reader", index, var));
      }
      cells_[var].writers.fetch_sub(1, std::memory_order_relaxed);
    }
  }

  void EnterWrite(int index, int var) {
    Cell& cell = cells_[var];
    if (cell.writers.fetch_add(1, std::memory_order_relaxed) != 0 ||
        cell.readers.load(std::memory_order_relaxed) != 0) {
      Complain(fmt::format("op {} writes var {}, but is not alone", index, var));
    }
    out_.seen[index].push_back({var, cell.version, true});
  }

  void EnterRead(int index, int var) {
    Cell& cell = cells_[var];
    cell.readers.fetch_add(1, std::memory_order_relaxed);
    if (cell.writers.load(std::memory_order_relaxed) != 0) {
      Complain(fmt::format("op {} reads var {} beside a writer", index, var));
    }
    out_.seen[index].push_back({var, cell.version, false});
  }

  const Program& program_;
  Engine& engine_;
  std::vector<Var> vars_;
  std::vector<Cell> cells_;
  std::vector<std::uint64_t> expected_;  // of deterministic programs, else empty
  // Two Push calls of which one ended before the other began are ordered by happens-before, through
  // this.
  std::atomic<std::uint64_t> clock_ = 0;
  Observation out_;
  std::mutex mutex_;  // out_.violations
  ForeignThread foreign_;
};

// Runs ops one by one.
class SerialMachine {
 public:
  explicit SerialMachine(const Program& program)
      : program_(program), values_(program.num_vars), results_(program.ops.size()) {}

  void RunWithChildren(int index) {
    Run(index);
    for (const int child : program_.ops[index].children) RunWithChildren(child);
  }
  void Run(int index) {
    results_[index] = Execute(
        program_.ops[index], index, [&](int var) { return values_[var]; },
        [&](int var, std::uint64_t value) { values_[var] = value; });
  }

  std::vector<std::string> Differences(const Observation& observation) const {
    std::vector<std::string> differences = observation.violations;
    for (std::size_t i = 0; i < results_.size() && differences.size() < kViolationsMax; ++i) {
      if (observation.results[i] == 0) {
        differences.push_back(fmt::format("op {} did not run", i));
      } else if (observation.results[i] != results_[i]) {
        differences.push_back(fmt::format("op {} computed something else", i));
      }
    }
    if (observation.final_values != values_) differences.emplace_back("the final values differ");
    return differences;
  }

 private:
  const Program& program_;
  std::vector<std::uint64_t> values_, results_;
};

// The order of all ops, as a graph: nodes are the ops and, behind them, the ticks of the push
// clock.
class OrderGraph {
 public:
  OrderGraph(const Program& program, const Observation& observation)
      : num_ops_(static_cast<int>(program.ops.size())), successors_(3 * num_ops_) {
    for (int tick = 1; tick < 2 * num_ops_; ++tick) AddEdge(num_ops_ + tick - 1, num_ops_ + tick);
    for (int op = 0; op < num_ops_; ++op) {
      AddEdge(num_ops_ + static_cast<int>(observation.push_begin[op]), op);
      AddEdge(op, num_ops_ + static_cast<int>(observation.push_end[op]));
      if (program.ops[op].parent >= 0) AddEdge(program.ops[op].parent, op);
    }
    AddObservedOrder(program, observation);
  }

  const std::vector<std::string>& problems() const { return problems_; }

  // The ops in an order that agrees with all edges; nothing if there is none.
  std::optional<std::vector<int>> Sorted() const {
    std::vector<int> incoming(successors_.size());
    for (const std::vector<int>& list : successors_) {
      for (const int node : list) ++incoming[node];
    }
    std::vector<int> ready, order;
    for (std::size_t node = 0; node < incoming.size(); ++node) {
      if (incoming[node] == 0) ready.push_back(static_cast<int>(node));
    }
    std::size_t visited = 0;
    for (; !ready.empty(); ++visited) {
      const int node = ready.back();
      ready.pop_back();
      if (node < num_ops_) order.push_back(node);
      for (const int next : successors_[node]) {
        if (--incoming[next] == 0) ready.push_back(next);
      }
    }
    if (visited != successors_.size()) return std::nullopt;
    return order;
  }

 private:
  void AddEdge(int from, int to) { successors_[from].push_back(to); }

  // Per variable: the write that saw version v made version v + 1; who saw v comes between the two.
  void AddObservedOrder(const Program& program, const Observation& observation) {
    std::vector<std::vector<int>> writers(program.num_vars);
    for (int var = 0; var < program.num_vars; ++var) {
      writers[var].assign(observation.final_versions[var], -1);
    }
    for (int op = 0; op < num_ops_; ++op) {
      for (const Seen& seen : observation.seen[op]) {
        if (!seen.writes) continue;
        if (seen.version >= writers[seen.var].size() || writers[seen.var][seen.version] != -1) {
          problems_.push_back(
              fmt::format("two writes of var {} saw version {}", seen.var, seen.version));
          continue;
        }
        writers[seen.var][seen.version] = op;
      }
    }
    for (int op = 0; op < num_ops_; ++op) {
      for (const Seen& seen : observation.seen[op]) {
        const std::vector<int>& writes = writers[seen.var];
        if (seen.version > 0 && seen.version <= writes.size() && writes[seen.version - 1] >= 0) {
          AddEdge(writes[seen.version - 1], op);
        }
        if (!seen.writes && seen.version < writes.size() && writes[seen.version] >= 0) {
          AddEdge(op, writes[seen.version]);
        }
      }
    }
  }

  int num_ops_;
  std::vector<std::vector<int>> successors_;
  std::vector<std::string> problems_;
};

}  // namespace

Observation RunProgram(const Program& program, Engine& engine) {
  return Runner(program, engine).Run();
}

std::vector<std::string> CompareWithSerialOrder(const Program& program,
                                                const Observation& observation) {
  SerialMachine machine(program);
  for (const Step& step : program.threads.at(0)) {
    if (step.kind == Step::Kind::kPush) machine.RunWithChildren(step.index);
  }
  return machine.Differences(observation);
}

std::vector<std::string> CheckSomeOrderExplains(const Program& program,
                                                const Observation& observation) {
  if (!observation.violations.empty()) return observation.violations;
  const OrderGraph graph(program, observation);
  if (!graph.problems().empty()) return graph.problems();
  const std::optional<std::vector<int>> order = graph.Sorted();
  if (!order) {
    return {"no one order of all ops agrees with what they saw and with the order of the pushes"};
  }
  SerialMachine machine(program);
  for (const int op : *order) machine.Run(op);
  return machine.Differences(observation);
}

}  // namespace heddle::engine_test
