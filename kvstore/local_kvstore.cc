// The stores of one process: "local" and "device".
//
// Both keep a StoredValue a key and order everything by the Var of its array. They differ in the
// device that holds, merges and updates a value: cpu(0) for "local", for "device" one of the
// devices that push it, chosen by MergePlacement at the first push.
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/mutex.h"
#include "kvstore/checks.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/key_table.h"
#include "kvstore/merge_placement.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/registry.h"
#include "kvstore/stored_value.h"
#include "storage/array_state.h"

namespace heddle::kvstore {

namespace {

enum class MergeOn { kCpu, kPushingDevices };

[[noreturn]] void ThrowUnknownKey(std::string_view call, KeyRef key) {
  throw InvalidArgument(
      fmt::format("{}: unknown key {}: expected one that was initialised", call, ToString(key)));
}

// ---- The store

class LocalKVStore final : public KVStore {
 public:
  LocalKVStore(Engine& engine, const KVStoreOptions& options, MergeOn merge_on)
      : KVStore(engine), strict_init_(options.strict_init), merge_on_(merge_on) {}

  std::vector<Key> Keys() const override EXCLUDES(mutex_);
  void SetUpdater(Updater updater) override EXCLUDES(mutex_);
  void SetOptimizer(std::shared_ptr<Optimizer> optimizer) override EXCLUDES(mutex_);
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
  void DoPull(std::span<const KeyArrays> pairs, int priority) override EXCLUDES(mutex_);
  void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                  int priority) override EXCLUDES(mutex_);
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override EXCLUDES(mutex_);
  void DoReset(KeyRef key, const NDArray& value) override EXCLUDES(mutex_);
  void DoRemove(KeyRef key) override EXCLUDES(mutex_);
  bool DoContains(KeyRef key) const override EXCLUDES(mutex_);

 private:
  using ValuePtr = std::shared_ptr<StoredValue>;
  using UpdaterPtr = std::shared_ptr<const Updater>;

  struct Slot {
    ValuePtr value;
    std::uint64_t number = 0;                   // counts the keys made
    bool placed = true;                         // false: will get its device by the first push
    std::shared_ptr<UpdateState> update_state;  // of the optimizer `optimizer_number`
    std::uint64_t optimizer_number = 0;
    std::vector<std::shared_ptr<Residual>> residuals;  // of the senders seen so far
  };

  // One key of a push: what to sum, and where it goes.
  struct KeyPush {
    KeyRef key;
    std::span<const NDArray> arrays;
    std::vector<NDArray> joined = {};  // holds `arrays` if the call names the key several times
    Slot* slot = nullptr;              // only while PreparePush holds the lock; null: a new key
    ValuePtr value = nullptr;
    std::shared_ptr<Compression> compression = nullptr;
    std::vector<std::shared_ptr<Residual>> residuals = {};  // of the slot, with the new senders
    Update update = {};
  };

  // A key that gets its device, and its value there.
  struct Placement {
    Slot* slot;  // null: a key that `push` makes
    const KeyPush* push;
    Device device;
    ValuePtr value = nullptr;

    std::int64_t bytes() const {
      return slot != nullptr ? slot->value->array().bytes() : push->arrays[0].bytes();
    }
  };

  // A KeyPush a key, in the order of first naming. `index_of`, unless null, gets for each pair the
  // place of its key.
  static std::vector<KeyPush> JoinRepeatedKeys(std::span<const KeyArrays> pairs,
                                               std::vector<std::size_t>* index_of);

  // Push in two steps: the first checks everything and changes nothing unless all is well.
  // The first returns the updater to call, if any.
  UpdaterPtr PreparePush(std::string_view call, std::span<KeyPush> pushes) EXCLUDES(mutex_);
  static void QueuePush(std::span<KeyPush> pushes, const UpdaterPtr& updater, int priority);
  void QueuePull(const ValuePtr& value, std::span<const NDArray> out, int priority);

  void PlanCompressionLocked(KeyPush& push, const NDArray& value) const REQUIRES(mutex_);
  void CheckKeyKindLocked(std::string_view call, KeyRef key) const REQUIRES(mutex_);
  void CheckNewLocked(std::string_view call, std::span<const KeyArrays> pairs) const
      REQUIRES(mutex_);
  const Slot* FindLocked(std::string_view call, KeyRef key) const REQUIRES(mutex_);
  Slot& InsertLocked(ValuePtr value) REQUIRES(mutex_);
  std::vector<Placement> PlanPlacementLocked(std::span<const KeyPush> pushes) REQUIRES(mutex_);
  ValuePtr Find(std::string_view call, KeyRef key) const EXCLUDES(mutex_);
  ValuePtr FindForPull(const KeyArrays& pair) const EXCLUDES(mutex_);  // checks the outputs' shapes
  ValuePtr MakeValue(KeyRef key, const NDArray& like) const;
  void InitChecked(std::string_view call, std::span<const KeyArrays> pairs) EXCLUDES(mutex_);

  const bool strict_init_;
  const MergeOn merge_on_;
  std::atomic<std::int64_t> pushed_bytes_{0};
  std::atomic<std::int64_t> pulled_bytes_{0};

  // Nothing waits, and no op is pushed, while it is held.
  mutable Mutex mutex_;
  KeyTable<Slot> slots_ GUARDED_BY(mutex_);
  std::optional<bool> string_keys_ GUARDED_BY(mutex_);  // set by the first key
  std::uint64_t keys_made_ GUARDED_BY(mutex_) = 0;
  UpdaterPtr updater_ GUARDED_BY(mutex_);
  std::shared_ptr<Optimizer> optimizer_ GUARDED_BY(mutex_);
  std::uint64_t optimizer_number_ GUARDED_BY(mutex_) = 0;  // counts the optimizers set
  std::shared_ptr<const Compressor> compressor_ GUARDED_BY(mutex_);
  bool pushed_ GUARDED_BY(mutex_) = false;
  std::size_t unplaced_ GUARDED_BY(mutex_) = 0;  // slots that are not placed
  MergePlacement placement_ GUARDED_BY(mutex_);
};

// ---- Keys

void LocalKVStore::CheckKeyKindLocked(std::string_view call, KeyRef key) const {
  if (!string_keys_ || *string_keys_ == key.is_string()) return;
  throw InvalidArgument(fmt::format(
      "{}: key {}: expected {} key as the others of this store, got {}", call, ToString(key),
      *string_keys_ ? "a string" : "an integer", key.is_string() ? "a string" : "an integer"));
}

const LocalKVStore::Slot* LocalKVStore::FindLocked(std::string_view call, KeyRef key) const {
  CheckKeyKindLocked(call, key);
  const auto found = slots_.find(key);
  return found != slots_.end() ? &found->second : nullptr;
}

LocalKVStore::ValuePtr LocalKVStore::Find(std::string_view call, KeyRef key) const {
  MutexLock lock(mutex_);
  const Slot* slot = FindLocked(call, key);
  if (slot == nullptr) ThrowUnknownKey(call, key);
  return slot->value;
}

LocalKVStore::ValuePtr LocalKVStore::MakeValue(KeyRef key, const NDArray& like) const {
  const Device device = merge_on_ == MergeOn::kCpu ? Cpu() : like.device();
  return std::make_shared<StoredValue>(key.ToKey(), like, device, engine());
}

LocalKVStore::Slot& LocalKVStore::InsertLocked(ValuePtr value) {
  string_keys_ = std::holds_alternative<std::string>(value->key());
  Slot& slot = slots_[value->key()];
  slot.number = keys_made_++;
  slot.placed = merge_on_ == MergeOn::kCpu;
  slot.value = std::move(value);
  if (!slot.placed) ++unplaced_;
  return slot;
}

std::vector<Key> LocalKVStore::Keys() const {
  std::vector<std::pair<std::uint64_t, Key>> numbered;
  {
    MutexLock lock(mutex_);
    for (const auto& [key, slot] : slots_) numbered.emplace_back(slot.number, key);
  }
  std::sort(numbered.begin(), numbered.end());
  std::vector<Key> keys;
  for (auto& [number, key] : numbered) keys.push_back(std::move(key));
  return keys;
}

bool LocalKVStore::DoContains(KeyRef key) const {
  MutexLock lock(mutex_);
  return FindLocked("Contains", key) != nullptr;
}

void LocalKVStore::DoRemove(KeyRef key) {
  ValuePtr value;  // dropped after the lock
  MutexLock lock(mutex_);
  if (FindLocked("Remove", key) == nullptr) ThrowUnknownKey("Remove", key);
  const auto found = slots_.find(key);
  if (!found->second.placed) --unplaced_;
  value = std::move(found->second.value);
  slots_.erase(found);
}

// ---- Init

void LocalKVStore::CheckNewLocked(std::string_view call, std::span<const KeyArrays> pairs) const {
  for (const KeyArrays& pair : pairs) {
    if (FindLocked(call, pair.key) != nullptr) {
      throw InvalidArgument(fmt::format("{}: key {} is in the store already: expected a new key",
                                        call, ToString(pair.key)));
    }
  }
}

void LocalKVStore::InitChecked(std::string_view call, std::span<const KeyArrays> pairs) {
  {
    MutexLock lock(mutex_);
    CheckNewLocked(call, pairs);
  }
  std::vector<ValuePtr> values;
  for (const KeyArrays& pair : pairs) values.push_back(MakeValue(pair.key, pair.arrays[0]));
  for (std::size_t i = 0; i < pairs.size(); ++i) values[i]->QueueInitialize(pairs[i].arrays[0]);
  for (const ValuePtr& value : values) value->WaitUntilInitialized();
  // The keys appear only now, with their values in place, so no other call ever sees one without.
  MutexLock lock(mutex_);
  CheckNewLocked(call, pairs);
  for (ValuePtr& value : values) InsertLocked(std::move(value));
}

void LocalKVStore::DoInit(std::span<const KeyArrays> pairs) {
  for (const KeyArrays& pair : pairs) CheckOneArray("Init", pair, engine());
  CheckOneKind("Init", pairs);
  CheckDistinct("Init", pairs);
  InitChecked("Init", pairs);
}

void LocalKVStore::DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                               int priority) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckOneArray("Broadcast", values[i], engine());
    CheckArrays("Broadcast", out[i], engine());
    for (const NDArray& array : out[i].arrays) {
      CheckShape("Broadcast", out[i].key, values[i].arrays[0], array);
    }
  }
  CheckOneKind("Broadcast", values);
  CheckDistinct("Broadcast", values);
  InitChecked("Broadcast", values);
  DoPull(out, priority);
}

void LocalKVStore::DoReset(KeyRef key, const NDArray& value) {
  CheckArrays("Reset", {key, {&value, 1}}, engine());
  {
    const ValuePtr stored = Find("Reset", key);
    CheckShapeAndDType("Reset", key, stored->array(), value);
  }
  value.WaitToRead();
  ValuePtr stored;
  std::shared_ptr<UpdateState> old_state;  // dropped after the lock, as are the residuals
  std::vector<std::shared_ptr<Residual>> old_residuals;
  {
    MutexLock lock(mutex_);
    const auto found = slots_.find(key);
    if (found == slots_.end()) ThrowUnknownKey("Reset", key);
    stored = found->second.value;
    old_state = std::exchange(found->second.update_state, nullptr);
    old_residuals.swap(found->second.residuals);
    // Only values that no op has written may move to another device.
    if (!std::exchange(found->second.placed, true)) --unplaced_;
  }
  StoredValue::QueueReset(stored, value);
}

// ---- Push and pull

void LocalKVStore::SetUpdater(Updater updater) {
  if (!updater) throw InvalidArgument("SetUpdater: expected a function, got a null one");
  auto shared = std::make_shared<const Updater>(std::move(updater));
  std::shared_ptr<Optimizer> old_optimizer;  // dropped after the lock, as is the old updater
  MutexLock lock(mutex_);
  updater_.swap(shared);
  optimizer_.swap(old_optimizer);
}

void LocalKVStore::SetOptimizer(std::shared_ptr<Optimizer> optimizer) {
  if (optimizer == nullptr) throw InvalidArgument("SetOptimizer: expected an optimizer, got null");
  UpdaterPtr old_updater;  // dropped after the lock, as is the old optimizer
  MutexLock lock(mutex_);
  optimizer_.swap(optimizer);
  updater_.swap(old_updater);
  ++optimizer_number_;
}

void LocalKVStore::SetGradientCompression(const CompressionOptions& options) {
  const auto fresh = MakeCompressor(options);
  const auto text = [](const CompressionOptions& o) {
    return fmt::format("type {}, threshold {}", o.type, o.threshold);
  };
  MutexLock lock(mutex_);
  if (compressor_ != nullptr) {
    const CompressionOptions& set = compressor_->options();
    if (set.type == fresh->options().type && set.threshold == options.threshold) return;
    throw InvalidArgument(
        fmt::format("SetGradientCompression: expected what is set already, {}, got {}", text(set),
                    text(fresh->options())));
  }
  if (pushed_) {
    throw InvalidState(fmt::format(
        "SetGradientCompression: expected a call before the first push, got {} after it",
        text(fresh->options())));
  }
  compressor_ = fresh;
}

std::vector<LocalKVStore::KeyPush> LocalKVStore::JoinRepeatedKeys(
    std::span<const KeyArrays> pairs, std::vector<std::size_t>* index_of) {
  std::vector<KeyPush> pushes;
  pushes.reserve(pairs.size());
  std::unordered_map<KeyRef, std::size_t, KeyHash, KeyEqual> places;
  for (const KeyArrays& pair : pairs) {
    const auto [place, is_new] = places.emplace(pair.key, pushes.size());
    if (index_of != nullptr) index_of->push_back(place->second);
    if (is_new) {
      pushes.push_back({.key = pair.key, .arrays = pair.arrays});
      continue;
    }
    KeyPush& push = pushes[place->second];
    if (push.joined.empty()) push.joined.assign(push.arrays.begin(), push.arrays.end());
    push.joined.insert(push.joined.end(), pair.arrays.begin(), pair.arrays.end());
    push.arrays = push.joined;
  }
  return pushes;
}

// What the first push of a key settles: the device where its values are merged and updated. Lists
// of values place all keys that wait for it, so that the largest come first; values alone stay
// where they are. Changes nothing but placement_.
std::vector<LocalKVStore::Placement> LocalKVStore::PlanPlacementLocked(
    std::span<const KeyPush> pushes) {
  std::vector<Placement> plan;
  const auto is_new = [](const KeyPush& push) { return push.slot == nullptr; };
  if (unplaced_ == 0 && std::none_of(pushes.begin(), pushes.end(), is_new)) return plan;

  std::vector<Device> devices;
  for (const KeyPush& push : pushes) {
    if (push.arrays.size() == 1) continue;
    for (const NDArray& array : push.arrays) {
      const Device device = array.device();
      if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
        devices.push_back(device);
      }
    }
  }
  if (!devices.empty()) {
    for (auto& [key, slot] : slots_) {
      if (!slot.placed) plan.push_back({&slot, nullptr, slot.value->array().device()});
    }
    std::sort(plan.begin(), plan.end(), [](const Placement& a, const Placement& b) {
      return a.slot->number < b.slot->number;
    });
  }
  for (const KeyPush& push : pushes) {
    if (is_new(push)) {
      plan.push_back({nullptr, &push, push.arrays[0].device()});
    } else if (!push.slot->placed && devices.empty()) {
      plan.push_back({push.slot, &push, push.value->array().device()});
    }
  }

  if (merge_on_ == MergeOn::kCpu) {
    for (Placement& placement : plan) placement.device = Cpu();
  } else if (devices.empty()) {
    for (Placement& placement : plan) {
      placement_.Place({{placement.bytes(), &placement.device}}, {{placement.device}});
    }
  } else {
    std::vector<MergePlacement::Item> items;
    for (Placement& placement : plan) items.push_back({placement.bytes(), &placement.device});
    placement_.Place(std::move(items), devices);
  }

  for (Placement& placement : plan) {
    if (placement.slot == nullptr) {
      const KeyPush& push = *placement.push;
      placement.value = std::make_shared<StoredValue>(push.key.ToKey(), push.arrays[0],
                                                      placement.device, engine());
    } else if (placement.slot->value->array().device() == placement.device) {
      placement.value = placement.slot->value;
    } else {
      placement.value = placement.slot->value->MovedTo(placement.device);
    }
  }
  return plan;
}

// The residuals of a push to `value`: those of the senders that the key knows, and new ones.
void LocalKVStore::PlanCompressionLocked(KeyPush& push, const NDArray& value) const {
  push.compression = std::make_shared<Compression>();
  push.compression->compressor = compressor_;
  if (push.slot != nullptr) push.residuals = push.slot->residuals;
  for (std::size_t i = 0; i < push.arrays.size(); ++i) {
    const Device device = push.arrays[i].device();
    int place = 0;
    for (const NDArray& before : push.arrays.first(i)) place += before.device() == device;
    const auto is_sender = [&](const std::shared_ptr<Residual>& residual) {
      return residual->device == device && residual->place == place;
    };
    auto found = std::find_if(push.residuals.begin(), push.residuals.end(), is_sender);
    if (found == push.residuals.end()) {
      push.residuals.push_back(std::make_shared<Residual>(Residual{
          device, place, internal::NewArrayGuardedBy(value, value.shape(), DType::kFloat32)}));
      found = push.residuals.end() - 1;
    }
    push.compression->residuals.push_back(*found);
  }
}

LocalKVStore::UpdaterPtr LocalKVStore::PreparePush(std::string_view call,
                                                   std::span<KeyPush> pushes) {
  for (const KeyPush& push : pushes) {
    for (const NDArray& array : push.arrays.subspan(1)) {
      CheckShapeAndDType(call, push.key, push.arrays[0], array);
    }
  }
  MutexLock lock(mutex_);
  std::shared_ptr<const internal::UpdatePlan> plan;
  if (optimizer_ != nullptr) plan = optimizer_->plan();
  for (KeyPush& push : pushes) {
    CheckKeyKindLocked(call, push.key);
    const auto found = slots_.find(push.key);
    if (found != slots_.end()) {
      push.slot = &found->second;
      push.value = push.slot->value;
      CheckShapeAndDType(call, push.key, push.value->array(), push.arrays[0]);
    } else if (strict_init_ || updater_ != nullptr || optimizer_ != nullptr) {
      throw InvalidArgument(fmt::format(
          "{}: key {} was never initialised: expected Init before the first push, since {}", call,
          ToString(push.key),
          strict_init_ ? "the store was made with strict_init" : "an updater or optimizer is set"));
    }
    if (compressor_ != nullptr && !IsCompressible(push.arrays[0].dtype())) {
      throw InvalidArgument(fmt::format(
          "{}: key {}: expected float32, float16 or bfloat16, since gradient compression {} is "
          "set, got {}",
          call, ToString(push.key), compressor_->options().type, Name(push.arrays[0].dtype())));
    }
    if (plan == nullptr) continue;
    if (!IsFloating(push.arrays[0].dtype())) {
      throw InvalidArgument(
          fmt::format("{}: key {}: expected a floating dtype for optimizer {}, got {}", call,
                      ToString(push.key), optimizer_->name(), Name(push.arrays[0].dtype())));
    }
    const std::string refusal =
        plan->rule->Refusal({.dimensions = static_cast<int>(push.arrays[0].shape().ndim()),
                             .weight_decay = plan->weight_decay,
                             .row_sparse = false});
    if (!refusal.empty()) {
      throw InvalidArgument(fmt::format("{}: key {}: optimizer {}: {}", call, ToString(push.key),
                                        optimizer_->name(), refusal));
    }
  }
  // All is well; now what may run out of memory.
  const std::vector<Placement> placements = PlanPlacementLocked(pushes);
  if (plan != nullptr) {
    for (KeyPush& push : pushes) {
      push.update.rule = plan->rule;
      push.update.learning_rate = plan->learning_rate;
      push.update.weight_decay = plan->weight_decay;
      push.update.state =
          push.slot->optimizer_number == optimizer_number_ && push.slot->update_state != nullptr
              ? push.slot->update_state
              : std::make_shared<UpdateState>(plan->multi_precision);
    }
  }
  if (compressor_ != nullptr) {
    for (KeyPush& push : pushes) {
      NDArray value = push.slot != nullptr ? push.value->array() : NDArray();
      for (const Placement& placement : placements) {
        const bool is_placed =
            push.slot != nullptr ? placement.slot == push.slot : placement.push == &push;
        if (is_placed) value = placement.value->array();
      }
      PlanCompressionLocked(push, value);
    }
  }
  // From here on nothing fails.
  pushed_ = true;
  std::int64_t pushed_bytes = 0;
  for (const Placement& placement : placements) {
    Slot& slot = placement.slot != nullptr ? *placement.slot : InsertLocked(placement.value);
    slot.value = placement.value;
    if (!std::exchange(slot.placed, true)) --unplaced_;
  }
  for (KeyPush& push : pushes) {
    // A slot may go once the lock is released, its value stays.
    Slot& slot =
        push.slot != nullptr ? *std::exchange(push.slot, nullptr) : slots_.find(push.key)->second;
    push.value = slot.value;
    if (push.compression != nullptr) slot.residuals = std::move(push.residuals);
    for (const NDArray& array : push.arrays) {
      pushed_bytes +=
          push.compression != nullptr ? compressor_->CodeBytes(array.size()) : array.bytes();
    }
    if (plan == nullptr) continue;
    slot.update_state = push.update.state;
    slot.optimizer_number = optimizer_number_;
  }
  pushed_bytes_.fetch_add(pushed_bytes, std::memory_order_relaxed);
  return updater_;
}

void LocalKVStore::QueuePush(std::span<KeyPush> pushes, const UpdaterPtr& updater, int priority) {
  for (KeyPush& push : pushes) {
    if (updater != nullptr) {
      StoredValue::RunUpdater(push.value, push.arrays, std::move(push.compression), *updater,
                              priority);
    } else {
      StoredValue::QueuePush(push.value, push.arrays, std::move(push.compression),
                             std::move(push.update), priority);
    }
  }
}

void LocalKVStore::QueuePull(const ValuePtr& value, std::span<const NDArray> out, int priority) {
  StoredValue::QueuePull(value, out, priority);
  std::int64_t bytes = 0;
  for (const NDArray& array : out) bytes += array.bytes();
  pulled_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void LocalKVStore::DoPush(std::span<const KeyArrays> pairs, int priority) {
  for (const KeyArrays& pair : pairs) CheckArrays("Push", pair, engine());
  if (pairs.size() == 1) {
    KeyPush push{.key = pairs[0].key, .arrays = pairs[0].arrays};
    const UpdaterPtr updater = PreparePush("Push", {&push, 1});
    QueuePush({&push, 1}, updater, priority);
    return;
  }
  CheckOneKind("Push", pairs);
  std::vector<KeyPush> pushes = JoinRepeatedKeys(pairs, nullptr);
  const UpdaterPtr updater = PreparePush("Push", pushes);
  QueuePush(pushes, updater, priority);
}

void LocalKVStore::DoPull(std::span<const KeyArrays> pairs, int priority) {
  for (const KeyArrays& pair : pairs) CheckArrays("Pull", pair, engine());
  if (pairs.size() == 1) {
    const ValuePtr value = FindForPull(pairs[0]);
    QueuePull(value, pairs[0].arrays, priority);
    return;
  }
  std::vector<ValuePtr> values;
  for (const KeyArrays& pair : pairs) values.push_back(FindForPull(pair));
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    QueuePull(values[i], pairs[i].arrays, priority);
  }
}

LocalKVStore::ValuePtr LocalKVStore::FindForPull(const KeyArrays& pair) const {
  ValuePtr value = Find("Pull", pair.key);
  for (const NDArray& array : pair.arrays) CheckShape("Pull", pair.key, value->array(), array);
  return value;
}

void LocalKVStore::DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                              int priority) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckArrays("PushPull", values[i], engine());
    CheckArrays("PushPull", out[i], engine());
    for (const NDArray& array : out[i].arrays) {  // the pushed arrays are checked against the value
      CheckShape("PushPull", out[i].key, values[i].arrays[0], array);
    }
  }
  CheckOneKind("PushPull", values);
  std::vector<std::size_t> push_of;
  std::vector<KeyPush> pushes = JoinRepeatedKeys(values, &push_of);
  const UpdaterPtr updater = PreparePush("PushPull", pushes);
  QueuePush(pushes, updater, priority);
  for (std::size_t i = 0; i < out.size(); ++i) {
    QueuePull(pushes[push_of[i]].value, out[i].arrays, priority);
  }
}

}  // namespace

std::unique_ptr<KVStore> MakeLocalStore(Engine& engine, const KVStoreOptions& options) {
  return std::make_unique<LocalKVStore>(engine, options, MergeOn::kCpu);
}

std::unique_ptr<KVStore> MakeDeviceStore(Engine& engine, const KVStoreOptions& options) {
  return std::make_unique<LocalKVStore>(engine, options, MergeOn::kPushingDevices);
}

}  // namespace heddle::kvstore
