// Rows on a GPU: what its threads do. A warp takes a row; each of its threads looks for the row's
// place itself, which costs no more than if one did and told the others.
#pragma once

#include <heddle/dtype.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/host_device.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/row_sparse.h"
#include "ops/cuda/run.h"
#include "ops/cuda/sum_plan.h"
#include "ops/dispatch.h"

namespace heddle::ops::cuda {

inline constexpr unsigned kRowsPerBlock = kBlockWarps;

// What one thread does: calls body(row, lane) if there is such a row.
template <class Body>
HEDDLE_HOST_DEVICE void RunRowThread(const Body& body, std::uint64_t rows, std::uint64_t block,
                                     unsigned thread) {
  const std::uint64_t row = block * kRowsPerBlock + thread / kWarpLanes;
  if (row < rows) body(row, thread % kWarpLanes);
}

// How many of the sorted ids are less than `id`.
HEDDLE_HOST_DEVICE std::size_t LowerBound(std::int64_t id, const std::int64_t* ids,
                                          std::size_t count) {
  std::size_t low = 0;
  std::size_t high = count;
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    if (ids[middle] < id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The place of `id` among sorted ids, or -1.
HEDDLE_HOST_DEVICE std::int64_t PlaceOf(std::int64_t id, const std::int64_t* ids,
                                        std::size_t count) {
  const std::size_t place = LowerBound(id, ids, count);
  return place < count && ids[place] == id ? static_cast<std::int64_t>(place) : -1;
}

// How many of the ids or rows of a list there are.
template <class List>
HEDDLE_HOST_DEVICE std::size_t PresentOf(const List& list) {
  return list.present == nullptr ? list.count : static_cast<std::size_t>(*list.present);
}

// How a row's bytes move: `unit` at a time, the most that all rows are multiples of, up to 16.
struct RowCopy {
  std::size_t row_bytes;
  std::size_t unit;

  // `a` and `b`: where rows lie, one after another.
  RowCopy(std::size_t row_bytes, const void* a, const void* b) : row_bytes(row_bytes) {
    const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(a) |
                               reinterpret_cast<std::uintptr_t>(b) | row_bytes | kAccessBytes;
    unit = all & (~all + 1);
  }

  // This lane's part of the row; null: zeros.
  HEDDLE_HOST_DEVICE void operator()(const std::byte* from, std::byte* to, unsigned lane) const {
    switch (unit) {
      case 16:
        return Move<std::uint32_t, 4>(from, to, lane);
      case 8:
        return Move<std::uint32_t, 2>(from, to, lane);
      case 4:
        return Move<std::uint32_t, 1>(from, to, lane);
      case 2:
        return Move<std::uint16_t, 1>(from, to, lane);
      default:
        return Move<std::uint8_t, 1>(from, to, lane);
    }
  }
  template <typename U, int kWidth>
  HEDDLE_HOST_DEVICE void Move(const std::byte* from, std::byte* to, unsigned lane) const {
    for (std::size_t at = lane * unit; at < row_bytes; at += kWarpLanes * unit) {
      Pack<U, kWidth> pack = {};
      if (from != nullptr) pack = LoadPack<kWidth>(reinterpret_cast<const U*>(from + at));
      StorePack(pack, reinterpret_cast<U*>(to + at));
    }
  }
};

struct GatherRowsBody {
  GpuRows value;
  GpuIds wanted;
  std::byte* out;
  RowCopy copy;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    if (row >= PresentOf(wanted)) return;
    const std::int64_t place = PlaceOf(wanted.ids[row], value.ids, PresentOf(value));
    const std::byte* const rows = static_cast<const std::byte*>(value.rows);
    copy(place < 0 ? nullptr : rows + static_cast<std::size_t>(place) * copy.row_bytes,
         out + row * copy.row_bytes, lane);
  }
};

struct FlagPresentBody {
  GpuRows value;
  const std::int64_t* wanted;
  std::uint8_t* flags;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    if (lane == 0) flags[row] = PlaceOf(wanted[row], value.ids, PresentOf(value)) >= 0 ? 1 : 0;
  }
};

struct ScatterRowsBody {
  GpuRows value;
  std::byte* dense;
  std::int64_t first_row;
  RowCopy copy;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    if (row >= PresentOf(value)) return;
    copy(static_cast<const std::byte*>(value.rows) + row * copy.row_bytes,
         dense + static_cast<std::size_t>(value.ids[row] - first_row) * copy.row_bytes, lane);
  }
};

struct GatherDenseRowsBody {
  const std::byte* dense;
  std::int64_t first_row;
  GpuIds list;
  std::byte* out;
  RowCopy copy;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    if (row >= PresentOf(list)) return;
    copy(dense + static_cast<std::size_t>(list.ids[row] - first_row) * copy.row_bytes,
         out + row * copy.row_bytes, lane);
  }
};

template <typename T>
struct AddRowsBody {
  using Way = SumOf<T>;
  using S = StorageType<T>;
  GpuRows value;
  S* dense;
  std::int64_t first_row;
  std::size_t row_elements;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    if (row >= PresentOf(value)) return;
    const S* const from = static_cast<const S*>(value.rows) + row * row_elements;
    S* const to = dense + static_cast<std::size_t>(value.ids[row] - first_row) * row_elements;
    for (std::size_t i = lane; i < row_elements; i += kWarpLanes) {
      to[i] = Way::Store(Way::Add(Way::Load(to[i]), Way::Load(from[i])));
    }
  }
};

// Sets flags that are 0 before: lanes that find something all write the same.
template <typename T>
struct FlagNonZeroRowsBody {
  using S = StorageType<T>;
  const S* dense;
  std::size_t row_elements;
  std::uint8_t* flags;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    const S* const elements = dense + row * row_elements;
    for (std::size_t i = lane; i < row_elements; i += kWarpLanes) {
      if (Widen(elements[i]) == 0) continue;
      flags[row] = 1;
      return;
    }
  }
};

// One id: whether it is a whole number in [0, num_rows), and which.
template <typename T>
HEDDLE_HOST_DEVICE bool ReadRowId(T id, std::int64_t num_rows, std::int64_t& out) {
  if constexpr (std::is_integral_v<T>) {
    out = static_cast<std::int64_t>(id);
    return out >= 0 && out < num_rows;
  } else {
    const double wide = static_cast<double>(Widen(id));
    out = 0;
    // Any double from 2^63 on is above every number of rows; a NaN fails the first comparison.
    if (!(wide >= 0 && wide < 0x1p63)) return false;
    out = static_cast<std::int64_t>(wide);
    return static_cast<double>(out) == wide && out < num_rows;
  }
}

template <typename T>
struct ReadRowIdsBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  const T* ids;
  std::int64_t num_rows;
  std::int64_t* out;
  std::uint64_t* first_bad;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t i = first + v * step;
      if (!ReadRowId(ids[i], num_rows, out[i])) KeepLeast(i);
    }
  }
  HEDDLE_HOST_DEVICE void KeepLeast(std::uint64_t place) const {
#ifdef __CUDA_ARCH__
    atomicMin(reinterpret_cast<unsigned long long*>(first_bad), place);
#else
    *first_bad = std::min(*first_bad, place);
#endif
  }
};

}  // namespace heddle::ops::cuda
