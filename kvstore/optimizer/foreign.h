// An optimizer whose formula heddle does not have: what a worker sets for servers that have it.
#pragma once

#include <heddle/optimizer.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle::kvstore {

// It has these parameters, and learning_rate and weight_decay, each any finite number. Needs arrays
// that are not cut. A store that updates by itself fails each update by it with InvalidState.
OptimizerPtr MakeForeignOptimizer(std::string name,
                                  std::vector<std::pair<std::string, double>> parameters);

// Whether heddle has no optimizer of that name.
bool IsForeignOptimizer(std::string_view name);

}  // namespace heddle::kvstore
