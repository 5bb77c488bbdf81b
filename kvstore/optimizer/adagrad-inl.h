// The formulas of kvstore/optimizer/adagrad.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_ADAGRAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_ADAGRAD_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_ADAGRAD_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_ADAGRAD_INL_H_
#endif

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADAGRAD_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_ADAGRAD_NUMBERS_
namespace heddle::kvstore {

struct AdaGradNumbers {
  ops::GradientOptions gradient;
  double epsilon;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g);  h += G^2;  w -= lr * (G / sqrt(h + eps) + wd * w).
template <class Gradient>
struct AdaGradFormula : Formula<Gradient, 1> {
  using C = typename Gradient::Number;

  AdaGradFormula(Gradient gradient, const internal::KeyUpdate& update,
                 const AdaGradNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        epsilon(static_cast<C>(numbers.epsilon)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    e.state[0] = e.state[0] + g * g;
    e.weight = e.weight - rate * (g / Sqrt(e.state[0] + epsilon) + decay * e.weight);
  }

  Gradient gradient;
  C rate, decay, epsilon;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
