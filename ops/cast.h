// Converts arrays from one element type to another.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>

#include "ops/store_mode.h"

namespace heddle::ops {

// out[i] = source[i], converted by the rules of ops/convert.h, for i in [0, count). Every pair of
// dtypes works; for equal ones the bytes are copied.
//
// Shapes:   source has `count` elements of `from`, out of `to`, each aligned to its element.
// Aliasing: none, except that casting an array to its own dtype in place is allowed.
// Bits:     the same for every SIMD target and cut of [0, count) into calls. NaNs stay NaNs.
// Threads:  any; calls on disjoint outputs may run together.
void Cast(DType from, const void* source, DType to, void* out, std::size_t count,
          StoreMode mode = StoreMode::kAuto);

}  // namespace heddle::ops
