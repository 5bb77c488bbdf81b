// The stores "dist_sync", "dist_async", "dist_device_sync" and "dist_device_async" at a worker.
//
// Every call becomes ops: one that reads the pushed array until the servers have acknowledged it,
// or writes the pulled one when its parts have come; lists are summed by an op before. The ops are
// asynchronous and hold no thread. The order of a key's requests is that of the calls (DistKey).
#include "kvstore/dist/worker/dist_kvstore.h"

#include <heddle/error.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/log.h"
#include "base/mutex.h"
#include "kvstore/checks.h"
#include "kvstore/compression/compressor.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/worker/control_call.h"
#include "kvstore/dist/worker/dist_key.h"
#include "kvstore/dist/worker/dist_states.h"
#include "kvstore/dist/worker/parts_call.h"
#include "kvstore/key_table.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/registry.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore::dist {

namespace {

using KeyPtr = std::shared_ptr<DistKey>;

// Starts a call from the body of its op, or sets the queue of its key free if the op never runs.
class CallStarter {
 public:
  explicit CallStarter(std::shared_ptr<PartsCall> call) : call_(std::move(call)) {}
  CallStarter(CallStarter&&) = default;
  CallStarter& operator=(CallStarter&&) = delete;
  ~CallStarter() {
    if (call_ != nullptr) call_->Cancel();
  }
  PartsCall& operator*() const { return *call_; }
  PartsCall* operator->() const { return call_.get(); }

 private:
  std::shared_ptr<PartsCall> call_;
};

class DistKVStore final : public KVStore {
 public:
  DistKVStore(Engine& engine, std::string type, std::shared_ptr<WorkerLink> link,
              std::uint32_t store);
  ~DistKVStore() override;

  std::vector<Key> Keys() const override;
  void SetUpdaters(Updaters updaters) override;
  void SetOptimizer(std::shared_ptr<Optimizer> optimizer) override EXCLUDES(mutex_);
  void SaveOptimizerStates(const std::string& file, bool with_optimizer) override EXCLUDES(mutex_);
  void LoadOptimizerStates(const std::string& file) override EXCLUDES(mutex_);
  void SetGradientCompression(const CompressionOptions& options) override EXCLUDES(mutex_);
  bool IsCapable(std::string_view capability) const override {
    const std::string name = LowerCase(capability);
    return name == "optimizer" || name == "compression";
  }
  TransferStats transfers() const override {
    return {pushed_bytes_.load(std::memory_order_relaxed),
            pulled_bytes_.load(std::memory_order_relaxed)};
  }
  int rank() const override { return link_->rank(); }
  int num_workers() const override { return link_->num_workers(); }
  void Barrier() override;
  void SendCommandToServers(int head, std::string_view body) override;
  int NumDeadNodes() const override { return link_->num_dead(); }

 protected:
  void DoInit(std::span<const KeyArrays> pairs) override;
  void DoPush(std::span<const KeyArrays> pairs, int priority) override;
  void DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) override;
  void DoRowSparsePull(std::span<const KeyRowPull> pulls, int priority) override;
  void DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                  int priority) override;
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override;
  void DoReset(const KeyArrays& value) override;
  bool DoContains(KeyRef key) const override;

 private:
  // One key of a push that has been checked.
  struct KeyPush {
    KeyPtr key;
    std::vector<NDArray> arrays;  // one of the two is empty
    std::vector<RowSparseNDArray> row_sparse;
    CallOptions options;
    std::shared_ptr<const Compressor> compressor;
  };

  // Keys.
  void CheckKeyKindLocked(std::string_view call, KeyRef key) const REQUIRES(mutex_);
  KeyPtr FindKnown(std::string_view call, KeyRef key) const EXCLUDES(mutex_);
  KeyPtr Find(std::string_view call, KeyRef key) EXCLUDES(mutex_);
  std::optional<PartInfo> Describe(std::string_view call, KeyRef key) const;
  KeyPtr Insert(const PartInfo& info) EXCLUDES(mutex_);

  CallOptions OptionsOf(Kind kind, const DistKey& key, int priority) const;
  std::vector<KeyPush> PreparePush(std::string_view call, std::span<const KeyArrays> pairs,
                                   int priority, std::vector<std::size_t>* push_of)
      EXCLUDES(mutex_);
  void CheckPushLocked(std::string_view call, const KeyPush& push,
                       const internal::UpdatePlan* plan) const REQUIRES(mutex_);
  void TellParametersLocked(const internal::UpdatePlan& plan, Outputs* out) REQUIRES(mutex_);
  void CheckPull(std::string_view call, const KeyArrays& pair, const DistKey& key) const;
  void TellIgnored(DistKey& key) EXCLUDES(mutex_);

  void QueuePush(const KeyPush& push, int priority);
  void QueueCompressedPush(const KeyPush& push, const NDArray& value, int priority);
  void QueuePull(const KeyPtr& key, std::span<const NDArray> out, int priority);
  void QueuePull(const KeyPtr& key, std::span<const RowSparseNDArray> out, int priority);
  void QueuePushPull(const KeyPush& push, const NDArray& out, int priority);
  void QueueRowPull(const KeyPtr& key, std::span<const RowSparseNDArray> out, const NDArray& ids,
                    int priority);
  bool CanFuse(std::span<const KeyPush> pushes, std::span<const KeyArrays> out) const;
  template <class Array>
  Var QueueValue(const KeyPtr& key, Kind kind, const Array* value);
  void InitChecked(std::string_view call, std::span<const KeyArrays> pairs) EXCLUDES(mutex_);

  std::shared_ptr<Optimizer> OptimizerFor(std::string_view call) const EXCLUDES(mutex_);
  void WaitForOwnPushes() EXCLUDES(mutex_);
  Request ControlRequest(std::string_view what, Kind kind, std::int32_t server) const;
  std::vector<Message> CallServers(std::string_view what, Kind kind, const std::string& meta,
                                   std::uint64_t version = 0) const;

  const std::shared_ptr<WorkerLink> link_;
  const std::uint32_t store_;
  const std::shared_ptr<CallCount> calls_ = std::make_shared<CallCount>();
  std::atomic<std::int64_t> pushed_bytes_{0};
  std::atomic<std::int64_t> pulled_bytes_{0};

  // Nothing waits, and no op is pushed, while it is held.
  mutable Mutex mutex_;
  KeyTable<KeyPtr> keys_ GUARDED_BY(mutex_);
  std::optional<bool> string_keys_ GUARDED_BY(mutex_);  // set by the first key
  std::shared_ptr<Optimizer> optimizer_ GUARDED_BY(mutex_);
  std::shared_ptr<const internal::UpdatePlan> told_plan_ GUARDED_BY(mutex_);
  std::vector<std::pair<std::string, double>> told_ GUARDED_BY(mutex_);
  std::uint64_t version_ GUARDED_BY(mutex_) = 0;
  std::int64_t num_update_ GUARDED_BY(mutex_) = 0;  // the most updates of any key
  std::shared_ptr<const Compressor> compressor_ GUARDED_BY(mutex_);
  bool pushed_ GUARDED_BY(mutex_) = false;
};

DistKVStore::DistKVStore(Engine& engine, std::string type, std::shared_ptr<WorkerLink> link,
                         std::uint32_t store)
    : KVStore(engine), link_(std::move(link)), store_(store) {
  link_->Serve(engine);
  try {
    CallServers("opening the store", Kind::kOpenStore, Encode(OpenStoreBody{std::move(type)}));
  } catch (...) {
    link_->Leave(engine);
    throw;
  }
}

// What is under way completes first: nothing of the store outlives it, so that its place in the job
// can be given up right after.
DistKVStore::~DistKVStore() {
  while (!calls_->WaitUntilNone(std::chrono::steady_clock::now() + std::chrono::milliseconds(50))) {
    // Other engines run ops only inside waits.
    if (engine().options().type == "threaded") continue;
    try {
      engine().WaitForAll();
    } catch (const std::exception& error) {
      Log(LogLevel::kWarning, "a dist store was dropped while an op failed: {}", error.what());
    }
  }
  link_->Leave(engine());
}

// ---- Control

Request DistKVStore::ControlRequest(std::string_view what, Kind kind, std::int32_t server) const {
  Request request;
  request.kind = kind;
  request.server = server;
  request.part = ControlPart(store_);
  request.what = what;
  return request;
}

std::vector<Message> DistKVStore::CallServers(std::string_view what, Kind kind,
                                              const std::string& meta,
                                              std::uint64_t version) const {
  std::vector<Request> requests;
  for (std::int32_t server = 0; server < link_->placement().num_servers; ++server) {
    Request& request = requests.emplace_back(ControlRequest(what, kind, server));
    request.version = version;
    request.meta = meta;
  }
  return CallAndWait(engine(), *link_, requests);
}

void DistKVStore::Barrier() { BarrierAndWait(engine(), *link_); }

void DistKVStore::SendCommandToServers(int head, std::string_view body) {
  CallServers(fmt::format("command {}", head), Kind::kCommand,
              Encode(CommandBody{head, std::string(body)}));
}

void DistKVStore::SetUpdaters(Updaters /*updaters*/) {
  throw InvalidState(fmt::format(
      "SetUpdater: stores of type {} update on their servers: expected SetOptimizer, which names "
      "an optimizer for them",
      type()));
}

namespace {

std::vector<std::pair<std::string, double>> ParametersOf(const Optimizer& optimizer) {
  std::vector<std::pair<std::string, double>> parameters;
  for (const auto& [name, value] : optimizer.Parameters()) parameters.emplace_back(name, value);
  return parameters;
}

// Those that do not travel with every push.
std::vector<std::pair<std::string, double>> WithoutRates(
    std::vector<std::pair<std::string, double>> parameters) {
  std::erase_if(parameters, [](const auto& parameter) {
    return parameter.first == "learning_rate" || parameter.first == "weight_decay";
  });
  return parameters;
}

}  // namespace

void DistKVStore::SetOptimizer(std::shared_ptr<Optimizer> optimizer) {
  if (optimizer == nullptr) throw InvalidArgument("SetOptimizer: expected an optimizer, got null");
  const auto parameters = ParametersOf(*optimizer);
  std::uint64_t version = 0;
  {
    MutexLock lock(mutex_);
    version = ((version_ >> 32) + 1) << 32;
  }
  CallServers(fmt::format("set_optimizer {}", optimizer->name()), Kind::kSetOptimizer,
              Encode(OptimizerBody{std::string(optimizer->name()), parameters}), version);
  const auto plan = optimizer->plan();
  MutexLock lock(mutex_);
  version_ = version;
  optimizer_.swap(optimizer);
  told_plan_ = plan;
  told_ = WithoutRates(parameters);
}

// Pushes that come now are of the optimizer as it is now.
void DistKVStore::TellParametersLocked(const internal::UpdatePlan& plan, Outputs* out) {
  if (told_plan_.get() == &plan) return;
  told_plan_ = optimizer_->plan();
  auto parameters = ParametersOf(*optimizer_);
  auto told = WithoutRates(parameters);
  if (told == told_ || link_->rank() != 0) return;
  told_ = std::move(told);
  ++version_;
  std::vector<Request> requests;
  for (std::int32_t server = 0; server < link_->placement().num_servers; ++server) {
    Request& request = requests.emplace_back(
        ControlRequest("set parameters of the optimizer", Kind::kSetParameters, server));
    request.version = version_;
    request.meta = Encode(OptimizerBody{std::string(optimizer_->name()), parameters});
  }
  StartCall(
      *link_, std::move(requests), [](std::exception_ptr, std::vector<Message>) {}, out);
}

std::shared_ptr<Optimizer> DistKVStore::OptimizerFor(std::string_view call) const {
  MutexLock lock(mutex_);
  if (optimizer_ != nullptr) return optimizer_;
  throw InvalidState(fmt::format("{}: expected a store with an optimizer, got one without", call));
}

// A pull is answered when what this worker pushed before has taken effect.
void DistKVStore::WaitForOwnPushes() {
  std::vector<KeyPtr> keys;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, key] : keys_) keys.push_back(key);
  }
  std::vector<NDArray> dense;
  std::vector<RowSparseNDArray> row_sparse;
  for (const KeyPtr& key : keys) {
    if (key->is_row_sparse()) {
      row_sparse.emplace_back(key->shape(), key->dtype(), Cpu(), engine());
      QueuePull(key, {&row_sparse.back(), 1}, 0);
    } else {
      dense.emplace_back(key->shape(), key->dtype(), Cpu(), engine());
      QueuePull(key, {&dense.back(), 1}, 0);
    }
  }
  for (const NDArray& array : dense) array.WaitToRead();
  for (const RowSparseNDArray& array : row_sparse) array.WaitToRead();
}

void DistKVStore::SaveOptimizerStates(const std::string& file, bool with_optimizer) {
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor("SaveOptimizerStates");
  WaitForOwnPushes();
  const auto plan = optimizer->plan();
  OptimizerStates states;
  states.optimizer = optimizer->name();
  states.multi_precision = plan->multi_precision;
  if (with_optimizer) states.settings = SettingsOf(*optimizer);
  states.keys = JoinStates(CallServers("save_optimizer_states", Kind::kSaveStates, {}), engine());
  {
    MutexLock lock(mutex_);
    states.num_update = num_update_;
    for (KeyStates& key : states.keys) {
      const auto found = keys_.find(key.key);
      key.updates = found != keys_.end() ? found->second->updates : key.step;
    }
  }
  WriteStates(file, states, *plan->rule);
}

void DistKVStore::LoadOptimizerStates(const std::string& file) {
  constexpr std::string_view kCall = "LoadOptimizerStates";
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor(kCall);
  WaitForOwnPushes();
  const auto plan = optimizer->plan();
  const OptimizerStates states = ReadStates(file, optimizer->name(), *plan->rule, engine());
  if (states.multi_precision != plan->multi_precision) {
    throw InvalidArgument(fmt::format("{}: {}: expected states with multi_precision {}, got {}",
                                      kCall, file, plan->multi_precision, states.multi_precision));
  }
  for (const KeyStates& key : states.keys) {
    const KeyPtr found = Find(kCall, key.key);
    if (key.shape != found->shape()) ThrowShape(kCall, key.key, found->shape(), key.shape);
    if (key.dtype != found->dtype()) ThrowDType(kCall, key.key, found->dtype(), key.dtype);
  }
  const std::vector<ServerStates> cut =
      CutStates(states.keys, link_->placement().num_servers,
                [&](const KeyStates& key) -> DistKey& { return *FindKnown(kCall, key.key); });
  std::vector<Request> requests;
  for (std::size_t i = 0; i < cut.size(); ++i) {
    Request& request = requests.emplace_back(
        ControlRequest("load_optimizer_states", Kind::kLoadStates, static_cast<std::int32_t>(i)));
    request.meta = Encode(cut[i].body);
    request.payload = cut[i].arrays;
  }
  CallAndWait(engine(), *link_, requests);
  if (states.settings) ApplySettings(*states.settings, *optimizer);
  MutexLock lock(mutex_);
  num_update_ = states.num_update;
  for (const KeyStates& key : states.keys) keys_.find(key.key)->second->updates = key.updates;
}

void DistKVStore::SetGradientCompression(const CompressionOptions& options) {
  const auto fresh = MakeCompressor(options);
  const auto text = [](const CompressionOptions& o) {
    return fmt::format("type {}, threshold {}", o.type, o.threshold);
  };
  {
    MutexLock lock(mutex_);
    if (compressor_ != nullptr) {
      const CompressionOptions& set = compressor_->options();
      if (set.type == fresh->options().type && set.threshold == options.threshold) return;
      throw InvalidArgument(
          fmt::format("SetGradientCompression: expected what is set already, {}, got {}", text(set),
                      text(fresh->options())));
    }
    if (pushed_) {
      throw InvalidState(fmt::format(
          "SetGradientCompression: expected a call before the first push, got {} after it",
          text(fresh->options())));
    }
  }
  CallServers("set_gradient_compression", Kind::kSetCompression,
              Encode(CompressionBody{fresh->options()}));
  MutexLock lock(mutex_);
  compressor_ = fresh;
}

// ---- Keys

void DistKVStore::CheckKeyKindLocked(std::string_view call, KeyRef key) const {
  if (!string_keys_ || *string_keys_ == key.is_string()) return;
  throw InvalidArgument(fmt::format(
      "{}: key {}: expected {} key as the others of this store, got {}", call, ToString(key),
      *string_keys_ ? "a string" : "an integer", key.is_string() ? "a string" : "an integer"));
}

KeyPtr DistKVStore::FindKnown(std::string_view call, KeyRef key) const {
  MutexLock lock(mutex_);
  CheckKeyKindLocked(call, key);
  const auto found = keys_.find(key);
  return found != keys_.end() ? found->second : nullptr;
}

// What the servers know of the key.
std::optional<PartInfo> DistKVStore::Describe(std::string_view call, KeyRef key) const {
  const std::uint64_t id = KeyId(key);
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

KeyPtr DistKVStore::Insert(const PartInfo& info) {
  auto fresh =
      std::make_shared<DistKey>(link_, store_, info.key, info.shape, info.dtype, info.row_sparse);
  MutexLock lock(mutex_);
  string_keys_ = std::holds_alternative<std::string>(info.key);
  return keys_.emplace(info.key, std::move(fresh)).first->second;
}

// A rank that has not initialised the key asks for its shape and dtype at its first use.
KeyPtr DistKVStore::Find(std::string_view call, KeyRef key) {
  if (KeyPtr known = FindKnown(call, key)) return known;
  const std::optional<PartInfo> info = Describe(call, key);
  if (!info) {
    throw UnknownKey(
        fmt::format("{}: unknown key {}: expected one that was initialised", call, ToString(key)));
  }
  return Insert(*info);
}

std::vector<Key> DistKVStore::Keys() const {
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

// ---- Init

// Queues the request that takes a value, or none, to the servers. The op writes the Var returned.
template <class Array>
Var DistKVStore::QueueValue(const KeyPtr& key, Kind kind, const Array* value) {
  CallOptions options = OptionsOf(kind, *key, 0);
  if (value == nullptr) options.flags |= kFlagNoValue;
  const auto call = std::make_shared<PartsCall>(calls_, key, options);
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
  {
    MutexLock lock(mutex_);
    for (const KeyArrays& pair : pairs) {
      CheckKeyKindLocked(call, pair.key);
      if (keys_.find(pair.key) == keys_.end()) continue;
      throw InvalidArgument(fmt::format("{}: key {} is in the store already: expected a new key",
                                        call, ToString(pair.key)));
    }
  }
  const bool gives_value = link_->rank() == 0;
  if (gives_value) {
    for (const KeyArrays& pair : pairs) {
      WithFirstArray(pair, [](const auto& value) { value.WaitToRead(); });
    }
  }
  std::vector<std::pair<PartInfo, Var>> queued;
  for (const KeyArrays& pair : pairs) {
    WithFirstArray(pair, [&](const auto& value) {
      using Array = std::decay_t<decltype(value)>;
      constexpr bool kRowSparse = std::is_same_v<Array, RowSparseNDArray>;
      const KeyPtr key = std::make_shared<DistKey>(link_, store_, pair.key.ToKey(), value.shape(),
                                                   value.dtype(), kRowSparse);
      const Array* const sent = gives_value ? &value : nullptr;
      queued.emplace_back(key->InfoOf(key->parts().front()),
                          QueueValue<Array>(key, Kind::kInit, sent));
    });
  }
  for (const auto& [info, ended] : queued) engine().WaitForVar(ended);
  for (const auto& [info, ended] : queued) Insert(info);
}

void DistKVStore::DoInit(std::span<const KeyArrays> pairs) {
  for (const KeyArrays& pair : pairs) CheckOneArray("Init", pair, engine());
  CheckOneKind("Init", pairs);
  CheckDistinct("Init", pairs);
  InitChecked("Init", pairs);
}

void DistKVStore::DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                              int priority) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckOneArray("Broadcast", values[i], engine());
    CheckArrays("Broadcast", out[i], engine());
    WithFirstArray(values[i], [&](const auto& value) {
      ForEachArray(out[i],
                   [&](const auto& array) { CheckShape("Broadcast", out[i].key, value, array); });
    });
  }
  CheckOneKind("Broadcast", values);
  CheckDistinct("Broadcast", values);
  InitChecked("Broadcast", values);
  DoPull(out, priority, /*ignore_sparse=*/true);
}

void DistKVStore::DoReset(const KeyArrays& value) {
  CheckOneArray("Reset", value, engine());
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

// ---- Push

CallOptions DistKVStore::OptionsOf(Kind kind, const DistKey& key, int priority) const {
  CallOptions options;
  options.kind = kind;
  options.priority = priority;
  options.dtype = key.dtype();
  if (key.is_row_sparse()) options.flags |= kFlagRowSparse;
  options.deadline = link_->deadline();
  return options;
}

void DistKVStore::CheckPushLocked(std::string_view call, const KeyPush& push,
                                  const internal::UpdatePlan* plan) const {
  const KeyRef name(push.key->key());
  const bool row_sparse = !push.row_sparse.empty();
  if (row_sparse != push.key->is_row_sparse()) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: expected {} arrays, as the value is, got {} ones", call, ToString(name),
        push.key->is_row_sparse() ? "row-sparse" : "dense", row_sparse ? "row-sparse" : "dense"));
  }
  if (compressor_ != nullptr && (row_sparse || !IsCompressible(push.key->dtype()))) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: expected dense arrays of float32, float16 or bfloat16, since gradient "
        "compression {} is set, got {} ones of {}",
        call, ToString(name), compressor_->options().type, row_sparse ? "row-sparse" : "dense",
        Name(push.key->dtype())));
  }
  if (plan == nullptr) return;
  if (!IsFloating(push.key->dtype())) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected a floating dtype for optimizer {}, got {}", call,
                    ToString(name), optimizer_->name(), Name(push.key->dtype())));
  }
  const std::string refusal =
      plan->rule->Refusal({.dimensions = static_cast<int>(push.key->shape().ndim()),
                           .weight_decay = plan->WeightDecay(name),
                           .row_sparse = row_sparse});
  if (!refusal.empty()) {
    throw InvalidArgument(fmt::format("{}: key {}: optimizer {}: {}", call, ToString(name),
                                      optimizer_->name(), refusal));
  }
}

std::vector<DistKVStore::KeyPush> DistKVStore::PreparePush(std::string_view call,
                                                           std::span<const KeyArrays> pairs,
                                                           int priority,
                                                           std::vector<std::size_t>* push_of) {
  std::vector<KeyPush> pushes;
  std::unordered_map<KeyRef, std::size_t, KeyHash, KeyEqual> places;
  for (const KeyArrays& pair : pairs) {
    const auto [place, is_new] = places.emplace(pair.key, pushes.size());
    if (push_of != nullptr) push_of->push_back(place->second);
    if (is_new) pushes.emplace_back().key = Find(call, pair.key);
    KeyPush& push = pushes[place->second];
    ForEachArray(pair,
                 [&](const auto& array) { CheckShapeAndDType(call, pair.key, *push.key, array); });
    push.arrays.insert(push.arrays.end(), pair.arrays.begin(), pair.arrays.end());
    push.row_sparse.insert(push.row_sparse.end(), pair.row_sparse.begin(), pair.row_sparse.end());
    if (!push.arrays.empty() && !push.row_sparse.empty()) {
      throw InvalidArgument(
          fmt::format("{}: key {}: expected arrays of one kind, got dense and row-sparse ones",
                      call, ToString(pair.key)));
    }
  }
  Outputs told;
  std::int64_t pushed_bytes = 0;
  {
    MutexLock lock(mutex_);
    std::shared_ptr<const internal::UpdatePlan> plan;
    if (optimizer_ != nullptr) plan = optimizer_->plan();
    for (const KeyPush& push : pushes) CheckPushLocked(call, push, plan.get());
    // From here on nothing fails.
    pushed_ = true;
    if (plan != nullptr) TellParametersLocked(*plan, &told);
    for (KeyPush& push : pushes) {
      push.options = OptionsOf(Kind::kPush, *push.key, priority);
      push.options.version = version_;
      push.compressor = compressor_;
      if (!push.arrays.empty()) {
        pushed_bytes += compressor_ != nullptr ? compressor_->CodeBytes(push.key->shape().size())
                                               : push.arrays[0].bytes();
      }
      if (plan == nullptr) continue;
      const KeyRef name(push.key->key());
      num_update_ = std::max(num_update_, ++push.key->updates);
      push.options.rates = {plan->LearningRate(name, num_update_), plan->WeightDecay(name)};
    }
  }
  link_->Carry(std::move(told));
  pushed_bytes_.fetch_add(pushed_bytes, std::memory_order_relaxed);
  return pushes;
}

namespace {

// Why the running op, which runs in any case, has no value to send; nothing if it has.
std::optional<ErrorBody> FailureOfInput(Engine& engine, const Var& var) {
  const std::exception_ptr error = engine.ErrorOf(var);
  if (error == nullptr) return std::nullopt;
  ErrorBody body = ToErrorBody(error);
  if (const std::optional<Failure> failure = engine.FailureOf(var)) {
    body.message = fmt::format("{}: {}", failure->op, failure->message);
  }
  return body;
}

template <class Array>
Array SumOf(const std::vector<Array>& arrays, int priority) {
  if (arrays.size() == 1) return arrays[0];
  Array sum(arrays[0].shape(), arrays[0].dtype(), arrays[0].device(), arrays[0].engine());
  Sum(std::span<const Array>(arrays), sum, priority);
  return sum;
}

}  // namespace

void DistKVStore::QueuePush(const KeyPush& push, int priority) {
  const auto queue = [&](const auto& value) {
    const auto call = std::make_shared<PartsCall>(calls_, push.key, push.options);
    push.key->Enter(call);
    engine().PushAsync(
        {.name = "kvstore.push",
         .reads = {value.var()},
         .lane = Lane::kComm,
         .priority = priority,
         .run_when_poisoned = true,
         .start_inline = true},
        [starter = CallStarter(call), value](Completion done) {
          if (auto failure = FailureOfInput(value.engine(), value.var())) {
            starter->SendFailure(*failure);
          } else if constexpr (std::is_same_v<std::decay_t<decltype(value)>, NDArray>) {
            starter->SendElements(value);
          } else {
            starter->SendRows(value);
          }
          starter->Start(std::move(done));
        });
  };
  if (!push.row_sparse.empty()) return queue(SumOf(push.row_sparse, priority));
  const NDArray value = SumOf(push.arrays, priority);
  if (push.compressor != nullptr) return QueueCompressedPush(push, value, priority);
  queue(value);
}

// The codes are made by an op of their own, in the order of the pushes, which write the residual.
void DistKVStore::QueueCompressedPush(const KeyPush& push, const NDArray& value, int priority) {
  NDArray residual;
  {
    MutexLock lock(mutex_);
    if (push.key->residual.empty()) {
      push.key->residual = NDArray::Zeros(value.shape(), DType::kFloat32, Cpu(), engine());
    }
    residual = push.key->residual;
  }
  const std::shared_ptr<const Compressor> compressor = push.compressor;
  const NDArray codes({compressor->CodeBytes(value.size())}, DType::kUInt8, Cpu(), engine());
  const auto call = std::make_shared<PartsCall>(calls_, push.key, push.options);
  push.key->Enter(call);
  engine().Push({.name = "kvstore.compress",
                 .reads = {value.var(), residual.var()},
                 .writes = {residual.var(), codes.var()},
                 .priority = priority,
                 .run_when_poisoned = true},
                [value, residual, codes, compressor] {
                  if (std::exception_ptr error = value.engine().ErrorOf(value.var())) {
                    // The residual stays as it is: only the codes have the error.
                    return;
                  }
                  compressor->Compress(value.dtype(), value.const_data(), residual.data<float>(),
                                       codes.data(), static_cast<std::size_t>(value.size()));
                });
  engine().PushAsync({.name = "kvstore.push",
                      .reads = {codes.var(), value.var()},
                      .lane = Lane::kComm,
                      .priority = priority,
                      .run_when_poisoned = true,
                      .start_inline = true},
                     [starter = CallStarter(call), value, codes, compressor](Completion done) {
                       if (auto failure = FailureOfInput(value.engine(), value.var())) {
                         starter->SendFailure(*failure);
                       } else {
                         starter->SendCodes(codes, *compressor);
                       }
                       starter->Start(std::move(done));
                     });
}

void DistKVStore::DoPush(std::span<const KeyArrays> pairs, int priority) {
  for (const KeyArrays& pair : pairs) CheckArrays("Push", pair, engine());
  CheckOneKind("Push", pairs);
  for (const KeyPush& push : PreparePush("Push", pairs, priority, nullptr)) {
    QueuePush(push, priority);
  }
}

// ---- Pull

void DistKVStore::CheckPull(std::string_view call, const KeyArrays& pair,
                            const DistKey& key) const {
  ForEachArray(pair, [&](const auto& array) { CheckShape(call, pair.key, key, array); });
}

void DistKVStore::TellIgnored(DistKey& key) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(key.told_ignored, true)) return;
  }
  Log(LogLevel::kInfo,
      "pull of key {}: row-sparse outputs are left alone; RowSparsePull fills them, and so does "
      "Pull without ignore_sparse",
      ToString(KeyRef(key.key())));
}

namespace {

// Values travel as the smaller of what is stored and what is wanted.
DType TravelDType(DType stored, DType wanted) {
  return IsFloating(stored) && IsFloating(wanted) && SizeOf(wanted) < SizeOf(stored) ? wanted
                                                                                     : stored;
}

}  // namespace

void DistKVStore::QueuePull(const KeyPtr& key, std::span<const NDArray> out, int priority) {
  CallOptions options = OptionsOf(Kind::kPull, *key, priority);
  if (key->is_row_sparse()) {  // comes as rows, and is made dense here
    const RowSparseNDArray rows(key->shape(), key->dtype(), Cpu(), engine());
    QueuePull(key, {&rows, 1}, priority);
    for (const NDArray& array : out) rows.CopyTo(array, priority);
    return;
  }
  options.dtype = TravelDType(key->dtype(), out[0].dtype());
  NDArray first = out[0];
  std::size_t copies_from = 1;
  if (first.dtype() != options.dtype) {
    first = NDArray(key->shape(), options.dtype, Cpu(), engine());
    copies_from = 0;
  }
  const auto call = std::make_shared<PartsCall>(calls_, key, options);
  key->Enter(call);
  OpOptions op{.name = "kvstore.pull",
               .writes = {first.var()},
               .lane = Lane::kComm,
               .priority = priority,
               .start_inline = true};
  if (first.is_partial()) op.reads = {first.var()};
  engine().PushAsync(op, [starter = CallStarter(call), first](Completion done) {
    starter->SendNothing();
    starter->ReceiveElements(first);
    starter->Start(std::move(done));
  });
  for (const NDArray& array : out.subspan(copies_from)) first.CopyTo(array, priority);
  pulled_bytes_.fetch_add(first.bytes(), std::memory_order_relaxed);
}

void DistKVStore::QueuePull(const KeyPtr& key, std::span<const RowSparseNDArray> out,
                            int priority) {
  if (!key->is_row_sparse()) {
    const NDArray dense(key->shape(), key->dtype(), Cpu(), engine());
    QueuePull(key, {&dense, 1}, priority);
    for (const RowSparseNDArray& array : out) {
      RowSparseNDArray::FromDense(dense, priority).CopyTo(array, priority);
    }
    return;
  }
  CallOptions options = OptionsOf(Kind::kPull, *key, priority);
  options.dtype = out[0].dtype();
  const auto call = std::make_shared<PartsCall>(calls_, key, options);
  key->Enter(call);
  engine().PushAsync({.name = "kvstore.pull",
                      .writes = {out[0].var()},
                      .lane = Lane::kComm,
                      .priority = priority,
                      .start_inline = true},
                     [starter = CallStarter(call), first = out[0]](Completion done) {
                       starter->SendNothing();
                       starter->ReceiveRows(first);
                       starter->Start(std::move(done));
                     });
  for (const RowSparseNDArray& array : out.subspan(1)) out[0].CopyTo(array, priority);
}

void DistKVStore::DoPull(std::span<const KeyArrays> pairs, int priority, bool ignore_sparse) {
  for (const KeyArrays& pair : pairs) CheckArrays("Pull", pair, engine());
  std::vector<KeyPtr> keys;
  for (const KeyArrays& pair : pairs) {
    keys.push_back(Find("Pull", pair.key));
    CheckPull("Pull", pair, *keys.back());
  }
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
  CallOptions options = OptionsOf(Kind::kRowPull, *key, priority);
  options.dtype = out[0].dtype();
  const auto call = std::make_shared<PartsCall>(calls_, key, options);
  key->Enter(call);
  engine().PushAsync(
      {.name = "kvstore.row_sparse_pull",
       .reads = {ids.var()},
       .writes = {out[0].var()},
       .lane = Lane::kComm,
       .priority = priority,
       .start_inline = true},
      [starter = CallStarter(call), first = out[0], ids](Completion done) {
        PartsCall& parts = *starter;
        try {
          parts.SendRowIds(storage::SortedRowIds(ids, parts.key().shape()[0]));
        } catch (const InvalidArgument& error) {
          throw InvalidArgument(fmt::format("RowSparsePull: key {}: {}",
                                            ToString(KeyRef(parts.key().key())), error.what()));
        }
        parts.ReceiveRows(first);
        parts.Start(std::move(done));
      });
  for (const RowSparseNDArray& array : out.subspan(1)) out[0].CopyTo(array, priority);
}

void DistKVStore::DoRowSparsePull(std::span<const KeyRowPull> pulls, int priority) {
  constexpr std::string_view kCall = "RowSparsePull";
  std::vector<KeyPtr> keys;
  for (const KeyRowPull& pull : pulls) {
    CheckArrays(kCall, {pull.key, pull.out}, engine());
    CheckArrays(kCall, {pull.key, pull.row_ids}, engine());
    const KeyPtr& key = keys.emplace_back(Find(kCall, pull.key));
    if (!key->is_row_sparse()) {
      throw InvalidArgument(fmt::format("{}: key {}: expected a row-sparse value, got a dense one",
                                        kCall, ToString(pull.key)));
    }
    CheckPull(kCall, {pull.key, pull.out}, *key);
    for (const NDArray& ids : pull.row_ids) {
      if (ids.dtype() != DType::kBool) continue;
      throw InvalidArgument(fmt::format("{}: key {}: expected row ids of a numeric dtype, got bool",
                                        kCall, ToString(pull.key)));
    }
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

// ---- PushPull

// One request may do both if no output is read by another push of the call.
bool DistKVStore::CanFuse(std::span<const KeyPush> pushes, std::span<const KeyArrays> out) const {
  if (out.size() != pushes.size()) return false;  // a key was named twice
  std::unordered_map<internal::VarState*, std::size_t> reader;
  for (std::size_t i = 0; i < pushes.size(); ++i) {
    const KeyPush& push = pushes[i];
    if (push.compressor != nullptr || push.arrays.size() != 1 || out[i].arrays.size() != 1) {
      return false;
    }
    const NDArray& to = out[i].arrays[0];
    if (to.dtype() != push.key->dtype()) return false;
    const bool same = to.IsSameAs(push.arrays[0]);
    if (!same && (to.is_partial() || to.Overlaps(push.arrays[0]))) return false;
    if (!reader.emplace(VarRef(push.arrays[0].var()).state(), i).second) return false;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto found = reader.find(VarRef(out[i].arrays[0].var()).state());
    if (found != reader.end() && found->second != i) return false;
  }
  return true;
}

void DistKVStore::QueuePushPull(const KeyPush& push, const NDArray& out, int priority) {
  const NDArray& value = push.arrays[0];
  CallOptions options = push.options;
  options.kind = Kind::kPushPull;
  const auto call = std::make_shared<PartsCall>(calls_, push.key, options);
  push.key->Enter(call);
  engine().PushAsync({.name = "kvstore.pushpull",
                      .reads = {value.var()},
                      .writes = {out.var()},
                      .lane = Lane::kComm,
                      .priority = priority,
                      .run_when_poisoned = true,
                      .start_inline = true},
                     [starter = CallStarter(call), value, out](Completion done) {
                       if (auto failure = FailureOfInput(value.engine(), value.var())) {
                         starter->SendFailure(*failure);
                       } else {
                         starter->SendElements(value);
                       }
                       starter->ReceiveElements(out);
                       starter->Start(std::move(done));
                     });
  pulled_bytes_.fetch_add(out.bytes(), std::memory_order_relaxed);
}

void DistKVStore::DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                             int priority) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckArrays("PushPull", values[i], engine());
    CheckArrays("PushPull", out[i], engine());
    WithFirstArray(values[i], [&](const auto& value) {
      ForEachArray(out[i],
                   [&](const auto& array) { CheckShape("PushPull", out[i].key, value, array); });
    });
  }
  CheckOneKind("PushPull", values);
  std::vector<std::size_t> push_of;
  const std::vector<KeyPush> pushes = PreparePush("PushPull", values, priority, &push_of);
  if (CanFuse(pushes, out)) {
    for (std::size_t i = 0; i < pushes.size(); ++i) {
      QueuePushPull(pushes[i], out[i].arrays[0], priority);
    }
    return;
  }
  for (const KeyPush& push : pushes) QueuePush(push, priority);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const KeyPtr& key = pushes[push_of[i]].key;
    if (out[i].arrays.empty()) {
      TellIgnored(*key);
    } else {
      QueuePull(key, out[i].arrays, priority);
    }
  }
}

}  // namespace

std::unique_ptr<KVStore> MakeDistStore(Engine& engine, const std::string& type,
                                       std::shared_ptr<WorkerLink> link, std::uint32_t store) {
  return std::make_unique<DistKVStore>(engine, type, std::move(link), store);
}

}  // namespace heddle::kvstore::dist
