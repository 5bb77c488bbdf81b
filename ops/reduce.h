// Dot products and squared norms whose bits do not depend on how the work was cut or where it ran.
//
// An array is cut into blocks of kReductionBlock elements, the last one shorter. Each block is
// summed on its own in float64, in an order that is the same for every SIMD target; the block sums
// are then added in index order by AddBlocks. Threads may share the blocks out as they like.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <span>

namespace heddle::ops {

inline constexpr std::size_t kReductionBlock = 4096;

constexpr std::size_t ReductionBlocks(std::size_t count) {
  return (count + kReductionBlock - 1) / kReductionBlock;
}

// blocks[j] = the sum of a[i] * b[i] over block j of [0, count).
//
// Shapes:  a and b have `count` elements of `dtype`, aligned to the element; a part of a larger
// array
//          must start at a multiple of kReductionBlock and may end short of one only at the array's
//          end. blocks has ReductionBlocks(count) elements.
// Formula: products in float64 (exact except for float64 inputs). Inside a block, 32 partial sums
// take
//          elements i, i + 32, ... in turn and are then added pairwise, halving: 16, 8, 4, 2, 1.
// Errors:  InvalidArgument if dtype is not floating; nothing is written then.
// Threads: any; calls on disjoint outputs may run together.
void DotBlocks(DType dtype, const void* a, const void* b, std::size_t count, double* blocks);

// blocks[j] = the sum of the squares of block j: DotBlocks of x with itself.
void SquaredNormBlocks(DType dtype, const void* x, std::size_t count, double* blocks);

// The sum in index order; 0 for none.
double AddBlocks(std::span<const double> blocks);

}  // namespace heddle::ops
