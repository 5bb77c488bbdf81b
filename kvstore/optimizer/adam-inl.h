// The formulas of kvstore/optimizer/adam.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_ADAM_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_ADAM_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_ADAM_INL_H_
#endif

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADAM_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_ADAM_NUMBERS_
namespace heddle::kvstore {

struct AdamNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g + wd * w);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2;
// w -= lr * m / (sqrt(v) + eps), with the bias correction in lr.
template <class Gradient>
struct AdamFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdamFormula(Gradient gradient, const internal::KeyUpdate& update, const AdamNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2),
        epsilon(static_cast<C>(numbers.epsilon)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    const auto m = beta1 * e.state[0] + rest1 * g;
    const auto v = beta2 * e.state[1] + rest2 * g * g;
    e.state[0] = m;
    e.state[1] = v;
    e.weight = e.weight - rate * m / (Sqrt(v) + epsilon);
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest1, rest2, epsilon;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
