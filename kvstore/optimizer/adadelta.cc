// AdaDelta (Zeiler, 2012). It has no use for the learning rate.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adadelta.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/adadelta-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateAdaDelta(const AdaDeltaNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdaDeltaFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdaDelta);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("rho", 0.9),
    Positive("epsilon", 1e-5),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class AdaDeltaRule final : public internal::UpdateRule {
 public:
  explicit AdaDeltaRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .rho = values["rho"],
                 .epsilon = values["epsilon"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdaDelta)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "gradients"},
                                                          {.name = "deltas"}};

  const AdaDeltaNumbers numbers_;
};

constexpr OptimizerType kAdaDelta = {"adadelta", kParameters, &MakeRule<AdaDeltaRule>};

}  // namespace

const OptimizerType& AdaDeltaType() { return kAdaDelta; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
