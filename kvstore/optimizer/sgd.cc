// Stochastic gradient descent with momentum.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/sgd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <heddle/optimizer.h>

#include <cstddef>
#include <span>

#include "kvstore/optimizer/apply_momentum-inl.h"
#include "kvstore/optimizer/optimizer_type.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

void UpdateSgd(const SgdNumbers& numbers, const internal::UpdateRun& run) {
  ApplyMomentum(run, numbers.gradient, run.update->learning_rate, run.update->weight_decay,
                numbers.momentum);
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
      : numbers_{.gradient = GradientOptionsOf(values), .momentum = values["momentum"]},
        lazy_(values["lazy_update"] != 0) {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 1 : 0; }
  bool lazy(bool /*row_sparse_weight*/) const override { return lazy_; }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateSgd)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "momentum"}};

  const SgdNumbers numbers_;
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
