#include <heddle/c_api.h>
#include <heddle/kvstore.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "c_api/call.h"
#include "c_api/context.h"
#include "c_api/handles.h"
#include "c_api/status.h"
#include "engine/may_wait.h"

using heddle::ArrayList;
using heddle::ArrayLists;
using heddle::KeyList;
using heddle::KeyRef;
using heddle::KVStore;
using heddle::NDArray;
using heddle::RowSparseNDArray;
using heddle::c_api::AnyArray;
using heddle::c_api::Call;
using heddle::c_api::CallBack;
using heddle::c_api::Context;
using heddle::c_api::NewHandle;
using heddle::c_api::ScopedHandle;
using heddle::c_api::Try;

namespace {

// The keys of a call and the list of arrays of each, from pairs of a key and an array: neighbours
// with one key make its list.
class KeyedArrays {
 public:
  struct Names {
    const char* keys;
    const char* arrays;
  };

  KeyedArrays(const Call& call, Names names, std::size_t count, const HeddleKey* keys,
              const HeddleArray* arrays) {
    call.List(names.keys, count, keys);
    call.List(names.arrays, count, arrays);
    dense_.reserve(count);  // the lists point into it
    row_sparse_.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      const KeyRef key = Call::ToKeyRef(keys[i]);
      const bool extends = !keys_.empty() && keys_.back() == key;
      AnyArray array = call.GetAt(names.arrays, i, arrays);
      if (!extends) keys_.push_back(key);
      if (std::holds_alternative<NDArray>(array)) {
        if (extends && !lists_.back().row_sparse().empty()) RefuseMixed(call, names, i, key);
        Append(dense_, std::get<NDArray>(std::move(array)), extends);
      } else {
        if (extends && !lists_.back().arrays().empty()) RefuseMixed(call, names, i, key);
        Append(row_sparse_, std::get<RowSparseNDArray>(std::move(array)), extends);
      }
    }
  }
  KeyedArrays(const KeyedArrays&) = delete;
  KeyedArrays& operator=(const KeyedArrays&) = delete;

  const std::vector<KeyRef>& keys() const { return keys_; }
  const std::vector<ArrayList>& lists() const { return lists_; }
  bool has_one_key() const { return keys_.size() == 1; }

 private:
  [[noreturn]] static void RefuseMixed(const Call& call, Names names, std::size_t i, KeyRef key) {
    call.Refuse(fmt::format("{}[{}]", names.arrays, i),
                fmt::format("arrays of one kind for key {}", ToString(key)),
                "dense and row-sparse ones");
  }

  template <class Array>
  void Append(std::vector<Array>& arrays, Array array, bool extends) {
    arrays.push_back(std::move(array));
    const std::size_t count = extends ? CountOf(lists_.back()) + 1 : 1;
    const ArrayList list(std::span<const Array>(arrays).last(count));
    if (extends) {
      lists_.back() = list;
    } else {
      lists_.push_back(list);
    }
  }
  static std::size_t CountOf(const ArrayList& list) {
    return list.arrays().size() + list.row_sparse().size();
  }

  std::vector<NDArray> dense_;
  std::vector<RowSparseNDArray> row_sparse_;
  std::vector<KeyRef> keys_;
  std::vector<ArrayList> lists_;
};

// Calls f(key, list) or f(keys, lists): messages and speed are better with one key.
template <class F>
void WithKeys(const KeyedArrays& pairs, F&& f) {
  if (pairs.has_one_key()) {
    f(pairs.keys()[0], pairs.lists()[0]);
  } else {
    f(KeyList(pairs.keys()), ArrayLists(pairs.lists()));
  }
}

// For calls with values and outputs.
template <class F>
void WithKeys(const Call& call, const KeyedArrays& values, const KeyedArrays& out, F&& f) {
  if (values.keys() != out.keys()) {
    call.Refuse("out_keys", "the keys of the values in the same order", "others");
  }
  if (values.has_one_key()) {
    f(values.keys()[0], values.lists()[0], out.lists()[0]);
  } else {
    f(KeyList(values.keys()), ArrayLists(values.lists()), ArrayLists(out.lists()));
  }
}

// A key as callbacks see it.
class CKey {
 public:
  explicit CKey(KeyRef key)
      : text_(key.is_string() ? key.text() : ""),
        key_{key.is_string() ? text_.c_str() : nullptr, key.is_string() ? 0 : key.number()} {}
  CKey(const CKey&) = delete;
  CKey& operator=(const CKey&) = delete;

  const HeddleKey* get() const { return &key_; }

 private:
  std::string text_;
  HeddleKey key_;
};

template <class Input, class Stored>
std::function<void(KeyRef, const Input&, const Stored&)> UpdaterOf(
    HeddleUpdater updater, const std::shared_ptr<Context>& context) {
  if (updater == nullptr) return {};
  return [updater, context](KeyRef key, const Input& input, const Stored& stored) {
    const CKey c_key(key);
    const ScopedHandle<HeddleArray> input_handle(input);
    const ScopedHandle<HeddleArray> stored_handle(stored);
    CallBack([&] {
      return updater(context->get(), c_key.get(), input_handle.get(), stored_handle.get());
    });
  };
}

// The context stays the caller's if the store refuses.
void SetUpdaters(KVStore& store, HeddleUpdater dense, HeddleUpdater row_sparse,
                 HeddleUpdater row_sparse_on_dense, void* context, HeddleDestroyContext destroy) {
  const auto shared = std::make_shared<Context>(context, destroy);  // by the three functions
  try {
    store.SetUpdaters({
        .dense = UpdaterOf<NDArray, NDArray>(dense, shared),
        .row_sparse = UpdaterOf<RowSparseNDArray, RowSparseNDArray>(row_sparse, shared),
        .row_sparse_on_dense = UpdaterOf<RowSparseNDArray, NDArray>(row_sparse_on_dense, shared),
    });
  } catch (...) {
    shared->Release();
    throw;
  }
}

}  // namespace

// ---- Making them

HeddleStatus HeddleKVStoreCreate(const char* type, const HeddleKVStoreOptions* options,
                                 HeddleKVStore* store) {
  return Try(__func__, [&](const Call& call) {
    HeddleKVStore& result = call.Result("store", store);
    heddle::KVStoreOptions given;
    if (options != nullptr) {
      given.strict_init = call.Versioned("options", options).strict_init != 0;
    }
    result = NewHandle<HeddleKVStore>(KVStore::Create(call.Text("type", type), given));
  });
}

HeddleStatus HeddleKVStoreFree(HeddleKVStore store) {
  return Try(__func__, [&, name = __func__](const Call& call) {
    if (store == nullptr) return;
    // The last handle of such a store waits for its operations, and leaves the job.
    if (call.Get("store", store)->type().starts_with("dist")) heddle::engine::CheckMayWait(name);
    call.Take("store", store);
  });
}

// ---- Keys and arrays

HeddleStatus HeddleKVStoreInit(HeddleKVStore store, size_t count, const HeddleKey* keys,
                               const HeddleArray* values) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    const KeyedArrays pairs(call, {"keys", "values"}, count, keys, values);
    WithKeys(pairs, [&](const auto& key, const auto& value) { kv->Init(key, value); });
  });
}

HeddleStatus HeddleKVStorePush(HeddleKVStore store, size_t count, const HeddleKey* keys,
                               const HeddleArray* values, int priority) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    const KeyedArrays pairs(call, {"keys", "values"}, count, keys, values);
    WithKeys(pairs, [&](const auto& key, const auto& value) { kv->Push(key, value, priority); });
  });
}

HeddleStatus HeddleKVStorePull(HeddleKVStore store, size_t count, const HeddleKey* keys,
                               const HeddleArray* out, int priority, int ignore_sparse) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    const KeyedArrays pairs(call, {"keys", "out"}, count, keys, out);
    WithKeys(pairs, [&](const auto& key, const auto& array) {
      kv->Pull(key, array, priority, ignore_sparse != 0);
    });
  });
}

HeddleStatus HeddleKVStoreRowSparsePull(HeddleKVStore store, size_t count, const HeddleKey* keys,
                                        const HeddleArray* out, const HeddleArray* row_ids,
                                        int priority) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    const KeyedArrays outputs(call, {"keys", "out"}, count, keys, out);
    const KeyedArrays ids(call, {"keys", "row_ids"}, count, keys, row_ids);
    if (outputs.has_one_key()) {
      kv->RowSparsePull(outputs.keys()[0], outputs.lists()[0], ids.lists()[0], priority);
    } else {
      kv->RowSparsePull(KeyList(outputs.keys()), ArrayLists(outputs.lists()),
                        ArrayLists(ids.lists()), priority);
    }
  });
}

HeddleStatus HeddleKVStorePushPull(HeddleKVStore store, size_t count, const HeddleKey* keys,
                                   const HeddleArray* values, size_t out_count,
                                   const HeddleKey* out_keys, const HeddleArray* out,
                                   int priority) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    const KeyedArrays from(call, {"keys", "values"}, count, keys, values);
    if (out_count == 0) {
      WithKeys(from,
               [&](const auto& key, const auto& value) { kv->PushPull(key, value, priority); });
      return;
    }
    const KeyedArrays to(call, {"out_keys", "out"}, out_count, out_keys, out);
    WithKeys(call, from, to, [&](const auto& key, const auto& value, const auto& array) {
      kv->PushPull(key, value, array, priority);
    });
  });
}

HeddleStatus HeddleKVStoreBroadcast(HeddleKVStore store, size_t count, const HeddleKey* keys,
                                    const HeddleArray* values, size_t out_count,
                                    const HeddleKey* out_keys, const HeddleArray* out,
                                    int priority) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    const KeyedArrays from(call, {"keys", "values"}, count, keys, values);
    const KeyedArrays to(call, {"out_keys", "out"}, out_count, out_keys, out);
    WithKeys(call, from, to, [&](const auto& key, const auto& value, const auto& array) {
      kv->Broadcast(key, value, array, priority);
    });
  });
}

HeddleStatus HeddleKVStoreReset(HeddleKVStore store, const HeddleKey* key, HeddleArray value) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    const KeyRef which = call.Key("key", key);
    std::visit([&](const auto& array) { kv->Reset(which, array); }, call.Get("value", value));
  });
}

HeddleStatus HeddleKVStoreRemove(HeddleKVStore store, const HeddleKey* key) {
  return Try(__func__,
             [&](const Call& call) { call.Get("store", store)->Remove(call.Key("key", key)); });
}

HeddleStatus HeddleKVStoreContains(HeddleKVStore store, const HeddleKey* key, int* contains) {
  return Try(__func__, [&](const Call& call) {
    int& result = call.Result("contains", contains);
    result = call.Get("store", store)->Contains(call.Key("key", key)) ? 1 : 0;
  });
}

HeddleStatus HeddleKVStoreVisitKeys(HeddleKVStore store, HeddleKeyVisitor visit, void* context) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    call.Callback("visit", visit);
    for (const heddle::Key& key : kv->Keys()) {
      const CKey c_key(key);
      CallBack([&] { return visit(context, c_key.get()); });
    }
  });
}

// ---- How pushes change values

HeddleStatus HeddleKVStoreSetUpdater(HeddleKVStore store, HeddleUpdater updater, void* context,
                                     HeddleDestroyContext destroy) {
  return Try(__func__, [&](const Call& call) {
    const auto kv = call.Get("store", store);
    call.Callback("updater", updater);
    SetUpdaters(*kv, updater, nullptr, nullptr, context, destroy);
  });
}

HeddleStatus HeddleKVStoreSetUpdaters(HeddleKVStore store, HeddleUpdater dense,
                                      HeddleUpdater row_sparse, HeddleUpdater row_sparse_on_dense,
                                      void* context, HeddleDestroyContext destroy) {
  return Try(__func__, [&](const Call& call) {
    SetUpdaters(*call.Get("store", store), dense, row_sparse, row_sparse_on_dense, context,
                destroy);
  });
}

HeddleStatus HeddleKVStoreSetOptimizer(HeddleKVStore store, HeddleOptimizer optimizer) {
  return Try(__func__, [&](const Call& call) {
    call.Get("store", store)->SetOptimizer(call.Get("optimizer", optimizer));
  });
}

HeddleStatus HeddleKVStoreSaveOptimizerStates(HeddleKVStore store, const char* file,
                                              int with_optimizer) {
  return Try(__func__, [&](const Call& call) {
    call.Get("store", store)
        ->SaveOptimizerStates(std::string(call.Text("file", file)), with_optimizer != 0);
  });
}

HeddleStatus HeddleKVStoreLoadOptimizerStates(HeddleKVStore store, const char* file) {
  return Try(__func__, [&](const Call& call) {
    call.Get("store", store)->LoadOptimizerStates(std::string(call.Text("file", file)));
  });
}

HeddleStatus HeddleKVStoreSetGradientCompression(HeddleKVStore store, const char* type,
                                                 double threshold) {
  return Try(__func__, [&](const Call& call) {
    call.Get("store", store)
        ->SetGradientCompression(
            {.type = std::string(call.Text("type", type)), .threshold = threshold});
  });
}

// ---- The store and its job

HeddleStatus HeddleKVStoreGetType(HeddleKVStore store, const char** type) {
  return Try(__func__, [&](const Call& call) {
    call.Result("type", type) = call.Get("store", store)->type().c_str();
  });
}

HeddleStatus HeddleKVStoreGetRank(HeddleKVStore store, int* rank) {
  return Try(__func__, [&](const Call& call) {
    int& result = call.Result("rank", rank);
    result = call.Get("store", store)->rank();
  });
}

HeddleStatus HeddleKVStoreGetNumWorkers(HeddleKVStore store, int* num_workers) {
  return Try(__func__, [&](const Call& call) {
    int& result = call.Result("num_workers", num_workers);
    result = call.Get("store", store)->num_workers();
  });
}

HeddleStatus HeddleKVStoreGetNumDeadNodes(HeddleKVStore store, int* num_dead_nodes) {
  return Try(__func__, [&](const Call& call) {
    int& result = call.Result("num_dead_nodes", num_dead_nodes);
    result = call.Get("store", store)->NumDeadNodes();
  });
}

HeddleStatus HeddleKVStoreIsCapable(HeddleKVStore store, const char* capability, int* is_capable) {
  return Try(__func__, [&](const Call& call) {
    int& result = call.Result("is_capable", is_capable);
    result = call.Get("store", store)->IsCapable(call.Text("capability", capability)) ? 1 : 0;
  });
}

HeddleStatus HeddleKVStoreBarrier(HeddleKVStore store) {
  return Try(__func__, [&](const Call& call) { call.Get("store", store)->Barrier(); });
}

HeddleStatus HeddleKVStoreSendCommandToServers(HeddleKVStore store, int head, size_t body_bytes,
                                               const char* body) {
  return Try(__func__, [&](const Call& call) {
    call.Get("store", store)
        ->SendCommandToServers(head, {call.Elements("body", body_bytes, body), body_bytes});
  });
}
