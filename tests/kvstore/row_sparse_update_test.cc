// Updates by row-sparse gradients: what a rule gets to see, against a plain loop.
//
// Method: an optimizer of the test's own, whose rule has every feature that a rule can have: a
// state an element that starts as zeros, one that starts as the weight, one a row; passes that sum;
// lazy or not; runs of whole rows. Weights and gradients are dense or row-sparse. The oracle
// applies the rule's formula to rows of doubles or floats.
#include <heddle/kvstore.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/optimizer/update_plan.h"
#include "ops/dispatch.h"
#include "ops/reduce.h"
#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

using internal::KeyUpdate;
using internal::UpdatePlan;
using internal::UpdateRule;
using internal::UpdateRun;
using internal::UpdateStateType;

struct Features {
  bool lazy = true;
  bool sums = false;     // adds the sum of the gradient's elements to each weight
  bool by_rows = false;  // checks that runs are whole rows
  bool multi_precision = false;
};

// m = 0.5 m + g;  w = w - rate * m + 0.25 * (start - w) + sum;  counts the updates of each row.
class TestRule final : public UpdateRule {
 public:
  explicit TestRule(const Features& features) : features_(features) {}

  std::span<const UpdateStateType> states() const override {
    static constexpr UpdateStateType kStates[] = {
        {.name = "m"},
        {.name = "start", .start = UpdateStateType::Start::kWeight},
        {.name = "count", .per_row = true}};
    return kStates;
  }
  bool lazy(bool /*row_sparse_weight*/) const override { return features_.lazy; }
  bool by_rows() const override { return features_.by_rows; }
  int Begin(KeyUpdate&) const override { return features_.sums ? 2 : 1; }

  void Update(const UpdateRun& run) const override {
    ops::DispatchFloating(run.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      if (run.master != nullptr) {
        UpdateTyped<T, float>(run);
      } else {
        UpdateTyped<T, T>(run);
      }
    });
  }
  // Simulated GPUs take it, too.
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(features_); }

 private:
  template <class T, class S>
  void UpdateTyped(const UpdateRun& run) const {
    const auto* const gradient = static_cast<const T*>(run.gradient);
    if (run.block_sums[0] != nullptr) {
      for (std::size_t i = 0; i < run.count; ++i) {
        const bool starts_block = i % ops::kReductionBlock == 0;
        double& sum = run.block_sums[0][i / ops::kReductionBlock];
        sum = (starts_block ? 0 : sum) + static_cast<float>(gradient[i]);
      }
      return;
    }
    auto* const weight = static_cast<T*>(run.weight);
    auto* const state =
        run.master != nullptr ? reinterpret_cast<S*>(run.master) : static_cast<S*>(run.weight);
    auto* const m = static_cast<S*>(run.states[0]);
    auto* const start = static_cast<S*>(run.states[1]);
    auto* const count = static_cast<S*>(run.states[2]);
    const std::int64_t length = run.update->row_length;
    if (features_.by_rows || features_.lazy) {
      EXPECT_EQ(run.first % length, 0);
      EXPECT_EQ(static_cast<std::int64_t>(run.count) % length, 0);
    }
    const double sum = features_.sums ? run.update->sums[0][0] : 0;
    const std::int64_t first_row = run.first / length;
    for (std::size_t i = 0; i < run.count; ++i) {
      const std::int64_t element = run.first + static_cast<std::int64_t>(i);
      const float g = static_cast<float>(gradient[i]);
      m[i] = S(0.5F * static_cast<float>(m[i]) + g);
      const float w = static_cast<float>(state[i]);
      const float updated =
          w - static_cast<float>(run.update->learning_rate) * static_cast<float>(m[i]) +
          0.25F * (static_cast<float>(start[i]) - w) + static_cast<float>(sum);
      state[i] = S(updated);
      if (run.master != nullptr) weight[i] = T(updated);
      if (element % length == length - 1) {
        S& counted = count[element / length - first_row];
        counted = S(static_cast<float>(counted) + 1);
      }
    }
  }

  const Features features_;
};

class TestOptimizer final : public Optimizer {
 public:
  explicit TestOptimizer(const Features& features) {
    UpdatePlan plan;
    plan.rule = std::make_shared<TestRule>(features);
    plan.learning_rate = 0.125;
    plan.multi_precision = features.multi_precision;
    plan_ = std::make_shared<const UpdatePlan>(plan);
  }
  std::string_view name() const override { return "for-the-test"; }
  double Get(std::string_view) const override { return 0; }
  void Set(std::string_view, double) override {}
  std::vector<std::pair<std::string_view, double>> Parameters() const override { return {}; }
  void SetSchedule(std::optional<LearningRateSchedule>) override {}
  std::optional<LearningRateSchedule> schedule() const override { return std::nullopt; }
  void SetLearningRateMultiplier(KeyRef, double) override {}
  void SetWeightDecayMultiplier(KeyRef, double) override {}
  std::shared_ptr<const UpdatePlan> plan() const override { return plan_; }

 private:
  std::shared_ptr<const UpdatePlan> plan_;
};

// A value of rows: all of a dense one, those that are there of a row-sparse one.
using ValuesByRow = std::map<std::int64_t, std::vector<float>>;

struct Case {
  std::string name;
  Features features;
  bool row_sparse_weight;
  DType dtype = DType::kFloat32;
};

class RowSparseUpdateTest : public StoreTest {
 protected:
  static constexpr std::int64_t kRows = 40;
  static constexpr std::int64_t kRowSize = 3;

  float Round(DType dtype, float value) {
    return dtype == DType::kBFloat16 ? static_cast<float>(BFloat16(value)) : value;
  }
  // Multiples of 1/16, so that the sums of an update are exact in any order.
  float Number() { return static_cast<float>(static_cast<int>(random_() % 65) - 32) / 16; }

  ValuesByRow RandomRows(unsigned one_in) {
    ValuesByRow rows;
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (random_() % one_in != 0) continue;
      for (int j = 0; j < kRowSize; ++j) rows[id].push_back(Number());
    }
    return rows;
  }
  RowSparseNDArray ToArray(const ValuesByRow& rows, DType dtype) {
    std::vector<std::int64_t> ids;
    std::vector<float> values;
    for (const auto& [id, row] : rows) {
      ids.push_back(id);
      values.insert(values.end(), row.begin(), row.end());
    }
    return RowSparseNDArray::FromVectors<float>(ids, values, {kRows, kRowSize}, dtype,
                                                On(Cpu(static_cast<int>(random_() % 3))), engine);
  }

  void Run(const Case& test) {
    SCOPED_TRACE(test.name);
    const auto store = NewStore();
    const bool partial = test.row_sparse_weight;
    ValuesByRow weight = RandomRows(partial ? 2 : 1);
    for (auto& [id, row] : weight) {
      for (float& w : row) w = Round(test.dtype, w);
    }
    ValuesByRow start;
    for (std::int64_t id = 0; id < kRows; ++id) {
      start[id] = weight.count(id) != 0 ? weight[id] : std::vector<float>(kRowSize);
    }
    ValuesByRow m;
    ValuesByRow master = start;
    if (partial) {
      store->Init("k", ToArray(weight, test.dtype));
    } else {
      store->Init("k", ToArray(weight, test.dtype).ToDense());
    }
    store->SetOptimizer(std::make_shared<TestOptimizer>(test.features));
    const DType state_dtype = test.features.multi_precision ? DType::kFloat32 : test.dtype;
    for (int push = 0; push < 6; ++push) {
      std::vector<RowSparseNDArray> gradients;
      ValuesByRow sum;
      double total = 0;
      for (std::size_t k = 0, n = 1 + random_() % 4; k < n; ++k) {
        const ValuesByRow gradient = RandomRows(1 + static_cast<unsigned>(random_() % 6));
        gradients.push_back(ToArray(gradient, test.dtype));
        for (const auto& [id, row] : gradient) {
          sum[id].resize(kRowSize);
          for (std::size_t j = 0; j < row.size(); ++j) sum[id][j] += row[j];
        }
      }
      for (auto& [id, row] : sum) {
        for (float& g : row) g = Round(test.dtype, g);
        for (float g : row) total += g;
      }
      store->Push("k", gradients);

      ValuesByRow updated = test.features.lazy ? sum : start;
      for (auto& [id, row] : updated) {
        const std::vector<float> g = sum.count(id) != 0 ? sum[id] : std::vector<float>(kRowSize);
        m[id].resize(kRowSize);
        for (std::size_t j = 0; j < kRowSize; ++j) {
          float& w = master[id][j];
          m[id][j] = Round(state_dtype, 0.5F * m[id][j] + g[j]);
          w = w - 0.125F * m[id][j] + 0.25F * (start[id][j] - w) +
              (test.features.sums ? static_cast<float>(total) : 0);
          w = Round(state_dtype, w);
        }
        weight[id] = master[id];
        for (float& w : weight[id]) w = Round(test.dtype, w);
      }
      if (!test.features.lazy || test.features.sums) {  // which see all rows
        for (const auto& [id, row] : start) weight.emplace(id, row);
      }
    }
    std::vector<std::int64_t> ids;
    std::vector<float> expected;
    for (const auto& [id, row] : weight) {
      ids.push_back(id);
      expected.insert(expected.end(), row.begin(), row.end());
    }
    if (partial) {
      const RowSparseNDArray out({kRows, kRowSize}, DType::kFloat32, On(Cpu()), engine);
      store->Pull("k", out, 0, /*ignore_sparse=*/false);
      EXPECT_EQ(out.ToVectors<float>().row_ids, ids);
      EXPECT_EQ(out.ToVectors<float>().rows, expected);
    } else {
      const NDArray out({kRows, kRowSize}, DType::kFloat32, On(Cpu()), engine);
      store->Pull("k", out);
      EXPECT_EQ(out.ToVector<float>(), expected);
    }
  }

  std::mt19937_64 random_{TestSeed()};
};

TEST_P(RowSparseUpdateTest, EqualsAPlainLoop) {
  for (const bool row_sparse_weight : {false, true}) {
    for (const bool lazy : {false, true}) {
      for (const bool sums : {false, true}) {
        for (const bool by_rows : {false, true}) {
          const std::string name = std::string(row_sparse_weight ? "row-sparse" : "dense") +
                                   (lazy ? " lazy" : " standard") + (sums ? " sums" : "") +
                                   (by_rows ? " by rows" : "");
          const Features features{.lazy = lazy, .sums = sums, .by_rows = by_rows};
          Run({name, features, row_sparse_weight});
        }
      }
    }
  }
}

TEST_P(RowSparseUpdateTest, BFloat16WithAndWithoutMasterWeightsEqualsAPlainLoop) {
  for (const bool row_sparse_weight : {false, true}) {
    for (const bool lazy : {false, true}) {
      for (const bool multi_precision : {false, true}) {
        const std::string name = std::string(row_sparse_weight ? "row-sparse" : "dense") +
                                 (lazy ? " lazy" : " standard") +
                                 (multi_precision ? " master" : "");
        const Features features{.lazy = lazy, .multi_precision = multi_precision};
        Run({name, features, row_sparse_weight, DType::kBFloat16});
      }
    }
  }
}

// Rows enough to be shared with workers: a lazy update touches the rows of the gradient, in the
// bits of the same update with a dense gradient, and no other row.
TEST_P(RowSparseUpdateTest, LargeUpdatesHaveTheBitsOfDenseOnesInTheirRows) {
  const Shape big{30000, 16};
  std::vector<RowSparseNDArray> gradients;
  for (int k = 0; k < 3; ++k) {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < big[0]; ++id) {
      if (random_() % 4 == 0) ids.push_back(id);
    }
    std::vector<float> values(ids.size() * 16);
    for (float& value : values) value = std::uniform_real_distribution<float>(-1, 1)(random_);
    gradients.push_back(
        RowSparseNDArray::FromVectors<float>(ids, values, big, DType::kFloat32, On(Cpu()), engine));
  }
  std::vector<bool> touched(static_cast<std::size_t>(big[0]));
  std::vector<NDArray> dense;
  for (const RowSparseNDArray& gradient : gradients) {
    for (const std::int64_t id : gradient.ToVectors<float>().row_ids) {
      touched[static_cast<std::size_t>(id)] = true;
    }
    dense.push_back(gradient.ToDense());
  }
  const NDArray start = NDArray::Full(big, 1.5, DType::kFloat32, On(Cpu()), engine);
  store->Init({"lazy", "dense", "row-sparse"}, {start, start, RowSparseNDArray::FromDense(start)});
  store->SetOptimizer(std::make_shared<TestOptimizer>(Features{}));
  for (int push = 0; push < 2; ++push) {
    store->Push({"lazy", "dense", "row-sparse"}, {gradients, dense, gradients});
  }
  std::vector<std::vector<float>> values;
  for (const char* key : {"lazy", "dense", "row-sparse"}) {
    const NDArray out(big, DType::kFloat32, On(Cpu()), engine);
    store->Pull(key, out);
    values.push_back(out.ToVector<float>());
  }
  for (std::size_t i = 0; i < values[0].size(); ++i) {
    ASSERT_EQ(values[0][i], touched[i / 16] ? values[1][i] : 1.5F) << i;
  }
  EXPECT_EQ(values[2], values[0]);
}

// A row-sparse weight of which no row is there yet.
TEST_P(RowSparseUpdateTest, ALazyUpdateInsertsTheRowsOfTheGradientOnly) {
  store->Init("k", RowSparseNDArray::Zeros({9, 1}, DType::kFloat32, On(Cpu()), engine));
  store->SetOptimizer(std::make_shared<TestOptimizer>(Features{}));
  const auto push = [&](const std::vector<std::int64_t>& ids) {
    store->Push("k",
                RowSparseNDArray::FromVectors<float>(ids, std::vector<float>(ids.size(), 8), {9, 1},
                                                     DType::kFloat32, On(Cpu()), engine));
  };
  push({4});
  push({7, 2});
  const RowSparseNDArray out({9, 1}, DType::kFloat32, On(Cpu()), engine);
  store->Pull("k", out, 0, /*ignore_sparse=*/false);
  EXPECT_EQ(out.ToVectors<float>().row_ids, (std::vector<std::int64_t>{2, 4, 7}));
  EXPECT_EQ(out.ToVectors<float>().rows, (std::vector<float>{-1, -1, -1}));
}

// Every optimizer: a row-sparse gradient does what the dense one does. A lazy one does so in the
// rows of the gradient, and leaves the others alone. The gradients of a key all have the same rows
// here, so that what was left alone makes no difference to these.
TEST_P(RowSparseUpdateTest, EveryOptimizerUpdatesAsByTheDenseGradient) {
  const ValuesByRow rows = RandomRows(3);
  const ValuesByRow start = RandomRows(1);
  int refused = 0;
  for (const std::string_view name : Optimizers()) {
    SCOPED_TRACE(name);
    const auto plan = MakeOptimizer(name)->plan();
    UpdateRule::Subject subject{
        .dimensions = 2, .weight_decay = plan->weight_decay, .row_sparse = true};
    const bool takes_row_sparse = plan->rule->Refusal(subject).empty();
    subject.row_sparse = false;
    const bool takes_dense = plan->rule->Refusal(subject).empty();
    // A gradient and a weight of either kind, under one key, to which random numbers are tied.
    std::vector<std::vector<float>> values;
    for (const auto& [row_sparse_gradient, row_sparse_weight] :
         {std::pair{false, false}, std::pair{true, false}, std::pair{true, true}}) {
      const auto store = NewStore();
      const RowSparseNDArray weight = ToArray(start, DType::kFloat32);
      if (row_sparse_weight) {
        store->Init("k", weight);
      } else {
        store->Init("k", weight.ToDense());
      }
      store->SetOptimizer(MakeOptimizer(name));
      for (int push = 0; push < 4; ++push) {
        std::mt19937_64 random(static_cast<std::uint64_t>(push));
        std::vector<RowSparseNDArray> gradients;
        for (int k = 0; k < 2; ++k) {
          ValuesByRow gradient = rows;
          for (auto& [id, row] : gradient) {
            for (float& g : row) g = std::uniform_real_distribution<float>(-1, 1)(random);
          }
          gradients.push_back(ToArray(gradient, DType::kFloat32));
        }
        if (row_sparse_gradient && !takes_row_sparse) {
          ExpectInvalid([&] { store->Push("k", gradients); }, {"'k'", std::string(name)});
          ++refused;
        } else if (row_sparse_gradient) {
          store->Push("k", gradients);
        } else if (takes_dense) {
          store->Push("k", {gradients[0].ToDense(), gradients[1].ToDense()});
        }
      }
      const NDArray out({kRows, kRowSize}, DType::kFloat32, On(Cpu()), engine);
      store->Pull("k", out);
      values.push_back(out.ToVector<float>());
    }
    if (!takes_row_sparse) continue;
    for (const bool row_sparse_weight : {false, true}) {
      SCOPED_TRACE(row_sparse_weight ? "row-sparse weight" : "dense weight");
      const bool lazy = plan->rule->lazy(row_sparse_weight);
      const std::vector<float>& updated = values[row_sparse_weight ? 2 : 1];
      for (const auto& [id, row] : start) {
        for (std::size_t j = 0; j < row.size(); ++j) {
          const std::size_t at = static_cast<std::size_t>(id * kRowSize) + j;
          if (lazy && rows.count(id) == 0) {
            ASSERT_EQ(updated[at], row[j]) << "row " << id;
          } else if (takes_dense) {
            ASSERT_EQ(updated[at], values[0][at]) << "row " << id;
          } else {
            ASSERT_NE(updated[at], row[j]) << "row " << id;
          }
        }
      }
      if (lazy == plan->rule->lazy(!row_sparse_weight)) {
        ASSERT_EQ(values[1], values[2]) << "the kind of the weight makes no difference";
      }
    }
  }
  EXPECT_EQ(refused % 8, 0) << "all pushes of an optimizer, or none";
}

INSTANTIATE_TEST_SUITE_P(All, RowSparseUpdateTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, RowSparseUpdateTest, testing::ValuesIn(GpuSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
