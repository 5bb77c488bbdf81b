// One part of ArrayParts: its value, its state, and the sum in progress.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/block_pool.h"
#include "kvstore/dist/server/array_parts.h"
#include "kvstore/part_rows.h"
#include "kvstore/update_state.h"

namespace heddle::kvstore::dist {

// `bytes` bytes of the payload from `offset` on; it has as many.
void CopyOut(const Payload& payload, std::size_t offset, void* out, std::size_t bytes);
// The elements where they lie, if they lie together and aligned; else null.
const void* InPlace(const Payload& payload, std::size_t alignment);

// A dense value: elements that are written only while nobody reads them.
struct ArrayParts::Value {
  explicit Value(NDArray own) : array(std::move(own)), data(array.data()) {}
  explicit Value(const Payload& payload)
      : data(const_cast<std::byte*>(payload.runs()[0].data())), owner(payload.owner()) {}

  bool lent() const { return readers.load(std::memory_order_acquire) > 0; }  // pairs with Lend's

  template <class Source>  // an array, or a payload
  static std::shared_ptr<Value> Make(Source&& source) {
    return std::allocate_shared<Value>(engine::BlockAllocator<Value>(),
                                       std::forward<Source>(source));
  }
  static Payload Lend(const std::shared_ptr<Value>& self, std::size_t bytes) {
    self->readers.fetch_add(1, std::memory_order_relaxed);
    std::shared_ptr<const void> lease(
        self->data,
        [self](const void*) {
          self->readers.fetch_sub(1, std::memory_order_release);  // pairs with lent's acquire
        },
        engine::BlockAllocator<Value>());
    return {std::move(lease), {static_cast<const std::byte*>(self->data), bytes}};
  }

  NDArray array;  // empty: the memory is a payload's
  void* data;
  std::shared_ptr<const void> owner;
  std::atomic<int> readers{0};
};

struct ArrayParts::Part {
  Part(const PartId& part_id, PartInfo part_info, Engine& part_engine)
      : id(part_id), info(std::move(part_info)), engine(part_engine) {}

  std::int64_t extent() const { return info.end - info.begin; }  // elements, or rows
  std::size_t bytes() const {
    return static_cast<std::size_t>(extent()) * SizeOf(info.dtype);  // of a dense part
  }
  // The rows that are here, or have elements here; row-sparse arrays of the part count their ids
  // from the first one.
  PartRows part_rows() const {
    const std::int64_t row_size = RowSizeOf(info.shape);
    return info.row_sparse ? PartRows::OfRows(info.begin, info.end, row_size)
                           : PartRows::OfElements(info.begin, info.end, row_size);
  }
  // Rules that work on rows need to see them.
  Shape shape() const { return info.num_parts == 1 ? info.shape : Shape{extent()}; }
  NDArray NewArray(DType dtype) const { return NDArray(shape(), dtype, Cpu(), engine); }
  NDArray ToArray(const Payload& payload) const {
    NDArray array = NewArray(info.dtype);
    CopyOut(payload, 0, array.data(), bytes());
    return array;
  }
  RowSparseNDArray ToRows(const Payload& payload) const;

  bool HasArrays() const { return !held.empty() || sum != nullptr || !held_rows.empty(); }
  void AddDense(const Payload& payload);
  void AddRows(const Payload& payload);
  void AddCodes(const Payload& codes, const Compressor& compressor);
  void RoundSum();
  std::shared_ptr<Value> TakeSum();
  std::shared_ptr<Value> ToDense(std::span<const RowSparseNDArray> inputs) const;  // their sum
  // The value in memory of its own that nobody reads.
  const NDArray& WritableValue();
  // Makes the state that a rule of that generation works with.
  void ReadyState(bool multi_precision, std::uint64_t rule_generation);

  const PartId id;
  const PartInfo info;
  Engine& engine;
  Var var;  // of the ops that update it; empty before the first

  // One of the two is empty.
  std::shared_ptr<Value> value;
  RowSparseNDArray rows;

  // The sum in progress: `held`, to be added to `sum` unless that is null.
  std::vector<Payload> held;
  std::shared_ptr<Value> sum;
  NDArray float_sum;  // of codes
  // Or these, also of a dense part, as long as all that is pushed is row-sparse.
  std::vector<RowSparseNDArray> held_rows;

  std::unique_ptr<UpdateState> state;
  std::uint64_t generation = 0;  // of `state`
};

// An update of a dense part, whose gradient and weight are at hand.
struct ArrayParts::Begun {
  Part* part;
  ArrayUpdate update;
  const void* gradient;
  Payload lone;                  // keeps the gradient
  std::shared_ptr<Value> total;  // or this does
  // Not empty: what `total` is the sum of, of which a lazy rule touches the rows alone.
  std::vector<RowSparseNDArray> rows;
};

}  // namespace heddle::kvstore::dist
