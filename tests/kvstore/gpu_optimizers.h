// Which optimizers have code for GPUs.
#pragma once

#include <heddle/optimizer.h>

#include <string_view>
#include <vector>

#include "kvstore/optimizer/update_plan.h"

namespace heddle::kvstore_test {

// The rest of OptimizerNames() works on CPUs alone: a store refuses it where a GPU has the value.
inline std::vector<std::string_view> GpuOptimizerNames() {
  std::vector<std::string_view> names = OptimizerNames();
  std::erase_if(names, [](std::string_view name) {
    return MakeOptimizer(name)->plan()->rule->numbers().type == nullptr;
  });
  return names;
}

}  // namespace heddle::kvstore_test
