#include "ops/fan_out.h"

#include <algorithm>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/fan_out.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/copy.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// Streams whole groups of lines; returns the bytes done. All of `out` are aligned to 64 bytes.
std::size_t FanOutForTarget(const std::uint8_t* source, void* const* out, std::size_t count,
                            std::size_t bytes) {
  const hn::CappedTag<std::uint8_t, 64> d;
  constexpr std::size_t kUnroll = 4;
  const std::size_t group = kUnroll * hn::Lanes(d);
  std::size_t i = 0;
  for (; i + group <= bytes; i += group) {
    hn::Vec<decltype(d)> v[kUnroll];
    for (std::size_t u = 0; u < kUnroll; ++u) v[u] = hn::LoadU(d, source + i + u * hn::Lanes(d));
    for (std::size_t k = 0; k < count; ++k) {
      std::uint8_t* const to = static_cast<std::uint8_t*>(out[k]) + i;
      for (std::size_t u = 0; u < kUnroll; ++u) hn::Stream(v[u], d, to + u * hn::Lanes(d));
    }
  }
  hwy::FlushStream();
  return i;
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(FanOutForTarget);

void FanOut(const void* source, std::span<void* const> out, std::size_t bytes, StoreMode mode) {
  const auto aligned = [](void* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; };
  std::size_t done = 0;
  if (out.size() > 1 && UseStreaming(mode, bytes * (out.size() + 1)) &&
      std::all_of(out.begin(), out.end(), aligned)) {
    done = HWY_DYNAMIC_DISPATCH(FanOutForTarget)(static_cast<const std::uint8_t*>(source),
                                                 out.data(), out.size(), bytes);
    mode = StoreMode::kCached;  // what is left is less than a group
  }
  for (void* to : out) {
    Copy(static_cast<const std::uint8_t*>(source) + done, static_cast<std::uint8_t*>(to) + done,
         bytes - done, mode);
  }
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
