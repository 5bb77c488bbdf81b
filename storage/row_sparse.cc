// Handles of row-sparse arrays and their queued operations.
#include <heddle/error.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>

#include <fmt/format.h>

#include "engine/may_wait.h"
#include "ops/cast.h"
#include "ops/elementwise.h"
#include "ops/row_ids.h"
#include "storage/array_checks.h"
#include "storage/array_ops.h"
#include "storage/device_copy.h"
#include "storage/gpus.h"
#include "storage/parallel.h"
#include "storage/row_insertion.h"
#include "storage/row_sparse_gpu.h"
#include "storage/row_sparse_kernels.h"
#include "storage/row_sparse_state.h"

namespace heddle {

using internal::RowSparseState;
using internal::StateOf;
using internal::ToRead;
using internal::ToWrite;

namespace {

template <class Array>
void CheckNotEmpty(const char* operation, const Array& array) {
  if (array.empty()) storage::ThrowEmpty(operation);
}

RowSparseState& Checked(const RowSparseNDArray& array) {
  CheckNotEmpty("row-sparse array", array);
  return StateOf(array);
}
const RowSparseState& Readable(const RowSparseNDArray& array) {
  CheckNotEmpty("row-sparse array", array);
  return ToRead(array);
}
RowSparseState& Writable(const RowSparseNDArray& array) {
  CheckNotEmpty("row-sparse array", array);
  return ToWrite(array);
}

// Arrays of which one at least is row-sparse: none empty, of one engine, with equal shapes.
template <class A, class B>
void CheckFits(const char* operation, const A& like, const B& array) {
  CheckNotEmpty(operation, like);
  CheckNotEmpty(operation, array);
  if (&like.engine() != &array.engine()) storage::ThrowOtherEngine(operation, array.shape());
  if (like.shape() != array.shape()) {
    storage::ThrowShape(operation, like.shape(), array.shape());
  }
}

template <class A, class B>
void CheckAlike(const char* operation, const A& like, const B& array) {
  CheckFits(operation, like, array);
  if (like.dtype() != array.dtype()) {
    storage::ThrowDType(operation, like.dtype(), array.dtype());
  }
  if (like.device() != array.device()) {
    storage::ThrowDevice(operation, like.device(), array.device());
  }
}

// `kind`: what they have to be, for the message.
void CheckRowIds(const char* operation, const char* kind, std::span<const std::int64_t> ids,
                 std::int64_t num_rows) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= num_rows) {
      throw InvalidArgument(
          fmt::format("{}: row id {}: expected one in [0, {})", operation, ids[i], num_rows));
    }
    if (i > 0 && ids[i] <= ids[i - 1]) {
      throw InvalidArgument(fmt::format("{}: expected {} row ids, got {} after {}", operation, kind,
                                        ids[i], ids[i - 1]));
    }
  }
}

bool IsOnGpu(const RowSparseNDArray& array) { return StateOf(array).is_on_gpu(); }

// For operations that GPUs do not have yet.
void CheckNotOnGpu(const char* operation, const RowSparseNDArray& array) {
  if (IsOnGpu(array)) storage::ThrowNotOnGpu(operation, array.device());
}

// Host memory from and to which the GPU of `array` copies by itself.
template <class Array>
Device PinnedNear(const Array& array) {
  return CpuPinned(array.device().id);
}

OpOptions Writing(OpName name, const RowSparseNDArray& out, int priority) {
  OpOptions options{.name = name, .writes = {out.var()}, .device = out.device()};
  options.priority = priority;
  return options;
}

// The rows in the order of their ids.
std::vector<std::size_t> SortedOrder(std::span<const std::int64_t> row_ids) {
  std::vector<std::size_t> order(row_ids.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return row_ids[i]; });
  return order;
}

}  // namespace

RowSparseNDArray::RowSparseNDArray(Shape shape, DType dtype, Device device, Engine& engine) {
  state_ = std::make_shared<RowSparseState>(std::move(shape), dtype, device, engine);
}

RowSparseNDArray RowSparseNDArray::FromHost(std::span<const std::int64_t> row_ids, const void* rows,
                                            std::size_t count, DType from, Shape shape, DType dtype,
                                            Device device, Engine& engine) {
  const bool on_gpu = device.type == DeviceType::kGpu;
  if (on_gpu) storage::CheckDevice(device, engine);
  const RowSparseNDArray out(std::move(shape), dtype, on_gpu ? CpuPinned(device.id) : device,
                             engine);
  RowSparseState& state = StateOf(out);
  const auto row_size = static_cast<std::size_t>(state.row_size);
  const std::size_t expected = row_ids.size() * row_size;
  if (count != expected) {
    throw InvalidArgument(
        fmt::format("FromVectors: expected {} values for {} rows of shape {}, got {}", expected,
                    row_ids.size(), ToString(state.shape), count));
  }
  const std::vector<std::size_t> order = SortedOrder(row_ids);
  std::vector<std::int64_t> ids;
  ids.reserve(order.size());
  for (const std::size_t i : order) ids.push_back(row_ids[i]);
  // Nobody else has the array yet, so it needs no op.
  CheckRowIds("FromVectors", "unique", ids, state.shape[0]);
  out.SetRowIds(ids);
  for (std::size_t i = 0; i < order.size(); ++i) {
    ops::Cast(from, static_cast<const std::byte*>(rows) + order[i] * row_size * SizeOf(from), dtype,
              state.rows.row(static_cast<std::int64_t>(i)), row_size);
  }
  return on_gpu ? out.Copy(device) : out;
}

const Shape& RowSparseNDArray::shape() const { return Checked(*this).shape; }
DType RowSparseNDArray::dtype() const { return Checked(*this).dtype; }
Device RowSparseNDArray::device() const { return Checked(*this).device; }
Engine& RowSparseNDArray::engine() const { return Checked(*this).engine; }
const Var& RowSparseNDArray::var() const { return Checked(*this).var; }
std::int64_t RowSparseNDArray::row_size() const { return Checked(*this).row_size; }
std::int64_t RowSparseNDArray::num_rows() const { return Readable(*this).rows.count(); }
std::span<const std::int64_t> RowSparseNDArray::row_ids() const {
  return Readable(*this).rows.view().ids;
}
void* RowSparseNDArray::rows() const { return Writable(*this).rows.rows(); }
const void* RowSparseNDArray::const_rows() const { return Readable(*this).rows.rows(); }

void RowSparseNDArray::CheckDType(DType expected) const {
  if (dtype() != expected) {
    throw InvalidArgument(
        fmt::format("rows: expected dtype {}, got {}", Name(dtype()), Name(expected)));
  }
}

void* RowSparseNDArray::TypedRows(DType expected) const {
  CheckDType(expected);
  return rows();
}

const void* RowSparseNDArray::TypedConstRows(DType expected) const {
  CheckDType(expected);
  return const_rows();
}

void RowSparseNDArray::SetRowIds(std::span<const std::int64_t> row_ids) const {
  RowSparseState& state = Writable(*this);
  CheckNotOnGpu("SetRowIds", *this);
  CheckRowIds("SetRowIds", "sorted and unique", row_ids, state.shape[0]);
  // The ids may be some of those that the array has.
  const auto replaced = state.rows.Renew(static_cast<std::int64_t>(row_ids.size()));
  if (!row_ids.empty()) std::memmove(state.rows.ids(), row_ids.data(), row_ids.size_bytes());
}

void RowSparseNDArray::WaitToRead() const {
  engine::CheckMayWait("WaitToRead");
  engine().WaitForVar(var());
}
void RowSparseNDArray::WaitToRead(Deadline deadline) const {
  engine::CheckMayWait("WaitToRead");
  engine().WaitForVar(var(), deadline);
}
void RowSparseNDArray::WaitToWrite() const {
  engine::CheckMayWait("WaitToWrite");
  engine().WaitForReadsAndWrites(var());
}
void RowSparseNDArray::WaitToWrite(Deadline deadline) const {
  engine::CheckMayWait("WaitToWrite");
  engine().WaitForReadsAndWrites(var(), deadline);
}

// ---- Queued operations

RowSparseNDArray RowSparseNDArray::FromDense(const NDArray& dense, int priority) {
  CheckNotEmpty("FromDense", dense);
  RowSparseNDArray out(dense.shape(), dense.dtype(), dense.device(), dense.engine());
  if (IsOnGpu(out)) {
    storage::PushFromDenseOnGpu(dense, out, priority);
    return out;
  }
  OpOptions options = Writing("FromDense", out, priority);
  options.reads = {dense.var()};
  out.engine().Push(options, [dense, out] { storage::DenseToRowSparse(dense, out); });
  return out;
}

void RowSparseNDArray::CopyTo(const RowSparseNDArray& dst, int priority) const {
  CheckFits("CopyTo", *this, dst);
  if (IsSameAs(dst)) return;
  if (IsOnGpu(*this) || IsOnGpu(dst)) return storage::PushDeviceCopy(*this, dst, priority);
  OpOptions options = Writing("CopyTo", dst, priority);
  options.reads = {var()};
  options.lane = Lane::kCopy;
  engine().Push(options, [src = *this, dst] { storage::CopyRowSparse(src, dst); });
}

void RowSparseNDArray::CopyTo(const NDArray& dst, int priority) const {
  CheckFits("CopyTo", *this, dst);
  // The rows travel, not the zeros between them.
  if (storage::IsOnGpu(dst)) {
    if (device() != dst.device()) return Copy(dst.device(), priority).CopyTo(dst, priority);
    if (dtype() != dst.dtype()) return ToDense(priority).CopyTo(dst, priority);
    return storage::PushToDenseOnGpu(*this, dst, priority);
  }
  if (IsOnGpu(*this)) return Copy(PinnedNear(*this), priority).CopyTo(dst, priority);
  OpOptions options{.name = "CopyTo",
                    .reads = {var()},
                    .writes = {dst.var()},
                    .device = dst.device(),
                    .lane = Lane::kCopy,
                    .priority = priority};
  if (dst.is_partial()) options.reads = {var(), dst.var()};
  engine().Push(options, [src = *this, dst] { storage::RowSparseToDense(src, dst); });
}

RowSparseNDArray RowSparseNDArray::Copy(int priority) const { return Copy(device(), priority); }

RowSparseNDArray RowSparseNDArray::Copy(Device device, int priority) const {
  RowSparseNDArray out(shape(), dtype(), device, engine());
  CopyTo(out, priority);
  return out;
}

RowSparseNDArray RowSparseNDArray::AsType(DType dtype, int priority) const {
  RowSparseNDArray out(shape(), dtype, device(), engine());
  CopyTo(out, priority);
  return out;
}

NDArray RowSparseNDArray::ToDense(int priority) const {
  NDArray out(shape(), dtype(), device(), engine());
  CopyTo(out, priority);
  return out;
}

// Not this array itself after a wait: another thread may push a write to it meanwhile.
RowSparseNDArray RowSparseNDArray::ReadableCopy(DType dtype) const {
  engine::CheckMayWait("ToVectors");
  RowSparseNDArray out(shape(), dtype, Cpu(), engine());
  CopyTo(out);
  out.WaitToRead();
  return out;
}

RowSparseNDArray RowSparseNDArray::Retain(const NDArray& row_ids, int priority) const {
  CheckNotEmpty("Retain", *this);
  storage::CheckRowIdArray("Retain", row_ids, engine());
  if (storage::IsOnGpu(row_ids)) {
    return Retain(row_ids.Copy(PinnedNear(row_ids), priority), priority);
  }
  RowSparseNDArray out(shape(), dtype(), device(), engine());
  if (IsOnGpu(*this)) {
    storage::PushRetainOnGpu(*this, row_ids, out, priority);
    return out;
  }
  OpOptions options = Writing("Retain", out, priority);
  options.reads = {var(), row_ids.var()};
  engine().Push(options, [src = *this, row_ids, out] {
    const std::vector<std::int64_t> ids = storage::SortedRowIds(row_ids, src.shape()[0]);
    storage::GatherRowSparse(src, ids, {&out, 1});
  });
  return out;
}

void RowSparseNDArray::Clear(int priority) const {
  CheckNotEmpty("Clear", *this);
  if (IsOnGpu(*this)) {
    RowSparseNDArray(shape(), dtype(), CpuPinned(device().id), engine()).CopyTo(*this, priority);
    return;
  }
  engine().Push(Writing("Clear", *this, priority), [out = *this] { ToWrite(out).rows.Reset(0); });
}

const RowSparseNDArray& RowSparseNDArray::operator+=(const RowSparseNDArray& other) const {
  CheckAlike("Add", *this, other);
  if (IsOnGpu(*this)) {
    storage::PushAddOnGpu(*this, other);
    return *this;
  }
  OpOptions options = Writing("Add", *this, 0);
  options.reads = {var(), other.var()};
  engine().Push(options, [to = *this, other] {
    if (to.IsSameAs(other)) {
      const RowSparseNDArray twice[] = {to, to};
      storage::SumRowSparse(twice, to);
    } else {
      storage::AddInPlace(to, other);
    }
  });
  return *this;
}

const RowSparseNDArray& RowSparseNDArray::operator*=(Scalar value) const {
  CheckNotEmpty("Multiply", *this);
  storage::CheckScalar("Multiply", dtype(), value);
  OpOptions options = Writing("Multiply", *this, 0);
  options.reads = {var()};
  const ops::Scalar factor = storage::ToKernel(value);
  if (IsOnGpu(*this)) {
    const ops::GpuKernels& kernels = storage::Gpus::Of(engine()).kernels();
    engine().PushGpu(options, [&kernels, out = *this, factor](GpuStream stream) {
      const RowSparseState& state = ToWrite(out);
      const std::int64_t count = state.rows.count() * state.row_size;
      if (count == 0) return;
      kernels.BinaryWithScalar(ops::BinaryOp::kMultiply, state.dtype, state.rows.rows(), factor,
                               state.rows.rows(), static_cast<std::size_t>(count), stream);
    });
    return *this;
  }
  engine().Push(options, [out = *this, factor] {
    const RowSparseState& state = ToWrite(out);
    const auto bytes = static_cast<std::int64_t>(SizeOf(state.dtype));
    storage::ForBlocks(state.engine, state.rows.count() * state.row_size, 2 * bytes,
                       [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
                         std::byte* const part = state.rows.rows() + begin * bytes;
                         ops::BinaryWithScalar(ops::BinaryOp::kMultiply, state.dtype, part, factor,
                                               part, static_cast<std::size_t>(end - begin), mode);
                       });
  });
  return *this;
}

RowSparseNDArray operator+(const RowSparseNDArray& a, const RowSparseNDArray& b) {
  CheckAlike("Add", a, b);
  RowSparseNDArray out(a.shape(), a.dtype(), a.device(), a.engine());
  Sum({a, b}, out);
  return out;
}

RowSparseNDArray operator*(const RowSparseNDArray& a, Scalar b) {
  CheckNotEmpty("Multiply", a);
  storage::CheckScalar("Multiply", a.dtype(), b);
  RowSparseNDArray out = a.Copy();
  out *= b;
  return out;
}
RowSparseNDArray operator*(Scalar a, const RowSparseNDArray& b) { return b * a; }

const NDArray& operator+=(const NDArray& a, const RowSparseNDArray& b) {
  CheckAlike("Add", a, b);
  const OpOptions options{
      .name = "Add", .reads = {a.var(), b.var()}, .writes = {a.var()}, .device = a.device()};
  if (!IsOnGpu(b)) {
    a.engine().Push(options, [a, b] { storage::AddToDense(b, a); });
    return a;
  }
  a.engine().PushGpu(
      options, [&kernels = storage::Gpus::Of(a.engine()).row_kernels(), a, b](GpuStream stream) {
        const internal::RowStorage& rows = ToRead(b).rows;
        if (rows.count() == 0 || a.size() == 0) return;
        kernels.AddRows(a.dtype(), static_cast<std::size_t>(b.row_size()),
                        {rows.ids(), static_cast<std::size_t>(rows.count()), rows.rows()}, a.data(),
                        stream);
      });
  return a;
}

void Sum(std::span<const RowSparseNDArray> inputs, const RowSparseNDArray& out, int priority) {
  CheckNotEmpty("Sum", out);
  if (inputs.empty()) throw InvalidArgument("Sum: expected at least one input, got none");
  std::vector<VarRef> reads;
  reads.reserve(inputs.size());
  for (const RowSparseNDArray& input : inputs) {
    CheckFits("Sum", out, input);
    if (out.dtype() != input.dtype()) storage::ThrowDType("Sum", out.dtype(), input.dtype());
    if ((IsOnGpu(out) || IsOnGpu(input)) && out.device() != input.device()) {
      storage::ThrowDevice("Sum", out.device(), input.device());
    }
    reads.emplace_back(input.var());
  }
  if (IsOnGpu(out)) return storage::PushSumOnGpu(inputs, out, priority);
  OpOptions options = Writing("Sum", out, priority);
  options.reads = reads;
  out.engine().Push(options, [held = std::vector(inputs.begin(), inputs.end()), out] {
    storage::SumRowSparse(held, out);
  });
}

void Sum(std::initializer_list<RowSparseNDArray> inputs, const RowSparseNDArray& out,
         int priority) {
  Sum(std::span<const RowSparseNDArray>(inputs.begin(), inputs.size()), out, priority);
}

}  // namespace heddle
