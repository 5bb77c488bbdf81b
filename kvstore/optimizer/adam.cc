// Adam, as ops/adam.h computes it, with the bias correction in the learning rate.
#include "ops/adam.h"

#include <heddle/optimizer.h>

#include <cmath>
#include <cstddef>
#include <memory>
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
    kMultiPrecision,
};

class AdamRule final : public internal::UpdateRule {
 public:
  explicit AdamRule(std::span<const double> values)
      : UpdateRule(values[7] != 0),
        params_{.learning_rate = values[0],
                .beta1 = values[1],
                .beta2 = values[2],
                .epsilon = values[3],
                .weight_decay = values[4],
                .rescale = values[5],
                .clip = values[6] > 0 ? values[6] : -1} {}

  std::size_t num_states() const override { return 2; }

  void Update(const internal::UpdateRun& run) const override {
    ops::AdamParams params = params_;
    const double step = static_cast<double>(run.step);
    params.learning_rate *= std::sqrt(1 - std::pow(params.beta2, step));
    params.learning_rate /= 1 - std::pow(params.beta1, step);
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
  const ops::AdamParams params_;
};

std::shared_ptr<const internal::UpdateRule> MakeRule(std::span<const double> values) {
  return std::make_shared<AdamRule>(values);
}

constexpr OptimizerType kAdam = {"adam", kParameters, &MakeRule};

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
                                {"multi_precision", options.multi_precision ? 1 : 0}});
}

}  // namespace heddle
