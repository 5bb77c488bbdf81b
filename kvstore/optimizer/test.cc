// The optimizer that tests of stores use: w += s * g.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/test.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// w += s * g; the state becomes a copy of w.
template <class Gradient>
struct TestFormula : Formula<Gradient, 1> {
  using C = typename Gradient::Number;

  explicit TestFormula(Gradient gradient) : gradient(gradient) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    e.weight = e.weight + gradient.rescale * e.gradient;
    e.state[0] = e.weight;
  }

  Gradient gradient;
};

void UpdateTest(const ops::GradientOptions& options, const internal::UpdateRun& run) {
  Apply(run, options,
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
  explicit TestRule(const ParameterValues& values) : options_{.rescale = values["rescale_grad"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateTest)(options_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "copy"}};

  const ops::GradientOptions options_;
};

constexpr OptimizerType kTest = {"test", kParameters, &MakeRule<TestRule>};

}  // namespace

const OptimizerType& TestType() { return kTest; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
