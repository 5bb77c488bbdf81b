#include <heddle/error.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "engine/fork.h"
#include "kvstore/local_kvstore.h"
#include "storage/array_state.h"

namespace heddle::kvstore {

namespace {

// Whole arrays, none of them twice. Of an array that several keys are pulled to the last wins, so
// these keep their order.
bool MayGoTogether(std::span<const KeyArrays> pairs) {
  std::vector<const void*> vars;
  for (const KeyArrays& pair : pairs) {
    for (const NDArray& array : pair.arrays) {
      const internal::ArrayState& state = internal::StateOf(array);
      if (state.is_partial) return false;
      vars.push_back(state.var.state());
    }
  }
  std::ranges::sort(vars);
  return std::ranges::adjacent_find(vars) == vars.end();
}

}  // namespace

void LocalKVStore::QueuePulls(std::span<const ValuePtr> values, std::span<const KeyArrays> pairs,
                              int priority, bool ignore_sparse) {
  const bool together =
      pairs.size() > 1 &&
      std::ranges::any_of(values, [](const ValuePtr& value) { return IsOnGpu(value->device()); }) &&
      MayGoTogether(pairs);
  std::vector<StoredValue::KeyOutputs> on_gpus;
  const std::int64_t pulled_before = pulled_bytes_.load(std::memory_order_relaxed);
  std::int64_t pulled_bytes = 0;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto& [key, arrays, row_sparse] = pairs[i];
    const ValuePtr& value = values[i];
    for (const NDArray& array : arrays) pulled_bytes += internal::StateOf(array).bytes;
    if (!arrays.empty() && together && IsOnGpu(value->device()) && !value->is_row_sparse()) {
      if (on_gpus.empty()) on_gpus.reserve(pairs.size());
      on_gpus.push_back({value, arrays});
    } else if (!arrays.empty()) {
      value->NotePull(pulled_before);
      StoredValue::QueuePull(value, arrays, priority);
    } else if (ignore_sparse) {
      TellIgnored(key);
    } else {
      StoredValue::QueuePull(value, row_sparse, priority);
    }
  }
  if (!on_gpus.empty()) StoredValue::QueuePulls(on_gpus, priority);
  pulled_bytes_.fetch_add(pulled_bytes, std::memory_order_relaxed);
}

void LocalKVStore::DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) {
  if (pairs.size() == 1) internal::PrefetchCounts(pairs[0].arrays);
  for (const KeyArrays& pair : pairs) CheckArrays("Pull", pair, engine());
  if (pairs.size() == 1) {
    const ValuePtr value = FindForPull(pairs[0]);
    return QueuePulls({&value, 1}, pairs, priority, ignore_sparse);
  }
  std::vector<ValuePtr> values;
  values.reserve(pairs.size());
  for (const KeyArrays& pair : pairs) values.push_back(FindForPull(pair));
  QueuePulls(values, pairs, priority, ignore_sparse);
}

LocalKVStore::ValuePtr LocalKVStore::FindForPull(const KeyArrays& pair) const {
  ValuePtr value = Find("Pull", pair.key);
  ForEachArray(pair, [&](const auto& array) { CheckShape("Pull", pair.key, *value, array); });
  return value;
}

void LocalKVStore::TellIgnored(KeyRef key) {
  {
    const engine::CallLock lock(mutex_, "a store");
    const auto found = slots_.find(key);
    if (found == slots_.end() || std::exchange(found->second.told_ignored, true)) return;
  }
  TellSparseIgnored(key);
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
  CheckRowPull(pull, engine());
  ValuePtr value = Find("RowSparsePull", pull.key);
  CheckRowPullOf(*value, pull);
  return value;
}

}  // namespace heddle::kvstore
