// Sets every element of an array to one value.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>

#include "ops/convert.h"
#include "ops/store_mode.h"

namespace heddle::ops {

// out[i] = value, converted to `dtype` by the rules of ops/convert.h, for i in [0, count).
//
// Shapes:  out has `count` elements, aligned to the element.
// Threads: any; calls on disjoint outputs may run together.
void Fill(DType dtype, Scalar value, void* out, std::size_t count,
          StoreMode mode = StoreMode::kAuto);

// The bits of one such element; those above it are zeros.
std::uint64_t FillPattern(DType dtype, Scalar value);

}  // namespace heddle::ops
