// FTML, follow the moving leader (Zheng and Kwok, 2017).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/ftml.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <span>

#include "kvstore/optimizer/ftml-inl.h"
#include "kvstore/optimizer/least_rate.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateFtml(const FtmlNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return FtmlFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateFtml);

namespace {

constexpr ParameterType kParameters[] = {
    Positive("learning_rate", 0.01),
    FractionBelowOne("beta1", 0.6),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-8),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class FtmlRule final : public internal::UpdateRule {
 public:
  explicit FtmlRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  void Update(const internal::UpdateRun& run) const override {
    if (run.update->learning_rate < kLeastDividingRate) return;
    HWY_DYNAMIC_DISPATCH(UpdateFtml)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {
      {.name = "d"}, {.name = "v"}, {.name = "z"}};

  const FtmlNumbers numbers_;
};

constexpr OptimizerType kFtml = {"ftml", kParameters, &MakeRule<FtmlRule>};

}  // namespace

const OptimizerType& FtmlType() { return kFtml; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
