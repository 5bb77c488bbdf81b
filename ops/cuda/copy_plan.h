// Copies and fills on a GPU: what its threads do, and which launches a list of them takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/cuda/copy.h"
#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/table.h"
#include "ops/fill.h"

namespace heddle::ops::cuda {

// U: an unsigned integer as large as what is copied at once, at least.
template <typename U>
struct CopyBody {
  static constexpr int kLanes = kAccessBytes / sizeof(U);
  static constexpr int kUnroll = 4;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    Pack<U, kWidth> packs[kVectors];
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) packs[v] = LoadPack<kWidth>(source + first + v * step);
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) StorePack(packs[v], out + first + v * step);
  }

  const U* source;
  U* out;
};

template <typename U>
struct FillBody {
  static constexpr int kLanes = kAccessBytes / sizeof(U);
  static constexpr int kUnroll = 4;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    Pack<U, kWidth> pack;
    HEDDLE_UNROLL
    for (int i = 0; i < kWidth; ++i) pack.lanes[i] = value;
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) StorePack(pack, out + first + v * step);
  }

  U* out;
  U value;
};

// The most bytes, up to 4, that source, out and length of a copy are multiples of.
inline std::size_t CopyUnit(const CopyTask& task) {
  const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(task.source) |
                             reinterpret_cast<std::uintptr_t>(task.out) | task.bytes | 4;
  return all & (~all + 1);
}

// Calls launch(table) for the launches that make the copies.
template <class Launch>
void PlanCopies(std::span<const CopyTask> tasks, const Launch& launch) {
  const auto plan = [&](auto unit) {
    using U = decltype(unit);
    Packer<CopyBody<U>, Launch> packer(launch);
    for (const CopyTask& task : tasks) {
      if (CopyUnit(task) != sizeof(U) || task.source == task.out) continue;
      packer.Add({static_cast<const U*>(task.source), static_cast<U*>(task.out)},
                 MakeRun(task.bytes / sizeof(U), CopyBody<U>::kLanes,
                         {{task.source, sizeof(U)}, {task.out, sizeof(U)}}));
    }
    packer.Flush();
  };
  plan(std::uint32_t{});
  plan(std::uint16_t{});
  plan(std::uint8_t{});
}

template <class Launch>
void PlanFills(DType dtype, Scalar value, std::span<const FillTask> tasks, const Launch& launch) {
  const auto plan = [&](auto pattern) {
    using U = decltype(pattern);
    Packer<FillBody<U>, Launch> packer(launch);
    for (const FillTask& task : tasks) {
      packer.Add({static_cast<U*>(task.out), pattern},
                 MakeRun(task.count, FillBody<U>::kLanes, {{task.out, sizeof(U)}}));
    }
    packer.Flush();
  };
  const std::uint64_t pattern = FillPattern(dtype, value);
  switch (SizeOf(dtype)) {
    case 1:
      return plan(static_cast<std::uint8_t>(pattern));
    case 2:
      return plan(static_cast<std::uint16_t>(pattern));
    case 4:
      return plan(static_cast<std::uint32_t>(pattern));
    default:
      return plan(pattern);
  }
}

}  // namespace heddle::ops::cuda
