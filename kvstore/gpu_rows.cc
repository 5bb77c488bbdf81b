#include "kvstore/gpu_rows.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvstore/queue_op.h"
#include "ops/gpu_row_kernels.h"
#include "storage/array_state.h"
#include "storage/gpus.h"
#include "storage/row_sparse_state.h"

namespace heddle::kvstore {

using internal::RowStorage;
using ops::GpuRows;
using storage::Gpus;

namespace {

constexpr std::int64_t kIdBytes = sizeof(std::int64_t);

const ops::GpuRowKernels& KernelsOf(const GpuWork& gpu) {
  return Gpus::Of(gpu.engine()).row_kernels();
}

GpuRows RowsOf(const RowStorage& rows) {
  return {rows.ids(), static_cast<std::size_t>(rows.count()), rows.rows()};
}

// Those that have rows.
std::vector<GpuRows> RowsOf(std::span<const RowSparseNDArray> arrays) {
  std::vector<GpuRows> rows;
  for (const RowSparseNDArray& array : arrays) {
    rows.push_back(RowsOf(internal::ToRead(array).rows));
    if (rows.back().count == 0) rows.pop_back();
  }
  return rows;
}

std::size_t TotalOf(std::span<const GpuRows> inputs) {
  std::size_t total = 0;
  for (const GpuRows& input : inputs) total += input.count;
  return total;
}

// Where a sum goes: room for all rows of the inputs.
struct SumMemory {
  std::int64_t* ids;
  void* rows;
  std::int64_t* count;
};

void IssueSum(DType dtype, std::int64_t row_size, std::span<const GpuRows> inputs,
              const SumMemory& out, const GpuWork& gpu) {
  const ops::GpuRowKernels& kernels = KernelsOf(gpu);
  void* const scratch = gpu.Temporary(kernels.SumRowsScratchBytes(TotalOf(inputs)));
  kernels.SumRows(dtype, static_cast<std::size_t>(row_size), inputs, out.ids, out.rows, out.count,
                  scratch, gpu.stream());
}

// The sum of the inputs: one that has rows alone as it is, of several in temporary memory.
GpuRows SumOf(std::span<const RowSparseNDArray> arrays, const GpuWork& gpu) {
  const std::vector<GpuRows> inputs = RowsOf(arrays);
  if (inputs.empty()) return {};
  if (inputs.size() == 1) return inputs[0];
  const std::size_t total = TotalOf(inputs);
  const internal::RowSparseState& like = internal::StateOf(arrays[0]);
  const std::size_t row_bytes = static_cast<std::size_t>(like.row_size) * SizeOf(like.dtype);
  const SumMemory sum = {static_cast<std::int64_t*>(gpu.Temporary(total * sizeof(std::int64_t))),
                         gpu.Temporary(total * row_bytes),
                         static_cast<std::int64_t*>(gpu.Temporary(sizeof(std::int64_t)))};
  IssueSum(like.dtype, like.row_size, inputs, sum, gpu);
  return {sum.ids, total, sum.rows, sum.count};
}

// With zeros where no row is.
NDArray DenseOf(const GpuRows& rows, const NDArray& like, const GpuWork& gpu) {
  const NDArray dense = internal::NewArrayGuardedBy(like, like.shape(), like.dtype());
  gpu.Keep(dense);
  gpu.FillZero(dense);
  if (rows.count > 0) {
    const std::size_t row_bytes =
        static_cast<std::size_t>(like.bytes()) / static_cast<std::size_t>(like.shape()[0]);
    KernelsOf(gpu).ScatterRows(rows, row_bytes, dense.data(), gpu.stream());
  }
  return dense;
}

// Rows of dense arrays, gathered in arrays of their own for a while.
class GatheredRows {
 public:
  GatheredRows(const ops::GpuIds& ids, const GpuWork& gpu) : ids_(ids), gpu_(gpu) {}

  template <class T>
  T* Gather(T* dense, std::size_t row_bytes) {
    void* const part = gpu_.Temporary(ids_.count * row_bytes);
    KernelsOf(gpu_).GatherDenseRows(dense, ids_, row_bytes, part, gpu_.stream());
    gathered_.push_back({dense, part, row_bytes});
    return static_cast<T*>(part);
  }
  void PutBack() const {
    for (const Gathered& from : gathered_) {
      KernelsOf(gpu_).ScatterRows({ids_.ids, ids_.count, from.part, ids_.present}, from.row_bytes,
                                  from.dense, gpu_.stream());
    }
  }

 private:
  struct Gathered {
    void* dense;
    void* part;
    std::size_t row_bytes;
  };

  const ops::GpuIds ids_;
  const GpuWork& gpu_;
  std::vector<Gathered> gathered_;
};

// The last pass of a lazy rule. No such rule looks at the places of elements, so rows may lie
// elsewhere. Of ids that are not there it updates what it finds in the temporary memory, which
// nobody reads.
void RunLazyPass(const ArrayUpdate& update, internal::UpdateRun run, const GpuRows& gradient,
                 std::int64_t num_rows, void* scratch, const GpuWork& gpu) {
  const GpuUpdates::Passes last = {update.passes, update.passes - 1, update.passes};
  const GpuUpdates& updates = GpuUpdatesOf(gpu.engine());
  run.gradient = gradient.rows;
  const bool all =
      gradient.present == nullptr && gradient.count == static_cast<std::size_t>(num_rows);
  if (all) return updates.UpdatePasses(*update.rule, run, last, scratch, gpu.stream());

  const auto row_length = static_cast<std::size_t>(update.key.row_length);
  const std::size_t state_bytes = run.master != nullptr ? sizeof(float) : SizeOf(run.dtype);
  GatheredRows rows(gradient.list(), gpu);
  run.weight = rows.Gather(run.weight, row_length * SizeOf(run.dtype));
  if (run.master != nullptr) run.master = rows.Gather(run.master, row_length * state_bytes);
  const std::span<const internal::UpdateStateType> types = update.rule->states();
  for (std::size_t i = 0; i < run.states.size(); ++i) {
    if (run.states[i] == nullptr) continue;
    const bool per_row = i < types.size() && types[i].per_row;
    run.states[i] = rows.Gather(run.states[i], (per_row ? 1 : row_length) * state_bytes);
  }
  run.count = gradient.count * row_length;
  updates.UpdatePasses(*update.rule, run, last, scratch, gpu.stream());
  rows.PutBack();
}

}  // namespace

void UpdateArray(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
                 const NDArray& weight, const GpuWork& gpu) {
  if (weight.size() == 0) return;
  const GpuRows gradient = SumOf(inputs, gpu);
  if (!update.rule->lazy(/*row_sparse_weight=*/false)) {
    gpu.Update(update, DenseOf(gradient, weight, gpu));
    return;
  }
  internal::UpdateRun whole = update.run;
  whole.update = &update.key;
  whole.count = static_cast<std::size_t>(weight.size());
  void* scratch = nullptr;
  if (update.passes > 1) {
    const GpuUpdates& updates = GpuUpdatesOf(gpu.engine());
    scratch = gpu.Temporary(updates.ScratchBytes({&whole, 1}, update.passes));
    whole.gradient = DenseOf(gradient, weight, gpu).const_data();
    updates.UpdatePasses(*update.rule, whole, {update.passes, 0, update.passes - 1}, scratch,
                         gpu.stream());
  }
  if (gradient.count == 0) return;
  RunLazyPass(update, whole, gradient, weight.shape()[0], scratch, gpu);
}

void CopyRows(const RowSparseNDArray& from, const RowSparseNDArray& to, const GpuWork& gpu) {
  if (to.IsSameAs(from)) return;
  const RowStorage& source = internal::ToRead(from).rows;
  RowStorage& out = internal::ToWrite(to).rows;
  gpu.Keep(out.Renew(source.count()));
  out.set_count(0);  // should the copies fail
  const auto copy = [&](void* target, const void* rows, std::int64_t bytes) {
    if (bytes > 0) Gpus::Of(gpu.engine()).driver().Copy(gpu.stream().handle, target, rows, bytes);
  };
  copy(out.ids(), source.ids(), source.count() * kIdBytes);
  copy(out.rows(), source.rows(), source.count() * source.row_bytes());
  out.set_count(source.count());
}

// ---- Rows that only the GPU counts

template <class Array>
RowsInTheMaking::RowsInTheMaking(const Array& like)
    : rows(like.shape(), like.dtype(), like.device(), like.engine()),
      count(internal::NewArrayWith(rows.var(), {1}, DType::kInt64, CpuPinned(like.device().id),
                                   like.engine())) {}
template RowsInTheMaking::RowsInTheMaking(const NDArray&);
template RowsInTheMaking::RowsInTheMaking(const RowSparseNDArray&);

namespace {

// Room for `rows` rows, of which none is there yet. The count is set here if the GPU will not.
RowStorage& MakeRoom(const RowsInTheMaking& making, std::size_t rows) {
  RowStorage& room = internal::ToWrite(making.rows).rows;
  room.Reset(static_cast<std::int64_t>(rows));
  room.set_count(0);
  *making.count.data<std::int64_t>() = 0;
  return room;
}

void CopyOut(const std::int64_t* count, const RowsInTheMaking& making, const GpuWork& gpu) {
  Gpus::Of(gpu.engine())
      .driver()
      .Copy(gpu.stream().handle, making.count.data<std::int64_t>(), count, kIdBytes);
}

struct SumOp {
  std::vector<RowSparseNDArray> inputs;
  RowsInTheMaking out;

  void operator()(const GpuWork* gpu) const { SumInto(inputs, out, *gpu); }
};

}  // namespace

void SumInto(std::span<const RowSparseNDArray> inputs, const RowsInTheMaking& out,
             const GpuWork& gpu) {
  const std::vector<GpuRows> rows = RowsOf(inputs);
  const RowStorage& room = MakeRoom(out, TotalOf(rows));
  if (rows.empty()) return;
  auto* const count = static_cast<std::int64_t*>(gpu.Temporary(sizeof(std::int64_t)));
  const internal::RowSparseState& like = internal::StateOf(out.rows);
  IssueSum(like.dtype, like.row_size, rows, {room.ids(), room.rows(), count}, gpu);
  CopyOut(count, out, gpu);
}

void NonZeroRowsInto(const NDArray& dense, const RowsInTheMaking& out, const GpuWork& gpu) {
  const auto all = static_cast<std::size_t>(dense.size() > 0 ? dense.shape()[0] : 0);
  const RowStorage& room = MakeRoom(out, all);
  if (all == 0) return;
  const ops::GpuRowKernels& kernels = KernelsOf(gpu);
  const internal::RowSparseState& like = internal::StateOf(out.rows);
  auto* const count = static_cast<std::int64_t*>(gpu.Temporary(sizeof(std::int64_t)));
  kernels.NonZeroRows(like.dtype, static_cast<std::size_t>(like.row_size), dense.const_data(), all,
                      room.ids(), count, gpu.Temporary(kernels.NonZeroRowsScratchBytes(all)),
                      gpu.stream());
  kernels.GatherDenseRows(dense.const_data(), {room.ids(), all, count},
                          static_cast<std::size_t>(room.row_bytes()), room.rows(), gpu.stream());
  CopyOut(count, out, gpu);
}

void QueueCount(const RowsInTheMaking& rows, int priority) {
  const Var& var = rows.rows.var();
  OpOptions options{.name = "kvstore.count_rows", .reads = {var}, .writes = {var}};
  options.priority = priority;
  rows.rows.engine().Push(options, [rows] {
    // How many rows there are is the host's to know, where they lie is not touched.
    internal::StateOf(rows.rows).rows.set_count(*rows.count.data<const std::int64_t>());
  });
}

RowSparseNDArray QueueSumOfRows(std::span<const RowSparseNDArray> inputs, int priority) {
  const RowsInTheMaking sum(inputs[0]);
  Engine& engine = sum.rows.engine();
  engine.PushGpu({.name = "kvstore.sum_rows",
                  .reads = VarListOf(inputs),
                  .writes = {sum.rows.var()},
                  .device = sum.rows.device(),
                  .priority = priority},
                 OnGpu<SumOp>{{{inputs.begin(), inputs.end()}, sum}, engine, {}});
  QueueCount(sum, priority);
  return sum.rows;
}

}  // namespace heddle::kvstore
