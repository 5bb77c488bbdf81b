// The formulas of kvstore/optimizer/dcasgd.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_DCASGD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_DCASGD_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_DCASGD_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_DCASGD_INL_H_
#endif

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_DCASGD_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_DCASGD_NUMBERS_
namespace heddle::kvstore {

struct DcaSgdNumbers {
  ops::GradientOptions gradient;
  double momentum;
  double lamda;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g);  m = momentum * m - lr * (G + wd * w + lamda * G^2 * (w - previous));
// previous = w;  w += m. Without momentum, momentum * m is 0.
template <class Gradient, bool kMomentum>
struct DcaSgdFormula : Formula<Gradient, kMomentum ? 2 : 1> {
  using C = typename Gradient::Number;

  DcaSgdFormula(Gradient gradient, const internal::KeyUpdate& update, const DcaSgdNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(numbers.momentum)),
        lamda(static_cast<C>(numbers.lamda)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    const auto delay = lamda * g * g * (e.weight - e.state[0]);
    auto m = -rate * (g + decay * e.weight + delay);
    if constexpr (kMomentum) {
      m = momentum * e.state[1] + m;
      e.state[1] = m;
    }
    e.state[0] = e.weight;
    e.weight = e.weight + m;
  }

  Gradient gradient;
  C rate, decay, momentum, lamda;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
