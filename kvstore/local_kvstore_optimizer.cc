// What a store of one process does with pushes: updaters, the optimizer, its states, compression.
#include <heddle/error.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include "engine/fork.h"
#include "engine/may_wait.h"
#include "kvstore/local_kvstore.h"
#include "kvstore/optimizer/fixed_parameters.h"
#include "kvstore/optimizer/update_plan.h"

namespace heddle::kvstore {

void LocalKVStore::SetUpdaters(Updaters updaters) {
  if (!updaters.dense && !updaters.row_sparse && !updaters.row_sparse_on_dense) {
    throw InvalidArgument("SetUpdaters: expected one function at least, got none");
  }
  auto shared = std::make_shared<const Updaters>(std::move(updaters));
  std::shared_ptr<Optimizer> old_optimizer;  // dropped after the lock, as are the old updaters
  const engine::CallLock lock(mutex_, "a store");
  updaters_.swap(shared);
  optimizer_.swap(old_optimizer);
}

void LocalKVStore::SetOptimizer(std::shared_ptr<Optimizer> optimizer) {
  if (optimizer == nullptr) throw InvalidArgument("SetOptimizer: expected an optimizer, got null");
  const bool multi_precision = optimizer->plan()->multi_precision;
  UpdatersPtr old_updaters;  // dropped after the lock, as is the old optimizer
  const engine::CallLock lock(mutex_, "a store");
  origin_ = std::make_shared<StatesOrigin>(OriginNumberLocked() + 1, multi_precision);
  optimizer_.swap(optimizer);
  updaters_.swap(old_updaters);
  num_update_ = 0;
}

std::shared_ptr<Optimizer> LocalKVStore::OptimizerFor(std::string_view call) const {
  const engine::CallLock lock(mutex_, "a store");
  if (optimizer_ != nullptr) return optimizer_;
  throw InvalidState(fmt::format("{}: expected a store with an optimizer, got one {}", call,
                                 updaters_ != nullptr ? "with an updater" : "without"));
}

void LocalKVStore::SaveOptimizerStates(const std::string& file, bool with_optimizer) {
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor("SaveOptimizerStates");
  engine::CheckMayWait("SaveOptimizerStates");
  const auto plan = optimizer->plan();
  OptimizerStates states;
  states.optimizer = optimizer->name();
  states.multi_precision = plan->multi_precision;
  states.fixed = FixedParameters(*optimizer);
  if (with_optimizer) states.settings = SettingsOf(*optimizer);

  struct Saved {
    std::uint64_t number;
    ValuePtr value;
    std::shared_ptr<const StatesOrigin> origin;  // null: no push so far
    std::shared_ptr<KeyStates> out;
  };
  std::vector<Saved> saved;
  std::uint64_t origin_number = 0;
  {
    const engine::CallLock lock(mutex_, "a store");
    origin_number = OriginNumberLocked();
    states.num_update = num_update_;
    for (const auto& [key, slot] : slots_) {
      auto out = std::make_shared<KeyStates>();
      out->key = key;
      out->shape = slot.value->shape();
      out->dtype = slot.value->dtype();
      const bool has_states = HasStatesLocked(slot);
      if (has_states) out->updates = slot.updates;
      saved.push_back({slot.number, slot.value, has_states ? slot.origin : nullptr, out});
    }
  }
  std::ranges::sort(saved, {}, &Saved::number);
  for (const Saved& key : saved) {
    if (key.origin != nullptr) StoredValue::QueueSnapshot(key.value, key.origin, key.out);
  }
  for (const Saved& key : saved) {
    if (key.origin != nullptr) key.value->Wait();
    if (key.out->error != nullptr) std::rethrow_exception(key.out->error);
    states.keys.push_back(*key.out);
  }
  {
    const engine::CallLock lock(mutex_, "a store");
    if (optimizer_ != optimizer || OriginNumberLocked() != origin_number) {
      throw InvalidState(
          "SaveOptimizerStates: another thread has set another optimizer, or loaded its states, "
          "meanwhile");
    }
  }
  WriteStates(file, states, *plan->rule);
}

std::vector<KeyForm> LocalKVStore::Forms() const {
  std::vector<KeyForm> forms;
  const engine::CallLock lock(mutex_, "a store");
  for (const auto& [key, slot] : slots_) {
    forms.push_back({.key = key, .shape = slot.value->shape(), .dtype = slot.value->dtype()});
  }
  return forms;
}

// The keys of the store, all of them and no others, with their shapes and dtypes.
void LocalKVStore::CheckStatesLocked(const std::string& file, const OptimizerStates& states) const {
  constexpr std::string_view kCall = "LoadOptimizerStates";
  KeyTable<const KeyStates*> given;
  for (const KeyStates& key : states.keys) {
    const auto found = slots_.find(key.key);
    if (found == slots_.end()) {
      throw InvalidArgument(
          fmt::format("{}: {}: expected states of the keys of this store, got some "
                      "of key {}, which it does not have",
                      kCall, file, ToString(key.key)));
    }
    const StoredValue& value = *found->second.value;
    if (key.shape != value.shape()) ThrowShape(kCall, key.key, value.shape(), key.shape);
    if (key.dtype != value.dtype()) ThrowDType(kCall, key.key, value.dtype(), key.dtype);
    if (!given.emplace(key.key, &key).second) {
      throw InvalidArgument(fmt::format("{}: {}: expected each key once, got {} twice", kCall, file,
                                        ToString(key.key)));
    }
  }
  for (const auto& [key, slot] : slots_) {
    if (given.find(key) != given.end()) continue;
    throw InvalidArgument(
        fmt::format("{}: {}: expected states of key {}, got none", kCall, file, ToString(key)));
  }
}

void LocalKVStore::LoadOptimizerStates(const std::string& file) {
  const std::shared_ptr<Optimizer> optimizer = OptimizerFor("LoadOptimizerStates");
  const auto plan = optimizer->plan();
  const OptimizerStates states = ReadStates(file, optimizer->name(), *plan->rule, engine());
  CheckFixedParameters(file, states, *optimizer);
  if (states.settings) CheckSettings(file, *states.settings, *optimizer);
  std::vector<std::unique_ptr<UpdateState>> loaded;
  for (const KeyStates& key : states.keys) {
    auto state = std::make_unique<UpdateState>(states.multi_precision);
    state->restored_master = key.master;
    state->restored = key.arrays;
    state->numbers = key.numbers;
    state->step = key.step;
    loaded.push_back(std::move(state));
  }
  std::vector<std::shared_ptr<StatesOrigin>> origins;  // in the end the old ones
  const engine::CallLock lock(mutex_, "a store");
  if (optimizer_ != optimizer) {
    throw InvalidState("LoadOptimizerStates: another thread has set another optimizer meanwhile");
  }
  CheckStatesLocked(file, states);
  const std::uint64_t number = OriginNumberLocked() + 1;
  auto origin = std::make_shared<StatesOrigin>(number, states.multi_precision);
  for (std::unique_ptr<UpdateState>& state : loaded) {
    origins.push_back(
        std::make_shared<StatesOrigin>(number, states.multi_precision, std::move(state)));
  }
  if (states.settings) ApplySettings(*states.settings, *optimizer);
  // From here on nothing fails.
  origin_ = std::move(origin);
  num_update_ = states.num_update;
  for (std::size_t i = 0; i < origins.size(); ++i) {
    Slot& slot = slots_.find(states.keys[i].key)->second;
    slot.origin.swap(origins[i]);
    slot.updates = states.keys[i].updates;
  }
}

void LocalKVStore::SetGradientCompression(const CompressionOptions& options) {
  const engine::CallLock lock(mutex_, "a store");
  if (auto fresh = NewCompressor(options, compressor_.get(), pushed_)) {
    compressor_ = std::move(fresh);
  }
}

}  // namespace heddle::kvstore
