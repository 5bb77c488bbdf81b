// The formulas of kvstore/optimizer/groupadagrad.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_GROUPADAGRAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_GROUPADAGRAD_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_GROUPADAGRAD_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_GROUPADAGRAD_INL_H_
#endif

#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_GROUPADAGRAD_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_GROUPADAGRAD_NUMBERS_
namespace heddle::kvstore {

struct GroupAdaGradNumbers {
  ops::GradientOptions gradient;
  double epsilon;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// G = clip(s * g), for its squares.
template <class Gradient>
struct ScaledGradient : Formula<Gradient> {
  static constexpr int kOutputs = 1;
  static constexpr bool kWritesWeight = false;

  explicit ScaledGradient(Gradient gradient) : gradient(gradient) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.output[0] = gradient.Scaled(e.gradient);
  }

  Gradient gradient;
};

// w -= lr * G / root
template <class Gradient>
struct GroupAdaGradStep : Formula<Gradient> {
  using C = typename Gradient::Number;

  GroupAdaGradStep(Gradient gradient, double learning_rate, double root)
      : gradient(gradient), rate(static_cast<C>(learning_rate)), root(static_cast<C>(root)) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.weight = e.weight - rate * gradient.Scaled(e.gradient) / root;
  }

  Gradient gradient;
  C rate, root;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
