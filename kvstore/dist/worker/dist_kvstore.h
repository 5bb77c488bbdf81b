// The stores "dist_sync", "dist_async", "dist_device_sync" and "dist_device_async" at a worker.
//
// Every call becomes ops: one that reads the pushed array until the servers have acknowledged it,
// or writes the pulled one when its parts have come; lists are summed by an op before. The ops are
// asynchronous and hold no thread. The order of a key's requests is that of the calls (DistKey).
// Arrays on GPUs are sent from copies in pinned memory and received into such, those of several
// parts one part after another (staged_parts.h), others whole (near_arrays.h); the types with
// "device" in their name sum lists on a GPU before.
#pragma once

#include <heddle/kvstore.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/container/small_vector.hpp>

#include "base/mutex.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/dist/protocol/outputs.h"
#include "kvstore/dist/worker/dist_key.h"
#include "kvstore/dist/worker/parts_call.h"
#include "kvstore/dist/worker/worker_link.h"
#include "kvstore/key_table.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/optimizer_states.h"
#include "kvstore/registry.h"

namespace heddle::kvstore::dist {

class DistKVStore final : public KVStore, private UnsentCalls {
 public:
  DistKVStore(Engine& engine, std::string type, std::shared_ptr<WorkerLink> link,
              std::uint32_t store, GpuSums gpu_sums);
  ~DistKVStore() override;

  std::vector<Key> Keys() const override;
  void SetUpdaters(Updaters updaters) override;
  void SetOptimizer(std::shared_ptr<Optimizer> optimizer) override EXCLUDES(mutex_);
  void SaveOptimizerStates(const std::string& file, bool with_optimizer) override EXCLUDES(mutex_);
  void LoadOptimizerStates(const std::string& file) override EXCLUDES(mutex_);
  void SetGradientCompression(const CompressionOptions& options) override EXCLUDES(mutex_);
  bool IsCapable(std::string_view capability) const override {
    const std::string name = LowerCase(capability);
    return name == "optimizer" || name == "compression";
  }
  TransferStats transfers() const override {
    return {pushed_bytes_.load(std::memory_order_relaxed),
            pulled_bytes_.load(std::memory_order_relaxed)};
  }
  int rank() const override { return link_->rank(); }
  int num_workers() const override { return link_->num_workers(); }
  void Barrier() override;
  void SendCommandToServers(int head, std::string_view body) override;
  void TraceServers(const std::string& file);  // see run.h
  int NumDeadNodes() const override { return link_->num_dead(); }

 protected:
  void DoInit(std::span<const KeyArrays> pairs) override;
  void DoPush(std::span<const KeyArrays> pairs, int priority) override;
  void DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) override;
  void DoRowSparsePull(std::span<const KeyRowPull> pulls, int priority) override;
  void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                  int priority) override;
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override;
  void DoReset(const KeyArrays& value) override;
  void DoRemove(KeyRef key) override EXCLUDES(mutex_);
  bool DoContains(KeyRef key) const override;

 private:
  // One key of a push that has been checked.
  struct KeyPush {
    KeyPtr key;
    boost::container::small_vector<NDArray, 1> arrays;  // one of the two is empty
    std::vector<RowSparseNDArray> row_sparse;
    CallOptions options;
    std::shared_ptr<const Compressor> compressor;
  };
  using KeyPushes = boost::container::small_vector<KeyPush, 1>;
  using KeyPtrs = boost::container::small_vector<KeyPtr, 4>;
  using Places = boost::container::small_vector<std::size_t, 4>;

  class Initialising;

  // Keys.
  KeyPtr FindKnown(std::string_view call, KeyRef key) const EXCLUDES(mutex_);
  KeyPtr Find(std::string_view call, KeyRef key) EXCLUDES(mutex_);
  KeyPtrs FindAll(std::string_view call, std::span<const KeyArrays> pairs) EXCLUDES(mutex_);
  // For each key its place among the different ones, which count from 0 as they are first named.
  Places PlacesOf(std::span<const KeyPtr> keys) EXCLUDES(mutex_);
  void CheckUnsent(Time now, Time warn_after, UnsentFound* found) override EXCLUDES(mutex_);
  std::vector<KeyPtr> KeysAlive() const EXCLUDES(mutex_);
  void Close() EXCLUDES(mutex_);

  // A key as the servers have it: of the life that it has after so many removals.
  struct Described {
    PartInfo info;
    std::uint64_t removals = 0;
  };
  std::optional<Described> Describe(std::string_view call, KeyRef key) const EXCLUDES(mutex_);
  bool AllPartsAreThere(std::string_view call, const Described& described) const;
  std::uint64_t RemovalsLocked(KeyRef key) const REQUIRES(mutex_);
  KeyPtr Made(const Described& described) const;
  // Those of the store that this worker has not used so far; it does not use them now either.
  std::vector<KeyPtr> UnusedKeys(std::string_view call) const EXCLUDES(mutex_);
  // Null if the key was removed once more meanwhile: what was described is over.
  KeyPtr Insert(const Described& described) EXCLUDES(mutex_);

  // Updates need norms of arrays whose parts are not updated together, as those of dense ones are
  // in rounds; or they work on whole rows, which parts of row-sparse arrays have.
  bool NeedsWholeKey(const internal::UpdatePlan& plan, bool row_sparse) const {
    if (row_sparse) return plan.NeedsNorms();
    return plan.rule->by_rows() || (async_ && plan.NeedsNorms());
  }
  CallOptions OptionsOf(Kind kind, const DistKey& key, int priority) const;
  KeyPushes PreparePush(std::string_view call, std::span<const KeyArrays> pairs, int priority,
                        Places* push_of) EXCLUDES(mutex_);
  void CheckPushLocked(std::string_view call, const KeyPush& push,
                       const internal::UpdatePlan* plan) const REQUIRES(mutex_);
  void SetOnServers(const std::string& what, Kind kind, const std::string& meta,
                    std::uint64_t version) EXCLUDES(mutex_);
  void TellParametersLocked(const internal::UpdatePlan& plan, Outputs* out) REQUIRES(mutex_);
  void CheckPull(std::string_view call, const KeyArrays& pair, const DistKey& key) const;
  void TellIgnored(DistKey& key) EXCLUDES(mutex_);

  void QueuePush(const KeyPush& push, int priority);
  void QueueStagedPush(const KeyPush& push, const NDArray& value, int priority);
  void QueueCompressedPush(const KeyPush& push, const NDArray& value, int priority);
  void QueuePull(const KeyPtr& key, std::span<const NDArray> out, int priority);
  void QueuePull(const KeyPtr& key, std::span<const RowSparseNDArray> out, int priority);
  void QueueStagedPull(const KeyPtr& key, std::span<const NDArray> out, int priority);
  void QueuePushPull(const KeyPush& push, const NDArray& out, int priority);
  void QueueStagedPushPull(const KeyPush& push, const NDArray& out, int priority);
  void QueueRowPull(const KeyPtr& key, std::span<const RowSparseNDArray> out, const NDArray& ids,
                    int priority);
  bool CanFuse(const KeyPushes& pushes, std::span<const KeyArrays> out) const;
  template <class Array>
  Var QueueValue(const KeyPtr& key, Kind kind, const Array& value,
                 std::shared_ptr<PartNumbers> missing = nullptr);
  Var QueueAwait(const KeyPtr& key, bool first_part);
  void AwaitValues(std::span<const KeyPtr> keys);
  void SendFirstValues(std::span<const KeyPtr> keys, std::span<const KeyArrays> pairs,
                       const Initialising& initialising);
  void InitChecked(std::string_view call, std::span<const KeyArrays> pairs) EXCLUDES(mutex_);
  // Rank 0 has begun to initialise it, and failed.
  bool IsUnfinished(KeyRef key) const EXCLUDES(mutex_);

  std::shared_ptr<Optimizer> OptimizerFor(std::string_view call) const EXCLUDES(mutex_);
  void WaitForOwnPushes(std::string_view call) EXCLUDES(mutex_);
  Request ControlRequest(std::string_view what, Kind kind, std::int32_t server) const;
  std::vector<Message> CallServers(std::string_view what, Kind kind, const std::string& meta) const;
  void CallServersInTurn(std::string_view what, Kind kind, const std::string& meta,
                         std::uint64_t version = 0) const;
  std::vector<Message> SavedStates() const;
  std::function<bool(const PartStates&)> IsOfThisLife() const EXCLUDES(mutex_);
  void AddUntouchedKeys(std::string_view call, std::map<Key, KeyPtr>* keys,
                        std::vector<KeyStates>* states) const EXCLUDES(mutex_);
  std::vector<Request> ControlRequests(std::string_view what, Kind kind, const std::string& meta,
                                       std::uint64_t version) const;

  const std::shared_ptr<WorkerLink> link_;
  const std::uint32_t store_;
  const bool async_;
  const bool sums_on_gpus_;  // lists of arrays, where they lie on GPUs
  const bool sums_along_links_;
  const std::shared_ptr<CallCount> calls_ = std::make_shared<CallCount>();
  const Var removing_;  // read by ops that remove keys
  std::atomic<std::int64_t> pushed_bytes_{0};
  std::atomic<std::int64_t> pulled_bytes_{0};

  // Nothing waits, and no op is pushed, while it is held.
  mutable Mutex mutex_;
  KeyTable<KeyPtr> keys_ GUARDED_BY(mutex_);
  KeyTable<std::uint64_t> removals_ GUARDED_BY(mutex_);  // of keys that were removed: how often
  std::vector<std::weak_ptr<DistKey>> removed_ GUARDED_BY(mutex_);  // may still have calls
  std::set<std::uint64_t> initialising_ GUARDED_BY(mutex_);         // numbers of keys, see KeyId
  std::map<std::uint64_t, KeyPtr> unfinished_ GUARDED_BY(mutex_);   // by the same, see IsUnfinished
  std::optional<bool> string_keys_ GUARDED_BY(mutex_);              // set by the first key
  std::shared_ptr<Optimizer> optimizer_ GUARDED_BY(mutex_);
  std::shared_ptr<const internal::UpdatePlan> told_plan_ GUARDED_BY(mutex_);
  std::vector<std::pair<std::string, double>> told_ GUARDED_BY(mutex_);  // its parameters
  std::uint64_t version_ GUARDED_BY(mutex_) = 0;
  // What threads of this worker set on all servers, see SetOnServers: by kind and version.
  struct Setting {
    int calls = 0;                  // under way
    bool is_set = false;            // by one of them
    std::set<std::string> asked{};  // the meta of each
  };
  std::map<std::pair<Kind, std::uint64_t>, Setting> settings_ GUARDED_BY(mutex_);
  std::int64_t num_update_ GUARDED_BY(mutex_) = 0;  // the most updates of any key
  std::shared_ptr<const Compressor> compressor_ GUARDED_BY(mutex_);
  std::uint64_t list_calls_ GUARDED_BY(mutex_) = 0;
  bool pushed_ GUARDED_BY(mutex_) = false;
  // Keys to come of either kind are not cut, see NeedsWholeKey.
  bool whole_dense_ GUARDED_BY(mutex_) = false;
  bool whole_row_sparse_ GUARDED_BY(mutex_) = false;
};

// A store of the job that `link` is part of; `store` counts those of the link. `type` is one of the
// four types without aliases. Returns when the servers have opened it; InvalidArgument if another
// rank's store of that number is of another type. `gpu_sums`: of what lists of the types with
// "device" in their name are summed by; kTree as kRelay.
std::unique_ptr<KVStore> MakeDistStore(Engine& engine, const std::string& type,
                                       std::shared_ptr<WorkerLink> link, std::uint32_t store,
                                       GpuSums gpu_sums = GpuSums::kRelay);

}  // namespace heddle::kvstore::dist
