// Adamax (Kingma and Ba, 2015), Adam with the infinity norm.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/adamax.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_ADAMAX_CC_
namespace heddle::kvstore {

struct AdamaxNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g + wd * w);  m = b1 * m + (1 - b1) * G;  u = max(b2 * u, |G|);  w -= lr * m / u,
// with the bias correction in lr. While u is 0 (no gradient so far) w stays, where MXNet 1.9.1
// divides 0 by 0.
template <class Gradient>
struct AdamaxFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  AdamaxFormula(Gradient gradient, const internal::KeyUpdate& update, const AdamaxNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest(static_cast<C>(1 - numbers.beta1)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[0] = beta1 * e.state[0] + rest * g;
    e.state[1] = Max(beta2 * e.state[1], Abs(g));
    e.weight = e.weight - ZeroIfZero(e.state[1], rate * e.state[0] / e.state[1]);
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest;
};

void UpdateAdamax(const AdamaxNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return AdamaxFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateAdamax);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.002},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class AdamaxRule final : public internal::UpdateRule {
 public:
  explicit AdamaxRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& update) const override {
    update.learning_rate /= 1 - std::pow(numbers_.beta1, static_cast<double>(update.step));
    return 1;
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateAdamax)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "norm"}};

  const AdamaxNumbers numbers_;
};

constexpr OptimizerType kAdamax = {"adamax", kParameters, &MakeRule<AdamaxRule>};

}  // namespace

const OptimizerType& AdamaxType() { return kAdamax; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
