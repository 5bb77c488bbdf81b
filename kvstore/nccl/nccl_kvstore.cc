#include "kvstore/nccl/nccl_kvstore.h"

#include <heddle/error.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/log.h"
#include "engine/fork.h"
#include "kvstore/checks.h"
#include "kvstore/registry.h"
#include "storage/array_state.h"
#include "storage/gpus.h"

namespace heddle::kvstore {

namespace {

std::vector<KeyRef> KeysOf(std::span<const KeyArrays> pairs) {
  std::vector<KeyRef> keys;
  for (const KeyArrays& pair : pairs) keys.push_back(pair.key);
  return keys;
}

ArrayLists ListsOf(std::span<const KeyArrays> pairs) {
  std::vector<ArrayList> lists;
  for (const KeyArrays& pair : pairs) {
    lists.push_back(pair.row_sparse.empty() ? ArrayList(pair.arrays) : ArrayList(pair.row_sparse));
  }
  return ArrayLists(std::move(lists));
}

std::int64_t BytesOf(std::span<const KeyArrays> pairs) {
  std::int64_t bytes = 0;
  for (const KeyArrays& pair : pairs) {
    for (const NDArray& array : pair.arrays) bytes += array.bytes();
  }
  return bytes;
}

// The devices of the arrays, sorted; nothing if one is no GPU.
std::vector<int> GpusOf(std::span<const NDArray> arrays) {
  std::vector<int> devices;
  for (const NDArray& array : arrays) {
    if (array.device().type != DeviceType::kGpu) return {};
    devices.push_back(array.device().id);
  }
  std::ranges::sort(devices);
  return devices;
}

}  // namespace

std::vector<int> NcclKVStore::Pushed::devices() const { return GpusOf(values); }

bool NcclKVStore::IsCapable(std::string_view capability) const {
  return LowerCase(capability) == "optimizer";
}

TransferStats NcclKVStore::transfers() const {
  return {pushed_bytes_.load(std::memory_order_relaxed),
          pulled_bytes_.load(std::memory_order_relaxed)};
}

NcclKVStore::NcclKVStore(Engine& engine, std::shared_ptr<Nccl> nccl,
                         std::unique_ptr<KVStore> values, const DeviceGroupOptions& options,
                         std::shared_ptr<Meeting> meeting)
    : KVStore(engine),
      nccl_(std::move(nccl)),
      options_(options),
      values_(std::move(values)),
      meeting_(std::move(meeting)),
      order_(NcclOrderOf(engine)) {}

// The place in the job goes with the meeting: what is under way completes before.
NcclKVStore::~NcclKVStore() {
  if (meeting_ == nullptr) return;
  try {
    engine().WaitForVar(order_->var);
  } catch (const std::exception& error) {
    Log(LogLevel::kWarning, "a store of type nccl was dropped after a push failed: {}",
        error.what());
  } catch (...) {
    Log(LogLevel::kWarning, "a store of type nccl was dropped after a push failed");
  }
}

void NcclKVStore::DoInit(std::span<const KeyArrays> pairs) {
  const auto check = [&] {
    for (const KeyArrays& pair : pairs) CheckDense("Init", pair);
    CheckInit(pairs, engine());
    for (const KeyArrays& pair : pairs) {
      if (values_->Contains(pair.key)) ThrowNotNew("Init", pair.key);
    }
  };
  PutIn("Init", pairs, check,
        [&](const ArrayLists& values) { values_->Init(KeyList(KeysOf(pairs)), values); });
  const engine::CallLock lock(mutex_, "a store");
  for (const KeyArrays& pair : pairs) {
    const NDArray& value = pair.arrays[0];
    slots_[pair.key.ToKey()] = {value.device(), value.shape(), value.dtype()};
  }
}

// --- push ----------------------------------------------------------------------------------------

std::vector<NcclKVStore::Pushed> NcclKVStore::JoinRepeatedKeys(std::span<const KeyArrays> pairs) {
  std::vector<Pushed> pushes;
  std::unordered_map<KeyRef, std::size_t, KeyHash, KeyEqual> places;
  for (const KeyArrays& pair : pairs) {
    const auto [place, is_new] = places.emplace(pair.key, pushes.size());
    if (is_new) pushes.push_back({pair.key, {}, {}});
    std::vector<NDArray>& values = pushes[place->second].values;
    values.insert(values.end(), pair.arrays.begin(), pair.arrays.end());
  }
  return pushes;
}

void NcclKVStore::CheckList(std::string_view call, const Pushed& pushed,
                            const std::vector<int>& expected) const {
  const auto refuse = [&](const std::string& what) {
    throw InvalidArgument(fmt::format("{}: key {}: {}", call, ToString(pushed.key), what));
  };
  if (meeting_ != nullptr) CheckKnown(call, pushed);
  for (const NDArray& array : pushed.values) {
    CheckShapeAndDType(call, pushed.key, pushed.values[0], array);
    if (const Device device = array.device(); device.type != DeviceType::kGpu) {
      refuse(fmt::format("expected lists of arrays on gpu(i), got one on {}", ToString(device)));
    }
  }
  if (const DType dtype = pushed.values[0].dtype(); !Nccl::Sums(dtype)) {
    refuse(fmt::format("expected a dtype that NCCL adds, got {}", Name(dtype)));
  }
  const std::vector<int> devices = pushed.devices();
  if (const auto twice = std::ranges::adjacent_find(devices); twice != devices.end()) {
    refuse(fmt::format("expected one array on each device, got several on gpu({})", *twice));
  }
  if (devices != expected) {
    refuse(
        fmt::format("expected arrays on the devices that NCCL was set up for, gpu({}), got "
                    "gpu({})",
                    fmt::join(expected, "), gpu("), fmt::join(devices, "), gpu(")));
  }
  if (meeting_ == nullptr) CheckKnown(call, pushed);
}

// Of several processes, all have the key, with the same shape and dtype.
void NcclKVStore::CheckKnown(std::string_view call, const Pushed& pushed) const {
  const engine::CallLock lock(mutex_, "a store");
  const auto slot = slots_.find(pushed.key);
  if (slot == slots_.end()) {
    if (meeting_ == nullptr) return;
    ThrowUnknownKey(call, pushed.key);
  }
  const NDArray& value = pushed.values[0];
  if (value.shape() != slot->second.shape) {
    ThrowShape(call, pushed.key, slot->second.shape, value.shape());
  }
  if (value.dtype() != slot->second.dtype) {
    ThrowDType(call, pushed.key, slot->second.dtype, value.dtype());
  }
}

NcclKVStore::GroupPtr NcclKVStore::group() const {
  const engine::CallLock lock(mutex_, "a store");
  return group_;
}

NcclKVStore::GroupPtr NcclKVStore::NewGroup(const std::vector<int>& devices,
                                            std::optional<GroupPlace> place) const {
  // NCCL may let a device write into its neighbour's arrays, which are of pools.
  storage::Gpus& gpus = storage::Gpus::Of(engine());
  for (const int device : devices) {
    for (const int peer : devices) {
      if (device != peer) gpus.Linked(device, peer);
    }
  }
  return DeviceGroup::Make(nccl_, storage::GpuDriverOf(engine()), devices, order_, options_,
                           std::move(place));
}

NcclKVStore::GroupPtr NcclKVStore::GroupOf(std::string_view call, std::span<const Pushed> pushes) {
  const auto first =
      std::ranges::find_if(pushes, [&](const Pushed& pushed) { return UsesNccl(pushed); });
  if (first == pushes.end()) return nullptr;
  const MutexLock set_up_lock(set_up_mutex_);
  GroupPtr group = this->group();
  if (group == nullptr && meeting_ != nullptr) {
    group = MeetForGroup(call, pushes);
  } else {
    const std::vector<int> devices = group != nullptr ? group->devices() : first->devices();
    for (const Pushed& pushed : pushes) {
      if (UsesNccl(pushed)) CheckList(call, pushed, devices);
    }
    if (group != nullptr) return group;
    group = NewGroup(devices, std::nullopt);
  }
  const engine::CallLock lock(mutex_, "a store");
  group_ = group;
  return group;
}

Collective NcclKVStore::InOrder(const DeviceGroup& group, KeyRef key,
                                std::span<const NDArray> arrays) const {
  Collective collective{.arrays = {arrays.begin(), arrays.end()}, .key = key.ToKey()};
  std::ranges::sort(collective.arrays, {}, [](const NDArray& array) { return array.device().id; });
  Device device = arrays[0].device();
  {
    const engine::CallLock lock(mutex_, "a store");
    if (const auto slot = slots_.find(key); slot != slots_.end()) device = slot->second.device;
  }
  const auto root = std::ranges::find(group.devices(), device.id);
  if (device.type == DeviceType::kGpu && root != group.devices().end()) {
    collective.root = static_cast<std::size_t>(root - group.devices().begin());
  }
  return collective;
}

NDArray NcclKVStore::TakeSum(KeyRef key, const NDArray& like) {
  {
    const engine::CallLock lock(mutex_, "a store");
    const auto slot = slots_.find(key);
    if (slot != slots_.end()) {
      std::vector<NDArray>& spares = slot->second.spare_sums;
      const auto spare = std::ranges::find_if(spares, [&](const NDArray& sum) {
        return sum.shape() == like.shape() && sum.dtype() == like.dtype() &&
               sum.device() == like.device();
      });
      if (spare != spares.end()) {
        std::swap(*spare, spares.back());
        NDArray sum = std::move(spares.back());
        spares.pop_back();
        return sum;
      }
    }
  }
  return NDArray(like.shape(), like.dtype(), like.device(), engine());
}

Collective NcclKVStore::Reduction(const DeviceGroup& group, const Pushed& pushed) {
  Collective collective = InOrder(group, pushed.key, pushed.values);
  if (meeting_ == nullptr) {
    collective.sum = TakeSum(pushed.key, collective.arrays[collective.root]);
  } else {
    for (const NDArray& array : collective.arrays) {
      collective.sums.push_back(TakeSum(pushed.key, array));
    }
  }
  return collective;
}

void NcclKVStore::Push(std::string_view call, std::span<const KeyArrays> pairs, int priority) {
  for (const KeyArrays& pair : pairs) {
    CheckArrays(call, pair, engine());
    CheckDense(call, pair);
  }
  CheckOneKind(call, pairs);
  std::vector<Pushed> pushes = JoinRepeatedKeys(pairs);
  if (const GroupPtr group = GroupOf(call, pushes)) {
    ThrowIfFailed();
    Together(call, [&] { QueueSums(group, pushes, priority); });
  }
  try {
    Alike(call, [&] { QueueUpdates(pushes, priority); });
  } catch (...) {
    // The devices are those of the first push that the store takes.
    GroupPtr unused;  // goes when the lock is free
    const engine::CallLock lock(mutex_, "a store");
    if (meeting_ == nullptr && !settled_) unused = std::move(group_);
    throw;
  }
  {
    const engine::CallLock lock(mutex_, "a store");
    settled_ = settled_ || group_ != nullptr;
  }
  pushed_bytes_.fetch_add(BytesOf(pairs), std::memory_order_relaxed);
}

void NcclKVStore::QueueSums(const GroupPtr& group, std::span<Pushed> pushes, int priority) {
  std::vector<Collective> reductions;
  for (Pushed& pushed : pushes) {
    if (!UsesNccl(pushed)) continue;
    Collective reduction = Reduction(*group, pushed);
    if (meeting_ == nullptr) {
      pushed.sums = pushed.values = {reduction.sum};
    } else {
      pushed.sums = reduction.sums;
      pushed.values = {reduction.sums[reduction.root]};
    }
    reductions.push_back(std::move(reduction));
  }
  DeviceGroup::Queue(group, "kvstore.nccl.reduce", std::move(reductions), priority);
}

void NcclKVStore::QueueUpdates(std::span<Pushed> pushes, int priority) {
  std::vector<KeyRef> keys;
  std::vector<ArrayList> lists;
  for (const Pushed& pushed : pushes) {
    keys.push_back(pushed.key);
    lists.emplace_back(pushed.values);
  }
  // Returns when the ops that read the sums are queued: then they may be used again.
  values_->Push(KeyList(keys), ArrayLists(std::move(lists)), priority);
  const engine::CallLock lock(mutex_, "a store");
  for (Pushed& pushed : pushes) {
    // A key that the push has made lies where its first value lay.
    const NDArray& value = pushed.values[0];
    Slot& slot =
        slots_.try_emplace(pushed.key.ToKey(), Slot{value.device(), value.shape(), value.dtype()})
            .first->second;
    std::ranges::move(pushed.sums, std::back_inserter(slot.spare_sums));
  }
}

void NcclKVStore::DoPush(std::span<const KeyArrays> pairs, int priority) {
  Push("Push", pairs, priority);
}

// --- pull ----------------------------------------------------------------------------------------

void NcclKVStore::DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) {
  const GroupPtr group = this->group();
  // What the store of the values writes, and what NCCL copies from there.
  std::vector<KeyArrays> direct;
  std::vector<Collective> broadcasts;
  std::unordered_set<const void*> written;  // the Vars of the outputs
  bool distinct = true;
  broadcasts.reserve(pairs.size());  // `direct` points into them
  for (const KeyArrays& pair : pairs) {
    CheckArrays("Pull", pair, engine());
    for (const NDArray& array : pair.arrays) {
      CheckShape("Pull", pair.key, pair.arrays[0], array);
      distinct &= written.insert(internal::StateOf(array).buffer).second;
    }
    // A part of an array is not overwritten if the array is poisoned, and has an op of its own.
    const auto may_be_broadcast = [&](const NDArray& array) {
      return array.dtype() == pair.arrays[0].dtype() && !array.is_partial();
    };
    if (group == nullptr || meeting_ != nullptr || GpusOf(pair.arrays) != group->devices() ||
        !std::ranges::all_of(pair.arrays, may_be_broadcast)) {
      direct.push_back(pair);
      continue;
    }
    broadcasts.push_back(InOrder(*group, pair.key, pair.arrays));
    const Collective& broadcast = broadcasts.back();
    direct.emplace_back(pair.key, ArrayList(broadcast.arrays[broadcast.root]));
  }
  // An array that is the output of several keys: each of them in its turn, so that the last wins.
  if (!distinct) {
    values_->Pull(KeyList(KeysOf(pairs)), ListsOf(pairs), priority, ignore_sparse);
  } else {
    values_->Pull(KeyList(KeysOf(direct)), ListsOf(direct), priority, ignore_sparse);
    if (!broadcasts.empty()) {
      DeviceGroup::Queue(group, "kvstore.nccl.broadcast", std::move(broadcasts), priority);
    }
  }
  pulled_bytes_.fetch_add(BytesOf(pairs), std::memory_order_relaxed);
}

void NcclKVStore::DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                             int priority) {
  CheckPushPull(values, out, engine());
  Push("PushPull", values, priority);
  DoPull(out, priority, /*ignore_sparse=*/true);
}

void NcclKVStore::DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                              int priority) {
  CheckBroadcast(values, out, engine());
  for (const KeyArrays& pair : values) CheckDense("Broadcast", pair);
  DoInit(values);
  DoPull(out, priority, /*ignore_sparse=*/true);
}

void NcclKVStore::DoReset(const KeyArrays& value) {
  const auto check = [&] {
    CheckDense("Reset", value);
    CheckOneArray("Reset", value, engine());
    if (meeting_ != nullptr && !values_->Contains(value.key)) ThrowUnknownKey("Reset", value.key);
  };
  PutIn("Reset", {&value, 1}, check,
        [&](const ArrayLists& values) { values_->Reset(value.key, values.lists()[0]); });
}

void NcclKVStore::DoRemove(KeyRef key) {
  values_->Remove(key);
  const engine::CallLock lock(mutex_, "a store");
  if (const auto slot = slots_.find(key); slot != slots_.end()) slots_.erase(slot);
}

}  // namespace heddle::kvstore
