// Floating types are vectorised by hand for each SIMD target. Integers and bool are plain loops,
// which the compiler vectorises.
#include "ops/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/elementwise.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#ifndef HEDDLE_OPS_ELEMENTWISE_OPERAND_
#define HEDDLE_OPS_ELEMENTWISE_OPERAND_
namespace heddle::ops {

// One side of an operation: an array, or a number for all of its elements.
struct Operand {
  const void* array;  // or null
  Scalar number = 0;
};

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

}  // namespace heddle::ops
#endif  // HEDDLE_OPS_ELEMENTWISE_OPERAND_

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

template <BinaryOp kOp, class V>
HWY_INLINE V Apply(V a, V b) {
  if constexpr (kOp == BinaryOp::kAdd) {
    return hn::Add(a, b);
  } else if constexpr (kOp == BinaryOp::kSubtract) {
    return hn::Sub(a, b);
  } else if constexpr (kOp == BinaryOp::kMultiply) {
    return hn::Mul(a, b);
  } else {
    return hn::Div(a, b);
  }
}

template <typename T, BinaryOp kOp>
HWY_INLINE void BinaryVectors(const Operand& a, const Operand& b, T* out, std::size_t count,
                              bool streaming) {
  using C = ComputeType<T>;
  const T* x = static_cast<const T*>(a.array);
  const T* y = static_cast<const T*>(b.array);
  const C x_number = a.number.As<C>();
  const C y_number = b.number.As<C>();
  // The choices are the same for all vectors; the compiler moves them out of the loop.
  Map(out, count, streaming, [=](auto d, std::size_t i) HWY_ATTR {
    return Apply<kOp>(x != nullptr ? LoadAs(d, x + i) : hn::Set(d, x_number),
                      y != nullptr ? LoadAs(d, y + i) : hn::Set(d, y_number));
  });
}

void BinaryFloating(BinaryOp op, DType dtype, const Operand& a, const Operand& b, void* out,
                    std::size_t count, bool streaming) {
  DispatchFloating(dtype, [&](auto type) HWY_ATTR {
    using T = typename decltype(type)::type;
    DispatchBinaryOp(op, [&](auto constant) HWY_ATTR {
      BinaryVectors<T, decltype(constant)::value>(a, b, static_cast<T*>(out), count, streaming);
    });
  });
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(BinaryFloating);

namespace {

template <BinaryOp kOp, typename T>
T ApplyInteger(T a, T b) {
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
std::uint8_t ApplyBool(bool a, bool b) {
  return ApplyInteger<kOp, int>(a, b) != 0 ? 1 : 0;
}

// Sets out[i] = f(a[i], b[i]).
template <typename T, typename F>
void MapElements(const Operand& a, const Operand& b, StorageType<T>* out, std::size_t count,
                 const F& f) {
  const auto* x = static_cast<const StorageType<T>*>(a.array);
  const auto* y = static_cast<const StorageType<T>*>(b.array);
  const T x_number = a.number.As<T>();
  const T y_number = b.number.As<T>();
  if (x != nullptr && y != nullptr) {
    for (std::size_t i = 0; i < count; ++i) out[i] = f(static_cast<T>(x[i]), static_cast<T>(y[i]));
  } else if (x != nullptr) {
    for (std::size_t i = 0; i < count; ++i) out[i] = f(static_cast<T>(x[i]), y_number);
  } else {
    for (std::size_t i = 0; i < count; ++i) out[i] = f(x_number, static_cast<T>(y[i]));
  }
}

void BinaryOperands(BinaryOp op, DType dtype, const Operand& a, const Operand& b, void* out,
                    std::size_t count, StoreMode mode) {
  if (IsFloating(dtype)) {
    const std::size_t arrays = 1 + (a.array != nullptr) + (b.array != nullptr);
    const bool in_place = out == a.array || out == b.array;
    const bool streaming = !in_place && UseStreaming(mode, arrays * count * SizeOf(dtype));
    HWY_DYNAMIC_DISPATCH(BinaryFloating)(op, dtype, a, b, out, count, streaming);
    return;
  }
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_integral_v<T>) {
      DispatchBinaryOp(op, [&](auto constant) {
        constexpr BinaryOp kOp = decltype(constant)::value;
        MapElements<T>(a, b, static_cast<StorageType<T>*>(out), count, [](T x, T y) {
          if constexpr (std::is_same_v<T, bool>) {
            return ApplyBool<kOp>(x, y);
          } else {
            return ApplyInteger<kOp>(x, y);
          }
        });
      });
    }
  });
}

}  // namespace

void Binary(BinaryOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
            StoreMode mode) {
  if (count == 0) return;  // the arrays may be null
  BinaryOperands(op, dtype, {.array = a}, {.array = b}, out, count, mode);
}

void BinaryWithScalar(BinaryOp op, DType dtype, const void* a, Scalar b, void* out,
                      std::size_t count, StoreMode mode) {
  if (count == 0) return;
  BinaryOperands(op, dtype, {.array = a}, {.array = nullptr, .number = b}, out, count, mode);
}

void BinaryWithScalar(BinaryOp op, DType dtype, Scalar a, const void* b, void* out,
                      std::size_t count, StoreMode mode) {
  if (count == 0) return;
  BinaryOperands(op, dtype, {.array = nullptr, .number = a}, {.array = b}, out, count, mode);
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
