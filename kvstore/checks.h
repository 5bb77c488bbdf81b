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
// None of them row-sparse.
void CheckDense(std::string_view call, const KeyArrays& pair);

[[noreturn]] void ThrowShape(std::string_view call, KeyRef key, const Shape& expected,
                             const Shape& given);
[[noreturn]] void ThrowDType(std::string_view call, KeyRef key, DType expected, DType given);

// Of arrays that are not empty, dense or row-sparse, or whatever else has a shape() and a dtype().
template <class A, class B>
void CheckShape(std::string_view call, KeyRef key, const A& expected, const B& given) {
  if (given.shape() != expected.shape()) ThrowShape(call, key, expected.shape(), given.shape());
}
template <class A, class B>
void CheckShapeAndDType(std::string_view call, KeyRef key, const A& expected, const B& given) {
  CheckShape(call, key, expected, given);
  if (given.dtype() != expected.dtype()) ThrowDType(call, key, expected.dtype(), given.dtype());
}

// Calls f(array) for each array of a key, dense or row-sparse.
template <class F>
void ForEachArray(const KeyArrays& pair, const F& f) {
  for (const NDArray& array : pair.arrays) f(array);
  for (const RowSparseNDArray& array : pair.row_sparse) f(array);
}
// f(array) of the first array of a key, which has one.
template <class F>
decltype(auto) WithFirstArray(const KeyArrays& pair, const F& f) {
  return pair.arrays.empty() ? f(pair.row_sparse[0]) : f(pair.arrays[0]);
}

// All strings, or all integers.
void CheckOneKind(std::string_view call, std::span<const KeyArrays> pairs);
void CheckDistinct(std::string_view call, std::span<const KeyArrays> pairs);

}  // namespace heddle::kvstore
