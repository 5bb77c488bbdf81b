// The pairs that training uses (float32 with each 16-bit float) are vectorised by hand; the others
// are plain loops over Convert, which the compiler vectorises as far as it can.
#include "ops/cast.h"

#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cast.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/convert.h"
#include "ops/copy.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// From and To are float and a 16-bit float, either way round.
template <typename From, typename To>
void CastVectors(const From* source, To* out, std::size_t count, bool streaming) {
  Map(out, count, streaming, [=](auto d, std::size_t i) HWY_ATTR { return LoadAs(d, source + i); });
}

void Float16ToFloat(const Float16* source, float* out, std::size_t count, bool streaming) {
  CastVectors(source, out, count, streaming);
}
void BFloat16ToFloat(const BFloat16* source, float* out, std::size_t count, bool streaming) {
  CastVectors(source, out, count, streaming);
}
void FloatToFloat16(const float* source, Float16* out, std::size_t count, bool streaming) {
  CastVectors(source, out, count, streaming);
}
void FloatToBFloat16(const float* source, BFloat16* out, std::size_t count, bool streaming) {
  CastVectors(source, out, count, streaming);
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(Float16ToFloat);
HWY_EXPORT(BFloat16ToFloat);
HWY_EXPORT(FloatToFloat16);
HWY_EXPORT(FloatToBFloat16);

namespace {

template <typename From, typename To>
void CastElements(const StorageType<From>* source, StorageType<To>* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<From, bool>) {
      out[i] = Convert<To>(source[i] != 0);
    } else {
      out[i] = Convert<To>(source[i]);
    }
  }
}

}  // namespace

void Cast(DType from, const void* source, DType to, void* out, std::size_t count, StoreMode mode) {
  const std::size_t bytes = count * (SizeOf(from) + SizeOf(to));
  if (from == to) return Copy(source, out, count * SizeOf(to), mode);
  DispatchDType(from, [&](auto from_type) {
    using From = typename decltype(from_type)::type;
    DispatchDType(to, [&](auto to_type) {
      using To = typename decltype(to_type)::type;
      const auto* typed_source = static_cast<const StorageType<From>*>(source);
      auto* typed_out = static_cast<StorageType<To>*>(out);
      [[maybe_unused]] const bool streaming = UseStreaming(mode, bytes);
      if constexpr (std::is_same_v<From, Float16> && std::is_same_v<To, float>) {
        HWY_DYNAMIC_DISPATCH(Float16ToFloat)(typed_source, typed_out, count, streaming);
      } else if constexpr (std::is_same_v<From, BFloat16> && std::is_same_v<To, float>) {
        HWY_DYNAMIC_DISPATCH(BFloat16ToFloat)(typed_source, typed_out, count, streaming);
      } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, Float16>) {
        HWY_DYNAMIC_DISPATCH(FloatToFloat16)(typed_source, typed_out, count, streaming);
      } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, BFloat16>) {
        HWY_DYNAMIC_DISPATCH(FloatToBFloat16)(typed_source, typed_out, count, streaming);
      } else if constexpr (!std::is_same_v<From, To>) {
        CastElements<From, To>(typed_source, typed_out, count);
      }
    });
  });
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
