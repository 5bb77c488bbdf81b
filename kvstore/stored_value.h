// One key's value in a store of this process, and the ops on it.
#pragma once

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/gpu_sums.h"
#include "kvstore/gpu_work.h"
#include "kvstore/optimizer_states.h"
#include "kvstore/update_state.h"
#include "kvstore/updater_mutex.h"
#include "ops/store_mode.h"

namespace heddle::kvstore {

// Shared by the store's table and the pending ops, so keys may be removed, and stores dropped, at
// any time. All ops on a value name the Var of its array; that gives the order of section "Order"
// in heddle/kvstore.h, and guards the fields marked (V).
//
// Errors. Ops that write the value run also when it or an input is poisoned, to tell these cases
// apart:
//   (E1) The value is poisoned (an update failed midway): the op passes that error on, so the value
//        stays poisoned, until Reset, whose op overwrites without a look.
//   (E2) An input is poisoned: the op leaves value and optimizer state alone, keeps the error in
//        input_error_, and succeeds. Pulls throw input_error_, which poisons their outputs.
//   (E3) The next update that succeeds clears input_error_.
//
// Kinds. A value is dense or row-sparse for as long as it lives. When a push by the default updater
// changes the kind of a key, the store puts another StoredValue in its place, whose first op is
// that push (WillReplace). Whoever finds the new value first queues that op.
//
// Optimizer state and residuals are the value's own, found, made and forgotten by the ops alone, so
// what happens to them has the order of what happens to the value.
//
// GPUs. The ops on a value on a GPU are ops of that GPU. Their bodies run in the order of their
// issue, so (V) guards the same fields, as if what was issued before had happened; only what the
// device may still use must not be dropped (GpuWork::Keep). What fails after its issue, an input or
// the op itself, poisons the value as in E1, and fails all that were issued behind it but Reset:
// they name the value in `reads`, too. A lazy update of a row-sparse value is the exception: an
// asynchronous op of the CPUs, between whose two steps nothing touches the value
// (kvstore/gpu_rows.h says why). Gradients are compressed where they lie, by ops that read the
// value, and reach it as codes.
class StoredValue {
 public:
  // Without a value until the first op that assigns one. `like` is an NDArray or RowSparseNDArray.
  // `sums`: how arrays of several GPUs are added up.
  StoredValue(Key key, const NDArray& like, Device device, Engine& engine, GpuSums sums);
  StoredValue(Key key, const RowSparseNDArray& like, Device device, Engine& engine, GpuSums sums);

  // The same value on another device, in place of this one; a row-sparse one moves from a CPU to a
  // GPU. No op may have written this one.
  std::shared_ptr<StoredValue> MovedTo(Device device) const;

  const Key& key() const { return key_; }
  bool is_row_sparse() const { return !rows_.empty(); }
  const Shape& shape() const { return is_row_sparse() ? rows_.shape() : array_.shape(); }
  DType dtype() const { return is_row_sparse() ? rows_.dtype() : array_.dtype(); }
  Device device() const { return is_row_sparse() ? rows_.device() : array_.device(); }

  // Of a row-sparse value those of the rows that are there, while no op writes it.
  std::int64_t bytes() const;

  // Each call queues its ops and returns. `self` is the value itself, for the ops to hold.
  // The arrays have been checked: not empty, right shape and engine, and for pushes the dtype.
  // Array: NDArray or RowSparseNDArray.

  // Before the store knows of the value: takes a copy of `value`, of its kind, whose error the wait
  // throws.
  void QueueInitialize(const NDArray& value) { value.CopyTo(array_); }
  void QueueInitialize(const RowSparseNDArray& value) { value.CopyTo(rows_); }
  void WaitUntilInitialized();
  // Without a rule the values are of the value's kind; with one they may be row-sparse in any case.
  // `compressor`: null, or through what the values, dense ones, reach the store.
  template <class Array>
  static void QueuePush(const std::shared_ptr<StoredValue>& self, std::span<const Array> values,
                        std::shared_ptr<const Compressor> compressor, Update update, int priority);
  // Before the store knows of the value: it takes the place of `old`, a value of the other kind on
  // the same device, by a push of `pushed`, arrays of its own kind. If an input is poisoned it
  // becomes what `old` is, converted.
  void WillReplace(std::shared_ptr<StoredValue> old, const KeyArrays& pushed,
                   std::shared_ptr<const Compressor> compressor, int priority)
      EXCLUDES(together_mutex_);
  // Queues that push, unless a call of another thread was here first and has.
  static void QueueReplace(const std::shared_ptr<StoredValue>& self);
  template <class Array>
  static void QueuePull(const std::shared_ptr<StoredValue>& self, std::span<const Array> out,
                        int priority);
  // A pull comes, after the store has pulled so many bytes in all. If more than the caches hold
  // since the last pull of this value, its outputs had left them by then and will have before the
  // next one, so they need not go through them. Threads: any.
  void NotePull(std::int64_t pulled_bytes) {
    // relaxed: of two threads that pull at once either is right, and the bits are the same
    const std::int64_t before = pulled_before_.load(std::memory_order_relaxed);
    const bool long_ago =
        before >= 0 && pulled_bytes - before >= static_cast<std::int64_t>(ops::kStreamingBytesMin);
    pulled_before_.store(pulled_bytes, std::memory_order_relaxed);
    pulls_stream_.store(long_ago, std::memory_order_relaxed);
  }
  // For values on GPUs: the same as QueuePush, without a compressor, or QueuePull for each, in few
  // ops and launches (gpu_batches.h), which take what `keys` hold. No value twice, outputs are
  // whole arrays, none twice.
  struct KeyGradients {
    std::shared_ptr<StoredValue> value;
    std::span<const NDArray> gradients;
    Update update;
  };
  struct KeyOutputs {
    std::shared_ptr<StoredValue> value;
    std::span<const NDArray> out;
  };
  static void QueuePushes(std::span<KeyGradients> keys, int priority);
  static void QueuePulls(std::span<KeyOutputs> keys, int priority);
  // Of a row-sparse value.
  static void QueueRowPull(const std::shared_ptr<StoredValue>& self,
                           std::span<const RowSparseNDArray> out, const NDArray& row_ids,
                           int priority);
  // `value` is of the value's kind. Forgets the residuals, and the states of all origins up to
  // `origin_number`.
  template <class Array>
  static void QueueReset(const std::shared_ptr<StoredValue>& self, const Array& value,
                         std::uint64_t origin_number);
  // Sets `out` to the states of that origin as they are after all earlier ops, with arrays that
  // nothing writes any more. Done when the value's Var is.
  static void QueueSnapshot(const std::shared_ptr<StoredValue>& self,
                            std::shared_ptr<const StatesOrigin> origin,
                            std::shared_ptr<KeyStates> out);
  void Wait() const { engine().WaitForVar(var()); }
  // This thread is in RunUpdater.
  bool IsInUpdater() const {
    // relaxed: only a store of this very thread can make them equal
    return updater_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  // Sums, calls the updater for the kinds of the inputs and of the value on this thread, which is
  // not in it already, and returns when it has; throws what it throws.
  template <class Array>
  static void RunUpdater(const std::shared_ptr<StoredValue>& self, std::span<const Array> values,
                         std::shared_ptr<const Compressor> compressor, const Updaters& updaters,
                         int priority) EXCLUDES(self->updater_mutex_);

 private:
  // What one sender keeps: the part of its gradients that its codes have not carried yet. A sender
  // is a device, or one of several arrays that a push names on a device, in their order.
  struct Residual {
    Device device;
    int place;  // among the arrays of the device in a push
    NDArray array;
  };

  template <class Inputs>
  struct PushOp;
  // What WillReplace was told.
  struct Replacement {
    std::shared_ptr<StoredValue> old;
    std::vector<NDArray> arrays;  // one of the two is empty
    std::vector<RowSparseNDArray> row_sparse;
    std::shared_ptr<const Compressor> compressor;
    int priority;
  };

  template <class Inputs>
  struct ReplaceOp;
  template <class Outputs>
  struct PullOp;
  struct PushesOp;
  struct PullsOp;
  struct RowsOp;
  struct RowPullOp;
  struct SortIdsOp;
  struct RowPullOnGpuOp;
  struct RowUpdate;
  template <class Array>
  struct ResetOp;
  struct CompressOp;
  struct SnapshotOp;
  template <class Array>
  struct MergeOp;
  struct SettleOp;

  // RunUpdater without what waits.
  template <class Array>
  static void CallUpdater(const std::shared_ptr<StoredValue>& self, std::span<const Array> values,
                          std::shared_ptr<const Compressor> compressor, const Updaters& updaters,
                          int priority) EXCLUDES(self->updater_mutex_);

  const Var& var() const { return is_row_sparse() ? rows_.var() : array_.var(); }
  Engine& engine() const { return is_row_sparse() ? rows_.engine() : array_.engine(); }

  template <class Array>
  VarList ReadsOf(std::span<const Array> inputs) const;
  void RethrowIfPoisoned() const;      // E1
  void RethrowUnlessReadable() const;  // E2, and a value that is not there yet
  const NDArray& Current() const { return source_.empty() ? array_ : source_; }
  template <class Use>
  void UseCurrent(const Use& use) const;
  void FetchSource();
  // Comes before anything else is queued: queues the copy of far_source_ or far_rows_, or the push
  // of replacement_, whichever there is.
  static void QueueFirst(const std::shared_ptr<StoredValue>& self) EXCLUDES(self->together_mutex_);
  // The same unless it is a copy, of what nothing writes any more: true. Another thread's push may
  // wait for anything.
  static bool QueueFirstButCopies(const std::shared_ptr<StoredValue>& self)
      EXCLUDES(self->together_mutex_);
  template <class Array>
  static void QueueReplacement(const std::shared_ptr<StoredValue>& self,
                               const Replacement& replacement, std::span<const Array> values)
      REQUIRES(self->together_mutex_);
  // Whether gradients reach the value as codes, made by ops on the devices that send them.
  bool IsSentCodes(const Compressor* compressor) const {
    return compressor != nullptr && device().type == DeviceType::kGpu;
  }
  // Of values as they are pushed; null if they reach this one as codes.
  GpuSumPlanner* PlannerFor(const Compressor* compressor) {
    return IsSentCodes(compressor) ? nullptr : &planner_;
  }
  // Queues these ops. Returns the codes, in the order of `values`, for the op on the value that
  // comes next. `needs_value`: that op does nothing if the value is not there yet.
  static std::vector<NDArray> QueueCodes(const std::shared_ptr<StoredValue>& self,
                                         std::span<const NDArray> values,
                                         const std::shared_ptr<const Compressor>& compressor,
                                         bool needs_value, int priority)
      REQUIRES(self->together_mutex_);
  // One op for the keys at these places, values on one GPU.
  static void QueuePushOp(std::span<KeyGradients> keys, std::span<const std::size_t> places,
                          int priority);
  static void QueuePullOp(std::span<KeyOutputs> keys, std::span<const std::size_t> places,
                          int priority);
  // The rows that are not zero of a dense value on a GPU. `readable`: with the error of what
  // cannot be pulled; else what is not there has none.
  static RowSparseNDArray QueueNonZeroRows(const std::shared_ptr<StoredValue>& self, bool readable,
                                           int priority);
  std::vector<std::int64_t> SortedRowIds(const NDArray& row_ids) const;
  // Of a value on a GPU.
  static void QueueRowPullOnGpu(const std::shared_ptr<StoredValue>& self,
                                std::span<const RowSparseNDArray> out, const NDArray& row_ids,
                                int priority);
  // A lazy update of a row-sparse value on a GPU, by gradients that are near.
  static void QueueRowUpdate(const std::shared_ptr<StoredValue>& self,
                             std::span<const RowSparseNDArray> gradients, Update update,
                             int priority);
  // QueuePush of what reaches the value.
  template <class Array>
  static void QueueSum(const std::shared_ptr<StoredValue>& self, std::span<const Array> values,
                       std::shared_ptr<const Compressor> compressor, Update update, int priority);
  // An array of the value's shape that ops on the value may touch.
  NDArray NewGuardedArray(DType dtype) const;
  // `gpu`, here and below: where the work of a GPU op is issued; null in ops of CPUs.
  std::vector<NDArray> ResidualsOf(std::span<const NDArray> senders, const GpuWork* gpu)
      EXCLUDES(residuals_mutex_);
  std::vector<Residual> TakeResiduals() EXCLUDES(residuals_mutex_);
  // out = the sum of the inputs as they reach the store: of a value on a GPU with a compressor,
  // their codes.
  void SumReceived(std::span<const NDArray> inputs, const Compressor* compressor,
                   const NDArray& out, const GpuWork* gpu);
  void SumReceived(std::span<const RowSparseNDArray> inputs, const Compressor* compressor,
                   const RowSparseNDArray& out, const GpuWork* gpu);
  void Assign(std::span<const NDArray> inputs, const Compressor* compressor, const GpuWork* gpu);
  void Assign(std::span<const RowSparseNDArray> inputs, const Compressor* compressor,
              const GpuWork* gpu);
  // `rows`: of a dense value on a GPU, those that are not zero; else empty.
  void Convert(const StoredValue& other, const RowSparseNDArray& rows, const GpuWork* gpu);
  void CopyTo(std::span<const NDArray> out, const GpuWork* gpu) const;
  void CopyTo(std::span<const RowSparseNDArray> out, const GpuWork* gpu) const;
  void ApplyUpdate(std::span<const NDArray> inputs, const Compressor* compressor,
                   const Update& update, const GpuWork* gpu);
  void ApplyUpdate(std::span<const RowSparseNDArray> inputs, const Compressor* compressor,
                   const Update& update, const GpuWork* gpu);
  // The state to go on with. `outdated` is made, and that is it, for a push that was overtaken by
  // one of a later origin.
  UpdateState& StateOf(StatesOrigin& origin, std::unique_ptr<UpdateState>* outdated,
                       const GpuWork* gpu);
  NDArray& Merged(const NDArray& /*like*/) REQUIRES(updater_mutex_) { return merged_; }
  RowSparseNDArray& Merged(const RowSparseNDArray& /*like*/) REQUIRES(updater_mutex_) {
    return merged_rows_;
  }
  void Call(const Updaters& updaters, const NDArray& input) const;
  void Call(const Updaters& updaters, const RowSparseNDArray& input) const;

  const Key key_;
  GpuSumPlanner planner_;
  // One of the two is empty.
  const NDArray array_;
  const RowSparseNDArray rows_;
  std::atomic<bool> has_first_{false};  // hint: QueueFirst has something to queue
  // See NotePull.
  std::atomic<bool> pulls_stream_{false};
  std::atomic<std::int64_t> pulled_before_{-1};  // -1: never

  // (V) Not empty: what array_ has to become first, an array that nothing writes any more.
  NDArray source_;
  NDArray decompressed_;            // (V) the sum of compressed gradients; empty until needed
  std::exception_ptr input_error_;  // (V)
  bool has_value_ = false;          // (V) false: created by a push that has not succeeded yet
  std::unique_ptr<UpdateState> update_state_;  // (V) null: none so far
  std::uint64_t origin_number_ = 0;            // (V) of update_state_

  // Of the senders seen so far. (V) guards the arrays, and the list but for this: ops of several
  // devices, which only read the value, add to it.
  Mutex residuals_mutex_;
  std::vector<Residual> residuals_ GUARDED_BY(residuals_mutex_);

  Mutex together_mutex_;  // held while ops are queued that nothing may come between
  // What array_, or rows_, has to become first, and ops on it cannot read; see near_arrays.h. One
  // is empty.
  NDArray far_source_ GUARDED_BY(together_mutex_);
  RowSparseNDArray far_rows_ GUARDED_BY(together_mutex_);
  std::unique_ptr<Replacement> replacement_ GUARDED_BY(together_mutex_);  // null: none, or queued

  UpdaterMutex updater_mutex_;  // held from the sum of a push to the end of its updater
  std::atomic<std::thread::id> updater_thread_;
  // What the updater gets; empty until a push of the kind.
  NDArray merged_ GUARDED_BY(updater_mutex_);
  RowSparseNDArray merged_rows_ GUARDED_BY(updater_mutex_);
};

}  // namespace heddle::kvstore
