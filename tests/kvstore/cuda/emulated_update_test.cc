// The updates of GPUs against those of the CPU, bit by bit, without a GPU: launches are planned as
// for one, and the work of each thread runs on the CPU.
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/support/resnet.h"
#include "kvstore/gpu_batches.h"
#include "kvstore/optimizer/cuda/plans.h"
#include "ops/cuda/copy_plan.h"
#include "tests/kvstore/cuda/update_values.h"
#include "tests/kvstore/gpu_optimizers.h"
#include "tests/ops/cuda/emulated_launch.h"

namespace heddle::kvstore::cuda {
namespace {

// Lanes of a warp in turn; their sums are added as the warp does.
struct EmulatedUpdateLaunch : ops::cuda::EmulatedLaunch {
  template <class AnyTable>
  void operator()(const AnyTable& table) const {
    using Body = typename AnyTable::Body;
    if constexpr (requires { Body::kIsSumPass; }) {
      ++*launches;
      for (std::uint32_t task = 0; task < table.size && runs; ++task) {
        const std::uint64_t count = table.RunOf(task).count;
        for (std::uint64_t block = 0; block < ops::ReductionBlocks(count); ++block) {
          SumBlock(table.BodyOf(task), count, block);
        }
      }
    } else if constexpr (requires { Body::kIsRowPass; }) {
      ++*launches;
      for (std::uint32_t task = 0; task < table.size && runs; ++task) {
        for (std::uint64_t row = 0; row < table.RunOf(task).count; ++row) {
          UpdateRow(table.BodyOf(task), row);
        }
      }
    } else if (runs) {
      EmulatedLaunch::operator()(table);
    } else {
      ++*launches;
    }
  }

  template <class Body>
  static void SumBlock(const Body& body, std::uint64_t count, std::uint64_t block) {
    double sums[ops::cuda::kWarpLanes][Body::kSums];
    for (unsigned lane = 0; lane < ops::cuda::kWarpLanes; ++lane) {
      body.SumLane(count, block, lane, sums[lane]);
    }
    for (int k = 0; k < Body::kSums; ++k) {
      for (unsigned half = ops::cuda::kWarpLanes / 2; half > 0; half /= 2) {
        for (unsigned lane = 0; lane < half; ++lane) sums[lane][k] += sums[lane + half][k];
      }
      body.block_sums[k][block] = sums[0][k];
    }
  }

  template <class Body>
  static void UpdateRow(const Body& body, std::uint64_t row) {
    const auto state = body.states[row];
    double total = 0;
    for (std::uint64_t block = 0; block < body.BlocksOfRow(); ++block) {
      double sums[ops::cuda::kWarpLanes];
      for (unsigned lane = 0; lane < ops::cuda::kWarpLanes; ++lane) {
        sums[lane] = body.SumLane(row, block, lane);
      }
      for (unsigned half = ops::cuda::kWarpLanes / 2; half > 0; half /= 2) {
        for (unsigned lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
      }
      total += sums[0];
    }
    for (unsigned lane = 0; lane < ops::cuda::kWarpLanes; ++lane) {
      body.Finish(row, lane, state, total);
    }
  }

  bool runs = true;  // false: only counts
};

class EmulatedUpdate : public ops::KernelTest {
 protected:
  // Several keys, each with its rates, in one list.
  template <typename T>
  void CompareWithCpu(const internal::UpdateRule& rule, bool multi_precision) {
    constexpr std::size_t kKeys = 3;
    std::vector<std::unique_ptr<Value<T>>> values;
    std::vector<std::unique_ptr<Value<T>>> expected;
    std::vector<internal::KeyUpdate> updates(kKeys);
    std::vector<internal::UpdateRun> runs;
    int passes = 1;
    const auto step = static_cast<std::int64_t>(2 + Below(2));  // passes depend on it
    for (std::size_t key = 0; key < kKeys; ++key) {
      // Rows of one block, of several, and of a few elements.
      const std::size_t row_length = rule.by_rows() ? 1 + Below(Below(2) == 0 ? 10000 : 70) : 1;
      const std::size_t elements = Below(4) == 0 ? Below(9000) : RandomCount();
      const std::size_t count = (elements + row_length - 1) / row_length * row_length;
      values.push_back(
          std::make_unique<Value<T>>(count, Below(3) * Below(9), multi_precision, random_));
      expected.push_back(std::make_unique<Value<T>>(count, 0, multi_precision, random_));
      expected.back()->CopyFrom(*values.back());
      updates[key].learning_rate = Below(8) == 0 ? 0 : 0.1 / static_cast<double>(1 + key);
      updates[key].weight_decay = 0.01 * static_cast<double>(key);
      updates[key].step = step;
      updates[key].key_hash = random_();
      updates[key].row_length = static_cast<std::int64_t>(row_length);
      updates[key].numbers = {0.8, 0.1};
      updates[key].key = "weight";
      passes = rule.Begin(updates[key]);
      UpdateOnCpu(rule, expected.back()->Run(rule, updates[key]), updates[key], passes);
      runs.push_back(values.back()->Run(rule, updates[key]));
    }
    Emulate(rule, runs, passes);
    for (std::size_t key = 0; key < kKeys; ++key) {
      ops::ExpectSame(values[key]->weight, expected[key]->weight, "weight");
      ops::ExpectSame(*values[key]->master, *expected[key]->master, "master");
      for (std::size_t k = 0; k < internal::kUpdateStatesMax; ++k) {
        ops::ExpectSame(*values[key]->states[k], *expected[key]->states[k], "state");
        ops::ExpectSame(*values[key]->wide_states[k], *expected[key]->wide_states[k], "state");
      }
    }
  }

  void Emulate(const internal::UpdateRule& rule, const std::vector<internal::UpdateRun>& runs,
               int passes) {
    Emulate(rule, runs, passes, launch_);
  }
  static void Emulate(const internal::UpdateRule& rule,
                      const std::vector<internal::UpdateRun>& runs, int passes,
                      const EmulatedUpdateLaunch& launch) {
    using Planner = ops::cuda::UpdatePlanner<EmulatedUpdateLaunch>;
    Planner planner(launch);
    std::vector<double> scratch(SumsBytes(runs, passes) / sizeof(double), -1.0);
    ASSERT_TRUE(AllNumbers::VisitOne(rule.numbers(), [&](const auto& numbers) {
      PlanPasses(runs, {passes, 0, passes}, scratch.data(), planner,
                 [&](const GpuRun& run, Planner& to) { Plan(numbers, run, to); });
    }));
  }

  int launches_ = 0;
  const EmulatedUpdateLaunch launch_{{&launches_}};
};

TEST_F(EmulatedUpdate, HasTheBitsOfTheCpuForEveryOptimizer) {
  const std::vector<std::string_view> optimizers = kvstore_test::GpuOptimizerNames();
  EXPECT_GE(optimizers.size(), 22U) << "one has lost its numbers()";
  for (std::string_view optimizer : optimizers) {
    for (const double momentum : {0.0, 0.9}) {
      for (const double clip : {0.0, 0.5}) {
        // "centered" and "clip_weights" are those of rmsprop, the last two those of lbsgd.
        const RulePtr rule = MakeRuleOf(optimizer, {{"momentum", momentum},
                                                    {"clip_gradient", clip},
                                                    {"rescale_grad", 0.7},
                                                    {"clip_weights", clip * 2},
                                                    {"centered", momentum > 0 ? 1 : 0},
                                                    {"batch_scale", 1 + clip * 2},
                                                    {"warmup_strategy", momentum > 0 ? 3 : 1}});
        SCOPED_TRACE(fmt::format("{}, momentum {}, clip {}", optimizer, momentum, clip));
        CompareWithCpu<float>(*rule, false);
        CompareWithCpu<double>(*rule, false);
        CompareWithCpu<Float16>(*rule, false);
        CompareWithCpu<BFloat16>(*rule, false);
        CompareWithCpu<Float16>(*rule, true);
        CompareWithCpu<BFloat16>(*rule, true);
        if (HasFailure()) return;
      }
    }
  }
}

// Push and pull of its parameters on one GPU, in the ops that a store cuts a list into: updates by
// SGD, then a copy of each value. The addresses are never used.
TEST_F(EmulatedUpdate, AStepOfResNet50TakesAtMostSixteenLaunches) {
  auto next = std::uintptr_t{1} << 32;
  const auto address = [&next](std::int64_t count) {
    next += static_cast<std::uintptr_t>(count * 4 + 255) / 256 * 256;
    return reinterpret_cast<void*>(next);
  };
  for (const double momentum : {0.0, 0.9}) {
    const RulePtr rule = MakeRuleOf("sgd", {{"momentum", momentum}});
    int launches = 0;
    int ops = 0;
    const EmulatedUpdateLaunch count_only{{&launches}, /*runs=*/false};
    internal::KeyUpdate update = {};
    std::vector<internal::UpdateRun> runs;
    std::vector<ops::CopyTask> copies;
    const auto at = [](const auto& all, std::span<const std::size_t> places) {
      std::decay_t<decltype(all)> some;
      for (const std::size_t place : places) some.push_back(all[place]);
      return some;
    };
    GpuBatches pushes([&](std::span<const std::size_t> places) {
      ++ops;
      Emulate(*rule, at(runs, places), rule->Begin(update), count_only);
    });
    GpuBatches pulls([&](std::span<const std::size_t> places) {
      ++ops;
      ops::cuda::PlanCopies(at(copies, places), count_only);
    });
    const std::vector<std::int64_t> sizes = bench::ResNet50();
    ASSERT_EQ(sizes.size(), 161U);
    for (const std::int64_t size : sizes) {
      internal::UpdateRun run = {};
      run.update = &update;
      run.dtype = DType::kFloat32;
      run.weight = address(size);
      run.gradient = address(size);
      for (std::size_t k = 0; k < rule->num_states(); ++k) run.states[k] = address(size);
      run.count = static_cast<std::size_t>(size);
      runs.push_back(run);
      copies.push_back({run.weight, address(size), run.count * 4});
      pushes.Add(Gpu(0), engine::kNoOp, /*copies=*/false, runs.size() - 1, size * 4, 1);
      pulls.Add(Gpu(0), engine::kNoOp, /*copies=*/false, copies.size() - 1, size * 4, 1);
    }
    pushes.Flush();
    pulls.Flush();
    EXPECT_LE(launches, 16);
    EXPECT_EQ(ops, 4);
  }
}

TEST_F(EmulatedUpdate, ManySmallKeysTakeFewLaunches) {
  for (std::string_view optimizer : {"sgd", "adam"}) {
    const RulePtr rule = MakeRuleOf(optimizer, {{"momentum", 0.9}});
    std::vector<std::unique_ptr<Value<float>>> values;
    std::vector<internal::UpdateRun> runs;
    internal::KeyUpdate update = {};
    update.learning_rate = 0.1;
    update.step = 1;
    for (int key = 0; key < 161; ++key) {
      values.push_back(std::make_unique<Value<float>>(1 + Below(50), 0, false, random_));
      runs.push_back(values.back()->Run(*rule, update));
    }
    launches_ = 0;
    Emulate(*rule, runs, 1);
    EXPECT_LE(launches_, 6) << optimizer;
  }
}

}  // namespace
}  // namespace heddle::kvstore::cuda
