// How a value of one element type becomes a value of another. Cast, fill and arithmetic with
// scalars all follow these rules:
//   float -> float       rounded once to nearest, ties to even; overflow becomes infinity
//   integer -> float     rounded once to nearest, ties to even
//   float -> integer     truncated towards zero; below or above the range: the nearest end; NaN: 0
//   integer -> integer   the low bits (wraps)
//   anything -> bool     false for 0 (also -0.0), else true (also NaN);  bool -> anything: 0 or 1
#pragma once

#include <heddle/dtype.h>

#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace heddle::ops {

template <typename T>
inline constexpr bool kIs16BitFloat = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
constexpr bool Is16BitFloat(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// Rounds to float so that rounding again, to 11 bits or fewer, gives what rounding `value` at once
// would have given: an inexact result has its last bit set.
constexpr float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  const bool exact_or_nan = static_cast<double>(nearest) == value || value != value;
  if (exact_or_nan || (bits & 1) != 0) return nearest;
  const double magnitude = value < 0 ? -value : value;
  const double nearest_magnitude = nearest < 0 ? -static_cast<double>(nearest) : nearest;
  return std::bit_cast<float>(nearest_magnitude < magnitude ? bits + 1 : bits - 1);
}

// A double that keeps the sign and the first 52 bits of `value`; what lies below sets the last bit.
constexpr double StickyDouble(std::int64_t value) {
  constexpr std::int64_t kExact = std::int64_t{1} << 53;
  constexpr std::int64_t kLow = 0x7FF;
  if (-kExact <= value && value <= kExact) return static_cast<double>(value);
  const std::int64_t sticky = (value & kLow) != 0 ? kLow + 1 : 0;
  return static_cast<double>((value & ~kLow) | sticky);
}

template <typename To, typename From>
constexpr To Convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (kIs16BitFloat<From>) {
    return Convert<To>(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From{0};
  } else if constexpr (kIs16BitFloat<To>) {
    if constexpr (std::is_same_v<From, float>) {
      return To(value);
    } else if constexpr (std::is_same_v<From, std::int64_t>) {
      return To(RoundToOdd(StickyDouble(value)));
    } else {
      return To(RoundToOdd(static_cast<double>(value)));
    }
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    // Both bounds are exact: the minimum is 0 or a power of two, and so is maximum + 1.
    constexpr From kMin = static_cast<From>(std::numeric_limits<To>::min());
    constexpr From kEnd = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * From{2};
    if (value != value) return To{0};
    if (value <= kMin) return std::numeric_limits<To>::min();
    if (value >= kEnd) return std::numeric_limits<To>::max();
    return static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

// A number that a caller gives without naming an element type: an integer stays exact.
class Scalar {
 public:
  template <std::integral T>
  constexpr Scalar(T value)  // NOLINT(google-explicit-constructor)
      : is_integer_(true), integer_(static_cast<std::int64_t>(value)) {}
  template <std::floating_point T>
  constexpr Scalar(T value)  // NOLINT(google-explicit-constructor)
      : is_integer_(false), real_(static_cast<double>(value)) {}

  constexpr bool is_integer() const { return is_integer_; }

  template <typename T>
  constexpr T As() const {
    return is_integer_ ? Convert<T>(integer_) : Convert<T>(real_);
  }

  // What any int64 compares with as with this number, as int64 if it is an integer, else as double:
  // a whole number is an integer, one beyond all of int64 is infinite.
  constexpr Scalar ToCompare() const {
    constexpr double kEnd = 9223372036854775808.0;  // 2^63
    if (is_integer_ || real_ != real_) return *this;
    if (real_ >= kEnd) return std::numeric_limits<double>::infinity();
    if (real_ < -kEnd) return -std::numeric_limits<double>::infinity();
    const auto whole = static_cast<std::int64_t>(real_);
    return static_cast<double>(whole) == real_ ? Scalar(whole) : *this;
  }

 private:
  bool is_integer_;
  union {
    std::int64_t integer_;
    double real_;
  };
};

}  // namespace heddle::ops
