// The formulas of kvstore/optimizer/test.cc.

#if defined(HEDDLE_KVSTORE_OPTIMIZER_TEST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KVSTORE_OPTIMIZER_TEST_INL_H_
#undef HEDDLE_KVSTORE_OPTIMIZER_TEST_INL_H_
#else
#define HEDDLE_KVSTORE_OPTIMIZER_TEST_INL_H_
#endif

#include "ops/formula-inl.h"
#include "ops/update.h"

// Once, although this file is read for each target.
#ifndef HEDDLE_KVSTORE_OPTIMIZER_TEST_NUMBERS_
#define HEDDLE_KVSTORE_OPTIMIZER_TEST_NUMBERS_
namespace heddle::kvstore {

struct TestNumbers {
  ops::GradientOptions gradient;
};

}  // namespace heddle::kvstore
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::kvstore::HEDDLE_FORMULAS {

using ops::HEDDLE_FORMULAS::Formula;

// w += s * g; the state becomes a copy of w.
template <class Gradient>
struct TestFormula : Formula<Gradient, 1> {
  using C = typename Gradient::Number;

  explicit TestFormula(Gradient gradient) : gradient(gradient) {}

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.weight = e.weight + gradient.rescale * e.gradient;
    e.state[0] = e.weight;
  }

  Gradient gradient;
};

}  // namespace heddle::kvstore::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
