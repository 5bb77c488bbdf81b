// RMSProp, plain (Tieleman and Hinton, 2012) and centered (Graves, 2013).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/rmsprop.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <limits>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/rmsprop-inl.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateRmsProp(const RmsPropNumbers& numbers, const internal::UpdateRun& run) {
  if (numbers.centered) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return RmsPropFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return RmsPropFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateRmsProp);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("gamma1", 0.9),
    FractionBelowOne("gamma2", 0.9),
    Positive("epsilon", 1e-8),
    // It decides what is kept for each key.
    {.name = "centered", .value = 0, .max = 1, .fixed = true, .is_integer = true},
    {.name = "clip_weights", .value = 0},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class RmsPropRule final : public internal::UpdateRule {
 public:
  explicit RmsPropRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .gamma1 = values["gamma1"],
                 .gamma2 = values["gamma2"],
                 .epsilon = values["epsilon"],
                 .clip_weights = values["clip_weights"],
                 .centered = values["centered"] != 0} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.centered ? 3 : 1; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateRmsProp)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {
      {.name = "n"}, {.name = "mean"}, {.name = "delta"}};

  const RmsPropNumbers numbers_;
};

constexpr OptimizerType kRmsProp = {"rmsprop", kParameters, &MakeRule<RmsPropRule>};

}  // namespace

const OptimizerType& RmsPropType() { return kRmsProp; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
