// Handles: making arrays and views, looking at them, waiting. Queued operations: ndarray_ops.cc.
#include <heddle/error.h>
#include <heddle/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "engine/may_wait.h"
#include "storage/allocator.h"
#include "storage/array_checks.h"
#include "storage/array_state.h"
#include "storage/gpus.h"
#include "storage/memory_budget.h"

namespace heddle {

using internal::ArrayAccess;
using internal::ArrayState;
using internal::Buffer;

namespace {

// The state of an array that is not empty.
const ArrayState& Checked(const NDArray& array) {
  storage::CheckNotEmpty("array", array);
  return internal::StateOf(array);
}

std::int64_t CheckedBytes(const Shape& shape, DType dtype) {
  if (static_cast<std::size_t>(dtype) >= kAllDTypes.size()) {
    throw InvalidArgument(fmt::format("expected a dtype, got {}", static_cast<int>(dtype)));
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(shape.size(), static_cast<std::int64_t>(SizeOf(dtype)), &bytes)) {
    throw InvalidArgument(fmt::format("shape {} of {}: expected at most 2^63 - 1 bytes",
                                      ToString(shape), Name(dtype)));
  }
  return bytes;
}

// A view of `of`. Nothing is leaked if memory for it is short.
NDArray MakeView(const ArrayState& of, Shape shape, std::int64_t offset) {
  of.buffer->Retain();
  ArrayState* view = nullptr;
  try {
    view = new ArrayState(std::move(shape), of.dtype, {of.engine, of.var, of.device}, of.buffer,
                          offset);
  } catch (...) {
    of.buffer->Release();
    throw;
  }
  return ArrayAccess::Adopt(view);
}

// The state of a new array; `var` is empty for a fresh one.
ArrayState* NewState(Shape shape, DType dtype, Device device, Engine& engine, Var var) {
  const std::int64_t bytes = CheckedBytes(shape, dtype);
  const auto [allocator, keeper] = storage::MemoryOf(device, engine);
  // What can never fit is the caller's to hear, not a waiter's.
  const std::int64_t block_bytes = allocator.BlockBytes(std::max<std::int64_t>(bytes, 1));
  if (const MemoryStats memory = allocator.stats(); block_bytes > memory.bytes_max) {
    throw OutOfMemory(fmt::format(
        "array of shape {}, {}, on {}: {}, {} in use, cap {} bytes", ToString(shape), Name(dtype),
        ToString(device), storage::AskedFor(bytes, block_bytes), memory.used, memory.bytes_max));
  }
  if (!var) var = engine.NewVar();
  auto* const buffer = new Buffer(bytes, allocator, nullptr, keeper);
  try {
    return new ArrayState(std::move(shape), dtype, {engine, std::move(var), device}, buffer, 0);
  } catch (...) {
    buffer->Release();
    throw;
  }
}

// The owner of memory that heddle did not take: only lets go of it. One for each buffer.
class ForeignMemory final : public storage::Allocator {
 public:
  explicit ForeignMemory(std::function<void()> release) : release_(std::move(release)) {}

  void* Allocate(std::int64_t) override {
    internal::CheckFailed(__FILE__, __LINE__, "foreign memory is there from the start");
  }
  std::int64_t BlockBytes(std::int64_t bytes) const override { return bytes; }
  void Free(void*, std::int64_t) noexcept override {
    release_();
    delete this;
  }
  std::int64_t Trim() override { return 0; }
  void set_bytes_max(std::int64_t) override {}
  MemoryStats stats() const override { return {}; }

 private:
  const std::function<void()> release_;
};

}  // namespace

NDArray NDArray::FromForeign(void* data, Shape shape, DType dtype, std::function<void()> release,
                             Device device, Engine& engine) {
  storage::CheckDevice(device, engine);
  const std::int64_t bytes = CheckedBytes(shape, dtype);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (data == nullptr && bytes > 0) {
    throw InvalidArgument(
        fmt::format("FromForeign: expected memory for shape {}, got null", ToString(shape)));
  }
  if (address % SizeOf(dtype) != 0) {
    throw InvalidArgument(
        fmt::format("FromForeign: expected memory aligned to {} bytes for {}, got {}",
                    SizeOf(dtype), Name(dtype), data));
  }
  if (!release)
    throw InvalidArgument("FromForeign: expected a function to release the memory, got null");
  static std::byte none;  // stands for memory of no bytes
  auto memory = std::make_unique<ForeignMemory>(std::move(release));
  Var var = engine.NewVar();
  auto* const buffer =
      new Buffer(bytes, *memory, data != nullptr ? static_cast<std::byte*>(data) : &none);
  memory.release();  // NOLINT(bugprone-unused-return-value): the buffer frees it
  try {
    return ArrayAccess::Adopt(
        new ArrayState(std::move(shape), dtype, {engine, std::move(var), device}, buffer, 0));
  } catch (...) {
    buffer->Release();
    throw;
  }
}

NDArray::NDArray(Shape shape, DType dtype, Device device, Engine& engine) {
  storage::CheckDevice(device, engine);
  state_ = NewState(std::move(shape), dtype, device, engine, Var());
}

NDArray internal::NewArrayWith(const Var& var, Shape shape, DType dtype, Device device,
                               Engine& engine) {
  return ArrayAccess::Adopt(NewState(std::move(shape), dtype, device, engine, var));
}

const Shape& NDArray::shape() const { return Checked(*this).shape; }
DType NDArray::dtype() const { return Checked(*this).dtype; }
Device NDArray::device() const { return Checked(*this).device; }
Engine& NDArray::engine() const { return Checked(*this).engine; }
const Var& NDArray::var() const { return Checked(*this).var; }
std::int64_t NDArray::size() const { return Checked(*this).shape.size(); }
std::int64_t NDArray::bytes() const { return Checked(*this).bytes; }

bool NDArray::is_partial() const { return Checked(*this).is_partial; }

bool NDArray::IsSameAs(const NDArray& other) const {
  const ArrayState& a = Checked(*this);
  const ArrayState& b = Checked(other);
  return a.buffer == b.buffer && a.offset == b.offset && a.bytes == b.bytes;
}

bool NDArray::Overlaps(const NDArray& other) const {
  const ArrayState& a = Checked(*this);
  const ArrayState& b = Checked(other);
  return a.buffer == b.buffer && a.bytes > 0 && b.bytes > 0 && a.offset < b.offset + b.bytes &&
         b.offset < a.offset + a.bytes;
}

void* NDArray::data() const { return internal::WritableElements(Checked(*this)); }
const void* NDArray::const_data() const { return internal::ReadableElements(Checked(*this)); }

void NDArray::CheckDType(DType expected) const {
  if (dtype() != expected) {
    throw InvalidArgument(
        fmt::format("data: expected dtype {}, got {}", Name(dtype()), Name(expected)));
  }
}

void* NDArray::TypedData(DType expected) const {
  CheckDType(expected);
  return data();
}

const void* NDArray::TypedConstData(DType expected) const {
  CheckDType(expected);
  return const_data();
}

NDArray NDArray::Slice(std::int64_t begin, std::int64_t end) const {
  const ArrayState& state = Checked(*this);
  if (state.shape.ndim() == 0) {
    throw InvalidArgument("Slice: expected an array with at least one axis, got shape ()");
  }
  const std::int64_t rows = state.shape[0];
  if (begin < 0 || end < begin || end > rows) {
    throw InvalidArgument(
        fmt::format("Slice: expected 0 <= begin <= end <= {}, got [{}, {})", rows, begin, end));
  }
  std::vector<std::int64_t> dims(state.shape.begin(), state.shape.end());
  dims[0] = end - begin;
  const std::int64_t row_bytes = rows > 0 ? state.bytes / rows : 0;
  return MakeView(state, Shape(dims), state.offset + begin * row_bytes);
}

NDArray NDArray::Reshape(Shape shape) const {
  const ArrayState& state = Checked(*this);
  if (shape.size() != state.shape.size()) {
    throw InvalidArgument(fmt::format("Reshape: expected {} elements as in {}, got {}",
                                      state.shape.size(), ToString(state.shape), ToString(shape)));
  }
  return MakeView(state, std::move(shape), state.offset);
}

void NDArray::WaitToRead() const {
  engine::CheckMayWait("WaitToRead");
  engine().WaitForVar(var());
}
void NDArray::WaitToRead(Deadline deadline) const {
  engine::CheckMayWait("WaitToRead");
  engine().WaitForVar(var(), deadline);
}
void NDArray::WaitToWrite() const {
  engine::CheckMayWait("WaitToWrite");
  engine().WaitForReadsAndWrites(var());
}
void NDArray::WaitToWrite(Deadline deadline) const {
  engine::CheckMayWait("WaitToWrite");
  engine().WaitForReadsAndWrites(var(), deadline);
}

}  // namespace heddle
