// The formulas of kvstore/optimizer/lamb.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_LAMB_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_LAMB_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_LAMB_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_LAMB_INL_H_
#endif

#include <cmath>

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_LAMB_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_LAMB_NUMBERS_
namespace heddle::kvstore {

struct LambNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
  bool bias_correction;
  double lower_bound;  // 0: none
  double upper_bound;  // 0: none
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// The direction u = M / (sqrt(V) + eps) + wd * w, with M = m / (1 - b1^t) and V = v / (1 - b2^t),
// or m and v without bias correction.
template <typename C>
struct LambDirection {
  LambDirection(const internal::KeyUpdate& update, const LambNumbers& numbers)
      : decay(static_cast<C>(update.weight_decay)), epsilon(static_cast<C>(numbers.epsilon)) {
    if (!numbers.bias_correction) return;
    const C step = static_cast<C>(update.step);
    correction1 = C{1} - std::pow(static_cast<C>(numbers.beta1), step);
    correction2 = C{1} - std::pow(static_cast<C>(numbers.beta2), step);
  }

  template <class V>
  HEDDLE_FORMULA V operator()(V mean, V variance, V weight) const {
    return (mean / correction1) / (Sqrt(variance / correction2) + epsilon) + decay * weight;
  }

  C decay, epsilon;
  C correction1 = 1;
  C correction2 = 1;
};

// First pass: G = clip(s * g);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2, and u for
// its norm.
template <class Gradient>
struct LambMoments : Formula<Gradient, 2> {
  using C = typename Gradient::Number;
  static constexpr int kOutputs = 1;
  static constexpr bool kWritesWeight = false;

  LambMoments(Gradient gradient, const internal::KeyUpdate& update, const LambNumbers& numbers)
      : gradient(gradient),
        direction(update, numbers),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    e.state[0] = beta1 * e.state[0] + rest1 * g;
    e.state[1] = beta2 * e.state[1] + rest2 * g * g;
    e.output[0] = direction(e.state[0], e.state[1], e.weight);
  }

  Gradient gradient;
  LambDirection<C> direction;
  C beta1, beta2, rest1, rest2;
};

// Second pass: w -= (lr * ratio) * u.
template <class Gradient>
struct LambStep : Formula<Gradient, 2> {
  using C = typename Gradient::Number;
  static constexpr bool kWritesStates = false;

  LambStep(const internal::KeyUpdate& update, const LambNumbers& numbers, double ratio)
      : direction(update, numbers), rate(static_cast<C>(update.learning_rate * ratio)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.weight = e.weight - rate * direction(e.state[0], e.state[1], e.weight);
  }

  LambDirection<C> direction;
  C rate;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
