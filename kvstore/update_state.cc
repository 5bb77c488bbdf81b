#include "kvstore/update_state.h"

#include <heddle/error.h>

#include <cstddef>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "engine/access_check.h"
#include "kvstore/array_kernels.h"
#include "kvstore/gpu_rows.h"
#include "kvstore/gpu_work.h"
#include "kvstore/optimizer_states.h"
#include "ops/convert.h"
#include "storage/array_state.h"
#include "storage/row_sparse_kernels.h"

namespace heddle::kvstore {

namespace {

using internal::UpdateStateType;

// Where there are no rows, they may be of a length that cannot be counted.
std::int64_t RowLength(const Shape& shape) {
  return shape.ndim() == 0 || shape[0] == 0 ? 1 : shape.size() / shape[0];
}

// FNV-1a over the bytes of the text, or of the integer from the lowest byte up.
std::uint64_t StableHash(KeyRef key) {
  std::uint64_t hash = 0xCBF29CE484222325;
  const auto add = [&](std::uint8_t byte) { hash = (hash ^ byte) * 0x100000001B3; };
  if (key.is_string()) {
    for (char c : key.text()) add(static_cast<std::uint8_t>(c));
  } else {
    const auto number = static_cast<std::uint64_t>(key.number());
    for (int shift = 0; shift < 64; shift += 8) add(static_cast<std::uint8_t>(number >> shift));
  }
  return hash;
}

void CopyValue(const NDArray& from, const NDArray& to, const GpuWork* gpu) {
  if (gpu != nullptr) return gpu->Copy(from, to);
  CopyArray(from, {&to, 1});
}
void CopyValue(const RowSparseNDArray& from, const NDArray& to, const GpuWork* gpu) {
  if (gpu != nullptr) return RowsToDense(from, to, *gpu);
  storage::RowSparseToDense(from, to);
}

// Of an array of the CPUs that nobody writes any more.
void CopyRestored(const NDArray& from, const NDArray& to, const GpuWork* gpu) {
  if (gpu != nullptr) return gpu->Upload(from, to);
  const engine::UncheckedScope settled;  // so it needs no order
  CopyArray(from, {&to, 1});
}

// `restored`: what it starts as, or empty. `start`: the value, or its master copy.
template <class Value>
NDArray MakeState(const UpdateStateType& type, DType dtype, const Value& start,
                  const NDArray& restored, const GpuWork* gpu) {
  const Shape& shape = start.shape();
  const std::int64_t rows = shape.ndim() > 0 ? shape[0] : 1;
  NDArray state = internal::NewArrayGuardedBy(start, type.per_row ? Shape{rows} : shape, dtype);
  if (!restored.empty()) {
    CopyRestored(restored, state, gpu);
  } else if (type.start == UpdateStateType::Start::kWeight) {
    CopyValue(start, state, gpu);
  } else if (gpu != nullptr) {
    gpu->FillZero(state);
  } else {
    FillZero(state);
  }
  return state;
}

// What is restored and not in use yet is never written.
NDArray SnapshotOf(const NDArray& array, const NDArray& restored, const GpuWork* gpu) {
  if (array.empty()) return restored;
  NDArray copy = internal::NewArrayGuardedBy(array, array.shape(), array.dtype());
  CopyValue(array, copy, gpu);
  return copy;
}

}  // namespace

std::unique_ptr<UpdateState> StatesOrigin::Start() {
  MutexLock lock(mutex_);
  return loaded_ != nullptr ? std::move(loaded_) : std::make_unique<UpdateState>(multi_precision);
}

template <class Value>
ArrayUpdate UpdateState::BeginFor(const internal::UpdateRule& rule, KeyRef key, const Value& value,
                                  double learning_rate, double weight_decay, const GpuWork* gpu) {
  // Calls refuse it before; what a peer pushes comes here unchecked.
  if (!IsFloating(value.dtype())) {
    throw InvalidArgument(fmt::format("key {}: expected a floating dtype for an optimizer, got {}",
                                      ToString(key), Name(value.dtype())));
  }
  ArrayUpdate update = {};
  update.rule = &rule;
  update.run.dtype = value.dtype();
  if (multi_precision && ops::Is16BitFloat(value.dtype())) {
    if (master.empty()) {
      master = MakeState({.name = "master", .start = UpdateStateType::Start::kWeight},
                         DType::kFloat32, value, restored_master, gpu);
      restored_master = NDArray();
    }
    update.run.master = master.data<float>();
  }
  const std::span<const UpdateStateType> types = rule.states();
  DCHECK(types.size() <= arrays.size());
  const std::size_t needed = rule.num_states();
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].empty()) {
      if (i >= needed && restored[i].empty()) continue;
      arrays[i] = master.empty() ? MakeState(types[i], value.dtype(), value, restored[i], gpu)
                                 : MakeState(types[i], master.dtype(), master, restored[i], gpu);
      restored[i] = NDArray();
    }
    update.run.states[i] = arrays[i].data();
  }
  update.key.learning_rate = learning_rate;
  update.key.weight_decay = weight_decay;
  update.key.step = ++step;
  if (key.is_string()) update.key.key = key.text();
  if (!key_hash_) key_hash_ = StableHash(key);
  update.key.key_hash = *key_hash_;
  update.key.row_length = RowLength(value.shape());
  update.key.numbers = numbers;
  update.passes = rule.Begin(update.key);
  numbers = update.key.numbers;
  return update;
}

void UpdateState::SnapshotTo(KeyStates* out, const GpuWork* gpu) const {
  out->step = step;
  out->numbers = numbers;
  out->master = SnapshotOf(master, restored_master, gpu);
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    out->arrays[i] = SnapshotOf(arrays[i], restored[i], gpu);
  }
}

ArrayUpdate UpdateState::Begin(const internal::UpdateRule& rule, KeyRef key, const NDArray& value,
                               double learning_rate, double weight_decay, const GpuWork* gpu) {
  ArrayUpdate update = BeginFor(rule, key, value, learning_rate, weight_decay, gpu);
  update.run.weight = value.data();
  return update;
}

ArrayUpdate UpdateState::Begin(const internal::UpdateRule& rule, KeyRef key,
                               const RowSparseNDArray& value, double learning_rate,
                               double weight_decay, const GpuWork* gpu) {
  return BeginFor(rule, key, value, learning_rate, weight_decay, gpu);
}

}  // namespace heddle::kvstore
