// Adam (Kingma and Ba, 2015).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adam.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <heddle/optimizer.h>

#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADAM_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_ADAM_CC_
namespace heddle::kvstore {

struct AdamNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g + wd * w);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2;
// w -= lr * m / (sqrt(v) + eps), with the bias correction in lr.
template <class Gradient>
struct AdamFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdamFormula(Gradient gradient, const internal::KeyUpdate& update, const AdamNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2),
        epsilon(static_cast<C>(numbers.epsilon)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    const auto m = beta1 * e.state[0] + rest1 * g;
    const auto v = beta2 * e.state[1] + rest2 * g * g;
    e.state[0] = m;
    e.state[1] = v;
    e.weight = e.weight - rate * m / (Sqrt(v) + epsilon);
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest1, rest2, epsilon;
};

void UpdateAdam(const AdamNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdamFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdam);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = AdamOptions{}.learning_rate},
    FractionBelowOne("beta1", AdamOptions{}.beta1),
    FractionBelowOne("beta2", AdamOptions{}.beta2),
    Positive("epsilon", AdamOptions{}.epsilon),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kLazyUpdate,
    kMultiPrecision,
};

class AdamRule final : public internal::UpdateRule {
 public:
  explicit AdamRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"]},
        lazy_(values["lazy_update"] != 0) {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  bool lazy(bool /*row_sparse_weight*/) const override { return lazy_; }
  int Begin(internal::KeyUpdate& update) const override {
    CorrectBias(update, numbers_.beta1, numbers_.beta2);
    return 1;
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdam)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const AdamNumbers numbers_;
  const bool lazy_;
};

constexpr OptimizerType kAdam = {"adam", kParameters, &MakeRule<AdamRule>};

}  // namespace

const OptimizerType& AdamType() { return kAdam; }

}  // namespace heddle::kvstore

heddle::OptimizerPtr heddle::Adam(const AdamOptions& options) {
  return MakeOptimizer("adam", {{"learning_rate", options.learning_rate},
                                {"beta1", options.beta1},
                                {"beta2", options.beta2},
                                {"epsilon", options.epsilon},
                                {"weight_decay", options.weight_decay},
                                {"rescale_grad", options.rescale_grad},
                                {"clip_gradient", options.clip_gradient},
                                {"lazy_update", options.lazy_update ? 1 : 0},
                                {"multi_precision", options.multi_precision ? 1 : 0}});
}
#endif  // HWY_ONCE
