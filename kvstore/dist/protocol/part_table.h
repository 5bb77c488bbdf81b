// What a machine keeps of each part, by the part's id.
#pragma once

#include <cstddef>

#include <boost/unordered/unordered_flat_map.hpp>

#include "kvstore/dist/protocol/ids.h"

namespace heddle::kvstore::dist {

// Pointer: owns what is kept, which stays where it is. With thousands of small parts each look at
// memory counts that is not in the cache, and this table costs one, if any; one of linked nodes
// costs two.
template <class Pointer>
using PartTable = boost::unordered_flat_map<PartId, Pointer, PartIdHash>;

// What is kept of the part will be wanted soon: begins to bring it into the cache. Worth it where
// several parts are known before the first is wanted.
template <class Pointer>
void Expect(const PartTable<Pointer>& table, const PartId& id) {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kLines = 4;
  const auto found = table.find(id);
  if (found == table.end()) return;
  const auto* const kept = reinterpret_cast<const std::byte*>(found->second.get());
  for (std::size_t i = 0; i < kLines; ++i) __builtin_prefetch(kept + i * kLine);
}

}  // namespace heddle::kvstore::dist
