// The keys of a dist store: which there are, and their first values.
#include <heddle/error.h>

#include <set>
#include <type_traits>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "kvstore/checks.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/worker/call_batch.h"
#include "kvstore/dist/worker/control_call.h"
#include "kvstore/dist/worker/dist_kvstore.h"

namespace heddle::kvstore::dist {

KeyPtr DistKVStore::FindKnown(std::string_view call, KeyRef key) const {
  MutexLock lock(mutex_);
  CheckKeyKind(call, key, string_keys_);
  const auto found = keys_.find(key);
  return found != keys_.end() ? found->second : nullptr;
}

// What the servers know of the key.
std::optional<PartInfo> DistKVStore::Describe(std::string_view call, KeyRef key) const {
  std::uint64_t id = 0;
  {
    MutexLock lock(mutex_);
    id = KeyId(key, RemovalsLocked(key));
  }
  Request request;
  request.kind = Kind::kDescribe;
  request.server =
      static_cast<std::int32_t>(id % static_cast<std::uint64_t>(link_->placement().num_servers));
  request.part = {.store = store_, .part = 0, .key = id};
  request.what = fmt::format("{}: look up key {}", call, ToString(key));
  std::vector<Request> requests;
  requests.push_back(std::move(request));
  std::optional<PartInfo> info;
  try {
    const std::vector<Message> answers = CallAndWait(engine(), *link_, requests);
    InitBody body;
    if (!Decode(answers[0].meta, &body)) {
      throw NetworkError(
          fmt::format("{}: look up key {}: the answer cannot be read", call, ToString(key)));
    }
    info = std::move(body.info);
  } catch (const UnknownKey&) {
    return std::nullopt;
  }
  return info;
}

std::uint64_t DistKVStore::RemovalsLocked(KeyRef key) const {
  const auto found = removals_.find(key);
  return found != removals_.end() ? found->second : 0;
}

KeyPtr DistKVStore::Insert(const PartInfo& info) {
  MutexLock lock(mutex_);
  auto fresh =
      std::make_shared<DistKey>(link_, store_, info.key, info.shape, info.dtype, info.row_sparse,
                                /*whole=*/info.num_parts == 1, RemovalsLocked(info.key));
  string_keys_ = std::holds_alternative<std::string>(info.key);
  return keys_.emplace(info.key, std::move(fresh)).first->second;
}

// A rank that has not initialised the key asks for its shape and dtype at its first use.
KeyPtr DistKVStore::Find(std::string_view call, KeyRef key) {
  if (KeyPtr known = FindKnown(call, key)) return known;
  const std::optional<PartInfo> info = Describe(call, key);
  if (!info) ThrowUnknownKey(call, key);
  return Insert(*info);
}

DistKVStore::KeyPtrs DistKVStore::FindAll(std::string_view call, std::span<const KeyArrays> pairs) {
  KeyPtrs keys(pairs.size());
  {
    MutexLock lock(mutex_);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      CheckKeyKind(call, pairs[i].key, string_keys_);
      const auto found = keys_.find(pairs[i].key);
      if (found != keys_.end()) keys[i] = found->second;
    }
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (keys[i] == nullptr) keys[i] = Find(call, pairs[i].key);
  }
  return keys;
}

DistKVStore::Places DistKVStore::PlacesOf(std::span<const KeyPtr> keys) {
  Places places(keys.size(), 0);
  if (keys.size() == 1) return places;
  MutexLock lock(mutex_);
  ++list_calls_;
  std::size_t different = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    DistKey& key = *keys[i];
    if (std::exchange(key.named_by, list_calls_) != list_calls_) key.place = different++;
    places[i] = key.place;
  }
  return places;
}

std::vector<Key> DistKVStore::Keys() const {
  engine().WaitForReadsAndWrites(removing_);
  std::set<Key> keys;
  for (const Message& answer : CallServers("keys", Kind::kKeys, {})) {
    KeysBody body;
    if (!Decode(answer.meta, &body)) throw NetworkError("keys: an answer cannot be read");
    keys.insert(body.keys.begin(), body.keys.end());
  }
  return {keys.begin(), keys.end()};
}

bool DistKVStore::DoContains(KeyRef key) const {
  return FindKnown("Contains", key) != nullptr || Describe("Contains", key).has_value();
}

// Queues the request that takes a value, or none, to the servers. The op writes the Var returned.
template <class Array>
Var DistKVStore::QueueValue(const KeyPtr& key, Kind kind, const Array* value) {
  CallOptions options = OptionsOf(kind, *key, 0);
  if (value == nullptr) options.flags |= kFlagNoValue;
  const auto call = PartsCall::Make(calls_, key, options);
  key->Enter(call);
  Var ended = engine().NewVar("dist.ended");
  OpOptions op{.name = kind == Kind::kInit ? "kvstore.init" : "kvstore.reset",
               .writes = {ended},
               .lane = Lane::kComm,
               .start_inline = true};
  if (value == nullptr) {
    engine().PushAsync(op, [starter = CallStarter(call)](Completion done) {
      starter->SendNothing();
      starter->Start(std::move(done));
    });
    return ended;
  }
  op.reads = {value->var()};
  engine().PushAsync(op, [starter = CallStarter(call), value = *value](Completion done) {
    if constexpr (std::is_same_v<Array, NDArray>) {
      starter->SendElements(value);
    } else {
      starter->SendRows(value);
    }
    starter->Start(std::move(done));
  });
  return ended;
}

void DistKVStore::InitChecked(std::string_view call, std::span<const KeyArrays> pairs) {
  bool whole = false;
  std::vector<std::uint64_t> removals;
  {
    MutexLock lock(mutex_);
    whole = whole_keys_;
    for (const KeyArrays& pair : pairs) {
      CheckKeyKind(call, pair.key, string_keys_);
      if (keys_.find(pair.key) != keys_.end()) ThrowNotNew(call, pair.key);
      removals.push_back(RemovalsLocked(pair.key));
    }
  }
  const bool gives_value = link_->rank() == 0;
  if (gives_value) {
    for (const KeyArrays& pair : pairs) {
      WithFirstArray(pair, [](const auto& value) { value.WaitToRead(); });
    }
  }
  std::vector<std::pair<PartInfo, Var>> queued;
  {
    const CallBatch together(*link_, pairs.size());
    for (const KeyArrays& pair : pairs) {
      WithFirstArray(pair, [&](const auto& value) {
        using Array = std::decay_t<decltype(value)>;
        constexpr bool kRowSparse = std::is_same_v<Array, RowSparseNDArray>;
        const KeyPtr key =
            std::make_shared<DistKey>(link_, store_, pair.key.ToKey(), value.shape(), value.dtype(),
                                      kRowSparse, whole, removals[queued.size()]);
        const Array* const sent = gives_value ? &value : nullptr;
        queued.emplace_back(key->InfoOf(key->parts().front()),
                            QueueValue<Array>(key, Kind::kInit, sent));
      });
    }
  }
  for (const auto& [info, ended] : queued) engine().WaitForVar(ended);
  for (const auto& [info, ended] : queued) Insert(info);
}

void DistKVStore::DoInit(std::span<const KeyArrays> pairs) {
  CheckInit(pairs, engine());
  CheckOnCpus("Init", pairs);
  InitChecked("Init", pairs);
}

void DistKVStore::DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                              int priority) {
  CheckBroadcast(values, out, engine());
  CheckOnCpus("Broadcast", values);
  CheckOnCpus("Broadcast", out);
  InitChecked("Broadcast", values);
  DoPull(out, priority, /*ignore_sparse=*/true);
}

void DistKVStore::DoReset(const KeyArrays& value) {
  CheckOneArray("Reset", value, engine());
  CheckOnCpus("Reset", {&value, 1});
  const KeyPtr key = Find("Reset", value.key);
  if (key->is_row_sparse() != value.arrays.empty()) {
    throw InvalidArgument(
        fmt::format("Reset: key {}: expected a {} array, as the value is, got a "
                    "{} one",
                    ToString(value.key), key->is_row_sparse() ? "row-sparse" : "dense",
                    key->is_row_sparse() ? "dense" : "row-sparse"));
  }
  WithFirstArray(value, [&](const auto& array) {
    CheckShapeAndDType("Reset", value.key, *key, array);
    array.WaitToRead();
    engine().WaitForVar(QueueValue(key, Kind::kReset, &array));
  });
}

// Nobody waits: the servers let the value go when all workers have removed the key, and from here
// on it is another one.
void DistKVStore::DoRemove(KeyRef name) {
  const KeyPtr key = Find("Remove", name);
  CallOptions options = OptionsOf(Kind::kRemove, *key, /*priority=*/0);
  options.flags = 0;
  const auto call = PartsCall::Make(calls_, key, options);
  {
    MutexLock lock(mutex_);  // comes before the key's
    const auto found = keys_.find(name);
    if (found == keys_.end() || found->second != key) ThrowUnknownKey("Remove", name);
    keys_.erase(found);
    ++removals_[name.ToKey()];
    key->Enter(call);
  }
  engine().PushAsync(
      {.name = "kvstore.remove", .reads = {removing_}, .lane = Lane::kComm, .start_inline = true},
      [starter = CallStarter(call)](Completion done) {
        starter->SendNothing();
        starter->Start(std::move(done));
      });
}

}  // namespace heddle::kvstore::dist
