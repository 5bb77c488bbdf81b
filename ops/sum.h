// The sum of several arrays in one pass.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <span>

#include "ops/store_mode.h"

namespace heddle::ops {

// out[i] = inputs[0][i] + inputs[1][i] + ... for i in [0, count), added in list order.
//
// Shapes:   at least one input; each, and out, has `count` elements of `dtype`, aligned to the
// element. Aliasing: out may be one of the inputs; no other overlap of out with an input. float32,
// float64: one rounding an addition. float16, bfloat16: added in float32, rounded once. Integers
// wrap. bool: logical or; any nonzero byte counts as true, and the result is 0 or 1. Bits:     the
// same for every SIMD target, store mode and cut of [0, count) into calls (of a NaN,
//           only that it is one).
// Cost:     inputs.size() reads and one write of memory.
// Threads:  any; calls on disjoint outputs may run together.
void Sum(DType dtype, std::span<const void* const> inputs, void* out, std::size_t count,
         StoreMode mode = StoreMode::kAuto);

}  // namespace heddle::ops
