// Updates against formulas written here: every optimizer in every dtype, also where MXNet 1.9.1,
// whose values golden_test.cc compares with, has no such optimizer, no such path or a bug, and for
// arrays of several blocks, whose norms the store sums in parts; and the bits on every SIMD target.
#include <heddle/dtype.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>
#include <heddle/schedule.h>

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

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/reduce.h"
#include "tests/kvstore/support.h"
#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::kvstore {
const OptimizerType& HeavyBallType();  // heavy_ball.cc
}

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

// w, and the states, which start as zeros but for `previous`.
struct Trained {
  Trained(std::string_view name, DType dtype, Values weight)
      : name(name),
        dtype(dtype),
        w(std::move(weight)),
        a(w.size()),
        b(w.size()),
        c(w.size()),
        previous(w) {}

  // Rounds all to the dtype, as the store does with what it keeps.
  void Store() {
    for (Values* const values : {&w, &a, &b, &c, &previous}) {
      for (double& value : *values) value = Rounded(value);
    }
  }

  const std::string_view name;
  const DType dtype;
  Values w, a, b, c, previous;

 private:
  double Rounded(double value) const {
    if (dtype == DType::kFloat64) return value;
    const auto narrow = static_cast<float>(value);  // in which values of 16 bits are computed, too
    if (dtype == DType::kFloat16) return static_cast<float>(Float16(narrow));
    return dtype == DType::kBFloat16 ? static_cast<float>(BFloat16(narrow)) : narrow;
  }
};

// The t-th update.
using Step = std::function<void(Trained& key, const Values& g, int t)>;

// Values are matrices: several blocks of a reduction, and a rest, in rows for groupadagrad.
constexpr std::size_t kMatrixRows = 19;
constexpr std::size_t kMatrixColumns = 647;
constexpr std::size_t kSize = kMatrixRows * kMatrixColumns;
static_assert(kSize > 3 * ops::kReductionBlock && kSize % ops::kReductionBlock != 0);

// An optimizer with some parameters, and a loop that does the same, written from
// docs/optimizers.md.
struct Formula {
  std::string_view name;
  OptimizerPtr optimizer;
  Step step;
  std::function<void(Optimizer& optimizer, int t)> before = {};  // the t-th updates
  double weight_scale = 1;                                       // of the first weights
  double gradient_scale = 1;
};

Formula MakeFormula(std::string_view name, const Parameters& parameters, Step step) {
  return {name, MakeOptimizer(name, parameters), std::move(step)};
}

// f(i) for each element.
template <class F>
void ForEach(const Values& g, const F& f) {
  for (std::size_t i = 0; i < g.size(); ++i) f(i);
}

// With parameters that many share: then G1 = Rescaled(g) and G2 = Rescaled(g + 0.2 w).
Parameters WithShared(Parameters parameters) {
  parameters.insert(parameters.end(),
                    {{"weight_decay", 0.1}, {"rescale_grad", 0.5}, {"clip_gradient", 0.4}});
  return parameters;
}
double Rescaled(double gradient) { return Clip(0.5 * gradient, 0.4); }

Formula SgdOf(std::string_view name, double momentum) {
  return MakeFormula(name, WithShared({{"learning_rate", 0.1}, {"momentum", momentum}}),
                     [=](Trained& k, const Values& g, int) {
                       ForEach(g, [&](std::size_t i) {
                         k.a[i] = momentum * k.a[i] - 0.1 * (0.1 * k.w[i] + Rescaled(g[i]));
                         k.w[i] += k.a[i];
                       });
                     });
}

Formula HeavyBall() {
  return {"heavyball",
          kvstore::MakeOptimizerOf(kvstore::HeavyBallType(),
                                   WithShared({{"learning_rate", 0.1}, {"momentum", 0.9}})),
          [](Trained& k, const Values& g, int) {
            ForEach(g, [&](std::size_t i) {
              k.a[i] = 0.9 * k.a[i] + Rescaled(g[i]);
              k.w[i] -= 0.1 * (k.a[i] + 0.1 * k.w[i]);
            });
          }};
}

Formula Nag(double momentum) {
  return MakeFormula("nag", WithShared({{"learning_rate", 0.1}, {"momentum", momentum}}),
                     [=](Trained& k, const Values& g, int) {
                       ForEach(g, [&](std::size_t i) {
                         const auto step = [&](double w) {
                           return 0.1 * (Rescaled(g[i]) + 0.1 * w);
                         };
                         const double m = momentum * k.a[i];
                         k.w[i] += (momentum + 1) * (m - step(k.w[i])) - m;
                         k.a[i] = m - step(k.w[i]);
                       });
                     });
}

Formula AdamFormula() {
  return MakeFormula(
      "adam",
      WithShared({{"learning_rate", 0.05}, {"beta1", 0.8}, {"beta2", 0.95}, {"epsilon", 1e-2}}),
      [](Trained& k, const Values& g, int t) {
        const double lr = 0.05 * std::sqrt(1 - std::pow(0.95, t)) / (1 - std::pow(0.8, t));
        ForEach(g, [&](std::size_t i) {
          const double x = Rescaled(g[i] + 0.2 * k.w[i]);
          k.a[i] = 0.8 * k.a[i] + 0.2 * x;
          k.b[i] = 0.95 * k.b[i] + 0.05 * x * x;
          k.w[i] -= lr * k.a[i] / (std::sqrt(k.b[i]) + 1e-2);
        });
      });
}

Formula AdamW(bool corrects) {
  return MakeFormula("adamw",
                     WithShared({{"learning_rate", 0.05},
                                 {"beta1", 0.8},
                                 {"beta2", 0.95},
                                 {"epsilon", 1e-2},
                                 {"correct_bias", corrects}}),
                     [=](Trained& k, const Values& g, int t) {
                       const double correction =
                           std::sqrt(1 - std::pow(0.95, t)) / (1 - std::pow(0.8, t));
                       const double lr = 0.05 * (corrects ? correction : 1);
                       ForEach(g, [&](std::size_t i) {
                         const double x = Rescaled(g[i]);
                         k.a[i] = 0.8 * k.a[i] + 0.2 * x;
                         k.b[i] = 0.95 * k.b[i] + 0.05 * x * x;
                         k.w[i] -= lr * (k.a[i] / (std::sqrt(k.b[i]) + 1e-2) + 0.1 * k.w[i]);
                       });
                     });
}

Formula AdaBelief(bool corrects) {
  return MakeFormula("adabelief",
                     WithShared({{"learning_rate", 0.05},
                                 {"beta1", 0.8},
                                 {"beta2", 0.95},
                                 {"epsilon", 1e-2},
                                 {"correct_bias", corrects}}),
                     [=](Trained& k, const Values& g, int t) {
                       const double correction =
                           std::sqrt(1 - std::pow(0.95, t)) / (1 - std::pow(0.8, t));
                       const double lr = 0.05 * (corrects ? correction : 1);
                       ForEach(g, [&](std::size_t i) {
                         const double x = Rescaled(g[i] + 0.2 * k.w[i]);
                         k.a[i] = 0.8 * k.a[i] + 0.2 * x;
                         k.b[i] = 0.95 * k.b[i] + 0.05 * (x - k.a[i]) * (x - k.a[i]) + 1e-2;
                         k.w[i] -= lr * k.a[i] / (std::sqrt(k.b[i]) + 1e-2);
                       });
                     });
}

Formula AdaGrad() {
  return MakeFormula("adagrad", WithShared({{"learning_rate", 0.1}, {"epsilon", 1e-3}}),
                     [](Trained& k, const Values& g, int) {
                       ForEach(g, [&](std::size_t i) {
                         const double x = Rescaled(g[i]);
                         k.a[i] += x * x;
                         k.w[i] -= 0.1 * (x / std::sqrt(k.a[i] + 1e-3) + 0.1 * k.w[i]);
                       });
                     });
}

Formula GroupAdaGrad() {
  return MakeFormula(
      "groupadagrad",
      {{"learning_rate", 0.1}, {"epsilon", 1e-3}, {"rescale_grad", 0.5}, {"clip_gradient", 0.4}},
      [](Trained& k, const Values& g, int) {
        for (std::size_t row = 0; row < kMatrixRows; ++row) {
          double squares = 0;
          for (std::size_t i = row * kMatrixColumns; i < (row + 1) * kMatrixColumns; ++i) {
            squares += Rescaled(g[i]) * Rescaled(g[i]);
          }
          k.a[row] += squares / static_cast<double>(kMatrixColumns);
          for (std::size_t i = row * kMatrixColumns; i < (row + 1) * kMatrixColumns; ++i) {
            k.w[i] -= 0.1 * Rescaled(g[i]) / std::sqrt(k.a[row] + 1e-3);
          }
        }
      });
}

Formula RmsProp(bool centered) {
  return MakeFormula("rmsprop",
                     WithShared({{"learning_rate", 0.05},
                                 {"gamma1", 0.8},
                                 {"gamma2", 0.5},
                                 {"epsilon", 1e-2},
                                 {"centered", centered},
                                 {"clip_weights", 0.7}}),
                     [=](Trained& k, const Values& g, int) {
                       ForEach(g, [&](std::size_t i) {
                         const double x = Rescaled(g[i] + 0.2 * k.w[i]);
                         k.a[i] = 0.2 * x * x + 0.8 * k.a[i];
                         if (centered) k.b[i] = 0.2 * x + 0.8 * k.b[i];
                         const double variance = k.a[i] - k.b[i] * k.b[i];
                         k.c[i] =
                             (centered ? 0.5 * k.c[i] : 0) - 0.05 * x / std::sqrt(variance + 1e-2);
                         k.w[i] = Clip(k.w[i] + k.c[i], 0.7);
                       });
                     });
}

Formula AdaDelta() {
  return MakeFormula("adadelta", WithShared({{"rho", 0.8}, {"epsilon", 1e-2}}),
                     [](Trained& k, const Values& g, int) {
                       ForEach(g, [&](std::size_t i) {
                         const double x = Rescaled(g[i]);
                         k.a[i] = 0.8 * k.a[i] + 0.2 * x * x;
                         const double step =
                             std::sqrt(k.b[i] + 1e-2) / std::sqrt(k.a[i] + 1e-2) * x;
                         k.b[i] = 0.8 * k.b[i] + 0.2 * step * step;
                         k.w[i] -= step + 0.1 * k.w[i];
                       });
                     });
}

Formula Ftrl() {
  return MakeFormula(
      "ftrl", WithShared({{"learning_rate", 0.2}, {"lamda1", 0.1}, {"beta", 0.5}}),
      [](Trained& k, const Values& g, int) {
        ForEach(g, [&](std::size_t i) {
          const double x = Rescaled(g[i]);
          const double root = std::sqrt(k.b[i] + x * x);
          k.a[i] += x - (root - std::sqrt(k.b[i])) * k.w[i] / 0.2;
          k.b[i] += x * x;
          const double most = 0.1 * (k.a[i] > 0 ? 1 : -1);
          k.w[i] = std::abs(k.a[i]) > 0.1 ? (most - k.a[i]) / ((0.5 + root) / 0.2 + 0.1) : 0;
        });
      });
}

Formula Ftml() {
  return MakeFormula(
      "ftml",
      WithShared({{"learning_rate", 0.05}, {"beta1", 0.6}, {"beta2", 0.9}, {"epsilon", 1e-2}}),
      [](Trained& k, const Values& g, int t) {
        ForEach(g, [&](std::size_t i) {
          const double x = Rescaled(g[i] + 0.2 * k.w[i]);
          k.b[i] = 0.9 * k.b[i] + 0.1 * x * x;
          const double d =
              (1 - std::pow(0.6, t)) / 0.05 * (std::sqrt(k.b[i] / (1 - std::pow(0.9, t))) + 1e-2);
          k.c[i] = 0.6 * k.c[i] + 0.4 * x - (d - 0.6 * k.a[i]) * k.w[i];
          k.a[i] = d;
          k.w[i] = -k.c[i] / d;
        });
      });
}

// Numbers by which sums are exact, so that their signs are.
Formula Signum(double momentum) {
  return MakeFormula("signum",
                     {{"learning_rate", 0.05},
                      {"momentum", momentum},
                      {"wd_lh", 0.5},
                      {"weight_decay", momentum == 0 ? 0.25 : 0},
                      {"rescale_grad", 0.5},
                      {"clip_gradient", 0.25}},
                     [=](Trained& k, const Values& g, int) {
                       const auto sign = [](double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : 0.0; };
                       ForEach(g, [&](std::size_t i) {
                         if (momentum == 0) {
                           k.w[i] = (1 - 0.05 * 0.25) * k.w[i] - 0.05 * sign(g[i]);
                           return;
                         }
                         k.a[i] = momentum * k.a[i] - (1 - momentum) * Clip(0.5 * g[i], 0.25);
                         k.w[i] = (1 - 0.05 * 0.5) * k.w[i] + 0.05 * sign(k.a[i]);
                       });
                     });
}

Formula Adamax() {
  return MakeFormula("adamax",
                     WithShared({{"learning_rate", 0.05}, {"beta1", 0.7}, {"beta2", 0.8}}),
                     [](Trained& k, const Values& g, int t) {
                       const double lr = 0.05 / (1 - std::pow(0.7, t));
                       ForEach(g, [&](std::size_t i) {
                         const double x = Rescaled(g[i] + 0.2 * k.w[i]);
                         k.a[i] = 0.7 * k.a[i] + 0.3 * x;
                         k.b[i] = std::max(0.8 * k.b[i], std::abs(x));
                         if (k.b[i] != 0) k.w[i] -= lr * k.a[i] / k.b[i];
                       });
                     });
}

// Each of the two keys has a product of its own.
Formula Nadam() {
  const auto p = [](int k) { return 0.9 * (1 - 0.5 * std::pow(0.96, k * 0.1)); };
  return MakeFormula(
      "nadam",
      WithShared(
          {{"learning_rate", 0.02}, {"beta2", 0.95}, {"schedule_decay", 0.1}, {"epsilon", 1e-2}}),
      [=](Trained& k, const Values& g, int t) {
        double product = 1;
        for (int s = 1; s <= t; ++s) product *= p(s);
        ForEach(g, [&](std::size_t i) {
          const double x = Rescaled(g[i] + 0.2 * k.w[i]);
          k.a[i] = 0.9 * k.a[i] + 0.1 * x;
          k.b[i] = 0.95 * k.b[i] + 0.05 * x * x;
          const double m =
              (1 - p(t)) * x / (1 - product) + p(t + 1) * k.a[i] / (1 - product * p(t + 1));
          k.w[i] -= 0.02 * m / (std::sqrt(k.b[i] / (1 - std::pow(0.95, t))) + 1e-2);
        });
      });
}

// The trust ratio of LAMB and LANS.
double Ratio(double weight_norm, double lower, double upper, double direction_norm) {
  if (lower > 0) weight_norm = std::max(weight_norm, lower);
  if (upper > 0) weight_norm = std::min(weight_norm, upper);
  return weight_norm == 0 || direction_norm == 0 ? 1 : weight_norm / direction_norm;
}

struct Bounds {
  double lower = 0;  // 0: none
  double upper = 0;
};
// Weights of the norm 64, as they are at first, reach both.
constexpr Bounds kBounds[] = {{}, {.lower = 1000}, {.upper = 10}};

// The direction that a step takes is of moments as they were stored, its norm of those before that.
Formula Lamb(const Bounds& bounds, bool corrects, double decay) {
  const double lr = bounds.lower > 0 ? 0.005 : 0.05;
  return MakeFormula(
      "lamb",
      {{"learning_rate", lr},
       {"beta1", 0.8},
       {"beta2", 0.95},
       {"epsilon", 1e-2},
       {"bias_correction", corrects},
       {"lower_bound", bounds.lower},
       {"upper_bound", bounds.upper},
       {"weight_decay", decay},
       {"rescale_grad", 0.5},
       {"clip_gradient", 0.4}},
      [=](Trained& k, const Values& g, int t) {
        const auto direction = [&] {
          const double mean = corrects ? 1 - std::pow(0.8, t) : 1;
          const double variance = corrects ? 1 - std::pow(0.95, t) : 1;
          Values u(g.size());
          ForEach(g, [&](std::size_t i) {
            u[i] = k.a[i] / mean / (std::sqrt(k.b[i] / variance) + 1e-2) + decay * k.w[i];
          });
          return u;
        };
        ForEach(g, [&](std::size_t i) {
          const double x = Rescaled(g[i]);
          k.a[i] = 0.8 * k.a[i] + 0.2 * x;
          k.b[i] = 0.95 * k.b[i] + 0.05 * x * x;
        });
        const double rate = lr * Ratio(Norm(k.w), bounds.lower, bounds.upper, Norm(direction()));
        k.Store();
        const Values u = direction();
        ForEach(g, [&](std::size_t i) { k.w[i] -= rate * u[i]; });
      });
}

Formula Lans(const Bounds& bounds, double decay) {
  const double lr = bounds.lower > 0 ? 0.005 : 0.05;
  return MakeFormula(
      "lans",
      {{"learning_rate", lr},
       {"beta1", 0.8},
       {"beta2", 0.95},
       {"epsilon", 1e-2},
       {"lower_bound", bounds.lower},
       {"upper_bound", bounds.upper},
       {"weight_decay", decay},
       {"rescale_grad", 0.5},
       {"clip_gradient", 0.01}},
      [=](Trained& k, const Values& g, int t) {
        const double norm = 0.5 * Norm(g);
        Values x(g.size());  // stays 0 where the gradient is
        if (norm > 0) ForEach(g, [&](std::size_t i) { x[i] = Clip(0.5 * g[i] / norm, 0.01); });
        const auto direction = [&](const Values& of) {
          Values all(g.size());
          ForEach(g, [&](std::size_t i) {
            const double root = std::sqrt(k.b[i] / (1 - std::pow(0.95, t))) + 1e-2;
            all[i] = of[i] / root + decay * k.w[i];
          });
          return all;
        };
        const auto mean = [&] {
          Values corrected(g.size());
          ForEach(g, [&](std::size_t i) { corrected[i] = k.a[i] / (1 - std::pow(0.8, t)); });
          return corrected;
        };
        ForEach(g, [&](std::size_t i) {
          k.a[i] = 0.8 * k.a[i] + 0.2 * x[i];
          k.b[i] = 0.95 * k.b[i] + 0.05 * x[i] * x[i];
        });
        const auto ratio = [&](const Values& of) {
          return Ratio(Norm(k.w), bounds.lower, bounds.upper, Norm(direction(of)));
        };
        const double u_rate = lr * 0.8 * ratio(mean());
        const double n_rate = lr * 0.2 * ratio(x);
        k.Store();
        const Values u = direction(mean());
        const Values n = direction(x);
        ForEach(g, [&](std::size_t i) { k.w[i] -= u_rate * u[i] + n_rate * n[i]; });
      });
}

// Keys called bias take plain steps; each key corrects its momentum by its own last rate.
Formula Lars(bool corrects, double decay) {
  const auto rate = [](int t) { return 0.1 / t; };
  Formula lars = MakeFormula(
      "lars",
      {{"momentum", 0.9},
       {"eta", 0.5},
       {"epsilon", 0.01},
       {"momentum_correction", corrects},
       {"weight_decay", decay},
       {"rescale_grad", 0.5}},
      [=](Trained& k, const Values& g, int t) {
        const double w_norm = Norm(k.w);
        const double g_norm = 0.5 * Norm(g);
        const bool plain = k.name == "bias" || w_norm == 0 || g_norm == 0;
        const double scale = plain ? 1 : 0.5 * w_norm / (g_norm + decay * w_norm + 0.01);
        const double lr = rate(t) * scale;
        const double momentum = 0.9 * (corrects && t > 1 ? rate(t) / rate(t - 1) : 1);
        ForEach(g, [&](std::size_t i) {
          k.a[i] = momentum * k.a[i] - lr * (decay * k.w[i] + 0.5 * g[i]);
          k.w[i] += k.a[i];
        });
      });
  lars.before = [=](Optimizer& optimizer, int t) { optimizer.Set("learning_rate", rate(t)); };
  return lars;
}

enum LbsgdStrategy { kLbsgdLinear, kLbsgdPower2, kLbsgdSqrt, kLbsgdLars };

// Every second update steps. `rate`: of the t-th update.
Formula Lbsgd(LbsgdStrategy strategy, double momentum, const std::function<double(int)>& rate,
              double decay, int* clamped = nullptr) {
  return MakeFormula("lbsgd",
                     {{"learning_rate", rate(1)},
                      {"momentum", momentum},
                      {"warmup_strategy", strategy},
                      {"warmup_epochs", 1},
                      {"batch_scale", 2},
                      {"updates_per_epoch", 5},
                      {"weight_decay", decay},
                      {"rescale_grad", 0.5},
                      {"clip_gradient", 0.4}},
                     [=](Trained& k, const Values& g, int t) {
                       if (t % 2 == 1) {
                         k.a = g;
                         return;
                       }
                       Values mean(g.size());
                       ForEach(g, [&](std::size_t i) { mean[i] = (k.a[i] + g[i]) / 2; });
                       k.a = Values(g.size());
                       const double part = std::min(1.0, t / 5.0);
                       double factor = 1 + (strategy == kLbsgdPower2 ? part * part
                                            : strategy == kLbsgdSqrt ? std::sqrt(part)
                                                                     : part);
                       if (strategy == kLbsgdLars) {
                         const double w2 = Norm(k.w) * Norm(k.w);
                         const double g2 = Norm(mean) * Norm(mean);
                         const double ratio = std::sqrt(w2 / (g2 + decay * w2));
                         factor = std::clamp(ratio, 0.01, 100.0);
                         if (clamped != nullptr && factor != ratio) ++*clamped;
                       }
                       const double lr = rate(t) * factor;
                       ForEach(g, [&](std::size_t i) {
                         k.b[i] = momentum * k.b[i] - lr * (decay * k.w[i] + Rescaled(mean[i]));
                         k.w[i] += k.b[i];
                       });
                     });
}
Formula Lbsgd(LbsgdStrategy strategy, double momentum) {
  return Lbsgd(
      strategy, momentum, [](int /*t*/) { return 0.1; }, 0.1);
}

// It counts the update before it asks the schedule, as all do.
Formula LbsgdWithASchedule() {
  Formula lbsgd = Lbsgd(
      kLbsgdLinear, 0.9, [](int t) { return 0.2 * std::pow(0.8, t - 1); }, 0.1);
  lbsgd.before = [](Optimizer& optimizer, int /*t*/) {
    optimizer.SetSchedule(FactorSchedule{.step = 1, .factor = 0.8, .base_rate = 0.2});
  };
  return lbsgd;
}

Formula Dcasgd(double momentum) {
  return MakeFormula("dcasgd",
                     WithShared({{"learning_rate", 0.1}, {"momentum", momentum}, {"lamda", 0.5}}),
                     [=](Trained& k, const Values& g, int) {
                       ForEach(g, [&](std::size_t i) {
                         const double x = Rescaled(g[i]);
                         const double delay = 0.5 * x * x * (k.w[i] - k.previous[i]);
                         k.a[i] = momentum * k.a[i] - 0.1 * (x + 0.1 * k.w[i] + delay);
                         k.previous[i] = k.w[i];
                         k.w[i] += k.a[i];
                       });
                     });
}

Formula TestFormula() {
  return MakeFormula("test", {{"rescale_grad", 0.5}}, [](Trained& k, const Values& g, int) {
    ForEach(g, [&](std::size_t i) { k.w[i] += 0.5 * g[i]; });
  });
}

// One of each optimizer at least, but for sgld, which draws: SgldDriftsAndDraws.
std::vector<Formula> Formulas() {
  return {AdaBelief(true),
          AdaBelief(false),
          AdaDelta(),
          AdaGrad(),
          AdamFormula(),
          Adamax(),
          AdamW(true),
          AdamW(false),
          SgdOf("ccsgd", 0),
          Dcasgd(0),
          Dcasgd(0.9),
          Ftml(),
          Ftrl(),
          GroupAdaGrad(),
          HeavyBall(),
          Lamb({}, true, 0.1),
          Lamb({}, false, 0.1),
          Lans({}, 0.1),
          Lars(true, 0.1),
          Lars(false, 0.1),
          Lbsgd(kLbsgdLinear, 0.9),
          Lbsgd(kLbsgdPower2, 0),
          Lbsgd(kLbsgdSqrt, 0),
          Lbsgd(kLbsgdLars, 0),
          LbsgdWithASchedule(),
          Nadam(),
          Nag(0),
          Nag(0.9),
          RmsProp(false),
          RmsProp(true),
          SgdOf("sgd", 0.9),
          Signum(0),
          Signum(0.5),
          TestFormula()};
}

// How values are kept, and how far a weight may be from its formula, relative to the greater of its
// size and 1. Of 16 bits that is eight times what rounding one loses, but nine in ten have to be
// the very same: both sides round what is stored, and few numbers lie so near to the middle between
// two that float32 and float64 round them otherwise.
struct Precision {
  DType dtype;
  double tolerance;
};
constexpr Precision kPrecisions[] = {{DType::kFloat32, 2e-5},
                                     {DType::kFloat64, 1e-10},
                                     {DType::kFloat16, 0x1p-8},
                                     {DType::kBFloat16, 0x1p-5}};

void ExpectAsPrecise(const Values& actual, const Values& expected, const Precision& precision) {
  std::size_t same = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double far = precision.tolerance * std::max(1.0, std::abs(expected[i]));
    ASSERT_TRUE(std::abs(actual[i] - expected[i]) <= far)  // so no NaN is
        << "element " << i << ": expected " << expected[i] << ", got " << actual[i];
    if (actual[i] == expected[i]) ++same;
  }
  if (SizeOf(precision.dtype) == 2) {
    EXPECT_GE(same, actual.size() * 9 / 10);
  }
}

class OptimizerFormulaTest : public testing::Test {
 protected:
  static constexpr int kSteps = kSanitized ? 2 : 6;

  Values Random(std::size_t count = kSize, double scale = 1) {
    std::uniform_real_distribution<float> value(-1, 1);
    Values values(count);
    for (double& v : values) v = scale * value(random_);
    return values;
  }
  NDArray ToArray(const Values& values, DType dtype = DType::kFloat32) {
    return NDArray::FromVector(values, {static_cast<std::int64_t>(values.size())}, dtype, Cpu(),
                               engine_);
  }
  NDArray ToMatrix(const Values& values, DType dtype, Device device = Cpu()) {
    return NDArray::FromVector(values, {kMatrixRows, kMatrixColumns}, dtype, device, engine_);
  }
  Values Pulled(KVStore& store, std::string_view key, const Shape& shape) {
    NDArray out(shape, DType::kFloat64, Cpu(), engine_);
    store.Pull(key, out);
    return out.ToVector<double>();
  }
  Values Pulled(KVStore& store, std::string_view key, std::size_t count = kSize) {
    return Pulled(store, key, Shape{static_cast<std::int64_t>(count)});
  }

  // Some updates of the keys "weight" and "bias", which get gradients of two devices.
  void ExpectFollows(const Formula& formula, const Precision& precision) {
    const DType dtype = precision.dtype;
    SCOPED_TRACE(std::string(formula.name) + " " + std::string(Name(dtype)));
    const auto store = KVStore::Create("device", engine_);
    store->SetOptimizer(formula.optimizer);
    std::vector<Trained> keys;
    for (const char* name : {"weight", "bias"}) {
      const NDArray start = ToMatrix(Random(kSize, formula.weight_scale), dtype);
      store->Init(name, start);
      keys.emplace_back(name, dtype, start.ToVector<double>());
    }
    for (int t = 1; t <= kSteps; ++t) {
      if (formula.before) formula.before(*formula.optimizer, t);
      for (Trained& key : keys) {
        SCOPED_TRACE(std::string(key.name) + ", update " + std::to_string(t));
        const NDArray x = ToMatrix(Random(kSize, formula.gradient_scale), dtype, Cpu(0));
        const NDArray y = ToMatrix(Random(kSize, formula.gradient_scale), dtype, Cpu(1));
        store->Push(key.name, {x, y});
        formula.step(key, (x + y.Copy(Cpu(0))).ToVector<double>(), t);
        key.Store();
        ExpectAsPrecise(Pulled(*store, key.name, {kMatrixRows, kMatrixColumns}), key.w, precision);
        if (HasFailure()) return;
      }
    }
  }
  void ExpectFollows(const Formula& formula) {
    for (const Precision& precision : kPrecisions) ExpectFollows(formula, precision);
  }

  Engine engine_{OptionsOf({"device", "threaded", 2})};
  std::mt19937_64 random_{kvstore_test::TestSeed()};
};

TEST_F(OptimizerFormulaTest, EveryOptimizerHasAFormula) {
  for (const std::string_view name : OptimizerNames()) {
    if (name == "sgld") continue;
    EXPECT_NE(std::ranges::count(Formulas(), name, &Formula::name), 0) << name;
  }
}

TEST_F(OptimizerFormulaTest, EveryOptimizerInEveryDType) {
  for (const Formula& formula : Formulas()) ExpectFollows(formula);
}

TEST_F(OptimizerFormulaTest, LansAndItsBounds) {
  for (const Bounds& bounds : kBounds) ExpectFollows(Lans(bounds, 0.1), kPrecisions[0]);
}

TEST_F(OptimizerFormulaTest, LambAndItsBounds) {
  for (const Bounds& bounds : kBounds) ExpectFollows(Lamb(bounds, true, 0.1), kPrecisions[0]);
}

// Weights of zeros, gradients of zeros, and directions that are zero since there is no decay
// either.
TEST_F(OptimizerFormulaTest, NormsOfZero) {
  for (const double decay : {0.1, 0.0}) {
    for (Formula formula : {Lamb({}, true, decay), Lans({}, decay), Lars(true, decay)}) {
      for (const auto& [weight_scale, gradient_scale] :
           {std::pair{0.0, 1.0}, std::pair{1.0, 0.0}, std::pair{0.0, 0.0}}) {
        SCOPED_TRACE(std::to_string(decay) + " " + std::to_string(weight_scale) + " " +
                     std::to_string(gradient_scale));
        formula.weight_scale = weight_scale;
        formula.gradient_scale = gradient_scale;
        ExpectFollows(formula, kPrecisions[0]);
      }
    }
  }
}

// Weights that are small beside the gradients, and the other way round.
TEST_F(OptimizerFormulaTest, LbsgdWithLarsKeepsItsFactorWithinBounds) {
  for (const auto& [weight_scale, gradient_scale] : {std::pair{1e-3, 1.0}, std::pair{1.0, 1e-4}}) {
    SCOPED_TRACE(weight_scale);
    int clamped = 0;
    Formula formula = Lbsgd(
        kLbsgdLars, 0, [](int /*t*/) { return 0.1; }, 0, &clamped);
    formula.weight_scale = weight_scale;
    formula.gradient_scale = gradient_scale;
    ExpectFollows(formula);
    EXPECT_GT(clamped, 0);
  }
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
  for (const Precision& precision : kPrecisions) {
    const DType dtype = precision.dtype;
    SCOPED_TRACE(Name(dtype));
    const auto train = [&](double seed, const NDArray& w, const NDArray& g, std::string_view key) {
      const auto store = KVStore::Create("local", engine_);
      store->SetOptimizer(MakeOptimizer("sgld", {{"learning_rate", 0.25},
                                                 {"weight_decay", 0.1},
                                                 {"rescale_grad", 0.5},
                                                 {"clip_gradient", 0.4},
                                                 {"seed", seed}}));
      store->Init(key, w);
      store->Push(key, g);
      return Pulled(*store, key);
    };
    const NDArray w = ToArray(Random(), dtype);
    const NDArray g = ToArray(Random(), dtype);
    const NDArray zeros = ToArray(Values(kSize), dtype);
    const Values noise = train(3, zeros, zeros, "a");
    Trained expected("a", dtype, w.ToVector<double>());
    const Values gradient = g.ToVector<double>();
    double sum = 0;
    double squares = 0;
    double products = 0;  // of neighbours
    for (std::size_t i = 0; i < kSize; ++i) {
      expected.w[i] += noise[i] - 0.125 * (Rescaled(gradient[i]) + 0.1 * expected.w[i]);
      sum += noise[i];
      squares += noise[i] * noise[i];
      if (i > 0) products += noise[i] * noise[i - 1];
    }
    expected.Store();
    ExpectAsPrecise(train(3, w, g, "a"), expected.w, precision);
    // Of deviation 0.5, so that within 5 of their own deviations:
    const double n = kSize;
    EXPECT_LT(std::abs(sum / n), 5 * 0.5 / std::sqrt(n));
    EXPECT_LT(std::abs(squares / n - 0.25), 5 * 0.25 * std::sqrt(2 / n));
    EXPECT_LT(std::abs(products / n), 5 * 0.25 / std::sqrt(n));
    EXPECT_NE(train(4, zeros, zeros, "a"), noise);
    EXPECT_NE(train(3, zeros, zeros, "b"), noise);
  }
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
        run.weight_stores = ops::StoreMode::kStreaming;  // where the weight is aligned for that
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
    const std::size_t aligned = Below(count / 64 + 1) * 64;
    std::vector<std::size_t> cuts = {0, count, aligned, Below(count + 1), 1, 2};
    std::ranges::sort(cuts);
    const std::size_t offset = Below(2) * Below(16);
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
