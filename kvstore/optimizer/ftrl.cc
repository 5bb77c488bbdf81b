// FTRL-Proximal (McMahan et al., 2013).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/ftrl.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_FTRL_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_FTRL_CC_
namespace heddle::kvstore {

struct FtrlNumbers {
  ops::GradientOptions gradient;
  double lamda1;
  double beta;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g);  z += G - (sqrt(n + G^2) - sqrt(n)) * w / lr;  n += G^2;
// w = (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + wd) where |z| > l1, else 0.
template <class Gradient>
struct FtrlFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  FtrlFormula(Gradient gradient, const internal::KeyUpdate& update, const FtrlNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        lamda1(static_cast<C>(numbers.lamda1)),
        beta(static_cast<C>(numbers.beta)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    const auto n = e.state[1] + g * g;
    const auto z = e.state[0] + (g - (Sqrt(n) - Sqrt(e.state[1])) * e.weight / rate);
    e.state[0] = z;
    e.state[1] = n;
    e.weight =
        ZeroIfAtMost(Abs(z), lamda1, (Sign(z) * lamda1 - z) / ((beta + Sqrt(n)) / rate + decay));
  }

  Gradient gradient;
  C rate, decay, lamda1, beta;
};

void UpdateFtrl(const FtrlNumbers& numbers, const internal::UpdateRun& run) {
  Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
    return FtrlFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateFtrl);

namespace {

constexpr ParameterType kParameters[] = {
    Positive("learning_rate", 0.1),
    {.name = "lamda1", .value = 0.01},
    {.name = "beta", .value = 1},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class FtrlRule final : public internal::UpdateRule {
 public:
  explicit FtrlRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .lamda1 = values["lamda1"],
                 .beta = values["beta"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  // Without a gradient a weight becomes what z and n make of it, whatever it was before: all rows
  // of a dense weight do.
  bool lazy(bool row_sparse_weight) const override { return row_sparse_weight; }
  void Update(const internal::UpdateRun& run) const override {
    // A schedule may end with 0, by which the formula divides: nothing changes then.
    if (run.update->learning_rate == 0) return;
    HWY_DYNAMIC_DISPATCH(UpdateFtrl)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "z"}, {.name = "n"}};

  const FtrlNumbers numbers_;
};

constexpr OptimizerType kFtrl = {"ftrl", kParameters, &MakeRule<FtrlRule>};

}  // namespace

const OptimizerType& FtrlType() { return kFtrl; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
