#include "kvstore/checks.h"

#include <heddle/error.h>

#include <unordered_set>

#include <fmt/format.h>

#include "kvstore/key_table.h"

namespace heddle::kvstore {

void CheckArrays(std::string_view call, const KeyArrays& pair, const Engine& engine) {
  if (pair.arrays.empty() && pair.row_sparse.empty()) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected one array at least, got none", call, ToString(pair.key)));
  }
  ForEachArray(pair, [&](const auto& array) {
    if (array.empty()) {
      throw InvalidArgument(fmt::format("{}: key {}: expected an array, got an empty handle", call,
                                        ToString(pair.key)));
    }
    if (&array.engine() != &engine) {
      throw InvalidArgument(
          fmt::format("{}: key {}: expected an array of the store's engine, got one of another "
                      "engine",
                      call, ToString(pair.key)));
    }
  });
}

void CheckOneArray(std::string_view call, const KeyArrays& pair, const Engine& engine) {
  CheckArrays(call, pair, engine);
  const std::size_t count = pair.arrays.size() + pair.row_sparse.size();
  if (count != 1) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected one array, got {}", call, ToString(pair.key), count));
  }
}

void CheckDense(std::string_view call, const KeyArrays& pair) {
  if (pair.row_sparse.empty()) return;
  throw InvalidArgument(fmt::format("{}: key {}: expected dense arrays, got row-sparse ones", call,
                                    ToString(pair.key)));
}

void ThrowShape(std::string_view call, KeyRef key, const Shape& expected, const Shape& given) {
  throw InvalidArgument(fmt::format("{}: key {}: expected shape {}, got {}", call, ToString(key),
                                    ToString(expected), ToString(given)));
}

void ThrowDType(std::string_view call, KeyRef key, DType expected, DType given) {
  throw InvalidArgument(fmt::format("{}: key {}: expected dtype {}, got {}", call, ToString(key),
                                    Name(expected), Name(given)));
}

void CheckOneKind(std::string_view call, std::span<const KeyArrays> pairs) {
  for (const KeyArrays& pair : pairs) {
    if (pair.key.is_string() != pairs[0].key.is_string()) {
      throw InvalidArgument(fmt::format("{}: keys {} and {}: expected keys of one kind", call,
                                        ToString(pairs[0].key), ToString(pair.key)));
    }
  }
}

void CheckDistinct(std::string_view call, std::span<const KeyArrays> pairs) {
  std::unordered_set<KeyRef, KeyHash, KeyEqual> keys;
  for (const KeyArrays& pair : pairs) {
    if (!keys.insert(pair.key).second) {
      throw InvalidArgument(fmt::format("{}: key {} is named twice: expected distinct keys", call,
                                        ToString(pair.key)));
    }
  }
}

}  // namespace heddle::kvstore
