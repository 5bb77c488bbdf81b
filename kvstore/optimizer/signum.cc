// Signum, and signSGD without momentum (Bernstein et al., 2018).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/signum.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/signum-inl.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateSignum(const SignumNumbers& numbers, const internal::UpdateRun& run) {
  if (numbers.momentum != 0) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return SignumFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return SignumFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateSignum);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0.9),
    {.name = "wd_lh", .value = 0},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class SignumRule final : public internal::UpdateRule {
 public:
  explicit SignumRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .momentum = values["momentum"],
                 .wd_lh = values["wd_lh"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 1 : 0; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateSignum)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const SignumNumbers numbers_;
};

constexpr OptimizerType kSignum = {"signum", kParameters, &MakeRule<SignumRule>};

}  // namespace

const OptimizerType& SignumType() { return kSignum; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
