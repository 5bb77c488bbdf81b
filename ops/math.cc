// Plain loops, compiled once for each SIMD target: the compiler vectorises them.
#include "ops/math.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/math.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include <hwy/highway.h>

#include "ops/dispatch.h"
#include "ops/math_op.h"
#include "ops/reduce.h"

#ifndef HEDDLE_OPS_MATH_SIDE_
#define HEDDLE_OPS_MATH_SIDE_
namespace heddle::ops {

// One side of an operation: an array, or a number for all of its elements.
struct Side {
  const void* array;  // or null
  Scalar number = 0;
};

}  // namespace heddle::ops
#endif  // HEDDLE_OPS_MATH_SIDE_

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

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

void CompareSides(CompareOp op, DType dtype, const void* a, const Side& b, std::uint8_t* out,
                  std::size_t count) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    const S* const x = static_cast<const S*>(a);
    const S* const y = static_cast<const S*>(b.array);
    DispatchCompareOp(op, [&](auto constant) {
      constexpr CompareOp kOp = decltype(constant)::value;
      if (y != nullptr) {
        CompareAs<kOp, ComputeType<S>>(x, y, ComputeType<S>(), out, count);
      } else if constexpr (std::is_integral_v<T>) {
        const Scalar number = b.number.ToCompare();
        if (number.is_integer()) {
          CompareAs<kOp, std::int64_t>(x, y, number.As<std::int64_t>(), out, count);
        } else {
          CompareAs<kOp, double>(x, y, number.As<double>(), out, count);
        }
      } else {
        CompareAs<kOp>(x, y, static_cast<ComputeType<T>>(b.number.As<T>()), out, count);
      }
    });
  });
}

void UnaryElements(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using C = ComputeType<S>;
    const S* const x = static_cast<const S*>(a);
    S* const y = static_cast<S*>(out);
    DispatchUnaryOp(op, [&](auto constant) {
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
    DispatchPairOp(op, [&](auto constant) {
      constexpr PairOp kOp = decltype(constant)::value;
      for (std::size_t i = 0; i < count; ++i) {
        z[i] = static_cast<S>(ApplyPair<kOp>(x != nullptr ? static_cast<C>(x[i]) : x_number,
                                             y != nullptr ? static_cast<C>(y[i]) : y_number));
      }
    });
  });
}

void SumAxisElements(DType dtype, const void* a, std::size_t outer, std::size_t length,
                     std::size_t inner, std::size_t divisor, void* out) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using Wide = WideSum<T>;
    const S* const x = static_cast<const S*>(a);
    S* const y = static_cast<S*>(out);
    std::vector<Wide> sums(inner);
    std::vector<Wide> block(inner);
    for (std::size_t o = 0; o < outer; ++o) {
      std::fill(sums.begin(), sums.end(), Wide{0});
      for (std::size_t begin = 0; begin < length; begin += kReductionBlock) {
        std::fill(block.begin(), block.end(), Wide{0});
        const std::size_t end = std::min(length, begin + kReductionBlock);
        for (std::size_t k = begin; k < end; ++k) {
          const S* const row = x + (o * length + k) * inner;
          for (std::size_t i = 0; i < inner; ++i) {
            block[i] += static_cast<Wide>(static_cast<ComputeType<S>>(row[i]));
          }
        }
        for (std::size_t i = 0; i < inner; ++i) sums[i] += block[i];
      }
      for (std::size_t i = 0; i < inner; ++i) y[o * inner + i] = FromWide<T>(sums[i], divisor);
    }
  });
}

void MatrixProductElements(DType dtype, const void* a, const void* b, std::size_t rows,
                           std::size_t inner, std::size_t columns, void* out) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using Wide = WideSum<T>;
    const S* const x = static_cast<const S*>(a);
    const S* const y = static_cast<const S*>(b);
    S* const z = static_cast<S*>(out);
    std::vector<Wide> sums(columns);
    std::vector<Wide> block(columns);
    for (std::size_t r = 0; r < rows; ++r) {
      std::fill(sums.begin(), sums.end(), Wide{0});
      for (std::size_t begin = 0; begin < inner; begin += kReductionBlock) {
        std::fill(block.begin(), block.end(), Wide{0});
        const std::size_t end = std::min(inner, begin + kReductionBlock);
        for (std::size_t k = begin; k < end; ++k) {
          const Wide factor = static_cast<Wide>(static_cast<ComputeType<S>>(x[r * inner + k]));
          const S* const row = y + k * columns;
          for (std::size_t c = 0; c < columns; ++c) {
            block[c] += factor * static_cast<Wide>(static_cast<ComputeType<S>>(row[c]));
          }
        }
        for (std::size_t c = 0; c < columns; ++c) sums[c] += block[c];
      }
      for (std::size_t c = 0; c < columns; ++c) z[r * columns + c] = FromWide<T>(sums[c]);
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
  HWY_DYNAMIC_DISPATCH(CompareSides)(op, dtype, a, {.array = b}, out, count);
}

void CompareWithScalar(CompareOp op, DType dtype, const void* a, Scalar b, std::uint8_t* out,
                       std::size_t count) {
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(CompareSides)
  (op, dtype, a, {.array = nullptr, .number = b}, out, count);
}

void CheckUnary(UnaryOp op, DType dtype) {
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
}

void Unary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count) {
  CheckUnary(op, dtype);
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
             std::size_t divisor, void* out) {
  if (outer * inner == 0) return;  // one of them may be of any size then
  HWY_DYNAMIC_DISPATCH(SumAxisElements)(dtype, a, outer, length, inner, divisor, out);
}

void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows, std::size_t inner,
                   std::size_t columns, void* out) {
  if (rows * columns == 0) return;  // as above
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
