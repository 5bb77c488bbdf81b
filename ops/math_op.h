// What the operations of ops/math.h do to one element, or to two: on the CPU and on GPUs.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "ops/convert.h"
#include "ops/cuda/host_device.h"
#include "ops/dispatch.h"
#include "ops/math.h"

namespace heddle::ops {

// Returns f(std::integral_constant<Op, op>{}).
template <auto kFirst, auto... kRest, typename Op, typename F>
HEDDLE_HOST_DEVICE void DispatchOp(Op op, F&& f) {
  if constexpr (sizeof...(kRest) > 0) {
    if (op != kFirst) return DispatchOp<kRest...>(op, std::forward<F>(f));
  }
  f(std::integral_constant<Op, kFirst>{});
}
template <typename F>
HEDDLE_HOST_DEVICE void DispatchCompareOp(CompareOp op, F&& f) {
  DispatchOp<CompareOp::kEqual, CompareOp::kNotEqual, CompareOp::kLess, CompareOp::kLessEqual,
             CompareOp::kGreater, CompareOp::kGreaterEqual>(op, std::forward<F>(f));
}
template <typename F>
HEDDLE_HOST_DEVICE void DispatchUnaryOp(UnaryOp op, F&& f) {
  DispatchOp<UnaryOp::kNegative, UnaryOp::kAbs, UnaryOp::kSign, UnaryOp::kSquare, UnaryOp::kSqrt,
             UnaryOp::kExp, UnaryOp::kLog>(op, std::forward<F>(f));
}
template <typename F>
HEDDLE_HOST_DEVICE void DispatchPairOp(PairOp op, F&& f) {
  DispatchOp<PairOp::kMaximum, PairOp::kMinimum, PairOp::kPower, PairOp::kRemainder>(
      op, std::forward<F>(f));
}

template <CompareOp kOp, typename C>
HEDDLE_HOST_DEVICE std::uint8_t Holds(C a, C b) {
  if constexpr (kOp == CompareOp::kEqual) return a == b;
  if constexpr (kOp == CompareOp::kNotEqual) return a != b;
  if constexpr (kOp == CompareOp::kLess) return a < b;
  if constexpr (kOp == CompareOp::kLessEqual) return a <= b;
  if constexpr (kOp == CompareOp::kGreater) return a > b;
  if constexpr (kOp == CompareOp::kGreaterEqual) return a >= b;
}

// Without a comparison that nvcc calls pointless.
template <typename C>
HEDDLE_HOST_DEVICE bool IsNegative(C a) {
  if constexpr (std::is_signed_v<C>) return a < 0;
  return false;
}

template <UnaryOp kOp, typename C>
HEDDLE_HOST_DEVICE C ApplyUnary(C a) {
  if constexpr (std::is_floating_point_v<C>) {
    if constexpr (kOp == UnaryOp::kNegative) return -a;
    if constexpr (kOp == UnaryOp::kAbs) return std::abs(a);
    if constexpr (kOp == UnaryOp::kSign) return a > 0 ? C{1} : a < 0 ? C{-1} : a;  // keeps NaN, -0
    if constexpr (kOp == UnaryOp::kSquare) return a * a;
    if constexpr (kOp == UnaryOp::kSqrt) return std::sqrt(a);
    if constexpr (kOp == UnaryOp::kExp) return std::exp(a);
    if constexpr (kOp == UnaryOp::kLog) return std::log(a);
  } else {
    using U = std::make_unsigned_t<std::common_type_t<C, int>>;  // wraps
    const U wide = static_cast<U>(a);
    if constexpr (kOp == UnaryOp::kNegative) return static_cast<C>(U{0} - wide);
    if constexpr (kOp == UnaryOp::kAbs) return IsNegative(a) ? static_cast<C>(U{0} - wide) : a;
    if constexpr (kOp == UnaryOp::kSign)
      return static_cast<C>((a != 0 && !IsNegative(a)) - IsNegative(a));
    if constexpr (kOp == UnaryOp::kSquare) return static_cast<C>(wide * wide);
    return a;  // not reached: floating dtypes only
  }
}

template <typename C>
HEDDLE_HOST_DEVICE C IntegerPower(C base, C exponent) {
  if (IsNegative(exponent)) {
    if (base == 1) return 1;
    if (std::is_signed_v<C> && base == static_cast<C>(-1)) return exponent % 2 != 0 ? base : C{1};
    return 0;
  }
  using U = std::make_unsigned_t<std::common_type_t<C, int>>;
  U power = 1;
  U square = static_cast<U>(base);
  for (U rest = static_cast<U>(exponent); rest != 0; rest >>= 1) {
    if ((rest & 1) != 0) power *= square;
    square *= square;
  }
  return static_cast<C>(power);
}

template <typename C>
HEDDLE_HOST_DEVICE C Remainder(C a, C b) {
  if (b == 0) return 0;
  C rest;
  if constexpr (std::is_floating_point_v<C>) {
    rest = std::fmod(a, b);
    if (rest == 0) return std::copysign(rest, b);
  } else {
    if (std::is_signed_v<C> && b == static_cast<C>(-1)) return 0;  // the minimum's quotient is none
    rest = static_cast<C>(a % b);
  }
  return rest != 0 && IsNegative(rest) != IsNegative(b) ? static_cast<C>(rest + b) : rest;
}

template <PairOp kOp, typename C>
HEDDLE_HOST_DEVICE C ApplyPair(C a, C b) {
  if constexpr (kOp == PairOp::kPower) {
    if constexpr (std::is_floating_point_v<C>) return std::pow(a, b);
    if constexpr (!std::is_floating_point_v<C>) return IntegerPower(a, b);
  } else if constexpr (kOp == PairOp::kRemainder) {
    return Remainder(a, b);
  } else {
    if (a != a) return a;
    if (b != b) return b;
    if constexpr (kOp == PairOp::kMaximum) return a > b ? a : b;
    if constexpr (kOp == PairOp::kMinimum) return a < b ? a : b;
  }
}

// What sums along an axis and matrix products add in: integers wrap.
template <typename T>
using WideSum = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;

// The element that stands for a sum.
template <typename T>
HEDDLE_HOST_DEVICE StorageType<T> FromWide(WideSum<T> sum) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<StorageType<T>>(Convert<T>(static_cast<std::int64_t>(sum)));
  } else {
    return Convert<T>(sum);
  }
}
// The same, divided by `divisor`: of integers truncated, and 0 by 0. A bool stands for a quotient
// other than 0.
template <typename T>
HEDDLE_HOST_DEVICE StorageType<T> FromWide(WideSum<T> sum, std::uint64_t divisor) {
  if constexpr (std::is_same_v<T, bool>) {
    return FromWide<T>(sum);
  } else if constexpr (std::is_integral_v<T>) {
    if (divisor == 0) return FromWide<T>(0);
    return FromWide<T>(static_cast<std::uint64_t>(static_cast<std::int64_t>(sum) /
                                                  static_cast<std::int64_t>(divisor)));
  } else {
    return Convert<T>(sum / static_cast<double>(divisor));
  }
}

}  // namespace heddle::ops
