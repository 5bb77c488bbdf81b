// RMSProp, plain (Tieleman and Hinton, 2012) and centered (Graves, 2013).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/rmsprop.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <limits>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_RMSPROP_CC_
namespace heddle::kvstore {

struct RmsPropNumbers {
  ops::GradientOptions gradient;
  double gamma1;
  double gamma2;
  double epsilon;
  double clip_weights;
  bool centered;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g + wd * w);  n = (1 - gamma1) * G^2 + gamma1 * n, and then
// plain:     w -= lr * (G / sqrt(n + eps))
// centered:  a = (1 - gamma1) * G + gamma1 * a;  d = gamma2 * d - lr * (G / sqrt(n - a^2 + eps));
//            w += d.
// At last w is limited to [-clip_weights, clip_weights] unless that is 0.
template <class Gradient, bool kCentered>
struct RmsPropFormula : Formula<Gradient, kCentered ? 3 : 1> {
  using C = typename Gradient::Number;

  RmsPropFormula(Gradient gradient, const internal::KeyUpdate& update,
                 const RmsPropNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        gamma1(static_cast<C>(numbers.gamma1)),
        gamma2(static_cast<C>(numbers.gamma2)),
        rest(C{1} - gamma1),
        epsilon(static_cast<C>(numbers.epsilon)),
        limit(numbers.clip_weights > 0 ? static_cast<C>(numbers.clip_weights)
                                       : std::numeric_limits<C>::infinity()) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[0] = rest * (g * g) + gamma1 * e.state[0];
    if constexpr (kCentered) {
      e.state[1] = rest * g + gamma1 * e.state[1];
      const auto variance = e.state[0] - e.state[1] * e.state[1];
      e.state[2] = gamma2 * e.state[2] - rate * (g / Sqrt(variance + epsilon));
      e.weight = Clip(e.weight + e.state[2], limit);
    } else {
      e.weight = Clip(e.weight - rate * (g / Sqrt(e.state[0] + epsilon)), limit);
    }
  }

  Gradient gradient;
  C rate, decay, gamma1, gamma2, rest, epsilon, limit;
};

void UpdateRmsProp(const RmsPropNumbers& numbers, const internal::UpdateRun& run) {
  if (numbers.centered) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return RmsPropFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return RmsPropFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateRmsProp);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("gamma1", 0.9),
    FractionBelowOne("gamma2", 0.9),
    Positive("epsilon", 1e-8),
    // It decides what is kept for each key.
    {.name = "centered", .value = 0, .max = 1, .fixed = true, .is_integer = true},
    {.name = "clip_weights", .value = 0},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class RmsPropRule final : public internal::UpdateRule {
 public:
  explicit RmsPropRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .gamma1 = values["gamma1"],
                 .gamma2 = values["gamma2"],
                 .epsilon = values["epsilon"],
                 .clip_weights = values["clip_weights"],
                 .centered = values["centered"] != 0} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.centered ? 3 : 1; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateRmsProp)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {
      {.name = "n"}, {.name = "mean"}, {.name = "delta"}};

  const RmsPropNumbers numbers_;
};

constexpr OptimizerType kRmsProp = {"rmsprop", kParameters, &MakeRule<RmsPropRule>};

}  // namespace

const OptimizerType& RmsPropType() { return kRmsProp; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
