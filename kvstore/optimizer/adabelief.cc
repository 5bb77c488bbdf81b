// AdaBelief (Zhuang et al., 2020), as MXNet 2.0 defines it.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adabelief.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADABELIEF_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_ADABELIEF_CC_
namespace heddle::kvstore {

struct AdaBeliefNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
  bool correct_bias;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g + wd * w);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * (G - m)^2 + eps;
// w -= lr * (m / (sqrt(v) + eps)), with the bias correction in lr.
template <class Gradient>
struct AdaBeliefFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdaBeliefFormula(Gradient gradient, const internal::KeyUpdate& update,
                   const AdaBeliefNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2),
        epsilon(static_cast<C>(numbers.epsilon)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    const auto m = beta1 * e.state[0] + rest1 * g;
    const auto v = beta2 * e.state[1] + rest2 * ((g - m) * (g - m)) + epsilon;
    e.state[0] = m;
    e.state[1] = v;
    e.weight = e.weight - rate * (m / (Sqrt(v) + epsilon));
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest1, rest2, epsilon;
};

void UpdateAdaBelief(const AdaBeliefNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdaBeliefFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdaBelief);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-6),
    Switch("correct_bias", true),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class AdaBeliefRule final : public internal::UpdateRule {
 public:
  explicit AdaBeliefRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"],
                 .correct_bias = values["correct_bias"] != 0} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& update) const override {
    if (numbers_.correct_bias) CorrectBias(update, numbers_.beta1, numbers_.beta2);
    return 1;
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdaBelief)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const AdaBeliefNumbers numbers_;
};

constexpr OptimizerType kAdaBelief = {"adabelief", kParameters, &MakeRule<AdaBeliefRule>};

}  // namespace

const OptimizerType& AdaBeliefType() { return kAdaBelief; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
