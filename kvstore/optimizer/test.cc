// The optimizer that tests of stores use: w += s * g.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/test.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/test-inl.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void UpdateTest(const TestNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient,
        [&](auto gradient) HWY_ATTR { return TestFormula<decltype(gradient)>(gradient); });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateTest);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    kRescaleGrad,
    kMultiPrecision,
};

class TestRule final : public internal::UpdateRule {
 public:
  explicit TestRule(const ParameterValues& values)
      : numbers_{.gradient = {.rescale = values["rescale_grad"]}} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateTest)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "copy"}};

  const TestNumbers numbers_;
};

constexpr OptimizerType kTest = {"test", kParameters, &MakeRule<TestRule>};

}  // namespace

const OptimizerType& TestType() { return kTest; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
