// DC-ASGD, delay-compensated asynchronous SGD (Zheng et al., 2017).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/dcasgd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_DCASGD_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_DCASGD_CC_
namespace heddle::kvstore {

struct DcaSgdNumbers {
  ops::GradientOptions gradient;
  double momentum;
  double lamda;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// G = clip(s * g);  m = momentum * m - lr * (G + wd * w + lamda * G^2 * (w - previous));
// previous = w;  w += m. Without momentum, momentum * m is 0.
template <class Gradient, bool kMomentum>
struct DcaSgdFormula : Formula<Gradient, kMomentum ? 2 : 1> {
  using C = typename Gradient::Number;

  DcaSgdFormula(Gradient gradient, const internal::KeyUpdate& update, const DcaSgdNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        momentum(static_cast<C>(numbers.momentum)),
        lamda(static_cast<C>(numbers.lamda)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto g = gradient.Scaled(e.gradient);
    const auto delay = lamda * g * g * (e.weight - e.state[0]);
    auto m = -rate * (g + decay * e.weight + delay);
    if constexpr (kMomentum) {
      m = momentum * e.state[1] + m;
      e.state[1] = m;
    }
    e.state[0] = e.weight;
    e.weight = e.weight + m;
  }

  Gradient gradient;
  C rate, decay, momentum, lamda;
};

void UpdateDcaSgd(const DcaSgdNumbers& numbers, const internal::UpdateRun& run) {
  if (run.states[1] != nullptr) {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return DcaSgdFormula<decltype(gradient), true>(gradient, *run.update, numbers);
    });
  } else {
    Apply(run, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return DcaSgdFormula<decltype(gradient), false>(gradient, *run.update, numbers);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateDcaSgd);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0),
    {.name = "lamda", .value = 0.04},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class DcaSgdRule final : public internal::UpdateRule {
 public:
  explicit DcaSgdRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .momentum = values["momentum"],
                 .lamda = values["lamda"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 2 : 1; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateDcaSgd)(numbers_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {
      {.name = "previous", .start = internal::UpdateStateType::Start::kWeight},
      {.name = "momentum"}};

  const DcaSgdNumbers numbers_;
};

constexpr OptimizerType kDcaSgd = {"dcasgd", kParameters, &MakeRule<DcaSgdRule>};

}  // namespace

const OptimizerType& DcaSgdType() { return kDcaSgd; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
