#include "kvstore/row_sparse_update.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "kvstore/array_kernels.h"
#include "ops/row_ids.h"
#include "ops/row_merge.h"
#include "ops/row_sparse.h"
#include "ops/sum.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore {

using ops::SparseRows;

namespace {

SparseRows RowsOf(const RowSparseNDArray& array) { return {array.row_ids(), array.const_rows()}; }

std::vector<SparseRows> RowsOf(std::span<const RowSparseNDArray> arrays) {
  std::vector<SparseRows> rows;
  rows.reserve(arrays.size());
  for (const RowSparseNDArray& array : arrays) rows.push_back(RowsOf(array));
  return rows;
}

// Hands rows to the rule, those that follow each other in all arrays as one run.
class RowRuns {
 public:
  RowRuns(const ArrayUpdate& update, std::int64_t row_size)
      : update_(update), row_size_(row_size), row_bytes_(RowBytes(update.run.dtype, row_size)) {}
  RowRuns(const RowRuns&) = delete;
  RowRuns& operator=(const RowRuns&) = delete;

  // The row `id` of the weight, and the inputs' rows, in list order, whose sum is its gradient.
  void Add(std::int64_t id, std::span<const void* const> rows, std::byte* weight) {
    const std::byte* gradient = static_cast<const std::byte*>(rows[0]);
    if (rows.size() > 1) {
      if (sums_.empty()) sums_.resize(std::max(row_bytes_, kSumBytes / row_bytes_ * row_bytes_));
      if (sums_used_ == sums_.size()) Flush();
      std::byte* const sum = sums_.data() + sums_used_;
      sums_used_ += row_bytes_;
      ops::Sum(update_.run.dtype, rows, sum, static_cast<std::size_t>(row_size_),
               ops::StoreMode::kCached);
      gradient = sum;
    }
    const std::size_t bytes = static_cast<std::size_t>(count_) * row_bytes_;
    if (count_ > 0 && id == first_ + count_ && gradient == gradient_ + bytes &&
        weight == weight_ + bytes) {
      ++count_;
      return;
    }
    // The sum of this row is not part of the run that ends here, and stays where it is.
    Run();
    first_ = id;
    count_ = 1;
    gradient_ = gradient;
    weight_ = weight;
  }

  void Flush() {
    Run();
    sums_used_ = 0;
  }

 private:
  static constexpr std::size_t kSumBytes = 8192;  // some rows, in the first-level cache

  static std::size_t RowBytes(DType dtype, std::int64_t row_size) {
    return static_cast<std::size_t>(row_size) * SizeOf(dtype);
  }

  void Run() {
    if (count_ == 0) return;
    UpdateElements(update_, first_ * row_size_, (first_ + count_) * row_size_, gradient_, weight_);
    count_ = 0;
  }

  const ArrayUpdate& update_;
  const std::int64_t row_size_;
  const std::size_t row_bytes_;
  std::vector<std::byte> sums_;
  std::size_t sums_used_ = 0;
  // The run so far.
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  const std::byte* gradient_ = nullptr;
  std::byte* weight_ = nullptr;
};

// The last pass of a lazy rule. `weight_rows`: the rows that are there of a row-sparse weight,
// those of the inputs among them; of a dense one, all.
void RunLazyPass(const ArrayUpdate& update, std::span<const SparseRows> inputs, Engine& engine,
                 std::int64_t row_size, const SparseRows* weight_rows) {
  if (row_size == 0) return;
  const std::size_t row_bytes = static_cast<std::size_t>(row_size) * SizeOf(update.run.dtype);
  // A row of the gradient is read, one of the weight and of some states read and written.
  const std::vector<std::int64_t> bounds =
      storage::CutForWorkers(inputs, static_cast<std::int64_t>(4 * row_bytes) + 128);
  auto* const base = static_cast<std::byte*>(update.run.weight);
  const auto run_range = [&](std::int64_t begin, std::int64_t end) {
    std::vector<SparseRows> part;
    part.reserve(inputs.size());
    for (const SparseRows& input : inputs) {
      part.push_back(ops::RowsBetween(input, row_bytes, begin, end));
    }
    RowRuns runs(update, row_size);
    ops::RowFinder finder(weight_rows != nullptr ? weight_rows->ids
                                                 : std::span<const std::int64_t>());
    ops::ForEachRow(part, row_bytes, [&](std::int64_t id, std::span<const void* const> rows) {
      const std::int64_t place = weight_rows != nullptr ? finder.Find(id) : id;
      runs.Add(id, rows, base + static_cast<std::size_t>(place) * row_bytes);
    });
    runs.Flush();
  };
  const auto block = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      run_range(bounds[static_cast<std::size_t>(i)], bounds[static_cast<std::size_t>(i) + 1]);
    }
  };
  engine.ParallelFor(static_cast<std::int64_t>(bounds.size()) - 1, 1, std::ref(block));
}

// The sum of the inputs with zeros where no row is.
NDArray DenseSum(std::span<const RowSparseNDArray> inputs) {
  RowSparseNDArray sum = inputs[0];
  if (inputs.size() > 1) {
    sum = RowSparseNDArray(sum.shape(), sum.dtype(), sum.device(), sum.engine());
    storage::SumRowSparse(inputs, sum);
  }
  NDArray dense(sum.shape(), sum.dtype(), sum.device(), sum.engine());
  storage::RowSparseToDense(sum, dense);
  return dense;
}

void InsertAllRows(const RowSparseNDArray& array) {
  if (array.num_rows() == array.shape()[0]) return;
  std::vector<std::int64_t> ids(static_cast<std::size_t>(array.shape()[0]));
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  storage::InsertRows(array, ids);
}

void InsertRowsOf(std::span<const SparseRows> inputs, const RowSparseNDArray& array) {
  if (array.num_rows() == array.shape()[0]) return;
  std::vector<std::int64_t> ids;
  ops::ForEachRow(inputs, 0,
                  [&](std::int64_t id, std::span<const void* const>) { ids.push_back(id); });
  storage::InsertRows(array, ids);
}

}  // namespace

void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const NDArray& weight) {
  if (!update.rule->lazy()) {
    const NDArray gradient = DenseSum(inputs);
    UpdateArray(update, {&gradient, 1});
    return;
  }
  if (update.passes > 1) RunEarlierPasses(update, DenseSum(inputs));
  RunLazyPass(update, RowsOf(inputs), weight.engine(), inputs[0].row_size(), nullptr);
}

void UpdateArray(ArrayUpdate update, std::span<const RowSparseNDArray> inputs,
                 const RowSparseNDArray& weight) {
  if (!update.rule->lazy() || update.passes > 1) {
    InsertAllRows(weight);
    update.run.weight = weight.rows();
    const NDArray gradient = DenseSum(inputs);
    if (!update.rule->lazy()) {
      UpdateArray(update, {&gradient, 1});
      return;
    }
    RunEarlierPasses(update, gradient);
  }
  const std::vector<SparseRows> rows = RowsOf(inputs);
  InsertRowsOf(rows, weight);
  update.run.weight = weight.rows();
  const SparseRows weight_rows = RowsOf(weight);
  RunLazyPass(update, rows, weight.engine(), weight.row_size(), &weight_rows);
}

}  // namespace heddle::kvstore
