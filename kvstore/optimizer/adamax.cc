// Adamax (Kingma and Ba, 2015), Adam with the infinity norm.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adamax.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <span>

#include "kvstore/optimizer/adamax-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateAdamax(const AdamaxNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdamaxFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdamax);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.002},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class AdamaxRule final : public internal::UpdateRule {
 public:
  explicit AdamaxRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& update) const override {
    update.learning_rate /= 1 - std::pow(numbers_.beta1, static_cast<double>(update.step));
    return 1;
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdamax)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "norm"}};

  const AdamaxNumbers numbers_;
};

constexpr OptimizerType kAdamax = {"adamax", kParameters, &MakeRule<AdamaxRule>};

}  // namespace

const OptimizerType& AdamaxType() { return kAdamax; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
