// The formulas of kvstore/optimizer/rmsprop.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_INL_H_
#endif

#include <limits>

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_NUMBERS_
namespace heddle::kvstore {

struct RmsPropNumbers {
  ops::GradientOptions gradient;
  double gamma1;
  double gamma2;
  double epsilon;
  double clip_weights;
  bool centered;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g + wd * w);  n = (1 - gamma1) * G^2 + gamma1 * n, and then
// plain:     w -= lr * (G / sqrt(n + eps))
// centered:  a = (1 - gamma1) * G + gamma1 * a;  d = gamma2 * d - lr * (G / sqrt(n - a^2 + eps));
//            w += d.
// At last w is limited to [-clip_weights, clip_weights] unless that is 0.
template <class Gradient, bool kCentered>
struct RmsPropFormula : Formula<Gradient, kCentered ? 3 : 1> {
  using C = typename Gradient::Number;

  RmsPropFormula(Gradient gradient, const internal::KeyUpdate& update,
                 const RmsPropNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        gamma1(static_cast<C>(numbers.gamma1)),
        gamma2(static_cast<C>(numbers.gamma2)),
        rest(C{1} - gamma1),
        epsilon(static_cast<C>(numbers.epsilon)),
        limit(numbers.clip_weights > 0 ? static_cast<C>(numbers.clip_weights)
                                       : std::numeric_limits<C>::infinity()) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[0] = rest * (g * g) + gamma1 * e.state[0];
    if constexpr (kCentered) {
      e.state[1] = rest * g + gamma1 * e.state[1];
      const auto variance = e.state[0] - e.state[1] * e.state[1];
      e.state[2] = gamma2 * e.state[2] - rate * (g / Sqrt(variance + epsilon));
      e.weight = Clip(e.weight + e.state[2], limit);
    } else {
      e.weight = Clip(e.weight - rate * (g / Sqrt(e.state[0] + epsilon)), limit);
    }
  }

  Gradient gradient;
  C rate, decay, gamma1, gamma2, rest, epsilon, limit;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
