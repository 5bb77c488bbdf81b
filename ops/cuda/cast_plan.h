// Casts on a GPU: what its threads do, and which launches a list of casts takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/convert.h"
#include "ops/cuda/cast.h"
#include "ops/cuda/copy_plan.h"
#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/table.h"
#include "ops/dispatch.h"

namespace heddle::ops::cuda {

// From and To: float32, float16 or bfloat16.
template <typename From, typename To>
struct FloatCastBody {
  static constexpr int kLanes = kAccessBytes / std::max(sizeof(From), sizeof(To));
  static constexpr int kUnroll = 4;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    Pack<From, kWidth> packs[kVectors];
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) packs[v] = LoadPack<kWidth>(source + first + v * step);
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Pack<To, kWidth> pack;
      HEDDLE_UNROLL
      for (int i = 0; i < kWidth; ++i) pack.lanes[i] = Narrow<To>(Widen(packs[v].lanes[i]));
      StorePack(pack, out + first + v * step);
    }
  }

  const From* source;
  To* out;
};

// Any pair, by way of int64 or float64, which hold all that integers or floats can be. To round
// twice is what Convert avoids: from float64, as from every float, it rounds once.
struct AnyCastBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    if (IsFloating(from)) {
      CastBy<double, kVectors>(first, step);
    } else {
      CastBy<std::int64_t, kVectors>(first, step);
    }
  }

  template <typename Wide, int kVectors>
  HEDDLE_HOST_DEVICE void CastBy(std::uint64_t first, std::uint64_t step) const {
    Wide values[kVectors];
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) values[v] = Load<Wide>(first + v * step);
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) Store(values[v], first + v * step);
  }

  template <typename Wide>
  HEDDLE_HOST_DEVICE Wide Load(std::uint64_t i) const {
    if constexpr (std::is_same_v<Wide, double>) {
      if (from == DType::kFloat32) return static_cast<const float*>(source)[i];
      if (from == DType::kFloat64) return static_cast<const double*>(source)[i];
      if (from == DType::kFloat16) return Widen(static_cast<const Float16*>(source)[i]);
      return Widen(static_cast<const BFloat16*>(source)[i]);
    } else {
      if (from == DType::kInt8) return static_cast<const std::int8_t*>(source)[i];
      if (from == DType::kInt32) return static_cast<const std::int32_t*>(source)[i];
      if (from == DType::kInt64) return static_cast<const std::int64_t*>(source)[i];
      const std::uint8_t byte = static_cast<const std::uint8_t*>(source)[i];
      return from == DType::kBool ? byte != 0 : byte;
    }
  }

  template <typename Wide>
  HEDDLE_HOST_DEVICE void Store(Wide value, std::uint64_t i) const {
    switch (to) {
      case DType::kFloat32:
        return StoreAs<float>(value, i);
      case DType::kFloat64:
        return StoreAs<double>(value, i);
      case DType::kFloat16:
        return StoreAs<Float16>(value, i);
      case DType::kBFloat16:
        return StoreAs<BFloat16>(value, i);
      case DType::kInt8:
        return StoreAs<std::int8_t>(value, i);
      case DType::kUInt8:
        return StoreAs<std::uint8_t>(value, i);
      case DType::kInt32:
        return StoreAs<std::int32_t>(value, i);
      case DType::kInt64:
        return StoreAs<std::int64_t>(value, i);
      case DType::kBool:
        return StoreAs<bool>(value, i);
    }
  }
  template <typename To, typename Wide>
  HEDDLE_HOST_DEVICE void StoreAs(Wide value, std::uint64_t i) const {
    static_cast<StorageType<To>*>(out)[i] = Convert<To>(value);
  }

  const void* source;
  void* out;
  DType from;
  DType to;
};

namespace internal {

template <typename From, typename To, class Launch>
void PlanFloatCasts(std::span<const CastTask> tasks, const Launch& launch) {
  using Body = FloatCastBody<From, To>;
  Packer<Body, Launch> packer(launch);
  for (const CastTask& task : tasks) {
    packer.Add(
        {static_cast<const From*>(task.source), static_cast<To*>(task.out)},
        MakeRun(task.count, Body::kLanes, {{task.source, sizeof(From)}, {task.out, sizeof(To)}}));
  }
  packer.Flush();
}

}  // namespace internal

// Calls launch(table) for the launches that make the casts.
template <class Launch>
void PlanCasts(DType from, DType to, std::span<const CastTask> tasks, const Launch& launch) {
  if (from == to) {
    std::vector<CopyTask> copies;
    copies.reserve(tasks.size());
    for (const CastTask& task : tasks) {
      copies.push_back({task.source, task.out, task.count * SizeOf(from)});
    }
    return PlanCopies(copies, launch);
  }
  constexpr DType k32 = DType::kFloat32;
  constexpr DType k16 = DType::kFloat16;
  constexpr DType kB16 = DType::kBFloat16;
  if (from == k16 && to == k32) return internal::PlanFloatCasts<Float16, float>(tasks, launch);
  if (from == kB16 && to == k32) return internal::PlanFloatCasts<BFloat16, float>(tasks, launch);
  if (from == k32 && to == k16) return internal::PlanFloatCasts<float, Float16>(tasks, launch);
  if (from == k32 && to == kB16) return internal::PlanFloatCasts<float, BFloat16>(tasks, launch);
  if (from == kB16 && to == k16) return internal::PlanFloatCasts<BFloat16, Float16>(tasks, launch);
  if (from == k16 && to == kB16) return internal::PlanFloatCasts<Float16, BFloat16>(tasks, launch);
  Packer<AnyCastBody, Launch> packer(launch);
  for (const CastTask& task : tasks) {
    packer.Add({task.source, task.out, from, to}, {.count = task.count, .head = 0});
  }
  packer.Flush();
}

}  // namespace heddle::ops::cuda
