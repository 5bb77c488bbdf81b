// The formulas of kvstore/optimizer/ftrl.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_FTRL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_FTRL_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_FTRL_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_FTRL_INL_H_
#endif

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_FTRL_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_FTRL_NUMBERS_
namespace heddle::kvstore {

struct FtrlNumbers {
  ops::GradientOptions gradient;
  double lamda1;
  double beta;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g);  z += G - (sqrt(n + G^2) - sqrt(n)) * w / lr;  n += G^2;
// w = (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + wd) where |z| > l1, else 0.
template <class Gradient>
struct FtrlFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  FtrlFormula(Gradient gradient, const internal::KeyUpdate& update, const FtrlNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        lamda1(static_cast<C>(numbers.lamda1)),
        beta(static_cast<C>(numbers.beta)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    const auto n = e.state[1] + g * g;
    const auto z = e.state[0] + (g - (Sqrt(n) - Sqrt(e.state[1])) * e.weight / rate);
    e.state[0] = z;
    e.state[1] = n;
    e.weight =
        ZeroIfAtMost(Abs(z), lamda1, (Sign(z) * lamda1 - z) / ((beta + Sqrt(n)) / rate + decay));
  }

  Gradient gradient;
  C rate, decay, lamda1, beta;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
