// Sums of arrays that reach the store as codes.
#pragma once

#include <heddle/ndarray.h>

#include <span>

#include "kvstore/compression/compressor.h"

namespace heddle::kvstore {

// Each input goes through the compressor, with the residual of its sender, and back; `out` becomes
// the sum of what arrives, added in list order in float32 and rounded once. `residuals`: float32,
// of the inputs' shape, one for each. For op bodies. The bits do not depend on the number of
// workers.
void SumCompressed(std::span<const NDArray> inputs, const Compressor& compressor,
                   std::span<const NDArray> residuals, const NDArray& out);

// code = what the compressor makes of the gradient, with the residual of its sender. For op bodies,
// with the bits of any number of workers.
void CompressArray(const NDArray& gradient, const Compressor& compressor, float* residual,
                   const NDArray& code);

}  // namespace heddle::kvstore
