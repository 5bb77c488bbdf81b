// The checks of array operations. Each throws InvalidArgument, which names the operation, what it
// expected and what it got. They run on every push, so only their failing ends are out of line.
#pragma once

#include <heddle/ndarray.h>

#include "storage/array_state.h"

namespace heddle::storage {

[[noreturn]] void ThrowEmpty(const char* operation);
[[noreturn]] void ThrowOtherEngine(const char* operation, const Shape& shape);
[[noreturn]] void ThrowShape(const char* operation, const Shape& expected, const Shape& given);
[[noreturn]] void ThrowDType(const char* operation, DType expected, DType given);
[[noreturn]] void ThrowNotOnGpu(const char* operation, Device given);
[[noreturn]] void ThrowDevice(const char* operation, Device expected, Device given);

inline void CheckNotEmpty(const char* operation, const NDArray& array) {
  if (array.empty()) [[unlikely]] {
    ThrowEmpty(operation);
  }
}

// From here on no array is empty. `array` as `like`:
inline void CheckSameEngine(const char* operation, const NDArray& like, const NDArray& array) {
  if (&internal::StateOf(like).engine != &internal::StateOf(array).engine) {
    ThrowOtherEngine(operation, internal::StateOf(array).shape);
  }
}
inline void CheckSameShape(const char* operation, const NDArray& like, const NDArray& array) {
  if (internal::StateOf(like).shape != internal::StateOf(array).shape) {
    ThrowShape(operation, internal::StateOf(like).shape, internal::StateOf(array).shape);
  }
}
inline void CheckSameDType(const char* operation, const NDArray& like, const NDArray& array) {
  if (internal::StateOf(like).dtype != internal::StateOf(array).dtype) {
    ThrowDType(operation, internal::StateOf(like).dtype, internal::StateOf(array).dtype);
  }
}
inline void CheckSameDevice(const char* operation, const NDArray& like, const NDArray& array) {
  if (internal::StateOf(like).device != internal::StateOf(array).device) {
    ThrowDevice(operation, like.device(), array.device());
  }
}
// Kernels can read both at once: all cpu(i) and cpu_pinned(i) share one memory.
inline void CheckSameMemory(const char* operation, const NDArray& like, const NDArray& array) {
  if (internal::StateOf(like).is_on_gpu() || internal::StateOf(array).is_on_gpu()) {
    CheckSameDevice(operation, like, array);
  }
}
// For operations that GPUs do not have yet.
inline void CheckNotOnGpu(const char* operation, const NDArray& array) {
  if (internal::StateOf(array).is_on_gpu()) ThrowNotOnGpu(operation, array.device());
}

// An array of row ids: not empty, of `engine`, numbers rather than bools.
void CheckRowIdArray(const char* operation, const NDArray& row_ids, const Engine& engine);

// An array of integers, or bools, holds `value` exactly.
void CheckScalar(const char* operation, DType dtype, Scalar value);

}  // namespace heddle::storage
