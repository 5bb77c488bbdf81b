// The formulas of kvstore/optimizer/adamax.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_INL_H_
#endif

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_NUMBERS_
namespace heddle::kvstore {

struct AdamaxNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g + wd * w);  m = b1 * m + (1 - b1) * G;  u = max(b2 * u, |G|);  w -= lr * m / u,
// with the bias correction in lr. While u is 0 (no gradient so far) w stays, where MXNet 1.9.1
// divides 0 by 0.
template <class Gradient>
struct AdamaxFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdamaxFormula(Gradient gradient, const internal::KeyUpdate& update, const AdamaxNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest(static_cast<C>(1 - numbers.beta1)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[0] = beta1 * e.state[0] + rest * g;
    e.state[1] = Max(beta2 * e.state[1], Abs(g));
    e.weight = e.weight - ZeroIfZero(e.state[1], rate * e.state[0] / e.state[1]);
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
