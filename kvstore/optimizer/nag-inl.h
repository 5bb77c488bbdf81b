// The formulas of kvstore/optimizer/nag.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_NAG_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_NAG_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_NAG_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_NAG_INL_H_
#endif

#include "kvstore/optimizer/sgd_formulas-inl.h"
#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_NAG_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_NAG_NUMBERS_
namespace heddle::kvstore {

struct NagNumbers {
  ops::GradientOptions gradient;
  double momentum;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// m = momentum * m;  W = w - m + (momentum + 1) * (m - lr * G(w));  m = m - lr * G(W);  w = W,
// with G(w) = clip(s * g) + wd * w. That the momentum sees the new weight is how MXNet 1.9.1 does
// it. Without momentum: w = (1 - lr * wd) * w - (lr * s) * g, or with clipping ... - lr * clip(s *
// g).
template <class Gradient, bool kMomentum>
struct NagFormula : Formula<Gradient, kMomentum ? 1 : 0> {
  using C = typename Gradient::Number;

  NagFormula(Gradient gradient, const internal::KeyUpdate& update, const NagNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(numbers.momentum)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    if constexpr (kMomentum) {
      const auto g = gradient.Scaled(e.gradient);
      const auto m = momentum * e.state[0];
      e.weight = e.weight - m + (momentum + C{1}) * (m - rate * (g + decay * e.weight));
      e.state[0] = m - rate * (g + decay * e.weight);
    } else {
      e.weight = PlainSgd(gradient, rate, decay, e.weight, e.gradient);
    }
  }

  Gradient gradient;
  C rate, decay, momentum;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
