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
#include "ops/dispatch.h"
#include "ops/update-inl.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_SGLD_CC_
#define HEDDLE_KVSTORE_OPTIMIZER_SGLD_CC_
namespace heddle::kvstore {

// Normal numbers that depend only on key, step, seed and place: any cut of an array into runs, and
// training that was stopped and continued, draws the same ones.
class NormalNumbers {
 public:
  NormalNumbers(std::uint64_t seed, const internal::KeyUpdate& update)
      : stream_(Mix(Mix(seed ^ update.key_hash) + static_cast<std::uint64_t>(update.step))) {}

  double operator[](std::uint64_t place) const {
    // Box and Muller: two uniform numbers make two normal ones, for an even place and the next.
    const std::uint64_t bits = Mix(stream_ + (place / 2 + 1) * 0x9E3779B97F4A7C15);
    const double u = (static_cast<double>(bits >> 32) + 1) * 0x1p-32;  // in (0, 1]
    const double angle = 2 * std::numbers::pi * static_cast<double>(bits & 0xFFFFFFFF) * 0x1p-32;
    const double radius = std::sqrt(-2 * std::log(u));
    return radius * (place % 2 == 0 ? std::cos(angle) : std::sin(angle));
  }

 private:
  // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
  static std::uint64_t Mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  std::uint64_t stream_;
};

}  // namespace heddle::kvstore
#endif

HWY_BEFORE_NAMESPACE();
namespace heddle::kvstore::HWY_NAMESPACE {

using ops::HWY_NAMESPACE::Apply;
using ops::HWY_NAMESPACE::Formula;

// w -= lr / 2 * (clip(s * g) + wd * w);  w += noise, of standard deviation sqrt(lr).
template <class Gradient>
struct SgldFormula : Formula<Gradient, 1> {
  using C = typename Gradient::Number;
  static constexpr bool kWritesStates = false;

  SgldFormula(Gradient gradient, const internal::KeyUpdate& update)
      : gradient(gradient),
        half_rate(static_cast<C>(update.learning_rate / 2)),
        decay(static_cast<C>(update.weight_decay)) {}

  template <class E>
  HWY_INLINE void operator()(E& e) const {
    const auto drift = gradient.Scaled(e.gradient) + decay * e.weight;
    e.weight = e.weight - half_rate * drift + e.state[0];
  }

  Gradient gradient;
  C half_rate, decay;
};

// In chunks: the noise of one lies in a buffer, as a state that is only read.
void UpdateSgld(const ops::GradientOptions& options, std::uint64_t seed,
                const internal::UpdateRun& run) {
  constexpr std::size_t kChunk = 512;
  const NormalNumbers normal(seed, *run.update);
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
          Apply(chunk, options, [&](auto gradient) HWY_ATTR {
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
      : options_(GradientOptionsOf(values)), seed_(static_cast<std::uint64_t>(values["seed"])) {}

  void Update(const internal::UpdateRun& run) const override {
    HWY_DYNAMIC_DISPATCH(UpdateSgld)(options_, seed_, run);
  }

 private:
  const ops::GradientOptions options_;
  const std::uint64_t seed_;
};

constexpr OptimizerType kSgld = {"sgld", kParameters, &MakeRule<SgldRule>};

}  // namespace

const OptimizerType& SgldType() { return kSgld; }

}  // namespace heddle::kvstore
#endif  // HWY_ONCE
