#include "ops/row_sparse.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

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

namespace {

// Goes through a list of rows: that of a value, or merged ones.
struct ValueCursor {
  const std::int64_t* id;
  const std::int64_t* end;
  const std::byte* row;
  std::size_t row_bytes;

  ValueCursor(const SparseRows& value, std::size_t row_bytes)
      : id(value.ids.data()),
        end(id + value.ids.size()),
        row(static_cast<const std::byte*>(value.rows)),
        row_bytes(row_bytes) {}
  bool done() const { return id == end; }
  RowEntry entry() const { return {*id, row}; }
  void Advance(std::size_t by) {
    id += by;
    row += by * row_bytes;
  }
};
struct EntryCursor {
  const RowEntry* next;
  const RowEntry* end;

  bool done() const { return next == end; }
  RowEntry entry() const { return *next; }
  void Advance(std::size_t by) { next += by; }
};

template <class Cursor>
RowEntry* CopyEntries(Cursor from, RowEntry* out) {
  for (; !from.done(); from.Advance(1)) *out++ = from.entry();
  return out;
}

// Merges two lists; among equal ids those of `a` come first. A branch a row, which nobody could
// foresee, would cost more than all of this.
template <class Cursor>
RowEntry* MergeTwo(Cursor a, Cursor b, RowEntry* out) {
  while (!a.done() && !b.done()) {
    const RowEntry from_a = a.entry();
    const RowEntry from_b = b.entry();
    const bool takes_b = from_b.id < from_a.id;
    *out++ = {takes_b ? from_b.id : from_a.id, takes_b ? from_b.row : from_a.row};
    a.Advance(takes_b ? 0 : 1);
    b.Advance(takes_b ? 1 : 0);
  }
  return CopyEntries(b, CopyEntries(a, out));
}

}  // namespace

std::span<const RowEntry> MergeRows(std::span<const SparseRows> inputs, std::size_t row_bytes,
                                    RowEntry* out, RowEntry* scratch) {
  // Where the lists end, at first those of two inputs each, then of four, of eight, ...
  constexpr std::size_t kFew = 16;
  std::array<std::size_t, kFew> few;
  std::unique_ptr<std::size_t[]> more(inputs.size() > 2 * kFew ? new std::size_t[inputs.size()]
                                                               : nullptr);
  std::size_t* const ends = more ? more.get() : few.data();
  std::size_t lists = 0;
  RowEntry* to = out;
  for (std::size_t k = 0; k < inputs.size(); k += 2) {
    const ValueCursor first(inputs[k], row_bytes);
    to = k + 1 < inputs.size() ? MergeTwo(first, ValueCursor(inputs[k + 1], row_bytes), to)
                               : CopyEntries(first, to);
    ends[lists++] = static_cast<std::size_t>(to - out);
  }
  const auto total = static_cast<std::size_t>(to - out);
  for (; lists > 1; lists = (lists + 1) / 2) {
    to = scratch;
    std::size_t begin = 0;
    for (std::size_t k = 0; k < lists; k += 2) {
      const std::size_t middle = ends[k];
      const std::size_t end = k + 1 < lists ? ends[k + 1] : middle;
      to = MergeTwo(EntryCursor{out + begin, out + middle}, EntryCursor{out + middle, out + end},
                    to);
      begin = end;
      ends[k / 2] = end;
    }
    std::swap(out, scratch);
  }
  return {out, total};
}

std::size_t CountIds(std::span<const RowEntry> entries) {
  std::size_t count = entries.empty() ? 0 : 1;
  for (std::size_t i = 1; i < entries.size(); ++i) {
    count += entries[i].id != entries[i - 1].id ? 1 : 0;
  }
  return count;
}

void SumRowsOfId(DType dtype, std::size_t row_elements, std::span<const RowEntry> entries,
                 void* out) {
  if (entries.size() == 1) {
    CopyRow(entries[0].row, out, row_elements * SizeOf(dtype));
    return;
  }
  constexpr std::size_t kFew = 16;
  std::array<const void*, kFew> few;
  std::unique_ptr<const void*[]> more(entries.size() > kFew ? new const void*[entries.size()]
                                                            : nullptr);
  const void** const rows = more ? more.get() : few.data();
  for (std::size_t i = 0; i < entries.size(); ++i) rows[i] = entries[i].row;
  Sum(dtype, {rows, entries.size()}, out, row_elements, StoreMode::kCached);
}

void SumRows(DType dtype, std::size_t row_elements, std::span<const RowEntry> entries,
             std::int64_t* out_ids, void* out_rows) {
  const std::size_t row_bytes = row_elements * SizeOf(dtype);
  auto* out = static_cast<std::byte*>(out_rows);
  ForEachId(entries, [&](std::span<const RowEntry> rows, std::size_t) {
    *out_ids++ = rows[0].id;
    SumRowsOfId(dtype, row_elements, rows, out);
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
