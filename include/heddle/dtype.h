// Element types of arrays, and the two 16-bit floating point types that C++20 lacks.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace heddle {

// The values are stable: they may be stored and sent.
enum class DType : std::uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt8 = 4,
  kUInt8 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 8,
};

inline constexpr std::array kAllDTypes = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                          DType::kBFloat16, DType::kInt8,    DType::kUInt8,
                                          DType::kInt32,    DType::kInt64,   DType::kBool};

// Bytes of one element. A bool takes one byte, 0 or 1.
constexpr std::size_t SizeOf(DType dtype) {
  constexpr std::array<std::uint8_t, kAllDTypes.size()> kSizes = {4, 8, 2, 2, 1, 1, 4, 8, 1};
  return kSizes[static_cast<std::size_t>(dtype)];
}

// "float32", "bfloat16", ...
constexpr std::string_view Name(DType dtype) {
  constexpr std::array<std::string_view, kAllDTypes.size()> kNames = {
      "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"};
  return kNames[static_cast<std::size_t>(dtype)];
}

// The inverse of Name; nothing for any other text.
constexpr std::optional<DType> ParseDType(std::string_view name) {
  for (DType dtype : kAllDTypes) {
    if (Name(dtype) == name) return dtype;
  }
  return std::nullopt;
}

// float32, float64, float16 or bfloat16.
constexpr bool IsFloating(DType dtype) { return dtype <= DType::kBFloat16; }

// IEEE 754 binary16, as storage: arithmetic is done in float. From float: round to nearest, ties to
// even; overflow becomes infinity; a NaN stays a NaN (quiet, its upper payload bits kept).
struct Float16 {
  std::uint16_t bits = 0;

  constexpr Float16() = default;
  constexpr explicit Float16(float value) : bits(Round(std::bit_cast<std::uint32_t>(value))) {}
  static constexpr Float16 FromBits(std::uint16_t bits) {
    Float16 value;
    value.bits = bits;
    return value;
  }

  constexpr explicit operator float() const {  // exact
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    const std::uint32_t magnitude = bits & 0x7FFFu;
    if (magnitude > 0x7C00u) {  // NaN, made quiet as the hardware does
      return std::bit_cast<float>(sign | 0x7FC00000u | (magnitude << 13));
    }
    if (magnitude == 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u);
    if (magnitude >= 0x0400u) {
      return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
    }
    const float scaled = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
  }

 private:
  static constexpr std::uint16_t Round(std::uint32_t float_bits) {
    const std::uint32_t sign = (float_bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = float_bits & 0x7FFFFFFFu;
    std::uint32_t rounded = 0;
    if (magnitude > 0x7F800000u) {  // NaN
      rounded = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
    } else if (magnitude >= 0x477FF000u) {  // 65520 and more: infinity
      rounded = 0x7C00u;
    } else if (magnitude >= 0x38800000u) {  // normal in binary16
      const std::uint32_t rebased = magnitude - (112u << 23);
      rounded = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
    } else {
      // Adding 0.5 leaves the value in the low bits, rounded to multiples of 2^-24 by the addition.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      rounded = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f);
    }
    return static_cast<std::uint16_t>(sign | rounded);
  }
};

// The upper half of a float, as storage: arithmetic is done in float. From float: round to nearest,
// ties to even; a NaN stays a NaN (quiet, its upper payload bits kept).
struct BFloat16 {
  std::uint16_t bits = 0;

  constexpr BFloat16() = default;
  constexpr explicit BFloat16(float value) : bits(Round(std::bit_cast<std::uint32_t>(value))) {}
  static constexpr BFloat16 FromBits(std::uint16_t bits) {
    BFloat16 value;
    value.bits = bits;
    return value;
  }

  constexpr explicit operator float() const {  // exact
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

 private:
  static constexpr std::uint16_t Round(std::uint32_t float_bits) {
    if ((float_bits & 0x7FFFFFFFu) > 0x7F800000u) {  // NaN
      return static_cast<std::uint16_t>((float_bits >> 16) | 0x40u);
    }
    return static_cast<std::uint16_t>((float_bits + 0x7FFFu + ((float_bits >> 16) & 1u)) >> 16);
  }
};

static_assert(sizeof(Float16) == 2 && sizeof(BFloat16) == 2 && sizeof(bool) == 1);

// The DType of a C++ element type: kDTypeOf<float> == DType::kFloat32.
template <typename T>
inline constexpr DType kDTypeOf = T::UnsupportedElementType();
template <>
inline constexpr DType kDTypeOf<float> = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<double> = DType::kFloat64;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<std::int8_t> = DType::kInt8;
template <>
inline constexpr DType kDTypeOf<std::uint8_t> = DType::kUInt8;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kInt32;
template <>
inline constexpr DType kDTypeOf<std::int64_t> = DType::kInt64;
template <>
inline constexpr DType kDTypeOf<bool> = DType::kBool;

}  // namespace heddle
