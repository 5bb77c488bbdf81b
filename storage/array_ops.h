// What the ops of arrays have in common.
#pragma once

#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <cstdint>
#include <utility>

#include "ops/convert.h"
#include "ops/gpu_kernels.h"
#include "storage/array_state.h"
#include "storage/gpus.h"

namespace heddle::storage {

inline ops::Scalar ToKernel(Scalar value) {
  return value.is_integer() ? ops::Scalar(value.integer()) : ops::Scalar(value.real());
}

inline std::int64_t ElementBytes(const NDArray& array) {
  return static_cast<std::int64_t>(SizeOf(internal::StateOf(array).dtype));
}

// The address of element `index`, to write or only to read. Inside op bodies.
inline std::byte* At(const NDArray& array, std::int64_t index) {
  return internal::WritableElements(internal::StateOf(array)) + index * ElementBytes(array);
}
inline const std::byte* ConstAt(const NDArray& array, std::int64_t index) {
  return internal::ReadableElements(internal::StateOf(array)) + index * ElementBytes(array);
}

// An op that writes `out`: whole, or, for a view of a part, as a read-modify.
inline OpOptions Writing(OpName name, const NDArray& out, int priority) {
  const internal::ArrayState& state = internal::StateOf(out);
  OpOptions options{.name = name, .writes = {state.var}, .device = state.device};
  if (out.is_partial()) options.reads = {state.var};
  options.priority = priority;
  return options;
}

// The same for an op that also reads one array.
inline OpOptions Writing(OpName name, const NDArray& out, const NDArray& in, int priority) {
  OpOptions options = Writing(name, out, priority);
  options.reads = out.is_partial() ? VarList{out.var(), in.var()} : VarList{in.var()};
  return options;
}

inline bool IsOnGpu(const NDArray& array) { return internal::StateOf(array).is_on_gpu(); }

// An op of `out`'s GPU: body(kernels, stream), unless `out` has no elements. It holds `out`.
template <class Body>
void PushKernel(const OpOptions& options, const NDArray& out, Body&& body) {
  Engine& engine = out.engine();
  engine.PushGpu(options, [&kernels = Gpus::Of(engine).kernels(), out,
                           body = std::forward<Body>(body)](GpuStream stream) {
    if (out.size() > 0) body(kernels, stream);
  });
}

}  // namespace heddle::storage
