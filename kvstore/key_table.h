// A map by key, looked up without making a Key.
#pragma once

#include <heddle/key.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <unordered_map>

namespace heddle::kvstore {

struct KeyHash {
  using is_transparent = void;
  std::size_t operator()(KeyRef key) const {
    return key.is_string() ? std::hash<std::string_view>()(key.text())
                           : std::hash<std::int64_t>()(key.number());
  }
};

struct KeyEqual {
  using is_transparent = void;
  bool operator()(KeyRef a, KeyRef b) const { return a == b; }
};

// References to values stay valid until their erasure.
template <class Value>
using KeyTable = std::unordered_map<Key, Value, KeyHash, KeyEqual>;

}  // namespace heddle::kvstore
