// Pulls of rows.
#include <heddle/error.h>

#include <cstdint>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kvstore/gpu_rows.h"
#include "kvstore/near_arrays.h"
#include "kvstore/queue_op.h"
#include "kvstore/stored_value.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore {

// The rows of a dense value on a GPU that are not zero.
struct StoredValue::RowsOp {
  std::shared_ptr<StoredValue> value;
  RowsInTheMaking rows;

  void operator()(const GpuWork* gpu) const {
    value->RethrowUnlessReadable();
    NonZeroRowsInto(value->array_, rows, *gpu);
  }
};

struct StoredValue::RowPullOp {
  std::shared_ptr<StoredValue> value;
  std::vector<RowSparseNDArray> out;
  NDArray row_ids;

  void operator()() const {
    const StoredValue& v = *value;
    v.RethrowUnlessReadable();
    storage::GatherRowSparse(v.rows_, SortedRowIds(), out);
  }

  std::vector<std::int64_t> SortedRowIds() const {
    try {
      return storage::SortedRowIds(row_ids, value->shape()[0]);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(
          fmt::format("RowSparsePull: key {}: {}", ToString(value->key_), error.what()));
    }
  }
};

void StoredValue::QueueRowsPull(const std::shared_ptr<StoredValue>& self,
                                std::span<const RowSparseNDArray> out, int priority) {
  const RowsInTheMaking found(self->array_);
  Engine& engine = self->engine();
  engine.PushGpu({.name = "kvstore.pull",
                  .reads = {self->var()},
                  .writes = {found.rows.var()},
                  .device = self->device(),
                  .lane = Lane::kCopy,
                  .priority = priority},
                 OnGpu<RowsOp>{{self, found}, engine, {}});
  QueueCount(found, priority);
  for (const RowSparseNDArray& array : out) found.rows.CopyTo(array, priority);
}

void StoredValue::QueueRowPull(const std::shared_ptr<StoredValue>& self,
                               std::span<const RowSparseNDArray> out, const NDArray& row_ids,
                               int priority) {
  const NearInputs near(View(row_ids), self->device(), priority);
  const NDArray& ids = near.view()[0];
  const RelayedOutputs<RowSparseNDArray> outputs(out, self->device());
  const std::span<const RowSparseNDArray> near_out = outputs.near();
  Queue(self->engine(),
        {.name = "kvstore.row_sparse_pull",
         .reads = {self->var(), ids.var()},
         .writes = VarListOf(near_out),
         .device = near_out[0].device(),
         .lane = Lane::kCopy,
         .priority = priority},
        RowPullOp{self, {near_out.begin(), near_out.end()}, ids});
  outputs.Forward(priority);
}

}  // namespace heddle::kvstore
