// Updates against formulas written here: where MXNet 1.9.1, whose values golden_test.cc compares
// with, has no such optimizer, no such path or a bug; for arrays of several blocks, whose norms the
// store sums in parts; and the bits on every SIMD target.
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kvstore/optimizer/update_plan.h"
#include "ops/reduce.h"
#include "tests/kvstore/support.h"
#include "tests/ops/ops_testing.h"

namespace heddle::kvstore_test {
namespace {

using Parameters = std::vector<std::pair<std::string_view, double>>;
using Values = std::vector<double>;

double Clip(double value, double limit) {
  return limit > 0 ? std::clamp(value, -limit, limit) : value;
}

double Norm(const Values& values) {
  double sum = 0;
  for (double value : values) sum += value * value;
  return std::sqrt(sum);
}

// w, and the states, which start as zeros.
struct Trained {
  explicit Trained(Values weight) : w(std::move(weight)), a(w.size()), b(w.size()), previous(w) {}

  Values w, a, b, previous;
};

// The t-th update.
using Step = std::function<void(Trained& key, const Values& g, int t)>;

class OptimizerFormulaTest : public testing::Test {
 protected:
  // Several blocks of a reduction, and a rest.
  static constexpr std::int64_t kSize = 3 * 4096 + 5;

  Values Random(std::size_t count = kSize) {
    std::uniform_real_distribution<float> value(-1, 1);
    Values values(count);
    for (double& v : values) v = value(random_);
    return values;
  }
  NDArray ToArray(const Values& values, Device device = Cpu()) {
    return NDArray::FromVector(values, {static_cast<std::int64_t>(values.size())}, DType::kFloat32,
                               device, engine_);
  }
  Values Pulled(KVStore& store, std::string_view key, std::size_t count = kSize) {
    NDArray out({static_cast<std::int64_t>(count)}, DType::kFloat64, Cpu(), engine_);
    store.Pull(key, out);
    return out.ToVector<double>();
  }

  // Six updates of the keys "weight" and "bias", which get gradients of two devices.
  void ExpectFollows(const OptimizerPtr& optimizer, const Step& step,
                     const std::function<void(int t)>& before_step = {}) {
    SCOPED_TRACE(optimizer->name());
    const auto store = KVStore::Create("device", engine_);
    store->SetOptimizer(optimizer);
    std::vector<std::pair<std::string, Trained>> keys;
    for (const char* name : {"weight", "bias"}) {
      keys.emplace_back(name, Trained(Random()));
      store->Init(name, ToArray(keys.back().second.w));
    }
    for (int t = 1; t <= 6; ++t) {
      if (before_step) before_step(t);
      for (auto& [name, key] : keys) {
        key_ = name;
        const NDArray x = ToArray(Random(), Cpu(0));
        const NDArray y = ToArray(Random(), Cpu(1));
        store->Push(name, {x, y});
        step(key, (x + y.Copy(Cpu(0))).ToVector<double>(), t);
        const Values actual = Pulled(*store, name);
        for (std::size_t i = 0; i < actual.size(); ++i) {
          ASSERT_NEAR(actual[i], key.w[i], 2e-5 * std::max(1.0, std::abs(key.w[i])))
              << name << ", element " << i << ", update " << t;
        }
      }
    }
  }

  std::string key_;  // of the step
  Engine engine_{OptionsOf({"device", "threaded", 2})};
  std::mt19937_64 random_{kvstore_test::TestSeed()};
};

TEST_F(OptimizerFormulaTest, AdamW) {
  for (const bool corrects : {true, false}) {
    ExpectFollows(MakeOptimizer("adamw", {{"learning_rate", 0.05},
                                          {"beta1", 0.8},
                                          {"beta2", 0.95},
                                          {"epsilon", 1e-3},
                                          {"weight_decay", 0.1},
                                          {"rescale_grad", 0.5},
                                          {"clip_gradient", 0.4},
                                          {"correct_bias", corrects}}),
                  [&](Trained& k, const Values& g, int t) {
                    const double correction =
                        std::sqrt(1 - std::pow(0.95, t)) / (1 - std::pow(0.8, t));
                    const double lr = 0.05 * (corrects ? correction : 1);
                    for (std::size_t i = 0; i < g.size(); ++i) {
                      const double x = Clip(0.5 * g[i], 0.4);
                      k.a[i] = 0.8 * k.a[i] + 0.2 * x;
                      k.b[i] = 0.95 * k.b[i] + 0.05 * x * x;
                      k.w[i] -= lr * (k.a[i] / (std::sqrt(k.b[i]) + 1e-3) + 0.1 * k.w[i]);
                    }
                  });
  }
}

TEST_F(OptimizerFormulaTest, AdaBelief) {
  for (const bool corrects : {true, false}) {
    ExpectFollows(MakeOptimizer("adabelief", {{"learning_rate", 0.05},
                                              {"beta1", 0.8},
                                              {"beta2", 0.95},
                                              {"epsilon", 1e-3},
                                              {"weight_decay", 0.1},
                                              {"rescale_grad", 0.5},
                                              {"clip_gradient", 0.4},
                                              {"correct_bias", corrects}}),
                  [&](Trained& k, const Values& g, int t) {
                    const double correction =
                        std::sqrt(1 - std::pow(0.95, t)) / (1 - std::pow(0.8, t));
                    const double lr = 0.05 * (corrects ? correction : 1);
                    for (std::size_t i = 0; i < g.size(); ++i) {
                      const double x = Clip(0.5 * g[i] + 0.1 * k.w[i], 0.4);
                      k.a[i] = 0.8 * k.a[i] + 0.2 * x;
                      k.b[i] = 0.95 * k.b[i] + 0.05 * (x - k.a[i]) * (x - k.a[i]) + 1e-3;
                      k.w[i] -= lr * k.a[i] / (std::sqrt(k.b[i]) + 1e-3);
                    }
                  });
  }
}

// The trust ratio of LAMB and LANS.
double Ratio(double weight_norm, double lower, double upper, double direction_norm) {
  if (lower > 0) weight_norm = std::max(weight_norm, lower);
  if (upper > 0) weight_norm = std::min(weight_norm, upper);
  return weight_norm == 0 || direction_norm == 0 ? 1 : weight_norm / direction_norm;
}

TEST_F(OptimizerFormulaTest, LansAndItsBounds) {
  for (const auto& [lower, upper] :
       std::vector<std::pair<double, double>>{{0, 0}, {1000, 0}, {0, 10}}) {
    ExpectFollows(MakeOptimizer("lans", {{"learning_rate", 0.01},
                                         {"beta1", 0.8},
                                         {"beta2", 0.95},
                                         {"epsilon", 1e-3},
                                         {"weight_decay", 0.1},
                                         {"rescale_grad", 0.5},
                                         {"clip_gradient", 0.01},
                                         {"lower_bound", lower},
                                         {"upper_bound", upper}}),
                  [&, lower = lower, upper = upper](Trained& k, const Values& g, int t) {
                    const double norm = 0.5 * Norm(g);
                    Values u(g.size());
                    Values n(g.size());
                    for (std::size_t i = 0; i < g.size(); ++i) {
                      const double x = Clip(0.5 * g[i] / norm, 0.01);
                      k.a[i] = 0.8 * k.a[i] + 0.2 * x;
                      k.b[i] = 0.95 * k.b[i] + 0.05 * x * x;
                      const double root = std::sqrt(k.b[i] / (1 - std::pow(0.95, t))) + 1e-3;
                      u[i] = k.a[i] / (1 - std::pow(0.8, t)) / root + 0.1 * k.w[i];
                      n[i] = x / root + 0.1 * k.w[i];
                    }
                    const double weight = Norm(k.w);
                    const double u_rate = 0.01 * 0.8 * Ratio(weight, lower, upper, Norm(u));
                    const double n_rate = 0.01 * 0.2 * Ratio(weight, lower, upper, Norm(n));
                    for (std::size_t i = 0; i < g.size(); ++i) {
                      k.w[i] -= u_rate * u[i] + n_rate * n[i];
                    }
                  });
  }
}

TEST_F(OptimizerFormulaTest, LambOverSeveralBlocks) {
  ExpectFollows(MakeOptimizer("lamb", {{"learning_rate", 0.01}, {"weight_decay", 0.1}}),
                [&](Trained& k, const Values& g, int t) {
                  Values u(g.size());
                  for (std::size_t i = 0; i < g.size(); ++i) {
                    k.a[i] = 0.9 * k.a[i] + 0.1 * g[i];
                    k.b[i] = 0.999 * k.b[i] + 0.001 * g[i] * g[i];
                    const double root = std::sqrt(k.b[i] / (1 - std::pow(0.999, t))) + 1e-6;
                    u[i] = k.a[i] / (1 - std::pow(0.9, t)) / root + 0.1 * k.w[i];
                  }
                  const double rate = 0.01 * Ratio(Norm(k.w), 0, 0, Norm(u));
                  for (std::size_t i = 0; i < g.size(); ++i) k.w[i] -= rate * u[i];
                });
}

// Keys called bias take plain steps; each key corrects its momentum by its own last rate.
TEST_F(OptimizerFormulaTest, LarsWithAChangingRate) {
  for (const bool corrects : {true, false}) {
    const OptimizerPtr lars = MakeOptimizer("lars", {{"momentum", 0.9},
                                                     {"eta", 0.1},
                                                     {"epsilon", 0.01},
                                                     {"weight_decay", 0.1},
                                                     {"rescale_grad", 0.5},
                                                     {"momentum_correction", corrects}});
    const auto rate = [](int t) { return 0.1 / t; };
    ExpectFollows(
        lars,
        [&](Trained& k, const Values& g, int t) {
          const double w_norm = Norm(k.w);
          const double scale =
              key_ == "bias" ? 1 : 0.1 * w_norm / (0.5 * Norm(g) + 0.1 * w_norm + 0.01);
          const double lr = rate(t) * scale;
          const double momentum = 0.9 * (corrects && t > 1 ? rate(t) / rate(t - 1) : 1);
          for (std::size_t i = 0; i < g.size(); ++i) {
            k.a[i] = momentum * k.a[i] - lr * (0.1 * k.w[i] + 0.5 * g[i]);
            k.w[i] += k.a[i];
          }
        },
        [&](int t) { lars->Set("learning_rate", rate(t)); });
  }
}

TEST_F(OptimizerFormulaTest, LbsgdWithLars) {
  ExpectFollows(MakeOptimizer("lbsgd", {{"learning_rate", 0.1},
                                        {"batch_scale", 2},
                                        {"warmup_strategy", 3},
                                        {"weight_decay", 0.1}}),
                [&](Trained& k, const Values& g, int t) {
                  if (t % 2 == 1) {
                    k.a = g;
                    return;
                  }
                  Values mean(g.size());
                  for (std::size_t i = 0; i < g.size(); ++i) mean[i] = (k.a[i] + g[i]) / 2;
                  const double w2 = Norm(k.w) * Norm(k.w);
                  const double g2 = Norm(mean) * Norm(mean);
                  const double lr = 0.1 * std::clamp(std::sqrt(w2 / (g2 + 0.1 * w2)), 0.01, 100.0);
                  for (std::size_t i = 0; i < g.size(); ++i) {
                    k.w[i] -= lr * (0.1 * k.w[i] + mean[i]);
                  }
                });
}

TEST_F(OptimizerFormulaTest, DcasgdWithMomentum) {
  ExpectFollows(MakeOptimizer("dcasgd", {{"learning_rate", 0.1},
                                         {"momentum", 0.9},
                                         {"lamda", 0.5},
                                         {"weight_decay", 0.1},
                                         {"rescale_grad", 0.5},
                                         {"clip_gradient", 0.4}}),
                [](Trained& k, const Values& g, int) {
                  for (std::size_t i = 0; i < g.size(); ++i) {
                    const double x = Clip(0.5 * g[i], 0.4);
                    const double delay = 0.5 * x * x * (k.w[i] - k.previous[i]);
                    k.a[i] = 0.9 * k.a[i] - 0.1 * (x + 0.1 * k.w[i] + delay);
                    k.previous[i] = k.w[i];
                    k.w[i] += k.a[i];
                  }
                });
}

// Each of the two keys has a product of its own.
TEST_F(OptimizerFormulaTest, NadamOfSeveralKeys) {
  const auto p = [](int k) { return 0.9 * (1 - 0.5 * std::pow(0.96, k * 0.1)); };
  ExpectFollows(
      MakeOptimizer("nadam", {{"learning_rate", 0.01}, {"schedule_decay", 0.1}, {"epsilon", 1e-3}}),
      [&](Trained& k, const Values& g, int t) {
        double product = 1;
        for (int s = 1; s <= t; ++s) product *= p(s);
        for (std::size_t i = 0; i < g.size(); ++i) {
          k.a[i] = 0.9 * k.a[i] + 0.1 * g[i];
          k.b[i] = 0.999 * k.b[i] + 0.001 * g[i] * g[i];
          const double m =
              (1 - p(t)) * g[i] / (1 - product) + p(t + 1) * k.a[i] / (1 - product * p(t + 1));
          k.w[i] -= 0.01 * m / (std::sqrt(k.b[i] / (1 - std::pow(0.999, t))) + 1e-3);
        }
      });
}

TEST_F(OptimizerFormulaTest, AdamaxStaysWhereNoGradientHasBeen) {
  const auto store = KVStore::Create("local", engine_);
  store->SetOptimizer(MakeOptimizer("adamax"));
  store->Init("w", ToArray({1, 2, 3}));
  store->Push("w", ToArray({0, 1, 0}));
  store->Push("w", ToArray({0, 1, -1}));
  const Values w = Pulled(*store, "w", 3);
  EXPECT_EQ(w[0], 1);
  EXPECT_NEAR(w[1], 2 - 2 * 0.002, 1e-6);
  // m = -0.1, u = 1
  EXPECT_NEAR(w[2], 3 + 0.002 / (1 - 0.81) * 0.1, 1e-6);
}

// The rows that a gradient lacks are zeros, to weights of both kinds.
TEST_F(OptimizerFormulaTest, NagWithMomentumByRowSparseGradients) {
  constexpr std::int64_t kRows = 5;
  for (const bool row_sparse_weight : {false, true}) {
    SCOPED_TRACE(row_sparse_weight ? "row-sparse weight" : "dense weight");
    const auto store = KVStore::Create("local", engine_);
    store->SetOptimizer(
        MakeOptimizer("nag", {{"learning_rate", 0.1}, {"momentum", 0.9}, {"weight_decay", 0.1}}));
    Values w = Random(kRows);
    if (row_sparse_weight) {
      store->Init("w", RowSparseNDArray::FromDense(ToArray(w)));
    } else {
      store->Init("w", ToArray(w));
    }
    Values m(w.size());
    for (std::int64_t t = 0; t < 4; ++t) {
      Values g(w.size());
      const Values rows = Random(2);
      g[static_cast<std::size_t>(t)] = rows[0];
      g[static_cast<std::size_t>(t) + 1] = rows[1];
      store->Push("w", RowSparseNDArray::FromVectors<double>({t, t + 1}, rows, {kRows},
                                                             DType::kFloat32, Cpu(), engine_));
      for (std::size_t i = 0; i < w.size(); ++i) {
        m[i] *= 0.9;
        w[i] += 1.9 * (m[i] - 0.1 * (g[i] + 0.1 * w[i])) - m[i];
        m[i] -= 0.1 * (g[i] + 0.1 * w[i]);  // with the decay of the new weight
      }
      const Values actual = Pulled(*store, "w", w.size());
      for (std::size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(actual[i], w[i], 1e-6) << i;
    }
  }
}

TEST_F(OptimizerFormulaTest, ARateOfZeroLeavesTheValue) {
  for (std::string_view name : OptimizerNames()) {
    if (name == "test" || name == "adadelta") continue;  // have no use for it
    const auto store = KVStore::Create("local", engine_);
    const OptimizerPtr optimizer = MakeOptimizer(name);
    optimizer->SetSchedule(PolySchedule{.max_update = 2, .base_rate = 0.1});
    store->SetOptimizer(optimizer);
    const NDArray start = NDArray::Full({2, 3}, 0.5, DType::kFloat32, Cpu(), engine_);
    const NDArray gradient = NDArray::Full({2, 3}, 0.25, DType::kFloat32, Cpu(), engine_);
    const NDArray before({2, 3}, DType::kFloat32, Cpu(), engine_);
    const NDArray after({2, 3}, DType::kFloat32, Cpu(), engine_);
    store->Init("w", start);
    store->Push("w", gradient);  // at 0.025
    store->Pull("w", before);
    store->Push("w", gradient);  // at 0
    store->Pull("w", after);
    for (float value : before.ToVector<float>()) EXPECT_TRUE(std::isfinite(value)) << name;
    EXPECT_EQ(after.ToVector<float>(), before.ToVector<float>()) << name;
  }
}

// A schedule without a floor ends where the rate is no float any more, or its inverse is none.
TEST_F(OptimizerFormulaTest, AVanishingRateLeavesTheValueWhatItIs) {
  for (std::string_view name : OptimizerNames()) {
    if (name == "test" || name == "adadelta") continue;  // have no use for it
    for (const double factor : {0.25, 1e-20}) {
      SCOPED_TRACE(std::string(name) + " " + std::to_string(factor));
      const auto store = KVStore::Create("local", engine_);
      const OptimizerPtr optimizer = MakeOptimizer(name);
      optimizer->SetSchedule(
          FactorSchedule{.step = 1, .factor = factor, .stop_rate = 0, .base_rate = 0.1});
      store->SetOptimizer(optimizer);
      const Shape shape{2, 3};
      const NDArray gradient = NDArray::Full(shape, 2, DType::kFloat32, Cpu(), engine_);
      store->Init("w", NDArray::Full(shape, 0.5, DType::kFloat32, Cpu(), engine_));
      const NDArray late(shape, DType::kFloat32, Cpu(), engine_);
      const NDArray later(shape, DType::kFloat32, Cpu(), engine_);
      for (int t = 0; t < 60; ++t) store->Push("w", gradient);  // at 0.1 / 4^59, or 0
      store->Pull("w", late);
      for (int t = 0; t < 30; ++t) store->Push("w", gradient);
      store->Pull("w", later);
      for (float value : late.ToVector<float>()) EXPECT_TRUE(std::isfinite(value));
      EXPECT_EQ(later.ToVector<float>(), late.ToVector<float>());
    }
  }
}

// Two runs with the same seed, key and step draw the same numbers: what differs is the gradients'.
TEST_F(OptimizerFormulaTest, SgldDriftsAndDraws) {
  const auto train = [&](double seed, const Values& w, const Values& g, std::string_view key) {
    const auto store = KVStore::Create("local", engine_);
    store->SetOptimizer(MakeOptimizer("sgld", {{"learning_rate", 0.25},
                                               {"weight_decay", 0.1},
                                               {"rescale_grad", 0.5},
                                               {"clip_gradient", 0.4},
                                               {"seed", seed}}));
    store->Init(key, ToArray(w));
    store->Push(key, ToArray(g));
    return Pulled(*store, key);
  };
  const Values w = Random();
  const Values g = Random();
  const Values noise = train(3, Values(kSize), Values(kSize), "a");
  const Values trained = train(3, w, g, "a");
  double sum = 0;
  double squares = 0;
  double products = 0;  // of neighbours
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double drift = 0.125 * (Clip(0.5 * g[i], 0.4) + 0.1 * w[i]);
    ASSERT_NEAR(trained[i], w[i] - drift + noise[i], 1e-6) << i;
    sum += noise[i];
    squares += noise[i] * noise[i];
    if (i > 0) products += noise[i] * noise[i - 1];
  }
  // Of deviation 0.5, so that within 5 of their own deviations:
  const double n = kSize;
  EXPECT_LT(std::abs(sum / n), 5 * 0.5 / std::sqrt(n));
  EXPECT_LT(std::abs(squares / n - 0.25), 5 * 0.25 * std::sqrt(2 / n));
  EXPECT_LT(std::abs(products / n), 5 * 0.25 / std::sqrt(n));
  EXPECT_NE(train(4, Values(kSize), Values(kSize), "a"), noise);
  EXPECT_NE(train(3, Values(kSize), Values(kSize), "b"), noise);
}

// Every optimizer: a value of 16 bits with a master copy is a float32 one, rounded.
TEST_F(OptimizerFormulaTest, MultiPrecisionIsFloat32Rounded) {
  for (std::string_view name : OptimizerNames()) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      SCOPED_TRACE(std::string(name) + " " + std::string(Name(dtype)));
      const auto narrow = KVStore::Create("local", engine_);
      const auto wide = KVStore::Create("local", engine_);
      narrow->SetOptimizer(MakeOptimizer(name, {{"learning_rate", 0.1}, {"multi_precision", 1}}));
      wide->SetOptimizer(MakeOptimizer(name, {{"learning_rate", 0.1}}));
      const Shape shape{31, 17};
      const auto draw = [&] {
        return NDArray::FromVector(Random(31 * 17), shape, dtype, Cpu(), engine_);
      };
      const NDArray start = draw();
      narrow->Init("w", start);
      wide->Init("w", start.AsType(DType::kFloat32));
      for (int step = 0; step < 4; ++step) {
        const NDArray gradient = draw();
        narrow->Push("w", gradient);
        wide->Push("w", gradient.AsType(DType::kFloat32));
      }
      const NDArray actual(shape, dtype, Cpu(), engine_);
      const NDArray expected(shape, dtype, Cpu(), engine_);
      narrow->Pull("w", actual);
      wide->Pull("w", expected);
      EXPECT_EQ(actual.ToVector<float>(), expected.ToVector<float>());
    }
  }
}

TEST_F(OptimizerFormulaTest, GroupAdaGradRefuses) {
  const auto store = KVStore::Create("local", engine_);
  store->SetOptimizer(MakeOptimizer("groupadagrad"));
  store->Init("w", ToArray(Random()));
  ExpectInvalid([&] { store->Push("w", ToArray(Random())); },
                {"'w'", "groupadagrad", "2 dimensions", "got 1"});
  store->SetOptimizer(MakeOptimizer("groupadagrad", {{"weight_decay", 0.5}}));
  const NDArray matrix = NDArray::Full({2, 3}, 1, DType::kFloat32, Cpu(), engine_);
  store->Init("m", matrix);
  ExpectInvalid([&] { store->Push("m", matrix); }, {"'m'", "weight_decay 0", "0.5"});
  const NDArray out({2, 3}, DType::kFloat32, Cpu(), engine_);
  store->Pull("m", out);
  EXPECT_EQ(out.ToVector<float>(), std::vector<float>(6, 1));
}

TEST_F(OptimizerFormulaTest, AdaGradRefusesWeightDecayByRowSparseGradients) {
  const auto store = KVStore::Create("local", engine_);
  const OptimizerPtr adagrad = MakeOptimizer("adagrad", {{"weight_decay", 0.5}});
  store->SetOptimizer(adagrad);
  const auto rows =
      RowSparseNDArray::FromVectors<double>({1}, {3}, {4}, DType::kFloat32, Cpu(), engine_);
  const Values start = {1, 1, 1, 1};
  store->Init({"dense", "rows"}, {ToArray(start), RowSparseNDArray::FromDense(ToArray(start))});
  for (const char* key : {"dense", "rows"}) {
    ExpectInvalid([&] { store->Push(key, rows); },
                  {key, "adagrad", "weight_decay 0 for row-sparse gradients", "0.5"});
    EXPECT_EQ(Pulled(*store, key, 4), start);
    adagrad->SetWeightDecayMultiplier(key, 0);
    store->Push(key, rows);
    EXPECT_NE(Pulled(*store, key, 4)[1], 1);
  }
}

// ---- The bits of the kernels

// One update of `count` elements through the rule itself, in runs that begin at `cuts`.
template <class T>
struct KernelRun {
  using S = T;

  KernelRun(const Values& numbers, std::size_t count, std::size_t offset, bool multi_precision)
      : weight(count, offset), gradient(count, offset), master(count, offset) {
    for (int k = 0; k < 4; ++k) {
      states.push_back(std::make_unique<ops::Array<T>>(count, offset));
      masters.push_back(std::make_unique<ops::Array<float>>(count, offset));
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto at = [&](std::size_t k) {
        return static_cast<float>(numbers[(7 * i + k) % numbers.size()]);
      };
      weight[i] = T(at(0));
      gradient[i] = T(at(1));
      master[i] = at(0);
      for (std::size_t k = 0; k < 4; ++k) {
        (*states[k])[i] = T(std::abs(at(2 + k)));
        (*masters[k])[i] = std::abs(at(2 + k));
      }
    }
    has_master = multi_precision;
  }

  void Update(const internal::UpdateRule& rule, const std::vector<std::size_t>& cuts) {
    const std::size_t count = weight.size();
    internal::KeyUpdate update = {};
    update.learning_rate = 0.1;
    update.weight_decay = 0.01;
    update.step = 2;
    update.key = "weight";
    update.row_length = 1;
    update.numbers = {0.8, 0.1};
    const int passes = rule.Begin(update);
    const std::size_t blocks = ops::ReductionBlocks(count);
    std::vector<double> sums(internal::kUpdateSumsMax * blocks);
    for (; update.pass < passes; ++update.pass) {
      const bool last = update.pass + 1 == passes;
      for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
        const std::size_t unit = passes > 1 ? ops::kReductionBlock : 1;
        const std::size_t begin = std::min(count, cuts[c] * unit);
        const std::size_t end = std::min(count, cuts[c + 1] * unit);
        internal::UpdateRun run = {};
        run.update = &update;
        run.dtype = kDTypeOf<T>;
        run.weight = weight.data() + begin;
        run.gradient = gradient.data() + begin;
        if (has_master) run.master = master.data() + begin;
        for (std::size_t k = 0; k < rule.num_states(); ++k) {
          run.states[k] = has_master ? static_cast<void*>(masters[k]->data() + begin)
                                     : static_cast<void*>(states[k]->data() + begin);
        }
        for (std::size_t k = 0; !last && k < internal::kUpdateSumsMax; ++k) {
          run.block_sums[k] = sums.data() + k * blocks + begin / ops::kReductionBlock;
        }
        run.count = end - begin;
        run.first = static_cast<std::int64_t>(begin);
        rule.Update(run);
      }
      if (last) break;
      for (std::size_t k = 0; k < internal::kUpdateSumsMax; ++k) {
        update.sums[static_cast<std::size_t>(update.pass)][k] =
            ops::AddBlocks({sums.data() + k * blocks, blocks});
      }
    }
  }

  ops::Array<T> weight, gradient;
  ops::Array<float> master;
  std::vector<std::unique_ptr<ops::Array<T>>> states;
  std::vector<std::unique_ptr<ops::Array<float>>> masters;
  bool has_master;
};

class UpdateKernelTest : public ops::KernelTest,
                         public testing::WithParamInterface<std::string_view> {
 protected:
  // Against a run on the portable fallback, whole and aligned.
  template <class T>
  void ExpectSameBits(const internal::UpdateRule& rule, bool multi_precision) {
    Values numbers(997);
    for (double& number : numbers) number = std::uniform_real_distribution<double>(-2, 2)(random_);
    const std::size_t count = 1 + Below(3 * ops::kReductionBlock);
    hwy::GetChosenTarget().Update(0);
    KernelRun<T> expected(numbers, count, 0, multi_precision);
    expected.Update(rule, {0, count});
    std::vector<std::size_t> cuts = {0, count, Below(count + 1), Below(count + 1), 1, 2};
    std::ranges::sort(cuts);
    const std::size_t offset = Below(16);
    ops::OnEveryTarget([&] {
      KernelRun<T> actual(numbers, count, offset, multi_precision);
      actual.Update(rule, cuts);
      ops::ExpectSame(actual.weight, expected.weight, "weight");
      ops::ExpectSame(actual.master, expected.master, "master");
      for (std::size_t k = 0; k < 4; ++k) {
        ops::ExpectSame(*actual.states[k], *expected.states[k], "state");
        ops::ExpectSame(*actual.masters[k], *expected.masters[k], "state");
      }
    });
  }
};

TEST_P(UpdateKernelTest, SameBitsOnEveryTargetForAnyCut) {
  for (const double clip : {0.0, 0.5}) {
    Parameters parameters;
    for (const auto& [name, value] : MakeOptimizer(GetParam())->Parameters()) {
      if (name == "momentum") parameters.emplace_back(name, 0.9);
      if (name == "clip_gradient") parameters.emplace_back(name, clip);
    }
    const auto rule = MakeOptimizer(GetParam(), parameters)->plan()->rule;
    ExpectSameBits<float>(*rule, false);
    ExpectSameBits<double>(*rule, false);
    ExpectSameBits<Float16>(*rule, false);
    ExpectSameBits<BFloat16>(*rule, false);
    ExpectSameBits<Float16>(*rule, true);
    ExpectSameBits<BFloat16>(*rule, true);
  }
}

// A gradient that is no number makes the weight no number, also where it is clipped.
TEST_P(UpdateKernelTest, NaNStays) {
  if (GetParam() == "signum") return;  // whose sign is 0
  Parameters parameters;
  for (const auto& [name, value] : MakeOptimizer(GetParam())->Parameters()) {
    if (name == "clip_gradient") parameters.emplace_back(name, 1);
  }
  const auto rule = MakeOptimizer(GetParam(), parameters)->plan()->rule;
  ops::OnEveryTarget([&] {
    KernelRun<float> run(Values(1, 0.5), 40, 3, false);
    for (std::size_t i = 0; i < 40; ++i) run.gradient[i] = std::nanf("");
    run.Update(*rule, {0, 40});
    for (std::size_t i = 0; i < 40; ++i) {
      EXPECT_TRUE(std::isnan(run.weight[i])) << run.weight[i];
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, UpdateKernelTest, testing::ValuesIn(OptimizerNames()));

}  // namespace
}  // namespace heddle::kvstore_test
