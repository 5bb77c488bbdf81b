// AdamW (Loshchilov and Hutter, 2019), as MXNet 2.0 defines it.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adamw.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/adamw-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateAdamW(const AdamWNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdamWFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdamW);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-6),
    Switch("correct_bias", true),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class AdamWRule final : public internal::UpdateRule {
 public:
  explicit AdamWRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"],
                 .correct_bias = values["correct_bias"] != 0} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& update) const override {
    if (numbers_.correct_bias) CorrectBias(update, numbers_.beta1, numbers_.beta2);
    return 1;
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdamW)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const AdamWNumbers numbers_;
};

constexpr OptimizerType kAdamW = {"adamw", kParameters, &MakeRule<AdamWRule>};

}  // namespace

const OptimizerType& AdamWType() { return kAdamW; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
