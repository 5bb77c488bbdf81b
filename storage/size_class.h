// The sizes of blocks that pools keep: multiples of 64 bytes up to 512, then eight to a doubling,
// so that a block wastes less than an eighth.
#pragma once

#include <bit>
#include <cstdint>

#include "storage/allocator.h"

namespace heddle::storage {

inline constexpr int kLinearClasses = 8;  // 64, 128, ... 512
inline constexpr int kStepBits = 3;       // eight classes to a doubling
inline constexpr int kLinearBits = 9;     // 512 = 2^9
inline constexpr int kSizeClasses = kLinearClasses + ((62 - kLinearBits) << kStepBits);
inline constexpr std::int64_t kBlockBytesMax = std::int64_t{1} << 61;  // no pool has larger ones

struct SizeClass {
  int index;
  std::int64_t bytes;
};

// The class of blocks of `bytes`, in [1, 2^62].
inline SizeClass ClassOf(std::int64_t bytes) {
  if (bytes <= std::int64_t{1} << kLinearBits) {
    const auto index = static_cast<int>((bytes - 1) / kBlockAlignment);
    return {index, (index + 1) * kBlockAlignment};
  }
  // bytes - 1 = 1xyz..., binary: its three digits after the first pick the step within the
  // doubling.
  const auto last = static_cast<std::uint64_t>(bytes - 1);
  const int exponent = std::bit_width(last) - 1;
  const auto step = static_cast<std::int64_t>(last >> (exponent - kStepBits)) - (1 << kStepBits);
  const std::int64_t unit = std::int64_t{1} << (exponent - kStepBits);
  return {kLinearClasses + ((exponent - kLinearBits) << kStepBits) + static_cast<int>(step),
          (std::int64_t{1} << exponent) + (step + 1) * unit};
}

// What a pool takes of its cap for `bytes` > 0. More than kBlockBytesMax it refuses: those are as
// they are.
inline std::int64_t PoolBlockBytes(std::int64_t bytes) {
  return bytes <= kBlockBytesMax ? ClassOf(bytes).bytes : bytes;
}

// The size of the blocks of a class.
inline std::int64_t BytesOfClass(int index) {
  if (index < kLinearClasses) return (index + 1) * kBlockAlignment;
  const int exponent = kLinearBits + ((index - kLinearClasses) >> kStepBits);
  const std::int64_t step = (index - kLinearClasses) & ((1 << kStepBits) - 1);
  return (std::int64_t{1} << exponent) + ((step + 1) << (exponent - kStepBits));
}

}  // namespace heddle::storage
