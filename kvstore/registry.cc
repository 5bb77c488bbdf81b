#include "kvstore/registry.h"

#include <heddle/error.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/mutex.h"
#include "engine/fork.h"

namespace heddle::kvstore {

std::unique_ptr<KVStore> MakeDistAsyncStore(Engine&, const KVStoreOptions&);        // dist/run.cc
std::unique_ptr<KVStore> MakeDistDeviceAsyncStore(Engine&, const KVStoreOptions&);  // dist/run.cc
std::unique_ptr<KVStore> MakeDistDeviceSyncStore(Engine&, const KVStoreOptions&);   // dist/run.cc
std::unique_ptr<KVStore> MakeDistSyncStore(Engine&, const KVStoreOptions&);         // dist/run.cc
std::unique_ptr<KVStore> MakeDeviceStore(Engine&, const KVStoreOptions&);  // local_kvstore.cc
std::unique_ptr<KVStore> MakeLocalStore(Engine&, const KVStoreOptions&);   // local_kvstore.cc
std::unique_ptr<KVStore> MakeNcclStore(Engine&, const KVStoreOptions&);    // nccl/nccl_kvstore.cc
std::unique_ptr<KVStore> MakeTestStore(Engine&, const KVStoreOptions&);    // test_kvstore.cc

namespace {

struct StoreTypeEntry {
  const char* name;
  std::unique_ptr<KVStore> (*make)(Engine&, const KVStoreOptions&);
};

// The built-in types, sorted by name. An alias is a row of its own.
constexpr StoreTypeEntry kStoreTypes[] = {
    {"device", &MakeDeviceStore},
    {"dist", &MakeDistSyncStore},
    {"dist_async", &MakeDistAsyncStore},
    {"dist_async_device", &MakeDistDeviceAsyncStore},
    {"dist_device_async", &MakeDistDeviceAsyncStore},
    {"dist_device_sync", &MakeDistDeviceSyncStore},
    {"dist_sync", &MakeDistSyncStore},
    {"dist_sync_device", &MakeDistDeviceSyncStore},
    {"local", &MakeLocalStore},
    {"nccl", &MakeNcclStore},
    {"teststore", &MakeTestStore},
};

class Registry {
 public:
  Registry() {
    MutexLock lock(mutex_);
    for (const StoreTypeEntry& entry : kStoreTypes) factories_.emplace(entry.name, entry.make);
  }

  KVStoreFactory Find(const std::string& type) EXCLUDES(mutex_) {
    const engine::CallLock lock(mutex_, "a type of store");
    const auto found = factories_.find(type);
    if (found != factories_.end()) return found->second;
    throw InvalidArgument(fmt::format("unknown store type '{}': expected one of {}", type,
                                      fmt::join(NamesLocked(), ", ")));
  }

  void Add(const std::string& type, KVStoreFactory factory) EXCLUDES(mutex_) {
    if (type.empty()) throw InvalidArgument("a store type needs a name, got an empty one");
    if (!factory) throw InvalidArgument(fmt::format("store type '{}': null factory", type));
    const engine::CallLock lock(mutex_, "a type of store");
    if (!factories_.emplace(type, std::move(factory)).second) {
      throw InvalidArgument(fmt::format("store type '{}' is registered already", type));
    }
  }

  std::vector<std::string> Names() EXCLUDES(mutex_) {
    const engine::CallLock lock(mutex_, "a type of store");
    return NamesLocked();
  }

 private:
  std::vector<std::string> NamesLocked() REQUIRES(mutex_) {
    std::vector<std::string> names;
    for (const auto& [name, factory] : factories_) names.push_back(name);
    return names;
  }

  Mutex mutex_;
  std::map<std::string, KVStoreFactory> factories_ GUARDED_BY(mutex_);
};

Registry& TheRegistry() {
  static Registry* const registry = new Registry;  // never destroyed: threads may outlive main
  return *registry;
}

}  // namespace

std::string LowerCase(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

KVStoreFactory FindStoreType(const std::string& type) { return TheRegistry().Find(type); }

void AddStoreType(const std::string& type, KVStoreFactory factory) {
  TheRegistry().Add(type, std::move(factory));
}

std::vector<std::string> StoreTypes() { return TheRegistry().Names(); }

}  // namespace heddle::kvstore
