#include "storage/row_sparse_state.h"

#include <heddle/error.h>

#include <utility>

#include <fmt/format.h>

#include "storage/gpus.h"

namespace heddle::internal {

namespace {

// Blocks of no bytes do not exist.
std::int64_t BlockBytes(std::int64_t bytes) { return bytes > 0 ? bytes : 1; }

std::int64_t RowsBytes(std::int64_t count, std::int64_t row_bytes) {
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(count, row_bytes, &bytes)) {
    throw OutOfMemory(
        fmt::format("{} rows of {} bytes: more than 2^63 - 1 bytes", count, row_bytes));
  }
  return bytes;
}

std::int64_t RowSize(const Shape& shape) {
  if (shape.ndim() == 0) {
    throw InvalidArgument("row-sparse array: expected a shape with at least one axis, got ()");
  }
  return Shape(std::span(shape.begin() + 1, shape.end())).size();
}

std::int64_t RowBytes(std::int64_t row_size, DType dtype) {
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(row_size, static_cast<std::int64_t>(SizeOf(dtype)), &bytes)) {
    throw InvalidArgument(fmt::format("row of {} elements of {}: expected at most 2^63 - 1 bytes",
                                      row_size, Name(dtype)));
  }
  return bytes;
}

// The memory of a device that `engine` knows.
RowStorage StorageOf(Device device, const Engine& engine, std::int64_t row_bytes) {
  storage::CheckDevice(device, engine);
  auto [allocator, keeper] = storage::MemoryOf(device, engine);
  return {allocator, row_bytes, std::move(keeper)};
}

}  // namespace

RowStorage RowStorage::Renew(std::int64_t count) {
  count_ = 0;
  RowStorage replaced(*allocator_, row_bytes_, keeper_);
  // Room for a few more: values that are written again and again have about as many rows each time.
  // But one that once had many does not hold their memory for ever.
  constexpr std::int64_t kKeptRows = 1024;
  if (count > capacity_ || capacity_ > 4 * count + kKeptRows) {
    replaced = std::exchange(*this, Another(count + count / 8));
  }
  count_ = count;
  return replaced;
}

RowStorage RowStorage::Another(std::int64_t capacity) const {
  RowStorage fresh(*allocator_, row_bytes_, keeper_);
  if (capacity == 0) return fresh;
  const std::int64_t bytes = RowsBytes(capacity, row_bytes_);
  const std::int64_t ids_bytes = RowsBytes(capacity, kIdBytes);
  fresh.rows_ = static_cast<std::byte*>(allocator_->Allocate(BlockBytes(bytes)));
  fresh.capacity_ = capacity;  // should the next line throw, what is there is freed
  fresh.ids_ = static_cast<std::int64_t*>(allocator_->Allocate(ids_bytes));
  return fresh;
}

void RowStorage::Free() noexcept {
  if (rows_ != nullptr) allocator_->Free(rows_, BlockBytes(capacity_ * row_bytes_));
  if (ids_ != nullptr) allocator_->Free(ids_, capacity_ * kIdBytes);
}

RowSparseState::RowSparseState(Shape dims, DType type, Device where, Engine& of)
    : shape(std::move(dims)),
      dtype(type),
      device(where),
      engine(of),
      var(of.NewVar()),
      row_size(RowSize(shape)),
      rows(StorageOf(where, of, RowBytes(row_size, type))) {}

}  // namespace heddle::internal
