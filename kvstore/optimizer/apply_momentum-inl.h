// Steps of stochastic gradient descent, with or without momentum, for several optimizers.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_APPLY_MOMENTUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_APPLY_MOMENTUM_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_APPLY_MOMENTUM_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_APPLY_MOMENTUM_INL_H_
#endif

#include "kvstore/optimizer/sgd_formulas-inl.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

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
