// Random programs of CPU and GPU ops on several simulated devices, with and without failures,
// against the same ops run one by one. HEDDLE_TEST_ROUNDS makes it a soak test.
#include <heddle/engine.h>
#include <heddle/error.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"

namespace heddle::engine_test {
namespace {

constexpr int kDevices = 3;
constexpr int kVars = 24;

struct RandomOp {
  std::vector<int> reads, writes;
  Device device;
  Lane lane = Lane::kNormal;
  int priority = 0;
  bool fails = false;  // its body throws, or its launch fails
};

std::uint64_t Mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

// What an op does, wherever it runs. Plain memory: the engine alone orders it.
void Compute(const RandomOp& op, int index, std::vector<std::uint64_t>& cells) {
  std::uint64_t hash = static_cast<std::uint64_t>(index) + 1;
  for (const int var : op.reads) hash = Mix(hash, cells[static_cast<std::size_t>(var)]);
  for (const int var : op.writes) {
    cells[static_cast<std::size_t>(var)] = Mix(hash, static_cast<std::uint64_t>(var));
  }
}

bool Reads(const RandomOp& op, int var) {
  return std::find(op.reads.begin(), op.reads.end(), var) != op.reads.end();
}

std::vector<RandomOp> MakeProgram(int count, bool failures, std::mt19937_64& random) {
  const auto draw = [&](int n) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(n));
  };
  std::vector<RandomOp> ops(static_cast<std::size_t>(count));
  for (RandomOp& op : ops) {
    const auto draw_vars = [&](int most) {
      std::vector<int> vars;
      for (int i = draw(most + 1); i > 0; --i) {
        const int var = draw(kVars);
        if (std::find(vars.begin(), vars.end(), var) == vars.end()) vars.push_back(var);
      }
      return vars;
    };
    op.reads = draw_vars(3);
    op.writes = draw_vars(2);
    if (!op.writes.empty() && draw(2) == 0 && !Reads(op, op.writes[0])) {
      op.reads.push_back(op.writes[0]);
    }
    op.device = draw(3) == 0 ? Cpu(draw(2)) : Gpu(draw(kDevices));
    op.lane = static_cast<Lane>(draw(4));
    op.priority = draw(3) == 0 ? draw(5) - 2 : 0;
    op.fails = failures && draw(25) == 0;
  }
  return ops;
}

// The ops run one by one.
struct Oracle {
  std::vector<std::uint64_t> cells = std::vector<std::uint64_t>(kVars);
  std::vector<std::uint64_t> versions = std::vector<std::uint64_t>(kVars);
  std::vector<std::optional<int>> poison = std::vector<std::optional<int>>(kVars);  // the op

  void Run(const RandomOp& op, int index) {
    // The order of list: pure reads first, then what is written too.
    std::optional<int> why;
    const auto look = [&](int var) {
      if (!why) why = poison[static_cast<std::size_t>(var)];
    };
    for (const int var : op.reads) look(var);
    if (!why && op.fails) why = index;
    if (!why) Compute(op, index, cells);
    for (const int var : op.writes) {
      poison[static_cast<std::size_t>(var)] = why;
      ++versions[static_cast<std::size_t>(var)];
    }
  }
};

class GpuRandomTest : public EveryEngine {
 protected:
  void RunPrograms(bool failures, int rounds, int ops_a_round);
};
INSTANTIATE_TEST_SUITE_P(All, GpuRandomTest, testing::ValuesIn(AllConfigs()), ConfigLabel);

void GpuRandomTest::RunPrograms(bool failures, int rounds, int ops_a_round) {
  std::mt19937_64 random(BaseSeed() + (failures ? 1 : 0));
  for (int round = 0; round < Rounds(rounds); ++round) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, round {}", BaseSeed(), round));
    const std::vector<RandomOp> ops = MakeProgram(ops_a_round, failures, random);
    const auto gpu = std::make_shared<SimGpu>(kDevices, random());
    EngineOptions options = GetParam().options;
    options.gpu_driver = gpu;
    constexpr int kAhead[] = {16, 1, 3};
    options.gpu.issued_ahead = kAhead[round % 3];
    options.gpu.lanes[0].streams = 1 + round % 2;
    options.gpu.lanes[2].urgent_streams = round % 3;
    options.max_pending_ops = round % 4 == 3 ? 5 : 1 << 20;
    std::vector<std::uint64_t> cells(kVars);
    Oracle oracle;
    Engine engine(options);
    std::vector<Var> vars;
    for (int i = 0; i < kVars; ++i) vars.push_back(engine.NewVar());
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const RandomOp& op = ops[i];
      const int index = static_cast<int>(i);
      std::vector<VarRef> reads, writes;
      for (const int var : op.reads) reads.emplace_back(vars[static_cast<std::size_t>(var)]);
      for (const int var : op.writes) writes.emplace_back(vars[static_cast<std::size_t>(var)]);
      const OpOptions push{.name = std::to_string(i),
                           .reads = reads,
                           .writes = writes,
                           .device = op.device,
                           .lane = op.lane,
                           .priority = op.priority};
      if (op.device.type == DeviceType::kGpu) {
        engine.PushGpu(push, [&op, index, &cells](GpuStream stream) {
          if (op.fails && index % 2 == 0) throw std::runtime_error("thrown");
          if (op.fails) {
            SimGpu::FailLaunch("cudaErrorInvalidConfiguration");
            return;
          }
          SimGpu::Launch(stream, [&op, index, &cells] { Compute(op, index, cells); });
        });
      } else {
        engine.Push(push, [&op, index, &cells] {
          if (op.fails) throw std::runtime_error("thrown");
          Compute(op, index, cells);
        });
      }
      oracle.Run(op, index);
      if (random() % 40 != 0) continue;
      const std::size_t var = random() % kVars;
      try {
        engine.WaitForVar(vars[var]);
        ASSERT_FALSE(oracle.poison[var].has_value());
        ASSERT_EQ(cells[var], oracle.cells[var]) << "var " << var << " after op " << i;
      } catch (const std::exception&) {
        ASSERT_TRUE(oracle.poison[var].has_value());
      }
      ASSERT_EQ(engine.version(vars[var]), oracle.versions[var]);
    }
    for (std::size_t var = 0; var < kVars; ++var) {
      try {
        engine.WaitForReadsAndWrites(vars[var]);
      } catch (const std::exception&) {
        ASSERT_TRUE(failures);
      }
      ASSERT_EQ(engine.version(vars[var]), oracle.versions[var]) << "var " << var;
      const std::optional<Failure> failure = engine.FailureOf(vars[var]);
      ASSERT_EQ(failure.has_value(), oracle.poison[var].has_value()) << "var " << var;
      if (failure) {
        ASSERT_EQ(failure->op, std::to_string(*oracle.poison[var]));
      } else {
        ASSERT_EQ(cells[var], oracle.cells[var]) << "var " << var;
      }
    }
    if (!failures) engine.WaitForAll();
  }
}

TEST_P(GpuRandomTest, CpuAndGpuOpsGiveTheResultsOfTheSerialOrder) { RunPrograms(false, 3, 300); }

TEST_P(GpuRandomTest, FailuresPoisonWhatTheSerialOrderSays) { RunPrograms(true, 3, 300); }

// Whatever waits for it, on whichever device and stream, directly or not. The kernels touch
// nothing: one that runs while its device fails, on another stream, runs on here.
TEST_P(GpuRandomTest, ADeviceThatFailsMidwayLeavesNobodyWaiting) {
  std::mt19937_64 random(BaseSeed() + 2);
  for (int round = 0; round < Rounds(3); ++round) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, round {}", BaseSeed(), round));
    const std::vector<RandomOp> ops = MakeProgram(200, /*failures=*/false, random);
    const std::size_t fails_from = random() % 150;
    const auto gpu = std::make_shared<SimGpu>(kDevices, random());
    gpu->set_patience(std::chrono::milliseconds(20));
    EngineOptions options = GetParam().options;
    options.gpu_driver = gpu;
    options.gpu.issued_ahead = round % 2 == 0 ? 16 : 3;
    Engine engine(options);
    std::vector<Var> vars;
    std::vector<std::uint64_t> writes_of(kVars);
    for (int i = 0; i < kVars; ++i) vars.push_back(engine.NewVar());
    bool has_failed = false;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const RandomOp& op = ops[i];
      std::vector<VarRef> reads, writes;
      for (const int var : op.reads) reads.emplace_back(vars[static_cast<std::size_t>(var)]);
      for (const int var : op.writes) {
        writes.emplace_back(vars[static_cast<std::size_t>(var)]);
        ++writes_of[static_cast<std::size_t>(var)];
      }
      const OpOptions push{.name = std::to_string(i),
                           .reads = reads,
                           .writes = writes,
                           .device = op.device,
                           .lane = op.lane,
                           .priority = op.priority};
      if (op.device.type != DeviceType::kGpu) {
        engine.Push(push, [] {});
        continue;
      }
      const bool fails = !has_failed && i >= fails_from;
      has_failed |= fails;
      engine.PushGpu(push, [fails](GpuStream stream) {
        SimGpu::Launch(stream, [fails] {
          if (fails) throw 1;
        });
      });
    }
    for (std::size_t var = 0; var < kVars; ++var) {
      try {
        engine.WaitForReadsAndWrites(vars[var], kSoon);
      } catch (const CudaError&) {
      }
      ASSERT_EQ(engine.version(vars[var]), writes_of[var]) << "var " << var;
    }
    engine.Stop();
  }
}

}  // namespace
}  // namespace heddle::engine_test
