// What of an optimizer decides which states it keeps.
#pragma once

#include <heddle/optimizer.h>

#include <map>
#include <string>

namespace heddle::kvstore {

// The parameters that cannot change once the optimizer is made, but for multi_precision, by name.
// An optimizer that heddle does not have tells of none.
std::map<std::string, double> FixedParameters(const Optimizer& optimizer);

}  // namespace heddle::kvstore
