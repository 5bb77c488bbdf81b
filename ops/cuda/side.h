// What threads read for an operation on elements.
#pragma once

#include <cstdint>

#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"

namespace heddle::ops::cuda {

// One side of an operation: an array of S, or a number for all of its elements; both as C.
template <typename S, typename C>
struct Side {
  const S* array;  // or null
  C number;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void Load(std::uint64_t first, std::uint64_t step,
                               C (&values)[kVectors][kWidth]) const {
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Pack<S, kWidth> pack;
      if (array != nullptr) pack = LoadPack<kWidth>(array + first + v * step);
      HEDDLE_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        values[v][i] = array != nullptr ? static_cast<C>(Widen(pack.lanes[i])) : number;
      }
    }
  }
};

}  // namespace heddle::ops::cuda
