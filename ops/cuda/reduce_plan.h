// Sums along an axis and norms on a GPU: what its threads do, and which launches they take.
//
// What is added up is cut into blocks of kReductionBlock elements, as on the CPU, so that there is
// work for many threads and the bits are the CPU's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ops/cuda/host_device.h"
#include "ops/cuda/math.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/table.h"
#include "ops/dispatch.h"
#include "ops/math_op.h"
#include "ops/reduce.h"

namespace heddle::ops::cuda {

// Loads that a thread has in flight while it adds.
inline constexpr int kLoadsAhead = 8;

// Adds to `sum` load(k) for k in [begin, end), in this order; several are loaded before they are
// added.
template <typename Wide, class Load>
HEDDLE_HOST_DEVICE void AddInOrder(std::uint64_t begin, std::uint64_t end, const Load& load,
                                   Wide& sum) {
  std::uint64_t k = begin;
  for (; k + kLoadsAhead <= end; k += kLoadsAhead) {
    Wide values[kLoadsAhead];
    HEDDLE_UNROLL
    for (int j = 0; j < kLoadsAhead; ++j) values[j] = load(k + j);
    HEDDLE_UNROLL
    for (int j = 0; j < kLoadsAhead; ++j) sum += values[j];
  }
  for (; k < end; ++k) sum += load(k);
}

// Element (o, b, i) of outer x blocks x inner: the sum of block b of a[o, :, i]. A thread takes one
// or, if inner and the addresses allow, as many neighbours as 16 bytes hold.
template <typename T>
struct SumAxisBody {
  using S = StorageType<T>;
  using Wide = WideSum<T>;
  static constexpr int kLanes = kAccessBytes / sizeof(S);
  static constexpr int kUnroll = 1;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t /*step*/) const {
    const std::uint64_t i = first % inner;
    const std::uint64_t rest = first / inner;
    const std::uint64_t begin = rest % blocks * kReductionBlock;
    const std::uint64_t past = begin + kReductionBlock;
    const std::uint64_t count = (past < length ? past : length) - begin;
    const S* const from = a + (rest / blocks * length + begin) * inner + i;
    Wide sums[kWidth] = {};
    if (kWidth == 1 && inner == 1) {
      AddRun(from, count, sums[0]);
    } else {
      AddRows(from, count, sums);
    }
    HEDDLE_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      if (partial != nullptr) {
        partial[first + j] = sums[j];
      } else {
        out[first + j] = FromWide<T>(sums[j], divisor);
      }
    }
  }

  static HEDDLE_HOST_DEVICE Wide ToWide(S value) { return static_cast<Wide>(Widen(value)); }

  // Rows of the array lie `inner` elements apart.
  template <int kWidth>
  HEDDLE_HOST_DEVICE void AddRows(const S* from, std::uint64_t count, Wide (&sums)[kWidth]) const {
    std::uint64_t k = 0;
    for (; k + kLoadsAhead <= count; k += kLoadsAhead) {
      Pack<S, kWidth> rows[kLoadsAhead];
      HEDDLE_UNROLL
      for (int r = 0; r < kLoadsAhead; ++r) rows[r] = LoadPack<kWidth>(from + (k + r) * inner);
      HEDDLE_UNROLL
      for (int r = 0; r < kLoadsAhead; ++r) Add(rows[r], sums);
    }
    for (; k < count; ++k) Add(LoadPack<kWidth>(from + k * inner), sums);
  }
  template <int kWidth>
  static HEDDLE_HOST_DEVICE void Add(const Pack<S, kWidth>& row, Wide (&sums)[kWidth]) {
    HEDDLE_UNROLL
    for (int j = 0; j < kWidth; ++j) sums[j] += ToWide(row.lanes[j]);
  }

  // Elements that are neighbours: whole vectors once one begins.
  static HEDDLE_HOST_DEVICE void AddRun(const S* from, std::uint64_t count, Wide& sum) {
    constexpr int kAhead = 4;
    std::uint64_t k = 0;
    while (k < count && reinterpret_cast<std::uintptr_t>(from + k) % kAccessBytes != 0) {
      sum += ToWide(from[k++]);
    }
    for (; k + kAhead * kLanes <= count; k += kAhead * kLanes) {
      Pack<S, kLanes> packs[kAhead];
      HEDDLE_UNROLL
      for (int v = 0; v < kAhead; ++v) packs[v] = LoadPack<kLanes>(from + k + v * kLanes);
      HEDDLE_UNROLL
      for (int v = 0; v < kAhead; ++v) {
        HEDDLE_UNROLL
        for (int j = 0; j < kLanes; ++j) sum += ToWide(packs[v].lanes[j]);
      }
    }
    for (; k < count; ++k) sum += ToWide(from[k]);
  }

  const S* a;
  std::uint64_t length, inner, blocks;
  std::size_t divisor;
  Wide* partial;  // null: there is one block, whose sum goes to `out`
  S* out;
};

// Element (o, i) of outer x inner: the sum of partial[o, :, i].
template <typename T>
struct AddPartialBody {
  using S = StorageType<T>;
  using Wide = WideSum<T>;
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 1;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t /*step*/) const {
    const Wide* const from = partial + first / inner * blocks * inner + first % inner;
    Wide sum = 0;
    AddInOrder(
        0, blocks, [&](std::uint64_t b) { return from[b * inner]; }, sum);
    out[first] = FromWide<T>(sum, divisor);
  }

  const Wide* partial;
  std::uint64_t blocks, inner;
  std::size_t divisor;
  S* out;
};

template <class Body, class Launch>
void LaunchOne(const Body& body, const Run& run, const Launch& launch) {
  Packer<Body, Launch> packer(launch);
  packer.Add(body, run);
  packer.Flush();
}

// Calls launch(table) for the launches that make the sums.
template <class Launch>
void PlanSumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length,
                 std::size_t inner, std::size_t divisor, void* out, void* scratch,
                 const Launch& launch) {
  const std::size_t blocks = std::max<std::size_t>(1, ReductionBlocks(length));
  // Fewer, wider threads pay once there are enough to fill a GPU in any case.
  constexpr std::uint64_t kManyThreads = 1 << 18;
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Body = SumAxisBody<T>;
    using S = typename Body::S;
    auto* const partial = blocks > 1 ? static_cast<typename Body::Wide*>(scratch) : nullptr;
    const std::uint64_t count = std::uint64_t{outer} * blocks * inner;
    Run run = MakeRun(count, Body::kLanes, {{a, sizeof(S)}, {out, sizeof(S)}});
    if (run.head != 0 || inner % Body::kLanes != 0 || count / Body::kLanes < kManyThreads) {
      run.head = Run::kNotAlike;
    }
    LaunchOne(Body{static_cast<const S*>(a), length, inner, blocks, divisor, partial,
                   static_cast<S*>(out)},
              run, launch);
    if (partial == nullptr) return;
    LaunchOne(AddPartialBody<T>{partial, blocks, inner, divisor, static_cast<S*>(out)},
              {.count = std::uint64_t{outer} * inner, .head = 0}, launch);
  });
}

// ---- Products of two arrays, and norms

// A warp takes a block: lane j the elements j, j + 32, ...; then the lanes' sums are added
// pairwise, halving (ops/reduce.h).
template <typename T>
struct DotBlocksBody {
  const T* a;
  const T* b;
  std::uint64_t count;
  double* blocks;

  // What a lane adds up.
  HEDDLE_HOST_DEVICE double SumLane(std::uint64_t block, unsigned lane) const {
    const std::uint64_t begin = block * kReductionBlock;
    const std::uint64_t past = begin + kReductionBlock;
    const std::uint64_t end = past < count ? past : count;
    const std::uint64_t first = begin + lane;
    double sum = 0;
    if (first >= end) return sum;
    AddInOrder(
        0, (end - first + kWarpLanes - 1) / kWarpLanes,
        [&](std::uint64_t k) {
          const std::uint64_t i = first + k * kWarpLanes;
          return static_cast<double>(Widen(a[i])) * static_cast<double>(Widen(b[i]));
        },
        sum);
    return sum;
  }
};

// One thread: the square root of the sum of all blocks, in their order.
template <typename T>
struct NormBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 1;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t /*first*/, std::uint64_t /*step*/) const {
    double sum = 0;
    AddInOrder(
        0, count, [&](std::uint64_t b) { return blocks[b]; }, sum);
    *out = Convert<T>(std::sqrt(sum));
  }

  const double* blocks;
  std::uint64_t count;
  T* out;
};

template <class Launch>
void PlanNorm(DType dtype, const double* blocks, std::size_t count, void* out,
              const Launch& launch) {
  DispatchFloating(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    LaunchOne(NormBody<T>{blocks, count, static_cast<T*>(out)}, {.count = 1, .head = 0}, launch);
  });
}

}  // namespace heddle::ops::cuda
