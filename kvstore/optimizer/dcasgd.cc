// DC-ASGD, delay-compensated asynchronous SGD (Zheng et al., 2017).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/dcasgd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/dcasgd-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateDcaSgd(const DcaSgdNumbers& numbers, const internal::UpdateRun& run) {
  if (run.states[1] != nullptr) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return DcaSgdFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return DcaSgdFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateDcaSgd);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0),
    {.name = "lamda", .value = 0.04},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class DcaSgdRule final : public internal::UpdateRule {
 public:
  explicit DcaSgdRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .momentum = values["momentum"],
                 .lamda = values["lamda"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 2 : 1; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateDcaSgd)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {
      {.name = "previous", .start = internal::UpdateStateType::Start::kWeight},
      {.name = "momentum"}};

  const DcaSgdNumbers numbers_;
};

constexpr OptimizerType kDcaSgd = {"dcasgd", kParameters, &MakeRule<DcaSgdRule>};

}  // namespace

const OptimizerType& DcaSgdType() { return kDcaSgd; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
