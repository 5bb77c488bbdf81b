// Sums of arrays that reach the store as codes.
#pragma once

#include <heddle/device.h>
#include <heddle/ndarray.h>

#include <memory>
#include <span>
#include <vector>

#include "kvstore/compression/compressor.h"

namespace heddle::kvstore {

// What one sender of one key keeps: the part of its gradients that its codes have not carried yet.
// A sender is a device, or one of several arrays that a push names on a device, in their order.
struct Residual {
  const Device device;
  const int place;  // among the arrays of the device in a push
  // Float32, of the value's shape. Touched, as is_zeroed, only by ops that write the key's value.
  const NDArray array;
  bool is_zeroed = false;  // before its first use
};

// How the arrays of one push are compressed: a residual for each.
struct Compression {
  std::shared_ptr<const Compressor> compressor;
  std::vector<std::shared_ptr<Residual>> residuals;
};

// Each input goes through the compressor, with its residual, and back; `out` becomes the sum of
// what arrives, added in list order in float32 and rounded once. For op bodies. The bits do not
// depend on the number of workers.
void SumCompressed(std::span<const NDArray> inputs, const Compression& compression,
                   const NDArray& out);

}  // namespace heddle::kvstore
