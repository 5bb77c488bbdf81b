#include "ops/sum.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "ops/fetch_ahead.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sum.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// A way to sum elements of type T says how a vector of them is loaded into an accumulator, added to
// another and stored; and, if its accumulators are floats, how they are put aside and taken up.

// Element by element, in the lanes of D.
template <typename T, class D>
struct LaneSum {
  using Accumulator = hn::Vec<D>;
  static constexpr bool kCanStream = std::is_same_v<T, hn::TFromD<D>> || kHasFloat16Conversion;
  D d;
  HWY_INLINE std::size_t lanes() const { return hn::Lanes(d); }
  HWY_INLINE Accumulator Load(const T* p) const { return LoadAs(d, p); }
  HWY_INLINE Accumulator Add(Accumulator a, Accumulator b) const { return hn::Add(a, b); }
  HWY_INLINE void PutAside(Accumulator sum, float* p) const { hn::StoreU(sum, d, p); }
  HWY_INLINE Accumulator TakeUp(const float* p) const { return hn::LoadU(d, p); }
  template <bool kStream>
  HWY_INLINE void Store(Accumulator sum, T* p) const {
    StoreAs<kStream>(sum, d, p);
  }
};

#if HWY_TARGET != HWY_SCALAR
// bfloat16 two elements a lane: the even ones are the lower halves, the odd ones the upper halves
// of 32-bit lanes, so nothing has to be shuffled.
struct BFloat16PairSum {
  hn::ScalableTag<float> d;
  hn::ScalableTag<std::uint32_t> d32;
  struct Accumulator {
    hn::Vec<hn::ScalableTag<float>> even;
    hn::Vec<hn::ScalableTag<float>> odd;
  };
  static constexpr bool kCanStream = true;
  HWY_INLINE std::size_t lanes() const { return 2 * hn::Lanes(d); }
  HWY_INLINE Accumulator Load(const BFloat16* p) const {
    const hn::ScalableTag<std::uint16_t> d16;
    const auto pair = hn::BitCast(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p)));
    return {hn::BitCast(d, hn::ShiftLeft<16>(pair)),
            hn::BitCast(d, hn::And(pair, hn::Set(d32, 0xFFFF0000u)))};
  }
  HWY_INLINE Accumulator Add(Accumulator a, Accumulator b) const {
    return {hn::Add(a.even, b.even), hn::Add(a.odd, b.odd)};
  }
  HWY_INLINE void PutAside(Accumulator sum, float* p) const {
    hn::StoreU(sum.even, d, p);
    hn::StoreU(sum.odd, d, p + hn::Lanes(d));
  }
  HWY_INLINE Accumulator TakeUp(const float* p) const {
    return {hn::LoadU(d, p), hn::LoadU(d, p + hn::Lanes(d))};
  }
  template <bool kStream>
  HWY_INLINE void Store(Accumulator sum, BFloat16* p) const {
    const hn::ScalableTag<std::uint16_t> d16;
    const auto lower = hn::ShiftRight<16>(RoundToBFloat16(d, sum.even));
    const auto upper = hn::And(RoundToBFloat16(d, sum.odd), hn::Set(d32, 0xFFFF0000u));
    StoreLanes<kStream>(hn::BitCast(d16, hn::Or(lower, upper)), d16,
                        reinterpret_cast<std::uint16_t*>(p));
  }
};
using WideBFloat16Sum = BFloat16PairSum;
#else  // its only vectors are single elements
using WideBFloat16Sum = LaneSum<BFloat16, hn::CappedTag<float, 1>>;
#endif

// Logical or of bytes.
template <class D>
struct BoolSum {
  using Accumulator = hn::Vec<D>;
  static constexpr bool kCanStream = true;
  D d;
  HWY_INLINE std::size_t lanes() const { return hn::Lanes(d); }
  HWY_INLINE Accumulator Load(const std::uint8_t* p) const { return hn::LoadU(d, p); }
  HWY_INLINE Accumulator Add(Accumulator a, Accumulator b) const { return hn::Or(a, b); }
  template <bool kStream>
  HWY_INLINE void Store(Accumulator sum, std::uint8_t* p) const {
    StoreLanes<kStream>(hn::Min(sum, hn::Set(d, 1)), d, p);
  }
};

// Sums [begin, count) in steps of kUnroll vectors; returns where it stopped, less than a step
// before count. Taking the inputs in turn inside a step keeps each one's reads in runs of several
// cache lines.
template <std::size_t kUnroll, bool kStream, class Way, typename T>
HWY_INLINE std::size_t SumSteps(Way way, std::span<const void* const> inputs, T* out,
                                std::size_t begin, std::size_t count) {
  const std::size_t lanes = way.lanes();
  std::size_t i = begin;
  for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
    typename Way::Accumulator sum[kUnroll];
    const T* first = static_cast<const T*>(inputs[0]) + i;
    for (std::size_t u = 0; u < kUnroll; ++u) sum[u] = way.Load(first + u * lanes);
    for (std::size_t k = 1; k < inputs.size(); ++k) {
      const T* next = static_cast<const T*>(inputs[k]) + i;
      for (std::size_t u = 0; u < kUnroll; ++u) {
        sum[u] = way.Add(sum[u], way.Load(next + u * lanes));
      }
    }
    for (std::size_t u = 0; u < kUnroll; ++u) {
      way.template Store<kStream>(sum[u], out + i + u * lanes);
    }
  }
  return i;
}

// What SumSteps left over at the end.
template <class Wide, class One, typename T>
HWY_INLINE void SumRest(Wide wide, One one, std::span<const void* const> inputs, T* out,
                        std::size_t begin, std::size_t count) {
  if (begin == count) return;
  const std::size_t i = SumSteps<1, false>(wide, inputs, out, begin, count);
  SumSteps<1, false>(one, inputs, out, i, count);
}

template <class Wide, class One, typename T>
HWY_INLINE void SumCached(Wide wide, One one, std::span<const void* const> inputs, T* out,
                          std::size_t count) {
  const std::size_t i = SumSteps<4, false>(wide, inputs, out, 0, count);
  SumRest(wide, one, inputs, out, i, count);
}

// Streams in runs of kUnroll vectors.
template <std::size_t kUnroll, class Wide, class One, typename T>
HWY_INLINE void SumStreaming(Wide wide, One one, std::span<const void* const> inputs, T* out,
                             std::size_t count) {
  const std::size_t vector_bytes = wide.lanes() * sizeof(T);
  if (!Wide::kCanStream || vector_bytes < 16) return SumCached(wide, one, inputs, out, count);
  const std::size_t head = ElementsToAlignment(out, vector_bytes, count);
  std::size_t i = SumSteps<1, false>(one, inputs, out, 0, head);
  i = SumSteps<kUnroll, true>(wide, inputs, out, i, count);
  hwy::FlushStream();
  SumRest(wide, one, inputs, out, i, count);
}

// How many elements of each of so many inputs to fetch ahead. A vector of bfloat16 takes four
// instructions where one of float takes one, so the processor's window reaches a quarter as far:
// nine arrays of 4 MiB are summed 40% faster when their lines are fetched. The more inputs, the
// fewer bytes of all of them, or they drive out what is at work; two the hardware fetches as well.
template <typename T, std::size_t kInputs>
HWY_INLINE std::size_t FetchAhead() {
  if constexpr (!std::is_same_v<T, BFloat16> || kInputs < 3) return 0;
  constexpr std::size_t kEighths = kInputs <= 12 ? 7 : kInputs <= 14 ? 6 : 5;
  constexpr std::size_t kLineBytes = 64;
  return FetchAheadBytes() / 8 * kEighths / kInputs / kLineBytes * kLineBytes / sizeof(T);
}

// The same as SumCached or SumStreaming for a number of inputs that the compiler knows, vector by
// vector: what lies in the first-level cache is summed up to 30% faster, what streams from memory
// up to twice as fast.
template <bool kStream, class Wide, class One, typename T, std::size_t kInputs>
void SumFixed(std::span<const void* const> inputs, T* out, std::size_t count) {
  const Wide wide{};
  const T* in[kInputs];
  for (std::size_t k = 0; k < kInputs; ++k) in[k] = static_cast<const T*>(inputs[k]);
  const std::size_t ahead = kStream ? FetchAhead<T, kInputs>() : 0;
  const auto sum_vector = [&](std::size_t i) HWY_ATTR {
    if (kStream && ahead > 0) {
      for (std::size_t k = 0; k < kInputs; ++k) hwy::Prefetch(in[k] + i + ahead);
    }
    auto sum = wide.Load(in[0] + i);
    for (std::size_t k = 1; k < kInputs; ++k) sum = wide.Add(sum, wide.Load(in[k] + i));
    wide.template Store<kStream>(sum, out + i);
  };
  const std::size_t lanes = wide.lanes();
  std::size_t i = 0;
  if constexpr (kStream) {
    i = SumSteps<1, false>(One{}, inputs, out, 0,
                           ElementsToAlignment(out, lanes * sizeof(T), count));
  }
  if constexpr (kInputs <= 8) {  // more fill the processor's window by themselves
    for (; i + 4 * lanes <= count; i += 4 * lanes) {
      sum_vector(i);
      sum_vector(i + lanes);
      sum_vector(i + 2 * lanes);
      sum_vector(i + 3 * lanes);
    }
  }
  for (; i + lanes <= count; i += lanes) sum_vector(i);
  if constexpr (kStream) hwy::FlushStream();
  if (i != count) SumSteps<1, false>(One{}, inputs, out, i, count);
}

// With very many inputs the processor loses track of which lines come next, so groups of them take
// turns. Putting sums aside costs something too.
constexpr std::size_t kGroup = 8;
// Elements whose sums lie in the second-level cache between one group of inputs and the next: the
// longer, the fewer times the processor has to learn where a group's lines lie.
constexpr std::size_t kBlock = 32768;

// One group's share of the elements [begin, end), whole vectors: kFirst starts the sums, the others
// go on with them, and kLast writes them to the output.
enum class Turn { kFirst, kMiddle, kLast };
template <Turn kTurn, std::size_t kInputs, class Wide, typename T>
void SumGroup(std::span<const void* const> inputs, float* sums, T* out, std::size_t begin,
              std::size_t end) {
  const Wide wide{};
  const T* in[kInputs];
  for (std::size_t k = 0; k < kInputs; ++k) in[k] = static_cast<const T*>(inputs[k]);
  for (std::size_t i = begin; i < end; i += wide.lanes()) {
    auto sum = wide.Load(in[0] + i);
    if constexpr (kTurn != Turn::kFirst) sum = wide.Add(wide.TakeUp(sums + (i - begin)), sum);
    for (std::size_t k = 1; k < kInputs; ++k) sum = wide.Add(sum, wide.Load(in[k] + i));
    if constexpr (kTurn == Turn::kLast) {
      wide.template Store<true>(sum, out + i);
    } else {
      wide.PutAside(sum, sums + (i - begin));
    }
  }
}

template <class Wide, typename T, std::size_t... kIndices>
constexpr auto MakeSumLast(std::index_sequence<kIndices...>) {
  using Function =
      void (*)(std::span<const void* const>, float*, T*, std::size_t begin, std::size_t end);
  return std::array<Function, sizeof...(kIndices)>{
      &SumGroup<Turn::kLast, kIndices + 1, Wide, T>...};
}

// Streams a sum of more than kGroup inputs, block by block.
template <class Wide, class One, typename T>
void SumGroups(std::span<const void* const> inputs, T* out, std::size_t count) {
  static constexpr auto kLast = MakeSumLast<Wide, T>(std::make_index_sequence<kGroup>());
  const std::size_t lanes = Wide{}.lanes();
  HWY_ALIGN float sums[kBlock];
  std::size_t i =
      SumSteps<1, false>(One{}, inputs, out, 0, ElementsToAlignment(out, lanes * sizeof(T), count));
  while (count - i >= lanes) {
    const std::size_t end = i + std::min(kBlock, (count - i) / lanes * lanes);
    auto rest = inputs;
    SumGroup<Turn::kFirst, kGroup, Wide, T>(rest.first(kGroup), sums, out, i, end);
    for (rest = rest.subspan(kGroup); rest.size() > kGroup; rest = rest.subspan(kGroup)) {
      SumGroup<Turn::kMiddle, kGroup, Wide, T>(rest.first(kGroup), sums, out, i, end);
    }
    kLast[rest.size() - 1](rest, sums, out, i, end);
    i = end;
  }
  hwy::FlushStream();
  if (i != count) SumSteps<1, false>(One{}, inputs, out, i, count);
}

template <typename T>
using SumFixedFunction = void (*)(std::span<const void* const>, T*, std::size_t);
template <bool kStream, class Wide, class One, typename T, std::size_t... kIndices>
constexpr auto MakeSumFixed(std::index_sequence<kIndices...>) {
  return std::array<SumFixedFunction<T>, sizeof...(kIndices)>{
      &SumFixed<kStream, Wide, One, T, kIndices + 2>...};
}
constexpr std::size_t kMostFixed = 16;
// SumFixed of 2, 3, ... kMostFixed inputs.
template <bool kStream, class Wide, class One, typename T>
inline constexpr auto kSumFixed =
    MakeSumFixed<kStream, Wide, One, T>(std::make_index_sequence<kMostFixed - 1>());

template <class Wide, class One, typename T>
HWY_INLINE void SumAny(Wide wide, One one, std::span<const void* const> inputs, T* out,
                       std::size_t count, bool streaming) {
  if (streaming) {
    SumStreaming<8>(wide, one, inputs, out, count);
  } else {
    SumCached(wide, one, inputs, out, count);
  }
}

template <class Wide, class One, typename T>
HWY_INLINE void SumCommon(std::span<const void* const> inputs, T* out, std::size_t count,
                          bool streaming) {
  const bool streams = streaming && Wide{}.lanes() * sizeof(T) >= 16;
  const bool known = inputs.size() >= 2 && inputs.size() <= kMostFixed;
  if (streams && inputs.size() > kMostFixed) {
    SumGroups<Wide, One, T>(inputs, out, count);
  } else if (!known) {
    SumAny(Wide{}, One{}, inputs, out, count, streaming);
  } else {
    const std::size_t of = inputs.size() - 2;
    const auto sum =
        streams ? kSumFixed<true, Wide, One, T>[of] : kSumFixed<false, Wide, One, T>[of];
    sum(inputs, out, count);
  }
}

void SumFloat(std::span<const void* const> inputs, float* out, std::size_t count, bool streaming) {
  SumCommon<LaneSum<float, hn::ScalableTag<float>>, LaneSum<float, hn::CappedTag<float, 1>>>(
      inputs, out, count, streaming);
}

void SumBFloat16(std::span<const void* const> inputs, BFloat16* out, std::size_t count,
                 bool streaming) {
  SumCommon<WideBFloat16Sum, LaneSum<BFloat16, hn::CappedTag<float, 1>>>(inputs, out, count,
                                                                         streaming);
}

void SumOthers(DType dtype, std::span<const void* const> inputs, void* out, std::size_t count,
               bool streaming) {
  DispatchDType(dtype, [&](auto type) HWY_ATTR {
    using T = typename decltype(type)::type;
    using C = ComputeType<T>;
    if constexpr (std::is_same_v<T, bool>) {
      SumAny(BoolSum<hn::ScalableTag<std::uint8_t>>{}, BoolSum<hn::CappedTag<std::uint8_t, 1>>{},
             inputs, static_cast<std::uint8_t*>(out), count, streaming);
    } else if constexpr (!std::is_same_v<T, float> && !std::is_same_v<T, BFloat16>) {
      SumAny(LaneSum<T, hn::ScalableTag<C>>{}, LaneSum<T, hn::CappedTag<C, 1>>{}, inputs,
             static_cast<T*>(out), count, streaming);
    }
  });
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(SumFloat);
HWY_EXPORT(SumBFloat16);
HWY_EXPORT(SumOthers);

void Sum(DType dtype, std::span<const void* const> inputs, void* out, std::size_t count,
         StoreMode mode) {
  CHECK(!inputs.empty());
  const auto streams = [&](std::size_t element_bytes) {
    // Streaming over an input would first have to push its lines out of the caches.
    return UseStreaming(mode, (inputs.size() + 1) * count * element_bytes) &&
           std::find(inputs.begin(), inputs.end(), out) == inputs.end();
  };
  if (dtype == DType::kFloat32) {
    HWY_DYNAMIC_DISPATCH(SumFloat)
    (inputs, static_cast<float*>(out), count, streams(sizeof(float)));
  } else if (dtype == DType::kBFloat16) {
    HWY_DYNAMIC_DISPATCH(SumBFloat16)
    (inputs, static_cast<BFloat16*>(out), count, streams(sizeof(BFloat16)));
  } else {
    HWY_DYNAMIC_DISPATCH(SumOthers)(dtype, inputs, out, count, streams(SizeOf(dtype)));
  }
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
