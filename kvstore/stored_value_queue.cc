// The ops on a value, and how they are queued.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/fail_write.h"
#include "engine/held_up.h"
#include "engine/room.h"
#include "kvstore/array_kernels.h"
#include "kvstore/gpu_batches.h"
#include "kvstore/gpu_rows.h"
#include "kvstore/gpu_sums.h"
#include "kvstore/gpu_work.h"
#include "kvstore/held_arrays.h"
#include "kvstore/near_arrays.h"
#include "kvstore/queue_op.h"
#include "kvstore/stored_value.h"
#include "storage/array_state.h"

namespace heddle::kvstore {

namespace {

// At the start of a body that drops its handles at its end: see PrefetchCounts.
void PrefetchHeld(std::span<const NDArray> arrays) { internal::PrefetchCounts(arrays); }
void PrefetchHeld(std::span<const RowSparseNDArray> /*arrays*/) {}

// Where the rows of several arrays of one GPU are to become rows of another array of it: *sum,
// queued. Dense ones are summed by the op that needs the sum.
std::span<const RowSparseNDArray> SumOnGpu(std::span<const RowSparseNDArray> arrays,
                                           RowSparseNDArray* sum, int priority) {
  if (arrays.size() == 1) return arrays;
  *sum = QueueSumOfRows(arrays, priority);
  return View(*sum);
}
std::span<const NDArray> SumOnGpu(std::span<const NDArray> arrays, RowSparseNDArray* /*sum*/,
                                  int /*priority*/) {
  return arrays;
}

}  // namespace

// Sum and update in one op. Inputs: an array or a std::vector of them.
template <class Inputs>
struct StoredValue::PushOp {
  std::shared_ptr<StoredValue> value;
  Inputs inputs;
  std::shared_ptr<const Compressor> compressor;
  Update update;

  void operator()(const GpuWork* gpu = nullptr) const {
    PrefetchHeld(View(inputs));
    StoredValue& v = *value;
    v.RethrowIfPoisoned();
    if (std::exception_ptr error = ErrorOfInputs(View(inputs))) {
      v.input_error_ = std::move(error);
      return;
    }
    if (update.basis == nullptr) {
      v.Assign(View(inputs), compressor.get(), gpu);
    } else {
      if (!v.has_value_) return;  // nothing to update: the push that made the key failed, see E2
      v.FetchSource();
      v.ApplyUpdate(View(inputs), compressor.get(), update, gpu);
    }
    if (v.input_error_ != nullptr) v.input_error_ = nullptr;  // pushers read the same cache line
  }
};

template <class Inputs>
struct StoredValue::ReplaceOp {
  std::shared_ptr<StoredValue> value;
  std::shared_ptr<StoredValue> old;
  RowSparseNDArray old_rows;  // see Convert
  Inputs inputs;
  std::shared_ptr<const Compressor> compressor;

  void operator()(const GpuWork* gpu = nullptr) const {
    StoredValue& v = *value;
    old->RethrowIfPoisoned();
    if (std::exception_ptr error = ErrorOfInputs(View(inputs))) {
      if (!old_rows.empty()) {
        if (std::exception_ptr lost = ErrorOfInputs(View(old_rows))) std::rethrow_exception(lost);
      }
      v.Convert(*old, old_rows, gpu);
      v.input_error_ = std::move(error);
      return;
    }
    v.Assign(View(inputs), compressor.get(), gpu);
  }
};

// Outputs: an array or a std::vector of them.
template <class Outputs>
struct StoredValue::PullOp {
  std::shared_ptr<StoredValue> value;
  Outputs out;

  void operator()(const GpuWork* gpu = nullptr) const {
    PrefetchHeld(View(out));
    value->RethrowUnlessReadable();
    value->CopyTo(View(out), gpu);
  }
};

// Of several values on one GPU; what a push or pull throws fails that key alone.
struct StoredValue::PushesOp {
  std::vector<PushOp<HeldArrays<NDArray>>> pushes;

  void operator()(const GpuWork* gpu) const {
    gpu->Expect(pushes.size());
    for (const auto& push : pushes) {
      try {
        push(gpu);
      } catch (...) {
        engine::FailWrite(push.value->var(), std::current_exception());
      }
    }
  }
};

struct StoredValue::PullsOp {
  std::vector<PullOp<HeldArrays<NDArray>>> pulls;

  void operator()(const GpuWork* gpu) const {
    gpu->Expect(pulls.size());
    for (const auto& pull : pulls) {
      try {
        pull.value->RethrowIfPoisoned();
        pull(gpu);
      } catch (...) {
        for (const NDArray& array : pull.out.view()) {
          engine::FailWrite(array.var(), std::current_exception());
        }
      }
    }
  }
};

template <class Array>
struct StoredValue::ResetOp {
  std::shared_ptr<StoredValue> value;
  Array input;
  std::uint64_t origin_number;

  void operator()(const GpuWork* gpu = nullptr) const {
    StoredValue& v = *value;
    if (std::exception_ptr error = ErrorOfInputs(View(input))) {
      v.RethrowIfPoisoned();
      v.input_error_ = std::move(error);
      return;
    }
    v.Assign(View(input), nullptr, gpu);
    v.input_error_ = nullptr;
    std::vector<Residual> residuals = v.TakeResiduals();
    if (gpu != nullptr) {
      gpu->Keep(std::move(residuals));
      gpu->Keep(std::move(v.update_state_));
    }
    v.update_state_ = nullptr;
    v.origin_number_ = std::max(v.origin_number_, origin_number);
  }
};

struct StoredValue::SnapshotOp {
  std::shared_ptr<StoredValue> value;
  std::shared_ptr<const StatesOrigin> origin;
  std::shared_ptr<KeyStates> out;

  // Writes nothing of the value, so what goes wrong (there is no memory for copies) must not poison
  // it.
  void operator()(const GpuWork* gpu = nullptr) const {
    const StoredValue& v = *value;
    try {
      if (v.origin_number_ < origin->number) {
        origin->ReadLoaded([&](const UpdateState& loaded) { loaded.SnapshotTo(out.get(), gpu); });
      } else if (v.origin_number_ == origin->number && v.update_state_ != nullptr) {
        v.update_state_->SnapshotTo(out.get(), gpu);
      }
    } catch (...) {
      out->error = std::current_exception();
    }
  }
};

// The sum for an updater. If it fails it poisons the value as well as the sum, so that nothing that
// the updater pushes changes the value, not even what overwrites it; SettleOp lifts that again.
template <class Array>
struct StoredValue::MergeOp {
  std::shared_ptr<StoredValue> value;
  HeldArrays<Array> inputs;
  std::shared_ptr<const Compressor> compressor;
  Array merged;

  void operator()(const GpuWork* gpu = nullptr) const {
    try {
      MakeSum(gpu);
    } catch (...) {
      engine::KeepFailure();
      throw;
    }
  }

 private:
  void MakeSum(const GpuWork* gpu) const {
    StoredValue& v = *value;
    v.RethrowIfPoisoned();
    if (std::exception_ptr error = ErrorOfInputs(View(inputs)))
      v.input_error_ = std::move(error);
    else if (v.has_value_)
      v.input_error_ = nullptr;
    if (v.input_error_ != nullptr) std::rethrow_exception(v.input_error_);
    v.FetchSource();
    v.SumReceived(View(inputs), compressor.get(), merged, gpu);
  }
};

// After what the updater has pushed: a failed input leaves the value as it was and unpoisoned, a
// failed update leaves it poisoned.
struct StoredValue::SettleOp {
  std::shared_ptr<StoredValue> value;

  void operator()(const GpuWork* /*gpu*/ = nullptr) const {
    const StoredValue& v = *value;
    std::exception_ptr error = v.engine().ErrorOf(v.var());
    if (error != nullptr && error != v.input_error_) std::rethrow_exception(std::move(error));
  }
};

// ---- How they are queued

void StoredValue::WaitUntilInitialized() {
  engine().WaitForVar(var());
  has_value_ = true;
}

void StoredValue::QueueFirst(const std::shared_ptr<StoredValue>& self) {
  // acquire; pairs with the release below: what this thread queues comes after what is queued here
  if (!self->has_first_.load(std::memory_order_acquire)) return;
  const MutexLock lock(self->together_mutex_);
  const NoWaitScope no_wait;  // so that no body runs here, which might come for the lock, too
  if (!self->far_source_.empty()) std::exchange(self->far_source_, NDArray()).CopyTo(self->array_);
  if (!self->far_rows_.empty()) {
    std::exchange(self->far_rows_, RowSparseNDArray()).CopyTo(self->rows_);
  }
  if (self->replacement_ != nullptr) {
    const Replacement& replacement = *self->replacement_;
    if (self->is_row_sparse()) {
      QueueReplacement<RowSparseNDArray>(self, replacement, replacement.row_sparse);
    } else {
      QueueReplacement<NDArray>(self, replacement, replacement.arrays);
    }
    self->replacement_ = nullptr;
  }
  self->has_first_.store(false, std::memory_order_release);
}

bool StoredValue::QueueFirstButCopies(const std::shared_ptr<StoredValue>& self) {
  if (!self->has_first_.load(std::memory_order_acquire)) return false;  // as in QueueFirst
  {
    const MutexLock lock(self->together_mutex_);
    if (self->replacement_ == nullptr) return self->has_first_.load(std::memory_order_relaxed);
  }
  QueueFirst(self);
  return false;
}

void StoredValue::QueueReplace(const std::shared_ptr<StoredValue>& self) {
  engine::AwaitRoom(self->var(), "kvstore.push");
  QueueFirst(self);
  engine::RunPending(self->var());
}

template <class Array>
void StoredValue::QueuePush(const std::shared_ptr<StoredValue>& self, std::span<const Array> values,
                            std::shared_ptr<const Compressor> compressor, Update update,
                            int priority) {
  QueueFirst(self);
  if constexpr (std::is_same_v<Array, NDArray>) {
    if (self->IsSentCodes(compressor.get())) {
      const NoWaitScope no_wait;  // as in QueueFirst
      const MutexLock lock(self->together_mutex_);
      const bool needs_value = update.basis != nullptr;
      const std::vector<NDArray> codes =
          QueueCodes(self, values, compressor, needs_value, priority);
      QueueSum<Array>(self, codes, std::move(compressor), std::move(update), priority);
      return;
    }
  }
  QueueSum(self, values, std::move(compressor), std::move(update), priority);
}

// Of an op that also writes the value. A value on a CPU is only among what the op writes, although
// the op may go on from it: the body looks at poison itself. To the body of a GPU op all before it
// has happened; what fails after that must fail the op.
template <class Array>
VarList StoredValue::ReadsOf(std::span<const Array> inputs) const {
  if (!IsOnGpu(device())) return VarListOf(inputs);
  std::vector<VarRef> reads = VarsOf(inputs);
  reads.emplace_back(var());
  return reads;
}

template <class Array>
void StoredValue::QueueSum(const std::shared_ptr<StoredValue>& self, std::span<const Array> values,
                           std::shared_ptr<const Compressor> compressor, Update update,
                           int priority) {
  const InputsOfSum<Array> inputs(values, self->device(), self->PlannerFor(compressor.get()),
                                  priority);
  values = inputs.view();
  RowSparseNDArray sum;
  if constexpr (std::is_same_v<Array, RowSparseNDArray>) {
    if (self->is_row_sparse() && IsOnGpu(self->device())) {
      if (update.basis != nullptr && update.basis->rule->lazy(/*row_sparse_weight=*/true)) {
        return QueueRowUpdate(self, values, std::move(update), priority);
      }
      if (update.basis == nullptr) values = SumOnGpu(values, &sum, priority);
    }
  }
  if (values.size() == 1) {
    Queue(self->engine(),
          {.name = "kvstore.push",
           .reads = self->ReadsOf(values),
           .writes = {self->var()},
           .device = self->device(),
           .priority = priority,
           .run_when_poisoned = true},
          PushOp<Array>{self, values[0], std::move(compressor), std::move(update)});
    return;
  }
  Queue(self->engine(),
        {.name = "kvstore.push",
         .reads = self->ReadsOf(values),
         .writes = {self->var()},
         .device = self->device(),
         .priority = priority,
         .run_when_poisoned = true},
        PushOp<HeldArrays<Array>>{self, HeldArrays<Array>(values), std::move(compressor),
                                  std::move(update)});
}

template <class Array>
void StoredValue::QueueReplacement(const std::shared_ptr<StoredValue>& self,
                                   const Replacement& replacement, std::span<const Array> values) {
  const std::shared_ptr<StoredValue>& old = replacement.old;
  const std::shared_ptr<const Compressor>& compressor = replacement.compressor;
  const int priority = replacement.priority;
  QueueFirst(old);
  std::vector<NDArray> codes;
  if constexpr (std::is_same_v<Array, NDArray>) {
    if (self->IsSentCodes(compressor.get())) {
      codes = QueueCodes(self, values, compressor, /*needs_value=*/false, priority);
      values = codes;
    }
  }
  const NearInputs near(values, self->device(), priority);
  values = near.view();
  RowSparseNDArray sum, old_rows;
  if (IsOnGpu(self->device())) {
    values = SumOnGpu(values, &sum, priority);
    if (self->is_row_sparse()) old_rows = QueueNonZeroRows(old, /*readable=*/false, priority);
  }
  std::vector<VarRef> reads = VarsOf(values);
  reads.push_back(old->var());
  if (!old_rows.empty()) reads.push_back(old_rows.var());
  Queue(self->engine(),
        {.name = "kvstore.push",
         .reads = reads,
         .writes = {self->var()},
         .device = self->device(),
         .priority = priority,
         .run_when_poisoned = true},
        ReplaceOp<HeldArrays<Array>>{self, old, std::move(old_rows), HeldArrays<Array>(values),
                                     compressor});
}

template <class Array>
void StoredValue::QueuePull(const std::shared_ptr<StoredValue>& self, std::span<const Array> out,
                            int priority) {
  QueueFirst(self);
  if constexpr (std::is_same_v<Array, RowSparseNDArray>) {
    if (IsOnGpu(self->device()) && !self->is_row_sparse()) {
      const RowSparseNDArray rows = QueueNonZeroRows(self, /*readable=*/true, priority);
      for (const RowSparseNDArray& array : out) rows.CopyTo(array, priority);
      return;
    }
  }
  if (NeedRelays(out, self->device())) {
    const RelayedOutputs<Array> outputs(out, self->device());
    QueuePull(self, outputs.near(), priority);
    outputs.Forward(priority);
    return;
  }
  Engine& engine = self->engine();
  const VarRef stored = self->var();
  if (out.size() == 1) {
    OpOptions options{.name = "kvstore.pull",
                      .reads = {stored},
                      .writes = {out[0].var()},
                      .device = out[0].device(),
                      .lane = Lane::kCopy,
                      .priority = priority};
    if (IsPartial(out[0])) options.reads = {stored, out[0].var()};
    Queue(engine, options, PullOp<Array>{self, out[0]});
    return;
  }
  // One op, which reads the value once: all get the same.
  Queue(engine,
        {.name = "kvstore.pull",
         .reads = {stored},
         .writes = VarListOf(out),
         .device = out[0].device(),
         .lane = Lane::kCopy,
         .priority = priority},
        PullOp<HeldArrays<Array>>{self, HeldArrays<Array>(out)});
}

void StoredValue::QueuePushes(std::span<KeyGradients> keys, int priority) {
  std::vector<engine::OpVars> vars;
  std::vector<bool> copies;
  vars.reserve(keys.size());
  for (const auto& [value, gradients, update] : keys) {
    copies.push_back(QueueFirstButCopies(value) || !AreNear(gradients, value->device()));
    vars.push_back({VarListOf(gradients), {value->var()}});
  }
  const std::vector<std::uint64_t> held_up_by = engine::HeldUpBy(vars);
  GpuBatches batches(
      [&](std::span<const std::size_t> places) { QueuePushOp(keys, places, priority); });
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto& [value, gradients, update] = keys[i];
    if (value->planner_.Plan(gradients, value->device()) != nullptr) {
      QueuePush(value, gradients, nullptr, update, priority);  // its sum has several steps
      continue;
    }
    batches.Add(value->device(), held_up_by[i], copies[i], i, value->bytes(), gradients.size());
  }
  batches.Flush();
}

void StoredValue::QueuePushOp(std::span<KeyGradients> keys, std::span<const std::size_t> places,
                              int priority) {
  Engine& engine = keys[places[0]].value->engine();
  const Device device = keys[places[0]].value->device();
  std::vector<VarRef> reads, writes;
  reads.reserve(2 * places.size());
  writes.reserve(places.size());
  PushesOp op;
  op.pushes.reserve(places.size());
  for (const std::size_t place : places) {
    auto& [value, gradients, update] = keys[place];
    QueueFirst(value);
    const NearInputs near(gradients, device, priority);
    for (const NDArray& array : near.view()) reads.emplace_back(array.var());
    reads.emplace_back(value->var());  // as ReadsOf
    writes.emplace_back(value->var());
    op.pushes.push_back(
        {std::move(value), HeldArrays<NDArray>(near.view()), nullptr, std::move(update)});
  }
  engine.PushGpu({.name = "kvstore.push",
                  .reads = reads,
                  .writes = writes,
                  .device = device,
                  .priority = priority,
                  .run_when_poisoned = true},
                 OnGpu<PushesOp>{std::move(op), engine, {}});
}

void StoredValue::QueuePulls(std::span<KeyOutputs> keys, int priority) {
  std::vector<engine::OpVars> vars;
  std::vector<bool> copies;  // to outputs they come behind the op
  vars.reserve(keys.size());
  for (const auto& [value, out] : keys) {
    copies.push_back(QueueFirstButCopies(value));
    vars.push_back({{value->var()}, VarListOf(out)});
  }
  const std::vector<std::uint64_t> held_up_by = engine::HeldUpBy(vars);
  GpuBatches batches(
      [&](std::span<const std::size_t> places) { QueuePullOp(keys, places, priority); });
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const StoredValue& value = *keys[i].value;
    const std::size_t arrays = keys[i].out.size();
    batches.Add(value.device(), held_up_by[i], copies[i], i,
                value.bytes() * static_cast<std::int64_t>(arrays), arrays);
  }
  batches.Flush();
}

void StoredValue::QueuePullOp(std::span<KeyOutputs> keys, std::span<const std::size_t> places,
                              int priority) {
  Engine& engine = keys[places[0]].value->engine();
  const Device device = keys[places[0]].value->device();
  std::vector<VarRef> reads, writes;
  reads.reserve(places.size());
  writes.reserve(places.size());
  PullsOp op;
  op.pulls.reserve(places.size());
  std::vector<RelayedOutputs<NDArray>> relayed;
  for (const std::size_t place : places) {
    auto& [value, out] = keys[place];
    QueueFirst(value);
    reads.emplace_back(value->var());
    std::span<const NDArray> near = out;
    if (NeedRelays(out, device)) near = relayed.emplace_back(out, device).near();
    for (const NDArray& array : near) writes.emplace_back(array.var());
    op.pulls.push_back({std::move(value), HeldArrays<NDArray>(near)});
  }
  engine.PushGpu({.name = "kvstore.pull",
                  .reads = reads,
                  .writes = writes,
                  .device = device,
                  .lane = Lane::kCopy,
                  .priority = priority,
                  .run_when_poisoned = true},
                 OnGpu<PullsOp>{std::move(op), engine, {}});
  for (const RelayedOutputs<NDArray>& outputs : relayed) outputs.Forward(priority);
}

template <class Array>
void StoredValue::QueueReset(const std::shared_ptr<StoredValue>& self, const Array& value,
                             std::uint64_t origin_number) {
  QueueFirst(self);
  const NoWaitScope no_wait;  // as in QueueFirst
  const MutexLock lock(self->together_mutex_);
  const NearInputs near(View(value), self->device(), /*priority=*/0);
  const Array& input = near.view()[0];
  Queue(self->engine(),
        {.name = "kvstore.reset",
         .reads = {input.var()},
         .writes = {self->var()},
         .device = self->device(),
         .run_when_poisoned = true},
        ResetOp<Array>{self, input, origin_number});
}

void StoredValue::QueueSnapshot(const std::shared_ptr<StoredValue>& self,
                                std::shared_ptr<const StatesOrigin> origin,
                                std::shared_ptr<KeyStates> out) {
  QueueFirst(self);
  Queue(self->engine(),
        {.name = "kvstore.save_states",
         .reads = {self->var()},
         .writes = {self->var()},
         .device = self->device()},
        SnapshotOp{self, std::move(origin), std::move(out)});
}

void StoredValue::Call(const Updaters& updaters, const NDArray& input) const {
  updaters.dense(key_, input, array_);
}

void StoredValue::Call(const Updaters& updaters, const RowSparseNDArray& input) const {
  if (is_row_sparse()) {
    updaters.row_sparse(key_, input, rows_);
  } else {
    updaters.row_sparse_on_dense(key_, input, array_);
  }
}

template <class Array>
void StoredValue::RunUpdater(const std::shared_ptr<StoredValue>& self,
                             std::span<const Array> values,
                             std::shared_ptr<const Compressor> compressor, const Updaters& updaters,
                             int priority) {
  DCHECK(!self->IsInUpdater());
  QueueFirst(self);
  engine::AwaitRoom(self->var(), "kvstore.merge");
  CallUpdater(self, values, std::move(compressor), updaters, priority);
  engine::RunPending(self->var());
}

template <class Array>
void StoredValue::CallUpdater(const std::shared_ptr<StoredValue>& self,
                              std::span<const Array> values,
                              std::shared_ptr<const Compressor> compressor,
                              const Updaters& updaters, int priority) {
  StoredValue& v = *self;
  // No body runs in the pushes here: it might push the key as well, and come for the lock. Nor do
  // they wait for room that such bodies, which wait for the lock, are to make.
  const NoWaitScope no_wait;
  const UpdaterLock lock(v.updater_mutex_);
  v.updater_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  struct Leave {
    std::atomic<std::thread::id>& thread;
    ~Leave() { thread.store(std::thread::id(), std::memory_order_relaxed); }
  } leave{v.updater_thread_};

  Engine& engine = v.engine();
  const Device device = v.device();
  Array& merged = v.Merged(values[0]);
  if (merged.empty()) merged = Array(v.shape(), v.dtype(), device, engine);
  const auto queue_merge = [&](std::span<const Array> inputs) {
    const InputsOfSum<Array> near(inputs, device, v.PlannerFor(compressor.get()), priority);
    std::span<const Array> summands = near.view();
    RowSparseNDArray sum;
    if (IsOnGpu(device)) summands = SumOnGpu(summands, &sum, priority);
    Queue(engine,
          {.name = "kvstore.merge",
           .reads = v.ReadsOf(summands),
           .writes = {merged.var(), v.var()},
           .device = device,
           .priority = priority,
           .run_when_poisoned = true},
          MergeOp<Array>{self, HeldArrays<Array>(summands), compressor, merged});
  };
  if (v.IsSentCodes(compressor.get())) {
    if constexpr (std::is_same_v<Array, NDArray>) {
      const MutexLock together(self->together_mutex_);
      queue_merge(QueueCodes(self, values, compressor, /*needs_value=*/true, priority));
    }
  } else {
    queue_merge(values);
  }
  std::exception_ptr error;
  try {
    v.Call(updaters, merged);
  } catch (...) {
    error = std::current_exception();
  }
  Queue(engine,
        {.name = "kvstore.settle",
         .reads = v.ReadsOf(std::span<const Array>()),
         .writes = {v.var()},
         .device = device,
         .priority = priority,
         .run_when_poisoned = true},
        SettleOp{self});
  if (error != nullptr) std::rethrow_exception(std::move(error));
}

// Both kinds of arrays.
#define HEDDLE_INSTANTIATE(Array)                                                                  \
  template void StoredValue::QueuePush(const std::shared_ptr<StoredValue>&,                        \
                                       std::span<const Array>, std::shared_ptr<const Compressor>,  \
                                       Update, int);                                               \
  template void StoredValue::QueuePull(const std::shared_ptr<StoredValue>&,                        \
                                       std::span<const Array>, int);                               \
  template void StoredValue::QueueReset(const std::shared_ptr<StoredValue>&, const Array&,         \
                                        std::uint64_t);                                            \
  template void StoredValue::RunUpdater(const std::shared_ptr<StoredValue>&,                       \
                                        std::span<const Array>, std::shared_ptr<const Compressor>, \
                                        const Updaters&, int)
HEDDLE_INSTANTIATE(NDArray);
HEDDLE_INSTANTIATE(RowSparseNDArray);
#undef HEDDLE_INSTANTIATE

}  // namespace heddle::kvstore
