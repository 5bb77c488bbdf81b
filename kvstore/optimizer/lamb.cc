// LAMB (You et al., 2020): Adam with a learning rate for each array by the ratio of norms.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/lamb.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/sums-inl.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_LAMB_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_LAMB_CC_
namespace heddle::kvstore {

struct LambNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
  bool bias_correction;
  double lower_bound;  // 0: none
  double upper_bound;  // 0: none
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// The direction u = M / (sqrt(V) + eps) + wd * w, with M = m / (1 - b1^t) and V = v / (1 - b2^t),
// or m and v without bias correction.
template <typename C>
struct LambDirection {
  LambDirection(const internal::KeyUpdate& update, const LambNumbers& numbers)
      : decay(static_cast<C>(update.weight_decay)), epsilon(static_cast<C>(numbers.epsilon)) {
    if (!numbers.bias_correction) return;
    const C step = static_cast<C>(update.step);
    correction1 = C{1} - std::pow(static_cast<C>(numbers.beta1), step);
    correction2 = C{1} - std::pow(static_cast<C>(numbers.beta2), step);
  }

  template <class V>
  HWY_INLINE V operator()(V mean, V variance, V weight) const {
    return (mean / correction1) / (Sqrt(variance / correction2) + epsilon) + decay * weight;
  }

  C decay, epsilon;
  C correction1 = 1;
  C correction2 = 1;
};

// First pass: G = clip(s * g);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2, and u for
// its norm.
template <class Gradient>
struct LambMoments : Formula<Gradient, 2> {
  using C = typename Gradient::Number;
  static constexpr int kOutputs = 1;
  static constexpr bool kWritesWeight = false;

  LambMoments(Gradient gradient, const internal::KeyUpdate& update, const LambNumbers& numbers)
      : gradient(gradient),
        direction(update, numbers),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    e.state[0] = beta1 * e.state[0] + rest1 * g;
    e.state[1] = beta2 * e.state[1] + rest2 * g * g;
    e.output[0] = direction(e.state[0], e.state[1], e.weight);
  }

  Gradient gradient;
  LambDirection<C> direction;
  C beta1, beta2, rest1, rest2;
};

// Second pass: w -= (lr * ratio) * u.
template <class Gradient>
struct LambStep : Formula<Gradient, 2> {
  using C = typename Gradient::Number;
  static constexpr bool kWritesStates = false;

  LambStep(const internal::KeyUpdate& update, const LambNumbers& numbers, double ratio)
      : direction(update, numbers), rate(static_cast<C>(update.learning_rate * ratio)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    e.weight = e.weight - rate * direction(e.state[0], e.state[1], e.weight);
  }

  LambDirection<C> direction;
  C rate;
};

void UpdateLamb(const LambNumbers& numbers, const internal::UpdateRun& run) {
  const internal::KeyUpdate& update = *run.update;
  if (update.pass == 0) {
    SumDirections<1>(run, [&](const ops::UpdateArrays& block, void* const* direction) HWY_ATTR {
      Apply(
          block, numbers.gradient,
          [&](auto gradient)
              HWY_ATTR { return LambMoments<decltype(gradient)>(gradient, update, numbers); },
          direction);
    });
    return;
  }
  const double weight_norm =
      BoundedNorm(update.sums[0][0], numbers.lower_bound, numbers.upper_bound);
  const double ratio = TrustRatio(weight_norm, std::sqrt(update.sums[0][1]));
  Apply(run, {}, [&](auto gradient) HWY_ATTR {
    return LambStep<decltype(gradient)>(update, numbers, ratio);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateLamb);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-6),
    {.name = "lower_bound", .value = 0},
    {.name = "upper_bound", .value = 0},
    Switch("bias_correction", true),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class LambRule final : public internal::UpdateRule {
 public:
  explicit LambRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"],
                 .bias_correction = values["bias_correction"] != 0,
                 .lower_bound = values["lower_bound"],
                 .upper_bound = values["upper_bound"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& /*update*/) const override { return 2; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateLamb)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const LambNumbers numbers_;
};

constexpr OptimizerType kLamb = {"lamb", kParameters, &MakeRule<LambRule>};

}  // namespace

const OptimizerType& LambType() { return kLamb; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
