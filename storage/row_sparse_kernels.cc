#include "storage/row_sparse_kernels.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "ops/cast.h"
#include "ops/copy.h"
#include "ops/fill.h"
#include "ops/row_ids.h"
#include "ops/row_merge.h"
#include "ops/sum.h"
#include "storage/allocator.h"
#include "storage/parallel.h"
#include "storage/row_sparse_state.h"

namespace heddle::storage {

using internal::kIdBytes;
using internal::RowSparseState;
using internal::RowStorage;
using internal::ToRead;
using internal::ToWrite;
using ops::SparseRows;

namespace {

std::size_t Size(std::int64_t count) { return static_cast<std::size_t>(count); }

const std::byte* RowAt(const void* rows, std::int64_t row, std::int64_t row_bytes) {
  return static_cast<const std::byte*>(rows) + row * row_bytes;
}
std::byte* RowAt(void* rows, std::int64_t row, std::int64_t row_bytes) {
  return static_cast<std::byte*>(rows) + row * row_bytes;
}

// As std::memmove, also for the null pointers of no rows.
void MoveBytes(const void* from, void* to, std::int64_t bytes) {
  if (bytes > 0) std::memmove(to, from, Size(bytes));
}

std::span<const std::int64_t> Part(std::span<const std::int64_t> ids, std::int64_t begin,
                                   std::int64_t end) {
  return ids.subspan(Size(begin), Size(end - begin));
}

// Calls body(i) for i in [0, count), shared with the workers.
template <class Body>
void ForEach(Engine& engine, std::int64_t count, const Body& body) {
  const auto block = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(i);
  };
  if (count == 1) return block(0, 1);
  engine.ParallelFor(count, 1, std::ref(block));
}

// Memory of a body, from the pool: large blocks of malloc's come as fresh pages each time.
template <class T>
class Scratch {
 public:
  explicit Scratch(std::size_t count)
      : allocator_(CpuAllocator()),
        bytes_(static_cast<std::int64_t>(std::max<std::size_t>(1, count) * sizeof(T))),
        data_(static_cast<T*>(allocator_.Allocate(bytes_))) {}
  ~Scratch() { allocator_.Free(data_, bytes_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* data() const { return data_; }

 private:
  Allocator& allocator_;
  const std::int64_t bytes_;
  T* const data_;
};

// Cuts the ids of some values into ranges of about `rows` rows in all: bounds, of which neighbours
// are the ends of a range. The first is 0, the last above all ids.
std::vector<std::int64_t> CutIds(std::span<const SparseRows> values, std::int64_t total,
                                 std::int64_t rows) {
  const std::int64_t ranges = std::max<std::int64_t>(1, total / std::max<std::int64_t>(1, rows));
  std::vector<std::int64_t> bounds = {0};
  if (ranges > 1) {
    // Samples at even steps through all values: between two that are neighbours lies less than a
    // step's rows of each value.
    constexpr std::int64_t kSamplesPerRange = 4;
    const std::int64_t step = std::max<std::int64_t>(1, total / (ranges * kSamplesPerRange));
    std::vector<std::int64_t> samples;
    for (const SparseRows& value : values) {
      for (std::size_t i = 0; i < value.ids.size(); i += Size(step)) {
        samples.push_back(value.ids[i]);
      }
    }
    std::sort(samples.begin(), samples.end());
    for (std::int64_t i = 1; i < ranges; ++i) {
      const std::int64_t id = samples[Size(i * static_cast<std::int64_t>(samples.size()) / ranges)];
      if (id > bounds.back()) bounds.push_back(id);
    }
  }
  bounds.push_back(std::numeric_limits<std::int64_t>::max());
  return bounds;
}

// Replaces what is in `out` by the sum of values that lie elsewhere.
void SumInto(const RowSparseState& like, std::span<const SparseRows> values, RowStorage& out) {
  Engine& engine = like.engine;
  const std::int64_t row_bytes = out.row_bytes();
  if (values.size() == 1) {
    const auto count = static_cast<std::int64_t>(values[0].ids.size());
    out.Reset(count);
    if (count == 0) return;
    MoveBytes(values[0].ids.data(), out.ids(), count * kIdBytes);
    ForBlocks(engine, count, 2 * row_bytes,
              [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
                ops::Copy(static_cast<const std::byte*>(values[0].rows) + begin * row_bytes,
                          out.row(begin), Size((end - begin) * row_bytes), mode);
              });
    return;
  }
  // Rows that are nowhere may be of any size, more than the sums below can hold.
  if (std::ranges::all_of(values, [](const SparseRows& value) { return value.ids.empty(); })) {
    return out.Reset(0);
  }
  // A row is read and written; finding its place costs about as much as a few cache lines.
  const RowRanges ranges(values, row_bytes, 2 * row_bytes + 128);
  const std::size_t total = ranges.RowsBefore(ranges.count());
  // Each range merges its entries at a place of its own, so that the ids are merged only once.
  const Scratch<ops::RowEntry> entries(2 * total);
  std::vector<std::span<const ops::RowEntry>> merged(Size(ranges.count()));
  std::vector<std::int64_t> starts(merged.size() + 1, 0);  // of the ranges, in rows of the result
  ForEach(engine, ranges.count(), [&](std::int64_t i) {
    ops::RowEntry* const place = entries.data() + ranges.RowsBefore(i);
    merged[Size(i)] = ops::MergeRows(ranges.Part(i), Size(row_bytes), place, place + total);
    starts[Size(i) + 1] = static_cast<std::int64_t>(ops::CountIds(merged[Size(i)]));
  });
  for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
  out.Reset(starts.back());
  ForEach(engine, ranges.count(), [&](std::int64_t i) {
    const std::int64_t start = starts[Size(i)];
    ops::SumRows(like.dtype, Size(like.row_size), merged[Size(i)], out.ids() + start,
                 out.row(start));
  });
}

}  // namespace

RowRanges::RowRanges(std::span<const SparseRows> values, std::int64_t row_bytes,
                     std::int64_t traffic)
    : values_(values), row_bytes_(row_bytes) {
  std::int64_t total = 0;
  for (const SparseRows& value : values) total += static_cast<std::int64_t>(value.ids.size());
  const bool split = total >= kSplitBytesMin / traffic;
  const std::vector<std::int64_t> bounds =
      CutIds(values, total, split ? kBlockBytes / traffic : std::max<std::int64_t>(1, total));
  ranges_ = static_cast<std::int64_t>(bounds.size()) - 1;
  places_.reserve(values.size() * bounds.size());
  for (const SparseRows& value : values) {
    std::size_t place = 0;
    for (const std::int64_t bound : bounds) {
      place = ops::LowerBoundFrom(value.ids, place, bound);
      places_.push_back(place);
    }
  }
}

std::vector<SparseRows> RowRanges::Part(std::int64_t i) const {
  std::vector<SparseRows> part;
  part.reserve(values_.size());
  const std::size_t* place = places_.data() + i;
  for (const SparseRows& value : values_) {
    part.push_back({value.ids.subspan(place[0], place[1] - place[0]),
                    static_cast<const std::byte*>(value.rows) + place[0] * Size(row_bytes_)});
    place += ranges_ + 1;
  }
  return part;
}

std::size_t RowRanges::RowsBefore(std::int64_t i) const {
  std::size_t rows = 0;
  for (std::size_t k = 0; k < values_.size(); ++k) {
    rows += places_[k * Size(ranges_ + 1) + Size(i)];
  }
  return rows;
}

void SumRowSparse(std::span<const RowSparseNDArray> inputs, const RowSparseNDArray& out) {
  RowSparseState& state = ToWrite(out);
  bool aliased = false;
  std::vector<SparseRows> values;
  values.reserve(inputs.size());
  for (const RowSparseNDArray& input : inputs) {
    values.push_back(ToRead(input).rows.view());
    aliased = aliased || input.IsSameAs(out);
  }
  if (!aliased) {
    SumInto(state, values, state.rows);
    return;
  }
  RowStorage sum = state.rows.Another(0);
  SumInto(state, values, sum);
  state.rows = std::move(sum);
}

void InsertRows(const RowSparseNDArray& array, std::span<const std::int64_t> row_ids) {
  RowStorage& rows = ToWrite(array).rows;
  const std::span<const std::int64_t> present = rows.view().ids;
  std::vector<std::int64_t> missing;
  ops::RowFinder finder(present);
  for (const std::int64_t id : row_ids) {
    if (finder.Find(id) < 0) missing.push_back(id);
  }
  if (missing.empty()) return;

  const std::int64_t old_count = rows.count();
  const std::int64_t count = old_count + static_cast<std::int64_t>(missing.size());
  const std::int64_t row_bytes = rows.row_bytes();
  RowStorage larger = rows.Another(0);
  RowStorage* to = &rows;
  if (count > rows.capacity()) {
    larger = rows.Another(std::max(count, rows.capacity() + rows.capacity() / 2));
    to = &larger;
  }
  // From the back, so that within one block of memory no row is overwritten before it has moved.
  std::int64_t end = old_count;  // rows that have not moved yet
  for (std::size_t k = missing.size(); k > 0; --k) {
    const std::int64_t id = missing[k - 1];
    const auto place =
        static_cast<std::int64_t>(std::lower_bound(rows.ids(), rows.ids() + end, id) - rows.ids());
    const std::int64_t by = static_cast<std::int64_t>(k);  // rows to insert before these
    MoveBytes(rows.ids() + place, to->ids() + place + by, (end - place) * kIdBytes);
    MoveBytes(rows.row(place), to->row(place + by), (end - place) * row_bytes);
    to->ids()[place + by - 1] = id;
    std::memset(to->row(place + by - 1), 0, Size(row_bytes));
    end = place;
  }
  if (to == &larger) {
    MoveBytes(rows.ids(), to->ids(), end * kIdBytes);
    MoveBytes(rows.rows(), to->rows(), end * row_bytes);
    rows = std::move(larger);
  }
  rows.set_count(count);
}

void AddInPlace(const RowSparseNDArray& to, const RowSparseNDArray& input) {
  RowSparseState& state = ToWrite(to);
  const SparseRows added = ToRead(input).rows.view();
  if (added.ids.empty()) return;  // as in SumInto
  InsertRows(to, added.ids);
  const SparseRows present = state.rows.view();
  const std::int64_t row_bytes = state.rows.row_bytes();
  ForBlocks(state.engine, static_cast<std::int64_t>(added.ids.size()), 3 * row_bytes,
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode) {
              ops::RowFinder finder(present.ids);
              for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t place = finder.Find(added.ids[Size(i)]);
                std::byte* const row = state.rows.row(place);
                const std::array<const void*, 2> summands = {
                    row, static_cast<const std::byte*>(added.rows) + i * row_bytes};
                ops::Sum(state.dtype, summands, row, Size(state.row_size), ops::StoreMode::kCached);
              }
            });
}

void CopyRowSparse(const RowSparseNDArray& from, const RowSparseNDArray& out) {
  if (out.IsSameAs(from)) return;
  const RowSparseState& source = ToRead(from);
  RowSparseState& state = ToWrite(out);
  const std::int64_t count = source.rows.count();
  state.rows.Reset(count);
  if (count == 0) return;
  std::memcpy(state.rows.ids(), source.rows.ids(), Size(count * kIdBytes));
  const auto from_bytes = static_cast<std::int64_t>(SizeOf(source.dtype));
  const auto to_bytes = static_cast<std::int64_t>(SizeOf(state.dtype));
  ForBlocks(state.engine, count * state.row_size, from_bytes + to_bytes,
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              ops::Cast(source.dtype, source.rows.rows() + begin * from_bytes, state.dtype,
                        state.rows.rows() + begin * to_bytes, Size(end - begin), mode);
            });
}

void RowSparseToDense(const RowSparseNDArray& from, const NDArray& out) {
  const RowSparseState& source = ToRead(from);
  if (out.size() == 0) return;
  const DType dtype = out.dtype();
  const std::int64_t row_bytes = source.row_size * static_cast<std::int64_t>(SizeOf(dtype));
  void* const base = out.data();
  ForBlocks(source.engine, source.shape[0], row_bytes,
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              std::byte* const block = RowAt(base, begin, row_bytes);
              ops::Fill(dtype, 0, block, Size((end - begin) * source.row_size), mode);
              const SparseRows part =
                  ops::RowsBetween(source.rows.view(), Size(source.rows.row_bytes()), begin, end);
              if (dtype == source.dtype) {
                ops::ScatterRows(part, Size(row_bytes), block, begin);
                return;
              }
              const auto* row = static_cast<const std::byte*>(part.rows);
              for (const std::int64_t id : part.ids) {
                ops::Cast(source.dtype, row, dtype, RowAt(block, id - begin, row_bytes),
                          Size(source.row_size), ops::StoreMode::kCached);
                row += source.rows.row_bytes();
              }
            });
}

void DenseToRowSparse(const NDArray& from, const RowSparseNDArray& out) {
  RowSparseState& state = ToWrite(out);
  if (from.size() == 0) return state.rows.Reset(0);  // of however many rows
  const std::int64_t all_rows = state.shape[0];
  const DType dtype = from.dtype();
  const std::int64_t row_bytes = state.row_size * static_cast<std::int64_t>(SizeOf(dtype));
  const void* const base = from.const_data();
  std::vector<std::uint8_t> flags(Size(all_rows));
  const std::int64_t block_rows = std::max<std::int64_t>(1, kBlockBytes / (row_bytes + 1));
  const std::int64_t blocks = (all_rows + block_rows - 1) / block_rows;
  const auto flags_of = [&](std::int64_t block) {
    const std::int64_t begin = block * block_rows;
    return std::span(flags).subspan(Size(begin), Size(std::min(block_rows, all_rows - begin)));
  };
  std::vector<std::int64_t> starts(Size(blocks) + 1, 0);
  ForEach(state.engine, blocks, [&](std::int64_t i) {
    const std::byte* const rows = RowAt(base, i * block_rows, row_bytes);
    starts[Size(i) + 1] = static_cast<std::int64_t>(
        ops::FlagNonZeroRows(dtype, Size(state.row_size), rows, flags_of(i)));
  });
  for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];

  state.rows.Reset(starts.back());
  if (starts.back() == 0) return;
  ForEach(state.engine, blocks, [&](std::int64_t i) {
    const std::int64_t first = i * block_rows;
    const std::int64_t start = starts[Size(i)];
    std::int64_t* const ids = state.rows.ids() + start;
    if (dtype == state.dtype) {
      ops::CompactRows(flags_of(i), first, Size(row_bytes), RowAt(base, first, row_bytes), ids,
                       state.rows.row(start));
      return;
    }
    const std::int64_t count = starts[Size(i) + 1] - start;
    std::vector<std::byte> compact(Size(count * row_bytes));
    ops::CompactRows(flags_of(i), first, Size(row_bytes), RowAt(base, first, row_bytes), ids,
                     compact.data());
    ops::Cast(dtype, compact.data(), state.dtype, state.rows.row(start),
              Size(count * state.row_size), ops::StoreMode::kCached);
  });
}

void AddToDense(const RowSparseNDArray& from, const NDArray& out) {
  const RowSparseState& source = ToRead(from);
  const SparseRows value = source.rows.view();
  if (value.ids.empty()) return;  // as in SumInto
  const std::int64_t row_bytes = source.rows.row_bytes();
  void* const base = out.data();
  const RowRanges ranges(std::span(&value, 1), row_bytes, 3 * row_bytes + kIdBytes);
  ForEach(source.engine, ranges.count(), [&](std::int64_t i) {
    ops::AddRows(source.dtype, Size(source.row_size), ranges.Part(i)[0], base, 0);
  });
}

std::vector<std::int64_t> SortedRowIds(const NDArray& ids, std::int64_t num_rows) {
  // Runs are sorted apart from each other and merged in pairs, then in pairs of pairs.
  constexpr std::int64_t kRun = 1 << 16;
  const std::int64_t count = ids.size();
  const DType dtype = ids.dtype();
  const std::byte* const given = static_cast<const std::byte*>(ids.const_data());
  std::vector<std::int64_t> sorted(Size(count));
  std::vector<std::int64_t> other(Size(count));
  const std::int64_t runs = (count + kRun - 1) / kRun;
  std::vector<std::int64_t> lengths(Size(runs));
  ForEach(ids.engine(), runs, [&](std::int64_t i) {
    const std::int64_t begin = i * kRun;
    const std::size_t length = Size(std::min(kRun, count - begin));
    const auto run = std::span(sorted).subspan(Size(begin), length);
    ops::ReadRowIds(dtype, given + Size(begin) * SizeOf(dtype), num_rows, run);
    lengths[Size(i)] = static_cast<std::int64_t>(
        ops::SortUnique(run, std::span(other).subspan(Size(begin), length)));
  });
  for (std::int64_t width = 1; width < runs; width *= 2) {
    const std::int64_t pairs = (runs + 2 * width - 1) / (2 * width);
    ForEach(ids.engine(), pairs, [&](std::int64_t i) {
      const std::int64_t a = 2 * width * i;
      const std::int64_t b = a + width;
      const std::span<const std::int64_t> all = sorted;
      const auto first = all.subspan(Size(a * kRun), Size(lengths[Size(a)]));
      const auto second =
          b < runs ? all.subspan(Size(b * kRun), Size(lengths[Size(b)])) : all.first(0);
      lengths[Size(a)] =
          static_cast<std::int64_t>(ops::MergeUnique(first, second, other.data() + a * kRun));
    });
    sorted.swap(other);
  }
  sorted.resize(runs > 0 ? Size(lengths[0]) : 0);
  return sorted;
}

void GatherRowSparse(const RowSparseNDArray& from, std::span<const std::int64_t> row_ids,
                     std::span<const RowSparseNDArray> out) {
  const RowSparseState& source = ToRead(from);
  const SparseRows value = source.rows.view();
  const std::int64_t count = value.ids.empty() ? 0 : static_cast<std::int64_t>(row_ids.size());
  // What `from` becomes, where it is an output itself: built beside the rows that are read.
  RowStorage beside = source.rows.Another(0);
  const auto rows_of = [&](const RowSparseNDArray& array) -> RowStorage& {
    return array.IsSameAs(from) ? beside : ToWrite(array).rows;
  };
  // Finding a row costs about as much as a few cache lines.
  std::int64_t traffic = 128 + (count > 0 ? source.rows.row_bytes() : 0);
  for (const RowSparseNDArray& array : out) {
    RowStorage& rows = rows_of(array);
    rows.Reset(count);
    if (count == 0) continue;  // as in SumInto
    traffic += rows.row_bytes();
    std::memcpy(rows.ids(), row_ids.data(), Size(count * kIdBytes));
  }
  ForBlocks(source.engine, count, traffic,
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode) {
              const std::size_t row_bytes = Size(source.rows.row_bytes());
              std::vector<std::byte> rows;  // if some output has another dtype
              for (const RowSparseNDArray& array : out) {
                std::byte* const to = rows_of(array).row(begin);
                const std::span<const std::int64_t> wanted = Part(row_ids, begin, end);
                if (array.dtype() == source.dtype) {
                  ops::GatherRows(value, wanted, row_bytes, to);
                  continue;
                }
                if (rows.empty()) {
                  rows.resize(Size(end - begin) * row_bytes);
                  ops::GatherRows(value, wanted, row_bytes, rows.data());
                }
                ops::Cast(source.dtype, rows.data(), array.dtype(), to,
                          Size((end - begin) * source.row_size), ops::StoreMode::kCached);
              }
            });
  const auto is_read = [&](const RowSparseNDArray& array) { return array.IsSameAs(from); };
  if (std::ranges::any_of(out, is_read)) ToWrite(from).rows = std::move(beside);
}

}  // namespace heddle::storage
