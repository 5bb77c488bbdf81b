#include "ops/fill.h"

#include <bit>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/fill.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// `pattern` holds one element of `size` bytes in its low bits.
void FillForTarget(std::uint64_t pattern, std::size_t size, void* out, std::size_t count,
                   bool streaming) {
  const auto fill = [=](auto element) HWY_ATTR {
    using U = decltype(element);
    Map(static_cast<U*>(out), count, streaming,
        [=](auto d, std::size_t) HWY_ATTR { return hn::Set(d, static_cast<U>(pattern)); });
  };
  switch (size) {
    case 1:
      return fill(std::uint8_t{});
    case 2:
      return fill(std::uint16_t{});
    case 4:
      return fill(std::uint32_t{});
    default:
      return fill(std::uint64_t{});
  }
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(FillForTarget);

namespace {

template <std::size_t kSize>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using type = std::uint8_t;
};
template <>
struct UnsignedOf<2> {
  using type = std::uint16_t;
};
template <>
struct UnsignedOf<4> {
  using type = std::uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = std::uint64_t;
};

}  // namespace

std::uint64_t FillPattern(DType dtype, Scalar value) {
  return DispatchDType(dtype, [&](auto type) -> std::uint64_t {
    using T = typename decltype(type)::type;
    return std::bit_cast<typename UnsignedOf<sizeof(T)>::type>(value.As<T>());
  });
}

void Fill(DType dtype, Scalar value, void* out, std::size_t count, StoreMode mode) {
  HWY_DYNAMIC_DISPATCH(FillForTarget)
  (FillPattern(dtype, value), SizeOf(dtype), out, count, UseStreaming(mode, count * SizeOf(dtype)));
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
