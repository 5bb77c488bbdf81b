// LANS (Zheng et al., 2020), LAMB with normalised gradients and Nesterov momentum, as MXNet 2.0
// defines it.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/lans.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <span>

#include "kvstore/optimizer/lans-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/sums-inl.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateLans(const LansNumbers& numbers, const internal::UpdateRun& run) {
  const internal::KeyUpdate& update = *run.update;
  if (update.pass == 0) {
    SumGradients(run, run.block_sums[0]);
    return;
  }
  if (update.pass == 1) {
    SumDirections<2>(run, [&](const ops::UpdateArrays& block, void* const* directions) HWY_ATTR {
      Apply(
          block, numbers.gradient,
          [&](auto gradient)
              HWY_ATTR { return LansMoments<decltype(gradient)>(gradient, update, numbers); },
          directions);
    });
    return;
  }
  const double weight_norm =
      BoundedNorm(update.sums[1][0], numbers.lower_bound, numbers.upper_bound);
  const double mean_ratio = TrustRatio(weight_norm, std::sqrt(update.sums[1][1]));
  const double gradient_ratio = TrustRatio(weight_norm, std::sqrt(update.sums[1][2]));
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return LansStep<decltype(gradient)>(gradient, update, numbers, mean_ratio, gradient_ratio);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateLans);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-6),
    {.name = "lower_bound", .value = 0},
    {.name = "upper_bound", .value = 0},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class LansRule final : public internal::UpdateRule {
 public:
  explicit LansRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"],
                 .lower_bound = values["lower_bound"],
                 .upper_bound = values["upper_bound"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& /*update*/) const override { return 3; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateLans)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const LansNumbers numbers_;
};

constexpr OptimizerType kLans = {"lans", kParameters, &MakeRule<LansRule>};

}  // namespace

const OptimizerType& LansType() { return kLans; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
