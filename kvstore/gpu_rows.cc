#include "kvstore/gpu_rows.h"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "kvstore/queue_op.h"
#include "ops/gpu_row_kernels.h"
#include "storage/array_state.h"
#include "storage/gpus.h"
#include "storage/row_sparse_state.h"

namespace heddle::kvstore {

using internal::kIdBytes;
using internal::RowStorage;
using ops::GpuRows;
using storage::Gpus;

namespace {

const ops::GpuRowKernels& KernelsOf(const GpuWork& gpu) {
  return Gpus::Of(gpu.engine()).row_kernels();
}

// Those that have rows.
std::vector<GpuRows> RowsOf(std::span<const RowSparseNDArray> arrays) {
  std::vector<GpuRows> rows;
  for (const RowSparseNDArray& array : arrays) {
    rows.push_back(internal::ToRead(array).rows.gpu_view());
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

// `dense` becomes the rows, of its dtype, with zeros where none is.
void Scatter(const GpuRows& rows, const NDArray& dense, const GpuWork& gpu) {
  gpu.FillZero(dense);
  if (rows.count == 0 || dense.size() == 0) return;
  const std::size_t row_bytes =
      static_cast<std::size_t>(dense.bytes()) / static_cast<std::size_t>(dense.shape()[0]);
  KernelsOf(gpu).ScatterRows(rows, row_bytes, dense.data(), gpu.stream());
}

template <class Array>
NDArray DenseOf(const GpuRows& rows, const Array& like, const GpuWork& gpu) {
  const NDArray dense = internal::NewArrayGuardedBy(like, like.shape(), like.dtype());
  gpu.Keep(dense);
  Scatter(rows, dense, gpu);
  return dense;
}

// Rows of arrays, gathered in arrays of their own for a while. `ids`: of the rows of an array, or
// their places in it.
class GatheredRows {
 public:
  explicit GatheredRows(const GpuWork& gpu) : gpu_(gpu) {}

  template <class T>
  T* Gather(T* array, const ops::GpuIds& ids, std::size_t row_bytes) {
    void* const part = gpu_.Temporary(ids.count * row_bytes);
    KernelsOf(gpu_).GatherDenseRows(array, ids, row_bytes, part, gpu_.stream());
    gathered_.push_back({array, ids, part, row_bytes});
    return static_cast<T*>(part);
  }
  void PutBack() const {
    for (const auto& [array, ids, part, row_bytes] : gathered_) {
      KernelsOf(gpu_).ScatterRows({ids.ids, ids.count, part, ids.present}, row_bytes, array,
                                  gpu_.stream());
    }
  }

 private:
  struct Gathered {
    void* array;
    ops::GpuIds ids;
    void* part;
    std::size_t row_bytes;
  };

  const GpuWork& gpu_;
  std::vector<Gathered> gathered_;
};

// The last pass of a lazy rule, all but whose gradient is in `run`. No such rule looks at the
// places of elements, so rows may lie elsewhere. Of ids that are not there it updates what it finds
// in the temporary memory, which nobody reads.
// `places`: where the rows of the gradient lie in the weight; of a dense one their ids.
void RunLazyPass(const ArrayUpdate& update, internal::UpdateRun run, const GpuRows& gradient,
                 const ops::GpuIds& places, std::int64_t num_rows, void* scratch,
                 const GpuWork& gpu) {
  if (gradient.count == 0) return;
  const GpuUpdates::Passes last = {update.passes, update.passes - 1, update.passes};
  const GpuUpdates& updates = GpuUpdatesOf(gpu.engine());
  run.gradient = gradient.rows;
  const bool all =
      gradient.present == nullptr && gradient.count == static_cast<std::size_t>(num_rows);
  if (all) return updates.UpdatePasses(*update.rule, run, last, scratch, gpu.stream());

  const auto row_length = static_cast<std::size_t>(update.key.row_length);
  const std::size_t state_bytes = run.master != nullptr ? sizeof(float) : SizeOf(run.dtype);
  const ops::GpuIds ids = gradient.list();
  GatheredRows rows(gpu);
  run.weight = rows.Gather(run.weight, places, row_length * SizeOf(run.dtype));
  if (run.master != nullptr) run.master = rows.Gather(run.master, ids, row_length * state_bytes);
  const std::span<const internal::UpdateStateType> types = update.rule->states();
  for (std::size_t i = 0; i < run.states.size(); ++i) {
    if (run.states[i] == nullptr) continue;
    const bool per_row = i < types.size() && types[i].per_row;
    run.states[i] = rows.Gather(run.states[i], ids, (per_row ? 1 : row_length) * state_bytes);
  }
  run.count = gradient.count * row_length;
  updates.UpdatePasses(*update.rule, run, last, scratch, gpu.stream());
  rows.PutBack();
}

// The passes before the last one of a lazy rule, which see the gradient as a dense one. Returns
// what they leave to that one.
template <class Array>
void* RunEarlierPasses(const ArrayUpdate& update, const internal::UpdateRun& whole,
                       const GpuRows& gradient, const Array& weight, const GpuWork& gpu) {
  if (update.passes == 1) return nullptr;
  const GpuUpdates& updates = GpuUpdatesOf(gpu.engine());
  internal::UpdateRun run = whole;
  void* const scratch = gpu.Temporary(updates.ScratchBytes({&run, 1}, update.passes));
  run.gradient = DenseOf(gradient, weight, gpu).const_data();
  updates.UpdatePasses(*update.rule, run, {update.passes, 0, update.passes - 1}, scratch,
                       gpu.stream());
  return scratch;
}

internal::UpdateRun WholeRun(const ArrayUpdate& update, std::int64_t elements) {
  internal::UpdateRun whole = update.run;
  whole.update = &update.key;
  whole.count = static_cast<std::size_t>(elements);
  return whole;
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
  const internal::UpdateRun whole = WholeRun(update, weight.size());
  void* const scratch = RunEarlierPasses(update, whole, gradient, weight, gpu);
  RunLazyPass(update, whole, gradient, gradient.list(), weight.shape()[0], scratch, gpu);
}

namespace {

// All rows are there from now on, those that were not as zeros.
void InsertAllRows(const RowSparseNDArray& array, const GpuWork& gpu) {
  internal::RowSparseState& state = internal::ToWrite(array);
  const std::int64_t count = state.shape[0];
  if (state.rows.count() == count) return;
  const NDArray ids = internal::NewArrayWith(state.var, {count}, DType::kInt64,
                                             CpuPinned(state.device.id), state.engine);
  gpu.Keep(ids);
  std::iota(ids.data<std::int64_t>(), ids.data<std::int64_t>() + count, std::int64_t{0});
  RowStorage all = state.rows.Another(count);
  const Gpus& gpus = Gpus::Of(state.engine);
  gpus.driver().Copy(gpu.stream().handle, all.ids(), ids.const_data(), count * kIdBytes);
  if (state.row_size > 0) {
    const auto elements = static_cast<std::size_t>(count * state.row_size);
    gpus.kernels().Fill(state.dtype, ops::Scalar(0), all.rows(), elements, gpu.stream());
    if (state.rows.count() > 0) {
      gpus.row_kernels().ScatterRows(state.rows.gpu_view(),
                                     static_cast<std::size_t>(state.rows.row_bytes()), all.rows(),
                                     gpu.stream());
    }
  }
  all.set_count(count);
  std::swap(state.rows, all);
  gpu.Keep(std::move(all));
}

std::int64_t Elements(const RowSparseNDArray& array) {
  const internal::RowSparseState& state = internal::StateOf(array);
  return state.shape[0] * state.row_size;
}

}  // namespace

void UpdateArray(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
                 const RowSparseNDArray& weight, const GpuWork& gpu) {
  InsertAllRows(weight, gpu);
  if (Elements(weight) == 0) return;
  ArrayUpdate whole = update;
  whole.run.weight = internal::ToWrite(weight).rows.rows();
  gpu.Update(whole, DenseOf(SumOf(inputs, gpu), weight, gpu));
}

void LazyRowUpdate::First(const ArrayUpdate& update, std::span<const RowSparseNDArray> inputs,
                          const RowSparseNDArray& weight, const GpuWork& gpu) {
  update_ = update;
  gradient_ = SumOf(inputs, gpu);
  internal::RowSparseState& state = internal::StateOf(weight);
  if (gradient_.present != nullptr) {
    counted_ = internal::NewArrayWith(state.var, {1}, DType::kInt64, CpuPinned(state.device.id),
                                      state.engine);
    Gpus::Of(state.engine)
        .driver()
        .Copy(gpu.stream().handle, counted_.data(), gradient_.present, kIdBytes);
  }
  if (update.passes == 1) return insertion_.Count(state, gradient_.list(), gpu.stream());
  InsertAllRows(weight, gpu);
  if (Elements(weight) == 0) return;
  update_.run.weight = state.rows.rows();
  scratch_ = RunEarlierPasses(update_, WholeRun(update_, Elements(weight)), gradient_, weight, gpu);
}

void LazyRowUpdate::Second(const RowSparseNDArray& weight, const GpuWork& gpu) {
  internal::RowSparseState& state = internal::StateOf(weight);
  if (!counted_.empty()) {
    gradient_.count = static_cast<std::size_t>(*counted_.data<const std::int64_t>());
    gradient_.present = nullptr;
  }
  gpu.Keep(insertion_.Insert(state, gpu.stream()));
  if (gradient_.count == 0 || Elements(weight) == 0) return;
  ops::GpuIds places = gradient_.list();
  if (state.rows.count() < state.shape[0]) {  // else a row's place is its id
    auto* const found =
        static_cast<std::int64_t*>(gpu.Temporary(gradient_.count * sizeof(std::int64_t)));
    KernelsOf(gpu).FindRows(state.rows.gpu_view().list(), gradient_.list(), found, gpu.stream());
    places.ids = found;
  }
  update_.run.weight = state.rows.rows();
  RunLazyPass(update_, WholeRun(update_, Elements(weight)), gradient_, places, state.shape[0],
              scratch_, gpu);
}

namespace {

void CastRows(DType from, const void* source, DType to, void* out, std::int64_t elements,
              const GpuWork& gpu) {
  if (elements == 0) return;
  const ops::CastTask task = {source, out, static_cast<std::size_t>(elements)};
  Gpus::Of(gpu.engine()).kernels().Cast(from, to, {&task, 1}, gpu.stream());
}

}  // namespace

void CopyRows(const RowSparseNDArray& from, const RowSparseNDArray& to, const GpuWork& gpu) {
  if (to.IsSameAs(from)) return;
  const internal::RowSparseState& like = internal::StateOf(from);
  const RowStorage& source = internal::ToRead(from).rows;
  RowStorage& out = internal::ToWrite(to).rows;
  gpu.Keep(out.Renew(source.count()));
  out.set_count(0);  // should the copies fail
  const auto copy = [&](void* target, const void* rows, std::int64_t bytes) {
    if (bytes > 0) Gpus::Of(gpu.engine()).driver().Copy(gpu.stream().handle, target, rows, bytes);
  };
  copy(out.ids(), source.ids(), source.count() * kIdBytes);
  if (to.dtype() == like.dtype) {
    copy(out.rows(), source.rows(), source.count() * source.row_bytes());
  } else {
    CastRows(like.dtype, source.rows(), to.dtype(), out.rows(), source.count() * like.row_size,
             gpu);
  }
  out.set_count(source.count());
}

void RowsToDense(const RowSparseNDArray& from, const NDArray& to, const GpuWork& gpu) {
  const internal::RowSparseState& state = internal::ToRead(from);
  GpuRows rows = state.rows.gpu_view();
  if (to.dtype() != state.dtype && rows.count > 0) {
    const std::int64_t elements = state.rows.count() * state.row_size;
    void* const cast = gpu.Temporary(static_cast<std::size_t>(elements) * SizeOf(to.dtype()));
    CastRows(state.dtype, rows.rows, to.dtype(), cast, elements, gpu);
    rows.rows = cast;
  }
  Scatter(rows, to, gpu);
}

void GatherRows(const RowSparseNDArray& from, const NDArray& row_ids, std::int64_t count,
                std::span<const RowSparseNDArray> out, const GpuWork& gpu) {
  const internal::RowSparseState& source = internal::ToRead(from);
  const GpuRows value = source.rows.gpu_view();
  if (value.count == 0) count = 0;
  const auto rows_bytes = static_cast<std::size_t>(source.rows.row_bytes());
  // What `from` becomes, where it is an output itself: built beside the rows that are read.
  RowStorage beside = source.rows.Another(0);
  bool is_output = false;
  for (const RowSparseNDArray& array : out) {
    const bool same = array.IsSameAs(from);
    if (same && std::exchange(is_output, true)) continue;  // twice in the list
    RowStorage& rows = same ? beside : internal::ToWrite(array).rows;
    gpu.Keep(rows.Renew(count));
    rows.set_count(0);  // should what follows fail
    if (count > 0) {
      Gpus::Of(gpu.engine())
          .driver()
          .Copy(gpu.stream().handle, rows.ids(), row_ids.const_data(), count * kIdBytes);
      const bool casts = array.dtype() != source.dtype;
      const auto wanted = static_cast<std::size_t>(count);
      void* const gathered = casts ? gpu.Temporary(wanted * rows_bytes) : rows.rows();
      KernelsOf(gpu).GatherRows(value, {rows.ids(), wanted}, rows_bytes, gathered, gpu.stream());
      if (casts) {
        CastRows(source.dtype, gathered, array.dtype(), rows.rows(), count * source.row_size, gpu);
      }
    }
    rows.set_count(count);
  }
  if (!is_output) return;
  std::swap(internal::ToWrite(from).rows, beside);
  gpu.Keep(std::move(beside));
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

void NoRowsInto(const RowsInTheMaking& out) { MakeRoom(out, 0); }

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
