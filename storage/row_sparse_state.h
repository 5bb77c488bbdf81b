// What a RowSparseNDArray handle points to.
//
// Invariants, whenever no op that writes the value is running:
//   (R1) The ids are sorted and unique, in [0, shape[0]).
//   (R2) There is memory for as many rows as there are ids.
// `rows` is touched only by the bodies of ops that name `var`, and by threads after a wait, as the
// elements of an NDArray are. An op that fails leaves R1 and R2 true: it takes memory before it
// writes, or leaves no rows.
//
// GPUs. Ids and rows lie in the GPU's memory, how many there are and where is known on the host: to
// the bodies of GPU ops as if all that was issued before had happened. So whoever writes one knows
// the number of its rows when it is issued, and keeps memory that has been replaced until it is
// done (Renew).
#pragma once

#include <heddle/engine.h>
#include <heddle/row_sparse.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "ops/gpu_tasks.h"
#include "ops/row_sparse.h"
#include "storage/allocator.h"
#include "storage/array_state.h"

namespace heddle::internal {

inline constexpr std::int64_t kIdBytes = sizeof(std::int64_t);  // of a row

// Memory for ids and rows, which grows as needed.
class RowStorage {
 public:
  // `keeper`: what the allocator lives as long as; null: longer than any array.
  RowStorage(storage::Allocator& allocator, std::int64_t row_bytes,
             std::shared_ptr<void> keeper = nullptr)
      : keeper_(std::move(keeper)), allocator_(&allocator), row_bytes_(row_bytes) {}
  RowStorage(RowStorage&& other) noexcept
      : keeper_(std::move(other.keeper_)),
        allocator_(other.allocator_),
        row_bytes_(other.row_bytes_),
        count_(std::exchange(other.count_, 0)),
        capacity_(std::exchange(other.capacity_, 0)),
        ids_(std::exchange(other.ids_, nullptr)),
        rows_(std::exchange(other.rows_, nullptr)) {}
  RowStorage& operator=(RowStorage other) noexcept {
    std::swap(keeper_, other.keeper_);
    std::swap(allocator_, other.allocator_);
    std::swap(row_bytes_, other.row_bytes_);
    std::swap(count_, other.count_);
    std::swap(capacity_, other.capacity_);
    std::swap(ids_, other.ids_);
    std::swap(rows_, other.rows_);
    return *this;
  }
  ~RowStorage() { Free(); }

  std::int64_t count() const { return count_; }
  std::int64_t capacity() const { return capacity_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  std::int64_t* ids() const { return ids_; }
  std::byte* rows() const { return rows_; }
  std::byte* row(std::int64_t place) const { return rows_ + place * row_bytes_; }
  ops::SparseRows view() const { return {{ids_, static_cast<std::size_t>(count_)}, rows_}; }
  ops::GpuRows gpu_view() const { return {ids_, static_cast<std::size_t>(count_), rows_}; }

  // Room for `count` rows; ids and rows are undefined. Keeps memory that fits, not much more.
  // OutOfMemory: no rows.
  void Reset(std::int64_t count) { Renew(count); }
  // The same. Returns the memory that it has replaced, if any.
  RowStorage Renew(std::int64_t count);
  // The first `count` rows, of those that there is room for.
  void set_count(std::int64_t count) { count_ = count; }
  // Empty storage for rows of the same size with room for `capacity` of them.
  RowStorage Another(std::int64_t capacity) const;

 private:
  void Free() noexcept;

  std::shared_ptr<void> keeper_;
  storage::Allocator* allocator_;
  std::int64_t row_bytes_;
  std::int64_t count_ = 0;
  std::int64_t capacity_ = 0;  // rows
  std::int64_t* ids_ = nullptr;
  std::byte* rows_ = nullptr;
};

struct RowSparseState {
  RowSparseState(Shape dims, DType type, Device where, Engine& of);

  bool is_on_gpu() const { return device.type == DeviceType::kGpu; }

  const Shape shape;
  const DType dtype;
  const Device device;
  Engine& engine;  // not touched by the destructor: arrays may outlive their engine
  const Var var;
  const std::int64_t row_size;  // elements
  RowStorage rows;
};

// Opens handles for heddle's own code.
class RowSparseAccess {
 public:
  static RowSparseState& StateOf(const RowSparseNDArray& array) { return *array.state_; }
};

// The state of an array that is not empty, of which only the constant members are used.
inline RowSparseState& StateOf(const RowSparseNDArray& array) {
  return RowSparseAccess::StateOf(array);
}

// The state, with its rows to be read or written, which the access checker lets a body have only if
// its op declares that.
inline const RowSparseState& ToRead(const RowSparseNDArray& array) {
  const RowSparseState& state = StateOf(array);
  if (state.is_on_gpu()) [[unlikely]]
    CheckGpuTouch(state.device, state.shape, state.dtype);
  if (engine::ChecksAccess()) [[unlikely]] {
    CheckTouch(state.var, engine::Touch::kRead, state.shape, state.dtype, state.device);
  }
  return state;
}
inline RowSparseState& ToWrite(const RowSparseNDArray& array) {
  RowSparseState& state = StateOf(array);
  if (state.is_on_gpu()) [[unlikely]]
    CheckGpuTouch(state.device, state.shape, state.dtype);
  if (engine::ChecksAccess()) [[unlikely]] {
    CheckTouch(state.var, engine::Touch::kWrite, state.shape, state.dtype, state.device);
  }
  return state;
}

}  // namespace heddle::internal
