// The formulas of kvstore/optimizer/ftml.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_FTML_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_FTML_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_FTML_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_FTML_INL_H_
#endif

#include <cmath>

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_FTML_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_FTML_NUMBERS_
namespace heddle::kvstore {

struct FtmlNumbers {
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

// G = clip(s * g + wd * w);  v = b2 * v + (1 - b2) * G^2;
// D = (1 - b1^t) / lr * (sqrt(v / (1 - b2^t)) + eps);
// z = b1 * z + (1 - b1) * G - (D - b1 * d) * w;  d = D;  w = -z / D.
template <class Gradient>
struct FtmlFormula : Formula<Gradient, 3> {
  using C = typename Gradient::Number;

  FtmlFormula(Gradient gradient, const internal::KeyUpdate& update, const FtmlNumbers& numbers)
      : gradient(gradient),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2),
        epsilon(static_cast<C>(numbers.epsilon)),
        scale((C{1} - std::pow(beta1, static_cast<C>(update.step))) /
              static_cast<C>(update.learning_rate)),
        correction(C{1} - std::pow(beta2, static_cast<C>(update.step))) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[1] = beta2 * e.state[1] + rest2 * (g * g);
    const auto d = scale * (Sqrt(e.state[1] / correction) + epsilon);
    e.state[2] = beta1 * e.state[2] + rest1 * g - (d - beta1 * e.state[0]) * e.weight;
    e.state[0] = d;
    e.weight = -e.state[2] / d;
  }

  Gradient gradient;
  C decay, beta1, beta2, rest1, rest2, epsilon, scale, correction;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
