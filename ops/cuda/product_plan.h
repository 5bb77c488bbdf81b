// Matrix products on a GPU: what its threads do.
//
// A block of threads makes a tile of the product, step by step: all of its threads load a slice of
// both factors into the memory that they share, then each adds up the products of its elements.
// Sums are cut along `inner` into blocks of kReductionBlock, as on the CPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/reduce_plan.h"
#include "ops/cuda/run.h"
#include "ops/dispatch.h"
#include "ops/gpu_scratch.h"
#include "ops/math_op.h"
#include "ops/reduce.h"

namespace heddle::ops::cuda {

inline constexpr unsigned kTileDepth = 16;
// A thread has elements kTileThreads apart in both directions, so that neighbouring threads read
// neighbouring memory.
inline constexpr unsigned kTileThreads = 16;
inline constexpr unsigned kTileShare = kProductTile / kTileThreads;
static_assert(kTileThreads * kTileThreads == kBlockThreads);
static_assert(kReductionBlock % kTileDepth == 0);

template <typename T>
struct ProductBody {
  using S = StorageType<T>;
  using C = ComputeType<S>;
  using Wide = WideSum<T>;

  struct Slice {                        // shared by the threads of a block
    C a[kTileDepth][kProductTile + 1];  // without + 1 a column would lie in one memory bank
    C b[kTileDepth][kProductTile];
  };
  struct Sums {  // of a thread
    Wide total[kTileShare][kTileShare] = {};
    Wide block[kTileShare][kTileShare] = {};
  };
  // Where the tile of a block of threads lies, and which part of `inner` it takes.
  struct Tile {
    std::uint64_t row, column, begin, end, part;
  };

  HEDDLE_HOST_DEVICE Tile TileOf(std::uint64_t block) const {
    const std::uint64_t across = (columns + kProductTile - 1) / kProductTile;
    const std::uint64_t down = (rows + kProductTile - 1) / kProductTile;
    const std::uint64_t part = block / (across * down);
    const std::uint64_t begin = partial != nullptr ? part * kReductionBlock : 0;
    const std::uint64_t past = begin + kReductionBlock;
    return {.row = block / across % down * kProductTile,
            .column = block % across * kProductTile,
            .begin = begin,
            .end = partial != nullptr && past < inner ? past : inner,
            .part = part};
  }

  HEDDLE_HOST_DEVICE void Load(const Tile& tile, std::uint64_t begin, unsigned thread,
                               Slice& slice) const {
    HEDDLE_UNROLL
    for (unsigned at = thread; at < kTileDepth * kProductTile; at += kBlockThreads) {
      const std::uint64_t row = tile.row + at / kTileDepth;
      const std::uint64_t k = begin + at % kTileDepth;
      slice.a[at % kTileDepth][at / kTileDepth] =
          row < rows && k < tile.end ? Widen(a[row * inner + k]) : C{};
    }
    HEDDLE_UNROLL
    for (unsigned at = thread; at < kTileDepth * kProductTile; at += kBlockThreads) {
      const std::uint64_t k = begin + at / kProductTile;
      const std::uint64_t column = tile.column + at % kProductTile;
      slice.b[at / kProductTile][at % kProductTile] =
          k < tile.end && column < columns ? Widen(b[k * columns + column]) : C{};
    }
  }

  HEDDLE_HOST_DEVICE void Add(const Tile& tile, std::uint64_t begin, unsigned thread,
                              const Slice& slice, Sums& sums) const {
    const unsigned row = thread / kTileThreads;
    const unsigned column = thread % kTileThreads;
    const std::uint64_t rest = tile.end - begin;
    const unsigned depth = rest < kTileDepth ? static_cast<unsigned>(rest) : kTileDepth;
    for (unsigned k = 0; k < depth; ++k) {
      Wide y[kTileShare];
      HEDDLE_UNROLL
      for (unsigned j = 0; j < kTileShare; ++j) {
        y[j] = static_cast<Wide>(slice.b[k][column + j * kTileThreads]);
      }
      HEDDLE_UNROLL
      for (unsigned i = 0; i < kTileShare; ++i) {
        const Wide x = static_cast<Wide>(slice.a[k][row + i * kTileThreads]);
        HEDDLE_UNROLL
        for (unsigned j = 0; j < kTileShare; ++j) sums.block[i][j] += x * y[j];
      }
    }
    if ((begin + depth) % kReductionBlock == 0 || begin + depth == tile.end) EndBlock(sums);
  }
  static HEDDLE_HOST_DEVICE void EndBlock(Sums& sums) {
    HEDDLE_UNROLL
    for (unsigned i = 0; i < kTileShare; ++i) {
      HEDDLE_UNROLL
      for (unsigned j = 0; j < kTileShare; ++j) {
        sums.total[i][j] += sums.block[i][j];
        sums.block[i][j] = 0;
      }
    }
  }

  HEDDLE_HOST_DEVICE void Store(const Tile& tile, unsigned thread, const Sums& sums) const {
    HEDDLE_UNROLL
    for (unsigned i = 0; i < kTileShare; ++i) {
      HEDDLE_UNROLL
      for (unsigned j = 0; j < kTileShare; ++j) {
        const std::uint64_t row = tile.row + thread / kTileThreads + i * kTileThreads;
        const std::uint64_t column = tile.column + thread % kTileThreads + j * kTileThreads;
        if (row >= rows || column >= columns) continue;
        if (partial != nullptr) {
          partial[(tile.part * rows + row) * columns + column] = sums.total[i][j];
        } else {
          out[row * columns + column] = FromWide<T>(sums.total[i][j]);
        }
      }
    }
  }

  const S* a;
  const S* b;
  std::uint64_t rows, inner, columns;
  Wide* partial;  // of each block of `inner`; null: they are not shared out
  S* out;
};

// Calls launch_tiles(body, blocks of threads), then launch(table) if parts are to be added.
template <class LaunchTiles, class Launch>
void PlanMatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows,
                       std::size_t inner, std::size_t columns, void* out, void* scratch,
                       const LaunchTiles& launch_tiles, const Launch& launch) {
  if (rows == 0 || columns == 0) return;
  const bool shared = MatrixProductScratchBytes(rows, inner, columns) > 0;
  const std::size_t parts = shared ? ReductionBlocks(inner) : 1;
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Body = ProductBody<T>;
    using S = typename Body::S;
    auto* const partial = shared ? static_cast<typename Body::Wide*>(scratch) : nullptr;
    const Body body{
        static_cast<const S*>(a), static_cast<const S*>(b), rows, inner, columns, partial,
        static_cast<S*>(out)};
    launch_tiles(body, ProductTiles(rows, columns) * parts);
    if (!shared) return;
    const std::uint64_t elements = std::uint64_t{rows} * columns;
    LaunchOne(AddPartialBody<T>{partial, parts, elements, 1, static_cast<S*>(out)},
              {.count = elements, .head = 0}, launch);
  });
}

}  // namespace heddle::ops::cuda
