// Element-wise updates of optimizers: a formula over vectors, applied to a run of elements in one
// pass over memory, once for each SIMD target.
//
// A .cc file includes this inside Highway's foreach_target.h scheme (kvstore/optimizer/adam.cc is
// an example). Its formula, in a header of its own (ops/formula-inl.h), says how one element
// changes, as if it were plain arithmetic:
//
//   template <class Gradient>
//   struct SgdFormula : Formula<Gradient> {
//     using C = typename Gradient::Number;
//     Gradient gradient;
//     C rate;
//     template <class E>
//     HEDDLE_FORMULA void operator()(E& e) const {
//       e.weight = e.weight - rate * gradient.Scaled(e.gradient);
//     }
//   };
//
// float64 is computed in float64, all else in float32 with the numbers rounded to float32. Each
// operation is rounded on its own, in the order written. float16 and bfloat16 values and states
// without a float32 copy are rounded when they are stored; what a formula reads again of what it
// has set is not yet rounded. The bits are the same for every SIMD target and cut into runs (of a
// NaN, only that it is one).

#if defined(HEDDLE_OPS_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_OPS_UPDATE_INL_H_
#undef HEDDLE_OPS_UPDATE_INL_H_
#else
#define HEDDLE_OPS_UPDATE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <limits>

#include <hwy/highway.h>

#include "base/check.h"
#include "ops/fetch_ahead.h"
#include "ops/formula-inl.h"
#include "ops/simd-inl.h"
#include "ops/update.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// A vector with operators; numbers stand for vectors of them.
template <class D>
struct Lanes {
  using Number = hn::TFromD<D>;

  hn::Vec<D> v;

  static HWY_INLINE Lanes Of(Number number) { return {hn::Set(D(), number)}; }

  friend HWY_INLINE Lanes operator+(Lanes a, Lanes b) { return {hn::Add(a.v, b.v)}; }
  friend HWY_INLINE Lanes operator-(Lanes a, Lanes b) { return {hn::Sub(a.v, b.v)}; }
  friend HWY_INLINE Lanes operator*(Lanes a, Lanes b) { return {hn::Mul(a.v, b.v)}; }
  friend HWY_INLINE Lanes operator/(Lanes a, Lanes b) { return {hn::Div(a.v, b.v)}; }
  friend HWY_INLINE Lanes operator-(Lanes a) { return {hn::Neg(a.v)}; }

  friend HWY_INLINE Lanes operator+(Lanes a, Number b) { return a + Of(b); }
  friend HWY_INLINE Lanes operator+(Number a, Lanes b) { return Of(a) + b; }
  friend HWY_INLINE Lanes operator*(Lanes a, Number b) { return a * Of(b); }
  friend HWY_INLINE Lanes operator*(Number a, Lanes b) { return Of(a) * b; }
  friend HWY_INLINE Lanes operator/(Lanes a, Number b) { return a / Of(b); }

  friend HWY_INLINE Lanes Sqrt(Lanes a) { return {hn::Sqrt(a.v)}; }
  friend HWY_INLINE Lanes Abs(Lanes a) { return {hn::Abs(a.v)}; }
  // Of a and b the greater; of a NaN and a number, a NaN if it is b.
  friend HWY_INLINE Lanes Max(Lanes a, Lanes b) {
    return {hn::IfThenElse(hn::Gt(a.v, b.v), a.v, b.v)};
  }
  // 1, -1, or 0 for zeros and NaN.
  friend HWY_INLINE Lanes Sign(Lanes a) {
    const auto zero = hn::Zero(D());
    const auto one = hn::Set(D(), Number{1});
    return {hn::Sub(hn::IfThenElseZero(hn::Gt(a.v, zero), one),
                    hn::IfThenElseZero(hn::Lt(a.v, zero), one))};
  }
  // a limited to [-limit, limit]; a NaN stays.
  friend HWY_INLINE Lanes Clip(Lanes a, Number limit) {
    return {ClipTo(D(), a.v, hn::Set(D(), limit))};
  }
  // 0 where a <= b, `otherwise` elsewhere, so also where a is no number.
  friend HWY_INLINE Lanes ZeroIfAtMost(Lanes a, Number b, Lanes otherwise) {
    return {hn::IfThenZeroElse(hn::Le(a.v, hn::Set(D(), b)), otherwise.v)};
  }
  // 0 where a is 0, `otherwise` elsewhere.
  friend HWY_INLINE Lanes ZeroIfZero(Lanes a, Lanes otherwise) {
    return {hn::IfThenZeroElse(hn::Eq(a.v, hn::Zero(D())), otherwise.v)};
  }
};

// weight and gradient of T, `state` the weight that is read: the same array, or a master copy.
// `stores`: of the weight if it is not read.
template <class F, typename T, typename C = typename F::Number>
HWY_NOINLINE void ApplyDirect(const F& formula, T* weight, const T* gradient, C* state,
                              C* const* states, C* const* outputs, std::size_t count,
                              StoreMode stores) {
  C* state_of[HWY_MAX(F::kStates, 1)] = {};
  C* output_of[HWY_MAX(F::kOutputs, 1)] = {};
  for (int k = 0; k < F::kStates; ++k) state_of[k] = states[k];
  for (int k = 0; k < F::kOutputs; ++k) output_of[k] = outputs[k];
  constexpr bool kWeightApart = !std::is_same_v<T, C>;
  constexpr std::size_t kElementBytes =
      sizeof(T) + (kWeightApart ? sizeof(T) : 0) + (1 + F::kStates) * sizeof(C);
  // The hardware's prefetchers fall behind where they have to follow two arrays or more. 0:
  // what is read next anyway, which costs next to nothing.
  const std::size_t ahead = FetchAheadBytes() / kElementBytes;
  // Past the caches, where the weight would be read only to be overwritten: up to a seventh of all
  // bytes.
  constexpr std::size_t kTouchedBytes = kElementBytes + (1 + F::kStates) * sizeof(C);
  constexpr bool kMayStream =
      kWeightApart && (!std::is_same_v<T, Float16> || kHasFloat16Conversion);
  const std::size_t vector_bytes = hn::Lanes(hn::ScalableTag<C>()) * sizeof(T);
  const bool streams = kMayStream && vector_bytes >= 16 &&
                       UseStreaming(stores, count * kTouchedBytes) &&
                       reinterpret_cast<std::uintptr_t>(weight) % vector_bytes == 0;
  ForEachVector<C>(count, [=](auto d, std::size_t i) HWY_ATTR {
    using V = Lanes<decltype(d)>;
    hwy::Prefetch(state + i + ahead);
    hwy::Prefetch(gradient + i + ahead);
    if (kWeightApart && !streams) hwy::Prefetch(weight + i + ahead);
    for (int k = 0; k < F::kStates; ++k) hwy::Prefetch(state_of[k] + i + ahead);
    Element<V, F::kStates, F::kOutputs> e;
    e.weight = V{LoadAs(d, state + i)};
    e.gradient = V{LoadAs(d, gradient + i)};
    for (int k = 0; k < F::kStates; ++k) e.state[k] = V{LoadAs(d, state_of[k] + i)};
    formula(e);
    for (int k = 0; k < F::kOutputs; ++k) StoreAs<false>(e.output[k].v, d, output_of[k] + i);
    if constexpr (F::kWritesStates) {
      for (int k = 0; k < F::kStates; ++k) StoreAs<false>(e.state[k].v, d, state_of[k] + i);
    }
    if constexpr (F::kWritesWeight) {
      StoreAs<false>(e.weight.v, d, state + i);
      if constexpr (kMayStream && hn::MaxLanes(decltype(d)()) * sizeof(T) >= 16) {
        if (streams) return StoreAs<true>(e.weight.v, d, weight + i);
      }
      if constexpr (kWeightApart) StoreAs<false>(e.weight.v, d, weight + i);
    }
  });
  if (streams) hwy::FlushStream();
}

template <typename T, typename C>
HWY_NOINLINE void Convert(const T* from, C* to, std::size_t count) {
  using Wide = std::conditional_t<std::is_same_v<C, double>, double, float>;
  ForEachVector<Wide>(count, [=](auto d, std::size_t i)
                                 HWY_ATTR { StoreAs<false>(LoadAs(d, from + i), d, to + i); });
}

// float16 and bfloat16 without a master copy: through copies that the first level cache holds.
template <class F, typename T>
HWY_INLINE void ApplyRounded(const F& formula, T* weight, const T* gradient, void* const* states,
                             float* const* outputs, std::size_t count) {
  constexpr std::size_t kChunk = 512;
  HWY_ALIGN float wide[kChunk];
  HWY_ALIGN float state_chunks[HWY_MAX(F::kStates, 1)][kChunk];
  for (std::size_t i = 0; i < count; i += kChunk) {
    const std::size_t n = std::min(kChunk, count - i);
    float* state_of[HWY_MAX(F::kStates, 1)] = {};
    float* output_of[HWY_MAX(F::kOutputs, 1)] = {};
    Convert(weight + i, wide, n);
    for (int k = 0; k < F::kStates; ++k) {
      state_of[k] = state_chunks[k];
      Convert(static_cast<const T*>(states[k]) + i, state_of[k], n);
    }
    for (int k = 0; k < F::kOutputs; ++k) output_of[k] = outputs[k] + i;
    ApplyDirect(formula, weight + i, gradient + i, wide, state_of, output_of, n,
                StoreMode::kCached);
    if constexpr (F::kWritesStates) {
      for (int k = 0; k < F::kStates; ++k) {
        Convert(state_of[k], static_cast<T*>(states[k]) + i, n);
      }
    }
  }
}

template <class F, typename T>
HWY_INLINE void ApplyTo16Bit(const F& formula, const UpdateArrays& a, void* const* outputs) {
  T* const weight = static_cast<T*>(a.weight);
  const T* const gradient = static_cast<const T*>(a.gradient);
  float* output_of[HWY_MAX(F::kOutputs, 1)] = {};
  for (int k = 0; k < F::kOutputs; ++k) output_of[k] = static_cast<float*>(outputs[k]);
  if (a.master == nullptr) {
    ApplyRounded(formula, weight, gradient, a.states.data(), output_of, a.count);
    return;
  }
  float* state_of[HWY_MAX(F::kStates, 1)] = {};
  for (int k = 0; k < F::kStates; ++k) state_of[k] = static_cast<float*>(a.states[k]);
  ApplyDirect(formula, weight, gradient, a.master, state_of, output_of, a.count, a.weight_stores);
}

template <class F, typename C>
HWY_INLINE void ApplyToPlain(const F& formula, const UpdateArrays& a, void* const* outputs) {
  C* const weight = static_cast<C*>(a.weight);
  C* state_of[HWY_MAX(F::kStates, 1)] = {};
  C* output_of[HWY_MAX(F::kOutputs, 1)] = {};
  for (int k = 0; k < F::kStates; ++k) state_of[k] = static_cast<C*>(a.states[k]);
  for (int k = 0; k < F::kOutputs; ++k) output_of[k] = static_cast<C*>(outputs[k]);
  ApplyDirect(formula, weight, static_cast<const C*>(a.gradient), weight, state_of, output_of,
              a.count, StoreMode::kCached);
}

template <typename C, bool kClip, class MakeFormula>
HWY_INLINE void ApplyFor(const UpdateArrays& a, const GradientOptions& options,
                         void* const* outputs, const MakeFormula& make) {
  const GradientOf<C, kClip> gradient{static_cast<C>(options.rescale),
                                      static_cast<C>(options.limit)};
  const auto formula = make(gradient);
  using F = decltype(make(gradient));
  if constexpr (std::is_same_v<C, double>) {
    ApplyToPlain<F, double>(formula, a, outputs);
  } else if (a.dtype == DType::kFloat32) {
    ApplyToPlain<F, float>(formula, a, outputs);
  } else if (a.dtype == DType::kFloat16) {
    ApplyTo16Bit<F, Float16>(formula, a, outputs);
  } else {
    DCHECK(a.dtype == DType::kBFloat16);
    ApplyTo16Bit<F, BFloat16>(formula, a, outputs);
  }
}

// Applies make(gradient), for the GradientOf that fits dtype and options, to the run. `outputs`:
// F::kOutputs arrays of float, or of double for float64.
template <class MakeFormula>
HWY_INLINE void Apply(const UpdateArrays& a, const GradientOptions& options,
                      const MakeFormula& make, void* const* outputs = nullptr) {
  if (a.dtype == DType::kFloat64) {
    // One kernel less to compile: no limit is the greatest one.
    GradientOptions limited = options;
    if (limited.limit == 0) limited.limit = std::numeric_limits<double>::infinity();
    ApplyFor<double, true>(a, limited, outputs, make);
  } else if (static_cast<float>(options.limit) > 0) {
    ApplyFor<float, true>(a, options, outputs, make);
  } else {
    ApplyFor<float, false>(a, options, outputs, make);
  }
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
