// What the formulas of optimizers are written with (ops/update-inl.h says how).
//
// A header of formulas, kvstore/optimizer/<name>-inl.h, is compiled in two ways. Inside of
// Highway's foreach_target.h scheme, once for each SIMD target, for vectors of elements. Elsewhere
// once, in the namespace one_lane and for one element at a time, on the CPU or a GPU:
// ops/cuda/update_plan.h.

#if defined(HEDDLE_OPS_FORMULA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_OPS_FORMULA_INL_H_
#undef HEDDLE_OPS_FORMULA_INL_H_
#else
#define HEDDLE_OPS_FORMULA_INL_H_
#endif

#ifdef HWY_TARGET_INCLUDE
#include <hwy/highway.h>
#else
#include "ops/cuda/host_device.h"
#endif

// HEDDLE_FORMULA stands before functions over elements, HEDDLE_FORMULA_OF_NUMBERS before those,
// outside of the targets' namespaces, over plain numbers.
#ifndef HEDDLE_FORMULA
#ifdef HWY_TARGET_INCLUDE
#define HEDDLE_FORMULA HWY_INLINE
#define HEDDLE_FORMULA_OF_NUMBERS inline
#define HEDDLE_FORMULAS HWY_NAMESPACE
#define HEDDLE_BEFORE_FORMULAS() HWY_BEFORE_NAMESPACE()
#define HEDDLE_AFTER_FORMULAS() HWY_AFTER_NAMESPACE()
#else
#define HEDDLE_FORMULA HEDDLE_HOST_DEVICE
#define HEDDLE_FORMULA_OF_NUMBERS HEDDLE_HOST_DEVICE
#define HEDDLE_FORMULAS one_lane
#define HEDDLE_BEFORE_FORMULAS() static_assert(true)
#define HEDDLE_AFTER_FORMULAS() static_assert(true)
#endif
#endif

HEDDLE_BEFORE_FORMULAS();
namespace heddle::ops::HEDDLE_FORMULAS {

// How optimizers read the gradient: rescaled, then clipped, with or without the weight decay.
template <typename C, bool kClip>
struct GradientOf {
  using Number = C;

  C rescale;
  C limit;  // if kClip

  static constexpr bool clips() { return kClip; }

  template <class V>
  HEDDLE_FORMULA V Clipped(V v) const {
    if constexpr (kClip) {
      return Clip(v, limit);
    } else {
      return v;
    }
  }
  template <class V>
  HEDDLE_FORMULA V Scaled(V gradient) const {
    return Clipped(rescale * gradient);
  }
  template <class V>
  HEDDLE_FORMULA V ScaledWithDecay(V gradient, C decay, V weight) const {
    return Clipped(rescale * gradient + decay * weight);
  }
};

// What formulas derive from: which arrays they touch.
template <class Gradient, int kStateCount = 0>
struct Formula {
  using Number = typename Gradient::Number;
  static constexpr int kStates = kStateCount;
  static constexpr int kOutputs = 0;  // further arrays of Number that are written
  static constexpr bool kWritesWeight = true;
  static constexpr bool kWritesStates = true;
  static constexpr bool kTakesPlace = false;  // TakePlace(place of the element) comes before each
  static constexpr bool kTakesSums = false;   // TakeSums(sums of the passes before) comes first
};

// Of arrays, which C++ does not know without elements.
constexpr int AtLeastOne(int count) { return count > 0 ? count : 1; }

template <class V, int kStates, int kOutputs>
struct Element {
  V weight;
  V gradient;
  V state[AtLeastOne(kStates)];
  V output[AtLeastOne(kOutputs)];
};

}  // namespace heddle::ops::HEDDLE_FORMULAS
HEDDLE_AFTER_FORMULAS();

#endif  // per-target include guard
