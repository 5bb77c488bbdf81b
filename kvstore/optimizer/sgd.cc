// Stochastic gradient descent, as ops/sgd.h computes it.
#include "ops/sgd.h"

#include <heddle/optimizer.h>

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
    kLazyUpdate,
    kMultiPrecision,
};

class SgdRule final : public internal::UpdateRule {
 public:
  explicit SgdRule(const ParameterValues& values)
      : params_{.momentum = values["momentum"],
                .rescale = values["rescale_grad"],
                .clip = values["clip_gradient"] > 0 ? values["clip_gradient"] : -1},
        lazy_(values["lazy_update"] != 0) {}

  std::span<const internal::UpdateStateType> states() const override {
    return std::span(kStates).first(params_.momentum != 0 ? 1 : 0);
  }
  bool lazy() const override { return lazy_; }

  void Update(const internal::UpdateRun& run) const override {
    ops::SgdParams params = params_;
    params.learning_rate = run.update->learning_rate;
    params.weight_decay = run.update->weight_decay;
    // A momentum that was kept once is kept on, also while the parameter is 0.
    void* const momentum = run.states[0];
    if (run.master != nullptr) {
      ops::SgdUpdateMultiPrecision(params, run.dtype, run.weight, run.gradient, run.master,
                                   static_cast<float*>(momentum), run.count);
    } else {
      ops::SgdUpdate(params, run.dtype, run.weight, run.gradient, momentum, run.count);
    }
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const ops::SgdParams params_;
  const bool lazy_;
};

constexpr OptimizerType kSgd = {"sgd", kParameters, &MakeRule<SgdRule>};

}  // namespace

const OptimizerType& SgdType() { return kSgd; }

}  // namespace kvstore

OptimizerPtr Sgd(const SgdOptions& options) {
  return MakeOptimizer("sgd", {{"learning_rate", options.learning_rate},
                               {"momentum", options.momentum},
                               {"weight_decay", options.weight_decay},
                               {"rescale_grad", options.rescale_grad},
                               {"clip_gradient", options.clip_gradient},
                               {"lazy_update", options.lazy_update ? 1 : 0},
                               {"multi_precision", options.multi_precision ? 1 : 0}});
}

}  // namespace heddle
