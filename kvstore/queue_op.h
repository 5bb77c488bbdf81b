// How ops on values are queued, on CPUs and GPUs alike.
#pragma once

#include <heddle/engine.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <array>
#include <exception>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvstore/gpu_work.h"
#include "kvstore/held_arrays.h"
#include "storage/array_state.h"

namespace heddle::kvstore {

// What an op holds of a list: the one array, or all of them.
template <class Array>
std::span<const Array> View(const Array& array) {
  return {&array, 1};
}
template <class Array>
std::span<const Array> View(const HeldArrays<Array>& arrays) {
  return arrays.view();
}

// Past the check for empty handles, which the store has done.
inline const Var& VarOf(const NDArray& array) { return internal::StateOf(array).var; }
inline const Var& VarOf(const RowSparseNDArray& array) { return array.var(); }

template <class Array>
std::vector<VarRef> VarsOf(std::span<const Array> arrays) {
  std::vector<VarRef> vars;
  vars.reserve(arrays.size() + 1);
  for (const Array& array : arrays) vars.push_back(VarOf(array));
  return vars;
}

// The same for an op, without allocating for a few.
template <class Array>
VarList VarListOf(std::span<const Array> arrays) {
  std::array<VarRef, 4> few;
  if (arrays.size() > few.size()) return VarsOf(arrays);
  for (std::size_t i = 0; i < arrays.size(); ++i) few[i] = VarOf(arrays[i]);
  return VarList(std::span<const VarRef>(few).first(arrays.size()));
}

// The error of the first poisoned input; null if there is none.
template <class Array>
std::exception_ptr ErrorOfInputs(std::span<const Array> inputs) {
  for (const Array& input : inputs) {
    if (std::exception_ptr error = input.engine().ErrorOf(input.var())) return error;
  }
  return nullptr;
}

// An op's body as that of a GPU op.
template <class Op>
struct OnGpu {
  Op op;
  Engine& engine;
  std::vector<std::shared_ptr<void>> kept;

  void operator()(GpuStream stream) {
    GpuWork::Pending pending;
    const GpuWork work(engine, stream, &kept, &pending);
    op(&work);
    work.Issue();
  }
};

// Queues op(), or op(GpuWork*) for a GPU.
template <class Op>
void Queue(Engine& engine, const OpOptions& options, Op op) {
  if constexpr (std::is_invocable_v<const Op&, const GpuWork*>) {
    if (options.device.type == DeviceType::kGpu) {
      engine.PushGpu(options, OnGpu<Op>{std::move(op), engine, {}});
      return;
    }
  }
  engine.Push(options, std::move(op));
}

}  // namespace heddle::kvstore
