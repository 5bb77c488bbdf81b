// "nccl": a store whose values lie on GPUs, and go between them by NCCL: of one process, or of all
// processes of a job.
//
// NCCL moves, another store keeps: the values of a push are summed by NCCL on the device of the
// stored value, and the sum is pushed to a store of type "device", which has all the rest: keys,
// updaters, optimizers, errors. A pull comes from there to one device, and by NCCL to the others.
//
// DESIGN, several processes. Each process has a store of its own for the values, and all of these
// are alike: they begin with the values of process 0, which Init gives to all, and from then on
// every update has the same input everywhere, the sum over the devices of all processes. So a pull
// is this process's own affair, and a push is the one call that NCCL is needed for.
//   (N1) Every process makes the same calls of Init, Push, Reset, SetOptimizer and Barrier in the
//        same order.
//   (N2) Of a key all processes know the same shape and dtype: Init and Reset have compared them,
//        and a push of others, or of an unknown key, is refused here. So what NCCL gets is alike on
//        all ranks, with no word about it in a push.
// All calls but Push compare what they are about (Agree), and so does the first Push, which sets
// NCCL up. A process that refuses its call takes part in that all the same, and all of them throw.
//   (N3) A process that leaves a call of (N1) midway, so that it has made less of it than the
//   others
//        or something else, makes no further one: its store fails, and tells the others.
// Of later pushes in another order nobody knows before the deadline, or a call that compares.
#pragma once

#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "kvstore/key_table.h"
#include "kvstore/nccl/device_group.h"
#include "kvstore/nccl/meeting.h"
#include "kvstore/nccl/nccl_api.h"

namespace heddle::kvstore {

// Lists of values fix the devices: those of the first push of a list, which sets up NCCL between
// them and waits for that. Values alone, and outputs on other devices, go without NCCL.
class NcclKVStore final : public KVStore {
 public:
  // `values` is a store of the same engine, for dense values on any device. Without a meeting this
  // process is alone.
  NcclKVStore(Engine& engine, std::shared_ptr<Nccl> nccl, std::unique_ptr<KVStore> values,
              const DeviceGroupOptions& options, std::shared_ptr<Meeting> meeting = nullptr);
  ~NcclKVStore() override;  // of several processes: waits for the pushes

  std::vector<Key> Keys() const override { return values_->Keys(); }
  void SetUpdaters(Updaters updaters) override;
  void SetOptimizer(std::shared_ptr<Optimizer> optimizer) override;
  void SaveOptimizerStates(const std::string& file, bool with_optimizer) override {
    values_->SaveOptimizerStates(file, with_optimizer);
  }
  void LoadOptimizerStates(const std::string& file) override { values_->LoadOptimizerStates(file); }
  bool IsCapable(std::string_view capability) const override;
  TransferStats transfers() const override;
  int rank() const override { return meeting_ != nullptr ? meeting_->rank() : 0; }
  int num_workers() const override { return meeting_ != nullptr ? meeting_->processes() : 1; }
  void Barrier() override;
  int NumDeadNodes() const override;

 protected:
  void DoInit(std::span<const KeyArrays> pairs) override EXCLUDES(mutex_);
  void DoPush(std::span<const KeyArrays> pairs, int priority) override EXCLUDES(mutex_);
  void DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) override
      EXCLUDES(mutex_);
  void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                  int priority) override EXCLUDES(mutex_);
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override EXCLUDES(mutex_);
  void DoReset(const KeyArrays& value) override EXCLUDES(mutex_);
  void DoRemove(KeyRef key) override EXCLUDES(mutex_);
  bool DoContains(KeyRef key) const override { return values_->Contains(key); }

 private:
  using GroupPtr = std::shared_ptr<DeviceGroup>;

  // The values of a key of a push, in the order in which they were named.
  struct Pushed {
    KeyRef key;
    std::vector<NDArray> values;
    std::vector<NDArray> sums{};  // the store's own, if NCCL has added the values up

    std::vector<int> devices() const;  // sorted
  };
  struct Slot {
    Device device;  // of the stored value, as far as NCCL goes
    Shape shape{};  // with several processes
    DType dtype{};
    // What sums may go to; of a device one, unless several threads push the key at a time.
    std::vector<NDArray> spare_sums{};
  };

  static std::vector<Pushed> JoinRepeatedKeys(std::span<const KeyArrays> pairs);
  void Push(std::string_view call, std::span<const KeyArrays> pairs, int priority) EXCLUDES(mutex_);
  void CheckList(std::string_view call, const Pushed& pushed,
                 const std::vector<int>& expected) const;
  void CheckKnown(std::string_view call, const Pushed& pushed) const EXCLUDES(mutex_);
  bool UsesNccl(const Pushed& pushed) const {
    return meeting_ != nullptr || pushed.values.size() > 1;
  }
  // The group, made by the first list of values.
  GroupPtr GroupOf(std::string_view call, std::span<const Pushed> pushes) EXCLUDES(mutex_);
  GroupPtr NewGroup(const std::vector<int>& devices, std::optional<GroupPlace> place) const;
  // Of several processes, all of which come to their first push.
  GroupPtr MeetForGroup(std::string_view call, std::span<const Pushed> pushes) EXCLUDES(mutex_);
  GroupPtr group() const EXCLUDES(mutex_);
  void QueueSums(const GroupPtr& group, std::span<Pushed> pushes, int priority) EXCLUDES(mutex_);
  void QueueUpdates(std::span<Pushed> pushes, int priority) EXCLUDES(mutex_);
  Collective Reduction(const DeviceGroup& group, const Pushed& pushed) EXCLUDES(mutex_);
  // The order of the group's devices; the root is where the key's value lies.
  Collective InOrder(const DeviceGroup& group, KeyRef key, std::span<const NDArray> arrays) const
      EXCLUDES(mutex_);
  NDArray TakeSum(KeyRef key, const NDArray& like) EXCLUDES(mutex_);

  // All processes make this call. `say` checks what can be checked here, and says what the call is
  // about, in a first word that has to be the same in all processes. Returns the words of all; if
  // one has thrown, all throw: its exception, or an InvalidArgument that names the process.
  std::vector<Words> Agree(std::string_view call, const std::function<Words()>& say)
      EXCLUDES(mutex_);
  // The same, and all that they say has to be the same.
  void AgreeOnAll(std::string_view call, const std::function<Words()>& say) EXCLUDES(mutex_);
  // Runs a part of a call that all processes make. What leaves it fails the store (N3).
  template <class Part>
  void Together(std::string_view call, const Part& part) EXCLUDES(mutex_) {
    try {
      part();
    } catch (...) {
      Fail(call, std::current_exception());
      throw;
    }
  }
  // The same of what each does by itself, to values that are alike: an InvalidArgument, by which
  // nothing has happened, comes in all of them.
  template <class Part>
  void Alike(std::string_view call, const Part& part) EXCLUDES(mutex_) {
    try {
      part();
    } catch (const InvalidArgument&) {
      throw;
    } catch (...) {
      Fail(call, std::current_exception());
      throw;
    }
  }
  void Fail(std::string_view call, const std::exception_ptr& error) EXCLUDES(mutex_);
  void ThrowIfFailed() const EXCLUDES(mutex_);
  // Puts values in, by Init or Reset, that `check` finds good.
  void PutIn(std::string_view call, std::span<const KeyArrays> pairs,
             const std::function<void()>& check, const std::function<void(const ArrayLists&)>& put)
      EXCLUDES(mutex_);

  const std::shared_ptr<Nccl> nccl_;
  const DeviceGroupOptions options_;
  const std::unique_ptr<KVStore> values_;
  const std::shared_ptr<Meeting> meeting_;        // null: this process is alone
  const std::shared_ptr<const NcclOrder> order_;  // of all collectives of the engine
  std::atomic<std::int64_t> pushed_bytes_{0};
  std::atomic<std::int64_t> pulled_bytes_{0};

  Mutex set_up_mutex_;   // one set-up at a time; taken before the others
  Mutex meeting_mutex_;  // one call of the meeting at a time; taken before mutex_
  mutable Mutex mutex_;
  GroupPtr group_ GUARDED_BY(mutex_);
  bool settled_ GUARDED_BY(mutex_) = false;        // a push by it has been taken
  std::exception_ptr failure_ GUARDED_BY(mutex_);  // that of the store, see Fail
  KeyTable<Slot> slots_ GUARDED_BY(mutex_);
};

}  // namespace heddle::kvstore
