// GroupAdaGrad: AdaGrad with one history for each row of a matrix.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/groupadagrad.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>

#include <fmt/format.h>

#include "kvstore/optimizer/groupadagrad-inl.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "ops/reduce.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

// The mean of G^2 over the elements of one row. Blocks of the row add up in their order.
HWY_INLINE double MeanSquare(const ops::UpdateArrays& row, const ops::GradientOptions& options) {
  const DType dtype = row.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  alignas(64) double scaled[ops::kReductionBlock];  // as such or as float
  void* const outputs[] = {scaled};
  double sum = 0;
  for (std::size_t i = 0; i < row.count; i += ops::kReductionBlock) {
    ops::UpdateArrays block = row;
    block.weight = static_cast<std::byte*>(row.weight) + i * SizeOf(row.dtype);
    block.gradient = static_cast<const std::byte*>(row.gradient) + i * SizeOf(row.dtype);
    if (row.master != nullptr) block.master = row.master + i;
    block.count = std::min(ops::kReductionBlock, row.count - i);
    Apply(
        block, options,
        [](auto gradient) HWY_ATTR { return ScaledGradient<decltype(gradient)>(gradient); },
        outputs);
    double squares = 0;
    ops::SquaredNormBlocks(dtype, scaled, block.count, &squares);
    sum += squares;
  }
  return sum / static_cast<double>(row.count);
}

void UpdateGroupAdaGrad(const GroupAdaGradNumbers& numbers, const internal::UpdateRun& run) {
  const std::size_t row_length = static_cast<std::size_t>(run.update->row_length);
  const DType history_dtype = run.master != nullptr ? DType::kFloat32 : run.dtype;
  for (std::size_t i = 0; i < run.count; i += row_length) {
    ops::UpdateArrays row = run;
    row.weight = static_cast<std::byte*>(run.weight) + i * SizeOf(run.dtype);
    row.gradient = static_cast<const std::byte*>(run.gradient) + i * SizeOf(run.dtype);
    if (run.master != nullptr) row.master = run.master + i;
    row.count = row_length;
    const double mean_square = MeanSquare(row, numbers.gradient);
    double history = 0;
    ops::DispatchFloating(history_dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      using C = ops::ComputeType<T>;
      T& stored = static_cast<T*>(run.states[0])[i / row_length];
      const C sum = static_cast<C>(stored) + static_cast<C>(mean_square);
      stored = static_cast<T>(sum);
      history = static_cast<double>(sum);
    });
    const double root = std::sqrt(history + numbers.epsilon);
    Apply(row, numbers.gradient, [&](auto gradient) HWY_ATTR {
      return GroupAdaGradStep<decltype(gradient)>(gradient, run.update->learning_rate, root);
    });
  }
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateGroupAdaGrad);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    Positive("epsilon", 1e-5),
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

// G = clip(s * g); for each row h += mean(G^2) and w -= lr * G / sqrt(h + eps).
class GroupAdaGradRule final : public internal::UpdateRule {
 public:
  explicit GroupAdaGradRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values), .epsilon = values["epsilon"]} {}

  std::span<const internal::UpdateStateType> states() const override { return kStates; }
  bool lazy(bool /*row_sparse_weight*/) const override { return true; }
  bool by_rows() const override { return true; }
  std::string Refusal(const Subject& subject) const override {
    if (subject.dimensions != 2) {
      return fmt::format("expected a value of 2 dimensions, got {}", subject.dimensions);
    }
    return RefusalOfDecay(subject, "");
  }
  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateGroupAdaGrad)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  static constexpr internal::UpdateStateType kStates[] = {{.name = "history", .per_row = true}};

  const GroupAdaGradNumbers numbers_;
};

constexpr OptimizerType kGroupAdaGrad = {"groupadagrad", kParameters, &MakeRule<GroupAdaGradRule>};

}  // namespace

const OptimizerType& GroupAdaGradType() { return kGroupAdaGrad; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
