// LBSGD, SGD for large batches: adds up the gradients of several pushes, and warms up.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/lbsgd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cstddef>
#include <span>

#include "kvstore/optimizer/lbsgd-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/sums-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

void LbSgdAdd(const internal::UpdateRun& run) {
  Apply(run, {}, [](auto gradient) HWY_ATTR { return LbSgdAccumulate<decltype(gradient)>(); });
}

void LbSgdSum(double batch_scale, const internal::UpdateRun& run) {
  SumDirections<1>(run, [&](const ops::UpdateArrays& block, void* const* batch) HWY_ATTR {
    Apply(
        block, {},
        [&](auto gradient) HWY_ATTR { return LbSgdBatch<decltype(gradient)>(batch_scale); }, batch);
  });
}

void LbSgdUpdate(const ops::GradientOptions& options, double learning_rate, double momentum,
                 double batch_scale, const internal::UpdateRun& run) {
  if (run.states[1] != nullptr) {
    Apply(run, options, [&](auto gradient) HWY_ATTR {
      return LbSgdStep<decltype(gradient), true>(gradient, *run.update, learning_rate, momentum,
                                                 batch_scale);
    });
  } else {
    Apply(run, options, [&](auto gradient) HWY_ATTR {
      return LbSgdStep<decltype(gradient), false>(gradient, *run.update, learning_rate, momentum,
                                                  batch_scale);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(LbSgdAdd);
HWY_EXPORT(LbSgdSum);
HWY_EXPORT(LbSgdUpdate);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    FractionBelowOne("momentum", 0),
    {.name = "warmup_strategy",
     .value = LbSgdNumbers::kLinear,
     .max = LbSgdNumbers::kLars,
     .is_integer = true},
    {.name = "warmup_epochs", .value = 5, .is_integer = true},
    {.name = "batch_scale", .value = 1, .min = 1, .is_integer = true},
    {.name = "updates_per_epoch", .value = 32, .is_integer = true},
    {.name = "begin_epoch", .value = 0, .is_integer = true},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

// Every batch_scale-th update of a key steps with the mean of the gradients since the last step.
// The learning rate of the n-th update is multiplied by a factor between 1 and batch_scale that
// grows, over warmup_epochs * updates_per_epoch updates, with n, n^2 or the root of n; or, with the
// strategy lars, by sqrt(|w|^2 / (|G|^2 + wd * |w|^2)) within [0.01, 100].
class LbSgdRule final : public internal::UpdateRule {
 public:
  explicit LbSgdRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .momentum = values["momentum"],
                 .strategy = static_cast<LbSgdNumbers::Strategy>(
                     static_cast<int>(values["warmup_strategy"])),
                 .warmup_updates = values["warmup_epochs"] * values["updates_per_epoch"],
                 .batch_scale = values["batch_scale"],
                 .first_update = values["begin_epoch"] * values["updates_per_epoch"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  std::size_t num_states() const override { return numbers_.momentum != 0 ? 2 : 1; }
  // The rows of a batch of several pushes are those of all of them.
  bool lazy(bool /*row_sparse_weight*/) const override { return numbers_.batch_scale == 1; }

  int Begin(internal::KeyUpdate& update) const override {
    return numbers_.Steps(update) && numbers_.strategy == LbSgdNumbers::kLars ? 2 : 1;
  }

  void Update(const internal::UpdateRun& run) const override {
    const internal::KeyUpdate& update = *run.update;
    const bool lars = numbers_.strategy == LbSgdNumbers::kLars;
    if (!numbers_.Steps(update)) {
      HWY_DYNAMIC_DISPATCH(LbSgdAdd)(run);
    } else if (lars && update.pass == 0) {
      HWY_DYNAMIC_DISPATCH(LbSgdSum)(numbers_.batch_scale, run);
    } else {
      const double factor =
          lars ? LbSgdNumbers::LarsFactor(update.sums[0].data(), update.weight_decay)
               : numbers_.WarmupFactor(numbers_.Count(update));
      HWY_DYNAMIC_DISPATCH(LbSgdUpdate)
      (numbers_.gradient, update.learning_rate * factor, numbers_.momentum, numbers_.batch_scale,
       run);
    }
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "gradients"},
                                                          {.name = "momentum"}};

  const LbSgdNumbers numbers_;
};

constexpr OptimizerType kLbSgd = {"lbsgd", kParameters, &MakeRule<LbSgdRule>};

}  // namespace

const OptimizerType& LbSgdType() { return kLbSgd; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
