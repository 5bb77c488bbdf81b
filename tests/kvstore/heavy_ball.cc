// Heavy ball, SGD whose momentum does not see the weight decay: the example of
// docs/adding_an_optimizer.md.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kvstore/heavy_ball.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_HEAVY_BALL_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_HEAVY_BALL_NUMBERS_
namespace heddle::kvstore {

struct HeavyBallNumbers {
  ops::GradientOptions gradient;
  double momentum;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// m = momentum * m + clip(s * g);  w -= lr * (m + wd * w).
template <class Gradient>
struct HeavyBallFormula : Formula<Gradient, /*kStateCount=*/1> {
  using C = typename Gradient::Number;  // float, or double for float64 values

  HeavyBallFormula(Gradient gradient, const internal::KeyUpdate& update,
                   const HeavyBallNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(numbers.momentum)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.state[0] = momentum * e.state[0] + gradient.Scaled(e.gradient);
    e.weight = e.weight - rate * (e.state[0] + decay * e.weight);
  }

  Gradient gradient;
  C rate, decay, momentum;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

void UpdateHeavyBall(const HeavyBallNumbers& numbers, const internal::UpdateRun& run) {
  ops::HWY_NAMESPACE::Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return HeavyBallFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateHeavyBall);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0.9),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class HeavyBallRule final : public internal::UpdateRule {
 public:
  explicit HeavyBallRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values), .momentum = values["momentum"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateHeavyBall)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const HeavyBallNumbers numbers_;
};

constexpr OptimizerType kHeavyBall = {"heavyball", kParameters, &MakeRule<HeavyBallRule>};

}  // namespace

const OptimizerType& HeavyBallType() { return kHeavyBall; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
