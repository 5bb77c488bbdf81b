// Nadam, Adam with Nesterov momentum (Dozat, 2015).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/nadam.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <cstdint>
#include <span>

#include "kvstore/optimizer/nadam-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateNadam(const NadamNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return NadamFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateNadam);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-8),
    {.name = "schedule_decay", .value = 0.004},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class NadamRule final : public internal::UpdateRule {
 public:
  explicit NadamRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"],
                 .schedule_decay = values["schedule_decay"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& update) const override {
    double& product = update.numbers[0];
    if (update.step == 1) product = 1;
    product *= NadamMomentum(numbers_, update.step);
    return 1;
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateNadam)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const NadamNumbers numbers_;
};

constexpr OptimizerType kNadam = {"nadam", kParameters, &MakeRule<NadamRule>};

}  // namespace

const OptimizerType& NadamType() { return kNadam; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
