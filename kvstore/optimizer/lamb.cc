// LAMB (You et al., 2020): Adam with a learning rate for each array by the ratio of norms.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/lamb.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <span>

#include "kvstore/optimizer/lamb-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/sums-inl.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateLamb(const LambNumbers& numbers, const internal::UpdateRun& run) {
  const internal::KeyUpdate& update = *run.update;
  if (update.pass == 0) {
    SumDirections<1>(run, [&](const ops::UpdateArrays& block, void* const* direction) HWY_ATTR {
      Apply(
          block, numbers.gradient,
          [&](auto gradient)
              HWY_ATTR { return LambMoments<decltype(gradient)>(gradient, update, numbers); },
          direction);
    });
    return;
  }
  const double weight_norm =
      BoundedNorm(update.sums[0][0], numbers.lower_bound, numbers.upper_bound);
  const double ratio = TrustRatio(weight_norm, std::sqrt(update.sums[0][1]));
  Apply(run, {}, [&](auto gradient) HWY_ATTR {
    return LambStep<decltype(gradient)>(update, numbers, ratio);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateLamb);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-6),
    {.name = "lower_bound", .value = 0},
    {.name = "upper_bound", .value = 0},
    Switch("bias_correction", true),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class LambRule final : public internal::UpdateRule {
 public:
  explicit LambRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"],
                 .bias_correction = values["bias_correction"] != 0,
                 .lower_bound = values["lower_bound"],
                 .upper_bound = values["upper_bound"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& /*update*/) const override { return 2; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateLamb)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const LambNumbers numbers_;
};

constexpr OptimizerType kLamb = {"lamb", kParameters, &MakeRule<LambRule>};

}  // namespace

const OptimizerType& LambType() { return kLamb; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
