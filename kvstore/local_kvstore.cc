#include "kvstore/local_kvstore.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "engine/fork.h"
#include "engine/may_wait.h"

namespace heddle::kvstore {

const LocalKVStore::Slot* LocalKVStore::FindLocked(std::string_view call, KeyRef key) const {
  CheckKeyKind(call, key, string_keys_);
  const auto found = slots_.find(key);
  return found != slots_.end() ? &found->second : nullptr;
}

LocalKVStore::ValuePtr LocalKVStore::Find(std::string_view call, KeyRef key) const {
  const engine::CallLock lock(mutex_, "a store");
  const Slot* slot = FindLocked(call, key);
  if (slot == nullptr) ThrowUnknownKey(call, key);
  return slot->value;
}

template <class Array>
LocalKVStore::ValuePtr LocalKVStore::MakeValue(KeyRef key, const Array& like) const {
  const Device device = merge_on_ == MergeOn::kCpu ? Cpu() : like.device();
  return std::make_shared<StoredValue>(key.ToKey(), like, device, engine(), gpu_sums_);
}

// For other files.
template LocalKVStore::ValuePtr LocalKVStore::MakeValue(KeyRef, const NDArray&) const;
template LocalKVStore::ValuePtr LocalKVStore::MakeValue(KeyRef, const RowSparseNDArray&) const;

LocalKVStore::Slot& LocalKVStore::InsertLocked(ValuePtr value) {
  string_keys_ = std::holds_alternative<std::string>(value->key());
  Slot& slot = slots_[value->key()];
  slot.number = keys_made_++;
  const Device device = value->device();
  const bool stays = value->is_row_sparse() && IsOnGpu(device);
  if (stays) {
    Device same = device;
    placement_.Place({{value->bytes(), &same}}, {&device, 1});
  }
  slot.placed = merge_on_ == MergeOn::kCpu || stays;
  slot.value = std::move(value);
  if (!slot.placed) ++unplaced_;
  return slot;
}

std::vector<Key> LocalKVStore::Keys() const {
  std::vector<std::pair<std::uint64_t, Key>> numbered;
  {
    const engine::CallLock lock(mutex_, "a store");
    for (const auto& [key, slot] : slots_) numbered.emplace_back(slot.number, key);
  }
  std::sort(numbered.begin(), numbered.end());
  std::vector<Key> keys;
  for (auto& [number, key] : numbered) keys.push_back(std::move(key));
  return keys;
}

bool LocalKVStore::DoContains(KeyRef key) const {
  const engine::CallLock lock(mutex_, "a store");
  return FindLocked("Contains", key) != nullptr;
}

void LocalKVStore::DoRemove(KeyRef key) {
  ValuePtr value;  // dropped after the lock
  const engine::CallLock lock(mutex_, "a store");
  if (FindLocked("Remove", key) == nullptr) ThrowUnknownKey("Remove", key);
  const auto found = slots_.find(key);
  if (!found->second.placed) --unplaced_;
  value = std::move(found->second.value);
  slots_.erase(found);
}

void LocalKVStore::CheckNewLocked(std::string_view call, std::span<const KeyArrays> pairs) const {
  for (const KeyArrays& pair : pairs) {
    if (FindLocked(call, pair.key) != nullptr) ThrowNotNew(call, pair.key);
  }
}

void LocalKVStore::InitChecked(std::string_view call, std::span<const KeyArrays> pairs) {
  engine::CheckMayWait(call);
  {
    const engine::CallLock lock(mutex_, "a store");
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
  const engine::CallLock lock(mutex_, "a store");
  CheckNewLocked(call, pairs);
  for (ValuePtr& value : values) InsertLocked(std::move(value));
}

void LocalKVStore::DoInit(std::span<const KeyArrays> pairs) {
  CheckInit(pairs, engine());
  InitChecked("Init", pairs);
}

void LocalKVStore::DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                               int priority) {
  CheckBroadcast(values, out, engine());
  InitChecked("Broadcast", values);
  DoPull(out, priority, /*ignore_sparse=*/true);
}

void LocalKVStore::DoReset(const KeyArrays& value) {
  const KeyRef key = value.key;
  engine::CheckMayWait("Reset");
  CheckOneArray("Reset", value, engine());
  ValuePtr stored = Find("Reset", key);
  ForEachArray(value, [&](const auto& array) {
    CheckShapeAndDType("Reset", key, *stored, array);
    array.WaitToRead();
  });
  const bool row_sparse = !value.row_sparse.empty();
  ValuePtr other;                            // comes in place of a value of the other kind
  std::shared_ptr<StatesOrigin> old_origin;  // dropped after the lock, as is what holds it, too
  std::shared_ptr<const UpdateBasis> old_basis;
  std::uint64_t origin_number = 0;
  for (;;) {
    if (stored->is_row_sparse() != row_sparse) {
      WithFirstArray(value, [&](const auto& array) {
        other = std::make_shared<StoredValue>(key.ToKey(), array, stored->device(), engine(),
                                              gpu_sums_);
        other->QueueInitialize(array);
      });
      other->WaitUntilInitialized();
    }
    const engine::CallLock lock(mutex_, "a store");
    const auto found = slots_.find(key);
    if (found == slots_.end()) ThrowUnknownKey("Reset", key);
    Slot& slot = found->second;
    stored = slot.value;
    // Another thread may have removed the key meanwhile and made it anew.
    ForEachArray(value,
                 [&](const auto& array) { CheckShapeAndDType("Reset", key, *stored, array); });
    const bool same_kind = stored->is_row_sparse() == row_sparse;
    if (!same_kind && other == nullptr) continue;  // nor need it be of the kind that it was
    old_origin.swap(slot.origin);
    old_basis.swap(slot.basis);
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

std::unique_ptr<KVStore> MakeLocalStore(Engine& engine, const KVStoreOptions& options) {
  return std::make_unique<LocalKVStore>(engine, options, MergeOn::kCpu);
}

std::unique_ptr<KVStore> MakeDeviceStore(Engine& engine, const KVStoreOptions& options) {
  return std::make_unique<LocalKVStore>(engine, options, MergeOn::kPushingDevices);
}

}  // namespace heddle::kvstore
