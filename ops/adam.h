// The update of Adam (Kingma and Ba, 2015) in one pass.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>

namespace heddle::ops {

struct AdamParams {
  // With the bias correction of the step t in it: lr * sqrt(1 - beta2^t) / (1 - beta1^t).
  double learning_rate = 0.001;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  double rescale = 1;  // the gradient is multiplied by this first
  double clip =
      -1;  // gradient and weight decay together are limited to [-clip, clip]; negative: not
};

// Updates `weight` and the moments `mean` and `variance` from `gradient`.
//
// Formula: G = clip(s * g + wd * w),  m = b1 * m + (1 - b1) * G,  v = b2 * v + (1 - b2) * G * G,
//          w = w - lr * m / (sqrt(v) + eps)
//          Each operation is rounded on its own, from left to right.
// Shapes:  all arrays: `count` elements of `dtype`, aligned to the element. No two overlap.
// float64: computed in float64. Others: in float32 with the parameters rounded to float32; float16
// and
//          bfloat16 round w, m and v when they are stored, and w uses the m and v not yet rounded.
// Errors:  InvalidArgument if dtype is not floating; nothing is written then.
// Bits:    the same for every SIMD target and cut of [0, count) into calls (of a NaN, only that it
// is
//          one).
// Threads: any; calls on disjoint weights may run together.
void AdamUpdate(const AdamParams& params, DType dtype, void* weight, const void* gradient,
                void* mean, void* variance, std::size_t count);

// The same with the weight kept twice: `master`, `mean` and `variance` are float32 and take the
// update; `weight` (of `dtype`, as the gradient) becomes the master rounded to it and is not read.
// Errors: InvalidArgument if dtype is neither float16 nor bfloat16; nothing is written then.
void AdamUpdateMultiPrecision(const AdamParams& params, DType dtype, void* weight,
                              const void* gradient, float* master, float* mean, float* variance,
                              std::size_t count);

}  // namespace heddle::ops
