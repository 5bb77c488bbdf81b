// The rest of array arithmetic: comparisons, functions of one and of two numbers, sums along an
// axis, matrix products, and copies of parts that do not lie in one piece.
//
// float16, bfloat16: computed in float32, then rounded once. Bits: the same for every SIMD target
// and cut of the elements into calls (of a NaN, only that it is one).
// Threads: any; calls on disjoint outputs may run together.
#pragma once

#include <heddle/dtype.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/convert.h"

namespace heddle::ops {

enum class CompareOp : std::uint8_t {
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual
};

// out[i] = a[i] op b[i], as 0 or 1. Of a NaN all but kNotEqual are 0.
void Compare(CompareOp op, DType dtype, const void* a, const void* b, std::uint8_t* out,
             std::size_t count);
// The same with one number for all b[i]. It is rounded to a floating dtype first; with integers it
// is compared as it is, so 0.5 differs from every element of theirs.
void CompareWithScalar(CompareOp op, DType dtype, const void* a, Scalar b, std::uint8_t* out,
                       std::size_t count);

enum class UnaryOp : std::uint8_t { kNegative, kAbs, kSign, kSquare, kSqrt, kExp, kLog };

// out[i] = op(a[i]); out may be a. kSqrt, kExp and kLog: floating dtypes only, or InvalidArgument,
// writing nothing. Integers wrap; the negative and the magnitude of a bool are the bool itself.
void Unary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count);
// Throws that InvalidArgument.
void CheckUnary(UnaryOp op, DType dtype);

enum class PairOp : std::uint8_t { kMaximum, kMinimum, kPower, kRemainder };

// out[i] = op(a[i], b[i]); out may be a or b. A NaN on either side of kMaximum or kMinimum gives a
// NaN; powers are those of C's pow. Those of integers wrap; a negative exponent gives the integer
// part of the result (0, 1 or -1; 0 of 0). A remainder has the sign of b, also if it is 0; that of
// a division by 0 is 0.
void Pair(PairOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count);
void PairWithScalar(PairOp op, DType dtype, const void* a, Scalar b, void* out, std::size_t count);
void PairWithScalar(PairOp op, DType dtype, Scalar a, const void* b, void* out, std::size_t count);

// out[o, i] = the sum of a[o, k, i] over k in [0, length), divided by `divisor`; a has outer *
// length * inner elements. Floating dtypes add in float64, blocks of kReductionBlock (ops/reduce.h)
// in the order of k, then these in their order, and round once. Integers and bools add as int64,
// and their quotients are truncated; 0 / 0 is 0.
void SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length, std::size_t inner,
             std::size_t divisor, void* out);

// out (rows x columns) = a (rows x inner) times b (inner x columns). Floating dtypes add in float64
// as SumAxis does, and round once; integers wrap.
void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows, std::size_t inner,
                   std::size_t columns, void* out);

// Elements of an array that do not lie in one piece: element (i0, i1, ...) of the part lies at
// offset + i0 * strides[0] + i1 * strides[1] + ... elements. A stride may be negative, or 0, which
// repeats.
struct StridedPart {
  static constexpr std::size_t kAxesMax = 8;
  std::size_t axes = 0;
  std::int64_t offset = 0;
  std::array<std::int64_t, kAxesMax> extents = {};
  std::array<std::int64_t, kAxesMax> strides = {};
};

// Copies between a part of `array` and `packed`, which holds its elements in C order. They do not
// overlap. Scatter: strides of 0 only where the extent is 1.
void Gather(std::size_t element_bytes, const void* array, const StridedPart& part, void* packed);
void Scatter(std::size_t element_bytes, const void* packed, const StridedPart& part, void* array);

}  // namespace heddle::ops
