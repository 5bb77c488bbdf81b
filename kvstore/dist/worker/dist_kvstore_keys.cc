// The keys of a dist store: which there are, and their first values.
#include <heddle/error.h>

#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "base/utf8.h"
#include "engine/fork.h"
#include "engine/may_wait.h"
#include "kvstore/checks.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/worker/call_batch.h"
#include "kvstore/dist/worker/control_call.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/near_arrays.h"

namespace heddle::kvstore::dist {

KeyPtr DistKVStore::FindKnown(std::string_view call, KeyRef key) const {
  const engine::CallLock lock(mutex_, "a store");
  CheckKeyKind(call, key, string_keys_);
  const auto found = keys_.find(key);
  return found != keys_.end() ? found->second : nullptr;
}

// What the servers know of the key.
std::optional<DistKVStore::Described> DistKVStore::Describe(std::string_view call,
                                                            KeyRef key) const {
  Described described;
  {
    const engine::CallLock lock(mutex_, "a store");
    described.removals = RemovalsLocked(key);
  }
  const std::uint64_t id = KeyId(key, described.removals);
  Request request;
  request.kind = Kind::kDescribe;
  request.server =
      static_cast<std::int32_t>(id % static_cast<std::uint64_t>(link_->placement().num_servers));
  request.part = {.store = store_, .part = 0, .key = id};
  request.what = fmt::format("{}: look up key {}", call, ToString(key));
  std::vector<Request> requests;
  requests.push_back(std::move(request));
  try {
    const std::vector<Message> answers = CallAndWait(engine(), *link_, requests);
    InitBody body;
    if (!Decode(answers[0].meta, &body)) {
      throw NetworkError(
          fmt::format("{}: look up key {}: the answer cannot be read", call, ToString(key)));
    }
    if (KeyRef(body.info.key) != key) {
      throw NetworkError(
          fmt::format("{}: look up key {}: the servers have key {} under its number {:x}; another "
                      "name for one of the two helps",
                      call, ToString(key), ToString(KeyRef(body.info.key)), id));
    }
    described.info = std::move(body.info);
  } catch (const UnknownKey&) {
    return std::nullopt;
  }
  return described;
}

std::uint64_t DistKVStore::RemovalsLocked(KeyRef key) const {
  const auto found = removals_.find(key);
  return found != removals_.end() ? found->second : 0;
}

KeyPtr DistKVStore::Made(const Described& described) const {
  const PartInfo& info = described.info;
  return std::make_shared<DistKey>(link_, store_, info.key, info.shape, info.dtype, info.row_sparse,
                                   /*whole=*/info.num_parts == 1, described.removals);
}

KeyPtr DistKVStore::Insert(const Described& described) {
  const PartInfo& info = described.info;
  const engine::CallLock lock(mutex_, "a store");
  if (RemovalsLocked(info.key) != described.removals) return nullptr;
  string_keys_ = std::holds_alternative<std::string>(info.key);
  return keys_.emplace(info.key, Made(described)).first->second;
}

// All parts are at their servers: one has told of the key, the others may still be on their way
// from the rank that initialises it. False: the key was removed meanwhile, by this worker.
bool DistKVStore::AllPartsAreThere(std::string_view call, const Described& described) const {
  const PartInfo& info = described.info;
  if (info.num_parts == 1 || link_->rank() == 0) return true;  // this rank's own come first
  const DistKey key(link_, store_, info.key, info.shape, info.dtype, info.row_sparse,
                    /*whole=*/false, described.removals);
  std::vector<Request> requests;
  for (const PlacedPart& part : key.parts()) {
    Request& request = requests.emplace_back();
    request.kind = Kind::kInit;
    request.server = part.server;
    request.part = key.IdOf(part);
    request.flags = kFlagNoValue;
    request.meta = Encode(InitBody{key.InfoOf(part)});
    request.what = fmt::format("{}: look up key {}", call, ToString(KeyRef(info.key)));
  }
  try {
    CallAndWait(engine(), *link_, requests);
  } catch (const UnknownKey&) {
    return false;
  }
  return true;
}

bool DistKVStore::IsUnfinished(KeyRef key) const {
  const engine::CallLock lock(mutex_, "a store");
  return !unfinished_.empty() && unfinished_.contains(KeyId(key, RemovalsLocked(key)));
}

std::vector<KeyPtr> DistKVStore::UnusedKeys(std::string_view call) const {
  std::vector<KeyPtr> unused;
  for (const Key& key : Keys()) {
    if (FindKnown(call, key) != nullptr) continue;
    std::optional<Described> described = Describe(call, key);
    while (described && !AllPartsAreThere(call, *described)) described = Describe(call, key);
    if (described) unused.push_back(Made(*described));
  }
  return unused;
}

// A rank that has not initialised the key asks for its shape and dtype at its first use.
KeyPtr DistKVStore::Find(std::string_view call, KeyRef key) {
  for (;;) {
    if (KeyPtr known = FindKnown(call, key)) return known;
    if (IsUnfinished(key)) {
      throw InvalidState(fmt::format(
          "{}: key {}: its Init has failed, and some servers may have the value: expected an Init "
          "that succeeds first",
          call, ToString(key)));
    }
    const std::optional<Described> described = Describe(call, key);
    if (!described) ThrowUnknownKey(call, key);
    if (!AllPartsAreThere(call, *described)) continue;
    if (KeyPtr known = Insert(*described)) return known;
  }
}

DistKVStore::KeyPtrs DistKVStore::FindAll(std::string_view call, std::span<const KeyArrays> pairs) {
  KeyPtrs keys(pairs.size());
  {
    const engine::CallLock lock(mutex_, "a store");
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
  const engine::CallLock lock(mutex_, "a store");
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
  engine::CheckMayWait("keys");
  engine().WaitForReadsAndWrites(removing_);
  std::set<Key> keys;
  std::vector<Request> requests = ControlRequests("keys", Kind::kKeys, /*meta=*/{}, /*version=*/0);
  while (!requests.empty()) {
    const std::vector<Message> answers = CallAndWait(engine(), *link_, requests);
    std::vector<Request> next;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      KeysBody body;
      if (!Decode(answers[i].meta, &body)) throw NetworkError("keys: an answer cannot be read");
      if (body.keys.empty()) continue;
      next.push_back(requests[i]);
      next.back().meta = Encode(KeysBody{{body.keys.back()}});
      keys.insert(body.keys.begin(), body.keys.end());
    }
    requests = std::move(next);
  }
  std::erase_if(keys, [this](const Key& key) { return IsUnfinished(key); });
  return {keys.begin(), keys.end()};
}

bool DistKVStore::DoContains(KeyRef key) const {
  if (FindKnown("Contains", key) != nullptr) return true;
  return !IsUnfinished(key) && Describe("Contains", key).has_value();
}

// Queues the requests that take a value to the servers. The op writes the Var returned.
template <class Array>
Var DistKVStore::QueueValue(const KeyPtr& key, Kind kind, const Array& value,
                            std::shared_ptr<PartNumbers> missing) {
  if (const std::span<const Array> list(&value, 1); !AreNear(list, Cpu())) {
    return QueueValue(key, kind, CopiesNear(list, Cpu(), /*priority=*/0)[0], std::move(missing));
  }
  const auto call = PartsCall::Make(calls_, key, OptionsOf(kind, *key, 0));
  call->MakeWhole(std::move(missing));
  Var ended = engine().NewVar("dist.ended");
  PushOpOf(call, engine(),
           {.name = kind == Kind::kInit ? "kvstore.init" : "kvstore.reset",
            .reads = {value.var()},
            .writes = {ended}},
           [value](PartsCall& parts) {
             if constexpr (std::is_same_v<Array, NDArray>) {
               parts.SendElements(value);
             } else {
               parts.SendRows(value);
             }
           });
  return ended;
}

// Queues the requests that are answered once rank 0's value is there: an error if it is another
// kind of value than the key's. As QueueValue.
Var DistKVStore::QueueAwait(const KeyPtr& key, bool first_part) {
  CallOptions options = OptionsOf(Kind::kInit, *key, 0);
  options.flags |= kFlagNoValue;
  Var ended = engine().NewVar("dist.ended");
  PushOpOf(PartsCall::Make(calls_, key, options), engine(),
           {.name = "kvstore.init", .writes = {ended}}, [first_part](PartsCall& parts) {
             if (first_part) {
               parts.SendNothingToTheFirst();
             } else {
               parts.SendNothing();
             }
           });
  return ended;
}

// Of a key in several parts first the first one says whether the value is as the key is: of another
// one there may be no such parts to wait for, or they are elsewhere.
void DistKVStore::AwaitValues(std::span<const KeyPtr> keys) {
  for (const bool first_part : {true, false}) {
    std::vector<Var> awaited;
    {
      const CallBatch together(*link_, keys.size());
      for (const KeyPtr& key : keys) {
        if (first_part || key->parts().size() > 1) awaited.push_back(QueueAwait(key, first_part));
      }
    }
    for (const Var& ended : awaited) engine().WaitForVar(ended);
  }
}

// What one call initialises: no other thread of this worker does the same meanwhile.
class DistKVStore::Initialising {
 public:
  Initialising(DistKVStore& store, std::string_view call, std::span<const KeyArrays> pairs)
      : store_(store) {
    const engine::CallLock lock(store_.mutex_, "a store");
    for (const KeyArrays& pair : pairs) {
      CheckKeyKind(call, pair.key, store_.string_keys_);
      const std::uint64_t removals = store_.RemovalsLocked(pair.key);
      const std::uint64_t id = KeyId(pair.key, removals);
      if (store_.keys_.contains(pair.key) || store_.initialising_.contains(id)) {
        ThrowNotNew(call, pair.key);
      }
      removals_.push_back(removals);
      ids_.push_back(id);
      const auto before = store_.unfinished_.find(id);
      before_.push_back(before != store_.unfinished_.end() ? before->second : nullptr);
    }
    whole_dense_ = store_.whole_dense_;
    whole_row_sparse_ = store_.whole_row_sparse_;
    store_.initialising_.insert(ids_.begin(), ids_.end());
  }
  ~Initialising() {
    MutexLock lock(store_.mutex_);
    for (const std::uint64_t id : ids_) store_.initialising_.erase(id);
  }
  Initialising(const Initialising&) = delete;
  Initialising& operator=(const Initialising&) = delete;

  std::uint64_t removals(std::size_t i) const { return removals_[i]; }
  std::span<const std::uint64_t> ids() const { return ids_; }
  // As an earlier Init of the key had it, which has failed; null: there was none.
  const KeyPtr& before(std::size_t i) const { return before_[i]; }
  bool whole(bool row_sparse) const { return row_sparse ? whole_row_sparse_ : whole_dense_; }

 private:
  DistKVStore& store_;
  std::vector<std::uint64_t> removals_;
  std::vector<std::uint64_t> ids_;
  std::vector<KeyPtr> before_;
  bool whole_dense_ = false;
  bool whole_row_sparse_ = false;
};

namespace {

void CheckKind(std::string_view call, KeyRef name, const DistKey& key, bool row_sparse) {
  if (key.is_row_sparse() == row_sparse) return;
  throw InvalidArgument(fmt::format(
      "{}: key {}: expected a {} array, as the value is, got a {} one", call, ToString(name),
      key.is_row_sparse() ? "row-sparse" : "dense", row_sparse ? "row-sparse" : "dense"));
}

// Before anything of the call is sent.
void CheckName(std::string_view call, const DistKey& key) {
  const std::size_t bytes = Encode(InitBody{key.InfoOf(key.parts().front())}).size();
  if (bytes <= kMetaBytesMax) return;
  constexpr std::size_t kShownMax = 100;
  throw InvalidArgument(fmt::format(
      "{}: key {}...: expected one that takes, with its shape, at most {} bytes, got {} bytes",
      call, CutAtLetter(*key.name(), kShownMax), kMetaBytesMax, bytes));
}

// For all of them, whatever becomes of the first.
void WaitForEach(Engine& engine, std::span<const Var> vars) {
  std::exception_ptr error;
  for (const Var& var : vars) {
    try {
      engine.WaitForVar(var);
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace

// Parts that an Init which failed has left get the new value before the others are made: who waits
// for all parts sees no two values. Unless messages of the first one come late and complete it;
// then this is as a Reset of the key.
void DistKVStore::SendFirstValues(std::span<const KeyPtr> keys, std::span<const KeyArrays> pairs,
                                  const Initialising& initialising) {
  std::vector<std::shared_ptr<PartNumbers>> missing(pairs.size());
  const auto queue = [&](Kind kind) {
    std::vector<Var> queued;
    {
      const CallBatch together(*link_, pairs.size());
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        if (kind == Kind::kReset && missing[i] == nullptr) continue;
        WithFirstArray(pairs[i], [&](const auto& value) {
          queued.push_back(QueueValue(keys[i], kind, value, missing[i]));
        });
      }
    }
    WaitForEach(engine(), queued);
  };
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (initialising.before(i) != nullptr) missing[i] = std::make_shared<PartNumbers>();
  }
  try {
    queue(Kind::kReset);
    queue(Kind::kInit);
  } catch (const InvalidArgument&) {  // refused
    throw;
  } catch (...) {
    const engine::CallLock lock(mutex_, "a store");
    for (std::size_t i = 0; i < keys.size(); ++i) unfinished_[initialising.ids()[i]] = keys[i];
    throw;
  }
  const engine::CallLock lock(mutex_, "a store");
  for (const std::uint64_t id : initialising.ids()) unfinished_.erase(id);
}

void DistKVStore::InitChecked(std::string_view call, std::span<const KeyArrays> pairs) {
  engine::CheckMayWait(call);
  const Initialising initialising(*this, call, pairs);
  std::vector<KeyPtr> keys;
  for (const KeyArrays& pair : pairs) {
    WithFirstArray(pair, [&](const auto& value) {
      constexpr bool kRowSparse = std::is_same_v<std::decay_t<decltype(value)>, RowSparseNDArray>;
      bool whole = initialising.whole(kRowSparse);
      if (const KeyPtr& before = initialising.before(keys.size())) {
        // Parts of it are there: those of another array would be others, and elsewhere.
        CheckKind(call, pair.key, *before, kRowSparse);
        CheckShapeAndDType(call, pair.key, *before, value);
        whole = before->parts().size() == 1;
      }
      keys.push_back(std::make_shared<DistKey>(link_, store_, pair.key.ToKey(), value.shape(),
                                               value.dtype(), kRowSparse, whole,
                                               initialising.removals(keys.size())));
      CheckName(call, *keys.back());
    });
  }
  if (link_->rank() == 0) {
    for (const KeyArrays& pair : pairs) {
      WithFirstArray(pair, [](const auto& value) { value.WaitToRead(); });
    }
    SendFirstValues(keys, pairs, initialising);
  } else {
    AwaitValues(keys);
  }
  // Of a key that another thread has removed meanwhile nothing is left.
  for (std::size_t i = 0; i < keys.size(); ++i) {
    Insert({keys[i]->InfoOf(keys[i]->parts().front()), initialising.removals(i)});
  }
}

void DistKVStore::DoInit(std::span<const KeyArrays> pairs) {
  CheckInit(pairs, engine());
  InitChecked("Init", pairs);
}

void DistKVStore::DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                              int priority) {
  CheckBroadcast(values, out, engine());
  InitChecked("Broadcast", values);
  DoPull(out, priority, /*ignore_sparse=*/true);
}

void DistKVStore::DoReset(const KeyArrays& value) {
  engine::CheckMayWait("Reset");
  CheckOneArray("Reset", value, engine());
  const KeyPtr key = Find("Reset", value.key);
  CheckKind("Reset", value.key, *key, value.arrays.empty());
  WithFirstArray(value, [&](const auto& array) {
    CheckShapeAndDType("Reset", value.key, *key, array);
    array.WaitToRead();
    engine().WaitForVar(QueueValue(key, Kind::kReset, array));
  });
  const engine::CallLock lock(mutex_, "a store");
  key->residual = NDArray();
  key->updates = 0;
}

// Nobody waits: the servers let the value go when all workers have removed the key, and from here
// on it is another one.
void DistKVStore::DoRemove(KeyRef name) {
  const KeyPtr key = Find("Remove", name);
  CallOptions options = OptionsOf(Kind::kRemove, *key, /*priority=*/0);
  options.flags = 0;
  const auto call = PartsCall::Make(calls_, key, options);
  {
    const engine::CallLock lock(mutex_, "a store");
    const auto found = keys_.find(name);
    if (found == keys_.end() || found->second != key) ThrowUnknownKey("Remove", name);
    keys_.erase(found);
    ++removals_[name.ToKey()];
    std::erase_if(removed_, [](const auto& other) { return other.expired(); });
    removed_.push_back(key);
  }
  PushOpOf(call, engine(), {.name = "kvstore.remove", .reads = {removing_}},
           [](PartsCall& parts) { parts.SendNothing(); });
}

}  // namespace heddle::kvstore::dist
