#include <heddle/error.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "engine/fork.h"
#include "kvstore/checks.h"
#include "kvstore/dist/worker/call_batch.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/dist/worker/staged_parts.h"
#include "kvstore/near_arrays.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore::dist {

void DistKVStore::CheckPull(std::string_view call, const KeyArrays& pair,
                            const DistKey& key) const {
  ForEachArray(pair, [&](const auto& array) { CheckShape(call, pair.key, key, array); });
}

void DistKVStore::TellIgnored(DistKey& key) {
  {
    const engine::CallLock lock(mutex_, "a store");
    if (std::exchange(key.told_ignored, true)) return;
  }
  TellSparseIgnored(key.key());
}

namespace {

// Values travel as the smaller of what is stored and what is wanted.
DType TravelDType(DType stored, DType wanted) {
  return IsFloating(stored) && IsFloating(wanted) && SizeOf(wanted) < SizeOf(stored) ? wanted
                                                                                     : stored;
}

// Of several outputs none may get less than it asks for.
DType TravelDType(DType stored, std::span<const NDArray> out) {
  const DType first = TravelDType(stored, out[0].dtype());
  const bool alike = std::ranges::all_of(
      out, [&](const NDArray& array) { return TravelDType(stored, array.dtype()) == first; });
  return alike ? first : stored;
}

// What receives the rows for `out`: its first array, from which the others are copied, or one of
// the stored dtype, if theirs differ.
RowSparseNDArray ReceiverOf(const DistKey& key, std::span<const RowSparseNDArray> out) {
  const DType first = out[0].dtype();
  const bool alike = std::ranges::all_of(
      out, [&](const RowSparseNDArray& array) { return array.dtype() == first; });
  return alike ? out[0] : RowSparseNDArray(key.shape(), key.dtype(), Cpu(), out[0].engine());
}

void CopyToAll(const RowSparseNDArray& from, std::span<const RowSparseNDArray> out, int priority) {
  for (const RowSparseNDArray& array : out) {
    if (!array.IsSameAs(from)) from.CopyTo(array, priority);
  }
}

}  // namespace

// What the first output is, of the parts that travel: they go to outputs like it as they come.
void DistKVStore::QueueStagedPull(const KeyPtr& key, std::span<const NDArray> out, int priority) {
  const IncomingParts incoming(key, out[0]);
  CallOptions options = OptionsOf(Kind::kPull, *key, priority);
  options.dtype = out[0].dtype();
  const auto call = PartsCall::Make(calls_, key, options);
  call->TellArrivals(incoming.arrivals());
  PushOpOf(call, engine(),
           {.name = "kvstore.pull", .writes = {incoming.pinned().var()}, .priority = priority},
           [into = incoming.pinned()](PartsCall& parts) {
             parts.SendNothing();
             parts.ReceiveElements(into);
           });
  incoming.QueueArrivals(priority);
  std::vector<NDArray> others;
  for (const NDArray& array : out) {
    if (IsOnGpu(array.device()) && array.dtype() == options.dtype) {
      incoming.CopyTo(array, priority);
    } else {
      others.push_back(array);
    }
  }
  if (!others.empty()) {
    const RelayedOutputs<NDArray> outputs(others, Cpu());
    for (const NDArray& array : outputs.near()) incoming.pinned().CopyTo(array, priority);
    outputs.Forward(priority);
  }
  pulled_bytes_.fetch_add(incoming.pinned().bytes(), std::memory_order_relaxed);
}

void DistKVStore::QueuePull(const KeyPtr& key, std::span<const NDArray> out, int priority) {
  if (StagedParts::Suits(*key, out[0]) && out[0].dtype() == TravelDType(key->dtype(), out)) {
    return QueueStagedPull(key, out, priority);
  }
  if (NeedRelays(out, Cpu())) {
    const RelayedOutputs<NDArray> outputs(out, Cpu());
    QueuePull(key, outputs.near(), priority);
    outputs.Forward(priority);
    return;
  }
  CallOptions options = OptionsOf(Kind::kPull, *key, priority);
  if (key->is_row_sparse()) {  // comes as rows, and is made dense here
    const RowSparseNDArray rows(key->shape(), key->dtype(), Cpu(), engine());
    QueuePull(key, {&rows, 1}, priority);
    for (const NDArray& array : out) rows.CopyTo(array, priority);
    return;
  }
  options.dtype = TravelDType(key->dtype(), out);
  const auto fits = std::ranges::find(out, options.dtype, &NDArray::dtype);
  const NDArray first =
      fits != out.end() ? *fits : NDArray(key->shape(), options.dtype, Cpu(), engine());
  OpOptions op{.name = "kvstore.pull", .writes = {first.var()}, .priority = priority};
  if (first.is_partial()) op.reads = {first.var()};
  PushOpOf(PartsCall::Make(calls_, key, options), engine(), op, [first](PartsCall& parts) {
    parts.SendNothing();
    parts.ReceiveElements(first);
  });
  for (auto array = out.begin(); array != out.end(); ++array) {
    if (array != fits) first.CopyTo(*array, priority);
  }
  pulled_bytes_.fetch_add(first.bytes(), std::memory_order_relaxed);
}

void DistKVStore::QueuePull(const KeyPtr& key, std::span<const RowSparseNDArray> out,
                            int priority) {
  if (!AreNear(out, Cpu())) {
    const RelayedOutputs<RowSparseNDArray> outputs(out, Cpu());
    QueuePull(key, outputs.near(), priority);
    outputs.Forward(priority);
    return;
  }
  if (!key->is_row_sparse()) {
    const NDArray dense(key->shape(), key->dtype(), Cpu(), engine());
    QueuePull(key, {&dense, 1}, priority);
    for (const RowSparseNDArray& array : out) {
      RowSparseNDArray::FromDense(dense, priority).CopyTo(array, priority);
    }
    return;
  }
  CallOptions options = OptionsOf(Kind::kPull, *key, priority);
  const RowSparseNDArray first = ReceiverOf(*key, out);
  options.dtype = first.dtype();
  PushOpOf(PartsCall::Make(calls_, key, options), engine(),
           {.name = "kvstore.pull", .writes = {first.var()}, .priority = priority},
           [first](PartsCall& parts) {
             parts.SendNothing();
             parts.ReceiveRows(first);
           });
  CopyToAll(first, out, priority);
}

void DistKVStore::DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) {
  for (const KeyArrays& pair : pairs) CheckArrays("Pull", pair, engine());
  const KeyPtrs keys = FindAll("Pull", pairs);
  for (std::size_t i = 0; i < pairs.size(); ++i) CheckPull("Pull", pairs[i], *keys[i]);
  const CallBatch together(*link_, pairs.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (!pairs[i].arrays.empty()) {
      QueuePull(keys[i], pairs[i].arrays, priority);
    } else if (ignore_sparse) {
      TellIgnored(*keys[i]);
    } else {
      QueuePull(keys[i], pairs[i].row_sparse, priority);
    }
  }
}

void DistKVStore::QueueRowPull(const KeyPtr& key, std::span<const RowSparseNDArray> out,
                               const NDArray& ids, int priority) {
  const std::span<const NDArray> ids_list(&ids, 1);
  if (!AreNear(out, Cpu()) || !AreNear(ids_list, Cpu())) {
    const RelayedOutputs<RowSparseNDArray> outputs(out, Cpu());
    QueueRowPull(key, outputs.near(), NearInputs(ids_list, Cpu(), priority).view()[0], priority);
    outputs.Forward(priority);
    return;
  }
  CallOptions options = OptionsOf(Kind::kRowPull, *key, priority);
  const RowSparseNDArray first = ReceiverOf(*key, out);
  options.dtype = first.dtype();
  PushOpOf(PartsCall::Make(calls_, key, options), engine(),
           {.name = "kvstore.row_sparse_pull",
            .reads = {ids.var()},
            .writes = {first.var()},
            .priority = priority},
           [first, ids](PartsCall& parts) {
             const DistKey& key = parts.key();
             try {
               parts.SendRowIds(storage::SortedRowIds(ids, key.shape()[0]));
             } catch (const InvalidArgument& error) {
               throw InvalidArgument(fmt::format("RowSparsePull: key {}: {}",
                                                 ToString(KeyRef(key.key())), error.what()));
             }
             parts.ReceiveRows(first);
           });
  CopyToAll(first, out, priority);
}

void DistKVStore::DoRowSparsePull(std::span<const KeyRowPull> pulls, int priority) {
  std::vector<KeyPtr> keys;
  for (const KeyRowPull& pull : pulls) {
    CheckRowPull(pull, engine());
    CheckRowPullOf(*keys.emplace_back(Find("RowSparsePull", pull.key)), pull);
  }
  for (std::size_t i = 0; i < pulls.size(); ++i) {
    const auto& [name, out, row_ids] = pulls[i];
    if (row_ids.size() == 1) {
      QueueRowPull(keys[i], out, row_ids[0], priority);
      continue;
    }
    for (std::size_t k = 0; k < out.size(); ++k) {
      QueueRowPull(keys[i], out.subspan(k, 1), row_ids[k], priority);
    }
  }
}

}  // namespace heddle::kvstore::dist
