// Plain loops, compiled once for each SIMD target: the compiler vectorises them.
#include "ops/math.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/math.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include <hwy/highway.h>

#include "ops/dispatch.h"

#ifndef HEDDLE_OPS_MATH_SIDE_
#define HEDDLE_OPS_MATH_SIDE_
namespace heddle::ops {

// One side of an operation: an array, or a number for all of its elements.
struct Side {
  const void* array;  // or null
  Scalar number = 0;
};

// Returns f(std::integral_constant<Op, op>{}).
template <auto kFirst, auto... kRest, typename Op, typename F>
void DispatchOp(Op op, F&& f) {
  if (op == kFirst) return f(std::integral_constant<Op, kFirst>{});
  if constexpr (sizeof...(kRest) > 0) DispatchOp<kRest...>(op, f);
}

}  // namespace heddle::ops
#endif  // HEDDLE_OPS_MATH_SIDE_

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

template <CompareOp kOp, typename C>
HWY_INLINE std::uint8_t Holds(C a, C b) {
  if constexpr (kOp == CompareOp::kEqual) return a == b;
  if constexpr (kOp == CompareOp::kNotEqual) return a != b;
  if constexpr (kOp == CompareOp::kLess) return a < b;
  if constexpr (kOp == CompareOp::kLessEqual) return a <= b;
  if constexpr (kOp == CompareOp::kGreater) return a > b;
  if constexpr (kOp == CompareOp::kGreaterEqual) return a >= b;
}

// out[i] = a[i] op b[i], or b_number, both as C.
template <CompareOp kOp, typename C, typename S>
HWY_INLINE void CompareAs(const S* a, const S* b, C b_number, std::uint8_t* out,
                          std::size_t count) {
  if (b != nullptr) {
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = Holds<kOp>(static_cast<C>(a[i]), static_cast<C>(b[i]));
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) out[i] = Holds<kOp>(static_cast<C>(a[i]), b_number);
  }
}

void CompareSides(CompareOp op, DType dtype, const void* a, const Side& b, bool number_is_integer,
                  std::uint8_t* out, std::size_t count) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    const S* const x = static_cast<const S*>(a);
    const S* const y = static_cast<const S*>(b.array);
    DispatchOp<CompareOp::kEqual, CompareOp::kNotEqual, CompareOp::kLess, CompareOp::kLessEqual,
               CompareOp::kGreater, CompareOp::kGreaterEqual>(op, [&](auto constant) {
      constexpr CompareOp kOp = decltype(constant)::value;
      if (y != nullptr) {
        CompareAs<kOp, ComputeType<S>>(x, y, ComputeType<S>(), out, count);
      } else if constexpr (std::is_integral_v<T>) {
        if (number_is_integer) {
          CompareAs<kOp, std::int64_t>(x, y, b.number.As<std::int64_t>(), out, count);
        } else {
          CompareAs<kOp, double>(x, y, b.number.As<double>(), out, count);
        }
      } else {
        CompareAs<kOp>(x, y, static_cast<ComputeType<T>>(b.number.As<T>()), out, count);
      }
    });
  });
}

template <UnaryOp kOp, typename C>
HWY_INLINE C ApplyUnary(C a) {
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
    if constexpr (kOp == UnaryOp::kAbs) return a < 0 ? static_cast<C>(U{0} - wide) : a;
    if constexpr (kOp == UnaryOp::kSign) return static_cast<C>((a > 0) - (a < 0));
    if constexpr (kOp == UnaryOp::kSquare) return static_cast<C>(wide * wide);
    return a;  // not reached: floating dtypes only
  }
}

void UnaryElements(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using C = ComputeType<S>;
    const S* const x = static_cast<const S*>(a);
    S* const y = static_cast<S*>(out);
    DispatchOp<UnaryOp::kNegative, UnaryOp::kAbs, UnaryOp::kSign, UnaryOp::kSquare, UnaryOp::kSqrt,
               UnaryOp::kExp, UnaryOp::kLog>(op, [&](auto constant) {
      constexpr UnaryOp kOp = decltype(constant)::value;
      for (std::size_t i = 0; i < count; ++i) {
        if constexpr (std::is_same_v<T, bool>) {
          y[i] = x[i];
        } else {
          y[i] = static_cast<S>(ApplyUnary<kOp>(static_cast<C>(x[i])));
        }
      }
    });
  });
}

template <typename C>
HWY_INLINE C IntegerPower(C base, C exponent) {
  if (exponent < 0) {
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
HWY_INLINE C Remainder(C a, C b) {
  if (b == 0) return 0;
  C rest;
  if constexpr (std::is_floating_point_v<C>) {
    rest = std::fmod(a, b);
  } else {
    if (std::is_signed_v<C> && b == static_cast<C>(-1)) return 0;  // the minimum's quotient is none
    rest = static_cast<C>(a % b);
  }
  return rest != 0 && (rest < 0) != (b < 0) ? static_cast<C>(rest + b) : rest;
}

template <PairOp kOp, typename C>
HWY_INLINE C ApplyPair(C a, C b) {
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

void PairSides(PairOp op, DType dtype, const Side& a, const Side& b, void* out, std::size_t count) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using C = ComputeType<S>;
    const S* const x = static_cast<const S*>(a.array);
    const S* const y = static_cast<const S*>(b.array);
    const C x_number = static_cast<C>(a.number.As<ComputeType<T>>());
    const C y_number = static_cast<C>(b.number.As<ComputeType<T>>());
    S* const z = static_cast<S*>(out);
    DispatchOp<PairOp::kMaximum, PairOp::kMinimum, PairOp::kPower, PairOp::kRemainder>(
        op, [&](auto constant) {
          constexpr PairOp kOp = decltype(constant)::value;
          for (std::size_t i = 0; i < count; ++i) {
            z[i] = static_cast<S>(ApplyPair<kOp>(x != nullptr ? static_cast<C>(x[i]) : x_number,
                                                 y != nullptr ? static_cast<C>(y[i]) : y_number));
          }
        });
  });
}

void SumAxisElements(DType dtype, const void* a, std::size_t outer, std::size_t length,
                     std::size_t inner, double scale, void* out) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using Wide = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;
    const S* const x = static_cast<const S*>(a);
    S* const y = static_cast<S*>(out);
    std::vector<Wide> sums(inner);
    for (std::size_t o = 0; o < outer; ++o) {
      std::fill(sums.begin(), sums.end(), Wide{0});
      for (std::size_t k = 0; k < length; ++k) {
        const S* const row = x + (o * length + k) * inner;
        for (std::size_t i = 0; i < inner; ++i) {
          sums[i] += static_cast<Wide>(static_cast<ComputeType<S>>(row[i]));
        }
      }
      for (std::size_t i = 0; i < inner; ++i) {
        if constexpr (std::is_integral_v<T>) {
          const auto sum = static_cast<std::int64_t>(sums[i]);
          y[o * inner + i] = static_cast<S>(
              scale == 1 ? Convert<T>(sum) : Convert<T>(static_cast<double>(sum) * scale));
        } else {
          y[o * inner + i] = Convert<T>(sums[i] * scale);
        }
      }
    }
  });
}

void MatrixProductElements(DType dtype, const void* a, const void* b, std::size_t rows,
                           std::size_t inner, std::size_t columns, void* out) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using Wide = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;
    const S* const x = static_cast<const S*>(a);
    const S* const y = static_cast<const S*>(b);
    S* const z = static_cast<S*>(out);
    std::vector<Wide> sums(columns);
    for (std::size_t r = 0; r < rows; ++r) {
      std::fill(sums.begin(), sums.end(), Wide{0});
      for (std::size_t k = 0; k < inner; ++k) {
        const Wide factor = static_cast<Wide>(static_cast<ComputeType<S>>(x[r * inner + k]));
        const S* const row = y + k * columns;
        for (std::size_t c = 0; c < columns; ++c) {
          sums[c] += factor * static_cast<Wide>(static_cast<ComputeType<S>>(row[c]));
        }
      }
      for (std::size_t c = 0; c < columns; ++c) {
        if constexpr (std::is_integral_v<T>) {
          z[r * columns + c] = static_cast<S>(Convert<T>(static_cast<std::int64_t>(sums[c])));
        } else {
          z[r * columns + c] = Convert<T>(sums[c]);
        }
      }
    }
  });
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(CompareSides);
HWY_EXPORT(UnaryElements);
HWY_EXPORT(PairSides);
HWY_EXPORT(SumAxisElements);
HWY_EXPORT(MatrixProductElements);

void Compare(CompareOp op, DType dtype, const void* a, const void* b, std::uint8_t* out,
             std::size_t count) {
  if (count == 0) return;  // the arrays may be null
  HWY_DYNAMIC_DISPATCH(CompareSides)(op, dtype, a, {.array = b}, false, out, count);
}

void CompareWithScalar(CompareOp op, DType dtype, const void* a, Scalar b, std::uint8_t* out,
                       std::size_t count) {
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(CompareSides)
  (op, dtype, a, {.array = nullptr, .number = b}, b.is_integer(), out, count);
}

void Unary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count) {
  switch (op) {
    case UnaryOp::kSqrt:
      RequireFloating("Sqrt", dtype);
      break;
    case UnaryOp::kExp:
      RequireFloating("Exp", dtype);
      break;
    case UnaryOp::kLog:
      RequireFloating("Log", dtype);
      break;
    default:
      break;
  }
  HWY_DYNAMIC_DISPATCH(UnaryElements)(op, dtype, a, out, count);
}

void Pair(PairOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count) {
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(PairSides)(op, dtype, {.array = a}, {.array = b}, out, count);
}
void PairWithScalar(PairOp op, DType dtype, const void* a, Scalar b, void* out, std::size_t count) {
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(PairSides)
  (op, dtype, {.array = a}, {.array = nullptr, .number = b}, out, count);
}
void PairWithScalar(PairOp op, DType dtype, Scalar a, const void* b, void* out, std::size_t count) {
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(PairSides)
  (op, dtype, {.array = nullptr, .number = a}, {.array = b}, out, count);
}

void SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length, std::size_t inner,
             double scale, void* out) {
  HWY_DYNAMIC_DISPATCH(SumAxisElements)(dtype, a, outer, length, inner, scale, out);
}

void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows, std::size_t inner,
                   std::size_t columns, void* out) {
  HWY_DYNAMIC_DISPATCH(MatrixProductElements)(dtype, a, b, rows, inner, columns, out);
}

namespace {

// Calls copy(element of the array, element of the packed side, elements in the run) for each run.
template <typename Copy>
void ForEachRun(const StridedPart& part, const Copy& copy) {
  for (std::size_t axis = 0; axis < part.axes; ++axis) {
    if (part.extents[axis] == 0) return;
  }
  if (part.axes == 0) return copy(part.offset, 0, 1);
  // The last axis is one run if its elements are neighbours.
  const std::size_t last = part.axes - 1;
  const bool whole_rows = part.strides[last] == 1;
  const std::int64_t run = whole_rows ? part.extents[last] : 1;
  const std::size_t looped = whole_rows ? last : part.axes;
  std::array<std::int64_t, StridedPart::kAxesMax> at = {};
  std::int64_t from = part.offset;
  std::int64_t packed = 0;
  while (true) {
    copy(from, packed, run);
    packed += run;
    std::size_t axis = looped;
    while (axis > 0) {
      --axis;
      from += part.strides[axis];
      if (++at[axis] < part.extents[axis]) break;
      from -= part.strides[axis] * part.extents[axis];
      at[axis] = 0;
      if (axis == 0) return;
    }
    if (looped == 0) return;
  }
}

}  // namespace

void Gather(std::size_t element_bytes, const void* array, const StridedPart& part, void* packed) {
  const auto* const from = static_cast<const std::byte*>(array);
  auto* const to = static_cast<std::byte*>(packed);
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  ForEachRun(part, [&](std::int64_t at, std::int64_t index, std::int64_t run) {
    std::memcpy(to + index * bytes, from + at * bytes, static_cast<std::size_t>(run * bytes));
  });
}

void Scatter(std::size_t element_bytes, const void* packed, const StridedPart& part, void* array) {
  const auto* const from = static_cast<const std::byte*>(packed);
  auto* const to = static_cast<std::byte*>(array);
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  ForEachRun(part, [&](std::int64_t at, std::int64_t index, std::int64_t run) {
    std::memcpy(to + at * bytes, from + index * bytes, static_cast<std::size_t>(run * bytes));
  });
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
