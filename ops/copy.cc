#include "ops/copy.h"

#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/copy.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

void CopyForTarget(const std::uint8_t* source, std::uint8_t* out, std::size_t bytes,
                   bool streaming) {
  Map(out, bytes, streaming,
      [=](auto d, std::size_t i) HWY_ATTR { return hn::LoadU(d, source + i); });
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(CopyForTarget);

void Copy(const void* source, void* out, std::size_t bytes, StoreMode mode) {
  // memcpy is at its best inside the second-level cache. Beyond, its microcoded string copy reached
  // 21 GB/s where plain vectors reached 25.
  constexpr std::size_t kMemcpyBytesMax = std::size_t{1} << 20;
  if (bytes == 0 || source == out) return;
  const bool streaming = UseStreaming(mode, 2 * bytes);
  if (!streaming && bytes <= kMemcpyBytesMax) {
    std::memcpy(out, source, bytes);
    return;
  }
  HWY_DYNAMIC_DISPATCH(CopyForTarget)
  (static_cast<const std::uint8_t*>(source), static_cast<std::uint8_t*>(out), bytes, streaming);
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
