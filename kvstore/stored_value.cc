#include "kvstore/stored_value.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "engine/access_check.h"
#include "kvstore/array_kernels.h"
#include "kvstore/compression/compressed_sum.h"
#include "kvstore/gpu_rows.h"
#include "kvstore/gpu_work.h"
#include "kvstore/near_arrays.h"
#include "kvstore/queue_op.h"
#include "kvstore/row_sparse_update.h"
#include "storage/array_state.h"
#include "storage/row_sparse_kernels.h"
#include "storage/row_sparse_state.h"

namespace heddle::kvstore {

StoredValue::StoredValue(Key key, const NDArray& like, Device device, Engine& engine, GpuSums sums)
    : key_(std::move(key)), planner_(sums), array_(like.shape(), like.dtype(), device, engine) {}

StoredValue::StoredValue(Key key, const RowSparseNDArray& like, Device device, Engine& engine,
                         GpuSums sums)
    : key_(std::move(key)), planner_(sums), rows_(like.shape(), like.dtype(), device, engine) {}

std::shared_ptr<StoredValue> StoredValue::MovedTo(Device device) const {
  if (is_row_sparse()) {
    auto moved = std::make_shared<StoredValue>(key_, rows_, device, engine(), planner_.how());
    moved->has_value_ = has_value_;
    const MutexLock lock(moved->together_mutex_);
    moved->far_rows_ = rows_;
    moved->has_first_.store(true, std::memory_order_relaxed);  // before anybody knows of it
    return moved;
  }
  auto moved = std::make_shared<StoredValue>(key_, array_, device, engine(), planner_.how());
  moved->has_value_ = has_value_;
  if (!has_value_) return moved;
  const bool near = AreNear(View(Current()), device);
  (near ? moved->source_ : moved->far_source_) = Current();
  moved->has_first_.store(!near, std::memory_order_relaxed);  // before anybody knows of it
  return moved;
}

void StoredValue::WillReplace(std::shared_ptr<StoredValue> old, const KeyArrays& pushed,
                              std::shared_ptr<const Compressor> compressor, int priority) {
  const MutexLock lock(together_mutex_);
  replacement_ = std::make_unique<Replacement>(
      Replacement{std::move(old),
                  {pushed.arrays.begin(), pushed.arrays.end()},
                  {pushed.row_sparse.begin(), pushed.row_sparse.end()},
                  std::move(compressor),
                  priority});
  has_first_.store(true, std::memory_order_relaxed);  // before anybody knows of it
}

std::int64_t StoredValue::bytes() const {
  if (!is_row_sparse()) return array_.bytes();
  const internal::RowStorage& rows = internal::StateOf(rows_).rows;
  return rows.count() * (rows.row_bytes() + static_cast<std::int64_t>(sizeof(std::int64_t)));
}

NDArray StoredValue::NewGuardedArray(DType dtype) const {
  return internal::NewArrayWith(var(), shape(), dtype, device(), engine());
}

template <class Use>
void StoredValue::UseCurrent(const Use& use) const {
  if (source_.empty()) return use(array_);
  const engine::UncheckedScope settled;  // nobody writes it any more, so it needs no order
  use(source_);
}

void StoredValue::FetchSource() {
  if (source_.empty()) return;
  UseCurrent([this](const NDArray& source) { CopyArray(source, View(array_)); });
  source_ = NDArray();
}

void StoredValue::RethrowIfPoisoned() const {
  if (std::exception_ptr error = engine().ErrorOf(var())) {
    std::rethrow_exception(std::move(error));
  }
}

void StoredValue::RethrowUnlessReadable() const {
  if (input_error_ != nullptr) std::rethrow_exception(input_error_);
  if (!has_value_) {
    throw InvalidArgument(
        fmt::format("Pull: key {} was created by a push that came later", ToString(key_)));
  }
}

void StoredValue::SumReceived(std::span<const NDArray> inputs, const Compressor* compressor,
                              const NDArray& out, const GpuWork* gpu) {
  if (gpu != nullptr) {
    compressor != nullptr ? gpu->SumCodes(*compressor, inputs, out) : gpu->Sum(inputs, out);
  } else if (compressor != nullptr) {
    SumCompressed(inputs, *compressor, ResidualsOf(inputs, gpu), out);
  } else {
    SumArrays(inputs, out);
  }
}

void StoredValue::SumReceived(std::span<const RowSparseNDArray> inputs,
                              const Compressor* compressor, const RowSparseNDArray& out,
                              const GpuWork* gpu) {
  DCHECK(compressor == nullptr);
  if (gpu == nullptr) return storage::SumRowSparse(inputs, out);
  DCHECK(inputs.size() == 1);  // what was several is a sum by now: QueueSumOfRows
  CopyRows(inputs[0], out, *gpu);
}

void StoredValue::Assign(std::span<const NDArray> inputs, const Compressor* compressor,
                         const GpuWork* gpu) {
  SumReceived(inputs, compressor, array_, gpu);
  source_ = NDArray();
  has_value_ = true;
}

void StoredValue::Assign(std::span<const RowSparseNDArray> inputs, const Compressor* compressor,
                         const GpuWork* gpu) {
  SumReceived(inputs, compressor, rows_, gpu);
  has_value_ = true;
}

void StoredValue::Convert(const StoredValue& other, const RowSparseNDArray& rows,
                          const GpuWork* gpu) {
  has_value_ = other.has_value_;
  if (!has_value_) return;
  if (!is_row_sparse()) {
    other.CopyTo(View(array_), gpu);
  } else if (rows.empty()) {
    other.CopyTo({&rows_, 1}, gpu);
  } else {
    CopyRows(rows, rows_, *gpu);
  }
}

void StoredValue::CopyTo(std::span<const NDArray> out, const GpuWork* gpu) const {
  if (is_row_sparse()) {
    for (const NDArray& array : out) {
      gpu != nullptr ? RowsToDense(rows_, array, *gpu) : storage::RowSparseToDense(rows_, array);
    }
  } else if (gpu != nullptr) {
    gpu->CopyOut(array_, out);
  } else {
    const bool streams = pulls_stream_.load(std::memory_order_relaxed);
    const ops::StoreMode mode = streams ? ops::StoreMode::kStreaming : ops::StoreMode::kAuto;
    UseCurrent([&](const NDArray& value) { CopyArray(value, out, mode); });
  }
}

void StoredValue::CopyTo(std::span<const RowSparseNDArray> out, const GpuWork* gpu) const {
  DCHECK(gpu == nullptr || is_row_sparse());  // of a dense one: QueueNonZeroRows
  for (const RowSparseNDArray& array : out) {
    if (gpu != nullptr) {
      CopyRows(rows_, array, *gpu);
    } else if (is_row_sparse()) {
      storage::CopyRowSparse(rows_, array);
    } else {
      UseCurrent([&](const NDArray& value) { storage::DenseToRowSparse(value, array); });
    }
  }
}

UpdateState& StoredValue::StateOf(StatesOrigin& origin, std::unique_ptr<UpdateState>* outdated,
                                  const GpuWork* gpu) {
  if (origin.number < origin_number_) {
    *outdated = std::make_unique<UpdateState>(origin.multi_precision);
    return **outdated;
  }
  if (origin.number > origin_number_) {
    if (gpu != nullptr) gpu->Keep(std::move(update_state_));
    update_state_ = origin.Start();
    origin_number_ = origin.number;
  } else if (update_state_ == nullptr) {  // after Reset, which is not undone by what was loaded
    update_state_ = std::make_unique<UpdateState>(origin.multi_precision);
  }
  return *update_state_;
}

void StoredValue::ApplyUpdate(std::span<const NDArray> inputs, const Compressor* compressor,
                              const Update& update, const GpuWork* gpu) {
  std::unique_ptr<UpdateState> outdated;
  UpdateState& state = StateOf(*update.basis->origin, &outdated, gpu);
  if (gpu != nullptr) {
    if (outdated != nullptr) gpu->Keep(std::move(outdated));
    NDArray gradient = inputs[0];
    if (inputs.size() > 1 || compressor != nullptr) {
      gradient = NewGuardedArray(dtype());
      gpu->Keep(gradient);
      SumReceived(inputs, compressor, gradient, gpu);
    }
    const ArrayUpdate begun = state.Begin(*update.basis->rule, key_, array_, update.learning_rate,
                                          update.weight_decay, gpu);
    gpu->Update(begun, gradient);
    return;
  }
  if (compressor != nullptr) {
    // A value of its own: compressing is no pure function, and updates may take several passes.
    if (decompressed_.empty()) decompressed_ = NewGuardedArray(dtype());
    SumReceived(inputs, compressor, decompressed_, gpu);
    inputs = View(decompressed_);
  }
  UpdateArray(
      state.Begin(*update.basis->rule, key_, array_, update.learning_rate, update.weight_decay),
      inputs);
}

void StoredValue::ApplyUpdate(std::span<const RowSparseNDArray> inputs,
                              const Compressor* compressor, const Update& update,
                              const GpuWork* gpu) {
  DCHECK(compressor == nullptr);
  std::unique_ptr<UpdateState> outdated;
  UpdateState& state = StateOf(*update.basis->origin, &outdated, gpu);
  if (gpu != nullptr && outdated != nullptr) gpu->Keep(std::move(outdated));
  const auto apply = [&](const auto& value) {
    const ArrayUpdate begun = state.Begin(*update.basis->rule, key_, value, update.learning_rate,
                                          update.weight_decay, gpu);
    gpu != nullptr ? UpdateArray(begun, inputs, value, *gpu) : UpdateArray(begun, inputs, value);
  };
  if (is_row_sparse()) {
    apply(rows_);
  } else {
    apply(array_);
  }
}

}  // namespace heddle::kvstore
