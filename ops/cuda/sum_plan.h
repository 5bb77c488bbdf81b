// Sums on a GPU: what its threads do, and which launches a list of sums takes.
#pragma once

#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/sum.h"
#include "ops/cuda/table.h"
#include "ops/dispatch.h"

namespace heddle::ops::cuda {

// The type of the same size whose additions give the bits of T's: unsigned integers wrap.
template <typename T>
struct WrappingTypeOf {
  using type = T;
};
template <typename T>
requires(std::is_integral_v<T> && !std::is_same_v<T, bool>) struct WrappingTypeOf<T> {
  using type = std::make_unsigned_t<T>;
};
template <typename T>
using WrappingType = typename WrappingTypeOf<T>::type;

// How elements of T add up: in a C, by Add.
template <typename T>
struct SumOf {
  using C = ComputeType<T>;
  static HEDDLE_HOST_DEVICE C Load(T value) { return Widen(value); }
  static HEDDLE_HOST_DEVICE C Add(C a, C b) { return static_cast<C>(a + b); }
  static HEDDLE_HOST_DEVICE T Store(C sum) { return Narrow<T>(sum); }
};
template <>
struct SumOf<bool> {  // any byte but 0 is true
  using C = std::uint8_t;
  static HEDDLE_HOST_DEVICE C Load(std::uint8_t value) { return value; }
  static HEDDLE_HOST_DEVICE C Add(C a, C b) { return a | b; }
  static HEDDLE_HOST_DEVICE std::uint8_t Store(C sum) { return sum != 0 ? 1 : 0; }
};

// One sum. Inputs are taken in turn, each for all of the thread's elements.
template <typename T>
struct SumBody {
  using Way = SumOf<T>;
  using S = StorageType<T>;
  static constexpr int kLanes = kAccessBytes / sizeof(T);
  static constexpr int kUnroll = std::min(4, 32 / kLanes);  // 32 sums a thread at most

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    typename Way::C sum[kVectors][kWidth] = {};
    for (std::uint32_t k = 0; k < size; ++k) {
      const S* const input = static_cast<const S*>(inputs[k]);
      Pack<S, kWidth> packs[kVectors];
      HEDDLE_UNROLL
      for (int v = 0; v < kVectors; ++v) packs[v] = LoadPack<kWidth>(input + first + v * step);
      HEDDLE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        HEDDLE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const auto value = Way::Load(packs[v].lanes[i]);
          sum[v][i] = k == 0 ? value : Way::Add(sum[v][i], value);
        }
      }
    }
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Pack<S, kWidth> pack;
      HEDDLE_UNROLL
      for (int i = 0; i < kWidth; ++i) pack.lanes[i] = Way::Store(sum[v][i]);
      StorePack(pack, static_cast<S*>(out) + first + v * step);
    }
  }

  const void* const* inputs;
  std::uint32_t size;  // at least 1
  void* out;
};

// Several sums in one launch. The inputs of all lie in one list.
template <typename T>
struct SumTable {
  using Body = SumBody<T>;
  struct Task {
    Run run;
    void* out;
    std::uint32_t inputs_begin;
    std::uint32_t inputs_end;
  };
  static constexpr std::uint32_t kCapacity = 48;
  static_assert(sizeof(Task) == 32 && kSumInputsMax == 288);

  std::uint32_t size = 0;
  std::uint32_t ends[kCapacity];
  Task tasks[kCapacity];
  const void* inputs[kSumInputsMax];

  std::uint32_t blocks() const { return size == 0 ? 0 : ends[size - 1]; }
  std::uint32_t used_inputs() const { return size == 0 ? 0 : tasks[size - 1].inputs_end; }
  HEDDLE_HOST_DEVICE const Run& RunOf(std::uint32_t task) const { return tasks[task].run; }
  HEDDLE_HOST_DEVICE Body BodyOf(std::uint32_t task) const {
    const Task& t = tasks[task];
    return {inputs + t.inputs_begin, t.inputs_end - t.inputs_begin, t.out};
  }
};

// Calls launch(table) for the launches that make the sums; throws before the first.
template <typename T, class Launch>
void PlanSumsOf(std::span<const SumTask> tasks, const Launch& launch) {
  SumTable<T> table;
  for (const SumTask& task : tasks) {
    Run run = MakeRun(task.count, SumBody<T>::kLanes, {{task.out, sizeof(T)}});
    for (const void* input : task.inputs) {
      const Run with =
          MakeRun(task.count, SumBody<T>::kLanes, {{task.out, sizeof(T)}, {input, sizeof(T)}});
      if (with.head == Run::kNotAlike) run = with;
    }
    const std::uint64_t blocks = BlocksOf<SumBody<T>>(run);
    if (blocks == 0) continue;
    if (table.size == table.kCapacity || table.used_inputs() + task.inputs.size() > kSumInputsMax ||
        table.blocks() + blocks > kBlocksMax) {
      launch(table);
      table.size = 0;
    }
    const std::uint32_t begin = table.used_inputs();
    std::copy(task.inputs.begin(), task.inputs.end(), table.inputs + begin);
    table.tasks[table.size] = {run, task.out, begin,
                               begin + static_cast<std::uint32_t>(task.inputs.size())};
    table.ends[table.size] = static_cast<std::uint32_t>(table.blocks() + blocks);
    ++table.size;
  }
  if (table.size > 0) launch(table);
}

template <class Launch>
void PlanSums(DType dtype, std::span<const SumTask> tasks, const Launch& launch) {
  for (const SumTask& task : tasks) {
    if (task.inputs.empty() || task.inputs.size() > kSumInputsMax) {
      throw InvalidArgument("sum on a GPU: expected 1 to " + std::to_string(kSumInputsMax) +
                            " inputs, got " + std::to_string(task.inputs.size()));
    }
  }
  DispatchDType(dtype, [&](auto type) {
    PlanSumsOf<WrappingType<typename decltype(type)::type>>(tasks, launch);
  });
}

}  // namespace heddle::ops::cuda
