#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "base/place_table.h"
#include "engine/fork.h"
#include "kvstore/local_kvstore.h"
#include "kvstore/optimizer/update_plan.h"
#include "storage/array_state.h"
#include "storage/row_sparse_state.h"

namespace heddle::kvstore {

std::vector<LocalKVStore::KeyPush> LocalKVStore::JoinRepeatedKeys(
    std::string_view call, std::span<const KeyArrays> pairs, std::vector<std::size_t>* index_of) {
  const auto join = [](auto& arrays, auto& joined, const auto& more) {
    if (joined.empty()) joined.assign(arrays.begin(), arrays.end());
    joined.insert(joined.end(), more.begin(), more.end());
    arrays = joined;
  };
  std::vector<KeyPush> pushes;
  pushes.reserve(pairs.size());
  PlaceTable places(pairs.size());
  for (const KeyArrays& pair : pairs) {
    const auto [place, is_new] =
        places.Find(KeyHash()(pair.key), pushes.size(),
                    [&](std::size_t known) { return pushes[known].key == pair.key; });
    if (index_of != nullptr) index_of->push_back(place);
    if (is_new) {
      pushes.emplace_back(pair);
      continue;
    }
    KeyPush& push = pushes[place];
    if (push.is_row_sparse() != !pair.row_sparse.empty()) {
      ThrowMixedKinds(call, pair.key);
    }
    if (push.is_row_sparse()) {
      join(push.row_sparse, push.joined_row_sparse, pair.row_sparse);
    } else {
      join(push.arrays, push.joined, pair.arrays);
    }
    CheckArrayCount(call, pair.key, push.arrays.size() + push.row_sparse.size());
  }
  return pushes;
}

// Whether a value goes to the GPUs that push row-sparse arrays onto it: not one that these make,
// nor a dense one that they replace.
bool LocalKVStore::MayFollowRowsLocked(const KeyPush& push) const {
  return push.value != nullptr &&
         (updaters_ != nullptr || optimizer_ != nullptr || push.value->is_row_sparse());
}

// What the first push of a key settles: the device where its values are merged and updated. Lists
// of values place all keys that wait for it, so that the largest come first; values alone stay
// where they are. Row-sparse values, which wait for it on CPUs, go to GPUs or stay. Changes nothing
// but placement_.
std::vector<LocalKVStore::Placement> LocalKVStore::PlanPlacementLocked(
    std::span<const KeyPush> pushes) {
  std::vector<Placement> plan;
  const auto is_new = [](const KeyPush& push) {
    return push.slot == nullptr && !push.is_row_sparse();
  };
  if (unplaced_ == 0 && std::none_of(pushes.begin(), pushes.end(), is_new)) return plan;

  std::vector<Device> devices;
  for (const KeyPush& push : pushes) {
    if (push.arrays.size() + push.row_sparse.size() == 1) continue;
    const bool gpus_only = push.is_row_sparse();
    if (gpus_only && !MayFollowRowsLocked(push)) continue;
    ForEachArray(push, [&](const auto& array) {
      const Device device = array.device();
      if (gpus_only && !IsOnGpu(device)) return;
      if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
        devices.push_back(device);
      }
    });
  }
  std::vector<Device> gpus;
  std::ranges::copy_if(devices, std::back_inserter(gpus), &IsOnGpu);
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
      const Device device = push.slot->value->device();
      const Device pushing = WithFirstArray(push, [](const auto& array) { return array.device(); });
      const bool follows = !push.is_row_sparse() || MayFollowRowsLocked(push);
      plan.push_back(
          {push.slot, &push, follows && !IsOnGpu(device) && IsOnGpu(pushing) ? pushing : device});
    }
  }

  if (merge_on_ == MergeOn::kCpu) {
    for (Placement& placement : plan) placement.device = Cpu();
  } else if (devices.empty()) {
    for (Placement& placement : plan) {
      placement_.Place({{placement.bytes(), &placement.device}}, {{placement.device}});
    }
  } else {
    std::vector<MergePlacement::Item> items, rows;
    for (Placement& placement : plan) {
      (placement.is_row_sparse() ? rows : items).push_back({placement.bytes(), &placement.device});
    }
    placement_.Place(std::move(items), devices);
    if (!gpus.empty()) placement_.Place(std::move(rows), gpus);
  }

  for (Placement& placement : plan) {
    if (placement.slot == nullptr) {
      const KeyPush& push = *placement.push;
      placement.value = std::make_shared<StoredValue>(push.key.ToKey(), push.arrays[0],
                                                      placement.device, engine(), gpu_sums_);
    } else if (placement.slot->value->device() == placement.device) {
      placement.value = placement.slot->value;
    } else {
      placement.value = placement.slot->value->MovedTo(placement.device);
    }
  }
  return plan;
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

void LocalKVStore::CheckUpdateOnGpuLocked(std::string_view call, const KeyPush& push,
                                          bool gpu_pushes, const internal::UpdatePlan& plan) const {
  if (merge_on_ == MergeOn::kCpu) return;
  if (!IsOnGpu(push.value->device()) && (push.slot->placed || !gpu_pushes)) return;
  if (gpu_updates_.Has(*plan.rule)) return;
  throw InvalidArgument(fmt::format(
      "{}: key {}, merged on a GPU: expected an optimizer with kernels for GPUs, got {}", call,
      ToString(push.key), optimizer_->name()));
}

// What the next update of the key goes by: that of the last one unless rule or origin are others.
std::shared_ptr<const UpdateBasis> LocalKVStore::BasisLocked(
    const Slot& slot, const std::shared_ptr<const internal::UpdateRule>& rule) const {
  const std::shared_ptr<StatesOrigin>& origin = HasStatesLocked(slot) ? slot.origin : origin_;
  if (slot.basis != nullptr && slot.basis->rule == rule && slot.basis->origin == origin) {
    return slot.basis;
  }
  return std::make_shared<const UpdateBasis>(UpdateBasis{rule, origin});
}

LocalKVStore::UpdatersPtr LocalKVStore::PreparePush(std::string_view call,
                                                    std::span<KeyPush> pushes, int priority) {
  for (const KeyPush& push : pushes) {
    WithFirstArray(push, [&](const auto& first) {
      ForEachArray(push,
                   [&](const auto& array) { CheckShapeAndDType(call, push.key, first, array); });
    });
  }
  bool gpu_pushes = false;
  for (const KeyPush& push : pushes) {
    ForEachArray(push, [&](const auto& array) {
      gpu_pushes = gpu_pushes || internal::StateOf(array).is_on_gpu();
    });
  }
  const engine::CallLock lock(mutex_, "a store");
  std::shared_ptr<const internal::UpdatePlan> plan;
  if (optimizer_ != nullptr) plan = optimizer_->plan();
  for (KeyPush& push : pushes) {
    CheckKeyKind(call, push.key, string_keys_);
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
    if (compressor_ != nullptr) CheckCompression(call, push.kind(), *compressor_);
    if (plan == nullptr) continue;
    CheckUpdate(call, push.kind(), *optimizer_, *plan);
    CheckUpdateOnGpuLocked(call, push, gpu_pushes, *plan);
  }
  // All is well; now what may run out of memory.
  const std::vector<Placement> placements = PlanPlacementLocked(pushes);
  for (KeyPush& push : pushes) {
    if (plan != nullptr) {
      push.update.basis = BasisLocked(*push.slot, plan->rule);
    } else if (push.slot == nullptr && push.is_row_sparse()) {
      push.value = MakeValue(push.key, push.row_sparse[0]);
    } else if (updaters_ == nullptr && push.slot != nullptr &&
               push.is_row_sparse() != push.value->is_row_sparse()) {
      const auto placed = std::ranges::find(placements, push.slot, &Placement::slot);
      const ValuePtr old = placed != placements.end() ? placed->value : push.value;
      push.value = WithFirstArray(push, [&](const auto& like) {
        return std::make_shared<StoredValue>(push.key.ToKey(), like, old->device(), engine(),
                                             gpu_sums_);
      });
      push.value->WillReplace(old, push, compressor_, priority);
      push.replaces = true;
    }
  }
  // From here on nothing fails.
  pushed_ = pushed_ || !pushes.empty();
  std::int64_t pushed_bytes = 0;
  for (const Placement& placement : placements) {
    Slot& slot = placement.slot != nullptr ? *placement.slot : InsertLocked(placement.value);
    slot.value = placement.value;
    if (!std::exchange(slot.placed, true)) --unplaced_;
  }
  for (KeyPush& push : pushes) {
    if (push.slot == nullptr && push.is_row_sparse()) {
      if (!std::exchange(InsertLocked(push.value).placed, true)) --unplaced_;
    }
    // A slot may go once the lock is released, its value stays.
    Slot& slot =
        push.slot != nullptr ? *std::exchange(push.slot, nullptr) : slots_.find(push.key)->second;
    if (push.replaces) {
      slot.value = push.value;
    } else if (push.value != slot.value) {
      push.value = slot.value;
    }
    push.compressor = compressor_;
    for (const NDArray& array : push.arrays) {
      pushed_bytes += compressor_ != nullptr ? compressor_->CodeBytes(array.size())
                                             : internal::StateOf(array).bytes;
    }
    if (plan == nullptr) continue;
    if (!HasStatesLocked(slot)) {
      slot.origin = origin_;
      slot.updates = 0;
    }
    slot.basis = push.update.basis;
    num_update_ = std::max(num_update_, ++slot.updates);
    push.update.learning_rate = plan->LearningRate(push.key, num_update_);
    push.update.weight_decay = plan->WeightDecay(push.key);
  }
  pushed_bytes_.fetch_add(pushed_bytes, std::memory_order_relaxed);
  return updaters_;
}

void LocalKVStore::QueuePush(std::span<KeyPush> pushes, const UpdatersPtr& updaters, int priority) {
  std::vector<StoredValue::KeyGradients> on_gpus;
  for (KeyPush& push : pushes) {
    if (push.replaces) {
      StoredValue::QueueReplace(push.value);
      continue;
    }
    const bool plain = updaters == nullptr && push.compressor == nullptr;
    if (plain && pushes.size() > 1 && !push.is_row_sparse() && IsOnGpu(push.value->device())) {
      if (on_gpus.empty()) on_gpus.reserve(pushes.size());
      on_gpus.push_back({push.value, push.arrays, std::move(push.update)});
      continue;
    }
    const auto queue = [&](const auto& arrays) {
      if (updaters != nullptr) {
        StoredValue::RunUpdater(push.value, arrays, std::move(push.compressor), *updaters,
                                priority);
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
  if (!on_gpus.empty()) StoredValue::QueuePushes(on_gpus, priority);
}

void LocalKVStore::DoPush(std::span<const KeyArrays> pairs, int priority) {
  if (pairs.size() == 1) internal::PrefetchCounts(pairs[0].arrays);
  for (const KeyArrays& pair : pairs) CheckArrays("Push", pair, engine());
  if (pairs.size() == 1) {
    KeyPush push(pairs[0]);
    const UpdatersPtr updaters = PreparePush("Push", {&push, 1}, priority);
    QueuePush({&push, 1}, updaters, priority);
    return;
  }
  CheckOneKind("Push", pairs);
  std::vector<KeyPush> pushes = JoinRepeatedKeys("Push", pairs, nullptr);
  const UpdatersPtr updaters = PreparePush("Push", pushes, priority);
  QueuePush(pushes, updaters, priority);
}

void LocalKVStore::DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                              int priority) {
  CheckPushPull(values, out, engine());
  std::vector<std::size_t> push_of;
  std::vector<KeyPush> pushes = JoinRepeatedKeys("PushPull", values, &push_of);
  const UpdatersPtr updaters = PreparePush("PushPull", pushes, priority);
  QueuePush(pushes, updaters, priority);
  std::vector<ValuePtr> stored;
  for (const std::size_t push : push_of) stored.push_back(pushes[push].value);
  QueuePulls(stored, out, priority, /*ignore_sparse=*/true);
}

}  // namespace heddle::kvstore
