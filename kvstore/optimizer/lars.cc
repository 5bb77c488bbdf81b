// LARS (You et al., 2017): SGD with a learning rate for each array by the ratio of norms.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/lars.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <cstddef>
#include <span>
#include <string_view>

#include "kvstore/optimizer/apply_momentum-inl.h"
#include "kvstore/optimizer/norms.h"
#include "kvstore/optimizer/optimizer_type.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

void UpdateLars(const ops::GradientOptions& options, double learning_rate, double momentum,
                const internal::UpdateRun& run) {
  ApplyMomentum(run, options, learning_rate, run.update->weight_decay, momentum);
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

// The learning rate of a key is multiplied by eta * |w| / (|s * g| + wd * |w| + eps) if both norms
// are positive, except for keys whose names end in gamma, beta or bias. With momentum correction
// the momentum is multiplied by lr / (lr of the key's last update), as scheduled. MXNet 1.9.1 takes
// the last update of any key.
class LarsRule final : public internal::UpdateRule {
 public:
  explicit LarsRule(const ParameterValues& values)
      : options_(GradientOptionsOf(values)),
        momentum_(values["momentum"]),
        eta_(values["eta"]),
        epsilon_(values["epsilon"]),
        corrects_(values["momentum_correction"] != 0),
        lazy_(values["lazy_update"] != 0) {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return momentum_ != 0 ? 1 : 0; }
  bool lazy(bool /*row_sparse_weight*/) const override { return lazy_; }

  int Begin(internal::KeyUpdate& update) const override {
    double& last_rate = update.numbers[0];
    double& correction = update.numbers[1];
    correction = update.step > 1 && last_rate != 0 ? update.learning_rate / last_rate : 1;
    last_rate = update.learning_rate;
    return IsScaled(update.key) ? 2 : 1;
  }

  void Update(const internal::UpdateRun& run) const override {
    const internal::KeyUpdate& update = *run.update;
    if (IsScaled(update.key) && update.pass == 0) {
      SumWeights(run, run.block_sums[0]);
      SumGradients(run, run.block_sums[1]);
      return;
    }
    const double momentum = corrects_ ? momentum_ * update.numbers[1] : momentum_;
    HWY_DYNAMIC_DISPATCH(UpdateLars)(options_, update.learning_rate * Scale(update), momentum, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  static bool IsScaled(std::string_view key) {
    return !key.ends_with("gamma") && !key.ends_with("beta") && !key.ends_with("bias");
  }
  double Scale(const internal::KeyUpdate& update) const {
    const double weight_norm = std::sqrt(update.sums[0][0]);
    const double gradient_norm = std::sqrt(update.sums[0][1]);
    if (!(weight_norm > 0 && gradient_norm > 0)) return 1;
    return eta_ * weight_norm /
           (gradient_norm * options_.rescale + update.weight_decay * weight_norm + epsilon_);
  }

  const ops::GradientOptions options_;
  const double momentum_;
  const double eta_;
  const double epsilon_;
  const bool corrects_;
  const bool lazy_;
};

constexpr OptimizerType kLars = {"lars", kParameters, &MakeRule<LarsRule>};

}  // namespace

const OptimizerType& LarsType() { return kLars; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
