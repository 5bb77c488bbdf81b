// Quantising on a GPU: what its threads do, and which launches a list of arrays takes.
#pragma once

#include <heddle/error.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/quantise.h"
#include "ops/cuda/run.h"
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

// A thread has four elements: a byte of code, or half of one. Runs count fours of elements.
template <int kBits>
struct DequantiseBody {
  using Code = Codec<kBits>;
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
    // Of one bit an element, odd fours are the lower half.
    const unsigned bits = kBits == 1 && four % 2 == 0 ? byte >> 4 : byte;
    Pack<float, kQuantiseLanes> pack;
    HEDDLE_UNROLL
    for (int i = 0; i < kQuantiseLanes; ++i) {
      const unsigned one = bits >> (kBits * (kQuantiseLanes - 1 - i)) & ((1U << kBits) - 1);
      pack.lanes[i] = Code::Value(threshold, one);
    }
    const std::uint64_t begin = four * kQuantiseLanes;
    if (vectors && begin + kQuantiseLanes <= count) {
      StorePack(pack, out + begin);
      return;
    }
    for (int i = 0; i < kQuantiseLanes && begin + i < count; ++i) out[begin + i] = pack.lanes[i];
  }

  const std::uint8_t* code;
  float* out;
  std::uint64_t count;
  float threshold;
  bool vectors;
};

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
  if (dtype == DType::kFloat32) {
    PlanQuantiseOf<kBits, float>(threshold, tasks, launch);
  } else if (dtype == DType::kFloat16) {
    PlanQuantiseOf<kBits, Float16>(threshold, tasks, launch);
  } else if (dtype == DType::kBFloat16) {
    PlanQuantiseOf<kBits, BFloat16>(threshold, tasks, launch);
  } else {
    throw InvalidArgument("quantise: expected float32, float16 or bfloat16, got " +
                          std::string(Name(dtype)));
  }
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

}  // namespace heddle::ops::cuda
