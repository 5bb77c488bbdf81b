// Adam (Kingma and Ba, 2015).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adam.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <heddle/optimizer.h>

#include <span>

#include "kvstore/optimizer/adam-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

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
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

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
