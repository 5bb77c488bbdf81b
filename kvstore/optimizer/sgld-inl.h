// The formulas of kvstore/optimizer/sgld.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_SGLD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_SGLD_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_SGLD_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_SGLD_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <numbers>

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_SGLD_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_SGLD_NUMBERS_
namespace heddle::kvstore {

struct SgldNumbers {
  ops::GradientOptions gradient;
  std::uint64_t seed;
};

// Normal numbers that depend only on key, step, seed and place: any cut of an array into runs, and
// training that was stopped and continued, draws the same ones.
class NormalNumbers {
 public:
  NormalNumbers(std::uint64_t seed, const internal::KeyUpdate& update)
      : stream_(Mix(Mix(seed ^ update.key_hash) + static_cast<std::uint64_t>(update.step))) {}

  HEDDLE_FORMULA_OF_NUMBERS double operator[](std::uint64_t place) const {
    // Box and Muller: two uniform numbers make two normal ones, for an even place and the next.
    const std::uint64_t bits = Mix(stream_ + (place / 2 + 1) * 0x9E3779B97F4A7C15);
    const double u = (static_cast<double>(bits >> 32) + 1) * 0x1p-32;  // in (0, 1]
    const double angle = 2 * std::numbers::pi * static_cast<double>(bits & 0xFFFFFFFF) * 0x1p-32;
    const double radius = std::sqrt(-2 * std::log(u));
    return radius * (place % 2 == 0 ? std::cos(angle) : std::sin(angle));
  }

 private:
  // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
  HEDDLE_FORMULA_OF_NUMBERS static std::uint64_t Mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  std::uint64_t stream_;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

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
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto drift = gradient.Scaled(e.gradient) + decay * e.weight;
    e.weight = e.weight - half_rate * drift + e.state[0];
  }

  Gradient gradient;
  C half_rate, decay;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
