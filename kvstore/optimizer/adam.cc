// Adam, as ops/adam.h computes it, with the bias correction in the learning rate.
#include "ops/adam.h"

#include <heddle/optimizer.h>

#include <cmath>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"

namespace heddle {

namespace kvstore {

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = AdamOptions{}.learning_rate},
    FractionBelowOne("beta1", AdamOptions{}.beta1),
    FractionBelowOne("beta2", AdamOptions{}.beta2),
    {.name = "epsilon", .value = AdamOptions{}.epsilon, .min_bound = ParameterType::Bound::kOpen},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kLazyUpdate,
    kMultiPrecision,
};

class AdamRule final : public internal::UpdateRule {
 public:
  explicit AdamRule(const ParameterValues& values)
      : params_{.beta1 = values["beta1"],
                .beta2 = values["beta2"],
                .epsilon = values["epsilon"],
                .rescale = values["rescale_grad"],
                .clip = values["clip_gradient"] > 0 ? values["clip_gradient"] : -1},
        lazy_(values["lazy_update"] != 0) {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  bool lazy() const override { return lazy_; }

  int Begin(internal::KeyUpdate& update) const override {
    const double step = static_cast<double>(update.step);
    update.learning_rate *= std::sqrt(1 - std::pow(params_.beta2, step));
    update.learning_rate /= 1 - std::pow(params_.beta1, step);
    return 1;
  }

  void Update(const internal::UpdateRun& run) const override {
    ops::AdamParams params = params_;
    params.learning_rate = run.update->learning_rate;
    params.weight_decay = run.update->weight_decay;
    void* const mean = run.states[0];
    void* const variance = run.states[1];
    if (run.master != nullptr) {
      ops::AdamUpdateMultiPrecision(params, run.dtype, run.weight, run.gradient, run.master,
                                    static_cast<float*>(mean), static_cast<float*>(variance),
                                    run.count);
    } else {
      ops::AdamUpdate(params, run.dtype, run.weight, run.gradient, mean, variance, run.count);
    }
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "mean"}, {.name = "variance"}};

  const ops::AdamParams params_;
  const bool lazy_;
};

constexpr OptimizerType kAdam = {"adam", kParameters, &MakeRule<AdamRule>};

}  // namespace

const OptimizerType& AdamType() { return kAdam; }

}  // namespace kvstore

OptimizerPtr Adam(const AdamOptions& options) {
  return MakeOptimizer("adam", {{"learning_rate", options.learning_rate},
                                {"beta1", options.beta1},
                                {"beta2", options.beta2},
                                {"epsilon", options.epsilon},
                                {"weight_decay", options.weight_decay},
                                {"rescale_grad", options.rescale_grad},
                                {"clip_gradient", options.clip_gradient},
                                {"lazy_update", options.lazy_update ? 1 : 0},
                                {"multi_precision", options.multi_precision ? 1 : 0}});
}

}  // namespace heddle
