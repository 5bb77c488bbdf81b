// Optimizers by name and parameters, and their updates through a store against plain loops.
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>
#include <heddle/schedule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

using Parameters = std::vector<std::pair<std::string_view, double>>;

// ---- Names and parameters

TEST(Optimizer, ByName) {
  const std::vector<std::string_view> names = OptimizerNames();
  EXPECT_TRUE(std::ranges::is_sorted(names));
  for (const std::string_view name :  // those of MXNet
       {"adabelief", "adadelta", "adagrad",      "adam", "adamax", "adamw", "ccsgd", "dcasgd",
        "ftml",      "ftrl",     "groupadagrad", "lamb", "lans",   "lars",  "lbsgd", "nadam",
        "nag",       "rmsprop",  "sgd",          "sgld", "signum", "test"}) {
    EXPECT_TRUE(std::ranges::binary_search(names, name)) << name;
  }
  for (std::string_view name : names) {
    EXPECT_EQ(MakeOptimizer(name)->name(), name == "ccsgd" ? "sgd" : name);
  }
  EXPECT_EQ(MakeOptimizer("Adam")->name(), "adam");
  EXPECT_EQ(MakeOptimizer("LBSGD")->name(), "lbsgd");
  ExpectInvalid([] { MakeOptimizer("admam"); }, {"'admam'", "did you mean 'adam'", "adam, adamax"});
}

TEST(Optimizer, DefaultsAreThePublishedOnes) {
  EXPECT_EQ(Sgd()->Parameters(), (Parameters{{"learning_rate", 0.01},
                                             {"momentum", 0},
                                             {"weight_decay", 0},
                                             {"rescale_grad", 1},
                                             {"clip_gradient", 0},
                                             {"lazy_update", 1},
                                             {"multi_precision", 0}}));
  EXPECT_EQ(Adam()->Parameters(), (Parameters{{"learning_rate", 0.001},
                                              {"beta1", 0.9},
                                              {"beta2", 0.999},
                                              {"epsilon", 1e-8},
                                              {"weight_decay", 0},
                                              {"rescale_grad", 1},
                                              {"clip_gradient", 0},
                                              {"lazy_update", 1},
                                              {"multi_precision", 0}}));
  EXPECT_EQ(MakeOptimizer("sgd")->Parameters(), Sgd()->Parameters());
  EXPECT_EQ(MakeOptimizer("adam")->Parameters(), Adam()->Parameters());

  const std::vector<std::pair<std::string_view, Parameters>> defaults = {
      {"adabelief",
       {{"learning_rate", 0.001},
        {"beta1", 0.9},
        {"beta2", 0.999},
        {"epsilon", 1e-6},
        {"correct_bias", 1}}},
      {"adadelta", {{"rho", 0.9}, {"epsilon", 1e-5}}},
      {"adagrad", {{"learning_rate", 0.01}, {"epsilon", 1e-7}}},
      {"adamax", {{"learning_rate", 0.002}, {"beta1", 0.9}, {"beta2", 0.999}}},
      {"adamw",
       {{"learning_rate", 0.001},
        {"beta1", 0.9},
        {"beta2", 0.999},
        {"epsilon", 1e-6},
        {"correct_bias", 1}}},
      {"ccsgd", {{"learning_rate", 0.01}, {"momentum", 0}}},
      {"dcasgd", {{"learning_rate", 0.01}, {"momentum", 0}, {"lamda", 0.04}}},
      {"ftml", {{"learning_rate", 0.01}, {"beta1", 0.6}, {"beta2", 0.999}, {"epsilon", 1e-8}}},
      {"ftrl", {{"learning_rate", 0.1}, {"lamda1", 0.01}, {"beta", 1}}},
      {"groupadagrad", {{"learning_rate", 0.01}, {"epsilon", 1e-5}}},
      {"lamb",
       {{"learning_rate", 0.001},
        {"beta1", 0.9},
        {"beta2", 0.999},
        {"epsilon", 1e-6},
        {"lower_bound", 0},
        {"upper_bound", 0},
        {"bias_correction", 1}}},
      {"lans",
       {{"learning_rate", 0.001},
        {"beta1", 0.9},
        {"beta2", 0.999},
        {"epsilon", 1e-6},
        {"lower_bound", 0},
        {"upper_bound", 0}}},
      {"lars",
       {{"learning_rate", 0.01},
        {"momentum", 0},
        {"eta", 0.001},
        {"epsilon", 0},
        {"momentum_correction", 1},
        {"lazy_update", 1}}},
      {"lbsgd",
       {{"learning_rate", 0.01},
        {"momentum", 0},
        {"warmup_strategy", 0},
        {"warmup_epochs", 5},
        {"batch_scale", 1},
        {"updates_per_epoch", 32},
        {"begin_epoch", 0}}},
      {"nadam",
       {{"learning_rate", 0.001},
        {"beta1", 0.9},
        {"beta2", 0.999},
        {"epsilon", 1e-8},
        {"schedule_decay", 0.004}}},
      {"nag", {{"learning_rate", 0.01}, {"momentum", 0}}},
      {"rmsprop",
       {{"learning_rate", 0.001},
        {"gamma1", 0.9},
        {"gamma2", 0.9},
        {"epsilon", 1e-8},
        {"centered", 0},
        {"clip_weights", 0}}},
      {"sgld", {{"learning_rate", 0.01}, {"seed", 0}}},
      {"signum", {{"learning_rate", 0.01}, {"momentum", 0.9}, {"wd_lh", 0}}},
      {"test", {}},
  };
  for (const auto& [name, parameters] : defaults) {
    const OptimizerPtr optimizer = MakeOptimizer(name);
    for (const auto& [parameter, value] : parameters) {
      EXPECT_EQ(optimizer->Get(parameter), value) << name << " " << parameter;
    }
  }
  // These are the same for all that have them.
  for (std::string_view name : OptimizerNames()) {
    for (const auto& [parameter, value] : MakeOptimizer(name)->Parameters()) {
      if (parameter == "weight_decay" || parameter == "clip_gradient" ||
          parameter == "multi_precision") {
        EXPECT_EQ(value, 0) << name << " " << parameter;
      }
      if (parameter == "rescale_grad") {
        EXPECT_EQ(value, 1) << name;
      }
    }
  }
}

TEST(Optimizer, OptionsReachTheParameters) {
  const OptimizerPtr sgd = Sgd({.learning_rate = 0.5,
                                .momentum = 0.25,
                                .weight_decay = 2,
                                .rescale_grad = 3,
                                .clip_gradient = 4,
                                .lazy_update = false,
                                .multi_precision = true});
  EXPECT_EQ(sgd->Parameters(), (Parameters{{"learning_rate", 0.5},
                                           {"momentum", 0.25},
                                           {"weight_decay", 2},
                                           {"rescale_grad", 3},
                                           {"clip_gradient", 4},
                                           {"lazy_update", 0},
                                           {"multi_precision", 1}}));
  const OptimizerPtr adam = Adam({.learning_rate = 0.5,
                                  .beta1 = 0.25,
                                  .beta2 = 0.75,
                                  .epsilon = 0.125,
                                  .weight_decay = 2,
                                  .rescale_grad = 3,
                                  .clip_gradient = 4,
                                  .lazy_update = false,
                                  .multi_precision = true});
  EXPECT_EQ(adam->Parameters(), (Parameters{{"learning_rate", 0.5},
                                            {"beta1", 0.25},
                                            {"beta2", 0.75},
                                            {"epsilon", 0.125},
                                            {"weight_decay", 2},
                                            {"rescale_grad", 3},
                                            {"clip_gradient", 4},
                                            {"lazy_update", 0},
                                            {"multi_precision", 1}}));
  EXPECT_EQ(MakeOptimizer("adam", {{"beta2", 0.5}})->Get("beta2"), 0.5);
}

TEST(Optimizer, ParametersOutOfRangeAreErrors) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> not_a_count = {-1, 0.5, nan, inf};
  const std::vector<double> not_a_switch = {-1, 0.5, 2, nan};
  const std::vector<double> not_a_fraction = {-0.1, 1, 1.5, nan};
  const std::vector<double> not_positive = {-1, nan, inf};  // or, for most, 0
  const std::vector<std::pair<std::string_view, std::vector<double>>> wrong = {
      {"batch_scale", {0, -1, 1.5, nan, inf}},
      {"begin_epoch", not_a_count},
      {"beta", not_positive},
      {"beta1", not_a_fraction},
      {"beta2", not_a_fraction},
      {"bias_correction", not_a_switch},
      {"centered", not_a_switch},
      {"clip_gradient", not_positive},
      {"clip_weights", not_positive},
      {"correct_bias", not_a_switch},
      {"epsilon", not_positive},
      {"eta", not_positive},
      {"gamma1", not_a_fraction},
      {"gamma2", not_a_fraction},
      {"lamda", not_positive},
      {"lamda1", not_positive},
      {"lazy_update", not_a_switch},
      {"learning_rate", {-0.1, nan, inf}},
      {"lower_bound", not_positive},
      {"momentum", not_a_fraction},
      {"momentum_correction", not_a_switch},
      {"multi_precision", not_a_switch},
      {"rescale_grad", {nan, inf, -inf}},
      {"rho", not_a_fraction},
      {"schedule_decay", not_positive},
      {"seed", not_a_count},
      {"updates_per_epoch", not_a_count},
      {"upper_bound", not_positive},
      {"warmup_epochs", not_a_count},
      {"warmup_strategy", {-1, 0.5, 4, nan}},
      {"wd_lh", not_positive},
      {"weight_decay", {-1, nan, inf}},
  };
  for (std::string_view name : OptimizerNames()) {
    for (const auto& [parameter, value] : MakeOptimizer(name)->Parameters()) {
      const auto row = std::find_if(wrong.begin(), wrong.end(),
                                    [&, p = parameter](const auto& w) { return w.first == p; });
      ASSERT_NE(row, wrong.end()) << parameter << " has no test";
      std::vector<double> bad_values = row->second;
      bad_values.insert(bad_values.end(), {1e39, -1e39});  // more than float32 can hold
      for (double bad : bad_values) {
        const std::vector<std::string> parts = {std::string(MakeOptimizer(name)->name()),
                                                std::string(parameter), "expected"};
        ExpectInvalid([&, p = parameter] { MakeOptimizer(name, {{p, bad}}); }, parts);
        const OptimizerPtr optimizer = MakeOptimizer(name);
        ExpectInvalid([&, p = parameter] { optimizer->Set(p, bad); }, parts);
        EXPECT_EQ(optimizer->Get(parameter), value);
      }
    }
  }
  ExpectInvalid([] { Sgd({.momentum = 1}); }, {"sgd", "momentum", "[0, 1)", "1"});
  for (std::string_view name : {"adabelief", "adadelta", "adagrad", "adam", "adamw", "ftml",
                                "groupadagrad", "lamb", "lans", "nadam", "rmsprop"}) {
    ExpectInvalid(
        [&] {
          MakeOptimizer(name, {{"epsilon", 0}});
        },
        {std::string(name), "epsilon", "(0, inf)", "0"});
  }
  // What float32, in which most values are updated, rounds to a bound that is not allowed.
  ExpectInvalid([] { Adam({.epsilon = 1e-60}); },
                {"epsilon", "(0, inf) when rounded to float32", "1e-60"});
  ExpectInvalid([] { Adam({.beta2 = 1 - 1e-12}); }, {"beta2", "[0, 1) when rounded to float32"});
  ExpectInvalid(
      [] {
        MakeOptimizer("ftrl", {{"learning_rate", 1e-60}});
      },
      {"learning_rate", "float32"});
  EXPECT_EQ(Sgd({.learning_rate = 1e-60})->Get("learning_rate"), 1e-60);
  ExpectInvalid([] { Sgd({.learning_rate = 1e39}); },
                {"learning_rate", "[0, inf) when rounded to float32", "1e+39"});
  EXPECT_EQ(Sgd({.learning_rate = 3e38})->Get("learning_rate"), 3e38);
  ExpectInvalid([] { MakeOptimizer("lbsgd", {{"batch_scale", 1.5}}); }, {"whole number"});
  ExpectInvalid([] { Sgd({.rescale_grad = std::numeric_limits<double>::infinity()}); },
                {"(-inf, inf)"});
}

// Whichever of the two comes last.
TEST(Optimizer, RatesThatOverflowFloat32WithAMultiplierAreErrors) {
  const OptimizerPtr sgd = Sgd({.learning_rate = 1e20, .weight_decay = 1e15});
  const std::vector<std::string> rate = {"sgd", "learning rate of key 'w'", "float32"};
  const std::vector<std::string> decay = {"sgd", "weight decay of key 'w'", "float32"};
  ExpectInvalid([&] { sgd->SetLearningRateMultiplier("w", 1e20); }, rate);
  ExpectInvalid([&] { sgd->SetWeightDecayMultiplier("w", 1e25); }, decay);
  sgd->SetLearningRateMultiplier("w", 1e10);
  sgd->SetWeightDecayMultiplier("w", 1e10);
  ExpectInvalid([&] { sgd->Set("learning_rate", 1e29); }, rate);
  ExpectInvalid([&] { sgd->Set("weight_decay", 1e29); }, decay);
  for (const LearningRateSchedule& schedule :
       {LearningRateSchedule(FactorSchedule{.base_rate = 1e29}),
        LearningRateSchedule(FactorSchedule{.stop_rate = 1e29}),
        LearningRateSchedule(MultiFactorSchedule{.steps = {1}, .base_rate = 1e29}),
        LearningRateSchedule(PolySchedule{.final_rate = 1e29}),
        LearningRateSchedule(CosineSchedule{.final_rate = 1e29})}) {
    ExpectInvalid([&] { sgd->SetSchedule(schedule); }, rate);
  }
  EXPECT_EQ(sgd->Get("learning_rate"), 1e20);
  EXPECT_EQ(sgd->Get("weight_decay"), 1e15);
  EXPECT_EQ(sgd->schedule(), std::nullopt);
  sgd->SetSchedule(FactorSchedule{.base_rate = 1e25});
  ExpectInvalid([&] { sgd->SetLearningRateMultiplier("w", 1e15); }, rate);
}

TEST(Optimizer, UnknownParametersAreErrors) {
  const OptimizerPtr sgd = Sgd();
  const std::vector<std::string> parts = {"sgd", "'beta1'", "learning_rate", "momentum"};
  ExpectInvalid([&] { sgd->Get("beta1"); }, parts);
  ExpectInvalid([&] { sgd->Set("beta1", 0.5); }, parts);
  ExpectInvalid([&] { MakeOptimizer("sgd", {{"beta1", 0.5}}); }, parts);
  EXPECT_EQ(sgd->Parameters(), Sgd()->Parameters());

  for (const auto& [misspelt, meant] :
       std::vector<std::pair<std::string, std::string>>{{"learing_rate", "learning_rate"},
                                                        {"Momentum", "momentum"},
                                                        {"momentun", "momentum"},
                                                        {"weightdecay", "weight_decay"},
                                                        {"clip_gradients", "clip_gradient"},
                                                        {"rescale", "rescale_grad"},
                                                        {"lr", "learning_rate"},
                                                        {"wd", "weight_decay"}}) {
    ExpectInvalid(
        [&, m = misspelt] {
          MakeOptimizer("sgd", {{m, 0.5}});
        },
        {"'" + misspelt + "'", "did you mean '" + meant + "'"});
  }
  ExpectInvalid([&] { MakeOptimizer("adam", {{"beta_2", 0.5}}); }, {"did you mean 'beta2'"});
  ExpectInvalid([&] { MakeOptimizer("adagrad", {{"eps", 0.5}}); }, {"did you mean 'epsilon'"});
}

TEST(Optimizer, MultiPrecisionIsFixed) {
  const OptimizerPtr sgd = Sgd();
  sgd->Set("multi_precision", 0);
  ExpectInvalid([&] { sgd->Set("multi_precision", 1); }, {"multi_precision", "fixed"});
}

TEST(Optimizer, SchedulesThatCannotBeAreErrors) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const OptimizerPtr sgd = Sgd();
  sgd->SetSchedule(FactorSchedule{.step = 7});
  const auto expect = [&](const LearningRateSchedule& schedule, const std::string& field,
                          const std::string& given) {
    const std::vector<std::string> parts = {"schedule: " + field + ": expected", "got " + given};
    ExpectInvalid([&] { CheckSchedule(schedule); }, parts);
    ExpectInvalid([&] { sgd->SetSchedule(schedule); }, parts);
    EXPECT_EQ(sgd->schedule(), LearningRateSchedule(FactorSchedule{.step = 7}));
  };
  // Of all, in any kind.
  for (const double rate : {-0.5, nan, inf}) {
    const std::string given = fmt::format("{}", rate);
    expect(FactorSchedule{.base_rate = rate}, "base_rate", given);
    expect(CosineSchedule{.warm_up = {.begin_rate = rate}}, "warm_up.begin_rate", given);
    expect(FactorSchedule{.stop_rate = rate}, "stop_rate", given);
    expect(PolySchedule{.final_rate = rate}, "final_rate", given);
    expect(PolySchedule{.power = rate}, "power", given);
    expect(CosineSchedule{.final_rate = rate}, "final_rate", given);
  }
  // What float32 cannot hold.
  expect(FactorSchedule{.base_rate = 1e39}, "base_rate", "1e+39");
  expect(FactorSchedule{.stop_rate = 1e39}, "stop_rate", "1e+39");
  expect(CosineSchedule{.final_rate = 1e39}, "final_rate", "1e+39");
  expect(MultiFactorSchedule{.steps = {1}, .warm_up = {.steps = -1}}, "warm_up.steps", "-1");
  expect(PolySchedule{.base_rate = 0.5, .warm_up = {.begin_rate = 0.75}}, "warm_up.begin_rate",
         "0.75");
  expect(FactorSchedule{.step = 0}, "step", "0");
  for (const double factor : {0.0, -0.5, 1.5, nan}) {
    expect(FactorSchedule{.factor = factor}, "factor", fmt::format("{}", factor));
    expect(MultiFactorSchedule{.steps = {1}, .factor = factor}, "factor",
           fmt::format("{}", factor));
  }
  expect(MultiFactorSchedule{}, "steps", "none");
  expect(MultiFactorSchedule{.steps = {0, 1}}, "steps", "0");
  expect(MultiFactorSchedule{.steps = {3, 5, 5}}, "steps", "5");
  expect(PolySchedule{.max_update = 0}, "max_update", "0");
  expect(PolySchedule{.max_update = 5, .warm_up = {.steps = 5}}, "max_update", "5");
  expect(CosineSchedule{.max_update = -3}, "max_update", "-3");
  expect(CosineSchedule{.max_update = 4, .warm_up = {.steps = 5}}, "max_update", "4");
  const std::string message = MessageOf<InvalidState>([&] { sgd->Set("learning_rate", 0.5); });
  EXPECT_NE(message.find("expected SetSchedule"), std::string::npos) << message;
}

// ---- Updates

class OptimizerStoreTest : public StoreTest {
 protected:
  // Several blocks of the kernels, and a rest.
  static constexpr std::int64_t kSize = 100'003;

  NDArray Random(std::uint32_t seed, DType dtype = DType::kFloat32, Device device = Cpu()) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> value(-1, 1);
    std::vector<float> values(kSize);
    for (float& v : values) v = value(random);
    return NDArray::FromVector(values, {kSize}, dtype, On(device), engine);
  }
  std::vector<float> Weight() {
    NDArray out({kSize}, DType::kFloat32, On(Cpu()), engine);
    store->Pull("w", out);
    return out.ToVector<float>();
  }
};

float Clip(float value, float limit) {
  return limit > 0 ? std::min(std::max(value, -limit), limit) : value;
}

// The formula of heddle/optimizer.h in float32, each operation rounded.
struct SgdOracle {
  float lr, momentum, wd, rescale, clip;
  std::vector<float> m = std::vector<float>(100'003, 0.0f);

  void Update(std::vector<float>& w, const std::vector<float>& g) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      const float step = clip > 0 ? lr * Clip(rescale * g[i], clip) : (lr * rescale) * g[i];
      m[i] = momentum * m[i] - (lr * wd) * w[i] - step;
      w[i] += m[i];
    }
  }
};

void ExpectNear(const std::vector<float>& actual, const std::vector<float>& expected,
                float tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
  }
}

TEST_P(OptimizerStoreTest, SgdFollowsItsFormula) {
  for (const SgdOptions& options :
       {SgdOptions{}, SgdOptions{.learning_rate = 0.1, .momentum = 0.9},
        SgdOptions{.learning_rate = 0.1, .weight_decay = 0.01, .rescale_grad = 0.5},
        SgdOptions{.learning_rate = 0.1,
        .momentum = 0.5,
        .weight_decay = 0.01,
        .rescale_grad = 2,
        .clip_gradient = 0.75}}) {
    store = NewStore();
    store->Init("w", Random(1));
    store->SetOptimizer(Sgd(options));
    SgdOracle oracle{static_cast<float>(options.learning_rate),
                     static_cast<float>(options.momentum), static_cast<float>(options.weight_decay),
                     static_cast<float>(options.rescale_grad),
                     static_cast<float>(options.clip_gradient)};
    std::vector<float> expected = Random(1).ToVector<float>();
    for (std::uint32_t step = 0; step < 4; ++step) {
      const NDArray a = Random(10 + step, DType::kFloat32, Cpu(0));
      const NDArray b = Random(20 + step, DType::kFloat32, Cpu(1));
      store->Push("w", {a, b});
      oracle.Update(expected, (a + b.Copy(a.device())).ToVector<float>());
    }
    ExpectNear(Weight(), expected, 1e-6f);
  }
}

TEST_P(OptimizerStoreTest, AdamFollowsItsFormula) {
  const AdamOptions options{.learning_rate = 0.01,
                            .beta1 = 0.8,
                            .beta2 = 0.99,
                            .epsilon = 1e-6,
                            .weight_decay = 0.1,
                            .rescale_grad = 2,
                            .clip_gradient = 1.5};
  store->Init("w", Random(1));
  store->SetOptimizer(Adam(options));
  std::vector<float> expected = Random(1).ToVector<float>();
  std::vector<double> m(kSize, 0.0);
  std::vector<double> v(kSize, 0.0);
  for (int t = 1; t <= 4; ++t) {
    const NDArray gradient = Random(static_cast<std::uint32_t>(10 + t));
    store->Push("w", gradient);
    const std::vector<float> g = gradient.ToVector<float>();
    const double lr = 0.01 * std::sqrt(1 - std::pow(0.99, t)) / (1 - std::pow(0.8, t));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double big = Clip(static_cast<float>(2 * g[i] + 0.1 * expected[i]), 1.5f);
      m[i] = 0.8 * m[i] + 0.2 * big;
      v[i] = 0.99 * v[i] + 0.01 * big * big;
      expected[i] -= static_cast<float>(lr * m[i] / (std::sqrt(v[i]) + 1e-6));
    }
  }
  ExpectNear(Weight(), expected, 2e-5f);
}

TEST_P(OptimizerStoreTest, MultiPrecisionKeepsWhatFloat16Loses) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const bool multi_precision : {false, true}) {
      store = NewStore();
      store->Init("w", Full(1, Cpu(), dtype));
      store->SetOptimizer(Sgd({.learning_rate = 1, .multi_precision = multi_precision}));
      // Each step is too small to change a 1 of 16 bits, 64 of them are not.
      const NDArray gradient = Full(0x1p-13, Cpu(), dtype);
      for (int i = 0; i < 64; ++i) store->Push("w", gradient);
      EXPECT_EQ(Pulled(*store, "w"), All(multi_precision ? 1 - 0x1p-7f : 1)) << Name(dtype);
    }
  }
}

TEST_P(OptimizerStoreTest, MultiPrecisionWithMomentumAndAdam) {
  for (const OptimizerPtr& optimizer :
       {Sgd({.learning_rate = 0.1, .momentum = 0.9, .multi_precision = true}),
        Adam({.learning_rate = 0.1, .multi_precision = true})}) {
    // Against the same steps on a float32 value.
    const auto wide = NewStore();
    store = NewStore();
    store->SetOptimizer(optimizer);
    wide->SetOptimizer(optimizer);
    store->Init("w", Full(1, Cpu(), DType::kFloat16));
    wide->Init("w", Full(1));
    for (int i = 0; i < 5; ++i) {
      store->Push("w", Full(0.25, Cpu(), DType::kFloat16));
      wide->Push("w", Full(0.25));
    }
    const NDArray rounded = Full(0, Cpu(), DType::kFloat16);
    wide->Pull("w", rounded);
    EXPECT_EQ(Pulled(*store, "w"), rounded.ToVector<float>()) << optimizer->name();
  }
}

TEST_P(OptimizerStoreTest, ChangesCountFromTheNextPushOn) {
  store->Init("w", Full(0));
  const OptimizerPtr sgd = Sgd({.learning_rate = 1});
  store->SetOptimizer(sgd);
  NDArray gradient = Full(1);
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("w", gradient);  // cannot run before the change
  NDArray before = Full(0);
  store->Pull("w", before);
  sgd->Set("learning_rate", 0.25);
  store->Push("w", gradient);
  writer.Release();
  EXPECT_EQ(before.ToVector<float>(), All(-1));
  EXPECT_EQ(Pulled(*store, "w"), All(-1.25f));
}

TEST_P(OptimizerStoreTest, MomentumMayBeSwitchedOnAndOff) {
  store->Init("w", Full(0));
  const OptimizerPtr sgd = Sgd({.learning_rate = 1});
  store->SetOptimizer(sgd);
  store->Push("w", Full(1));  // w = -1
  sgd->Set("momentum", 0.5);
  store->Push("w", Full(1));  // m = -1, w = -2
  store->Push("w", Full(1));  // m = -1.5, w = -3.5
  sgd->Set("momentum", 0);
  store->Push("w", Full(1));  // m = -1, w = -4.5
  sgd->Set("momentum", 0.5);
  store->Push("w", Full(1));  // m = -1.5, w = -6
  EXPECT_EQ(Pulled(*store, "w"), All(-6));
}

// The sign of the momentum, or of the gradient once the momentum is 0; a state that is there rests.
TEST_P(OptimizerStoreTest, SignumTakesItsFormulaFromTheMomentumOfThePush) {
  store->Init("w", Full(2));
  const OptimizerPtr signum = MakeOptimizer(
      "signum", {{"learning_rate", 0.5}, {"momentum", 0.5}, {"weight_decay", 0.5}, {"wd_lh", 1}});
  store->SetOptimizer(signum);
  store->Push("w", Full(1));  // m = -1, w = (1 - 0.5 * 1) * 2 - 0.5 = 0.5
  EXPECT_EQ(Pulled(*store, "w"), All(0.5f));
  signum->Set("momentum", 0);
  store->Push("w", Full(-1));  // w = (1 - 0.5 * 0.5) * 0.5 + 0.5 = 0.875
  EXPECT_EQ(Pulled(*store, "w"), All(0.875f));
  signum->Set("momentum", 0.5);
  store->Push("w", Full(-0.25f));  // m = -0.5 - 0.5 * 0.5 * 0.875 + 0.125 < 0, w = 0.4375 - 0.5
  EXPECT_EQ(Pulled(*store, "w"), All(-0.0625f));
}

// Every optimizer, with gradients and values of both kinds.
TEST_P(OptimizerStoreTest, ValuesWithoutElementsStayEmpty) {
  for (const Shape& empty : {Shape{3, 0}, Shape{0, 3}}) {
    std::vector<std::int64_t> ids;
    if (empty[0] > 0) ids.push_back(1);
    const auto rows =
        RowSparseNDArray::FromVectors<float>(ids, {}, empty, DType::kFloat32, Cpu(), engine);
    const NDArray dense(empty, DType::kFloat32, On(Cpu()), engine);
    for (const std::string_view name : Optimizers()) {
      for (const bool row_sparse_value : {false, true}) {
        SCOPED_TRACE(std::string(name) + (row_sparse_value ? " row-sparse " : " dense ") +
                     ToString(empty));
        const auto trained = NewStore();
        if (row_sparse_value) {
          trained->Init("w", rows);
        } else {
          trained->Init("w", dense);
        }
        trained->SetOptimizer(MakeOptimizer(name));
        trained->Push("w", rows);
        trained->Push("w", {rows, rows});
        if (!row_sparse_value) {
          trained->Push("w", dense);
          trained->Push("w", {dense, dense});
        }
        const NDArray out(empty, DType::kFloat32, On(Cpu()), engine);
        EXPECT_NO_THROW({
          trained->Pull("w", out);
          out.WaitToRead();
        });
      }
    }
  }
}

// Under the undefined-behaviour sanitizer the length of a row overflowed.
TEST_P(OptimizerStoreTest, ValuesWithoutRowsMayHaveRowsOfAnyLength) {
  constexpr std::int64_t kLong = std::int64_t{1} << 40;
  const NDArray value({0, kLong, kLong}, DType::kFloat32, On(Cpu()), engine);
  for (const std::string_view name : Optimizers()) {
    if (name == "groupadagrad") continue;  // of matrices alone
    SCOPED_TRACE(name);
    const auto trained = NewStore();
    trained->Init("w", value);
    trained->SetOptimizer(MakeOptimizer(name));
    trained->Push("w", value);
    trained->Push("w", {value, value});
    trained->Pull("w", value);
    EXPECT_NO_THROW(value.WaitToRead());
  }
}

TEST_P(OptimizerStoreTest, EachKeyAndEachSetOptimizerHasAStateOfItsOwn) {
  const OptimizerPtr sgd = Sgd({.learning_rate = 1, .momentum = 0.5});
  store->Init({"a", "b"}, {Full(0), Full(0)});
  store->SetOptimizer(sgd);
  store->Push("a", Full(1));  // a: m = -1
  store->Push("b", Full(2));  // b: m = -2
  store->Push("a", Full(1));  // a: m = -1.5
  EXPECT_EQ(Pulled(*store, "a"), All(-2.5f));
  EXPECT_EQ(Pulled(*store, "b"), All(-2));
  store->SetOptimizer(sgd);
  store->Push("a", Full(1));  // a: m = -1
  EXPECT_EQ(Pulled(*store, "a"), All(-3.5f));

  const auto other = NewStore();
  other->Init("a", Full(0));
  other->SetOptimizer(sgd);  // one optimizer may serve several stores
  other->Push("a", Full(1));
  EXPECT_EQ(Pulled(*other, "a"), All(-1));
}

TEST_P(OptimizerStoreTest, IntegersAreErrors) {
  store->Init("w", Full(1, Cpu(), DType::kInt32));
  store->SetOptimizer(Sgd());
  ExpectInvalid([&] { store->Push("w", Full(1, Cpu(), DType::kInt32)); },
                {"'w'", "floating", "sgd", "int32"});
  EXPECT_EQ(Pulled(*store, "w"), All(1));
}

TEST_P(OptimizerStoreTest, Float64IsUpdatedInFloat64) {
  store->Init("w", Full(1, Cpu(), DType::kFloat64));
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  store->Push("w", Full(1e-12, Cpu(), DType::kFloat64));
  const NDArray out = Full(0, Cpu(), DType::kFloat64);
  store->Pull("w", out);
  EXPECT_EQ(out.ToVector<double>()[0], 1 - 1e-12);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerStoreTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, OptimizerStoreTest, testing::ValuesIn(GpuSetups()), SetupName);

// The same bits for every engine and number of workers.
TEST(OptimizerBits, DoNotDependOnTheEngine) {
  std::vector<std::vector<float>> results;
  for (const StoreSetup& setup : std::vector<StoreSetup>{{"local", "serial", 1},
                                                         {"local", "threaded", 1},
                                                         {"local", "threaded", 4},
                                                         {"device", "threaded", 2}}) {
    Engine engine(OptionsOf(setup));
    const auto store = KVStore::Create(setup.store, engine);
    std::mt19937 random(7);
    std::normal_distribution<float> value;
    const Shape shape{500, 401};
    const auto draw = [&](int device) {
      std::vector<float> values(static_cast<std::size_t>(shape.size()));
      for (float& v : values) v = value(random);
      return NDArray::FromVector(values, shape, DType::kFloat32, Cpu(device), engine);
    };
    store->Init("w", draw(0));
    store->SetOptimizer(Adam({.weight_decay = 0.01}));
    for (int step = 0; step < 5; ++step) store->Push("w", {draw(0), draw(1), draw(2)});
    NDArray out(shape, DType::kFloat32, Cpu(), engine);
    store->Pull("w", out);
    results.push_back(out.ToVector<float>());
  }
  for (const std::vector<float>& result : results) EXPECT_TRUE(result == results[0]);
}

}  // namespace
}  // namespace heddle::kvstore_test
