// Formulas of stochastic gradient descent that several optimizers end with.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_
#endif

#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_SGD_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_SGD_NUMBERS_
namespace heddle::kvstore {

struct SgdNumbers {
  ops::GradientOptions gradient;
  double momentum;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

// The new weight without momentum:
// (1 - lr * wd) * w - (lr * s) * g, or with clipping ... - lr * clip(s * g).
template <class Gradient, class V, typename C = typename Gradient::Number>
HEDDLE_FORMULA V PlainSgd(const Gradient& gradient, C rate, C decay, V weight, V pushed) {
  const V shrunk = (C{1} - rate * decay) * weight;
  if (gradient.clips()) return shrunk - rate * gradient.Scaled(pushed);
  return shrunk - (rate * gradient.rescale) * pushed;
}

// m = momentum * m - (lr * wd) * w - (lr * s) * g, or with clipping ... - lr * clip(s * g);
// w += m. Without momentum, momentum * m is 0.
template <class Gradient, bool kMomentum>
struct MomentumFormula : ops::HEDDLE_FORMULAS::Formula<Gradient, kMomentum ? 1 : 0> {
  using C = typename Gradient::Number;

  MomentumFormula(Gradient gradient, double learning_rate, double weight_decay, double momentum)
      : gradient(gradient),
        rate(static_cast<C>(learning_rate)),
        decay(rate * static_cast<C>(weight_decay)),
        momentum(static_cast<C>(momentum)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    auto m = -(decay * e.weight);
    if constexpr (kMomentum) m = momentum * e.state[0] + m;
    if (gradient.clips()) {
      m = m - rate * gradient.Scaled(e.gradient);
    } else {
      m = m - (rate * gradient.rescale) * e.gradient;
    }
    if constexpr (kMomentum) e.state[0] = m;
    e.weight = e.weight + m;
  }

  Gradient gradient;
  C rate, decay, momentum;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
