#include "ops/row_sparse.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/dispatch.h"
#include "ops/row_ids.h"
#include "ops/row_merge.h"
#include "ops/sum.h"

namespace heddle::ops {

namespace {

const std::byte* RowAt(const void* rows, std::size_t place, std::size_t row_bytes) {
  return static_cast<const std::byte*>(rows) + place * row_bytes;
}
std::byte* RowAt(void* rows, std::size_t place, std::size_t row_bytes) {
  return static_cast<std::byte*>(rows) + place * row_bytes;
}

void CopyRow(const void* from, void* to, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

// Zero, of either sign.
template <typename T>
bool IsZero(T value) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return (value.bits & 0x7FFF) == 0;
  } else {
    return value == T{0};
  }
}

}  // namespace

SparseRows RowsBetween(const SparseRows& value, std::size_t row_bytes, std::int64_t begin,
                       std::int64_t end) {
  const auto* const first =
      std::lower_bound(value.ids.data(), value.ids.data() + value.ids.size(), begin);
  const auto* const last = std::lower_bound(first, value.ids.data() + value.ids.size(), end);
  const auto skipped = static_cast<std::size_t>(first - value.ids.data());
  return {{first, last}, RowAt(value.rows, skipped, row_bytes)};
}

std::size_t CountUnion(std::span<const SparseRows> inputs) {
  if (inputs.size() == 1) return inputs[0].ids.size();
  std::size_t count = 0;
  ForEachRow(inputs, 0, [&](std::int64_t, std::span<const void* const>) { ++count; });
  return count;
}

void SumRows(DType dtype, std::size_t row_elements, std::span<const SparseRows> inputs,
             std::int64_t* out_ids, void* out_rows) {
  const std::size_t row_bytes = row_elements * SizeOf(dtype);
  if (inputs.size() == 1) {
    const SparseRows& only = inputs[0];
    CopyRow(only.ids.data(), out_ids, only.ids.size_bytes());
    CopyRow(only.rows, out_rows, only.ids.size() * row_bytes);
    return;
  }
  auto* out = static_cast<std::byte*>(out_rows);
  ForEachRow(inputs, row_bytes, [&](std::int64_t id, std::span<const void* const> rows) {
    *out_ids++ = id;
    if (rows.size() == 1) {
      CopyRow(rows[0], out, row_bytes);
    } else {
      Sum(dtype, rows, out, row_elements, StoreMode::kCached);
    }
    out += row_bytes;
  });
}

void GatherRows(const SparseRows& value, std::span<const std::int64_t> wanted,
                std::size_t row_bytes, void* out) {
  // Rows lie anywhere in memory, where no processor foresees them: so they are asked for some rows
  // ahead. The places are found a block at a time, to know them that early.
  constexpr std::size_t kBlock = 64;
  constexpr std::size_t kAhead = 8;
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kLinesMax = 8;  // the hardware carries on from there
  RowFinder finder(value.ids);
  std::array<std::int64_t, kBlock> places;
  for (std::size_t begin = 0; begin < wanted.size(); begin += kBlock) {
    const std::size_t count = std::min(kBlock, wanted.size() - begin);
    for (std::size_t i = 0; i < count; ++i) places[i] = finder.Find(wanted[begin + i]);
    const auto prefetch = [&](std::size_t i) {
      if (places[i] < 0) return;
      const std::byte* row = RowAt(value.rows, static_cast<std::size_t>(places[i]), row_bytes);
      const std::size_t bytes = std::min(row_bytes, kLinesMax * kLine);
      for (std::size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at);
    };
    for (std::size_t i = 0; i < std::min(kAhead, count); ++i) prefetch(i);
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) prefetch(i + kAhead);
      std::byte* const to = RowAt(out, begin + i, row_bytes);
      if (places[i] >= 0) {
        CopyRow(RowAt(value.rows, static_cast<std::size_t>(places[i]), row_bytes), to, row_bytes);
      } else if (row_bytes > 0) {
        std::memset(to, 0, row_bytes);
      }
    }
  }
}

void ScatterRows(const SparseRows& value, std::size_t row_bytes, void* dense,
                 std::int64_t first_row) {
  for (std::size_t i = 0; i < value.ids.size(); ++i) {
    CopyRow(RowAt(value.rows, i, row_bytes),
            RowAt(dense, static_cast<std::size_t>(value.ids[i] - first_row), row_bytes), row_bytes);
  }
}

void AddRows(DType dtype, std::size_t row_elements, const SparseRows& value, void* dense,
             std::int64_t first_row) {
  const std::size_t row_bytes = row_elements * SizeOf(dtype);
  for (std::size_t i = 0; i < value.ids.size(); ++i) {
    void* const row = RowAt(dense, static_cast<std::size_t>(value.ids[i] - first_row), row_bytes);
    const std::array<const void*, 2> summands = {row, RowAt(value.rows, i, row_bytes)};
    Sum(dtype, summands, row, row_elements, StoreMode::kCached);
  }
}

std::size_t FlagNonZeroRows(DType dtype, std::size_t row_elements, const void* dense,
                            std::span<std::uint8_t> flags) {
  return DispatchDType(dtype, [&](auto type) {
    using T = StorageType<typename decltype(type)::type>;
    const T* row = static_cast<const T*>(dense);
    std::size_t count = 0;
    for (std::uint8_t& flag : flags) {
      flag = std::all_of(row, row + row_elements, &IsZero<T>) ? 0 : 1;
      count += flag;
      row += row_elements;
    }
    return count;
  });
}

void CompactRows(std::span<const std::uint8_t> flags, std::int64_t first_row, std::size_t row_bytes,
                 const void* dense, std::int64_t* out_ids, void* out_rows) {
  std::size_t written = 0;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] == 0) continue;
    out_ids[written] = first_row + static_cast<std::int64_t>(i);
    CopyRow(RowAt(dense, i, row_bytes), RowAt(out_rows, written, row_bytes), row_bytes);
    ++written;
  }
}

}  // namespace heddle::ops
