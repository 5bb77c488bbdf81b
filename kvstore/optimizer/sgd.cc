// Stochastic gradient descent, as ops/sgd.h computes it.
#include "ops/sgd.h"

#include <heddle/optimizer.h>

#include <cstddef>
#include <memory>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"

namespace heddle {

namespace kvstore {

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = SgdOptions{}.learning_rate},
    FractionBelowOne("momentum", SgdOptions{}.momentum),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class SgdRule final : public internal::UpdateRule {
 public:
  explicit SgdRule(std::span<const double> values)
      : UpdateRule(values[5] != 0),
        params_{.learning_rate = values[0],
                .momentum = values[1],
                .weight_decay = values[2],
                .rescale = values[3],
                .clip = values[4] > 0 ? values[4] : -1} {}

  std::size_t num_states() const override { return params_.momentum != 0 ? 1 : 0; }

  void Update(const internal::UpdateRun& run) const override {
    // A momentum that was kept once is kept on, also while the parameter is 0.
    void* const momentum = run.states[0];
    if (run.master != nullptr) {
      ops::SgdUpdateMultiPrecision(params_, run.dtype, run.weight, run.gradient, run.master,
                                   static_cast<float*>(momentum), run.count);
    } else {
      ops::SgdUpdate(params_, run.dtype, run.weight, run.gradient, momentum, run.count);
    }
  }

 private:
  const ops::SgdParams params_;
};

std::shared_ptr<const internal::UpdateRule> MakeRule(std::span<const double> values) {
  return std::make_shared<SgdRule>(values);
}

constexpr OptimizerType kSgd = {"sgd", kParameters, &MakeRule};

}  // namespace

const OptimizerType& SgdType() { return kSgd; }

}  // namespace kvstore

OptimizerPtr Sgd(const SgdOptions& options) {
  return MakeOptimizer("sgd", {{"learning_rate", options.learning_rate},
                               {"momentum", options.momentum},
                               {"weight_decay", options.weight_decay},
                               {"rescale_grad", options.rescale_grad},
                               {"clip_gradient", options.clip_gradient},
                               {"multi_precision", options.multi_precision ? 1 : 0}});
}

}  // namespace heddle
