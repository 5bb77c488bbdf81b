// Random programs of ops, a runner for any engine, and the two oracles that judge what came out.
//
// An op reads and writes cells, one a variable. What it computes depends on its number and on all
// that it reads, so that any wrong order, lost or doubled op shows in the results, bit for bit.
// Cells are plain memory: the engine alone must order the accesses (the thread sanitizer sees if it
// does not).
#pragma once

#include <heddle/engine.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace heddle::engine_test {

enum class Completes { kSynchronously, kInsideBody, kOnForeignThread };

struct ProgramOp {
  std::vector<int> reads, writes;  // with duplicates
  std::vector<int> children;       // ops that this op's body pushes, in order
  int parent = -1;
  Completes completes = Completes::kSynchronously;
  int priority = 0;
  int spin = 0;  // how long the body dawdles
};

// One step of a pushing thread: push an op or wait.
struct Step {
  enum class Kind { kPush, kWaitForVar, kWaitForReadsAndWrites, kWaitForAll } kind = Kind::kPush;
  int index = 0;       // op or var
  int within_us = -1;  // of a wait: its deadline, which may well pass; -1: none
};

struct Program {
  int num_vars = 0;
  bool deterministic = false;  // its results are those of the ops run one by one
  std::vector<ProgramOp> ops;
  std::vector<std::vector<Step>> threads;
};

struct ProgramOptions {
  int num_ops = 10'000;
  int num_vars = 100;
  int num_threads = 1;
  bool waits = true;
};

// One pushing thread. Ops pushed from inside ops touch variables of their parents' own, and the
// parents of one such group all write one variable; so all results are those of the ops run one by
// one.
Program MakeDeterministicProgram(const ProgramOptions& options, std::mt19937_64& random);
// Several pushing threads, and ops pushed from inside ops over all variables: many orders are
// right.
Program MakeFreeProgram(const ProgramOptions& options, std::mt19937_64& random);

// What one op saw of one variable: how many writes had been done before it.
struct Seen {
  int var;
  std::uint64_t version;
  bool writes;
};

struct Observation {
  std::vector<std::uint64_t> results;   // by op; 0: it did not run
  std::vector<std::vector<Seen>> seen;  // by op
  std::vector<std::uint64_t> push_begin,
      push_end;                               // by op: times of a clock that orders the Push calls
  std::vector<std::uint64_t> final_values;    // by var
  std::vector<std::uint64_t> final_versions;  // by var, as Engine::version gives them
  std::vector<std::string> violations;        // what went wrong while it ran
};

// Runs `program`. If it is deterministic, values are also compared at each of its waits.
Observation RunProgram(const Program& program, Engine& engine);

// For deterministic programs: the differences from running the ops one by one; none: as it should
// be.
std::vector<std::string> CompareWithSerialOrder(const Program& program,
                                                const Observation& observation);

// For free programs: whether there is one order of all ops that agrees with what every op saw, with
// each thread's program order, and with every two Push calls of which one returned before the other
// began; and whether the ops run one by one in that order give the same results.
std::vector<std::string> CheckSomeOrderExplains(const Program& program,
                                                const Observation& observation);

}  // namespace heddle::engine_test
