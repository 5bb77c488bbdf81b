#include "ops/row_ids.h"

#include <heddle/error.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "ops/dispatch.h"

namespace heddle::ops {

namespace {

constexpr int kDigitBits = 11;
constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;
// Below, the passes over the digits' counters cost more than they save.
constexpr std::size_t kRadixSortMin = 1024;

template <typename T>
void ReadTyped(const T* ids, std::int64_t num_rows, std::span<std::int64_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    if constexpr (std::is_integral_v<T>) {
      const std::int64_t id = ids[i];
      if (id < 0 || id >= num_rows) {
        throw InvalidArgument(fmt::format("row id {}: expected one in [0, {})", id, num_rows));
      }
      out[i] = id;
    } else {
      const double id = static_cast<double>(static_cast<ComputeType<T>>(ids[i]));
      // Any double from 2^63 on is above every number of rows; a NaN fails the first comparison.
      if (!(id >= 0 && id < 0x1p63) || id != std::trunc(id) ||
          static_cast<std::int64_t>(id) >= num_rows) {
        throw InvalidArgument(
            fmt::format("row id {}: expected a whole number in [0, {})", id, num_rows));
      }
      out[i] = static_cast<std::int64_t>(id);
    }
  }
}

// Least significant digit first.
void RadixSort(std::span<std::int64_t> ids, std::span<std::int64_t> scratch) {
  const auto largest = static_cast<std::uint64_t>(*std::max_element(ids.begin(), ids.end()));
  std::int64_t* from = ids.data();
  std::int64_t* to = scratch.data();
  const int bits = static_cast<int>(std::bit_width(largest));
  for (int shift = 0; shift < bits; shift += kDigitBits) {
    const auto digit = [shift](std::int64_t id) {
      return (static_cast<std::uint64_t>(id) >> shift) & (kDigits - 1);
    };
    std::array<std::size_t, kDigits> start = {};
    for (std::size_t i = 0; i < ids.size(); ++i) ++start[digit(from[i])];
    std::size_t sum = 0;
    for (std::size_t& place : start) sum += std::exchange(place, sum);
    for (std::size_t i = 0; i < ids.size(); ++i) to[start[digit(from[i])]++] = from[i];
    std::swap(from, to);
  }
  if (from != ids.data()) std::memcpy(ids.data(), from, ids.size_bytes());
}

}  // namespace

void ReadRowIds(DType dtype, const void* ids, std::int64_t num_rows, std::span<std::int64_t> out) {
  DispatchDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, bool>) {
      throw InvalidArgument("row ids: expected a numeric dtype, got bool");
    } else {
      ReadTyped(static_cast<const T*>(ids), num_rows, out);
    }
  });
}

bool IsSortedUnique(std::span<const std::int64_t> ids) {
  return std::adjacent_find(ids.begin(), ids.end(), std::greater_equal<>()) == ids.end();
}

std::size_t SortUnique(std::span<std::int64_t> ids, std::span<std::int64_t> scratch) {
  if (IsSortedUnique(ids)) return ids.size();
  if (ids.size() < kRadixSortMin) {
    std::sort(ids.begin(), ids.end());
  } else {
    RadixSort(ids, scratch);
  }
  return static_cast<std::size_t>(std::unique(ids.begin(), ids.end()) - ids.begin());
}

std::size_t MergeUnique(std::span<const std::int64_t> a, std::span<const std::int64_t> b,
                        std::int64_t* out) {
  return static_cast<std::size_t>(std::set_union(a.begin(), a.end(), b.begin(), b.end(), out) -
                                  out);
}

}  // namespace heddle::ops
