// Gradients in two bits or one bit an element, with the error kept for the next time.
//
// Codes are little-endian words of 4 bytes, of 16 (two-bit) or 32 (one-bit) elements, filled up
// with zeros. Within a byte the first element has the most significant bits.
//
//   two-bit:  r += g;  r >= t: 11, r -= t;  r <= -t: 10, r += t;  else 00
//             11 stands for t, 10 for -t, 00 and 01 for 0
//   one-bit:  r += g;  r > t: 1, r -= 1;  else 0, r += 1
//             1 stands for 1, 0 for -1
//
// The formulas are those of MXNet 1.9.1 (two-bit) and 2.0 (one-bit), in float32. A NaN in r stays,
// and is sent as 00 or 0.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>

#include "ops/store_mode.h"

namespace heddle::ops {

constexpr std::size_t TwoBitCodeBytes(std::size_t count) { return (count + 15) / 16 * 4; }
constexpr std::size_t OneBitCodeBytes(std::size_t count) { return (count + 31) / 32 * 4; }

// Adds `gradient` to `residual`, writes to `code` what can be sent of it, and leaves the rest.
//
// Shapes:  gradient: `count` elements of `dtype` (float32, float16, bfloat16); residual: `count`;
//          code: TwoBitCodeBytes(count) or OneBitCodeBytes(count), all of them written. No overlap.
// Errors:  InvalidArgument for another dtype; nothing is written then. The caller sees to t > 0 for
//          two bits.
// Bits:    the same for every SIMD target and every cut into calls at multiples of 16 (two-bit) or
// 32
//          (one-bit) elements.
// Threads: any; calls on disjoint residuals may run together.
// Cost:    one pass: reads gradient and residual, writes residual and code.
void QuantiseTwoBit(float threshold, DType dtype, const void* gradient, float* residual, void* code,
                    std::size_t count);
void QuantiseOneBit(float threshold, DType dtype, const void* gradient, float* residual, void* code,
                    std::size_t count);

// What the codes stand for, `count` elements. `out` is aligned to the element; it is streamed to
// only if aligned to 64 bytes.
void DequantiseTwoBit(float threshold, const void* code, float* out, std::size_t count,
                      StoreMode mode = StoreMode::kAuto);
void DequantiseOneBit(const void* code, float* out, std::size_t count,
                      StoreMode mode = StoreMode::kAuto);

}  // namespace heddle::ops
