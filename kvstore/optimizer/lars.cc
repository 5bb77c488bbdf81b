// LARS (You et al., 2017): SGD with a learning rate for each array by the ratio of norms.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/lars.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/apply_momentum-inl.h"
#include "kvstore/optimizer/lars-inl.h"
#include "kvstore/optimizer/norms.h"
#include "kvstore/optimizer/optimizer_type.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

void UpdateLars(const LarsNumbers& numbers, const internal::UpdateRun& run) {
  const internal::KeyUpdate& update = *run.update;
  const double scale = numbers.Scale(update.sums[0].data(), update.weight_decay);
  ApplyMomentum(run, numbers.gradient, update.learning_rate * scale, update.weight_decay,
                numbers.MomentumOf(update));
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateLars);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0),
    {.name = "eta", .value = 0.001},
    {.name = "epsilon", .value = 0},
    Switch("momentum_correction", true),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kLazyUpdate,
    kMultiPrecision,
};

// The learning rate of a key is multiplied by eta * |w| / (s * |g| + wd * |w| + eps) if both norms
// are positive, except for keys whose names end in gamma, beta or bias. With momentum correction
// the momentum is multiplied by lr / (lr of the key's last update), as scheduled. MXNet 1.9.1 takes
// the last update of any key.
class LarsRule final : public internal::UpdateRule {
 public:
  explicit LarsRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .momentum = values["momentum"],
                 .eta = values["eta"],
                 .epsilon = values["epsilon"],
                 .corrects = values["momentum_correction"] != 0},
        lazy_(values["lazy_update"] != 0) {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 1 : 0; }
  bool lazy(bool /*row_sparse_weight*/) const override { return lazy_; }

  int Begin(internal::KeyUpdate& update) const override {
    double& last_rate = update.numbers[0];
    double& correction = update.numbers[1];
    correction = update.step > 1 && last_rate != 0 ? update.learning_rate / last_rate : 1;
    last_rate = update.learning_rate;
    return LarsNumbers::IsScaled(update.key) ? 2 : 1;
  }

  void Update(const internal::UpdateRun& run) const override {
    const internal::KeyUpdate& update = *run.update;
    if (LarsNumbers::IsScaled(update.key) && update.pass == 0) {
      SumWeights(run, run.block_sums[0]);
      SumGradients(run, run.block_sums[1]);
      return;
    }
    HWY_DYNAMIC_DISPATCH(UpdateLars)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const LarsNumbers numbers_;
  const bool lazy_;
};

constexpr OptimizerType kLars = {"lars", kParameters, &MakeRule<LarsRule>};

}  // namespace

const OptimizerType& LarsType() { return kLars; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
