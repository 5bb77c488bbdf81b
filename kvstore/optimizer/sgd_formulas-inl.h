// Formulas of stochastic gradient descent that several optimizers end with.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_SGD_FORMULAS_INL_H_
#endif

#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

// The new weight without momentum:
// (1 - lr * wd) * w - (lr * s) * g, or with clipping ... - lr * clip(s * g).
template <class Gradient, class V, typename C = typename Gradient::Number>
HWY_INLINE V PlainSgd(const Gradient& gradient, C rate, C decay, V weight, V pushed) {
  const V shrunk = (C{1} - rate * decay) * weight;
  if constexpr (Gradient::kClips) {
    return shrunk - rate * gradient.Scaled(pushed);
  } else {
    return shrunk - (rate * gradient.rescale) * pushed;
  }
}

// m = momentum * m - (lr * wd) * w - (lr * s) * g, or with clipping ... - lr * clip(s * g);
// w += m. Without momentum, momentum * m is 0.
template <class Gradient, bool kMomentum>
struct MomentumFormula : ops::HWY_NAMESPACE::Formula<Gradient, kMomentum ? 1 : 0> {
  using C = typename Gradient::Number;

  MomentumFormula(Gradient gradient, double learning_rate, double weight_decay, double momentum)
      : gradient(gradient),
        rate(static_cast<C>(learning_rate)),
        decay(rate * static_cast<C>(weight_decay)),
        momentum(static_cast<C>(momentum)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    auto m = -(decay * e.weight);
    if constexpr (kMomentum) m = momentum * e.state[0] + m;
    if constexpr (Gradient::kClips) {
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

// Applies MomentumFormula. A momentum that was kept once is kept on, also while the parameter is 0.
HWY_INLINE void ApplyMomentum(const ops::UpdateArrays& run, const ops::GradientOptions& options,
                              double learning_rate, double weight_decay, double momentum) {
  using ops::HWY_NAMESPACE::Apply;
  if (run.states[0] != nullptr) {
    Apply(run, options, [&](auto gradient) HWY_ATTR {
      return MomentumFormula<decltype(gradient), true>(gradient, learning_rate, weight_decay,
                                                       momentum);
    });
  } else {
    Apply(run, options, [&](auto gradient) HWY_ATTR {
      return MomentumFormula<decltype(gradient), false>(gradient, learning_rate, weight_decay,
                                                        momentum);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
