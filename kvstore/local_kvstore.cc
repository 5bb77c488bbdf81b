// The stores of one process: "local" and "device".
//
// Both keep a StoredValue a key and order everything by the Var of its array. They differ in the
// device that holds, merges and updates a value: cpu(0) for "local", for "device" one of the
// devices that push it, chosen by MergePlacement at the first push. A row-sparse value, of which a
// push touches a small part, stays on the device where it was made.
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

#include "base/log.h"
#include "base/mutex.h"
#include "kvstore/checks.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/key_table.h"
#include "kvstore/merge_placement.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/registry.h"
#include "kvstore/stored_value.h"

namespace heddle::kvstore {

namespace {

enum class MergeOn { kCpu, kPushingDevices };

[[noreturn]] void ThrowUnknownKey(std::string_view call, KeyRef key) {
  throw UnknownKey(
      fmt::format("{}: unknown key {}: expected one that was initialised", call, ToString(key)));
}

// ---- The store

class LocalKVStore final : public KVStore {
 public:
  LocalKVStore(Engine& engine, const KVStoreOptions& options, MergeOn merge_on)
      : KVStore(engine), strict_init_(options.strict_init), merge_on_(merge_on) {}

  std::vector<Key> Keys() const override EXCLUDES(mutex_);
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
    std::uint64_t number = 0;              // counts the keys made
    bool placed = true;                    // false: will get its device by the first push
    bool told_ignored = false;             // that pulls leave row-sparse outputs alone
    std::shared_ptr<StatesOrigin> origin;  // of the optimizer's states; null: no push with one
    std::int64_t updates = 0;              // pushed since then
  };

  // One key of a push: what to sum, and where it goes.
  struct KeyPush : KeyArrays {
    explicit KeyPush(const KeyArrays& values) : KeyArrays(values) {}

    bool is_row_sparse() const { return !row_sparse.empty(); }

    // Hold the arrays if the call names the key several times.
    std::vector<NDArray> joined;
    std::vector<RowSparseNDArray> joined_row_sparse;
    Slot* slot = nullptr;  // only while PreparePush holds the lock; null: a new key
    ValuePtr value;
    ValuePtr old;  // not null: a value of the other kind, in whose place `value` comes
    std::shared_ptr<const Compressor> compressor;
    Update update;
  };

  // A key that gets its device, and its value there.
  struct Placement {
    Slot* slot;  // null: a key that `push` makes
    const KeyPush* push;
    Device device;
    ValuePtr value = nullptr;

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
  UpdatersPtr PreparePush(std::string_view call, std::span<KeyPush> pushes) EXCLUDES(mutex_);
  void QueuePush(std::span<KeyPush> pushes, const UpdatersPtr& updaters, int priority)
      EXCLUDES(mutex_);
  void QueuePull(const ValuePtr& value, std::span<const NDArray> out, int priority);
  // Whether what is pushed, the stored value, and what is set for all pushes fit each other.
  void CheckCompressionLocked(std::string_view call, const KeyPush& push) const REQUIRES(mutex_);
  void CheckKindsLocked(std::string_view call, const KeyPush& push) const REQUIRES(mutex_);
  std::shared_ptr<Optimizer> OptimizerFor(std::string_view call) const EXCLUDES(mutex_);
  void CheckStatesLocked(const std::string& file, const OptimizerStates& states) const
      REQUIRES(mutex_);
  std::uint64_t OriginNumberLocked() const REQUIRES(mutex_) {
    return origin_ != nullptr ? origin_->number : 0;
  }
  bool HasStatesLocked(const Slot& slot) const REQUIRES(mutex_) {
    return slot.origin != nullptr && slot.origin->number == OriginNumberLocked();
  }
  void CheckOptimizerLocked(std::string_view call, const KeyPush& push,
                            const internal::UpdatePlan& plan) const REQUIRES(mutex_);
  void TakePlace(const KeyPush& push) EXCLUDES(mutex_);

  void CheckKeyKindLocked(std::string_view call, KeyRef key) const REQUIRES(mutex_);
  void CheckNewLocked(std::string_view call, std::span<const KeyArrays> pairs) const
      REQUIRES(mutex_);
  const Slot* FindLocked(std::string_view call, KeyRef key) const REQUIRES(mutex_);
  Slot& InsertLocked(ValuePtr value) REQUIRES(mutex_);
  std::vector<Placement> PlanPlacementLocked(std::span<const KeyPush> pushes) REQUIRES(mutex_);
  ValuePtr Find(std::string_view call, KeyRef key) const EXCLUDES(mutex_);
  ValuePtr FindForPull(const KeyArrays& pair) const EXCLUDES(mutex_);  // checks the outputs' shapes
  ValuePtr FindForRowPull(const KeyRowPull& pull) const EXCLUDES(mutex_);  // checks all of it
  void TellIgnored(KeyRef key) EXCLUDES(mutex_);
  template <class Array>
  ValuePtr MakeValue(KeyRef key, const Array& like) const;
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
  UpdatersPtr updaters_ GUARDED_BY(mutex_);
  std::shared_ptr<Optimizer> optimizer_ GUARDED_BY(mutex_);
  std::shared_ptr<StatesOrigin> origin_ GUARDED_BY(mutex_);  // null: no optimizer was ever set
  std::shared_ptr<const Compressor> compressor_ GUARDED_BY(mutex_);
  bool pushed_ GUARDED_BY(mutex_) = false;
  std::int64_t num_update_ GUARDED_BY(mutex_) = 0;  // the most updates of any key with it
  std::size_t unplaced_ GUARDED_BY(mutex_) = 0;     // slots that are not placed
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

template <class Array>
LocalKVStore::ValuePtr LocalKVStore::MakeValue(KeyRef key, const Array& like) const {
  const Device device = merge_on_ == MergeOn::kCpu ? Cpu() : like.device();
  return std::make_shared<StoredValue>(key.ToKey(), like, device, engine());
}

LocalKVStore::Slot& LocalKVStore::InsertLocked(ValuePtr value) {
  string_keys_ = std::holds_alternative<std::string>(value->key());
  Slot& slot = slots_[value->key()];
  slot.number = keys_made_++;
  slot.placed = merge_on_ == MergeOn::kCpu || value->is_row_sparse();
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
  for (const KeyArrays& pair : pairs) {
    values.push_back(
        WithFirstArray(pair, [&](const auto& like) { return MakeValue(pair.key, like); }));
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    WithFirstArray(pairs[i], [&](const auto& value) { values[i]->QueueInitialize(value); });
  }
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
    WithFirstArray(values[i], [&](const auto& value) {
      ForEachArray(out[i],
                   [&](const auto& array) { CheckShape("Broadcast", out[i].key, value, array); });
    });
  }
  CheckOneKind("Broadcast", values);
  CheckDistinct("Broadcast", values);
  InitChecked("Broadcast", values);
  DoPull(out, priority, /*ignore_sparse=*/true);
}

void LocalKVStore::DoReset(const KeyArrays& value) {
  const KeyRef key = value.key;
  CheckOneArray("Reset", value, engine());
  ValuePtr stored = Find("Reset", key);
  ForEachArray(value, [&](const auto& array) {
    CheckShapeAndDType("Reset", key, *stored, array);
    array.WaitToRead();
  });
  const bool row_sparse = !value.row_sparse.empty();
  ValuePtr other;                            // comes in place of a value of the other kind
  std::shared_ptr<StatesOrigin> old_origin;  // dropped after the lock
  std::uint64_t origin_number = 0;
  for (;;) {
    if (stored->is_row_sparse() != row_sparse) {
      WithFirstArray(value, [&](const auto& array) {
        other = std::make_shared<StoredValue>(key.ToKey(), array, stored->device(), engine());
        other->QueueInitialize(array);
      });
      other->WaitUntilInitialized();
    }
    MutexLock lock(mutex_);
    const auto found = slots_.find(key);
    if (found == slots_.end()) ThrowUnknownKey("Reset", key);
    Slot& slot = found->second;
    stored = slot.value;
    const bool same_kind = stored->is_row_sparse() == row_sparse;
    if (!same_kind && other == nullptr) continue;  // another thread has changed it meanwhile
    old_origin.swap(slot.origin);
    origin_number = OriginNumberLocked();
    // Only values that no op has written may move to another device.
    if (!std::exchange(slot.placed, true)) --unplaced_;
    if (same_kind) break;
    slot.value = std::move(other);
    return;
  }
  ForEachArray(value,
               [&](const auto& array) { StoredValue::QueueReset(stored, array, origin_number); });
}

// ---- Push and pull

void LocalKVStore::SetUpdaters(Updaters updaters) {
  if (!updaters.dense && !updaters.row_sparse && !updaters.row_sparse_on_dense) {
    throw InvalidArgument("SetUpdaters: expected one function at least, got none");
  }
  auto shared = std::make_shared<const Updaters>(std::move(updaters));
  std::shared_ptr<Optimizer> old_optimizer;  // dropped after the lock, as are the old updaters
  MutexLock lock(mutex_);
  updaters_.swap(shared);
  optimizer_.swap(old_optimizer);
}

void LocalKVStore::SetOptimizer(std::shared_ptr<Optimizer> optimizer) {
  if (optimizer == nullptr) throw InvalidArgument("SetOptimizer: expected an optimizer, got null");
  const bool multi_precision = optimizer->plan()->multi_precision;
  UpdatersPtr old_updaters;  // dropped after the lock, as is the old optimizer
  MutexLock lock(mutex_);
  origin_ = std::make_shared<StatesOrigin>(OriginNumberLocked() + 1, multi_precision);
  optimizer_.swap(optimizer);
  updaters_.swap(old_updaters);
  num_update_ = 0;
}

// ---- States of the optimizer

std::shared_ptr<Optimizer> LocalKVStore::OptimizerFor(std::string_view call) const {
  MutexLock lock(mutex_);
  if (optimizer_ != nullptr) return optimizer_;
  throw InvalidState(fmt::format("{}: expected a store with an optimizer, got one {}", call,
                                 updaters_ != nullptr ? "with an updater" : "without"));
}

void LocalKVStore::SaveOptimizerStates(const std::string& file, bool with_optimizer) {
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor("SaveOptimizerStates");
  const auto plan = optimizer->plan();
  OptimizerStates states;
  states.optimizer = optimizer->name();
  states.multi_precision = plan->multi_precision;
  if (with_optimizer) states.settings = SettingsOf(*optimizer);

  struct Saved {
    std::uint64_t number;
    ValuePtr value;
    std::shared_ptr<const StatesOrigin> origin;  // null: no push so far
    std::shared_ptr<KeyStates> out;
  };
  std::vector<Saved> saved;
  std::uint64_t origin_number = 0;
  {
    MutexLock lock(mutex_);
    origin_number = OriginNumberLocked();
    states.num_update = num_update_;
    for (const auto& [key, slot] : slots_) {
      auto out = std::make_shared<KeyStates>();
      out->key = key;
      out->shape = slot.value->shape();
      out->dtype = slot.value->dtype();
      const bool has_states = HasStatesLocked(slot);
      if (has_states) out->updates = slot.updates;
      saved.push_back({slot.number, slot.value, has_states ? slot.origin : nullptr, out});
    }
  }
  std::ranges::sort(saved, {}, &Saved::number);
  for (const Saved& key : saved) {
    if (key.origin != nullptr) StoredValue::QueueSnapshot(key.value, key.origin, key.out);
  }
  for (const Saved& key : saved) {
    if (key.origin != nullptr) key.value->Wait();
    states.keys.push_back(*key.out);
  }
  {
    MutexLock lock(mutex_);
    if (optimizer_ != optimizer || OriginNumberLocked() != origin_number) {
      throw InvalidState(
          "SaveOptimizerStates: another thread has set another optimizer, or loaded its states, "
          "meanwhile");
    }
  }
  WriteStates(file, states, *plan->rule);
}

// The keys of the store, all of them and no others, with their shapes and dtypes.
void LocalKVStore::CheckStatesLocked(const std::string& file, const OptimizerStates& states) const {
  constexpr std::string_view kCall = "LoadOptimizerStates";
  KeyTable<const KeyStates*> given;
  for (const KeyStates& key : states.keys) {
    const auto found = slots_.find(key.key);
    if (found == slots_.end()) {
      throw InvalidArgument(
          fmt::format("{}: {}: expected states of the keys of this store, got some "
                      "of key {}, which it does not have",
                      kCall, file, ToString(key.key)));
    }
    const StoredValue& value = *found->second.value;
    if (key.shape != value.shape()) ThrowShape(kCall, key.key, value.shape(), key.shape);
    if (key.dtype != value.dtype()) ThrowDType(kCall, key.key, value.dtype(), key.dtype);
    if (!given.emplace(key.key, &key).second) {
      throw InvalidArgument(fmt::format("{}: {}: expected each key once, got {} twice", kCall, file,
                                        ToString(key.key)));
    }
  }
  for (const auto& [key, slot] : slots_) {
    if (given.find(key) != given.end()) continue;
    throw InvalidArgument(
        fmt::format("{}: {}: expected states of key {}, got none", kCall, file, ToString(key)));
  }
}

void LocalKVStore::LoadOptimizerStates(const std::string& file) {
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor("LoadOptimizerStates");
  const auto plan = optimizer->plan();
  const OptimizerStates states = ReadStates(file, optimizer->name(), *plan->rule, engine());
  if (states.multi_precision != plan->multi_precision) {
    throw InvalidArgument(
        fmt::format("LoadOptimizerStates: {}: expected states with multi_precision {}, got {}",
                    file, plan->multi_precision, states.multi_precision));
  }
  std::vector<std::unique_ptr<UpdateState>> loaded;
  for (const KeyStates& key : states.keys) {
    auto state = std::make_unique<UpdateState>(states.multi_precision);
    state->restored_master = key.master;
    state->restored = key.arrays;
    state->numbers = key.numbers;
    state->step = key.step;
    loaded.push_back(std::move(state));
  }
  std::vector<std::shared_ptr<StatesOrigin>> origins;  // in the end the old ones
  MutexLock lock(mutex_);
  if (optimizer_ != optimizer) {
    throw InvalidState("LoadOptimizerStates: another thread has set another optimizer meanwhile");
  }
  CheckStatesLocked(file, states);
  const std::uint64_t number = OriginNumberLocked() + 1;
  auto origin = std::make_shared<StatesOrigin>(number, states.multi_precision);
  for (std::unique_ptr<UpdateState>& state : loaded) {
    origins.push_back(
        std::make_shared<StatesOrigin>(number, states.multi_precision, std::move(state)));
  }
  if (states.settings) ApplySettings(*states.settings, *optimizer);
  // From here on nothing fails.
  origin_ = std::move(origin);
  num_update_ = states.num_update;
  for (std::size_t i = 0; i < origins.size(); ++i) {
    Slot& slot = slots_.find(states.keys[i].key)->second;
    slot.origin.swap(origins[i]);
    slot.updates = states.keys[i].updates;
  }
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
    std::string_view call, std::span<const KeyArrays> pairs, std::vector<std::size_t>* index_of) {
  const auto join = [](auto& arrays, auto& joined, const auto& more) {
    if (joined.empty()) joined.assign(arrays.begin(), arrays.end());
    joined.insert(joined.end(), more.begin(), more.end());
    arrays = joined;
  };
  std::vector<KeyPush> pushes;
  pushes.reserve(pairs.size());
  std::unordered_map<KeyRef, std::size_t, KeyHash, KeyEqual> places;
  for (const KeyArrays& pair : pairs) {
    const auto [place, is_new] = places.emplace(pair.key, pushes.size());
    if (index_of != nullptr) index_of->push_back(place->second);
    if (is_new) {
      pushes.emplace_back(pair);
      continue;
    }
    KeyPush& push = pushes[place->second];
    if (push.is_row_sparse() != !pair.row_sparse.empty()) {
      throw InvalidArgument(
          fmt::format("{}: key {}: expected arrays of one kind, got dense and row-sparse ones",
                      call, ToString(pair.key)));
    }
    if (push.is_row_sparse()) {
      join(push.row_sparse, push.joined_row_sparse, pair.row_sparse);
    } else {
      join(push.arrays, push.joined, pair.arrays);
    }
  }
  return pushes;
}

// What the first push of a key settles: the device where its values are merged and updated. Lists
// of values place all keys that wait for it, so that the largest come first; values alone stay
// where they are. Row-sparse values have their device from the start. Changes nothing but
// placement_.
std::vector<LocalKVStore::Placement> LocalKVStore::PlanPlacementLocked(
    std::span<const KeyPush> pushes) {
  std::vector<Placement> plan;
  const auto is_new = [](const KeyPush& push) {
    return push.slot == nullptr && !push.is_row_sparse();
  };
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
      if (!slot.placed) plan.push_back({&slot, nullptr, slot.value->device()});
    }
    std::sort(plan.begin(), plan.end(), [](const Placement& a, const Placement& b) {
      return a.slot->number < b.slot->number;
    });
  }
  for (const KeyPush& push : pushes) {
    if (is_new(push)) {
      plan.push_back({nullptr, &push, push.arrays[0].device()});
    } else if (push.slot != nullptr && !push.slot->placed && devices.empty()) {
      plan.push_back({push.slot, &push, push.slot->value->device()});
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
    } else if (placement.slot->value->device() == placement.device) {
      placement.value = placement.slot->value;
    } else {
      placement.value = placement.slot->value->MovedTo(placement.device);
    }
  }
  return plan;
}

void LocalKVStore::CheckCompressionLocked(std::string_view call, const KeyPush& push) const {
  if (push.is_row_sparse()) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: expected dense arrays, since gradient compression {} is set, got row-sparse "
        "ones",
        call, ToString(push.key), compressor_->options().type));
  }
  if (!IsCompressible(push.arrays[0].dtype())) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: expected float32, float16 or bfloat16, since gradient compression {} is "
        "set, got {}",
        call, ToString(push.key), compressor_->options().type, Name(push.arrays[0].dtype())));
  }
}

void LocalKVStore::CheckKindsLocked(std::string_view call, const KeyPush& push) const {
  if (updaters_ == nullptr && optimizer_ == nullptr) return;
  const bool onto_row_sparse = push.value->is_row_sparse();
  if (onto_row_sparse && !push.is_row_sparse()) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected row-sparse arrays, as the value is and an {} is set, got "
                    "dense ones",
                    call, ToString(push.key), updaters_ != nullptr ? "updater" : "optimizer"));
  }
  if (updaters_ == nullptr) return;
  if (push.value->IsInUpdater()) {
    throw InvalidState(
        fmt::format("{}: key {} is pushed from inside its own updater", call, ToString(push.key)));
  }
  const bool has_function = !push.is_row_sparse() ? updaters_->dense != nullptr
                            : onto_row_sparse     ? updaters_->row_sparse != nullptr
                                                  : updaters_->row_sparse_on_dense != nullptr;
  if (!has_function) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: expected an updater for {} arrays and a {} value, got none by SetUpdaters",
        call, ToString(push.key), push.is_row_sparse() ? "row-sparse" : "dense",
        onto_row_sparse ? "row-sparse" : "dense"));
  }
}

void LocalKVStore::CheckOptimizerLocked(std::string_view call, const KeyPush& push,
                                        const internal::UpdatePlan& plan) const {
  if (!IsFloating(push.value->dtype())) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected a floating dtype for optimizer {}, got {}", call,
                    ToString(push.key), optimizer_->name(), Name(push.value->dtype())));
  }
  const std::string refusal =
      plan.rule->Refusal({.dimensions = static_cast<int>(push.value->shape().ndim()),
                          .weight_decay = plan.WeightDecay(push.key),
                          .row_sparse = push.is_row_sparse()});
  if (!refusal.empty()) {
    throw InvalidArgument(fmt::format("{}: key {}: optimizer {}: {}", call, ToString(push.key),
                                      optimizer_->name(), refusal));
  }
}

LocalKVStore::UpdatersPtr LocalKVStore::PreparePush(std::string_view call,
                                                    std::span<KeyPush> pushes) {
  for (const KeyPush& push : pushes) {
    WithFirstArray(push, [&](const auto& first) {
      ForEachArray(push,
                   [&](const auto& array) { CheckShapeAndDType(call, push.key, first, array); });
    });
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
      WithFirstArray(
          push, [&](const auto& first) { CheckShapeAndDType(call, push.key, *push.value, first); });
      CheckKindsLocked(call, push);
    } else if (strict_init_ || updaters_ != nullptr || optimizer_ != nullptr) {
      throw UnknownKey(fmt::format(
          "{}: key {} was never initialised: expected Init before the first push, since {}", call,
          ToString(push.key),
          strict_init_ ? "the store was made with strict_init" : "an updater or optimizer is set"));
    }
    if (compressor_ != nullptr) CheckCompressionLocked(call, push);
    if (plan != nullptr) CheckOptimizerLocked(call, push, *plan);
  }
  // All is well; now what may run out of memory.
  const std::vector<Placement> placements = PlanPlacementLocked(pushes);
  for (KeyPush& push : pushes) {
    if (plan != nullptr) {
      push.update.rule = plan->rule;
    } else if (push.slot == nullptr && push.is_row_sparse()) {
      push.value = MakeValue(push.key, push.row_sparse[0]);
    } else if (updaters_ == nullptr && push.slot != nullptr &&
               push.is_row_sparse() != push.value->is_row_sparse()) {
      push.old = push.value;
      push.value = WithFirstArray(push, [&](const auto& like) {
        return std::make_shared<StoredValue>(push.key.ToKey(), like, push.old->device(), engine());
      });
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
    if (push.slot == nullptr && push.is_row_sparse()) InsertLocked(push.value);
    // A slot may go once the lock is released, its value stays.
    Slot& slot =
        push.slot != nullptr ? *std::exchange(push.slot, nullptr) : slots_.find(push.key)->second;
    (push.old != nullptr ? push.old : push.value) = slot.value;
    push.compressor = compressor_;
    for (const NDArray& array : push.arrays) {
      pushed_bytes += compressor_ != nullptr ? compressor_->CodeBytes(array.size()) : array.bytes();
    }
    if (plan == nullptr) continue;
    if (!HasStatesLocked(slot)) {
      slot.origin = origin_;
      slot.updates = 0;
    }
    push.update.origin = slot.origin;
    num_update_ = std::max(num_update_, ++slot.updates);
    push.update.learning_rate = plan->LearningRate(push.key, num_update_);
    push.update.weight_decay = plan->WeightDecay(push.key);
  }
  pushed_bytes_.fetch_add(pushed_bytes, std::memory_order_relaxed);
  return updaters_;
}

void LocalKVStore::QueuePush(std::span<KeyPush> pushes, const UpdatersPtr& updaters, int priority) {
  for (KeyPush& push : pushes) {
    const auto queue = [&](const auto& arrays) {
      if (updaters != nullptr) {
        StoredValue::RunUpdater(push.value, arrays, std::move(push.compressor), *updaters,
                                priority);
      } else if (push.old != nullptr) {
        StoredValue::QueueReplace(push.value, push.old, arrays, std::move(push.compressor),
                                  priority);
        TakePlace(push);
      } else {
        StoredValue::QueuePush(push.value, arrays, std::move(push.compressor),
                               std::move(push.update), priority);
      }
    };
    if (push.is_row_sparse()) {
      queue(push.row_sparse);
    } else {
      queue(push.arrays);
    }
  }
}

void LocalKVStore::QueuePull(const ValuePtr& value, std::span<const NDArray> out, int priority) {
  StoredValue::QueuePull(value, out, priority);
  std::int64_t bytes = 0;
  for (const NDArray& array : out) bytes += array.bytes();
  pulled_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

// Only now that the op which gives it a value is queued, so that no pull finds it without. Whoever
// else put a value in the old one's place meanwhile came later.
void LocalKVStore::TakePlace(const KeyPush& push) {
  MutexLock lock(mutex_);
  const auto found = slots_.find(push.key);
  if (found == slots_.end() || found->second.value != push.old) return;
  found->second.value = push.value;
}

void LocalKVStore::DoPush(std::span<const KeyArrays> pairs, int priority) {
  for (const KeyArrays& pair : pairs) CheckArrays("Push", pair, engine());
  if (pairs.size() == 1) {
    KeyPush push(pairs[0]);
    const UpdatersPtr updaters = PreparePush("Push", {&push, 1});
    QueuePush({&push, 1}, updaters, priority);
    return;
  }
  CheckOneKind("Push", pairs);
  std::vector<KeyPush> pushes = JoinRepeatedKeys("Push", pairs, nullptr);
  const UpdatersPtr updaters = PreparePush("Push", pushes);
  QueuePush(pushes, updaters, priority);
}

void LocalKVStore::DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) {
  for (const KeyArrays& pair : pairs) CheckArrays("Pull", pair, engine());
  const auto pull = [&](const ValuePtr& value, const KeyArrays& pair) {
    if (!pair.arrays.empty()) {
      QueuePull(value, pair.arrays, priority);
    } else if (ignore_sparse) {
      TellIgnored(pair.key);
    } else {
      StoredValue::QueuePull(value, pair.row_sparse, priority);
    }
  };
  if (pairs.size() == 1) return pull(FindForPull(pairs[0]), pairs[0]);
  std::vector<ValuePtr> values;
  for (const KeyArrays& pair : pairs) values.push_back(FindForPull(pair));
  for (std::size_t i = 0; i < pairs.size(); ++i) pull(values[i], pairs[i]);
}

LocalKVStore::ValuePtr LocalKVStore::FindForPull(const KeyArrays& pair) const {
  ValuePtr value = Find("Pull", pair.key);
  ForEachArray(pair, [&](const auto& array) { CheckShape("Pull", pair.key, *value, array); });
  return value;
}

void LocalKVStore::TellIgnored(KeyRef key) {
  {
    MutexLock lock(mutex_);
    const auto found = slots_.find(key);
    if (found == slots_.end() || std::exchange(found->second.told_ignored, true)) return;
  }
  Log(LogLevel::kInfo,
      "pull of key {}: row-sparse outputs are left alone; RowSparsePull fills them, and so does "
      "Pull without ignore_sparse",
      ToString(key));
}

void LocalKVStore::DoRowSparsePull(std::span<const KeyRowPull> pulls, int priority) {
  std::vector<ValuePtr> values;
  for (const KeyRowPull& pull : pulls) values.push_back(FindForRowPull(pull));
  for (std::size_t i = 0; i < pulls.size(); ++i) {
    const auto& [key, out, row_ids] = pulls[i];
    if (row_ids.size() == 1) {
      StoredValue::QueueRowPull(values[i], out, row_ids[0], priority);
      continue;
    }
    for (std::size_t k = 0; k < out.size(); ++k) {
      StoredValue::QueueRowPull(values[i], out.subspan(k, 1), row_ids[k], priority);
    }
  }
}

LocalKVStore::ValuePtr LocalKVStore::FindForRowPull(const KeyRowPull& pull) const {
  constexpr std::string_view kCall = "RowSparsePull";
  CheckArrays(kCall, {pull.key, pull.out}, engine());
  CheckArrays(kCall, {pull.key, pull.row_ids}, engine());
  ValuePtr value = Find(kCall, pull.key);
  if (!value->is_row_sparse()) {
    throw InvalidArgument(fmt::format("{}: key {}: expected a row-sparse value, got a dense one",
                                      kCall, ToString(pull.key)));
  }
  for (const RowSparseNDArray& array : pull.out) CheckShape(kCall, pull.key, *value, array);
  for (const NDArray& ids : pull.row_ids) {
    if (ids.dtype() == DType::kBool) {
      throw InvalidArgument(fmt::format("{}: key {}: expected row ids of a numeric dtype, got bool",
                                        kCall, ToString(pull.key)));
    }
  }
  return value;
}

void LocalKVStore::DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                              int priority) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckArrays("PushPull", values[i], engine());
    CheckArrays("PushPull", out[i], engine());
    WithFirstArray(values[i], [&](const auto& value) {  // which is checked against the stored one
      ForEachArray(out[i],
                   [&](const auto& array) { CheckShape("PushPull", out[i].key, value, array); });
    });
  }
  CheckOneKind("PushPull", values);
  std::vector<std::size_t> push_of;
  std::vector<KeyPush> pushes = JoinRepeatedKeys("PushPull", values, &push_of);
  const UpdatersPtr updaters = PreparePush("PushPull", pushes);
  QueuePush(pushes, updaters, priority);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].arrays.empty()) {
      TellIgnored(out[i].key);
    } else {
      QueuePull(pushes[push_of[i]].value, out[i].arrays, priority);
    }
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
