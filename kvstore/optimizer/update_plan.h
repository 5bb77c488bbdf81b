// An optimizer as it was at one moment: what a push keeps of it.
#pragma once

#include <heddle/key.h>
#include <heddle/schedule.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "kvstore/key_table.h"
#include "kvstore/optimizer/update_rule.h"

namespace heddle::internal {

// By what the rates of a key are multiplied.
struct RateMultipliers {
  double learning_rate = 1;
  double weight_decay = 1;
};

// Immutable. Threads: any.
struct UpdatePlan {
  std::shared_ptr<const UpdateRule> rule;
  double learning_rate = 0;
  double weight_decay = 0;
  bool multi_precision = false;  // float16 and bfloat16 values are updated through a float32 copy
  std::optional<LearningRateSchedule> schedule;  // in place of learning_rate
  kvstore::KeyTable<RateMultipliers> multipliers;

  RateMultipliers MultipliersOf(KeyRef key) const {
    if (multipliers.empty()) return {};
    const auto found = multipliers.find(key);
    return found != multipliers.end() ? found->second : RateMultipliers();
  }
  // `num_update`: the most updates of any key.
  double LearningRate(KeyRef key, std::int64_t num_update) const {
    return (schedule ? RateAt(*schedule, num_update) : learning_rate) *
           MultipliersOf(key).learning_rate;
  }
  // Whether updates take a pass that sums over the whole array before the last one.
  bool NeedsNorms() const {
    KeyUpdate update = {};
    update.learning_rate = 1;
    update.step = 1;
    update.row_length = 1;
    return rule->Begin(update) > 1;
  }
  double WeightDecay(KeyRef key) const { return weight_decay * MultipliersOf(key).weight_decay; }
};

}  // namespace heddle::internal
