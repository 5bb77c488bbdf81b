// AdaDelta (Zeiler, 2012). It has no use for the learning rate.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adadelta.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_ADADELTA_CC_
namespace heddle::kvstore {

struct AdaDeltaNumbers {
  ops::GradientOptions gradient;
  double rho;
  double epsilon;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g);  a = rho * a + (1 - rho) * G^2;  D = sqrt(d + eps) / sqrt(a + eps) * G;
// d = rho * d + (1 - rho) * D^2;  w -= D + wd * w.
template <class Gradient>
struct AdaDeltaFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdaDeltaFormula(Gradient gradient, const internal::KeyUpdate& update,
                  const AdaDeltaNumbers& numbers)
      : gradient(gradient),
        decay(static_cast<C>(update.weight_decay)),
        rho(static_cast<C>(numbers.rho)),
        rest(static_cast<C>(1 - numbers.rho)),
        epsilon(static_cast<C>(numbers.epsilon)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    e.state[0] = rho * e.state[0] + rest * g * g;
    const auto delta = Sqrt(e.state[1] + epsilon) / Sqrt(e.state[0] + epsilon) * g;
    e.state[1] = rho * e.state[1] + rest * delta * delta;
    e.weight = e.weight - (delta + decay * e.weight);
  }

  Gradient gradient;
  C decay, rho, rest, epsilon;
};

void UpdateAdaDelta(const AdaDeltaNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdaDeltaFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdaDelta);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("rho", 0.9),
    Positive("epsilon", 1e-5),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class AdaDeltaRule final : public internal::UpdateRule {
 public:
  explicit AdaDeltaRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .rho = values["rho"],
                 .epsilon = values["epsilon"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdaDelta)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "gradients"},
                                                          {.name = "deltas"}};

  const AdaDeltaNumbers numbers_;
};

constexpr OptimizerType kAdaDelta = {"adadelta", kParameters, &MakeRule<AdaDeltaRule>};

}  // namespace

const OptimizerType& AdaDeltaType() { return kAdaDelta; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
