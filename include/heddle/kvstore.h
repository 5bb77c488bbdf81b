// KVStore: values under keys, shared by devices. Gradients are pushed and summed, an updater
// changes the stored value, weights are pulled.
//
//   auto store = heddle::KVStore::Create("device");
//   store->SetOptimizer(heddle::Sgd({.learning_rate = 0.1}));
//   store->Init("weight", weight);
//   store->Push("weight", {gradient0, gradient1}, /*priority=*/-layer);  // returns at once
//   store->Pull("weight", {weight0, weight1}, /*priority=*/-layer);      // so does this
//   weight0.WaitToRead();
//
// docs/consistency.md lists the promises and the test that shows each.
#pragma once

#include <heddle/engine.h>
#include <heddle/key.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace heddle {

// Borrows the arrays of one key for the duration of a call: an array, `{a, b}`, or any contiguous
// range of arrays; all of them dense or all of them row-sparse.
class ArrayList {
 public:
  ArrayList() = default;                                   // none
  ArrayList(const NDArray& array) : arrays_(&array, 1) {}  // NOLINT(google-explicit-constructor)
  ArrayList(std::initializer_list<NDArray> arrays)         // NOLINT(google-explicit-constructor)
      : arrays_(arrays.begin(), arrays.size()) {}
  ArrayList(const std::vector<NDArray>& arrays)  // NOLINT(google-explicit-constructor)
      : arrays_(arrays) {}
  ArrayList(std::span<const NDArray> arrays)  // NOLINT(google-explicit-constructor)
      : arrays_(arrays) {}
  ArrayList(const RowSparseNDArray& array)  // NOLINT(google-explicit-constructor)
      : row_sparse_(&array, 1) {}
  ArrayList(std::initializer_list<RowSparseNDArray> arrays)  // NOLINT(google-explicit-constructor)
      : row_sparse_(arrays.begin(), arrays.size()) {}
  ArrayList(const std::vector<RowSparseNDArray>& arrays)  // NOLINT(google-explicit-constructor)
      : row_sparse_(arrays) {}
  ArrayList(std::span<const RowSparseNDArray> arrays)  // NOLINT(google-explicit-constructor)
      : row_sparse_(arrays) {}

  // One of the two is empty.
  std::span<const NDArray> arrays() const { return arrays_; }
  std::span<const RowSparseNDArray> row_sparse() const { return row_sparse_; }

 private:
  std::span<const NDArray> arrays_;
  std::span<const RowSparseNDArray> row_sparse_;
};

// Borrows the keys of a list call: `{"a", "b"}`, `{5, 7, 9}`, or a vector of integers, strings or
// Key.
class KeyList {
 public:
  KeyList(std::initializer_list<KeyRef> keys)  // NOLINT(google-explicit-constructor)
      : keys_(keys) {}
  template <std::convertible_to<KeyRef> T>
  KeyList(const std::vector<T>& keys)  // NOLINT(google-explicit-constructor)
      : keys_(keys.begin(), keys.end()) {}

  std::span<const KeyRef> keys() const { return keys_; }

 private:
  std::vector<KeyRef> keys_;
};

// Borrows what belongs to the keys of a list call, in order: an array each, `{a, b}`, or a list of
// arrays each (several devices), `{{a0, a1}, {b0, b1}}`; or the same as vectors.
class ArrayLists {
 public:
  ArrayLists(std::initializer_list<ArrayList> lists)  // NOLINT(google-explicit-constructor)
      : lists_(lists) {}
  explicit ArrayLists(std::vector<ArrayList> lists) : lists_(std::move(lists)) {}
  ArrayLists(const std::vector<NDArray>& arrays)  // NOLINT(google-explicit-constructor)
      : lists_(arrays.begin(), arrays.end()) {}
  ArrayLists(const std::vector<std::vector<NDArray>>& lists)  // NOLINT
      : lists_(lists.begin(), lists.end()) {}
  ArrayLists(const std::vector<RowSparseNDArray>& arrays)  // NOLINT(google-explicit-constructor)
      : lists_(arrays.begin(), arrays.end()) {}
  ArrayLists(const std::vector<std::vector<RowSparseNDArray>>& lists)  // NOLINT
      : lists_(lists.begin(), lists.end()) {}

  std::span<const ArrayList> lists() const { return lists_; }

 private:
  std::vector<ArrayList> lists_;
};

// One key of a call and its arrays, dense or row-sparse. A list call may name a key several times.
struct KeyArrays {
  KeyArrays(KeyRef of, const ArrayList& list)
      : key(of), arrays(list.arrays()), row_sparse(list.row_sparse()) {}

  KeyRef key;
  // One of the two is empty.
  std::span<const NDArray> arrays;
  std::span<const RowSparseNDArray> row_sparse;
};

// One key of a row-sparse pull. As many ids arrays as outputs, or one for all of them.
struct KeyRowPull {
  KeyRef key;
  std::span<const RowSparseNDArray> out;
  std::span<const NDArray> row_ids;
};

// Called once a key and push on the pushing thread, before Push returns. Changes `stored`, usually
// by pushing ops: `stored += input * 2`. `input` is the sum of what was pushed, valid until the
// next push of the key. Both are handles of arrays, also for ops of the caller's own.
using Updater = std::function<void(KeyRef key, const NDArray& input, const NDArray& stored)>;

// The updaters of a store, one for each pair of kinds: of what is pushed, and of the stored value.
// A push of a pair whose function is null is an error; so is a dense one onto a row-sparse value.
struct Updaters {
  Updater dense;
  std::function<void(KeyRef key, const RowSparseNDArray& input, const RowSparseNDArray& stored)>
      row_sparse;
  std::function<void(KeyRef key, const RowSparseNDArray& input, const NDArray& stored)>
      row_sparse_on_dense;
};

// How `device` adds up the dense arrays of a push that lie on several GPUs, if they are large
// enough to gain by it (docs/gpu.md, "Order of reduction").
enum class GpuSums : std::uint8_t {
  kDirect,  // all arrays are copied to the GPU that has the value
  kRelay,   // along the links between the GPUs, added in the order of the list: the same bits
  kTree,    // along the links, added in an order that depends on them: other bits of floats
};

struct KVStoreOptions {
  bool strict_init = false;  // a push never creates a key
  // Unset: HEDDLE_GPU_SUMS (direct, relay, tree), else kTree if MXNET_KVSTORE_USETREE is 1, else
  // kRelay. Create throws InvalidArgument, naming the variable, if it holds something else.
  std::optional<GpuSums> gpu_sums = std::nullopt;
};

// Gradient compression: what the devices push reaches the store in a few bits an element, and what
// these could not carry is added to the device's next push of the key.
struct CompressionOptions {
  std::string type;        // "2bit": the threshold, its negative or nothing; "1bit": 1 or -1
  double threshold = 0.5;  // 2bit: above 0; 1bit: finite
};
std::vector<std::string_view> CompressionTypes();  // sorted

// Bytes of dense arrays that the calls so far have asked to move, those that are still queued
// included; row-sparse arrays do not count, as only the ops know how many rows they have.
struct TransferStats {
  std::int64_t pushed_bytes = 0;  // from pushed arrays to the store; of their codes if compressed
  std::int64_t pulled_bytes = 0;  // from the store to outputs
};

class KVStore;
using KVStoreFactory =
    std::function<std::unique_ptr<KVStore>(Engine& engine, const KVStoreOptions& options)>;

template <class T>
concept KeyLike = std::convertible_to<const T&, KeyRef>;

// The interface of all stores, and the calls that all share. A type of one's own derives from it
// and overrides what it can do; the rest throws InvalidState ("not supported by type ...").
//
// Order:   per key, operations of a thread take effect in program order: a push after all earlier
//          pushes and pulls of the key, a pull after all earlier ones. A pull returns the newest
//          value; reads of its output wait for it. Calls of several threads behave as if made in
//          one order that respects happens-before.
// Inputs:  a pushed array may be overwritten right after: the write waits. The store never aliases
//          the caller's arrays. A list call reads all its inputs before it writes any output.
// Errors:  InvalidArgument on the calling thread, naming the key, the expected and the given, for
//          an unknown key, a key of the other kind, wrong shape, dtype, number of arrays, an empty
//          array or one of another engine. Nothing of the call happens then, list calls included.
//          A push whose input failed leaves the stored value as it was; pulls of the key pass the
//          error on to their outputs until a push of it succeeds. An update that fails midway
//          poisons the key until Reset.
// Threads: every method may be called from any thread, and from inside op bodies except where the
//          method waits.
// Life:    may be dropped with operations pending: they complete.
class KVStore {
 public:
  // Where pushes are summed and values updated:
  //   local              on the CPUs
  //   device             on the devices that push
  //   nccl               on GPUs, by NCCL (docs/gpu.md)
  //   dist_sync          by the servers of a job, in rounds (docs/distributed.md); also dist
  //   dist_async         by the servers, each push as it comes
  //   dist_device_sync, dist_device_async (also dist_sync_device, dist_async_device)
  //                      the same two, a worker's lists summed on its GPU
  //   teststore          nowhere: keeps nothing, for tests
  // and what Register has added. Case does not matter. InvalidArgument for an unknown type, listing
  // the known ones.
  static std::unique_ptr<KVStore> Create(std::string_view type, const KVStoreOptions& options = {});
  static std::unique_ptr<KVStore> Create(std::string_view type, Engine& engine,
                                         const KVStoreOptions& options = {});
  // Adds a type for the life of the process. InvalidArgument if the name is empty or taken, or
  // `factory` is null.
  static void Register(std::string_view type, KVStoreFactory factory);
  static std::vector<std::string> Types();  // known names, sorted

  explicit KVStore(Engine& engine) : engine_(&engine) {}
  virtual ~KVStore() = default;
  KVStore(const KVStore&) = delete;
  KVStore& operator=(const KVStore&) = delete;

  // Adds keys with copies of the values; waits until they are in the store. InvalidArgument for a
  // key that is there already or named twice; the error of `value` if it is poisoned.
  template <KeyLike K>
  void Init(const K& key, ArrayList value) {
    const KeyArrays pair(KeyRef(key), value);
    DoInit({&pair, 1});
  }
  void Init(const KeyList& keys, const ArrayLists& values) { DoInit(Pair("Init", keys, values)); }

  // Sums the values of each key in list order and hands the sum to the updater; by default it
  // replaces the stored value, and creates a key that is not there (unless strict_init). Values may
  // be row-sparse: by default the stored value becomes what is pushed, dense or row-sparse (in a
  // job converted to the kind that Init gave it). An optimizer takes row-sparse gradients of dense
  // and of row-sparse values; then a dense gradient of a row-sparse value is an error, as it is
  // with an updater. A higher priority runs first. Returns once the ops are queued.
  template <KeyLike K>
  void Push(const K& key, ArrayList values, int priority = 0) {
    const KeyArrays pair(KeyRef(key), values);
    DoPush({&pair, 1}, priority);
  }
  void Push(const KeyList& keys, const ArrayLists& values, int priority = 0) {
    DoPush(Pair("Push", keys, values), priority);
  }

  // Copies the stored value of each key to its outputs, casting to their dtypes. If an array is the
  // output of several keys, the last wins. Returns once the ops are queued.
  // Row-sparse outputs are left alone, which is logged once a key at level info, unless
  // ignore_sparse is false: then they get the whole value, from a dense one the rows that are not
  // all zeros.
  template <KeyLike K>
  void Pull(const K& key, ArrayList out, int priority = 0, bool ignore_sparse = true) {
    const KeyArrays pair(KeyRef(key), out);
    DoPull({&pair, 1}, priority, ignore_sparse);
  }
  void Pull(const KeyList& keys, const ArrayLists& out, int priority = 0,
            bool ignore_sparse = true) {
    DoPull(Pair("Pull", keys, out), priority, ignore_sparse);
  }

  // Each output gets the rows of its ids: numbers of any dtype but bool, in any shape, on any
  // device, neither sorted nor unique. One ids array serves all outputs of its key, or there is one
  // for each. Rows that the stored value lacks come as rows of zeros; if it has no rows at all,
  // none come. The value of the key must be row-sparse. Returns once the ops are queued: an id that
  // is out of range or has a fraction comes as InvalidArgument out of waits on the outputs that it
  // was for, and disturbs nothing else.
  template <KeyLike K>
  void RowSparsePull(const K& key, ArrayList out, ArrayList row_ids, int priority = 0) {
    const KeyRowPull pull = RowPull(KeyRef(key), out, row_ids);
    DoRowSparsePull({&pull, 1}, priority);
  }
  // A list of ids arrays for each key, or one ids array for all outputs of all keys.
  void RowSparsePull(const KeyList& keys, const ArrayLists& out, const ArrayLists& row_ids,
                     int priority = 0);
  void RowSparsePull(const KeyList& keys, const ArrayLists& out, const NDArray& row_ids,
                     int priority = 0);

  // Push, then pull to `out`; without `out` to `value`. Row-sparse outputs are left alone.
  template <KeyLike K>
  void PushPull(const K& key, ArrayList value, ArrayList out, int priority = 0) {
    const KeyArrays from(KeyRef(key), value);
    const KeyArrays to(KeyRef(key), out);
    DoPushPull({&from, 1}, {&to, 1}, priority);
  }
  template <KeyLike K>
  void PushPull(const K& key, ArrayList value, int priority = 0) {
    PushPull(key, value, value, priority);
  }
  void PushPull(const KeyList& keys, const ArrayLists& values, const ArrayLists& out,
                int priority = 0) {
    DoPushPull(Pair("PushPull", keys, values), Pair("PushPull", keys, out), priority);
  }
  void PushPull(const KeyList& keys, const ArrayLists& values, int priority = 0) {
    const std::vector<KeyArrays> pairs = Pair("PushPull", keys, values);
    DoPushPull(pairs, pairs, priority);
  }

  // Init, then pull to `out`. Row-sparse outputs are left alone.
  template <KeyLike K>
  void Broadcast(const K& key, ArrayList value, ArrayList out, int priority = 0) {
    const KeyArrays from(KeyRef(key), value);
    const KeyArrays to(KeyRef(key), out);
    DoBroadcast({&from, 1}, {&to, 1}, priority);
  }
  void Broadcast(const KeyList& keys, const ArrayLists& values, const ArrayLists& out,
                 int priority = 0) {
    DoBroadcast(Pair("Broadcast", keys, values), Pair("Broadcast", keys, out), priority);
  }

  // Overwrites the value of a key that is there, cures it if it is poisoned, and forgets its
  // optimizer state and residuals. `value` may be of either kind, dense or row-sparse, which the
  // key has from then on; in a job it is of the key's, as Init made it. Waits for it; throws its
  // error, changing nothing, if it is poisoned.
  template <KeyLike K>
  void Reset(const K& key, ArrayList value) {
    DoReset(KeyArrays(KeyRef(key), value));
  }
  // Takes a key out of the store (in a job each worker for itself). Earlier operations complete.
  template <KeyLike K>
  void Remove(const K& key) {
    DoRemove(KeyRef(key));
  }
  template <KeyLike K>
  bool Contains(const K& key) const {
    return DoContains(KeyRef(key));
  }
  virtual std::vector<Key> Keys() const;  // in the order of their creation; of a job: sorted

  // What later pushes do with the sum, in place of replacing the stored value. One thread at a time
  // is in the updater of a key; an exception of it leaves Push. It may read and wait, unless the
  // push comes from inside an op, and push other keys. InvalidArgument if null; InvalidState in a
  // push of a key from inside that key's own updater, also by way of other keys' updaters.
  // Two things may block for ever: an updater that waits, for its input too, while bodies of ops
  // push its key; and, with several threads, updaters of keys that push each other's.
  void SetUpdater(Updater updater);
  // The same with functions for row-sparse values. InvalidArgument if all are null.
  virtual void SetUpdaters(Updaters updaters);
  // Updates by ops of the store's own, with a fresh state for each key. Later changes of the
  // optimizer's parameters count from the next push on.
  virtual void SetOptimizer(std::shared_ptr<Optimizer> optimizer);
  // Writes to a file what the optimizer keeps for the keys (momenta, counts of updates, ...), as it
  // is after all that this thread has pushed; with_optimizer also the optimizer's parameters,
  // schedule and multipliers. Returns when the file is in place. Not the values: save those as
  // well. InvalidState without an optimizer, from inside an op, or if another thread sets an
  // optimizer or loads states meanwhile; InvalidArgument if a key is not UTF-8, or if there are
  // more than 65 000 states (a key has none to three, by the optimizer); OutOfMemory if
  // there is no room for a copy of the states; IoError if the file cannot be written; the error of
  // a poisoned key.
  virtual void SaveOptimizerStates(const std::string& file, bool with_optimizer = false);
  // Takes the states of a file in place of those that are, for later pushes, and gives the
  // optimizer the parameters, schedule and multipliers if they are there. Training goes on with the
  // same bits as if it had never stopped, but for what compression had kept back. InvalidState
  // without an optimizer; IoError for a file that cannot be read, is damaged or of another version;
  // InvalidArgument for states of another optimizer, or of other keys, shapes or dtypes than those
  // of the store. Nothing is changed then.
  virtual void LoadOptimizerStates(const std::string& file);

  // Compresses what later pushes send; pulls and Init stay whole. Each key and sender (a device, or
  // the n-th array of a device in a push) has a residual of its own, which Reset forgets. Pushes of
  // other dtypes than float32, float16 and bfloat16, and of row-sparse arrays, are InvalidArgument
  // from then on.
  // docs/compression.md has formulas and layouts.
  // InvalidArgument for an unknown type, a threshold that it cannot work with, or other options
  // than those set before (the same again are fine); InvalidState after the first push.
  virtual void SetGradientCompression(const CompressionOptions& options);

  virtual TransferStats transfers() const { return {}; }

  const std::string& type() const { return type_; }  // lower case, as created
  Engine& engine() const { return *engine_; }
  virtual int rank() const { return 0; }
  virtual int num_workers() const { return 1; }
  // Returns when all workers have called it.
  virtual void Barrier() {}
  // Returns after every server's controller ran the command; at once where there are no servers.
  virtual void SendCommandToServers(int head, std::string_view body);
  virtual int NumDeadNodes() const { return 0; }
  // "optimizer": whether SetOptimizer works; "compression": SetGradientCompression. False for
  // unknown names; case does not matter.
  virtual bool IsCapable(std::string_view capability) const;

 protected:
  // The calls above, as a type implements them. Keys may repeat, arrays may be empty lists or empty
  // handles; in PushPull and Broadcast both lists name the same keys in the same order.
  virtual void DoInit(std::span<const KeyArrays> pairs);
  virtual void DoPush(std::span<const KeyArrays> pairs, int priority);
  virtual void DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse);
  virtual void DoRowSparsePull(std::span<const KeyRowPull> pulls, int priority);
  virtual void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                          int priority);
  virtual void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                           int priority);
  virtual void DoReset(const KeyArrays& value);
  virtual void DoRemove(KeyRef key);
  virtual bool DoContains(KeyRef key) const;

  [[noreturn]] void ThrowNotSupported(std::string_view call) const;

 private:
  // A pair a key. InvalidArgument unless there are as many lists as keys.
  static std::vector<KeyArrays> Pair(std::string_view call, const KeyList& keys,
                                     const ArrayLists& lists);
  // InvalidArgument unless the outputs are row-sparse, the ids dense, and as many as the outputs or
  // one.
  static KeyRowPull RowPull(KeyRef key, const ArrayList& out, const ArrayList& row_ids);

  Engine* engine_;
  std::string type_ = "unnamed";  // set by Create
};

}  // namespace heddle
