// "nccl": a store of one process whose values lie on GPUs, and go between them by NCCL.
//
// NCCL moves, another store keeps: the values of a push are summed by NCCL on the device of the
// stored value, and the sum is pushed to a store of type "device", which has all the rest: keys,
// updaters, optimizers, errors. A pull comes from there to one device, and by NCCL to the others.
#pragma once

#include <heddle/kvstore.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "kvstore/key_table.h"
#include "kvstore/nccl/device_group.h"
#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {

// Lists of values fix the devices: those of the first push of a list, which sets up NCCL between
// them and waits for that. Values alone, and outputs on other devices, go without NCCL.
class NcclKVStore final : public KVStore {
 public:
  // `values` is a store of the same engine, for dense values on any device.
  NcclKVStore(Engine& engine, std::shared_ptr<Nccl> nccl, std::unique_ptr<KVStore> values,
              const DeviceGroupOptions& options)
      : KVStore(engine), nccl_(std::move(nccl)), options_(options), values_(std::move(values)) {}

  std::vector<Key> Keys() const override { return values_->Keys(); }
  void SetUpdaters(Updaters updaters) override { values_->SetUpdaters(std::move(updaters)); }
  void SetOptimizer(std::shared_ptr<Optimizer> optimizer) override {
    values_->SetOptimizer(std::move(optimizer));
  }
  void SaveOptimizerStates(const std::string& file, bool with_optimizer) override {
    values_->SaveOptimizerStates(file, with_optimizer);
  }
  void LoadOptimizerStates(const std::string& file) override { values_->LoadOptimizerStates(file); }
  bool IsCapable(std::string_view capability) const override;
  TransferStats transfers() const override;

 protected:
  void DoInit(std::span<const KeyArrays> pairs) override EXCLUDES(mutex_);
  void DoPush(std::span<const KeyArrays> pairs, int priority) override EXCLUDES(mutex_);
  void DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) override
      EXCLUDES(mutex_);
  void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                  int priority) override EXCLUDES(mutex_);
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override EXCLUDES(mutex_);
  void DoReset(const KeyArrays& value) override;
  void DoRemove(KeyRef key) override EXCLUDES(mutex_);
  bool DoContains(KeyRef key) const override { return values_->Contains(key); }

 private:
  using GroupPtr = std::shared_ptr<DeviceGroup>;

  // The values of a key of a push, in the order in which they were named.
  struct Pushed {
    KeyRef key;
    std::vector<NDArray> values;
    bool summed = false;  // then their sum, an array of the store's own, stands for them

    std::vector<int> devices() const;  // sorted
  };
  struct Slot {
    Device device;  // of the stored value, as far as NCCL goes
    // What sums may go to; one, unless several threads push the key at a time.
    std::vector<NDArray> spare_sums;
  };

  static std::vector<Pushed> JoinRepeatedKeys(std::span<const KeyArrays> pairs);
  void Push(std::string_view call, std::span<const KeyArrays> pairs, int priority) EXCLUDES(mutex_);
  void CheckList(std::string_view call, const Pushed& pushed,
                 const std::vector<int>& expected) const;
  // The group, made by the first list of values.
  GroupPtr GroupOf(std::string_view call, std::span<const Pushed> pushes) EXCLUDES(mutex_);
  GroupPtr group() const EXCLUDES(mutex_);
  Collective Reduction(const DeviceGroup& group, const Pushed& pushed) EXCLUDES(mutex_);
  // The order of the group's devices; the root is where the key's value lies.
  Collective InOrder(const DeviceGroup& group, KeyRef key, std::span<const NDArray> arrays) const
      EXCLUDES(mutex_);

  const std::shared_ptr<Nccl> nccl_;
  const DeviceGroupOptions options_;
  const std::unique_ptr<KVStore> values_;
  std::atomic<std::int64_t> pushed_bytes_{0};
  std::atomic<std::int64_t> pulled_bytes_{0};

  Mutex set_up_mutex_;  // one set-up at a time; taken before mutex_
  mutable Mutex mutex_;
  GroupPtr group_ GUARDED_BY(mutex_);
  KeyTable<Slot> slots_ GUARDED_BY(mutex_);
};

}  // namespace heddle::kvstore
