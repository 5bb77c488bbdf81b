// The formulas of kvstore/optimizer/adadelta.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_INL_H_
#endif

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_NUMBERS_
namespace heddle::kvstore {

struct AdaDeltaNumbers {
  ops::GradientOptions gradient;
  double rho;
  double epsilon;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g);  a = rho * a + (1 - rho) * G^2;  D = sqrt(d + eps) / sqrt(a + eps) * G;
// d = rho * d + (1 - rho) * D^2;  w -= D + wd * w.
template <class Gradient>
struct AdaDeltaFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdaDeltaFormula(Gradient gradient, const internal::KeyUpdate& update,
                  const AdaDeltaNumbers& numbers)
      : gradient(gradient),
        decay(static_cast<C>(update.weight_decay)),
        rho(static_cast<C>(numbers.rho)),
        rest(static_cast<C>(1 - numbers.rho)),
        epsilon(static_cast<C>(numbers.epsilon)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    e.state[0] = rho * e.state[0] + rest * g * g;
    const auto delta = Sqrt(e.state[1] + epsilon) / Sqrt(e.state[0] + epsilon) * g;
    e.state[1] = rho * e.state[1] + rest * delta * delta;
    e.weight = e.weight - (delta + decay * e.weight);
  }

  Gradient gradient;
  C decay, rho, rest, epsilon;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
