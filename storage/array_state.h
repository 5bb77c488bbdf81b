// What an NDArray handle points to.
//
// Many handles share an ArrayState (one view: shape, dtype, where in the buffer); many views share
// a Buffer (memory and Var). The bodies of queued ops hold handles, so the memory outlives the last
// of them.
#pragma once

#include <heddle/ndarray.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/access_check.h"
#include "storage/allocator.h"

namespace heddle::internal {

// The memory that views share. Takes it from the allocator on first use: arrays that wait in a
// queue cost nothing yet.
class Buffer {
 public:
  // `block`: memory that is there already, of which the allocator hears only when it is freed.
  // `keeper`: what the allocator lives as long as; null: longer than any array.
  Buffer(Engine& engine, Var var, Device device, std::int64_t bytes, storage::Allocator& allocator,
         std::byte* block = nullptr, std::shared_ptr<void> keeper = nullptr)
      : engine_(engine),
        var_(std::move(var)),
        device_(device),
        bytes_(bytes),
        keeper_(std::move(keeper)),
        allocator_(allocator),
        block_(block) {}

  void Retain() noexcept { refs_.fetch_add(1, std::memory_order_relaxed); }
  void Release() noexcept {
    // acq_rel: the last holder sees what all others did with the memory
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // Threads: any; the first calls may come together. Throws OutOfMemory.
  std::byte* data() {
    std::byte* const block = block_.load(std::memory_order_acquire);  // pairs with Allocate's CAS
    return block != nullptr ? block : Allocate();
  }

  Engine& engine() const { return engine_; }
  const Var& var() const { return var_; }
  Device device() const { return device_; }
  bool is_on_gpu() const { return device_.type == DeviceType::kGpu; }
  std::int64_t bytes() const { return bytes_; }

 private:
  ~Buffer();
  std::byte* Allocate();
  // Blocks of no bytes do not exist.
  std::int64_t block_bytes() const { return bytes_ > 0 ? bytes_ : 1; }

  std::atomic<std::int64_t> refs_{1};
  Engine& engine_;  // not touched by the destructor: arrays may outlive their engine
  const Var var_;
  const Device device_;
  const std::int64_t bytes_;
  const std::shared_ptr<void> keeper_;
  storage::Allocator& allocator_;
  std::atomic<std::byte*> block_;
};

struct ArrayState {
  // Takes over one count of `shared`.
  ArrayState(Shape dims, DType type, Buffer* shared, std::int64_t start)
      : shape(std::move(dims)),
        dtype(type),
        buffer(shared),
        offset(start),
        bytes(shape.size() * static_cast<std::int64_t>(SizeOf(type))) {}
  ~ArrayState() { buffer->Release(); }
  ArrayState(const ArrayState&) = delete;
  ArrayState& operator=(const ArrayState&) = delete;

  std::atomic<std::int64_t> refs{1};
  const Shape shape;
  const DType dtype;
  Buffer* const buffer;
  const std::int64_t offset;  // bytes from the start of the buffer
  const std::int64_t bytes;
};

// Throws AccessError, naming op, access and array, if the running body may not touch the elements.
void CheckTouch(const ArrayState& state, engine::Touch touch);
void CheckTouch(const Var& var, engine::Touch touch, const Shape& shape, DType dtype,
                Device device);

// Opens handles for storage's own code.
class ArrayAccess {
 public:
  static ArrayState& StateOf(const NDArray& array) { return *array.state_; }
  static NDArray Adopt(ArrayState* state) { return NDArray(state); }
};

// An array of its own memory, on the device of `guard`, that has the Var of `guard`: what belongs
// to a value and is touched only by ops on the value. Throws as NDArray's constructor does.
NDArray NewArrayWith(const Var& var, Shape shape, DType dtype, Device device, Engine& engine);
template <class Array>
NDArray NewArrayGuardedBy(const Array& guard, Shape shape, DType dtype) {
  return NewArrayWith(guard.var(), std::move(shape), dtype, guard.device(), guard.engine());
}

// Throws InvalidArgument, naming op and array, if the body of an op of the CPUs runs here: it would
// take an address of a GPU for one of its own.
void CheckGpuTouch(const ArrayState& state);

// The elements of an array, which the access checker lets a body have only if its op declares that.
// Those of a GPU are for the bodies of GPU ops, and for nobody's eyes outside of ops.
inline const std::byte* ReadableElements(const ArrayState& state) {
  if (state.buffer->is_on_gpu()) [[unlikely]]
    CheckGpuTouch(state);
  if (engine::ChecksAccess()) [[unlikely]]
    CheckTouch(state, engine::Touch::kRead);
  return state.buffer->data() + state.offset;
}
inline std::byte* WritableElements(const ArrayState& state) {
  if (state.buffer->is_on_gpu()) [[unlikely]]
    CheckGpuTouch(state);
  if (engine::ChecksAccess()) [[unlikely]]
    CheckTouch(state, engine::Touch::kWrite);
  return state.buffer->data() + state.offset;
}

// The state of an array that is not empty.
inline const ArrayState& StateOf(const NDArray& array) { return ArrayAccess::StateOf(array); }

}  // namespace heddle::internal
