// Queued operations on arrays. Each checks its arguments, then pushes one op, whose body holds
// handles to what it touches.
#include <heddle/error.h>
#include <heddle/ndarray.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include "engine/may_wait.h"
#include "ops/cast.h"
#include "ops/convert.h"
#include "ops/copy.h"
#include "ops/dispatch.h"
#include "ops/elementwise.h"
#include "ops/fill.h"
#include "ops/sum.h"
#include "storage/array_checks.h"
#include "storage/array_ops.h"
#include "storage/device_copy.h"
#include "storage/parallel.h"

namespace heddle {

using ops::BinaryOp;
using storage::At;
using storage::ConstAt;
using storage::ElementBytes;
using storage::ForBlocks;
using storage::IsOnGpu;
using storage::PushKernel;
using storage::ToKernel;
using storage::Writing;

namespace {

// Kernels take an input that is the output itself, but not one that overlaps it otherwise.
NDArray WithoutOverlap(const NDArray& in, const NDArray& out) {
  return in.Overlaps(out) && !in.IsSameAs(out) ? in.Copy() : in;
}

void CopyElements(const NDArray& from, const NDArray& to) {
  if (from.Overlaps(to)) {
    std::memmove(to.data(), from.const_data(), static_cast<std::size_t>(to.bytes()));
    return;
  }
  // The memory is taken here rather than by several blocks at once.
  to.data();
  ForBlocks(to.engine(), to.size(), ElementBytes(from) + ElementBytes(to),
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              const auto count = static_cast<std::size_t>(end - begin);
              ops::Cast(from.dtype(), ConstAt(from, begin), to.dtype(), At(to, begin), count, mode);
            });
}

void FillElements(const NDArray& out, Scalar value) {
  out.data();
  ForBlocks(out.engine(), out.size(), ElementBytes(out),
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              ops::Fill(out.dtype(), ToKernel(value), At(out, begin),
                        static_cast<std::size_t>(end - begin), mode);
            });
}

const char* NameOf(BinaryOp op) {
  static constexpr std::array kNames = {"Add", "Subtract", "Multiply", "Divide"};
  return kNames[static_cast<std::size_t>(op)];
}

// The name of an op must be a literal to be kept by address.
OpName OpNameOf(BinaryOp op) {
  switch (op) {
    case BinaryOp::kAdd:
      return "Add";
    case BinaryOp::kSubtract:
      return "Subtract";
    case BinaryOp::kMultiply:
      return "Multiply";
    case BinaryOp::kDivide:
      break;
  }
  return "Divide";
}

void CheckLike(const char* operation, const NDArray& like, const NDArray& array) {
  storage::CheckNotEmpty(operation, like);
  storage::CheckNotEmpty(operation, array);
  storage::CheckSameEngine(operation, like, array);
  storage::CheckSameShape(operation, like, array);
  storage::CheckSameDType(operation, like, array);
}

// out = a op b; all of one kind, as checked.
void PushBinary(BinaryOp op, const NDArray& a, const NDArray& b, const NDArray& out) {
  OpOptions options = Writing(OpNameOf(op), out, 0);
  options.reads = {a.var(), b.var()};  // for an `out` in place, a is out
  if (IsOnGpu(out)) {
    PushKernel(options, out, [op, a, b, out](const ops::GpuKernels& kernels, GpuStream stream) {
      kernels.Binary(op, out.dtype(), ConstAt(a, 0), ConstAt(b, 0), At(out, 0),
                     static_cast<std::size_t>(out.size()), stream);
    });
    return;
  }
  out.engine().Push(options, [op, a, b, out] {
    out.data();
    ForBlocks(out.engine(), out.size(), 3 * ElementBytes(out),
              [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
                ops::Binary(op, out.dtype(), ConstAt(a, begin), ConstAt(b, begin), At(out, begin),
                            static_cast<std::size_t>(end - begin), mode);
              });
  });
}

const NDArray& BinaryInPlace(BinaryOp op, const NDArray& a, const NDArray& b) {
  CheckLike(NameOf(op), a, b);
  storage::CheckSameDevice(NameOf(op), a, b);
  PushBinary(op, a, WithoutOverlap(b, a), a);
  return a;
}

NDArray BinaryFresh(BinaryOp op, const NDArray& a, const NDArray& b) {
  CheckLike(NameOf(op), a, b);
  storage::CheckSameDevice(NameOf(op), a, b);
  NDArray out(a.shape(), a.dtype(), a.device(), a.engine());
  PushBinary(op, a, b, out);
  return out;
}

enum class ScalarSide : std::uint8_t { kLeft, kRight };

// out = a op value, or value op a.
void PushScalar(BinaryOp op, ScalarSide side, const NDArray& a, Scalar value, const NDArray& out) {
  const OpOptions options = Writing(OpNameOf(op), out, a, 0);
  if (IsOnGpu(out)) {
    PushKernel(options, out,
               [op, side, a, value = ToKernel(value), out](const ops::GpuKernels& kernels,
                                                           GpuStream stream) {
                 const auto count = static_cast<std::size_t>(out.size());
                 if (side == ScalarSide::kRight) {
                   kernels.BinaryWithScalar(op, out.dtype(), ConstAt(a, 0), value, At(out, 0),
                                            count, stream);
                 } else {
                   kernels.BinaryWithScalar(op, out.dtype(), value, ConstAt(a, 0), At(out, 0),
                                            count, stream);
                 }
               });
    return;
  }
  out.engine().Push(options, [op, side, a, value = ToKernel(value), out] {
    out.data();
    ForBlocks(out.engine(), out.size(), 2 * ElementBytes(out),
              [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
                const auto count = static_cast<std::size_t>(end - begin);
                if (side == ScalarSide::kRight) {
                  ops::BinaryWithScalar(op, out.dtype(), ConstAt(a, begin), value, At(out, begin),
                                        count, mode);
                } else {
                  ops::BinaryWithScalar(op, out.dtype(), value, ConstAt(a, begin), At(out, begin),
                                        count, mode);
                }
              });
  });
}

const NDArray& ScalarInPlace(BinaryOp op, const NDArray& a, Scalar value) {
  storage::CheckNotEmpty(NameOf(op), a);
  storage::CheckScalar(NameOf(op), a.dtype(), value);
  PushScalar(op, ScalarSide::kRight, a, value, a);
  return a;
}

NDArray ScalarFresh(BinaryOp op, ScalarSide side, const NDArray& a, Scalar value) {
  storage::CheckNotEmpty(NameOf(op), a);
  storage::CheckScalar(NameOf(op), a.dtype(), value);
  NDArray out(a.shape(), a.dtype(), a.device(), a.engine());
  PushScalar(op, side, a, value, out);
  return out;
}

// The inputs of a sum. Few lie in the op itself, so that pushing it allocates nothing.
class Inputs {
 public:
  explicit Inputs(std::size_t count)
      : count_(count), more_(count > kFew ? new NDArray[count] : nullptr) {}
  NDArray& operator[](std::size_t i) { return more_ ? more_[i] : few_[i]; }
  const NDArray& operator[](std::size_t i) const { return more_ ? more_[i] : few_[i]; }
  std::size_t size() const { return count_; }

 private:
  static constexpr std::size_t kFew = 4;
  std::size_t count_;
  std::array<NDArray, kFew> few_;
  std::unique_ptr<NDArray[]> more_;
};

// Element `begin` of each input.
class InputBlocks {
 public:
  InputBlocks(const Inputs& inputs, std::int64_t begin) : count_(inputs.size()) {
    if (count_ > kFew) more_.reset(new const void*[count_]);
    const void** const blocks = more_ ? more_.get() : few_.data();
    for (std::size_t i = 0; i < count_; ++i) blocks[i] = ConstAt(inputs[i], begin);
  }
  std::span<const void* const> all() const { return {more_ ? more_.get() : few_.data(), count_}; }

 private:
  static constexpr std::size_t kFew = 16;
  std::size_t count_;
  std::array<const void*, kFew> few_;
  std::unique_ptr<const void*[]> more_;
};

void SumElements(const Inputs& inputs, const NDArray& out) {
  out.data();
  const auto touched = static_cast<std::int64_t>(inputs.size() + 1) * ElementBytes(out);
  ForBlocks(out.engine(), out.size(), touched,
            [&](std::int64_t begin, std::int64_t end, ops::StoreMode mode) {
              ops::Sum(out.dtype(), InputBlocks(inputs, begin).all(), At(out, begin),
                       static_cast<std::size_t>(end - begin), mode);
            });
}

void CheckValueCount(const char* operation, std::int64_t count, const Shape& shape) {
  if (count != shape.size()) {
    throw InvalidArgument(fmt::format("{}: expected {} values for shape {}, got {}", operation,
                                      shape.size(), ToString(shape), count));
  }
}

}  // namespace

NDArray NDArray::Zeros(Shape shape, DType dtype, Device device, Engine& engine) {
  return Full(std::move(shape), 0, dtype, device, engine);
}

NDArray NDArray::Ones(Shape shape, DType dtype, Device device, Engine& engine) {
  return Full(std::move(shape), 1, dtype, device, engine);
}

NDArray NDArray::Full(Shape shape, Scalar value, DType dtype, Device device, Engine& engine) {
  storage::CheckScalar("Full", dtype, value);
  NDArray out(std::move(shape), dtype, device, engine);
  out.Fill(value);
  return out;
}

NDArray NDArray::Arange(std::int64_t count, DType dtype, Device device, Engine& engine) {
  NDArray out({count}, dtype, device, engine);
  if (count > 0) storage::CheckScalar("Arange", dtype, count - 1);
  if (IsOnGpu(out)) {
    Arange(count, dtype, Cpu(), engine).CopyTo(out);
    return out;
  }
  engine.Push(Writing("Arange", out, 0), [out] {
    ops::DispatchDType(out.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      auto* const values = static_cast<ops::StorageType<T>*>(out.data());
      for (std::int64_t i = 0; i < out.size(); ++i) values[i] = ops::Convert<T>(i);
    });
  });
  return out;
}

NDArray NDArray::FromHost(const void* values, std::int64_t count, DType from, Shape shape,
                          DType dtype, Device device, Engine& engine) {
  CheckValueCount("FromVector", count, shape);
  NDArray out(std::move(shape), dtype, device, engine);
  if (IsOnGpu(out)) {
    FromHost(values, count, from, out.shape(), dtype, Cpu(), engine).CopyTo(out);
    return out;
  }
  // Nobody else has the array yet, so it needs no op.
  ops::Cast(from, values, dtype, out.data(), static_cast<std::size_t>(count));
  return out;
}

void NDArray::FromHostQueued(const void* values, std::int64_t count, DType from,
                             int priority) const {
  CheckValueCount("CopyFromHost", count, shape());
  const NDArray staged = FromHost(values, count, from, shape(), from, Cpu(), engine());
  if (IsOnGpu(*this)) {
    staged.CopyTo(*this, priority);
    return;
  }
  OpOptions options = Writing("CopyFromHost", *this, staged, priority);
  options.lane = Lane::kCopy;
  options.temporary_bytes = staged.bytes();
  engine().Push(options, [staged, out = *this] { CopyElements(staged, out); });
}

// Through an array of its own, not straight from this one after a wait: another thread may push a
// write to this one meanwhile.
void NDArray::ToHost(void* values, DType as) const {
  engine::CheckMayWait("ToVector");
  const NDArray copy(shape(), as, Cpu(), engine());
  CopyTo(copy);
  copy.WaitToRead();
  if (copy.bytes() > 0)
    std::memcpy(values, copy.const_data(), static_cast<std::size_t>(copy.bytes()));
}

void NDArray::CopyTo(const NDArray& dst, int priority) const {
  storage::CheckNotEmpty("CopyTo", *this);
  storage::CheckNotEmpty("CopyTo", dst);
  storage::CheckSameEngine("CopyTo", *this, dst);
  storage::CheckSameShape("CopyTo", *this, dst);
  if (IsSameAs(dst)) return;
  if (IsOnGpu(*this) || IsOnGpu(dst)) {
    storage::PushDeviceCopy(*this, dst, priority);
    return;
  }
  OpOptions options = Writing("CopyTo", dst, *this, priority);
  options.lane = Lane::kCopy;
  engine().Push(options, [src = *this, dst] { CopyElements(src, dst); });
}

NDArray NDArray::Copy(int priority) const { return Copy(device(), priority); }

NDArray NDArray::Copy(Device device, int priority) const {
  NDArray out(shape(), dtype(), device, engine());
  CopyTo(out, priority);
  return out;
}

NDArray NDArray::AsType(DType dtype, int priority) const {
  NDArray out(shape(), dtype, device(), engine());
  CopyTo(out, priority);
  return out;
}

void NDArray::Fill(Scalar value, int priority) const {
  storage::CheckNotEmpty("Fill", *this);
  storage::CheckScalar("Fill", dtype(), value);
  const OpOptions options = Writing("Fill", *this, priority);
  if (IsOnGpu(*this)) {
    PushKernel(options, *this,
               [out = *this, value](const ops::GpuKernels& kernels, GpuStream stream) {
                 kernels.Fill(out.dtype(), ToKernel(value), At(out, 0),
                              static_cast<std::size_t>(out.size()), stream);
               });
    return;
  }
  engine().Push(options, [out = *this, value] { FillElements(out, value); });
}

const NDArray& NDArray::operator+=(const NDArray& other) const {
  return BinaryInPlace(BinaryOp::kAdd, *this, other);
}
const NDArray& NDArray::operator-=(const NDArray& other) const {
  return BinaryInPlace(BinaryOp::kSubtract, *this, other);
}
const NDArray& NDArray::operator*=(const NDArray& other) const {
  return BinaryInPlace(BinaryOp::kMultiply, *this, other);
}
const NDArray& NDArray::operator/=(const NDArray& other) const {
  return BinaryInPlace(BinaryOp::kDivide, *this, other);
}
const NDArray& NDArray::operator+=(Scalar value) const {
  return ScalarInPlace(BinaryOp::kAdd, *this, value);
}
const NDArray& NDArray::operator-=(Scalar value) const {
  return ScalarInPlace(BinaryOp::kSubtract, *this, value);
}
const NDArray& NDArray::operator*=(Scalar value) const {
  return ScalarInPlace(BinaryOp::kMultiply, *this, value);
}
const NDArray& NDArray::operator/=(Scalar value) const {
  return ScalarInPlace(BinaryOp::kDivide, *this, value);
}

NDArray operator+(const NDArray& a, const NDArray& b) { return BinaryFresh(BinaryOp::kAdd, a, b); }
NDArray operator-(const NDArray& a, const NDArray& b) {
  return BinaryFresh(BinaryOp::kSubtract, a, b);
}
NDArray operator*(const NDArray& a, const NDArray& b) {
  return BinaryFresh(BinaryOp::kMultiply, a, b);
}
NDArray operator/(const NDArray& a, const NDArray& b) {
  return BinaryFresh(BinaryOp::kDivide, a, b);
}

NDArray operator+(const NDArray& a, Scalar b) {
  return ScalarFresh(BinaryOp::kAdd, ScalarSide::kRight, a, b);
}
NDArray operator-(const NDArray& a, Scalar b) {
  return ScalarFresh(BinaryOp::kSubtract, ScalarSide::kRight, a, b);
}
NDArray operator*(const NDArray& a, Scalar b) {
  return ScalarFresh(BinaryOp::kMultiply, ScalarSide::kRight, a, b);
}
NDArray operator/(const NDArray& a, Scalar b) {
  return ScalarFresh(BinaryOp::kDivide, ScalarSide::kRight, a, b);
}
NDArray operator+(Scalar a, const NDArray& b) {
  return ScalarFresh(BinaryOp::kAdd, ScalarSide::kLeft, b, a);
}
NDArray operator-(Scalar a, const NDArray& b) {
  return ScalarFresh(BinaryOp::kSubtract, ScalarSide::kLeft, b, a);
}
NDArray operator*(Scalar a, const NDArray& b) {
  return ScalarFresh(BinaryOp::kMultiply, ScalarSide::kLeft, b, a);
}
NDArray operator/(Scalar a, const NDArray& b) {
  return ScalarFresh(BinaryOp::kDivide, ScalarSide::kLeft, b, a);
}

void Sum(std::span<const NDArray> inputs, const NDArray& out, int priority) {
  storage::CheckNotEmpty("Sum", out);
  if (inputs.empty()) throw InvalidArgument("Sum: expected at least one input, got none");
  for (const NDArray& input : inputs) {
    CheckLike("Sum", out, input);
    storage::CheckSameMemory("Sum", out, input);
  }
  Inputs held(inputs.size());
  std::vector<VarRef> reads;
  reads.reserve(inputs.size() + 1);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    held[i] = WithoutOverlap(inputs[i], out);
    reads.emplace_back(held[i].var());
  }
  OpOptions options = Writing("Sum", out, priority);
  if (out.is_partial()) reads.emplace_back(out.var());
  options.reads = reads;
  if (IsOnGpu(out)) {
    NDArray carry;  // what a sum of several launches is put aside in
    if (inputs.size() > ops::kGpuSumInputsMax) {
      carry = internal::NewArrayWith(out.var(), out.shape(), ops::CarryDType(out.dtype()),
                                     out.device(), out.engine());
    }
    PushKernel(
        options, out,
        [held = std::move(held), carry, out](const ops::GpuKernels& kernels, GpuStream stream) {
          const InputBlocks inputs(held, 0);
          const ops::SumTask task{inputs.all(), At(out, 0), static_cast<std::size_t>(out.size()),
                                  carry.empty() ? nullptr : carry.data()};
          kernels.Sum(out.dtype(), {&task, 1}, stream);
        });
    return;
  }
  out.engine().Push(options, [held = std::move(held), out] { SumElements(held, out); });
}

void Sum(std::initializer_list<NDArray> inputs, const NDArray& out, int priority) {
  Sum(std::span<const NDArray>(inputs.begin(), inputs.size()), out, priority);
}

}  // namespace heddle
