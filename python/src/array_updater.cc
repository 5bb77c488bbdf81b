#include "python/src/array_updater.h"

#include <heddle/engine.h>
#include <heddle/error.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "engine/may_wait.h"
#include "engine/room.h"
#include "kvstore/array_kernels.h"
#include "kvstore/checks.h"
#include "kvstore/optimizer/fixed_parameters.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/row_sparse_update.h"
#include "ops/dispatch.h"
#include "python/src/bindings.h"
#include "storage/array_checks.h"

namespace heddle::python {

namespace {

template <class Array>
void CheckSameForm(const Engine& engine, const Shape& shape, DType dtype, Device device,
                   const Array& array) {
  constexpr const char* kCall = "Updater";
  if (&engine != &array.engine()) storage::ThrowOtherEngine(kCall, array.shape());
  if (shape != array.shape()) storage::ThrowShape(kCall, shape, array.shape());
  if (dtype != array.dtype()) storage::ThrowDType(kCall, dtype, array.dtype());
  if (device != array.device()) storage::ThrowDevice(kCall, device, array.device());
}

void CheckLike(const NDArray& like, const RowSparseNDArray& array) {
  CheckAlike("Updater", like, array);
}
void CheckLike(const NDArray& like, const NDArray& array) {
  constexpr const char* kCall = "Updater";
  storage::CheckSameEngine(kCall, like, array);
  storage::CheckSameShape(kCall, like, array);
  storage::CheckSameDType(kCall, like, array);
  storage::CheckSameDevice(kCall, like, array);
}
void CheckLike(const RowSparseNDArray& like, const RowSparseNDArray& array) {
  CheckSameForm(like.engine(), like.shape(), like.dtype(), like.device(), array);
}

void CheckNotOnGpu(const NDArray& weight) { storage::CheckNotOnGpu("Updater", weight); }
void CheckNotOnGpu(const RowSparseNDArray& weight) {
  if (weight.device().type == DeviceType::kGpu) {
    storage::ThrowNotOnGpu("Updater", weight.device());
  }
}

// What the optimizer would throw if the rates were set, with the multipliers of the key.
void CheckRates(std::string_view optimizer, KeyRef key, const UpdateRates& rates,
                const internal::RateMultipliers& multipliers) {
  if (rates.learning_rate) {
    MakeOptimizer(optimizer, {{"learning_rate", *rates.learning_rate}})
        ->SetLearningRateMultiplier(key, multipliers.learning_rate);
  }
  if (rates.weight_decay) {
    MakeOptimizer(optimizer, {{"weight_decay", *rates.weight_decay}})
        ->SetWeightDecayMultiplier(key, multipliers.weight_decay);
  }
}

// The state of a weight of `shape` and `dtype` has to be one of such a weight as is there.
void CheckForm(const kvstore::KeyForm& weight, const Shape& shape, DType dtype) {
  if (weight.shape == shape && weight.dtype == dtype) return;
  throw InvalidArgument(
      fmt::format("key {}: expected a state of shape {}, {}, got one of shape {}, {} by loading",
                  ToString(weight.key), ToString(weight.shape), Name(weight.dtype), ToString(shape),
                  Name(dtype)));
}

void Apply(kvstore::ArrayUpdate update, const NDArray& gradient, const NDArray& /*weight*/) {
  kvstore::UpdateArray(std::move(update), {&gradient, 1});
}
template <class Weight>
void Apply(kvstore::ArrayUpdate update, const RowSparseNDArray& gradient, const Weight& weight) {
  kvstore::UpdateArray(std::move(update), {&gradient, 1}, weight);
}

}  // namespace

void ArrayUpdater::Update(KeyRef key, const NDArray& gradient, const NDArray& weight,
                          const UpdateRates& rates) {
  // Where they overlap, but in step, kernels read each element before they write it.
  const bool shifted = gradient.Overlaps(weight) && !gradient.IsSameAs(weight);
  UpdateBy(key, shifted ? gradient.Copy() : gradient, weight, rates);
}
void ArrayUpdater::Update(KeyRef key, const RowSparseNDArray& gradient, const NDArray& weight,
                          const UpdateRates& rates) {
  UpdateBy(key, gradient, weight, rates);
}
void ArrayUpdater::Update(KeyRef key, const RowSparseNDArray& gradient,
                          const RowSparseNDArray& weight, const UpdateRates& rates) {
  UpdateBy(key, gradient, weight, rates);
}

template <class Weight>
void ArrayUpdater::Slot::CheckLike(const Weight& weight) const {
  CheckSameForm(*engine, shape, dtype, device, weight);
}

template <class Gradient, class Weight>
void ArrayUpdater::UpdateBy(KeyRef key, const Gradient& gradient, const Weight& weight,
                            const UpdateRates& rates) {
  const std::shared_ptr<const internal::UpdatePlan> plan = optimizer_->plan();
  CheckLike(weight, gradient);
  CheckNotOnGpu(weight);
  ops::RequireFloating("Updater", weight.dtype());
  const internal::RateMultipliers multipliers = plan->MultipliersOf(key);
  CheckRates(optimizer_->name(), key, rates, multipliers);
  const double weight_decay =
      rates.weight_decay.value_or(plan->weight_decay) * multipliers.weight_decay;
  const std::string refusal =
      plan->rule->Refusal({.dimensions = static_cast<int>(weight.shape().ndim()),
                           .weight_decay = weight_decay,
                           .row_sparse = std::is_same_v<Gradient, RowSparseNDArray>});
  if (!refusal.empty()) {
    throw InvalidArgument(fmt::format("Updater: key {}: {}", ToString(key), refusal));
  }
  // Not under the lock, for which the bodies that are to make it may wait.
  engine::AwaitRoom(weight.var(), "Update");
  {
    const MutexLock lock(mutex_);
    const NoWaitScope no_wait;
    Slot& slot = slots_[key.ToKey()];
    if (slot.state == nullptr) {
      slot.state = std::make_shared<kvstore::UpdateState>(plan->multi_precision);
    } else if (!slot.guard) {  // loaded
      CheckForm({key.ToKey(), weight.shape(), weight.dtype()}, slot.shape, slot.dtype);
    } else {
      slot.CheckLike(weight);
    }
    if (!slot.guard) {
      slot.guard = weight.var();
      slot.engine = &weight.engine();
      slot.device = weight.device();
      slot.shape = weight.shape();
      slot.dtype = weight.dtype();
    }
    num_update_ = std::max(num_update_, ++slot.updates);
    const double learning_rate = rates.learning_rate
                                     ? *rates.learning_rate * multipliers.learning_rate
                                     : plan->LearningRate(key, num_update_);
    // Pushed under the lock: updates of a key take effect in the order in which they are counted.
    weight.engine().Push(
        {.name = "Update",
         .reads = {gradient.var(), weight.var(), *slot.guard},
         .writes = {weight.var(), *slot.guard},
         .device = weight.device()},
        [plan, state = slot.state, owner = key.ToKey(), gradient, weight, learning_rate,
         weight_decay] {
          Apply(state->Begin(*plan->rule, owner, weight, learning_rate, weight_decay), gradient,
                weight);
        });
  }
  engine::RunPending(weight.var());
}

void ArrayUpdater::Forget(KeyRef key) {
  const MutexLock lock(mutex_);
  slots_.erase(key.ToKey());
}

void ArrayUpdater::SaveStates(const std::string& file, bool with_optimizer) const {
  engine::CheckMayWait("SaveStates");
  const std::shared_ptr<const internal::UpdatePlan> plan = optimizer_->plan();
  kvstore::OptimizerStates states;
  states.optimizer = optimizer_->name();
  states.multi_precision = plan->multi_precision;
  states.fixed = kvstore::FixedParameters(*optimizer_);
  if (with_optimizer) states.settings = kvstore::SettingsOf(*optimizer_);
  struct Saved {
    std::optional<Var> guard;
    Engine* engine;
    std::shared_ptr<kvstore::KeyStates> states;
  };
  std::vector<Saved> saved;
  {
    const MutexLock lock(mutex_);
    const NoWaitScope no_wait;  // beyond the bound, one op a key: as in UpdateBy
    states.num_update = num_update_;
    for (const auto& [key, slot] : slots_) {
      auto out = std::make_shared<kvstore::KeyStates>();
      out->key = key;
      out->shape = slot.shape;
      out->dtype = slot.dtype;
      out->updates = slot.updates;
      saved.push_back({slot.guard, slot.engine, out});
      if (!slot.guard) {  // as it was loaded: nothing writes it
        slot.state->SnapshotTo(out.get());
        continue;
      }
      slot.engine->Push(
          {.name = "UpdaterStates",
           .reads = {*slot.guard},
           .writes = {*slot.guard},
           .device = slot.device},
          [state = slot.state, out = std::move(out)] { state->SnapshotTo(out.get()); });
    }
  }
  for (const Saved& one : saved) {
    if (one.guard) one.engine->WaitForVar(*one.guard);
    states.keys.push_back(*one.states);
  }
  kvstore::WriteStates(file, states, *plan->rule);
}

void ArrayUpdater::LoadStates(const std::string& file, Engine& engine,
                              const std::vector<kvstore::KeyForm>* forms) {
  const std::shared_ptr<const internal::UpdatePlan> plan = optimizer_->plan();
  const kvstore::OptimizerStates states =
      kvstore::ReadStates(file, optimizer_->name(), *plan->rule, engine);
  kvstore::CheckFixedParameters(file, states, *optimizer_);
  if (states.settings) kvstore::CheckSettings(file, *states.settings, *optimizer_);
  std::map<Key, Slot> slots;
  for (const kvstore::KeyStates& key : states.keys) {
    if (forms != nullptr) {
      const auto form = std::ranges::find(*forms, key.key, &kvstore::KeyForm::key);
      if (form == forms->end()) {
        throw InvalidArgument(
            fmt::format("{}: expected states of the keys of this store, got some of key {}, which "
                        "it does not have",
                        file, ToString(key.key)));
      }
      CheckForm(*form, key.shape, key.dtype);
    }
    auto state = std::make_shared<kvstore::UpdateState>(states.multi_precision);
    state->restored_master = key.master;
    state->restored = key.arrays;
    state->numbers = key.numbers;
    state->step = key.step;
    Slot slot = {
        .state = std::move(state), .shape = key.shape, .dtype = key.dtype, .updates = key.updates};
    if (!slots.emplace(key.key, std::move(slot)).second) {
      throw InvalidArgument(
          fmt::format("{}: expected each key once, got {} twice", file, ToString(key.key)));
    }
  }
  if (states.settings) kvstore::ApplySettings(*states.settings, *optimizer_);
  const MutexLock lock(mutex_);
  slots_.swap(slots);
  num_update_ = states.num_update;
}

std::vector<std::pair<Key, std::int64_t>> ArrayUpdater::Counts() const {
  std::vector<std::pair<Key, std::int64_t>> counts;
  const MutexLock lock(mutex_);
  for (const auto& [key, slot] : slots_) counts.emplace_back(key, slot.updates);
  return counts;
}

}  // namespace heddle::python
