// What a dist store asks its servers to do with pushes: the optimizer, its states, compression.
#include <heddle/error.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "engine/fork.h"
#include "engine/may_wait.h"
#include "kvstore/checks.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/worker/call_batch.h"
#include "kvstore/dist/worker/control_call.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/dist/worker/dist_states.h"
#include "kvstore/optimizer/fixed_parameters.h"

namespace heddle::kvstore::dist {

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
  engine::CheckMayWait("SetOptimizer");  // else it would take back what it has not asked for
  const auto parameters = ParametersOf(*optimizer);
  std::uint64_t version = 0;
  {
    const engine::CallLock lock(mutex_, "a store");
    version = ((version_ >> 32) + 1) << 32;
  }
  const std::string what = fmt::format("set_optimizer {}", optimizer->name());
  const std::string meta = Encode(OptimizerBody{std::string(optimizer->name()), parameters});
  SetOnServers(what, Kind::kSetOptimizer, meta, version);
  const auto plan = optimizer->plan();
  const engine::CallLock lock(mutex_, "a store");
  if (version < version_) return;  // another thread has gone on from it meanwhile
  // As on the servers, which keep the states for an equal one.
  const bool is_equal =
      optimizer_ != nullptr && optimizer_->name() == optimizer->name() && told_ == parameters;
  if (!is_equal) {
    num_update_ = 0;
    for (const auto& [name, key] : keys_) key->updates = 0;
  }
  version_ = version;
  optimizer_.swap(optimizer);
  told_plan_ = plan;
  told_ = parameters;
  whole_dense_ = NeedsWholeKey(*plan, /*row_sparse=*/false);
  whole_row_sparse_ = NeedsWholeKey(*plan, /*row_sparse=*/true);
}

// What could not be set on all servers some may have, or get yet if the deadline has passed. It is
// taken back: they hear this behind it, and the worker's next call, of an optimizer of the same
// version, behind this. Servers know the worker, not its threads: where several set the same at
// once, nothing is taken back unless all of them have failed, nor before the last has ended.
void DistKVStore::SetOnServers(const std::string& what, Kind kind, const std::string& meta,
                               std::uint64_t version) {
  const std::pair id(kind, version);
  {
    const engine::CallLock lock(mutex_, "a store");
    Setting& setting = settings_[id];
    setting.asked.insert(meta);
    ++setting.calls;
  }
  std::exception_ptr error;
  try {
    CallServersInTurn(what, kind, meta, version);
  } catch (...) {
    error = std::current_exception();
  }
  Outputs out;
  {
    const engine::CallLock lock(mutex_, "a store");
    const auto found = settings_.find(id);
    Setting& setting = found->second;
    setting.is_set |= error == nullptr;
    if (--setting.calls == 0) {
      if (setting.is_set) setting.asked.clear();
      for (const std::string& asked : setting.asked) {
        std::vector<Request> requests = ControlRequests(what, kind, asked, version);
        for (Request& request : requests) request.flags = kFlagFailed;
        StartCall(
            *link_, std::move(requests), [](std::exception_ptr, std::vector<Message>) {}, &out);
      }
      settings_.erase(found);
    }
  }
  link_->Carry(out);
  if (error != nullptr) std::rethrow_exception(error);
}

// Pushes that come now are of the optimizer as it is now.
void DistKVStore::TellParametersLocked(const internal::UpdatePlan& plan, Outputs* out) {
  if (told_plan_.get() == &plan) return;
  told_plan_ = optimizer_->plan();
  auto parameters = ParametersOf(*optimizer_);
  if (WithoutRates(parameters) == WithoutRates(told_)) return;
  told_ = parameters;
  if (link_->rank() != 0) return;  // it is rank 0 that tells the servers
  ++version_;
  StartCall(
      *link_,
      ControlRequests("set parameters of the optimizer", Kind::kSetParameters,
                      Encode(OptimizerBody{std::string(optimizer_->name()), parameters}), version_),
      [](std::exception_ptr, std::vector<Message>) {}, out);
}

std::shared_ptr<Optimizer> DistKVStore::OptimizerFor(std::string_view call) const {
  const engine::CallLock lock(mutex_, "a store");
  if (optimizer_ != nullptr) return optimizer_;
  throw InvalidState(fmt::format("{}: expected a store with an optimizer, got one without", call));
}

// A pull is answered when what this worker pushed before has taken effect. A round whose input has
// failed has left value and states as they were; not so one whose update has failed.
void DistKVStore::WaitForOwnPushes(std::string_view call) {
  engine::CheckMayWait(call);
  std::vector<KeyPtr> keys;
  {
    const engine::CallLock lock(mutex_, "a store");
    for (const auto& [name, key] : keys_) keys.push_back(key);
  }
  std::vector<Var> pulled;
  {
    const CallBatch together(*link_, keys.size());
    for (const KeyPtr& key : keys) {
      const auto parts = PartsCall::Make(calls_, key, OptionsOf(Kind::kPull, *key, 0));
      parts->PassOverFailedInputs();
      PushOpOf(
          parts, engine(),
          {.name = "kvstore.pull", .writes = {pulled.emplace_back(engine().NewVar("dist.ended"))}},
          [](PartsCall& call) { call.SendNothing(); });
    }
  }
  for (const Var& ended : pulled) engine().WaitForVar(ended);
}

// What all servers have, asked for until there is no more.
std::vector<Message> DistKVStore::SavedStates() const {
  std::vector<Message> states;
  std::vector<Request> requests =
      ControlRequests("save_optimizer_states", Kind::kSaveStates, /*meta=*/{}, /*version=*/0);
  while (!requests.empty()) {
    std::vector<Message> answers = CallAndWait(engine(), *link_, requests);
    std::vector<Request> next;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      StatesBody body;
      if (!Decode(answers[i].meta, &body)) {
        throw NetworkError("states of the optimizer: an answer cannot be read");
      }
      if (body.parts.empty()) continue;
      next.push_back(requests[i]);
      next.back().meta = Encode(SaveStatesBody{.after = body.parts.back().part});
      states.push_back(std::move(answers[i]));
    }
    requests = std::move(next);
  }
  return states;
}

// Which states to keep of those that servers save from here on: a server has those of earlier lives
// of a key, too, while other workers have not removed it.
std::function<bool(const PartStates&)> DistKVStore::IsOfThisLife() const {
  const engine::CallLock lock(mutex_, "a store");
  return [this, before = removals_](const PartStates& states) {
    const KeyRef key(states.info.key);
    const auto found = before.find(key);
    const std::uint64_t removals = found != before.end() ? found->second : 0;
    MutexLock again(mutex_);
    return states.part.key == KeyId(key, removals) && RemovalsLocked(key) == removals;
  };
}

void DistKVStore::SaveOptimizerStates(const std::string& file, bool with_optimizer) {
  constexpr std::string_view kCall = "SaveOptimizerStates";
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor(kCall);
  WaitForOwnPushes(kCall);
  const auto plan = optimizer->plan();
  OptimizerStates states;
  states.optimizer = optimizer->name();
  states.multi_precision = plan->multi_precision;
  states.fixed = FixedParameters(*optimizer);
  if (with_optimizer) states.settings = SettingsOf(*optimizer);
  const auto is_of_this_life = IsOfThisLife();
  states.keys = JoinStates(SavedStates(), is_of_this_life, *plan->rule, engine());
  {
    const engine::CallLock lock(mutex_, "a store");
    states.num_update = num_update_;
    for (KeyStates& key : states.keys) {
      const auto found = keys_.find(key.key);
      key.updates = found != keys_.end() ? found->second->updates : key.step;
    }
  }
  WriteStates(file, states, *plan->rule);
}

// A key that no push has come to had no states to save: it starts anew.
void DistKVStore::AddUntouchedKeys(std::string_view call, std::map<Key, KeyPtr>* keys,
                                   std::vector<KeyStates>* states) const {
  std::vector<KeyPtr> all = UnusedKeys(call);
  {
    const engine::CallLock lock(mutex_, "a store");
    for (const auto& [name, key] : keys_) all.push_back(key);
  }
  for (const KeyPtr& key : all) {
    if (!keys->emplace(key->key(), key).second) continue;
    KeyStates& fresh = states->emplace_back();
    fresh.key = key->key();
    fresh.shape = key->shape();
    fresh.dtype = key->dtype();
  }
}

void DistKVStore::LoadOptimizerStates(const std::string& file) {
  constexpr std::string_view kCall = "LoadOptimizerStates";
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor(kCall);
  WaitForOwnPushes(kCall);
  const auto plan = optimizer->plan();
  OptimizerStates states = ReadStates(file, optimizer->name(), *plan->rule, engine());
  CheckFixedParameters(file, states, *optimizer);
  if (states.settings) CheckSettings(file, *states.settings, *optimizer);
  std::map<Key, KeyPtr> keys;
  for (const KeyStates& key : states.keys) {
    const auto [place, is_first] = keys.try_emplace(key.key, Find(kCall, key.key));
    if (!is_first) {
      throw InvalidArgument(fmt::format("{}: {}: expected each key once, got {} twice", kCall, file,
                                        ToString(KeyRef(key.key))));
    }
    const KeyPtr& found = place->second;
    if (key.shape != found->shape()) ThrowShape(kCall, key.key, found->shape(), key.shape);
    if (key.dtype != found->dtype()) ThrowDType(kCall, key.key, found->dtype(), key.dtype);
  }
  AddUntouchedKeys(kCall, &keys, &states.keys);
  const std::vector<ServerStates> cut =
      CutStates(states.keys, [&](const KeyStates& key) -> DistKey& { return *keys.at(key.key); });
  std::vector<Request> requests;
  for (const ServerStates& of_server : cut) {
    Request& request = requests.emplace_back(
        ControlRequest("load_optimizer_states", Kind::kLoadStates, of_server.server));
    request.meta = Encode(of_server.body);
    request.payload = of_server.arrays;
  }
  if (!requests.empty()) CallAndWait(engine(), *link_, requests);
  if (states.settings) ApplySettings(*states.settings, *optimizer);
  const engine::CallLock lock(mutex_, "a store");
  num_update_ = states.num_update;
  for (const KeyStates& key : states.keys) keys.at(key.key)->updates = key.updates;
}

void DistKVStore::SetGradientCompression(const CompressionOptions& options) {
  std::shared_ptr<const Compressor> fresh;
  {
    const engine::CallLock lock(mutex_, "a store");
    fresh = NewCompressor(options, compressor_.get(), pushed_);
  }
  if (fresh == nullptr) return;
  engine::CheckMayWait("SetGradientCompression");
  constexpr std::string_view kWhat = "set_gradient_compression";
  const std::string meta = Encode(CompressionBody{fresh->options()});
  SetOnServers(std::string(kWhat), Kind::kSetCompression, meta, /*version=*/0);
  const engine::CallLock lock(mutex_, "a store");
  compressor_ = fresh;
}

}  // namespace heddle::kvstore::dist
