// The formulas of kvstore/optimizer/lbsgd.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_LBSGD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_LBSGD_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_LBSGD_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_LBSGD_INL_H_
#endif

#include <cmath>

#include "kvstore/optimizer/sgd_formulas-inl.h"
#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_LBSGD_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_LBSGD_NUMBERS_
namespace heddle::kvstore {

struct LbSgdNumbers {
  enum Strategy { kLinear, kPower2, kSqrt, kLars };

  ops::GradientOptions gradient;
  double momentum;
  Strategy strategy;
  double warmup_updates;
  double batch_scale;
  double first_update;

  double Count(const internal::KeyUpdate& update) const {
    return first_update + static_cast<double>(update.step);
  }
  bool Steps(const internal::KeyUpdate& update) const {
    return std::fmod(Count(update), batch_scale) == 0;
  }

  double WarmupFactor(double count) const {
    if (count >= warmup_updates) return batch_scale;
    if (warmup_updates <= 1) return 1;
    const double part = count / warmup_updates;
    switch (strategy) {
      case kPower2:
        return 1 + (batch_scale - 1) * (part * part);
      case kSqrt:
        return 1 + (batch_scale - 1) * std::sqrt(part);
      default:
        return 1 + (batch_scale - 1) * part;
    }
  }

  // With the strategy kLars, for the sums of squares of the weights and of the batch.
  static HEDDLE_FORMULA_OF_NUMBERS double LarsFactor(const double* sums, double weight_decay) {
    const double factor = std::sqrt(sums[0] / (sums[1] + weight_decay * sums[0] + 1e-18));
    return factor < 0.01 ? 0.01 : factor > 100 ? 100 : factor;
  }
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// c += g.
template <class Gradient>
struct LbSgdAccumulate : Formula<Gradient, 1> {
  static constexpr bool kWritesWeight = false;

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.state[0] = e.state[0] + e.gradient;
  }
};

// The gradient of a batch, G = (c + g) / batch_scale, for its norm.
template <class Gradient>
struct LbSgdBatch : Formula<Gradient, 1> {
  using C = typename Gradient::Number;
  static constexpr int kOutputs = 1;
  static constexpr bool kWritesWeight = false;
  static constexpr bool kWritesStates = false;

  explicit LbSgdBatch(double batch_scale) : batch_scale(static_cast<C>(batch_scale)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.output[0] = (e.state[0] + e.gradient) / batch_scale;
  }

  C batch_scale;
};

// SGD with G;  c = 0.
template <class Gradient, bool kMomentum>
struct LbSgdStep : Formula<Gradient, kMomentum ? 2 : 1> {
  using C = typename Gradient::Number;

  LbSgdStep(Gradient gradient, const internal::KeyUpdate& update, double learning_rate,
            double momentum, double batch_scale)
      : gradient(gradient),
        rate(static_cast<C>(learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(momentum)),
        batch_scale(static_cast<C>(batch_scale)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    using V = decltype(e.weight);
    const V g = (e.state[0] + e.gradient) / batch_scale;
    e.state[0] = V::Of(0);
    if constexpr (kMomentum) {
      const V decayed = momentum * e.state[1] - (rate * decay) * e.weight;
      if (gradient.clips()) {
        e.state[1] = decayed - rate * gradient.Scaled(g);
      } else {
        e.state[1] = decayed - (rate * gradient.rescale) * g;
      }
      e.weight = e.weight + e.state[1];
    } else {
      e.weight = PlainSgd(gradient, rate, decay, e.weight, g);
    }
  }

  Gradient gradient;
  C rate, decay, momentum, batch_scale;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
