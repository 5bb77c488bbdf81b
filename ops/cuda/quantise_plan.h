// Quantising on a GPU: what its threads do, and which launches a list of arrays takes.
#pragma once

#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/quantise.h"
#include "ops/cuda/run.h"
#include "ops/cuda/sum_plan.h"
#include "ops/cuda/table.h"
#include "ops/quantise.h"

namespace heddle::ops::cuda {

// The code of one element, of kBits bits, and what it stands for.
template <int kBits>
struct Codec;

template <>
struct Codec<2> {
  static constexpr int kPerByte = 4;

  // `r` becomes what is left of it.
  static HEDDLE_HOST_DEVICE unsigned Quantise(float threshold, float& r) {
    const bool is_plus = r >= threshold;
    const bool is_minus = r <= -threshold;
    if (is_plus) {
      r = r - threshold;
    } else if (is_minus) {
      r = r + threshold;
    }
    return is_plus ? 3 : is_minus ? 2 : 0;
  }
  static HEDDLE_HOST_DEVICE float Value(float threshold, unsigned code) {
    return code == 3 ? threshold : code == 2 ? -threshold : 0.0F;
  }
};

template <>
struct Codec<1> {
  static constexpr int kPerByte = 8;

  static HEDDLE_HOST_DEVICE unsigned Quantise(float threshold, float& r) {
    const bool is_plus = r > threshold;
    r = r - (is_plus ? 1.0F : -1.0F);
    return is_plus ? 1 : 0;
  }
  static HEDDLE_HOST_DEVICE float Value(float /*threshold*/, unsigned code) {
    return code == 1 ? 1.0F : -1.0F;
  }
};

// Elements that one access moves.
inline constexpr int kQuantiseLanes = 4;

// A thread has the elements of a byte of code: neighbouring threads then touch neighbouring memory
// in all arrays, and no thread needs another's bits. Runs count bytes of code.
template <int kBits, typename T>
struct QuantiseBody {
  using Code = Codec<kBits>;
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 16 / Code::kPerByte;
  static constexpr int kPerByte = Code::kPerByte;

  template <int kWidth, int kBytes>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    if (vectors && (first + (kBytes - 1) * step + 1) * kPerByte <= count) {
      Whole<kBytes>(first, step);
    } else {
      for (int b = 0; b < kBytes; ++b) Part(first + b * step);
    }
  }

  // kBytes bytes, of which none lacks an element.
  template <int kBytes>
  HEDDLE_HOST_DEVICE void Whole(std::uint64_t first, std::uint64_t step) const {
    constexpr int kPacks = kPerByte / kQuantiseLanes;
    Pack<T, kQuantiseLanes> g[kBytes][kPacks];
    Pack<float, kQuantiseLanes> r[kBytes][kPacks];
    HEDDLE_UNROLL
    for (int b = 0; b < kBytes; ++b) {
      HEDDLE_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        const std::uint64_t i = (first + b * step) * kPerByte + p * kQuantiseLanes;
        g[b][p] = LoadPack<kQuantiseLanes>(gradient + i);
        r[b][p] = LoadPack<kQuantiseLanes>(residual + i);
      }
    }
    HEDDLE_UNROLL
    for (int b = 0; b < kBytes; ++b) {
      unsigned byte = 0;
      HEDDLE_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        HEDDLE_UNROLL
        for (int i = 0; i < kQuantiseLanes; ++i) {
          float& left = r[b][p].lanes[i];
          left = left + Widen(g[b][p].lanes[i]);
          byte = byte << kBits | Code::Quantise(threshold, left);
        }
        StorePack(r[b][p], residual + (first + b * step) * kPerByte + p * kQuantiseLanes);
      }
      code[first + b * step] = static_cast<std::uint8_t>(byte);
    }
  }

  // One byte, filled up with zeros.
  HEDDLE_HOST_DEVICE void Part(std::uint64_t at) const {
    unsigned byte = 0;
    for (int i = 0; i < kPerByte; ++i) {
      const std::uint64_t element = at * kPerByte + i;
      byte <<= kBits;
      if (element >= count) continue;
      float left = residual[element] + Widen(gradient[element]);
      byte |= Code::Quantise(threshold, left);
      residual[element] = left;
    }
    code[at] = static_cast<std::uint8_t>(byte);
  }

  const T* gradient;
  float* residual;
  std::uint8_t* code;
  std::uint64_t count;
  float threshold;
  bool vectors;  // the arrays are aligned
};

// What the i-th of a four of elements stands for; `byte`: of code, that of the four.
template <int kBits>
HEDDLE_HOST_DEVICE float ValueOf(float threshold, unsigned byte, std::uint64_t four, int i) {
  // Of one bit an element, odd fours are the lower half.
  const unsigned bits = kBits == 1 && four % 2 == 0 ? byte >> 4 : byte;
  const unsigned code = bits >> (kBits * (kQuantiseLanes - 1 - i)) & ((1U << kBits) - 1);
  return Codec<kBits>::Value(threshold, code);
}

// Those of the four that are there; `vectors`: `out` is aligned. `kOnce`: see StorePackOnce.
template <bool kOnce = false, typename T>
HEDDLE_HOST_DEVICE void StoreFour(const Pack<T, kQuantiseLanes>& pack, T* out, std::uint64_t four,
                                  std::uint64_t count, bool vectors) {
  const std::uint64_t begin = four * kQuantiseLanes;
  if (vectors && begin + kQuantiseLanes <= count) {
    if constexpr (kOnce) {
      StorePackOnce(pack, out + begin);
    } else {
      StorePack(pack, out + begin);
    }
    return;
  }
  for (int i = 0; i < kQuantiseLanes && begin + i < count; ++i) out[begin + i] = pack.lanes[i];
}

// A thread has four elements: a byte of code, or half of one. Runs count fours of elements.
template <int kBits>
struct DequantiseBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;

  template <int kWidth, int kFours>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    std::uint8_t bytes[kFours];
    HEDDLE_UNROLL
    for (int f = 0; f < kFours; ++f) bytes[f] = code[(first + f * step) * kBits / 2];
    HEDDLE_UNROLL
    for (int f = 0; f < kFours; ++f) Decode(bytes[f], first + f * step);
  }

  HEDDLE_HOST_DEVICE void Decode(unsigned byte, std::uint64_t four) const {
    Pack<float, kQuantiseLanes> pack;
    HEDDLE_UNROLL
    for (int i = 0; i < kQuantiseLanes; ++i) {
      pack.lanes[i] = ValueOf<kBits>(threshold, byte, four, i);
    }
    StoreFour</*kOnce=*/true>(pack, out, four, count, vectors);
  }

  const std::uint8_t* code;
  float* out;
  std::uint64_t count;
  float threshold;
  bool vectors;
};

// The sum of several codes, as SumBody (sum_plan.h) adds. Runs count fours of elements.
template <int kBits, typename T>
struct CodeSumBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;

  template <int kWidth, int kFours>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    float sum[kFours][kQuantiseLanes] = {};
    if (taken_up != nullptr) {
      ForElements<kFours>(first, step,
                          [&](int f, int i, std::uint64_t at) { sum[f][i] = taken_up[at]; });
    }
    for (std::uint32_t k = 0; k < size; ++k) {
      const auto* const code = static_cast<const std::uint8_t*>(codes[k]);
      std::uint8_t bytes[kFours];
      HEDDLE_UNROLL
      for (int f = 0; f < kFours; ++f) bytes[f] = code[(first + f * step) * kBits / 2];
      HEDDLE_UNROLL
      for (int f = 0; f < kFours; ++f) {
        HEDDLE_UNROLL
        for (int i = 0; i < kQuantiseLanes; ++i) {
          const float value = ValueOf<kBits>(threshold, bytes[f], first + f * step, i);
          sum[f][i] = k == 0 && taken_up == nullptr ? value : sum[f][i] + value;
        }
      }
    }
    if (put_aside != nullptr) {
      ForElements<kFours>(first, step,
                          [&](int f, int i, std::uint64_t at) { put_aside[at] = sum[f][i]; });
      return;
    }
    HEDDLE_UNROLL
    for (int f = 0; f < kFours; ++f) {
      Pack<T, kQuantiseLanes> pack;
      HEDDLE_UNROLL
      for (int i = 0; i < kQuantiseLanes; ++i) pack.lanes[i] = Narrow<T>(sum[f][i]);
      StoreFour(pack, out, first + f * step, count, vectors);
    }
  }

  // Calls visit(four, place in it, element) for the elements that there are.
  template <int kFours, class Visit>
  HEDDLE_HOST_DEVICE void ForElements(std::uint64_t first, std::uint64_t step,
                                      const Visit& visit) const {
    for (int f = 0; f < kFours; ++f) {
      for (int i = 0; i < kQuantiseLanes; ++i) {
        const std::uint64_t at = (first + f * step) * kQuantiseLanes + i;
        if (at < count) visit(f, i, at);
      }
    }
  }

  const void* const* codes;
  std::uint32_t size;  // at least 1
  T* out;
  std::uint64_t count;
  float threshold;
  bool vectors;
  const float* taken_up;  // as of SumBody
  float* put_aside;
};

// One sum in one launch.
template <int kBits, typename T>
struct CodeSumTable {
  using Body = CodeSumBody<kBits, T>;

  std::uint32_t size = 1;
  std::uint32_t ends[1];
  Run run;
  T* out;
  std::uint64_t count;
  float threshold;
  bool vectors;
  std::uint32_t num_codes;
  const float* taken_up;
  float* put_aside;
  const void* codes[kGpuSumInputsMax];

  std::uint32_t blocks() const { return ends[0]; }
  HEDDLE_HOST_DEVICE const Run& RunOf(std::uint32_t /*task*/) const { return run; }
  HEDDLE_HOST_DEVICE Body BodyOf(std::uint32_t /*task*/) const {
    return {codes, num_codes, out, count, threshold, vectors, taken_up, put_aside};
  }
};

// Calls f(T{}) for the type of a gradient; throws for another dtype.
template <class F>
void DispatchQuantised(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) return f(float{});
  if (dtype == DType::kFloat16) return f(Float16{});
  if (dtype == DType::kBFloat16) return f(BFloat16{});
  throw InvalidArgument("quantise: expected float32, float16 or bfloat16, got " +
                        std::string(Name(dtype)));
}

template <int kBits, typename T, class Launch>
void PlanQuantiseOf(float threshold, std::span<const QuantiseTask> tasks, const Launch& launch) {
  Packer<QuantiseBody<kBits, T>, Launch> packer(launch);
  for (const QuantiseTask& task : tasks) {
    const Run aligned = MakeRun(kQuantiseLanes, kQuantiseLanes,
                                {{task.gradient, sizeof(T)}, {task.residual, sizeof(float)}});
    const std::size_t bytes =
        kBits == 2 ? TwoBitCodeBytes(task.count) : OneBitCodeBytes(task.count);
    packer.Add({static_cast<const T*>(task.gradient), task.residual,
                static_cast<std::uint8_t*>(task.code), task.count, threshold, aligned.head == 0},
               {.count = bytes, .head = 0});
  }
  packer.Flush();
}

// Calls launch(table) for the launches that quantise; throws before the first.
template <int kBits, class Launch>
void PlanQuantise(float threshold, DType dtype, std::span<const QuantiseTask> tasks,
                  const Launch& launch) {
  DispatchQuantised(
      dtype, [&](auto type) { PlanQuantiseOf<kBits, decltype(type)>(threshold, tasks, launch); });
}

template <int kBits, class Launch>
void PlanDequantise(float threshold, std::span<const DequantiseTask> tasks, const Launch& launch) {
  Packer<DequantiseBody<kBits>, Launch> packer(launch);
  for (const DequantiseTask& task : tasks) {
    const Run aligned = MakeRun(kQuantiseLanes, kQuantiseLanes, {{task.out, sizeof(float)}});
    packer.Add({static_cast<const std::uint8_t*>(task.code), task.out, task.count, threshold,
                aligned.head == 0},
               {.count = (task.count + kQuantiseLanes - 1) / kQuantiseLanes, .head = 0});
  }
  packer.Flush();
}

// Calls launch(table) for the launches that add the codes, none if `count` is 0; throws before.
template <int kBits, class Launch>
void PlanCodeSum(float threshold, std::span<const void* const> codes, DType dtype, void* out,
                 float* carry, std::size_t count, const Launch& launch) {
  CheckSumInputs("codes", codes.size(), carry);
  DispatchQuantised(dtype, [&](auto type) {
    using T = decltype(type);
    using Table = CodeSumTable<kBits, T>;
    Table table;
    table.run = {.count = (count + kQuantiseLanes - 1) / kQuantiseLanes, .head = 0};
    table.ends[0] = static_cast<std::uint32_t>(BlocksOf<typename Table::Body>(table.run));
    table.out = static_cast<T*>(out);
    table.count = count;
    table.threshold = threshold;
    table.vectors = MakeRun(count, kQuantiseLanes, {{out, sizeof(T)}}).head == 0;
    for (std::size_t begin = 0; begin < codes.size() && count > 0; begin += kGpuSumInputsMax) {
      const std::size_t size = std::min(kGpuSumInputsMax, codes.size() - begin);
      const auto part = codes.subspan(begin, size);
      std::copy(part.begin(), part.end(), table.codes);
      table.num_codes = static_cast<std::uint32_t>(size);
      table.taken_up = begin > 0 ? carry : nullptr;
      table.put_aside = begin + size < codes.size() ? carry : nullptr;
      launch(table);
    }
  });
}

}  // namespace heddle::ops::cuda
