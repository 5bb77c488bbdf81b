// The stores of one process: "local" and "device".
//
// Both keep a StoredValue a key and order everything by the Var of its array. They differ in the
// device that holds, merges and updates a value: cpu(0) for "local", for "device" one of the
// devices that push it, chosen by MergePlacement at the first push; a GPU that pushes alone takes
// its values from the CPUs. A row-sparse value, of which a push touches a small part, stays on the
// device where it was made, except that it goes from a CPU to the GPUs that push it first.
#pragma once

#include <heddle/kvstore.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "kvstore/checks.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/gpu_sums.h"
#include "kvstore/gpu_work.h"
#include "kvstore/key_table.h"
#include "kvstore/merge_placement.h"
#include "kvstore/near_arrays.h"
#include "kvstore/optimizer_states.h"
#include "kvstore/registry.h"
#include "kvstore/stored_value.h"

namespace heddle::kvstore {

enum class MergeOn { kCpu, kPushingDevices };

class LocalKVStore final : public KVStore {
 public:
  LocalKVStore(Engine& engine, const KVStoreOptions& options, MergeOn merge_on)
      : KVStore(engine),
        strict_init_(options.strict_init),
        merge_on_(merge_on),
        gpu_sums_(merge_on == MergeOn::kCpu ? GpuSums::kDirect : GpuSumsOf(options)),
        gpu_updates_(GpuUpdatesOf(engine)) {}

  std::vector<Key> Keys() const override EXCLUDES(mutex_);
  std::vector<KeyForm> Forms() const EXCLUDES(mutex_);  // of all keys, in no order
  void SetUpdaters(Updaters updaters) override EXCLUDES(mutex_);
  void SetOptimizer(std::shared_ptr<Optimizer> optimizer) override EXCLUDES(mutex_);
  void SaveOptimizerStates(const std::string& file, bool with_optimizer) override EXCLUDES(mutex_);
  void LoadOptimizerStates(const std::string& file) override EXCLUDES(mutex_);
  bool IsCapable(std::string_view capability) const override {
    const std::string name = LowerCase(capability);
    return name == "optimizer" || name == "compression";
  }
  void SetGradientCompression(const CompressionOptions& options) override EXCLUDES(mutex_);
  TransferStats transfers() const override {
    return {pushed_bytes_.load(std::memory_order_relaxed),
            pulled_bytes_.load(std::memory_order_relaxed)};
  }

 protected:
  void DoInit(std::span<const KeyArrays> pairs) override EXCLUDES(mutex_);
  void DoPush(std::span<const KeyArrays> pairs, int priority) override EXCLUDES(mutex_);
  void DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) override
      EXCLUDES(mutex_);
  void DoRowSparsePull(std::span<const KeyRowPull> pulls, int priority) override EXCLUDES(mutex_);
  void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                  int priority) override EXCLUDES(mutex_);
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override EXCLUDES(mutex_);
  void DoReset(const KeyArrays& value) override EXCLUDES(mutex_);
  void DoRemove(KeyRef key) override EXCLUDES(mutex_);
  bool DoContains(KeyRef key) const override EXCLUDES(mutex_);

 private:
  using ValuePtr = std::shared_ptr<StoredValue>;
  using UpdatersPtr = std::shared_ptr<const Updaters>;

  struct Slot {
    ValuePtr value;
    std::uint64_t number = 0;                  // counts the keys made
    bool placed = true;                        // false: will get its device by the first push
    bool told_ignored = false;                 // that pulls leave row-sparse outputs alone
    std::shared_ptr<StatesOrigin> origin;      // of the optimizer's states; null: no push with one
    std::int64_t updates = 0;                  // pushed since then
    std::shared_ptr<const UpdateBasis> basis;  // of the last push with an optimizer
  };

  // One key of a push: what to sum, and where it goes.
  struct KeyPush : KeyArrays {
    explicit KeyPush(const KeyArrays& values) : KeyArrays(values) {}

    bool is_row_sparse() const { return !row_sparse.empty(); }
    PushedKind kind() const {
      return WithFirstArray(*this, [&](const auto& array) -> PushedKind {
        return {key, array.shape(), array.dtype(), is_row_sparse()};
      });
    }

    // Hold the arrays if the call names the key several times.
    std::vector<NDArray> joined;
    std::vector<RowSparseNDArray> joined_row_sparse;
    Slot* slot = nullptr;  // only while PreparePush holds the lock; null: a new key
    ValuePtr value;
    bool replaces = false;  // `value` has come in the place of one of the other kind
    std::shared_ptr<const Compressor> compressor;
    Update update;
  };

  // A key that gets its device, and its value there.
  struct Placement {
    Slot* slot;  // null: a key that `push` makes
    const KeyPush* push;
    Device device;
    ValuePtr value = nullptr;

    bool is_row_sparse() const { return slot != nullptr && slot->value->is_row_sparse(); }
    std::int64_t bytes() const {
      return slot != nullptr ? slot->value->bytes() : push->arrays[0].bytes();
    }
  };

  // A KeyPush a key, in the order of first naming. `index_of`, unless null, gets for each pair the
  // place of its key.
  static std::vector<KeyPush> JoinRepeatedKeys(std::string_view call,
                                               std::span<const KeyArrays> pairs,
                                               std::vector<std::size_t>* index_of);

  // Push in two steps: the first checks everything and changes nothing unless all is well.
  // The first returns the updaters to call, if any.
  UpdatersPtr PreparePush(std::string_view call, std::span<KeyPush> pushes, int priority)
      EXCLUDES(mutex_);
  void QueuePush(std::span<KeyPush> pushes, const UpdatersPtr& updaters, int priority)
      EXCLUDES(mutex_);
  // `values`: one for each pair, which fits it.
  void QueuePulls(std::span<const ValuePtr> values, std::span<const KeyArrays> pairs, int priority,
                  bool ignore_sparse);
  // Whether what is pushed, the stored value and the updaters fit each other.
  void CheckKindsLocked(std::string_view call, const KeyPush& push) const REQUIRES(mutex_);
  // Whether an update can be carried out should the value lie on a GPU, where it lies or may come
  // to by this call. `gpu_pushes`: an array of the call lies on one.
  void CheckUpdateOnGpuLocked(std::string_view call, const KeyPush& push, bool gpu_pushes,
                              const internal::UpdatePlan& plan) const REQUIRES(mutex_);
  std::shared_ptr<Optimizer> OptimizerFor(std::string_view call) const EXCLUDES(mutex_);
  void CheckStatesLocked(const std::string& file, const OptimizerStates& states) const
      REQUIRES(mutex_);
  std::uint64_t OriginNumberLocked() const REQUIRES(mutex_) {
    return origin_ != nullptr ? origin_->number : 0;
  }
  bool HasStatesLocked(const Slot& slot) const REQUIRES(mutex_) {
    return slot.origin != nullptr && slot.origin->number == OriginNumberLocked();
  }
  std::shared_ptr<const UpdateBasis> BasisLocked(
      const Slot& slot, const std::shared_ptr<const internal::UpdateRule>& rule) const
      REQUIRES(mutex_);

  void CheckNewLocked(std::string_view call, std::span<const KeyArrays> pairs) const
      REQUIRES(mutex_);
  const Slot* FindLocked(std::string_view call, KeyRef key) const REQUIRES(mutex_);
  Slot& InsertLocked(ValuePtr value) REQUIRES(mutex_);
  bool MayFollowRowsLocked(const KeyPush& push) const REQUIRES(mutex_);
  std::vector<Placement> PlanPlacementLocked(std::span<const KeyPush> pushes) REQUIRES(mutex_);
  ValuePtr Find(std::string_view call, KeyRef key) const EXCLUDES(mutex_);
  ValuePtr FindForPull(const KeyArrays& pair) const EXCLUDES(mutex_);      // checks the shapes
  ValuePtr FindForRowPull(const KeyRowPull& pull) const EXCLUDES(mutex_);  // checks all of it
  void TellIgnored(KeyRef key) EXCLUDES(mutex_);
  template <class Array>
  ValuePtr MakeValue(KeyRef key, const Array& like) const;
  void InitChecked(std::string_view call, std::span<const KeyArrays> pairs) EXCLUDES(mutex_);

  const bool strict_init_;
  const MergeOn merge_on_;
  const GpuSums gpu_sums_;
  const GpuUpdates& gpu_updates_;
  std::atomic<std::int64_t> pushed_bytes_{0};
  std::atomic<std::int64_t> pulled_bytes_{0};

  // Nothing waits, and no op is pushed, while it is held.
  mutable Mutex mutex_;
  KeyTable<Slot> slots_ GUARDED_BY(mutex_);
  std::optional<bool> string_keys_ GUARDED_BY(mutex_);  // set by the first key
  std::uint64_t keys_made_ GUARDED_BY(mutex_) = 0;
  UpdatersPtr updaters_ GUARDED_BY(mutex_);
  std::shared_ptr<Optimizer> optimizer_ GUARDED_BY(mutex_);
  std::shared_ptr<StatesOrigin> origin_ GUARDED_BY(mutex_);  // null: no optimizer was ever set
  std::shared_ptr<const Compressor> compressor_ GUARDED_BY(mutex_);
  bool pushed_ GUARDED_BY(mutex_) = false;
  std::int64_t num_update_ GUARDED_BY(mutex_) = 0;  // the most updates of any key with it
  std::size_t unplaced_ GUARDED_BY(mutex_) = 0;     // slots that are not placed
  MergePlacement placement_ GUARDED_BY(mutex_);
};

}  // namespace heddle::kvstore
