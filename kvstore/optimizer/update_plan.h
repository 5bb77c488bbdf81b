// An optimizer as it was at one moment: what a push keeps of it.
#pragma once

#include <memory>

#include "kvstore/optimizer/update_rule.h"

namespace heddle::internal {

// Immutable. Threads: any.
struct UpdatePlan {
  std::shared_ptr<const UpdateRule> rule;
  double learning_rate = 0;
  double weight_decay = 0;
  bool multi_precision = false;  // float16 and bfloat16 values are updated through a float32 copy
};

}  // namespace heddle::internal
