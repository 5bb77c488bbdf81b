// The formulas of kvstore/optimizer/signum.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_INL_H_
#endif

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_NUMBERS_
namespace heddle::kvstore {

struct SignumNumbers {
  ops::GradientOptions gradient;
  double momentum;
  double wd_lh;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// m = momentum * m - (1 - momentum) * wd * w - (1 - momentum) * clip(s * g);
// w = (1 - lr * wd_lh) * w + lr * sign(m).
// Without momentum: w = (1 - lr * wd) * w - lr * sign(g).
template <class Gradient, bool kMomentum>
struct SignumFormula : Formula<Gradient, kMomentum ? 1 : 0> {
  using C = typename Gradient::Number;

  SignumFormula(Gradient gradient, const internal::KeyUpdate& update, const SignumNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(numbers.momentum)),
        rest(C{1} - momentum),
        shrink(C{1} - rate * (kMomentum ? static_cast<C>(numbers.wd_lh) : decay)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    if constexpr (kMomentum) {
      const auto decayed = momentum * e.state[0] - (rest * decay) * e.weight;
      if (gradient.clips()) {
        e.state[0] = decayed - rest * gradient.Scaled(e.gradient);
      } else {
        e.state[0] = decayed - (rest * gradient.rescale) * e.gradient;
      }
      e.weight = shrink * e.weight + rate * Sign(e.state[0]);
    } else {
      e.weight = shrink * e.weight - rate * Sign(e.gradient);
    }
  }

  Gradient gradient;
  C rate, decay, momentum, rest, shrink;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
