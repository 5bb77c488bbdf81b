#include "ops/adam.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/adam.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// `state`, `mean` and `variance` take the update. `weight` gets the result too where it is not the
// state itself.
template <bool kClip, typename T, typename S>
HWY_INLINE void UpdateAll(const AdamParams& params, T* weight, const T* gradient, S* state, S* mean,
                          S* variance, std::size_t count) {
  using C = ComputeType<S>;
  const C rate = static_cast<C>(params.learning_rate);
  const C beta1 = static_cast<C>(params.beta1);
  const C beta2 = static_cast<C>(params.beta2);
  const C rest1 = C{1} - beta1;
  const C rest2 = C{1} - beta2;
  const C epsilon = static_cast<C>(params.epsilon);
  const C decay = static_cast<C>(params.weight_decay);
  const C rescale = static_cast<C>(params.rescale);
  const C limit = static_cast<C>(params.clip);
  ForEachVector<C>(count, [=](auto d, std::size_t i) HWY_ATTR {
    const auto w = LoadAs(d, state + i);
    auto g = hn::Add(hn::Mul(hn::Set(d, rescale), LoadAs(d, gradient + i)),
                     hn::Mul(hn::Set(d, decay), w));
    if constexpr (kClip) g = ClipTo(d, g, hn::Set(d, limit));
    const auto m =
        hn::Add(hn::Mul(hn::Set(d, beta1), LoadAs(d, mean + i)), hn::Mul(hn::Set(d, rest1), g));
    const auto v = hn::Add(hn::Mul(hn::Set(d, beta2), LoadAs(d, variance + i)),
                           hn::Mul(hn::Mul(hn::Set(d, rest2), g), g));
    const auto step =
        hn::Div(hn::Mul(hn::Set(d, rate), m), hn::Add(hn::Sqrt(v), hn::Set(d, epsilon)));
    const auto updated = hn::Sub(w, step);
    StoreAs<false>(m, d, mean + i);
    StoreAs<false>(v, d, variance + i);
    StoreAs<false>(updated, d, state + i);
    if constexpr (!std::is_same_v<T, S>) StoreAs<false>(updated, d, weight + i);
  });
}

template <typename T, typename S>
HWY_INLINE void Update(const AdamParams& params, T* weight, const void* gradient, S* state,
                       void* mean, void* variance, std::size_t count) {
  const T* g = static_cast<const T*>(gradient);
  S* m = static_cast<S*>(mean);
  S* v = static_cast<S*>(variance);
  if (params.clip >= 0) {
    UpdateAll<true>(params, weight, g, state, m, v, count);
  } else {
    UpdateAll<false>(params, weight, g, state, m, v, count);
  }
}

void UpdateForTarget(const AdamParams& params, DType dtype, void* weight, const void* gradient,
                     void* mean, void* variance, std::size_t count) {
  DispatchFloating(dtype, [&](auto type) HWY_ATTR {
    using T = typename decltype(type)::type;
    T* w = static_cast<T*>(weight);
    Update(params, w, gradient, w, mean, variance, count);
  });
}

void UpdateMultiPrecisionForTarget(const AdamParams& params, DType dtype, void* weight,
                                   const void* gradient, float* master, float* mean,
                                   float* variance, std::size_t count) {
  if (dtype == DType::kFloat16) {
    Update(params, static_cast<Float16*>(weight), gradient, master, mean, variance, count);
  } else {
    Update(params, static_cast<BFloat16*>(weight), gradient, master, mean, variance, count);
  }
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(UpdateForTarget);
HWY_EXPORT(UpdateMultiPrecisionForTarget);

void AdamUpdate(const AdamParams& params, DType dtype, void* weight, const void* gradient,
                void* mean, void* variance, std::size_t count) {
  RequireFloating("Adam update", dtype);
  HWY_DYNAMIC_DISPATCH(UpdateForTarget)(params, dtype, weight, gradient, mean, variance, count);
}

void AdamUpdateMultiPrecision(const AdamParams& params, DType dtype, void* weight,
                              const void* gradient, float* master, float* mean, float* variance,
                              std::size_t count) {
  Require16BitFloat("multi-precision Adam update", dtype);
  HWY_DYNAMIC_DISPATCH(UpdateMultiPrecisionForTarget)
  (params, dtype, weight, gradient, master, mean, variance, count);
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
