#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <string>
#include <utility>

#include <fmt/format.h>

#include "kvstore/registry.h"

namespace heddle {

namespace internal {

void ThrowKeyTooLarge(std::uint64_t key) {
  throw InvalidArgument(fmt::format("key {}: expected an integer of at most 63 bits", key));
}

}  // namespace internal

// A key may be any text; messages are lines.
std::string ToString(KeyRef key) {
  if (!key.is_string()) return fmt::format("{}", key.number());
  std::string shown = "'";
  for (const char c : key.text()) {
    const auto code = static_cast<unsigned char>(c);
    if (code < ' ' || code == 0x7F) {
      shown += fmt::format("\\x{:02x}", code);
    } else {
      if (c == '\\') shown += c;
      shown += c;
    }
  }
  shown += "'";
  return shown;
}

std::unique_ptr<KVStore> KVStore::Create(std::string_view type, const KVStoreOptions& options) {
  const std::string name = kvstore::LowerCase(type);
  kvstore::FindStoreType(name);  // a wrong name should not start the default engine
  return Create(name, Engine::Default(), options);
}

std::unique_ptr<KVStore> KVStore::Create(std::string_view type, Engine& engine,
                                         const KVStoreOptions& options) {
  std::string name = kvstore::LowerCase(type);
  std::unique_ptr<KVStore> store = kvstore::FindStoreType(name)(engine, options);
  if (store == nullptr) {
    throw InvalidState(fmt::format("store type '{}': its factory returned no store", name));
  }
  store->type_ = std::move(name);
  return store;
}

void KVStore::Register(std::string_view type, KVStoreFactory factory) {
  kvstore::AddStoreType(kvstore::LowerCase(type), std::move(factory));
}

std::vector<std::string> KVStore::Types() { return kvstore::StoreTypes(); }

void KVStore::ThrowNotSupported(std::string_view call) const {
  throw InvalidState(fmt::format("{} is not supported by store type '{}'", call, type_));
}

namespace {

void CheckCounts(std::string_view call, const KeyList& keys, const ArrayLists& lists) {
  if (keys.keys().size() != lists.lists().size()) {
    throw InvalidArgument(
        fmt::format("{}: expected an array or a list of arrays for each of {} keys, got {}", call,
                    keys.keys().size(), lists.lists().size()));
  }
}

}  // namespace

std::vector<KeyArrays> KVStore::Pair(std::string_view call, const KeyList& keys,
                                     const ArrayLists& lists) {
  CheckCounts(call, keys, lists);
  std::vector<KeyArrays> pairs;
  pairs.reserve(keys.keys().size());
  for (std::size_t i = 0; i < keys.keys().size(); ++i) {
    pairs.emplace_back(keys.keys()[i], lists.lists()[i]);
  }
  return pairs;
}

KeyRowPull KVStore::RowPull(KeyRef key, const ArrayList& out, const ArrayList& row_ids) {
  if (out.row_sparse().empty()) {
    throw InvalidArgument(fmt::format("RowSparsePull: key {}: expected row-sparse outputs, got {}",
                                      ToString(key), out.arrays().empty() ? "none" : "dense ones"));
  }
  const std::size_t outputs = out.row_sparse().size();
  const std::size_t ids = row_ids.arrays().size();
  if (ids != 1 && ids != outputs) {
    throw InvalidArgument(fmt::format(
        "RowSparsePull: key {}: expected one dense array of row ids, or one for each of {} "
        "outputs, got {}",
        ToString(key), outputs, row_ids.row_sparse().empty() ? fmt::to_string(ids) : "row-sparse"));
  }
  return {key, out.row_sparse(), row_ids.arrays()};
}

void KVStore::RowSparsePull(const KeyList& keys, const ArrayLists& out, const ArrayLists& row_ids,
                            int priority) {
  CheckCounts("RowSparsePull", keys, out);
  CheckCounts("RowSparsePull", keys, row_ids);
  std::vector<KeyRowPull> pulls;
  for (std::size_t i = 0; i < keys.keys().size(); ++i) {
    pulls.push_back(RowPull(keys.keys()[i], out.lists()[i], row_ids.lists()[i]));
  }
  DoRowSparsePull(pulls, priority);
}

void KVStore::RowSparsePull(const KeyList& keys, const ArrayLists& out, const NDArray& row_ids,
                            int priority) {
  const std::vector<NDArray> of_each_key(keys.keys().size(), row_ids);
  RowSparsePull(keys, out, of_each_key, priority);
}

void KVStore::SetUpdater(Updater updater) {
  if (!updater) throw InvalidArgument("SetUpdater: expected a function, got a null one");
  SetUpdaters({.dense = std::move(updater), .row_sparse = {}, .row_sparse_on_dense = {}});
}

std::vector<Key> KVStore::Keys() const { ThrowNotSupported("Keys"); }
void KVStore::SetUpdaters(Updaters) { ThrowNotSupported("SetUpdater"); }
void KVStore::SetOptimizer(std::shared_ptr<Optimizer>) { ThrowNotSupported("SetOptimizer"); }
void KVStore::SaveOptimizerStates(const std::string&, bool) {
  ThrowNotSupported("SaveOptimizerStates");
}
void KVStore::LoadOptimizerStates(const std::string&) { ThrowNotSupported("LoadOptimizerStates"); }
void KVStore::SetGradientCompression(const CompressionOptions&) {
  ThrowNotSupported("SetGradientCompression");
}
void KVStore::SendCommandToServers(int, std::string_view) {}
bool KVStore::IsCapable(std::string_view) const { return false; }

void KVStore::DoInit(std::span<const KeyArrays>) { ThrowNotSupported("Init"); }
void KVStore::DoPush(std::span<const KeyArrays>, int) { ThrowNotSupported("Push"); }
void KVStore::DoPull(std::span<const KeyArrays>, int, bool) { ThrowNotSupported("Pull"); }
void KVStore::DoRowSparsePull(std::span<const KeyRowPull>, int) {
  ThrowNotSupported("RowSparsePull");
}
void KVStore::DoPushPull(std::span<const KeyArrays>, std::span<const KeyArrays>, int) {
  ThrowNotSupported("PushPull");
}
void KVStore::DoBroadcast(std::span<const KeyArrays>, std::span<const KeyArrays>, int) {
  ThrowNotSupported("Broadcast");
}
void KVStore::DoReset(const KeyArrays&) { ThrowNotSupported("Reset"); }
void KVStore::DoRemove(KeyRef) { ThrowNotSupported("Remove"); }
bool KVStore::DoContains(KeyRef) const { ThrowNotSupported("Contains"); }

}  // namespace heddle
