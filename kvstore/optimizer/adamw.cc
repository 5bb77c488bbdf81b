// AdamW (Loshchilov and Hutter, 2019), as MXNet 2.0 defines it.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adamw.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADAMW_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_ADAMW_CC_
namespace heddle::kvstore {

struct AdamWNumbers {
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

// G = clip(s * g);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2;
// w -= lr * (m / (sqrt(v) + eps) + wd * w), with the bias correction in lr.
template <class Gradient>
struct AdamWFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdamWFormula(Gradient gradient, const internal::KeyUpdate& update, const AdamWNumbers& numbers)
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
    const auto g = gradient.Scaled(e.gradient);
    e.state[0] = beta1 * e.state[0] + rest1 * g;
    e.state[1] = beta2 * e.state[1] + rest2 * g * g;
    e.weight = e.weight - rate * (e.state[0] / (Sqrt(e.state[1]) + epsilon) + decay * e.weight);
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest1, rest2, epsilon;
};

void UpdateAdamW(const AdamWNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdamWFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdamW);

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

class AdamWRule final : public internal::UpdateRule {
 public:
  explicit AdamWRule(const ParameterValues& values)
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
    HWY_DYNAMIC_DISPATCH(UpdateAdamW)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const AdamWNumbers numbers_;
};

constexpr OptimizerType kAdamW = {"adamw", kParameters, &MakeRule<AdamWRule>};

}  // namespace

const OptimizerType& AdamWType() { return kAdamW; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
