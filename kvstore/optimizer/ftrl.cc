// FTRL-Proximal (McMahan et al., 2013).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/ftrl.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/ftrl-inl.h"
#include "kvstore/optimizer/least_rate.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateFtrl(const FtrlNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return FtrlFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateFtrl);

namespace {

constexpr ParameterType kParameters[] = {
    Positive("learning_rate", 0.1),
    {.name = "lamda1", .value = 0.01},
    {.name = "beta", .value = 1},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class FtrlRule final : public internal::UpdateRule {
 public:
  explicit FtrlRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .lamda1 = values["lamda1"],
                 .beta = values["beta"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  // Without a gradient a weight becomes what z and n make of it, whatever it was before: all rows
  // of a dense weight do.
  bool lazy(bool row_sparse_weight) const override { return row_sparse_weight; }
  void Update(const internal::UpdateRun& run) const override {
    if (run.update->learning_rate < kLeastDividingRate) return;
    HWY_DYNAMIC_DISPATCH(UpdateFtrl)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "z"}, {.name = "n"}};

  const FtrlNumbers numbers_;
};

constexpr OptimizerType kFtrl = {"ftrl", kParameters, &MakeRule<FtrlRule>};

}  // namespace

const OptimizerType& FtrlType() { return kFtrl; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
