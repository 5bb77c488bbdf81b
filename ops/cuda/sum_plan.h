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

// One sum, or what one launch adds to it. Inputs are taken in turn, each for all of the thread's
// elements.
template <typename T>
struct SumBody {
  using Way = SumOf<T>;
  using C = typename Way::C;
  using S = StorageType<T>;
  static constexpr int kLanes = kAccessBytes / sizeof(T);
  static constexpr int kUnroll = std::min(4, 32 / kLanes);  // 32 sums a thread at most

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    C sum[kVectors][kWidth] = {};
    if (taken_up != nullptr) {
      for (int v = 0; v < kVectors; ++v) {
        for (int i = 0; i < kWidth; ++i) sum[v][i] = taken_up[first + v * step + i];
      }
    }
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
          sum[v][i] = k == 0 && taken_up == nullptr ? value : Way::Add(sum[v][i], value);
        }
      }
    }
    if (put_aside != nullptr) {
      for (int v = 0; v < kVectors; ++v) {
        for (int i = 0; i < kWidth; ++i) put_aside[first + v * step + i] = sum[v][i];
      }
      return;
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
  const C* taken_up;  // null: none, the sum begins here
  C* put_aside;       // null: the sum ends here
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
  static_assert(sizeof(Task) == 32 && kGpuSumInputsMax == 288);
  using C = typename Body::C;

  std::uint32_t size = 0;
  std::uint32_t ends[kCapacity];
  Task tasks[kCapacity];
  const void* inputs[kGpuSumInputsMax];
  // Of the one task of a sum that takes several launches.
  const C* taken_up = nullptr;
  C* put_aside = nullptr;

  std::uint32_t blocks() const { return size == 0 ? 0 : ends[size - 1]; }
  std::uint32_t used_inputs() const { return size == 0 ? 0 : tasks[size - 1].inputs_end; }
  HEDDLE_HOST_DEVICE const Run& RunOf(std::uint32_t task) const { return tasks[task].run; }
  HEDDLE_HOST_DEVICE Body BodyOf(std::uint32_t task) const {
    const Task& t = tasks[task];
    return {inputs + t.inputs_begin, t.inputs_end - t.inputs_begin, t.out, taken_up, put_aside};
  }
};

// The launches of one sum of more inputs than a table takes.
template <typename T, class Launch>
void PlanLongSum(const SumTask& task, const Run& run, std::uint64_t blocks, const Launch& launch) {
  SumTable<T> table;
  table.size = 1;
  table.ends[0] = static_cast<std::uint32_t>(blocks);
  auto* const carry = static_cast<typename SumTable<T>::C*>(task.carry);
  for (std::size_t begin = 0; begin < task.inputs.size(); begin += kGpuSumInputsMax) {
    const std::size_t size = std::min(kGpuSumInputsMax, task.inputs.size() - begin);
    const auto part = task.inputs.subspan(begin, size);
    std::copy(part.begin(), part.end(), table.inputs);
    table.tasks[0] = {run, task.out, 0, static_cast<std::uint32_t>(size)};
    table.taken_up = begin > 0 ? carry : nullptr;
    table.put_aside = begin + size < task.inputs.size() ? carry : nullptr;
    launch(table);
  }
}

// Throws unless a sum of so many can be made.
inline void CheckSumInputs(const char* what, std::size_t count, const void* carry) {
  if (count == 0) {
    throw InvalidArgument(std::string("sum on a GPU: expected one or more ") + what + ", got none");
  }
  if (count > kGpuSumInputsMax && carry == nullptr) {
    throw InvalidArgument("sum on a GPU: expected 1 to " + std::to_string(kGpuSumInputsMax) + " " +
                          what + ", or memory to put sums aside, got " + std::to_string(count));
  }
}

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
    if (task.inputs.size() > kGpuSumInputsMax) {
      PlanLongSum<T>(task, run, blocks, launch);
      continue;
    }
    if (table.size == table.kCapacity ||
        table.used_inputs() + task.inputs.size() > kGpuSumInputsMax ||
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
    CheckSumInputs("inputs", task.inputs.size(), task.carry);
  }
  DispatchDType(dtype, [&](auto type) {
    PlanSumsOf<WrappingType<typename decltype(type)::type>>(tasks, launch);
  });
}

}  // namespace heddle::ops::cuda
