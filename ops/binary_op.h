// What the operations of ops/elementwise.h do to two integers or bools.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/elementwise.h"

namespace heddle::ops {

// Returns f(std::integral_constant<BinaryOp, op>{}).
template <typename F>
void DispatchBinaryOp(BinaryOp op, F&& f) {
  switch (op) {
    case BinaryOp::kAdd:
      return f(std::integral_constant<BinaryOp, BinaryOp::kAdd>{});
    case BinaryOp::kSubtract:
      return f(std::integral_constant<BinaryOp, BinaryOp::kSubtract>{});
    case BinaryOp::kMultiply:
      return f(std::integral_constant<BinaryOp, BinaryOp::kMultiply>{});
    case BinaryOp::kDivide:
      return f(std::integral_constant<BinaryOp, BinaryOp::kDivide>{});
  }
}

template <BinaryOp kOp, typename T>
constexpr T ApplyInteger(T a, T b) {
  using U = std::make_unsigned_t<std::common_type_t<T, int>>;  // no promotion back to int
  const U x = static_cast<U>(a);
  const U y = static_cast<U>(b);
  if constexpr (kOp == BinaryOp::kAdd) {
    return static_cast<T>(x + y);
  } else if constexpr (kOp == BinaryOp::kSubtract) {
    return static_cast<T>(x - y);
  } else if constexpr (kOp == BinaryOp::kMultiply) {
    return static_cast<T>(x * y);
  } else {
    if (b == 0) return 0;
    // The quotient of the minimum and -1 does not fit; wrapping gives the minimum.
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(U{0} - x);
    return static_cast<T>(a / b);
  }
}

template <BinaryOp kOp>
constexpr std::uint8_t ApplyBool(bool a, bool b) {
  return ApplyInteger<kOp, int>(a, b) != 0 ? 1 : 0;
}

}  // namespace heddle::ops
