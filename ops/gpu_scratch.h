// How much memory kernels of GPUs want besides their arrays.
#pragma once

#include <cstddef>

#include "ops/reduce.h"

namespace heddle::ops {

// A product is made in tiles of so many rows and columns.
inline constexpr std::size_t kProductTile = 64;
constexpr std::size_t ProductTiles(std::size_t rows, std::size_t columns) {
  return (rows + kProductTile - 1) / kProductTile * ((columns + kProductTile - 1) / kProductTile);
}

// Bytes for an 8-byte sum of each block of each element, if there are several; 0: none.

constexpr std::size_t SumAxisScratchBytes(std::size_t outer, std::size_t length,
                                          std::size_t inner) {
  return length > kReductionBlock ? outer * ReductionBlocks(length) * inner * 8 : 0;
}
// Only where there are too few tiles for a GPU.
constexpr std::size_t MatrixProductScratchBytes(std::size_t rows, std::size_t inner,
                                                std::size_t columns) {
  constexpr std::size_t kFewTiles = 16;
  const bool shared = inner > kReductionBlock && ProductTiles(rows, columns) <= kFewTiles;
  return shared ? rows * columns * ReductionBlocks(inner) * 8 : 0;
}
constexpr std::size_t NormScratchBytes(std::size_t count) { return ReductionBlocks(count) * 8; }

}  // namespace heddle::ops
