// The formulas of kvstore/optimizer/nadam.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_NADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_NADAM_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_NADAM_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_NADAM_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_NADAM_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_NADAM_NUMBERS_
namespace heddle::kvstore {

struct NadamNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
  double schedule_decay;
};

inline double NadamMomentum(const NadamNumbers& numbers, std::int64_t step) {
  return numbers.beta1 *
         (1 - 0.5 * std::pow(0.96, static_cast<double>(step) * numbers.schedule_decay));
}

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// With p(t) = b1 * (1 - 0.5 * 0.96^(t * schedule_decay)) and M the product of p(1) to p(t):
// G = clip(s * g + wd * w);  m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2;
// w -= lr * ((1 - p(t)) * G / (1 - M) + p(t + 1) * m / (1 - M * p(t + 1)))
//      / (sqrt(v / (1 - b2^t)) + eps).
// Every key has its own M, where MXNet 1.9.1 multiplies one for all keys.
template <class Gradient>
struct NadamFormula : Formula<Gradient, 2> {
  using C = typename Gradient::Number;

  NadamFormula(Gradient gradient, const internal::KeyUpdate& update, const NadamNumbers& numbers)
      : gradient(gradient),
        rate(static_cast<C>(update.learning_rate)),
        decay(static_cast<C>(update.weight_decay)),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(static_cast<C>(1 - numbers.beta1)),
        rest2(static_cast<C>(1 - numbers.beta2)),
        epsilon(static_cast<C>(numbers.epsilon)),
        now(static_cast<C>(1 - NadamMomentum(numbers, update.step))),
        next(static_cast<C>(NadamMomentum(numbers, update.step + 1))),
        product(static_cast<C>(1 - update.numbers[0])),
        next_product(
            static_cast<C>(1 - update.numbers[0] * NadamMomentum(numbers, update.step + 1))),
        correction(static_cast<C>(1 - std::pow(numbers.beta2, static_cast<double>(update.step)))) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = gradient.ScaledWithDecay(e.gradient, decay, e.weight);
    e.state[0] = beta1 * e.state[0] + rest1 * g;
    e.state[1] = beta2 * e.state[1] + rest2 * g * g;
    const auto m = now * (g / product) + next * (e.state[0] / next_product);
    e.weight = e.weight - rate * m / (Sqrt(e.state[1] / correction) + epsilon);
  }

  Gradient gradient;
  C rate, decay, beta1, beta2, rest1, rest2, epsilon, now, next, product, next_product, correction;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
