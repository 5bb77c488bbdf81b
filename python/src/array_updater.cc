#include "python/src/array_updater.h"

#include <heddle/engine.h>
#include <heddle/error.h>

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "kvstore/array_kernels.h"
#include "kvstore/optimizer/update_plan.h"
#include "storage/array_checks.h"

namespace heddle::python {

namespace {

void CheckLike(const NDArray& like, const NDArray& array) {
  constexpr const char* kCall = "Updater";
  storage::CheckSameEngine(kCall, like, array);
  storage::CheckSameShape(kCall, like, array);
  storage::CheckSameDType(kCall, like, array);
  storage::CheckSameDevice(kCall, like, array);
}

}  // namespace

void ArrayUpdater::Update(KeyRef key, const NDArray& gradient, const NDArray& weight) {
  const std::shared_ptr<const internal::UpdatePlan> plan = optimizer_->plan();
  CheckLike(weight, gradient);
  const std::string refusal =
      plan->rule->Refusal({.dimensions = static_cast<int>(weight.shape().ndim()),
                           .weight_decay = plan->WeightDecay(key),
                           .row_sparse = false});
  if (!refusal.empty()) {
    throw InvalidArgument(fmt::format("Updater: key {}: {}", ToString(key), refusal));
  }
  const MutexLock lock(mutex_);
  Slot& slot = slots_[key.ToKey()];
  if (slot.state == nullptr) {
    slot.state = std::make_shared<kvstore::UpdateState>(plan->multi_precision);
    slot.first = weight;
  } else {
    CheckLike(slot.first, weight);
  }
  num_update_ = std::max(num_update_, ++slot.updates);
  const double learning_rate = plan->LearningRate(key, num_update_);
  const double weight_decay = plan->WeightDecay(key);
  // Pushed under the lock: updates of a key take effect in the order in which they are counted.
  weight.engine().Push({.name = "Update",
                        .reads = {gradient.var(), weight.var(), slot.first.var()},
                        .writes = {weight.var(), slot.first.var()},
                        .device = weight.device()},
                       [plan, state = slot.state, owner = key.ToKey(), gradient, weight,
                        learning_rate, weight_decay] {
                         kvstore::UpdateArray(
                             state->Begin(*plan->rule, owner, weight, learning_rate, weight_decay),
                             {&gradient, 1});
                       });
}

void ArrayUpdater::Forget(KeyRef key) {
  const MutexLock lock(mutex_);
  slots_.erase(key.ToKey());
}

}  // namespace heddle::python
