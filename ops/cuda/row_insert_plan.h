// Rows that are inserted into a value on a GPU: what its threads do.
//
// All ids of the value and those wanted ids that it lacks, in one sorted list: an id of the value
// moves up by the missing ids below it, a missing id by the ids of the value below it. The former
// are counted once, for all places of the wanted list (a running sum of FlagMissingBody's flags);
// the latter are found by a binary search.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/host_device.h"
#include "ops/cuda/row_sparse_plan.h"

namespace heddle::ops::cuda {

// flags[i] = 1 if wanted id i is there and value lacks it, else 0; also for i = wanted.count.
struct FlagMissingBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  GpuIds value;
  GpuIds wanted;
  std::int64_t* flags;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    const std::size_t there = PresentOf(wanted);
    const std::size_t count = PresentOf(value);
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t i = first + v * step;
      flags[i] = i < there && PlaceOf(wanted.ids[i], value.ids, count) < 0 ? 1 : 0;
    }
  }
};

struct FindRowsBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  GpuIds value;
  GpuIds wanted;
  std::int64_t* places;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    const std::size_t there = PresentOf(wanted);
    const std::size_t count = PresentOf(value);
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t i = first + v * step;
      if (i < there) places[i] = PlaceOf(wanted.ids[i], value.ids, count);
    }
  }
};

// A row of the value, by a warp, goes to its new place.
struct MoveRowsBody {
  GpuRows value;
  GpuIds wanted;
  const std::int64_t* before;
  std::int64_t* out_ids;
  std::byte* out_rows;
  RowCopy copy;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    if (row >= PresentOf(value)) return;
    const std::int64_t id = value.ids[row];
    const std::size_t below = LowerBound(id, wanted.ids, PresentOf(wanted));
    const std::uint64_t place = row + static_cast<std::uint64_t>(before[below]);
    if (lane == 0) out_ids[place] = id;
    copy(static_cast<const std::byte*>(value.rows) + row * copy.row_bytes,
         out_rows + place * copy.row_bytes, lane);
  }
};

// A wanted row that the value lacks, by a warp.
struct AddZeroRowsBody {
  GpuIds value;
  GpuIds wanted;
  const std::int64_t* before;
  std::int64_t* out_ids;
  std::byte* out_rows;
  RowCopy copy;

  HEDDLE_HOST_DEVICE void operator()(std::uint64_t row, unsigned lane) const {
    if (row >= PresentOf(wanted) || before[row] == before[row + 1]) return;
    const std::int64_t id = wanted.ids[row];
    const std::uint64_t place =
        LowerBound(id, value.ids, PresentOf(value)) + static_cast<std::uint64_t>(before[row]);
    if (lane == 0) out_ids[place] = id;
    copy(nullptr, out_rows + place * copy.row_bytes, lane);
  }
};

}  // namespace heddle::ops::cuda
