// The checks of store calls, and what else stores have to say. A check throws InvalidArgument,
// which names the call, the key, what it expected and what it got.
#pragma once

#include <heddle/kvstore.h>
#include <heddle/optimizer.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kvstore/compression/compressor.h"
#include "kvstore/optimizer/update_plan.h"
#include "kvstore/optimizer_states.h"
#include "storage/array_state.h"

namespace heddle::kvstore {

// Not more arrays than an op can name.
void CheckArrayCount(std::string_view call, KeyRef key, std::size_t count);
// One array at least, not more than an op can name, none of them empty, all of the engine.
void CheckArrays(std::string_view call, const KeyArrays& pair, const Engine& engine);
// The same, and exactly one.
void CheckOneArray(std::string_view call, const KeyArrays& pair, const Engine& engine);
// None of them row-sparse.
void CheckDense(std::string_view call, const KeyArrays& pair);

[[noreturn]] void ThrowUnknownKey(std::string_view call, KeyRef key);  // UnknownKey
[[noreturn]] void ThrowNotNew(std::string_view call, KeyRef key);
[[noreturn]] void ThrowMixedKinds(std::string_view call, KeyRef key);
[[noreturn]] void ThrowShape(std::string_view call, KeyRef key, const Shape& expected,
                             const Shape& given);
[[noreturn]] void ThrowDType(std::string_view call, KeyRef key, DType expected, DType given);

// Of arrays that are not empty, dense or row-sparse, or whatever else has a shape() and a dtype();
// here without calls, since every push asks for all of its arrays'.
template <class A>
const Shape& ShapeOf(const A& array) {
  return array.shape();
}
template <class A>
DType DTypeOf(const A& array) {
  return array.dtype();
}
inline const Shape& ShapeOf(const NDArray& array) { return internal::StateOf(array).shape; }
inline DType DTypeOf(const NDArray& array) { return internal::StateOf(array).dtype; }

template <class A, class B>
void CheckShape(std::string_view call, KeyRef key, const A& expected, const B& given) {
  if (ShapeOf(given) != ShapeOf(expected)) ThrowShape(call, key, ShapeOf(expected), ShapeOf(given));
}
template <class A, class B>
void CheckShapeAndDType(std::string_view call, KeyRef key, const A& expected, const B& given) {
  CheckShape(call, key, expected, given);
  if (DTypeOf(given) != DTypeOf(expected)) ThrowDType(call, key, DTypeOf(expected), DTypeOf(given));
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
// Of the kind of the store's other keys: strings, integers or, while there are none, either.
void CheckKeyKind(std::string_view call, KeyRef key, std::optional<bool> string_keys);

// Whole calls, so far as they can be checked without the stored values.
void CheckInit(std::span<const KeyArrays> pairs, const Engine& engine);
void CheckBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                    const Engine& engine);
void CheckPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   const Engine& engine);
void CheckRowPull(const KeyRowPull& pull, const Engine& engine);

// A row pull of a value that is not row-sparse.
[[noreturn]] void ThrowNotRowSparse(KeyRef key);
// The outputs and the stored value, which has is_row_sparse() and shape().
template <class Value>
void CheckRowPullOf(const Value& value, const KeyRowPull& pull) {
  if (!value.is_row_sparse()) ThrowNotRowSparse(pull.key);
  for (const RowSparseNDArray& array : pull.out) {
    CheckShape("RowSparsePull", pull.key, value, array);
  }
}

// A gradient of a key, and what is done with it.
struct PushedKind {
  KeyRef key;
  const Shape& shape;
  DType dtype;
  bool row_sparse;
};
// Whether it can be compressed.
void CheckCompression(std::string_view call, const PushedKind& pushed,
                      const Compressor& compressor);
// Whether the optimizer, of which `plan` is, can update by it.
void CheckUpdate(std::string_view call, const PushedKind& pushed, const Optimizer& optimizer,
                 const internal::UpdatePlan& plan);

// Logs that a pull of `key` leaves row-sparse outputs alone.
void TellSparseIgnored(KeyRef key);

// Of SetGradientCompression: the compressor, or null if `present` is one of the same options.
// InvalidState after the first push.
std::shared_ptr<const Compressor> NewCompressor(const CompressionOptions& options,
                                                const Compressor* present, bool pushed);
// Of LoadOptimizerStates: the states are of an optimizer that keeps the same ones.
void CheckFixedParameters(const std::string& file, const OptimizerStates& states,
                          const Optimizer& optimizer);

}  // namespace heddle::kvstore
