// The formulas of kvstore/optimizer/lans.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_LANS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_LANS_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_LANS_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_LANS_INL_H_
#endif

#include <cmath>

#include "kvstore/optimizer/update_rule.h"
#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_LANS_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_LANS_NUMBERS_
namespace heddle::kvstore {

struct LansNumbers {
  ops::GradientOptions gradient;
  double beta1;
  double beta2;
  double epsilon;
  double lower_bound;  // 0: none
  double upper_bound;  // 0: none
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// What the second and the third pass share. With M = m / (1 - b1^t), V = v / (1 - b2^t) and the
// normalised gradient G = clip(s * g / |s * g|): the directions u = M / (sqrt(V) + eps) + wd * w
// and n = G / (sqrt(V) + eps) + wd * w. A gradient of a norm that C rounds to 0 stays as it is.
template <class Gradient>
struct LansDirections {
  using C = typename Gradient::Number;

  LansDirections(Gradient gradient, const internal::KeyUpdate& update, const LansNumbers& numbers)
      : gradient(gradient),
        decay(static_cast<C>(update.weight_decay)),
        epsilon(static_cast<C>(numbers.epsilon)),
        correction1(static_cast<C>(1 - std::pow(numbers.beta1, static_cast<double>(update.step)))),
        correction2(static_cast<C>(1 - std::pow(numbers.beta2, static_cast<double>(update.step)))) {
    const double norm = std::abs(numbers.gradient.rescale) * std::sqrt(update.sums[0][0]);
    if (static_cast<C>(norm) > 0) scale = static_cast<C>(norm);
  }

  template <class V>
  HEDDLE_FORMULA V Normalised(V pushed) const {
    return gradient.Clipped(gradient.rescale * pushed / scale);
  }
  template <class V>
  HEDDLE_FORMULA void Set(V mean, V variance, V weight, V normalised, V& u, V& n) const {
    const V root = Sqrt(variance / correction2) + epsilon;
    u = (mean / correction1) / root + decay * weight;
    n = normalised / root + decay * weight;
  }

  Gradient gradient;
  C decay, epsilon, correction1, correction2;
  C scale = 1;
};

// Second pass: m = b1 * m + (1 - b1) * G;  v = b2 * v + (1 - b2) * G^2, and u and n for their
// norms.
template <class Gradient>
struct LansMoments : Formula<Gradient, 2> {
  using C = typename Gradient::Number;
  static constexpr int kOutputs = 2;
  static constexpr bool kWritesWeight = false;

  LansMoments(Gradient gradient, const internal::KeyUpdate& update, const LansNumbers& numbers)
      : directions(gradient, update, numbers),
        beta1(static_cast<C>(numbers.beta1)),
        beta2(static_cast<C>(numbers.beta2)),
        rest1(C{1} - beta1),
        rest2(C{1} - beta2) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    const auto g = directions.Normalised(e.gradient);
    e.state[0] = beta1 * e.state[0] + rest1 * g;
    e.state[1] = beta2 * e.state[1] + rest2 * (g * g);
    directions.Set(e.state[0], e.state[1], e.weight, g, e.output[0], e.output[1]);
  }

  LansDirections<Gradient> directions;
  C beta1, beta2, rest1, rest2;
};

// Third pass: w -= lr * b1 * ratio(u) * u + lr * (1 - b1) * ratio(n) * n.
template <class Gradient>
struct LansStep : Formula<Gradient, 2> {
  using C = typename Gradient::Number;
  static constexpr bool kWritesStates = false;

  LansStep(Gradient gradient, const internal::KeyUpdate& update, const LansNumbers& numbers,
           double mean_ratio, double gradient_ratio)
      : directions(gradient, update, numbers),
        mean_rate(static_cast<C>(update.learning_rate * mean_ratio * numbers.beta1)),
        gradient_rate(static_cast<C>(update.learning_rate * gradient_ratio * (1 - numbers.beta1))) {
  }

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    auto u = e.weight;
    auto n = e.weight;
    directions.Set(e.state[0], e.state[1], e.weight, directions.Normalised(e.gradient), u, n);
    e.weight = e.weight - mean_rate * u - gradient_rate * n;
  }

  LansDirections<Gradient> directions;
  C mean_rate, gradient_rate;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
