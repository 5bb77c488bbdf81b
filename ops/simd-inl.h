// Vector loads, stores and loops that the kernels share, once for each SIMD target.
//
// A .cc file includes this inside Highway's foreach_target.h scheme (see sum.cc). A kernel body is
// written once, as a template over the tag `d`; whole vectors run it with the widest tag and what
// is left over with a tag of one lane, so every element sees the same operations, wherever it lies.
// The folder is compiled with -ffp-contract=off: no target fuses a multiplication with an addition.

#if defined(HEDDLE_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_OPS_SIMD_INL_H_
#undef HEDDLE_OPS_SIMD_INL_H_
#else
#define HEDDLE_OPS_SIMD_INL_H_
#endif

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "ops/dispatch.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Whether the target converts between float16 and float32 in hardware.
inline constexpr bool kHasFloat16Conversion = HWY_TARGET != HWY_SSSE3 && HWY_TARGET != HWY_SSE4 &&
                                              HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR;

// ---- Loads: Lanes(d) elements from p, converted to the lanes of d without loss.

template <class D>
HWY_INLINE hn::Vec<D> LoadAs(D d, const hn::TFromD<D>* p) {
  return hn::LoadU(d, p);
}

template <class D>
requires std::is_same_v < hn::TFromD<D>,
float > HWY_INLINE hn::Vec<D> LoadAs(D d, const BFloat16* p) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

template <class D>
requires std::is_same_v < hn::TFromD<D>,
float > HWY_INLINE hn::Vec<D> LoadAs(D d, const Float16* p) {
  if constexpr (kHasFloat16Conversion) {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
  } else {
    HWY_ALIGN float lanes[hn::MaxLanes(d)];
    for (std::size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = static_cast<float>(p[i]);
    return hn::Load(d, lanes);
  }
}

// float, float16 and bfloat16 into double lanes.
template <class D, typename T>
requires(std::is_same_v<hn::TFromD<D>, double>&& std::is_same_v<ComputeType<T>, float>)
    HWY_INLINE hn::Vec<D> LoadAs(D d, const T* p) {
  const hn::Rebind<float, D> half;
  return hn::PromoteTo(d, LoadAs(half, p));
}

// ---- Stores: the lanes of v, rounded to T, to p. kStream: past the caches; p is aligned to the
// bytes stored, which are at least 16.

template <bool kStream, class D>
HWY_INLINE void StoreLanes(hn::Vec<D> v, D d, hn::TFromD<D>* p) {
  if constexpr (kStream) {
    hn::Stream(v, d, p);
  } else {
    hn::StoreU(v, d, p);
  }
}

template <bool kStream, class D>
HWY_INLINE void StoreAs(hn::Vec<D> v, D d, hn::TFromD<D>* p) {
  StoreLanes<kStream>(v, d, p);
}

// The bits of v rounded to bfloat16, in the upper half of each lane; the lower half is anything.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RoundToBFloat16(D /*tag*/, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7FFF)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  return hn::IfThenElse(hn::RebindMask(d32, hn::Eq(v, v)), rounded, quiet);
}

template <bool kStream, class D>
requires std::is_same_v < hn::TFromD<D>,
float > HWY_INLINE void StoreAs(hn::Vec<D> v, D d, BFloat16* p) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToSigned<D> d32;
  const auto upper = hn::ShiftRight<16>(RoundToBFloat16(d, v));
  StoreLanes<kStream>(hn::DemoteTo(d16, hn::BitCast(d32, upper)), d16,
                      reinterpret_cast<std::uint16_t*>(p));
}

template <bool kStream, class D>
requires std::is_same_v < hn::TFromD<D>,
float > HWY_INLINE void StoreAs(hn::Vec<D> v, D d, Float16* p) {
  if constexpr (kHasFloat16Conversion) {
    const hn::Rebind<hwy::float16_t, D> d16;
    const hn::Rebind<std::uint16_t, D> du16;
    StoreLanes<kStream>(hn::BitCast(du16, hn::DemoteTo(d16, v)), du16,
                        reinterpret_cast<std::uint16_t*>(p));
  } else {
    HWY_ALIGN float lanes[hn::MaxLanes(d)];
    hn::Store(v, d, lanes);
    for (std::size_t i = 0; i < hn::Lanes(d); ++i) p[i] = Float16(lanes[i]);
  }
}

// ---- Loops

// Elements before the first one of p at which a vector of `bytes` may be streamed, at most count.
template <typename T>
HWY_INLINE std::size_t ElementsToAlignment(const T* p, std::size_t bytes, std::size_t count) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(p) % bytes;
  if (past == 0) return 0;
  return (bytes - past) % sizeof(T) == 0 ? HWY_MIN((bytes - past) / sizeof(T), count) : count;
}

// Calls body(d, i) for vectors of C that together cover the elements [0, count).
template <typename C, class Body>
HWY_INLINE void ForEachVector(std::size_t count, const Body& body) {
  const hn::ScalableTag<C> d;
  const hn::CappedTag<C, 1> one;
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) body(d, i);
  for (; i < count; ++i) body(one, i);
}

// Sets out[i] for i in [0, count) to the lanes of body(d, i), a vector of ComputeType<T>.
template <typename T, class Body>
HWY_INLINE void Map(T* out, std::size_t count, bool streaming, const Body& body) {
  using C = ComputeType<T>;
  const hn::ScalableTag<C> d;
  const hn::CappedTag<C, 1> one;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  // Small vectors cannot be streamed, and emulated conversions do not stream.
  if (streaming && lanes * sizeof(T) >= 16 &&
      (!std::is_same_v<T, Float16> || kHasFloat16Conversion)) {
    const std::size_t head = ElementsToAlignment(out, lanes * sizeof(T), count);
    for (; i < head; ++i) StoreAs<false>(body(one, i), one, out + i);
    // Stores of whole cache lines in a row, apart from the loads: a third faster than alternating.
    constexpr std::size_t kUnroll = 8;
    for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
      hn::Vec<decltype(d)> v[kUnroll];
      for (std::size_t u = 0; u < kUnroll; ++u) v[u] = body(d, i + u * lanes);
      for (std::size_t u = 0; u < kUnroll; ++u) StoreAs<true>(v[u], d, out + i + u * lanes);
    }
    hwy::FlushStream();
  }
  for (; i + lanes <= count; i += lanes) StoreAs<false>(body(d, i), d, out + i);
  for (; i < count; ++i) StoreAs<false>(body(one, i), one, out + i);
}

// v limited to [-limit, limit]; a NaN stays.
template <class D>
HWY_INLINE hn::Vec<D> ClipTo(D /*tag*/, hn::Vec<D> v, hn::Vec<D> limit) {
  const auto low = hn::Neg(limit);
  const auto raised = hn::IfThenElse(hn::Lt(v, low), low, v);
  return hn::IfThenElse(hn::Gt(raised, limit), limit, raised);
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
