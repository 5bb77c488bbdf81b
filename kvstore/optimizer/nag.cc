// Nesterov's accelerated gradient.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/nag.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/nag-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateNag(const NagNumbers& numbers, const internal::UpdateRun& run) {
  if (run.states[0] != nullptr) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return NagFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return NagFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateNag);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class NagRule final : public internal::UpdateRule {
 public:
  explicit NagRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values), .momentum = values["momentum"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 1 : 0; }
  // As with MXNet, where it is SGD then.
  bool lazy(bool /*row_sparse_weight*/) const override { return numbers_.momentum == 0; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateNag)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const NagNumbers numbers_;
};

constexpr OptimizerType kNag = {"nag", kParameters, &MakeRule<NagRule>};

}  // namespace

const OptimizerType& NagType() { return kNag; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
