// heddle._core.KVStore: the stores that the C++ library makes.
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kvstore/dist/run.h"
#include "kvstore/local_kvstore.h"
#include "python/src/bindings.h"
#include "python/src/keys.h"

namespace heddle::python {

KeyRef ToKey(const char* call, nb::handle object) {
  PyObject* const key = object.ptr();
  if (PyUnicode_Check(key)) {
    Py_ssize_t bytes = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(key, &bytes);
    if (text == nullptr) {
      PyErr_Clear();
      throw InvalidArgument(fmt::format("{}: expected a key that UTF-8 can encode, got {}", call,
                                        nb::str(nb::steal(PyObject_ASCII(key))).c_str()));
    }
    return std::string_view(text, static_cast<std::size_t>(bytes));
  }
  const nb::object index = nb::steal(PyBool_Check(key) ? nullptr : PyNumber_Index(key));
  if (!index.is_valid()) {
    PyErr_Clear();  // an array of NumPy's may refuse, too
    throw InvalidType(
        fmt::format("{}: expected a key of type str or int, got {}", call, TypeName(object)));
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) {
    throw InvalidArgument(fmt::format("{}: expected an integer key of at most 64 bits, got {}",
                                      call, nb::str(index).c_str()));
  }
  return static_cast<std::int64_t>(number);
}

nb::object FromKey(KeyRef key) {
  if (!key.is_string()) return nb::int_(key.number());
  return nb::str(key.text().data(), key.text().size());
}

namespace {

// Lets go of a store, and ends it with the last. Its waits are not for a signal to leave, but for
// those of a dist store, which may wait for other workers: what the signal's handler raises comes
// after this, and the worker has failed. `nccl` of several processes waits for the others, too, but
// no longer than its deadline. Without the GIL.
void LetGo(std::shared_ptr<KVStore>& store) {
  std::optional<WaitCheckScope> unchecked;
  if (store != nullptr && !store->type().starts_with("dist")) {
    unchecked.emplace(std::chrono::milliseconds(50), nullptr);
  }
  store.reset();
}

// A Python function that stores call, shared by the updaters that do: a push calls those that it
// began with, though others are set meanwhile. Dropped on any thread.
struct PyUpdater {
  explicit PyUpdater(nb::object its_function) : function(std::move(its_function)) {}
  ~PyUpdater() {
    PyObject* const dropped = function.release().ptr();  // leaked once the interpreter is gone
    if (dropped != nullptr) WhilePythonLives([dropped] { Py_DECREF(dropped); });
  }
  PyUpdater(const PyUpdater&) = delete;
  PyUpdater& operator=(const PyUpdater&) = delete;

  nb::object function;  // none: the garbage collector has cleared the store
};

// A store, and the Python function that it calls now. The function is known here, and not to the
// store alone, since the garbage collector has to see it: an updater often refers to its store.
struct PyStore {
  explicit PyStore(std::unique_ptr<KVStore> made) : store(std::move(made)) {}
  ~PyStore() {
    if (engine::InForkedChild()) {  // its locks may be held for ever
      new std::shared_ptr<KVStore>(std::move(store));
      return;
    }
    if (store == nullptr) return;
    const nb::error_scope raised;  // signal handlers run beside it
    const Blocking blocking;
    LetGo(store);
  }
  std::shared_ptr<KVStore> store;      // shared by the calls that use it; null once it is closed
  std::shared_ptr<PyUpdater> updater;  // null: the store has none of Python
};

// The store, or InvalidState once it is closed. With the GIL.
const std::shared_ptr<KVStore>& Open(const PyStore& self) {
  if (self.store == nullptr) throw InvalidState("the store is closed");
  return self.store;
}

// f(store) without the GIL. A store that is closed meanwhile, by another thread or by the updater
// that f calls, lives until f has returned, and ends here, without the GIL too.
template <class F>
auto Using(const PyStore& self, const F& f) {
  struct Used {
    ~Used() { LetGo(store); }
    std::shared_ptr<KVStore> store;
  };
  engine::CheckNotForked("a store");
  std::shared_ptr<KVStore> store = Open(self);
  const Blocking blocking;
  const Used used = {std::move(store)};
  return f(*used.store);
}

bool IsList(nb::handle object) { return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()); }

// What a call does with its arrays.
enum class Use : std::uint8_t { kRead, kWrite };

// An item of a list or tuple. IndexError for one that has shrunk since it was measured.
nb::object ItemOf(nb::handle list, std::size_t index) {
  const auto at = static_cast<Py_ssize_t>(index);
  PyObject* const item =
      PyList_Check(list.ptr()) ? PyList_GetItem(list.ptr(), at) : PyTuple_GetItem(list.ptr(), at);
  if (item == nullptr) throw nb::python_error();
  return nb::borrow(item);
}

// The arrays of the keys of a call, in the order of the keys: an array each, or a list of them.
class Arrays {
 public:
  Arrays(const char* call, Use use) : call_(call), use_(use) {}

  void Reserve(std::size_t keys) {
    groups_.reserve(keys);
    dense_.reserve(keys);
  }

  // Those of the next key.
  void Add(KeyRef key, nb::handle object) {
    const std::size_t dense = dense_.size();
    const std::size_t row_sparse = row_sparse_.size();
    if (IsList(object)) {
      const std::size_t count = nb::len(object);
      for (std::size_t i = 0; i < count; ++i) AddOne(key, ItemOf(object, i));
    } else {
      AddOne(key, object);
    }
    const bool is_row_sparse = row_sparse_.size() > row_sparse;
    if (is_row_sparse && dense_.size() > dense) {
      throw InvalidArgument(
          fmt::format("{}: key {}: expected arrays of one kind, got dense and row_sparse", call_,
                      ToString(key)));
    }
    groups_.push_back(is_row_sparse ? Group{row_sparse, row_sparse_.size() - row_sparse, true}
                                    : Group{dense, dense_.size() - dense, false});
  }

  // Borrowed, once all are here.
  ArrayList list(std::size_t key = 0) const {
    const Group& group = groups_[key];
    if (group.is_row_sparse) {
      return std::span<const RowSparseNDArray>(row_sparse_).subspan(group.begin, group.count);
    }
    return std::span<const NDArray>(dense_).subspan(group.begin, group.count);
  }
  ArrayLists lists() const {
    std::vector<ArrayList> lists;
    lists.reserve(groups_.size());
    for (std::size_t key = 0; key < groups_.size(); ++key) lists.push_back(list(key));
    return ArrayLists(std::move(lists));
  }

 private:
  struct Group {
    std::size_t begin;
    std::size_t count;
    bool is_row_sparse;
  };

  void AddOne(KeyRef key, nb::handle object) {
    if (const PyArray* array = AsArray(object)) {
      dense_.push_back(use_ == Use::kWrite ? Writable(call_, *array) : array->array);
    } else if (const PyRowSparse* array = AsRowSparse(object)) {
      row_sparse_.push_back(array->array);
    } else {
      throw InvalidType(fmt::format(
          "{}: key {}: expected an NDArray, a RowSparseNDArray or a list of them, got {}", call_,
          ToString(key), TypeName(object)));
    }
  }

  const char* const call_;
  const Use use_;
  std::vector<Group> groups_;  // one a key
  std::vector<NDArray> dense_;
  std::vector<RowSparseNDArray> row_sparse_;
};

// The keys of a call, flattened from lists of lists as they come, and what belongs to them.
class Call {
 public:
  Call(const char* name, Use use) : name_(name), arrays_(name, use) {}

  void Add(nb::handle key, nb::handle value, int depth = 0) {
    if (!IsList(key)) {
      keys_.push_back(ToKey(name_, key));
      if (PyUnicode_Check(key.ptr())) kept_.push_back(nb::borrow(key));  // keys_ borrows its text
      arrays_.Add(keys_.back(), value);
      return;
    }
    constexpr int kDepthMax = 100;  // a list may be in itself
    if (depth == kDepthMax) {
      throw InvalidArgument(fmt::format("{}: expected lists of keys in at most {} others, got more",
                                        name_, kDepthMax));
    }
    const std::size_t count = nb::len(key);
    if (!IsList(value) || nb::len(value) != count) {
      throw InvalidArgument(
          fmt::format("{}: expected a list of {} values for {} keys, got {}", name_, count, count,
                      IsList(value) ? fmt::format("{}", nb::len(value)) : TypeName(value)));
    }
    if (keys_.empty()) {
      keys_.reserve(count);
      arrays_.Reserve(count);
    }
    for (std::size_t i = 0; i < count; ++i) Add(ItemOf(key, i), ItemOf(value, i), depth + 1);
  }

  KeyList key_list() const { return KeyList(keys_); }
  ArrayLists lists() const { return arrays_.lists(); }

 private:
  const char* const name_;
  std::vector<KeyRef> keys_;
  std::vector<nb::object> kept_;
  Arrays arrays_;
};

// Calls f(store, key, arrays) for one key, or f(store, keys, lists) for a list of them, without the
// GIL.
template <class F>
void Pairs(const PyStore& self, const char* name, nb::handle key, nb::handle value, Use use,
           const F& f) {
  if (IsList(key)) {
    Call call(name, use);
    call.Add(key, value);
    const KeyList keys = call.key_list();
    const ArrayLists lists = call.lists();
    Using(self, [&](KVStore& store) { f(store, keys, lists); });
    return;
  }
  const KeyRef one = ToKey(name, key);
  if (const PyArray* array = AsArray(value)) {  // the usual case: nothing is allocated
    const NDArray held = use == Use::kWrite ? Writable(name, *array) : array->array;
    Using(self, [&](KVStore& store) { f(store, one, ArrayList(held)); });
    return;
  }
  Arrays arrays(name, use);
  arrays.Add(one, value);
  Using(self, [&](KVStore& store) { f(store, one, arrays.list()); });
}

// The same for calls with two values, of which `second` is written or read, and called
// `second_name` in errors: f(store, key, values, out).
template <class F>
void Triples(const PyStore& self, const char* name, nb::handle key, nb::handle value,
             nb::handle out, Use second, const char* second_name, const F& f) {
  if (IsList(key)) {
    Call from(name, Use::kRead);
    Call to(second_name, second);
    from.Add(key, value);
    to.Add(key, out);
    const KeyList keys = from.key_list();
    const ArrayLists values = from.lists();
    const ArrayLists outputs = to.lists();
    Using(self, [&](KVStore& store) { f(store, keys, values, outputs); });
    return;
  }
  const KeyRef one = ToKey(name, key);
  Arrays from(name, Use::kRead);
  Arrays to(second_name, second);
  from.Add(one, value);
  to.Add(one, out);
  Using(self, [&](KVStore& store) { f(store, one, from.list(), to.list()); });
}

void RequireOut(const char* call, nb::handle out) {
  if (out.is_none()) throw InvalidType(fmt::format("{}: expected out=..., got None", call));
}

void RowSparsePull(const PyStore& self, nb::handle key, nb::handle out, int priority,
                   nb::handle row_ids) {
  RequireOut("row_sparse_pull", out);
  if (row_ids.is_none()) {
    throw InvalidType("row_sparse_pull: expected row_ids=..., got None");
  }
  const PyArray* const one = AsArray(row_ids);
  if (IsList(key) && one != nullptr) {  // for all outputs of all keys
    const NDArray ids = one->array;
    Pairs(self, "row_sparse_pull", key, out, Use::kRead,
          [&](KVStore& store, const auto& keys, const auto& outputs) {
            if constexpr (std::is_same_v<std::decay_t<decltype(keys)>, KeyList>) {
              store.RowSparsePull(keys, outputs, ids, priority);
            }
          });
    return;
  }
  Triples(self, "row_sparse_pull", key, out, row_ids, Use::kRead, "row_sparse_pull: row_ids",
          [&](KVStore& store, const auto& keys, const auto& outputs, const auto& ids) {
            store.RowSparsePull(keys, outputs, ids, priority);
          });
}

// The updater is called on the thread that pushes, with the GIL. What it raises leaves the push.
template <class Input, class Stored>
auto Calling(const std::shared_ptr<PyUpdater>& updater) {
  return [updater](KeyRef key, const Input& input, const Stored& stored) {
    const Locked locked;
    const nb::object function = updater->function;
    if (!function.is_valid()) throw InvalidState("the store is gone, and its updater with it");
    function(FromKey(key), Wrap(input), Wrap(stored));
  };
}

void SetUpdater(PyStore& self, nb::callable updater) {
  const auto fresh = std::make_shared<PyUpdater>(std::move(updater));
  Using(self, [&](KVStore& store) {
    store.SetUpdaters({.dense = Calling<NDArray, NDArray>(fresh),
                       .row_sparse = Calling<RowSparseNDArray, RowSparseNDArray>(fresh),
                       .row_sparse_on_dense = Calling<RowSparseNDArray, NDArray>(fresh)});
  });
  const auto former = std::exchange(self.updater, fresh);  // goes with the GIL, as the last may
}

void SetOptimizer(PyStore& self, const PyOptimizer& optimizer) {
  Using(self, [&](KVStore& store) { store.SetOptimizer(optimizer.optimizer); });
  const auto former = std::exchange(self.updater, nullptr);
}

int Traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  if (const auto& updater = nb::inst_ptr<PyStore>(self)->updater) {
    Py_VISIT(updater->function.ptr());
  }
  return 0;
}

int Clear(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  if (const auto updater = std::exchange(nb::inst_ptr<PyStore>(self)->updater, nullptr)) {
    const nb::object dropped = std::move(updater->function);
  }
  return 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&Traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(&Clear)},
                       {0, nullptr}};

void BindData(nb::class_<PyStore>& type) {
  type.def(
          "init",
          [](const PyStore& self, nb::handle key, nb::handle value) {
            Pairs(self, "init", key, value, Use::kRead,
                  [&](KVStore& store, const auto& k, const auto& v) { store.Init(k, v); });
          },
          nb::arg("key").none(), nb::arg("value").none(),
          "Adds keys with copies of their values. Returns when they are in the store.")
      .def(
          "push",
          [](const PyStore& self, nb::handle key, nb::handle value, int priority) {
            Pairs(
                self, "push", key, value, Use::kRead,
                [&](KVStore& store, const auto& k, const auto& v) { store.Push(k, v, priority); });
          },
          nb::arg("key").none(), nb::arg("value").none(), nb::arg("priority") = 0,
          "Sums the values of each key and hands the sum to the updater. Returns at once.")
      .def(
          "pull",
          [](const PyStore& self, nb::handle key, nb::handle out, int priority,
             Flag ignore_sparse) {
            RequireOut("pull", out);
            Pairs(self, "pull", key, out, Use::kWrite,
                  [&](KVStore& store, const auto& k, const auto& v) {
                    store.Pull(k, v, priority, ignore_sparse.value);
                  });
          },
          nb::arg("key").none(), nb::arg("out") = nb::none(), nb::arg("priority") = 0,
          nb::arg("ignore_sparse") = true,
          "Copies the value of each key to its outputs. Returns at once; reads of the outputs\n"
          "wait. Row-sparse outputs are left alone unless ignore_sparse is false.")
      .def(
          "pushpull",
          [](const PyStore& self, nb::handle key, nb::handle value, nb::handle out, int priority) {
            if (out.is_none()) {
              Pairs(self, "pushpull", key, value, Use::kWrite,
                    [&](KVStore& store, const auto& k, const auto& v) {
                      store.PushPull(k, v, priority);
                    });
            } else {
              Triples(self, "pushpull", key, value, out, Use::kWrite, "pushpull: out",
                      [&](KVStore& store, const auto& k, const auto& v, const auto& o) {
                        store.PushPull(k, v, o, priority);
                      });
            }
          },
          nb::arg("key").none(), nb::arg("value").none(), nb::arg("out") = nb::none(),
          nb::arg("priority") = 0, "Push, then pull to `out`, or to `value` if there is none.")
      .def(
          "broadcast",
          [](const PyStore& self, nb::handle key, nb::handle value, nb::handle out, int priority) {
            Triples(self, "broadcast", key, value, out, Use::kWrite, "broadcast: out",
                    [&](KVStore& store, const auto& k, const auto& v, const auto& o) {
                      store.Broadcast(k, v, o, priority);
                    });
          },
          nb::arg("key").none(), nb::arg("value").none(), nb::arg("out").none(),
          nb::arg("priority") = 0, "Init, then pull to `out`.")
      .def("row_sparse_pull", &RowSparsePull, nb::arg("key").none(), nb::arg("out") = nb::none(),
           nb::arg("priority") = 0, nb::arg("row_ids") = nb::none(),
           "Each output gets the rows of its ids, which need be neither sorted nor unique. One\n"
           "array of ids serves all outputs.")
      .def(
          "reset",
          [](const PyStore& self, nb::handle key, nb::handle value) {
            const KeyRef one = ToKey("reset", key);
            Arrays arrays("reset", Use::kRead);
            arrays.Add(one, value);
            Using(self, [&](KVStore& store) { store.Reset(one, arrays.list()); });
          },
          nb::arg("key").none(), nb::arg("value").none(),
          "Overwrites the value of a key that is there, cures it of an error and forgets its\n"
          "optimizer state.")
      .def(
          "remove",
          [](const PyStore& self, nb::handle key) {
            const KeyRef one = ToKey("remove", key);
            Using(self, [&](KVStore& store) { store.Remove(one); });
          },
          nb::arg("key").none(), "Takes a key out of the store.")
      .def(
          "contains",
          [](const PyStore& self, nb::handle key) {
            const KeyRef one = ToKey("contains", key);
            return Using(self, [&](KVStore& store) { return store.Contains(one); });
          },
          nb::arg("key").none(), "Whether the store has the key.")
      .def(
          "keys",
          [](const PyStore& self) {
            const std::vector<Key> found = Using(self, [](KVStore& store) { return store.Keys(); });
            nb::list keys;
            for (const Key& key : found) keys.append(FromKey(key));
            return keys;
          },
          "The keys, in the order of their creation; of a job sorted.");
}

void BindControl(nb::class_<PyStore>& type) {
  type.def("_set_updater", &SetUpdater, nb::arg("updater"),
           "Later pushes call updater(key, input, stored), on the thread that pushes, in place of\n"
           "replacing the stored value.")
      .def("_set_native_optimizer", &SetOptimizer)
      .def("_set_gradient_compression",
           [](const PyStore& self, const std::string& kind, double threshold) {
             Using(self, [&](KVStore& store) {
               store.SetGradientCompression({.type = kind, .threshold = threshold});
             });
           })
      .def("_save_native_states",
           [](const PyStore& self, const std::string& file, Flag with_optimizer) {
             Using(self,
                   [&](KVStore& store) { store.SaveOptimizerStates(file, with_optimizer.value); });
           })
      // (key, shape, dtype) of each key, or None for a store that does not say.
      .def("_forms",
           [](const PyStore& self) -> nb::object {
             std::vector<kvstore::KeyForm> found;
             const bool is_local = Using(self, [&](KVStore& store) {
               const auto* const local = dynamic_cast<kvstore::LocalKVStore*>(&store);
               if (local != nullptr) found = local->Forms();
               return local != nullptr;
             });
             if (!is_local) return nb::none();
             nb::list forms;
             for (const kvstore::KeyForm& one : found) {
               forms.append(nb::make_tuple(FromKey(one.key), FromShape(one.shape),
                                           static_cast<int>(one.dtype)));
             }
             return forms;
           })
      .def("_load_native_states",
           [](const PyStore& self, const std::string& file) {
             Using(self, [&](KVStore& store) { store.LoadOptimizerStates(file); });
           })
      .def(
          "close",
          [](PyStore& self) {
            engine::CheckNotForked("close");
            std::shared_ptr<KVStore> store = std::move(self.store);
            const Blocking blocking;
            LetGo(store);
          },
          "Ends the use of the store; a dist store leaves the job in order, once what it pushed\n"
          "is acknowledged. If another thread is in a call on it, when that returns. Happens by\n"
          "itself when the store is dropped, or at exit. Ctrl-C ends the wait for what is pushed:\n"
          "the store is closed then, and the worker has failed.")
      .def(
          "barrier",
          [](const PyStore& self) { Using(self, [](KVStore& store) { store.Barrier(); }); },
          "Returns when all workers have called it.")
      .def(
          "_send_command_to_servers",
          [](const PyStore& self, int head, const std::string& body) {
            Using(self, [&](KVStore& store) { store.SendCommandToServers(head, body); });
          },
          nb::arg("head"), nb::arg("body"),
          "Returns after every server's controller ran the command.")
      .def(
          "_trace_servers",
          [](const PyStore& self, const std::string& file) {
            Using(self, [&](KVStore& store) { kvstore::dist::TraceServers(store, file); });
          },
          nb::arg("file"))
      .def(
          "is_capable",
          [](const PyStore& self, const std::string& capability) {
            return Open(self)->IsCapable(capability);
          },
          nb::arg("capability"),
          "'optimizer': whether set_optimizer works; 'compression': set_gradient_compression.")
      .def_prop_ro(
          "type", [](const PyStore& self) { return Open(self)->type(); },
          "The type's name, in lower case.")
      .def_prop_ro(
          "rank", [](const PyStore& self) { return Open(self)->rank(); },
          "The rank of this worker, from 0.")
      .def_prop_ro(
          "num_workers", [](const PyStore& self) { return Open(self)->num_workers(); },
          "How many workers there are.")
      .def_prop_ro(
          "num_dead_nodes",
          [](const PyStore& self) {
            return Using(self, [](KVStore& store) { return store.NumDeadNodes(); });
          },
          "How many nodes of the job are dead.")
      .def_prop_ro(
          "transfers",
          [](const PyStore& self) {
            const TransferStats stats = Open(self)->transfers();
            nb::dict result;
            result["pushed_bytes"] = stats.pushed_bytes;
            result["pulled_bytes"] = stats.pulled_bytes;
            return result;
          },
          "Bytes of dense arrays that the calls so far have asked to move: pushed_bytes (of codes\n"
          "if compressed), pulled_bytes.");
}

}  // namespace

void BindKVStore(nb::module_& m) {
  nb::class_<PyStore> type(m, "KVStore", nb::type_slots(slots));
  type.def(
      "__init__",
      [](PyStore* self, const std::string& name, Flag strict_init) {
        std::unique_ptr<KVStore> store;
        {
          const Blocking blocking;
          store = KVStore::Create(name, TheEngine(), {.strict_init = strict_init.value});
        }
        new (self) PyStore(std::move(store));
      },
      nb::arg("name") = "local", nb::arg("strict_init") = false);
  BindData(type);
  BindControl(type);
  m.def("kvstore_types", &KVStore::Types);
  m.def("compression_types", [] {
    std::vector<std::string> types;
    for (std::string_view name : CompressionTypes()) types.emplace_back(name);
    return types;
  });
}

}  // namespace heddle::python
