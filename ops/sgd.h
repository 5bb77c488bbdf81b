// The update of stochastic gradient descent, with momentum, weight decay and clipping, in one pass.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>

namespace heddle::ops {

struct SgdParams {
  double learning_rate = 0.01;
  double momentum = 0;
  double weight_decay = 0;
  double rescale = 1;  // the gradient is multiplied by this first
  double clip = -1;    // then limited to [-clip, clip]; negative: not limited
};

// Updates `weight`, and `momentum` if it is not null, from `gradient`.
//
// Formula: m = mu * m - (lr * wd) * w - (lr * s) * g,   w = w + m
//          with clipping  ... - lr * clip(s * g);  without momentum  mu * m  is 0.
//          Each operation is rounded on its own, from left to right.
// Shapes:  all arrays: `count` elements of `dtype`, aligned to the element. No two overlap.
// float64: computed in float64. Others: in float32 with the parameters rounded to float32; float16
// and
//          bfloat16 round w and m when they are stored, and w + m uses the m that was not yet
//          rounded.
// Errors:  InvalidArgument if dtype is not floating; nothing is written then.
// Bits:    the same for every SIMD target and cut of [0, count) into calls (of a NaN, only that it
// is
//          one).
// Threads: any; calls on disjoint weights may run together.
void SgdUpdate(const SgdParams& params, DType dtype, void* weight, const void* gradient,
               void* momentum, std::size_t count);

// The same with the weight kept twice: `master` and `momentum` (or null) are float32 and take the
// update; `weight` (of `dtype`, as the gradient) becomes the master rounded to it and is not read.
// Errors: InvalidArgument if dtype is neither float16 nor bfloat16; nothing is written then.
void SgdUpdateMultiPrecision(const SgdParams& params, DType dtype, void* weight,
                             const void* gradient, float* master, float* momentum,
                             std::size_t count);

}  // namespace heddle::ops
