#include <heddle/error.h>

#include <utility>

#include <fmt/format.h>

#include "kvstore/local_kvstore.h"

namespace heddle::kvstore {

void LocalKVStore::QueuePull(const ValuePtr& value, std::span<const NDArray> out, int priority) {
  StoredValue::QueuePull(value, out, priority);
  std::int64_t bytes = 0;
  for (const NDArray& array : out) bytes += array.bytes();
  pulled_bytes_.fetch_add(bytes, std::memory_order_relaxed);
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
  if (pairs.size() == 1) return pull(FindForPull(pairs[0], ignore_sparse), pairs[0]);
  std::vector<ValuePtr> values;
  for (const KeyArrays& pair : pairs) {
    values.push_back(FindForPull(pair, ignore_sparse));
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) pull(values[i], pairs[i]);
}

LocalKVStore::ValuePtr LocalKVStore::FindForPull(const KeyArrays& pair, bool ignore_sparse) const {
  ValuePtr value = Find("Pull", pair.key);
  ForEachArray(pair, [&](const auto& array) { CheckShape("Pull", pair.key, *value, array); });
  if (!pair.row_sparse.empty() && !ignore_sparse && IsOnGpu(value->device())) {
    throw InvalidArgument(
        fmt::format("Pull: key {}: expected dense arrays, as the value lies on {}, got row-sparse "
                    "ones",
                    ToString(pair.key), ToString(value->device())));
  }
  return value;
}

void LocalKVStore::TellIgnored(KeyRef key) {
  {
    MutexLock lock(mutex_);
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
