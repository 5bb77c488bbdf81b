// Nadam, Adam with Nesterov momentum (Dozat, 2015).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/nadam.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <cstdint>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_NADAM_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_NADAM_CC_
namespace heddle::kvstore {

struct NadamNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
  double schedule_decay;
};

inline double NadamMomentum(const NadamNumbers& numbers, std::int64_t step) {
  return numbers.beta1 *
         (1 - 0.5 * std::pow(0.96, static_cast<double>(step) * numbers.schedule_decay));
}

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// With p(t) = b1 * (1 - 0.5 * 0.96^(t * schedule_decay)) and M the product of p(1) to p(t):
// G = clip(s * g + wd * w);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2;
// w -= lr * ((1 - p(t)) * G / (1 - M) + p(t + 1) * m / (1 - M * p(t + 1)))
//      / (sqrt(v / (1 - b2^t)) + eps).
// Every key has its own M, where MXNet 1.9.1 multiplies one for all keys.
template <class Gradient>
struct NadamFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  NadamFormula(Gradient gradient, const internal::KeyUpdate& update, const NadamNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(static_cast<C>(1 - numbers.beta1)),
        rest2(static_cast<C>(1 - numbers.beta2)),
        epsilon(static_cast<C>(numbers.epsilon)),
        now(static_cast<C>(1 - NadamMomentum(numbers, update.step))),
        next(static_cast<C>(NadamMomentum(numbers, update.step + 1))),
        product(static_cast<C>(1 - update.numbers[0])),
        next_product(
            static_cast<C>(1 - update.numbers[0] * NadamMomentum(numbers, update.step + 1))),
        correction(static_cast<C>(1 - std::pow(numbers.beta2, static_cast<double>(update.step)))) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[0] = beta1 * e.state[0] + rest1 * g;
    e.state[1] = beta2 * e.state[1] + rest2 * g * g;
    const auto m = now * (g / product) + next * (e.state[0] / next_product);
    e.weight = e.weight - rate * m / (Sqrt(e.state[1] / correction) + epsilon);
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest1, rest2, epsilon, now, next, product, next_product, correction;
};

void UpdateNadam(const NadamNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return NadamFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateNadam);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.001},
    FractionBelowOne("beta1", 0.9),
    FractionBelowOne("beta2", 0.999),
    Positive("epsilon", 1e-8),
    {.name = "schedule_decay", .value = 0.004},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class NadamRule final : public internal::UpdateRule {
 public:
  explicit NadamRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .beta1 = values["beta1"],
                 .beta2 = values["beta2"],
                 .epsilon = values["epsilon"],
                 .schedule_decay = values["schedule_decay"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  int Begin(internal::KeyUpdate& update) const override {
    double& product = update.numbers[0];
    if (update.step == 1) product = 1;
    product *= NadamMomentum(numbers_, update.step);
    return 1;
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateNadam)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const NadamNumbers numbers_;
};

constexpr OptimizerType kNadam = {"nadam", kParameters, &MakeRule<NadamRule>};

}  // namespace

const OptimizerType& NadamType() { return kNadam; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
