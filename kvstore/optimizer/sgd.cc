// Stochastic gradient descent with momentum.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/sgd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <heddle/optimizer.h>

#include <cstddef>
#include <span>

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/sgd_formulas-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

void UpdateSgd(const ops::GradientOptions& options, double momentum,
               const internal::UpdateRun& run) {
  ApplyMomentum(run, options, run.update->learning_rate, run.update->weight_decay, momentum);
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {

namespace kvstore {

HWY_EXPORT(UpdateSgd);

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
      : options_(GradientOptionsOf(values)),
        momentum_(values["momentum"]),
        lazy_(values["lazy_update"] != 0) {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return momentum_ != 0 ? 1 : 0; }
  bool lazy(bool /*row_sparse_weight*/) const override { return lazy_; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateSgd)(options_, momentum_, run);
  }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const ops::GradientOptions options_;
  const double momentum_;
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
#endif  // HWY_ONCE
