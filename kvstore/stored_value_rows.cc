// What only row-sparse arrays do to values: pulls of rows, and updates that insert them.
#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kvstore/gpu_rows.h"
#include "kvstore/near_arrays.h"
#include "kvstore/queue_op.h"
#include "kvstore/stored_value.h"
#include "storage/gpu_steps.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore {

struct StoredValue::RowsOp {
  std::shared_ptr<StoredValue> value;
  RowsInTheMaking rows;
  bool readable;

  void operator()(const GpuWork* gpu) const {
    if (readable) value->RethrowUnlessReadable();
    if (value->has_value_) {
      NonZeroRowsInto(value->array_, rows, *gpu);
    } else {
      NoRowsInto(rows);
    }
  }
};

RowSparseNDArray StoredValue::QueueNonZeroRows(const std::shared_ptr<StoredValue>& self,
                                               bool readable, int priority) {
  const RowsInTheMaking found(self->array_);
  Engine& engine = self->engine();
  engine.PushGpu({.name = readable ? OpName("kvstore.pull") : OpName("kvstore.push"),
                  .reads = {self->var()},
                  .writes = {found.rows.var()},
                  .device = self->device(),
                  .lane = readable ? Lane::kCopy : Lane::kNormal,
                  .priority = priority},
                 OnGpu<RowsOp>{{self, found, readable}, engine, {}});
  QueueCount(found, priority);
  return found.rows;
}

// ---- Pulls by row ids

struct StoredValue::RowPullOp {
  std::shared_ptr<StoredValue> value;
  std::vector<RowSparseNDArray> out;
  NDArray row_ids;

  void operator()() const {
    const StoredValue& v = *value;
    v.RethrowUnlessReadable();
    storage::GatherRowSparse(v.rows_, v.SortedRowIds(row_ids), out);
  }
};

std::vector<std::int64_t> StoredValue::SortedRowIds(const NDArray& row_ids) const {
  try {
    return storage::SortedRowIds(row_ids, shape()[0]);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("RowSparsePull: key {}: {}", ToString(key_), error.what()));
  }
}

namespace {

// Row ids as a GPU takes them: sorted, each once, in pinned memory. `count` is guarded by the Var
// of `ids`.
struct SortedIds {
  NDArray ids;
  std::int64_t count = 0;
};

}  // namespace

struct StoredValue::SortIdsOp {
  std::shared_ptr<StoredValue> value;
  NDArray row_ids;
  std::shared_ptr<SortedIds> out;

  void operator()() const {
    const std::vector<std::int64_t> sorted = value->SortedRowIds(row_ids);
    std::ranges::copy(sorted, out->ids.data<std::int64_t>());
    out->count = static_cast<std::int64_t>(sorted.size());
  }
};

struct StoredValue::RowPullOnGpuOp {
  std::shared_ptr<StoredValue> value;
  std::vector<RowSparseNDArray> out;
  std::shared_ptr<const SortedIds> row_ids;

  void operator()(const GpuWork* gpu) const {
    value->RethrowUnlessReadable();
    GatherRows(value->rows_, row_ids->ids, row_ids->count, out, *gpu);
  }
};

void StoredValue::QueueRowPull(const std::shared_ptr<StoredValue>& self,
                               std::span<const RowSparseNDArray> out, const NDArray& row_ids,
                               int priority) {
  QueueFirst(self);
  const NearInputs near(View(row_ids), Cpu(), priority);
  const NDArray& ids = near.view()[0];
  const RelayedOutputs<RowSparseNDArray> outputs(out, self->device());
  if (IsOnGpu(self->device())) {
    QueueRowPullOnGpu(self, outputs.near(), ids, priority);
  } else {
    const std::span<const RowSparseNDArray> near_out = outputs.near();
    self->engine().Push({.name = "kvstore.row_sparse_pull",
                         .reads = {self->var(), ids.var()},
                         .writes = VarListOf(near_out),
                         .device = near_out[0].device(),
                         .lane = Lane::kCopy,
                         .priority = priority},
                        RowPullOp{self, {near_out.begin(), near_out.end()}, ids});
  }
  outputs.Forward(priority);
}

void StoredValue::QueueRowPullOnGpu(const std::shared_ptr<StoredValue>& self,
                                    std::span<const RowSparseNDArray> out, const NDArray& row_ids,
                                    int priority) {
  Engine& engine = self->engine();
  const Device device = self->device();
  const auto sorted = std::make_shared<SortedIds>(
      SortedIds{NDArray({row_ids.size()}, DType::kInt64, CpuPinned(device.id), engine)});
  const Var& var = sorted->ids.var();
  engine.Push({.name = "kvstore.row_sparse_pull",
               .reads = {row_ids.var()},
               .writes = {var},
               .lane = Lane::kCopy,
               .priority = priority},
              SortIdsOp{self, row_ids, sorted});
  engine.PushGpu({.name = "kvstore.row_sparse_pull",
                  .reads = {self->var(), var},
                  .writes = VarListOf(out),
                  .device = device,
                  .lane = Lane::kCopy,
                  .priority = priority},
                 OnGpu<RowPullOnGpuOp>{{self, {out.begin(), out.end()}, sorted}, engine, {}});
}

// ---- Lazy updates of row-sparse values on GPUs

// PushOp in the steps of storage/gpu_steps.h.
struct StoredValue::RowUpdate {
  std::shared_ptr<StoredValue> value;
  std::vector<RowSparseNDArray> gradients;
  Update update;
  LazyRowUpdate rows{};
  std::unique_ptr<UpdateState> outdated{};
  std::vector<std::shared_ptr<void>> kept{};

  bool Begin() {
    StoredValue& v = *value;
    v.RethrowIfPoisoned();
    if (std::exception_ptr error = ErrorOfInputs<RowSparseNDArray>(gradients)) {
      v.input_error_ = std::move(error);
      return false;
    }
    return v.has_value_;  // else as in PushOp
  }
  void First(GpuStream stream) {
    StoredValue& v = *value;
    GpuWork::Pending pending;
    const GpuWork gpu(v.engine(), stream, &kept, &pending);
    UpdateState& state = v.StateOf(*update.basis->origin, &outdated, &gpu);
    rows.First(state.Begin(*update.basis->rule, v.key_, v.rows_, update.learning_rate,
                           update.weight_decay, &gpu),
               gradients, v.rows_, gpu);
  }
  void Second(GpuStream stream) {
    StoredValue& v = *value;
    GpuWork::Pending pending;
    rows.Second(v.rows_, GpuWork(v.engine(), stream, &kept, &pending));
    v.input_error_ = nullptr;
  }
};

void StoredValue::QueueRowUpdate(const std::shared_ptr<StoredValue>& self,
                                 std::span<const RowSparseNDArray> gradients, Update update,
                                 int priority) {
  storage::PushGpuSteps(self->engine(),
                        {.name = "kvstore.push",
                         .reads = VarListOf(gradients),
                         .writes = {self->var()},
                         .device = self->device(),
                         .priority = priority,
                         .run_when_poisoned = true},
                        std::make_shared<RowUpdate>(RowUpdate{
                            self, {gradients.begin(), gradients.end()}, std::move(update)}));
}

}  // namespace heddle::kvstore
