// Copies of parts of arrays on a GPU: what its threads do, and the launch that a copy takes.
//
// Axes that lie in one piece become one, and elements that are neighbours move together, up to 16
// bytes at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/host_device.h"
#include "ops/cuda/math.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/run.h"
#include "ops/cuda/table.h"

namespace heddle::ops::cuda {

// A part in units of `unit` bytes.
struct UnitPart {
  StridedPart part;
  std::size_t unit;

  std::uint64_t count() const {
    std::uint64_t units = 1;
    for (std::size_t axis = 0; axis < part.axes; ++axis) {
      units *= static_cast<std::uint64_t>(part.extents[axis]);
    }
    return units;
  }
};

namespace internal {

// The same elements with as few axes as possible.
inline StridedPart WithoutNeedlessAxes(const StridedPart& part) {
  StridedPart out{.axes = 0, .offset = part.offset};
  for (std::size_t axis = 0; axis < part.axes; ++axis) {
    const std::int64_t extent = part.extents[axis];
    const std::int64_t stride = part.strides[axis];
    if (extent == 1) continue;
    if (out.axes > 0 && out.strides[out.axes - 1] == stride * extent) {
      out.extents[out.axes - 1] *= extent;
      out.strides[out.axes - 1] = stride;
      continue;
    }
    out.extents[out.axes] = extent;
    out.strides[out.axes] = stride;
    ++out.axes;
  }
  return out;
}

}  // namespace internal

// `array` and `packed`: where the elements lie.
inline UnitPart InUnits(std::size_t element_bytes, const StridedPart& given, const void* array,
                        const void* packed) {
  StridedPart part = internal::WithoutNeedlessAxes(given);
  if (part.axes == 0 || part.strides[part.axes - 1] != 1) return {part, element_bytes};
  const std::size_t last = part.axes - 1;
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  // All that the unit has to divide.
  std::uint64_t all = reinterpret_cast<std::uintptr_t>(array) |
                      reinterpret_cast<std::uintptr_t>(packed) | kAccessBytes |
                      static_cast<std::uint64_t>(part.offset * bytes) |
                      static_cast<std::uint64_t>(part.extents[last] * bytes);
  for (std::size_t axis = 0; axis < last; ++axis) {
    all |= static_cast<std::uint64_t>(part.strides[axis] * bytes);
  }
  const std::uint64_t unit = all & (~all + 1);
  const auto elements = static_cast<std::int64_t>(unit) / bytes;
  part.offset /= elements;
  part.extents[last] /= elements;
  for (std::size_t axis = 0; axis < last; ++axis) part.strides[axis] /= elements;
  return {part, static_cast<std::size_t>(unit)};
}

// Units of kBytes, from the array to their packed copy or, with kScatter, back.
template <int kBytes, bool kScatter>
struct PartCopyBody {
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  using Unit = Pack<std::uint8_t, kBytes>;

  template <int kWidth, int kVectors>
  HEDDLE_HOST_DEVICE void operator()(std::uint64_t first, std::uint64_t step) const {
    Unit units[kVectors];
    std::uint64_t places[kVectors];
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::uint64_t i = first + v * step;
      places[v] = PlaceOf(i);
      units[v] = LoadPack<kBytes>(from + (kScatter ? i : places[v]) * kBytes);
    }
    HEDDLE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      StorePack(units[v], to + (kScatter ? places[v] : first + v * step) * kBytes);
    }
  }

  // Where unit `index` of the packed copy lies in the array.
  HEDDLE_HOST_DEVICE std::uint64_t PlaceOf(std::uint64_t index) const {
    return is_small ? PlaceOf<std::uint32_t>(static_cast<std::uint32_t>(index))
                    : PlaceOf<std::uint64_t>(index);
  }
  template <typename Index>
  HEDDLE_HOST_DEVICE std::uint64_t PlaceOf(Index index) const {
    std::int64_t place = part.offset;
    for (std::size_t axis = part.axes; axis-- > 1;) {
      const auto extent = static_cast<Index>(part.extents[axis]);
      place += static_cast<std::int64_t>(index % extent) * part.strides[axis];
      index /= extent;
    }
    if (part.axes > 0) place += static_cast<std::int64_t>(index) * part.strides[0];
    return static_cast<std::uint64_t>(place);
  }

  StridedPart part;
  bool is_small;  // 32 bits are enough for its units: such numbers are divided far sooner
  const std::uint8_t* from;
  std::uint8_t* to;
};

// Calls launch(table) unless there are no elements.
template <bool kScatter, class Launch>
void PlanPartCopy(std::size_t element_bytes, const void* from, const StridedPart& part, void* to,
                  const Launch& launch) {
  const UnitPart units = InUnits(element_bytes, part, from, to);
  const auto add = [&]<int kBytes>(std::integral_constant<int, kBytes>) {
    using Body = PartCopyBody<kBytes, kScatter>;
    Packer<Body, Launch> packer(launch);
    packer.Add({units.part, units.count() >> 32 == 0, static_cast<const std::uint8_t*>(from),
                static_cast<std::uint8_t*>(to)},
               {.count = units.count(), .head = 0});
    packer.Flush();
  };
  switch (units.unit) {
    case 16:
      return add(std::integral_constant<int, 16>());
    case 8:
      return add(std::integral_constant<int, 8>());
    case 4:
      return add(std::integral_constant<int, 4>());
    case 2:
      return add(std::integral_constant<int, 2>());
    default:
      return add(std::integral_constant<int, 1>());
  }
}

}  // namespace heddle::ops::cuda
