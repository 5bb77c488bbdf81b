// AdaGrad (Duchi et al., 2011).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adagrad.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>
#include <string>

#include "kvstore/optimizer/adagrad-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateAdaGrad(const AdaGradNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdaGradFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdaGrad);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    Positive("epsilon", 1e-7),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class AdaGradRule final : public internal::UpdateRule {
 public:
  explicit AdaGradRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values), .epsilon = values["epsilon"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  bool lazy(bool /*row_sparse_weight*/) const override { return true; }
  std::string Refusal(const Subject& subject) const override {
    return subject.row_sparse ? RefusalOfDecay(subject, " for row-sparse gradients") : "";
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdaGrad)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "history"}};

  const AdaGradNumbers numbers_;
};

constexpr OptimizerType kAdaGrad = {"adagrad", kParameters, &MakeRule<AdaGradRule>};

}  // namespace

const OptimizerType& AdaGradType() { return kAdaGrad; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
