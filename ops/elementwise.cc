// Floating types are vectorised by hand for each SIMD target. Integers and bool are plain loops,
// which the compiler vectorises.
#include "ops/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/elementwise.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/binary_op.h"
#include "ops/simd-inl.h"

#ifndef HEDDLE_OPS_ELEMENTWISE_OPERAND_
#define HEDDLE_OPS_ELEMENTWISE_OPERAND_
namespace heddle::ops {

// One side of an operation: an array, or a number for all of its elements.
struct Operand {
  const void* array;  // or null
  Scalar number = 0;
};

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
