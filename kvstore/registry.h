// The types of stores, by lower-case name: the written table of registry.cc and what Register adds.
#pragma once

#include <heddle/kvstore.h>

#include <string>
#include <string_view>
#include <vector>

namespace heddle::kvstore {

std::string LowerCase(std::string_view text);

// Throws InvalidArgument, listing the known names. `type` in lower case.
KVStoreFactory FindStoreType(const std::string& type);
// Throws InvalidArgument if the name is empty or taken, or the factory null. `type` in lower case.
void AddStoreType(const std::string& type, KVStoreFactory factory);
std::vector<std::string> StoreTypes();  // sorted

}  // namespace heddle::kvstore
