// One key's value in a store of this process, and the ops on it.
#pragma once

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <atomic>
#include <exception>
#include <memory>
#include <span>
#include <thread>

#include "base/mutex.h"
#include "kvstore/compression/compressed_sum.h"
#include "kvstore/update_state.h"

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
class StoredValue {
 public:
  // Without a value until the first op that assigns one.
  StoredValue(Key key, const NDArray& like, Device device, Engine& engine);

  // The same value on another device, in place of this one. No op may have written this one.
  std::shared_ptr<StoredValue> MovedTo(Device device) const;

  const Key& key() const { return key_; }
  const NDArray& array() const { return array_; }

  // Each call queues its ops and returns. `self` is the value itself, for the ops to hold.
  // The arrays have been checked: not empty, right shape and engine, and for pushes the dtype.

  // Before the store knows of the value: takes a copy of `value`, whose error the wait throws.
  void QueueInitialize(const NDArray& value);
  void WaitUntilInitialized();
  // `compression`: null, or how the values reach the store.
  static void QueuePush(const std::shared_ptr<StoredValue>& self, std::span<const NDArray> values,
                        std::shared_ptr<const Compression> compression, Update update,
                        int priority);
  static void QueuePull(const std::shared_ptr<StoredValue>& self, std::span<const NDArray> out,
                        int priority);
  static void QueueReset(const std::shared_ptr<StoredValue>& self, const NDArray& value);
  // Sums, calls `updater` on this thread, and returns when it has; throws what it throws.
  static void RunUpdater(const std::shared_ptr<StoredValue>& self, std::span<const NDArray> values,
                         std::shared_ptr<const Compression> compression, const Updater& updater,
                         int priority) EXCLUDES(self->updater_mutex_);

 private:
  template <class Inputs>
  struct PushOp;
  template <class Outputs>
  struct PullOp;
  struct ResetOp;
  struct MergeOp;
  struct SettleOp;

  // The error of the first poisoned input; null if there is none.
  std::exception_ptr ErrorOfInputs(std::span<const NDArray> inputs) const;
  void RethrowIfPoisoned() const;  // E1
  const NDArray& Current() const { return source_.empty() ? array_ : source_; }
  void FetchSource();
  void ApplyUpdate(std::span<const NDArray> inputs, const Update& update);

  const Key key_;
  const NDArray array_;

  // (V) Not empty: what array_ has to become first, an array that nothing writes any more.
  NDArray source_;
  NDArray decompressed_;            // (V) the sum of compressed gradients; empty until needed
  std::exception_ptr input_error_;  // (V)
  bool has_value_ = false;          // (V) false: created by a push that has not succeeded yet

  Mutex updater_mutex_;  // held from the sum of a push to the end of its updater
  std::atomic<std::thread::id> updater_thread_;
  NDArray merged_ GUARDED_BY(updater_mutex_);
};

}  // namespace heddle::kvstore
