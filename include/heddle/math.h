// More operations on dense arrays: comparisons, functions of their elements, sums, products, parts
// that do not lie in one piece. All are queued as one op and return a fresh array.
//
// Errors: InvalidArgument on the calling thread, as the operators of heddle/ndarray.h: equal
//         shapes, dtypes and devices; axes that exist; floating dtypes for Sqrt, Exp, Log and Norm.
#pragma once

#include <heddle/ndarray.h>

#include <cstdint>
#include <optional>
#include <span>

namespace heddle {

// 1 where it holds, else 0, as a bool array. A scalar is rounded to a floating dtype first;
// integers are compared with it as it is.
enum class Comparison : std::uint8_t {
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual
};
NDArray Compare(Comparison comparison, const NDArray& a, const NDArray& b);
NDArray Compare(Comparison comparison, const NDArray& a, Scalar b);

// Integers wrap.
NDArray Negative(const NDArray& a);
NDArray Abs(const NDArray& a);
NDArray Sign(const NDArray& a);
NDArray Square(const NDArray& a);
NDArray Sqrt(const NDArray& a);
NDArray Exp(const NDArray& a);
NDArray Log(const NDArray& a);

// A NaN on either side gives a NaN.
NDArray Maximum(const NDArray& a, const NDArray& b);
NDArray Maximum(const NDArray& a, Scalar b);
NDArray Minimum(const NDArray& a, const NDArray& b);
NDArray Minimum(const NDArray& a, Scalar b);
// Powers of integers wrap; a negative exponent gives the integer part of the result.
NDArray Power(const NDArray& a, const NDArray& b);
NDArray Power(const NDArray& a, Scalar b);
NDArray Power(Scalar a, const NDArray& b);
// a - b * floor(a / b): it has the sign of b. That of a division by 0 is 0.
NDArray Remainder(const NDArray& a, const NDArray& b);
NDArray Remainder(const NDArray& a, Scalar b);
NDArray Remainder(Scalar a, const NDArray& b);

// The sum along an axis, or of all elements; floating dtypes add in float64, in blocks of 4096
// elements in index order, and round once. Mean divides by the number of elements first. The axis
// goes: (2, 3) along 0 gives (3,); all of them give (1,).
NDArray SumAlong(const NDArray& a, std::optional<std::int64_t> axis);
NDArray MeanAlong(const NDArray& a, std::optional<std::int64_t> axis);
// The square root of the sum of all squares, shape (1,): in blocks of 4096 elements, added in index
// order in float64.
NDArray Norm(const NDArray& a);
// The matrix product of (n, k) and (k, m); of (n, k) and (k,); of (k,) and (k,), which gives (1,).
NDArray Dot(const NDArray& a, const NDArray& b);

// For each axis of an array, `count` elements from `begin`, `step` apart: in one piece or not. Up
// to 8 axes. `keep` false: the axis goes, and count is 1.
struct AxisRange {
  std::int64_t begin = 0;
  std::int64_t step = 1;  // not 0
  std::int64_t count = 0;
  bool keep = true;
};
// A copy of the part; InvalidArgument unless there is a range for each axis and it is within it.
NDArray CopyPart(const NDArray& array, std::span<const AxisRange> part);
// Copies `values` to the part: same shape as CopyPart gives, same dtype and device.
void AssignPart(const NDArray& array, std::span<const AxisRange> part, const NDArray& values);
// `array` with its axes in another order; `axes` names each once.
NDArray Transpose(const NDArray& array, std::span<const std::int64_t> axes);
// `array` repeated along axes where it has extent 1, or that it lacks in front, to `shape`.
NDArray BroadcastTo(const NDArray& array, const Shape& shape);

}  // namespace heddle
