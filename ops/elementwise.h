// Arithmetic element by element: array with array, array with scalar, scalar with array.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>

#include "ops/convert.h"
#include "ops/store_mode.h"

namespace heddle::ops {

enum class BinaryOp : std::uint8_t { kAdd, kSubtract, kMultiply, kDivide };

// out[i] = a[i] op b[i] for i in [0, count).
//
// Shapes:   a, b and out have `count` elements of `dtype`, each aligned to its element.
// Aliasing: out may be a, b or both (in place); no other overlap of out with an input.
// float32, float64: IEEE, one rounding. float16, bfloat16: in float32, then rounded.
// Integers: wrap; division truncates towards zero, and division by zero gives 0.
// bool:     as integers, then "is not 0": or, xor, and; division is and, since x / 0 is 0.
// Bits:     the same for every SIMD target, store mode and cut of [0, count) into calls (of a NaN,
//           only that it is one).
// Threads:  any; calls on disjoint outputs may run together.
void Binary(BinaryOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
            StoreMode mode = StoreMode::kAuto);

// The same with one number for all b[i], or for all a[i]. The number is converted first, by the
// rules of ops/convert.h: to `dtype`, but for float16 and bfloat16 to float32.
void BinaryWithScalar(BinaryOp op, DType dtype, const void* a, Scalar b, void* out,
                      std::size_t count, StoreMode mode = StoreMode::kAuto);
void BinaryWithScalar(BinaryOp op, DType dtype, Scalar a, const void* b, void* out,
                      std::size_t count, StoreMode mode = StoreMode::kAuto);

}  // namespace heddle::ops
