#include "kvstore/row_sparse_update.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include <fmt/format.h>

#include "kvstore/array_kernels.h"
#include "ops/copy.h"
#include "ops/row_ids.h"
#include "ops/row_merge.h"
#include "ops/row_sparse.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore {

using ops::RowEntry;
using ops::SparseRows;

namespace {

SparseRows RowsOf(const RowSparseNDArray& array) { return {array.row_ids(), array.const_rows()}; }

std::vector<SparseRows> RowsOf(std::span<const RowSparseNDArray> arrays) {
  std::vector<SparseRows> rows;
  rows.reserve(arrays.size());
  for (const RowSparseNDArray& array : arrays) rows.push_back(RowsOf(array));
  return rows;
}

// Where the rows of a weight lie: of a dense one by their ids, of a row-sparse one, of which the
// rows asked for are there, by their places.
class WeightRows {
 public:
  WeightRows(const ArrayUpdate& update, const PartRows& rows, const SparseRows* row_sparse)
      : base_(static_cast<std::byte*>(update.run.weight)),
        element_bytes_(SizeOf(update.run.dtype)),
        rows_(rows),
        finder_(row_sparse != nullptr ? row_sparse->ids : std::span<const std::int64_t>()),
        is_row_sparse_(row_sparse != nullptr) {}

  RowPiece PieceOf(std::int64_t id) const { return rows_.PieceOf(rows_.first() + id); }
  // Ids asked for never decrease. `piece`: of that id.
  std::byte* At(std::int64_t id, const RowPiece& piece) {
    const std::int64_t element = is_row_sparse_ ? finder_.Find(id) * rows_.width() : piece.first;
    return base_ + static_cast<std::size_t>(element) * element_bytes_;
  }

 private:
  std::byte* const base_;
  const std::size_t element_bytes_;
  const PartRows rows_;
  ops::RowFinder finder_;
  const bool is_row_sparse_;
};

// Hands rows to the rule, those that follow each other in all arrays as one run.
class RowRuns {
 public:
  RowRuns(const ArrayUpdate& update, std::int64_t row_size)
      : update_(update),
        row_size_(row_size),
        element_bytes_(SizeOf(update.run.dtype)),
        row_bytes_(static_cast<std::size_t>(row_size) * element_bytes_) {}
  RowRuns(const RowRuns&) = delete;
  RowRuns& operator=(const RowRuns&) = delete;

  // A row of the weight, and the rows whose sum, in their order, is its gradient.
  void Add(const RowPiece& piece, std::span<const RowEntry> rows, std::byte* weight) {
    const std::byte* gradient = static_cast<const std::byte*>(rows[0].row);
    if (rows.size() > 1) {
      if (sums_.empty()) sums_.resize(std::max(row_bytes_, kSumBytes / row_bytes_ * row_bytes_));
      if (sums_used_ == sums_.size()) Flush();
      std::byte* const sum = sums_.data() + sums_used_;
      sums_used_ += row_bytes_;
      ops::SumRowsOfId(update_.run.dtype, static_cast<std::size_t>(row_size_), rows, sum);
      gradient = sum;
    }
    gradient += static_cast<std::size_t>(piece.before) * element_bytes_;
    const std::size_t bytes = static_cast<std::size_t>(count_) * element_bytes_;
    if (count_ > 0 && piece.first == first_ + count_ && gradient == gradient_ + bytes &&
        weight == weight_ + bytes) {
      count_ += piece.count;
      return;
    }
    // The sum of this row is not part of the run that ends here, and stays where it is.
    Run();
    first_ = piece.first;
    count_ = piece.count;
    gradient_ = gradient;
    weight_ = weight;
  }

  void Flush() {
    Run();
    sums_used_ = 0;
  }

 private:
  static constexpr std::size_t kSumBytes = 8192;  // some rows, in the first-level cache

  void Run() {
    if (count_ == 0) return;
    UpdateElements(update_, first_, first_ + count_, gradient_, weight_);
    count_ = 0;
  }

  const ArrayUpdate& update_;
  const std::int64_t row_size_;
  const std::size_t element_bytes_;
  const std::size_t row_bytes_;
  std::vector<std::byte> sums_;
  std::size_t sums_used_ = 0;
  // The run so far, in elements.
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  const std::byte* gradient_ = nullptr;
  std::byte* weight_ = nullptr;
};

// The last pass of a lazy rule. `weight_rows`: the rows that are there of a row-sparse weight,
// those of the inputs among them; null for a dense one.
void RunLazyPass(const ArrayUpdate& update, std::span<const SparseRows> inputs, Engine& engine,
                 const PartRows& part, const SparseRows* weight_rows) {
  if (part.width() == 0) return;
  // Rows that are nowhere may be of any size, more than the sums below can hold.
  if (std::ranges::all_of(inputs, [](const SparseRows& rows) { return rows.ids.empty(); })) return;
  const std::size_t row_bytes = static_cast<std::size_t>(part.width()) * SizeOf(update.run.dtype);
  // A row of the gradient is read, one of the weight and of some states read and written.
  const storage::RowRanges ranges(inputs, static_cast<std::int64_t>(row_bytes),
                                  static_cast<std::int64_t>(4 * row_bytes) + 128);
  const auto run_range = [&](std::int64_t i) {
    const std::size_t total = ranges.RowsBefore(i + 1) - ranges.RowsBefore(i);
    const auto memory = std::make_unique_for_overwrite<RowEntry[]>(2 * total);
    const std::span<const RowEntry> entries =
        ops::MergeRows(ranges.Part(i), row_bytes, memory.get(), memory.get() + total);

    // Rows of the weight lie anywhere in memory, so they are asked for some ids ahead.
    constexpr std::size_t kAhead = 6;
    constexpr std::size_t kLine = 64;
    const std::size_t prefetched = std::min<std::size_t>(row_bytes, 8 * kLine);
    WeightRows ahead(update, part, weight_rows);
    WeightRows weight(update, part, weight_rows);
    RowRuns runs(update, part.width());
    ops::ForEachId(entries, [&](std::span<const RowEntry> rows, std::size_t place) {
      if (place + kAhead < entries.size()) {
        const std::int64_t id = entries[place + kAhead].id;
        const std::byte* const row = ahead.At(id, ahead.PieceOf(id));
        for (std::size_t at = 0; at < prefetched; at += kLine) __builtin_prefetch(row + at, 1);
      }
      const RowPiece piece = weight.PieceOf(rows[0].id);
      runs.Add(piece, rows, weight.At(rows[0].id, piece));
    });
    runs.Flush();
  };
  const auto block = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) run_range(i);
  };
  engine.ParallelFor(ranges.count(), 1, std::ref(block));
}

PartRows AllRows(const RowSparseNDArray& like) {
  return PartRows::OfRows(0, like.shape()[0], like.row_size());
}

// Rows that a part has pieces of.
void ScatterPieces(const RowSparseNDArray& from, const NDArray& out, const PartRows& part) {
  FillZero(out);
  const std::size_t element_bytes = SizeOf(out.dtype());
  const auto* window = static_cast<const std::byte*>(from.const_rows());
  auto* const base = static_cast<std::byte*>(out.data());
  for (const std::int64_t id : from.row_ids()) {
    const RowPiece piece = part.PieceOf(part.first() + id);
    ops::Copy(window + static_cast<std::size_t>(piece.before) * element_bytes,
              base + static_cast<std::size_t>(piece.first) * element_bytes,
              static_cast<std::size_t>(piece.count) * element_bytes);
    window += static_cast<std::size_t>(part.width()) * element_bytes;
  }
}

NDArray DenseSum(std::span<const RowSparseNDArray> inputs) {
  return DenseSum(inputs, inputs[0].shape(), AllRows(inputs[0]));
}

void InsertAllRows(const RowSparseNDArray& array) {
  if (array.num_rows() == array.shape()[0]) return;
  std::vector<std::int64_t> ids;
  try {
    ids.resize(static_cast<std::size_t>(array.shape()[0]));
  } catch (const std::exception&) {  // too long for the memory, or for a vector
    throw OutOfMemory(fmt::format("an update of all {} rows: there is no memory for their ids",
                                  array.shape()[0]));
  }
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  storage::InsertRows(array, ids);
}

void InsertRowsOf(std::span<const SparseRows> inputs, const RowSparseNDArray& array) {
  if (array.num_rows() == array.shape()[0]) return;
  for (const SparseRows& input : inputs) storage::InsertRows(array, input.ids);
}

// The inputs, where one is the weight itself as it is now: its rows are about to move.
std::vector<RowSparseNDArray> ApartFrom(const RowSparseNDArray& weight,
                                        std::span<const RowSparseNDArray> inputs) {
  std::vector<RowSparseNDArray> apart;
  for (const RowSparseNDArray& input : inputs) {
    if (!input.IsSameAs(weight)) {
      apart.push_back(input);
      continue;
    }
    apart.emplace_back(input.shape(), input.dtype(), input.device(), input.engine());
    storage::SumRowSparse({&input, 1}, apart.back());
  }
  return apart;
}

}  // namespace

NDArray DenseSum(std::span<const RowSparseNDArray> inputs, const Shape& shape,
                 const PartRows& rows) {
  RowSparseNDArray sum = inputs[0];
  if (inputs.size() > 1) {
    sum = RowSparseNDArray(sum.shape(), sum.dtype(), sum.device(), sum.engine());
    storage::SumRowSparse(inputs, sum);
  }
  NDArray dense(shape, sum.dtype(), sum.device(), sum.engine());
  if (rows.whole()) {
    storage::RowSparseToDense(sum, dense);
  } else {
    ScatterPieces(sum, dense, rows);
  }
  return dense;
}

void UpdateRows(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
                const NDArray& weight, const PartRows& rows) {
  RunLazyPass(update, RowsOf(inputs), weight.engine(), rows, nullptr);
}

void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const NDArray& weight, const PartRows& rows) {
  if (!update.rule->lazy(/*row_sparse_weight=*/false)) {
    const NDArray gradient = DenseSum(inputs, weight.shape(), rows);
    UpdateArray(update, {&gradient, 1});
    return;
  }
  if (update.passes > 1) RunEarlierPasses(update, DenseSum(inputs, weight.shape(), rows));
  UpdateRows(update, inputs, weight, rows);
}

void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const NDArray& weight) {
  UpdateArray(update, inputs, weight, AllRows(inputs[0]));
}

void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const RowSparseNDArray& weight) {
  std::vector<RowSparseNDArray> apart;
  if (std::ranges::any_of(inputs, [&](const auto& input) { return input.IsSameAs(weight); })) {
    apart = ApartFrom(weight, inputs);
    inputs = apart;
  }
  const bool lazy = update.rule->lazy(/*row_sparse_weight=*/true);
  if (!lazy || update.passes > 1) {
    InsertAllRows(weight);
    update.run.weight = weight.rows();
    const NDArray gradient = DenseSum(inputs);
    if (!lazy) {
      UpdateArray(update, {&gradient, 1});
      return;
    }
    RunEarlierPasses(update, gradient);
  }
  const std::vector<SparseRows> rows = RowsOf(inputs);
  InsertRowsOf(rows, weight);
  update.run.weight = weight.rows();
  const SparseRows weight_rows = RowsOf(weight);
  RunLazyPass(update, rows, weight.engine(), AllRows(weight), &weight_rows);
}

}  // namespace heddle::kvstore
