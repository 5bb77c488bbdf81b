// The checks of store calls. Each throws InvalidArgument, which names the call, the key, what it
// expected and what it got.
#pragma once

#include <heddle/kvstore.h>

#include <span>
#include <string_view>

namespace heddle::kvstore {

// One array at least, none of them empty, all of the engine.
void CheckArrays(std::string_view call, const KeyArrays& pair, const Engine& engine);
// The same, and exactly one.
void CheckOneArray(std::string_view call, const KeyArrays& pair, const Engine& engine);

// Of arrays that are not empty.
void CheckShape(std::string_view call, KeyRef key, const NDArray& expected, const NDArray& given);
void CheckShapeAndDType(std::string_view call, KeyRef key, const NDArray& expected,
                        const NDArray& given);

// All strings, or all integers.
void CheckOneKind(std::string_view call, std::span<const KeyArrays> pairs);
void CheckDistinct(std::string_view call, std::span<const KeyArrays> pairs);

}  // namespace heddle::kvstore
