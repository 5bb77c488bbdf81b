// FTML, follow the moving leader (Zheng and Kwok, 2017).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/ftml.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_FTML_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_FTML_CC_
namespace heddle::kvstore {

struct FtmlNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g + wd * w);  v = b2 * v + (1 - b2) * G^2;
// D = (1 - b1^t) / lr * (sqrt(v / (1 - b2^t)) + eps);
// z = b1 * z + (1 - b1) * G - (D - b1 * d) * w;  d = D;  w = -z / D.
template <class Gradient>
struct FtmlFormula : Formula<Gradient, 3> {
  using C = typename Gradient::Number;

  FtmlFormula(Gradient gradient, const internal::KeyUpdate& update, const FtmlNumbers& numbers)
      : gradient(gradient),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2),
        epsilon(static_cast<C>(numbers.epsilon)),
        scale((C{1} - std::pow(beta1, static_cast<C>(update.step))) /
              static_cast<C>(update.learning_rate)),
        correction(C{1} - std::pow(beta2, static_cast<C>(update.step))) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[1] = beta2 * e.state[1] + rest2 * (g * g);
    const auto d = scale * (Sqrt(e.state[1] / correction) + epsilon);
    e.state[2] = beta1 * e.state[2] + rest1 * g - (d - beta1 * e.state[0]) * e.weight;
    e.state[0] = d;
    e.weight = -e.state[2] / d;
  }

  Gradient gradient;
  C decay, beta1, beta2, rest1, rest2, epsilon, scale, correction;
};

void UpdateFtml(const FtmlNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return FtmlFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateFtml);

namespace {

constexpr ParameterType kParameters[] = {
    Positive("learning_rate", 0.01),
    FractionBelowOne("beta1", 0.6),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-8),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class FtmlRule final : public internal::UpdateRule {
 public:
  explicit FtmlRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  void Update(const internal::UpdateRun& run) const override {
    // A schedule may end with 0, by which the formula divides: nothing changes then.
    if (run.update->learning_rate == 0) return;
    HWY_DYNAMIC_DISPATCH(UpdateFtml)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {
      {.name = "d"}, {.name = "v"}, {.name = "z"}};

  const FtmlNumbers numbers_;
};

constexpr OptimizerType kFtml = {"ftml", kParameters, &MakeRule<FtmlRule>};

}  // namespace

const OptimizerType& FtmlType() { return kFtml; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
