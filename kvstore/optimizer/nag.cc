// Nesterov's accelerated gradient.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/nag.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/sgd_formulas-inl.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_NAG_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_NAG_CC_
namespace heddle::kvstore {

struct NagNumbers {
  ops::GradientOptions gradient;
  double momentum;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// m = momentum * m;  W = w - m + (momentum + 1) * (m - lr * G(w));  m = m - lr * G(W);  w = W,
// with G(w) = clip(s * g) + wd * w. That the momentum sees the new weight is how MXNet 1.9.1 does
// it. Without momentum: w = (1 - lr * wd) * w - (lr * s) * g, or with clipping ... - lr * clip(s *
// g).
template <class Gradient, bool kMomentum>
struct NagFormula : Formula<Gradient, kMomentum ? 1 : 0> {
  using C = typename Gradient::Number;

  NagFormula(Gradient gradient, const internal::KeyUpdate& update, const NagNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(numbers.momentum)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    if constexpr (kMomentum) {
      const auto g = gradient.Scaled(e.gradient);
      const auto m = momentum * e.state[0];
      e.weight = e.weight - m + (momentum + C{1}) * (m - rate * (g + decay * e.weight));
      e.state[0] = m - rate * (g + decay * e.weight);
    } else {
      e.weight = PlainSgd(gradient, rate, decay, e.weight, e.gradient);
    }
  }

  Gradient gradient;
  C rate, decay, momentum;
};

void UpdateNag(const NagNumbers& numbers, const internal::UpdateRun& run) {
  if (run.states[0] != nullptr) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return NagFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return NagFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateNag);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class NagRule final : public internal::UpdateRule {
 public:
  explicit NagRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values), .momentum = values["momentum"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 1 : 0; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateNag)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const NagNumbers numbers_;
};

constexpr OptimizerType kNag = {"nag", kParameters, &MakeRule<NagRule>};

}  // namespace

const OptimizerType& NagType() { return kNag; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
