// What the element-wise update of an optimizer works on.
#pragma once

#include <heddle/dtype.h>

#include <array>
#include <cstddef>

#include "ops/store_mode.h"

namespace heddle::ops {

inline constexpr std::size_t kUpdateStatesMax = 4;

// A run of elements. No two arrays overlap; all are aligned to their elements.
struct UpdateArrays {
  DType dtype;           // of weight and gradient; floating
  void* weight;          // read and written
  const void* gradient;  // read
  // A float32 copy of the weight, read and written in its place; the weight becomes its rounding
  // and is not read. Null: there is none. With it the states are float32, else they have `dtype`.
  float* master;
  // As many as the optimizer has, read and written. Null: one that it does not need.
  std::array<void*, kUpdateStatesMax> states;
  std::size_t count;
  // Of the weight, where it is not read.
  StoreMode weight_stores = StoreMode::kAuto;
};

// How the gradient is read: multiplied by `rescale`, then limited to [-limit, limit].
struct GradientOptions {
  double rescale = 1;
  double limit = 0;  // 0: no limit
};

}  // namespace heddle::ops
