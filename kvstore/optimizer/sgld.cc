// SGLD, stochastic gradient Langevin dynamics (Welling and Teh, 2011).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvstore/optimizer/sgld.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/sgld-inl.h"
#include "ops/dispatch.h"
#include "ops/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;

// In chunks: the noise of one lies in a buffer, as a state that is only read.
void UpdateSgld(const SgldNumbers& numbers, const internal::UpdateRun& run) {
  constexpr std::size_t kChunk = 512;
  const NormalNumbers normal(numbers.seed, *run.update);
  const double deviation = std::sqrt(run.update->learning_rate);
  ops::DispatchFloating(
      run.master != nullptr ? DType::kFloat32 : run.dtype, [&](auto type) HWY_ATTR {
        using T = typename decltype(type)::type;
        T noise[kChunk];
        for (std::size_t i = 0; i < run.count; i += kChunk) {
          ops::UpdateArrays chunk = run;
          chunk.weight = static_cast<std::byte*>(run.weight) + i * SizeOf(run.dtype);
          chunk.gradient = static_cast<const std::byte*>(run.gradient) + i * SizeOf(run.dtype);
          if (run.master != nullptr) chunk.master = run.master + i;
          chunk.count = std::min(kChunk, run.count - i);
          const std::uint64_t first = static_cast<std::uint64_t>(run.first) + i;
          for (std::size_t k = 0; k < chunk.count; ++k) {
            noise[k] =
                static_cast<T>(static_cast<ops::ComputeType<T>>(deviation * normal[first + k]));
          }
          chunk.states[0] = noise;
          Apply(chunk, numbers.gradient, [&](auto gradient) HWY_ATTR {
            return SgldFormula<decltype(gradient)>(gradient, *run.update);
          });
        }
      });
}

}  // namespace heddle::kvstore::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::kvstore {

HWY_EXPORT(UpdateSgld);

namespace {

constexpr ParameterType kParameters[] = {
    {.name = "learning_rate", .value = 0.01},
    {.name = "seed", .value = 0, .max = 0x1p53, .is_integer = true},
    kWeightDecay,
    kRescaleGrad,
    kClipGradient,
    kMultiPrecision,
};

class SgldRule final : public internal::UpdateRule {
 public:
  explicit SgldRule(const ParameterValues& values)
      : numbers_{.gradient = GradientOptionsOf(values),
                 .seed = static_cast<std::uint64_t>(values["seed"])} {}

  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateSgld)(numbers_, run);
  }
  internal::RuleNumbers numbers() const override { return internal::NumbersOf(numbers_); }

 private:
  const SgldNumbers numbers_;
};

constexpr OptimizerType kSgld = {"sgld", kParameters, &MakeRule<SgldRule>};

}  // namespace

const OptimizerType& SgldType() { return kSgld; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
