// Signum, and signSGD without momentum (Bernstein et al., 2018).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/signum.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_SIGNUM_CC_
namespace heddle::kvstore {

struct SignumNumbers {
  ops::GradientOptions gradient;
  double momentum;
  double wd_lh;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// m = momentum * m - (1 - momentum) * wd * w - (1 - momentum) * clip(s * g);
// w = (1 - lr * wd_lh) * w + lr * sign(m).
// Without momentum: w = (1 - lr * wd) * w - lr * sign(g).
template <class Gradient, bool kMomentum>
struct SignumFormula : Formula<Gradient, kMomentum ? 1 : 0> {
  using C = typename Gradient::Number;

  SignumFormula(Gradient gradient, const internal::KeyUpdate& update, const SignumNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(numbers.momentum)),
        rest(C{1} - momentum),
        shrink(C{1} - rate * (kMomentum ? static_cast<C>(numbers.wd_lh) : decay)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    if constexpr (kMomentum) {
      const auto decayed = momentum * e.state[0] - (rest * decay) * e.weight;
      if constexpr (Gradient::kClips) {
        e.state[0] = decayed - rest * gradient.Scaled(e.gradient);
      } else {
        e.state[0] = decayed - (rest * gradient.rescale) * e.gradient;
      }
      e.weight = shrink * e.weight + rate * Sign(e.state[0]);
    } else {
      e.weight = shrink * e.weight - rate * Sign(e.gradient);
    }
  }

  Gradient gradient;
  C rate, decay, momentum, rest, shrink;
};

void UpdateSignum(const SignumNumbers& numbers, const internal::UpdateRun& run) {
  if (numbers.momentum != 0) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return SignumFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return SignumFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateSignum);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0.9),
    {.name = "wd_lh", .value = 0},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class SignumRule final : public internal::UpdateRule {
 public:
  explicit SignumRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .momentum = values["momentum"],
                 .wd_lh = values["wd_lh"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 1 : 0; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateSignum)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const SignumNumbers numbers_;
};

constexpr OptimizerType kSignum = {"signum", kParameters, &MakeRule<SignumRule>};

}  // namespace

const OptimizerType& SignumType() { return kSignum; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
