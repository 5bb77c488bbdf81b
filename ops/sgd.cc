#include "ops/sgd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sgd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// `state` and `momentum` (unless null) take the update. `weight` gets the result too where it is
// not the state itself.
template <bool kClip, typename T, typename S>
HWY_INLINE void UpdateAll(const SgdParams& params, T* weight, const T* gradient, S* state,
                          S* momentum, std::size_t count) {
  using C = ComputeType<S>;
  const C rate = static_cast<C>(params.learning_rate);
  const C decay = rate * static_cast<C>(params.weight_decay);
  const C rescale = static_cast<C>(params.rescale);
  const C mu = static_cast<C>(params.momentum);
  const C limit = static_cast<C>(params.clip);
  const C step = rate * rescale;
  ForEachVector<C>(count, [=](auto d, std::size_t i) HWY_ATTR {
    const auto w = LoadAs(d, state + i);
    const auto g = LoadAs(d, gradient + i);
    auto m = momentum != nullptr ? hn::Mul(hn::Set(d, mu), LoadAs(d, momentum + i)) : hn::Zero(d);
    m = hn::Sub(m, hn::Mul(hn::Set(d, decay), w));
    if constexpr (kClip) {
      const auto clipped = ClipTo(d, hn::Mul(hn::Set(d, rescale), g), hn::Set(d, limit));
      m = hn::Sub(m, hn::Mul(hn::Set(d, rate), clipped));
    } else {
      m = hn::Sub(m, hn::Mul(hn::Set(d, step), g));
    }
    const auto updated = hn::Add(w, m);
    if (momentum != nullptr) StoreAs<false>(m, d, momentum + i);
    StoreAs<false>(updated, d, state + i);
    if constexpr (!std::is_same_v<T, S>) StoreAs<false>(updated, d, weight + i);
  });
}

template <typename T, typename S>
HWY_INLINE void Update(const SgdParams& params, T* weight, const void* gradient, S* state,
                       void* momentum, std::size_t count) {
  const T* g = static_cast<const T*>(gradient);
  S* m = static_cast<S*>(momentum);
  if (params.clip >= 0) {
    UpdateAll<true>(params, weight, g, state, m, count);
  } else {
    UpdateAll<false>(params, weight, g, state, m, count);
  }
}

void UpdateForTarget(const SgdParams& params, DType dtype, void* weight, const void* gradient,
                     void* momentum, std::size_t count) {
  DispatchFloating(dtype, [&](auto type) HWY_ATTR {
    using T = typename decltype(type)::type;
    T* w = static_cast<T*>(weight);
    Update(params, w, gradient, w, momentum, count);
  });
}

void UpdateMultiPrecisionForTarget(const SgdParams& params, DType dtype, void* weight,
                                   const void* gradient, float* master, float* momentum,
                                   std::size_t count) {
  if (dtype == DType::kFloat16) {
    Update(params, static_cast<Float16*>(weight), gradient, master, momentum, count);
  } else {
    Update(params, static_cast<BFloat16*>(weight), gradient, master, momentum, count);
  }
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(UpdateForTarget);
HWY_EXPORT(UpdateMultiPrecisionForTarget);

void SgdUpdate(const SgdParams& params, DType dtype, void* weight, const void* gradient,
               void* momentum, std::size_t count) {
  RequireFloating("SGD update", dtype);
  HWY_DYNAMIC_DISPATCH(UpdateForTarget)(params, dtype, weight, gradient, momentum, count);
}

void SgdUpdateMultiPrecision(const SgdParams& params, DType dtype, void* weight,
                             const void* gradient, float* master, float* momentum,
                             std::size_t count) {
  Require16BitFloat("multi-precision SGD update", dtype);
  HWY_DYNAMIC_DISPATCH(UpdateMultiPrecisionForTarget)
  (params, dtype, weight, gradient, master, momentum, count);
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
