// Sums of row-sparse values on a GPU: what its threads do.
//
// The rows of all inputs are listed, each as its id and its address, input after input; a stable
// sort brings those of one id together, in the order of the inputs; a warp adds up those of an id.
// How many ids there are stays in the GPU's memory, beside room for as many as there are rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/host_device.h"
#include "ops/cuda/run.h"
#include "ops/cuda/sum_plan.h"
#include "ops/dispatch.h"

namespace heddle::ops::cuda {

// The rows of one input.
struct ListRowsBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  const std::int64_t* ids;
  const std::byte* rows;
  std::uint64_t row_bytes;
  std::int64_t* out_ids;
  const std::byte** out_rows;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t i = first + v * step;
      out_ids[i] = ids[i];
      out_rows[i] = rows + i * row_bytes;
    }
  }
};

// flags[i] = 1 where an id comes first among sorted ones.
struct FlagFirstBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  const std::int64_t* ids;
  std::uint8_t* flags;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t i = first + v * step;
      flags[i] = i == 0 || ids[i] != ids[i - 1] ? 1 : 0;
    }
  }
};

// The sum of the rows of one id, by a warp (RunRowThread). There are *count of them; id i begins at
// place starts[i] of the sorted list.
template <typename T>
struct SumListedRowsBody {
  using Way = SumOf<T>;
  using S = StorageType<T>;
  const std::int64_t* ids;
  const std::byte* const* rows;
  std::uint64_t total;  // rows in the list
  const std::int64_t* starts;
  const std::int64_t* count;
  std::uint64_t row_elements;
  std::int64_t* out_ids;
  S* out_rows;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    const auto present = static_cast<std::uint64_t>(*count);
    if (row >= present) return;
    const auto begin = static_cast<std::uint64_t>(starts[row]);
    const std::uint64_t end =
        row + 1 < present ? static_cast<std::uint64_t>(starts[row + 1]) : total;
    if (lane == 0) out_ids[row] = ids[begin];
    S* const out = out_rows + row * row_elements;
    for (std::uint64_t i = lane; i < row_elements; i += kWarpLanes) {
      const S only = RowAt(begin)[i];
      if (end == begin + 1) {  // as it is, also a bool that is no 0 or 1
        out[i] = only;
        continue;
      }
      typename Way::C sum = Way::Load(only);
      for (std::uint64_t k = begin + 1; k < end; ++k) {
        sum = Way::Add(sum, Way::Load(RowAt(k)[i]));
      }
      out[i] = Way::Store(sum);
    }
  }
  HEDDLE_HOST_DEVICE const S* RowAt(std::uint64_t place) const {
    return reinterpret_cast<const S*>(rows[place]);
  }
};

}  // namespace heddle::ops::cuda
