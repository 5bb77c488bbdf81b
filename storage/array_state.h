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
#include <span>
#include <utility>

#include "base/prefetch.h"
#include "engine/access_check.h"
#include "engine/block_pool.h"
#include "storage/allocator.h"

namespace heddle::internal {

// The memory that views share. Takes it from the allocator on first use: arrays that wait in a
// queue cost nothing yet.
class Buffer {
 public:
  // `block`: memory that is there already, of which the allocator hears only when it is freed.
  // `keeper`: what the allocator lives as long as; null: longer than any array.
  Buffer(std::int64_t bytes, storage::Allocator& allocator, std::byte* block = nullptr,
         std::shared_ptr<void> keeper = nullptr)
      : bytes_(bytes), keeper_(std::move(keeper)), allocator_(allocator), block_(block) {}

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

  std::int64_t bytes() const { return bytes_; }

 private:
  ~Buffer();
  std::byte* Allocate();
  // Blocks of no bytes do not exist.
  std::int64_t block_bytes() const { return bytes_ > 0 ? bytes_ : 1; }

  std::atomic<std::int64_t> refs_{1};
  const std::int64_t bytes_;
  const std::shared_ptr<void> keeper_;
  storage::Allocator& allocator_;
  std::atomic<std::byte*> block_;
};

// All that a push and an op's body ask an array for lies on its first cache line, beside the count
// that both of them change: a small op on many arrays costs little else than such lines. The second
// one has the shape and never changes.
struct alignas(engine::kBlockAlign) ArrayState {
  // Where the memory lies, and what orders ops on it: of all views of a buffer the same.
  struct Place {
    Engine& engine;
    Var var;
    Device device;
  };
  // Takes over one count of `shared`.
  ArrayState(Shape dims, DType type, Place place, Buffer* shared, std::int64_t start)
      : buffer(shared),
        engine(place.engine),
        var(std::move(place.var)),
        bytes(dims.size() * static_cast<std::int64_t>(SizeOf(type))),
        device(place.device),
        dtype(type),
        is_partial(bytes < shared->bytes()),
        offset(start),
        shape(std::move(dims)) {}
  ~ArrayState() { buffer->Release(); }
  ArrayState(const ArrayState&) = delete;
  ArrayState& operator=(const ArrayState&) = delete;

  // From the pool that ops come from, but in a forked child.
  static void* operator new(std::size_t bytes);
  static void operator delete(void* state) noexcept;

  // Takes the memory on first use, as Buffer::data does.
  std::byte* elements() const {
    // acquire; pairs with the release below: the memory is what its allocator left
    std::byte* first = first_element.load(std::memory_order_acquire);
    if (first == nullptr) [[unlikely]] {
      first = buffer->data() + offset;
      first_element.store(first, std::memory_order_release);
    }
    return first;
  }
  bool is_on_gpu() const { return device.type == DeviceType::kGpu; }

  std::atomic<std::int64_t> refs{1};
  mutable std::atomic<std::byte*> first_element{nullptr};  // null: see elements()
  Buffer* const buffer;
  Engine& engine;  // not touched by the destructor: arrays may outlive their engine
  const Var var;
  const std::int64_t bytes;
  const Device device;
  const DType dtype;
  const bool is_partial;      // shows a part of its buffer only
  const std::int64_t offset;  // bytes from the start of the buffer

  const Shape shape;
};
static_assert(sizeof(ArrayState) == 2 * engine::kBlockAlign);

// Throws AccessError, naming op, access and array, if the running body may not touch the elements.
void CheckTouch(const ArrayState& state, engine::Touch touch);
void CheckTouch(const Var& var, engine::Touch touch, const Shape& shape, DType dtype,
                Device device);

// Opens handles for storage's own code.
class ArrayAccess {
 public:
  static ArrayState& StateOf(const NDArray& array) { return *array.state_; }
  static const void* AddressOf(const NDArray& array) { return array.state_; }
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
void CheckGpuTouch(Device device, const Shape& shape, DType dtype);

// The elements of an array, which the access checker lets a body have only if its op declares that.
// Those of a GPU are for the bodies of GPU ops, and for nobody's eyes outside of ops.
inline const std::byte* ReadableElements(const ArrayState& state) {
  if (state.is_on_gpu()) [[unlikely]]
    CheckGpuTouch(state);
  if (engine::ChecksAccess()) [[unlikely]]
    CheckTouch(state, engine::Touch::kRead);
  return state.elements();
}
inline std::byte* WritableElements(const ArrayState& state) {
  if (state.is_on_gpu()) [[unlikely]]
    CheckGpuTouch(state);
  if (engine::ChecksAccess()) [[unlikely]]
    CheckTouch(state, engine::Touch::kWrite);
  return state.elements();
}

// The state of an array that is not empty.
inline const ArrayState& StateOf(const NDArray& array) { return ArrayAccess::StateOf(array); }

// For lists of arrays whose handles are about to be copied or dropped, each of which waits for the
// array's line: this way they come together.
inline void PrefetchCounts(std::span<const NDArray> arrays) {
  for (const NDArray& array : arrays) PrefetchForWrite(ArrayAccess::AddressOf(array));
}

}  // namespace heddle::internal
