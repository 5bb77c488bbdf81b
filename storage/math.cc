#include "ops/math.h"

#include <heddle/error.h>
#include <heddle/math.h>

#include <cmath>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ops/convert.h"
#include "ops/dispatch.h"
#include "ops/gpu_kernels.h"
#include "ops/gpu_scratch.h"
#include "ops/reduce.h"
#include "storage/array_checks.h"
#include "storage/array_ops.h"
#include "storage/parallel.h"

namespace heddle {

using ops::GpuKernels;
using storage::At;
using storage::ConstAt;
using storage::ElementBytes;
using storage::ForBlocks;
using storage::IsOnGpu;
using storage::PushKernel;
using storage::ToKernel;

namespace {

void CheckPair(const char* operation, const NDArray& a, const NDArray& b) {
  storage::CheckNotEmpty(operation, a);
  storage::CheckNotEmpty(operation, b);
  storage::CheckSameEngine(operation, a, b);
  storage::CheckSameShape(operation, a, b);
  storage::CheckSameDType(operation, a, b);
  storage::CheckSameDevice(operation, a, b);
}

void CheckFloating(const char* operation, const NDArray& array) {
  storage::CheckNotEmpty(operation, array);
  ops::RequireFloating(operation, array.dtype());
}

// Pushes an op that makes `out`, a fresh array, element by element: kernel(out, begin, count) for
// parts of it, `bytes` for each element, or on a GPU gpu_kernel(kernels, out, count, stream).
template <class Kernel, class GpuKernel>
NDArray Mapped(OpName name, NDArray out, VarList reads, std::int64_t bytes, Kernel kernel,
               GpuKernel gpu_kernel) {
  const OpOptions options{
      .name = name, .reads = std::move(reads), .writes = {out.var()}, .device = out.device()};
  if (IsOnGpu(out)) {
    PushKernel(
        options, out,
        [out, gpu_kernel = std::move(gpu_kernel)](const GpuKernels& kernels, GpuStream stream) {
          gpu_kernel(kernels, out, static_cast<std::size_t>(out.size()), stream);
        });
    return out;
  }
  out.engine().Push(options, [out, bytes, kernel = std::move(kernel)] {
    out.data();
    ForBlocks(out.engine(), out.size(), bytes,
              [&](std::int64_t begin, std::int64_t end, ops::StoreMode) {
                kernel(out, begin, static_cast<std::size_t>(end - begin));
              });
  });
  return out;
}

// Memory for the kernel of an op of a GPU that writes `out`; an empty array if it wants none.
NDArray ScratchFor(const NDArray& out, std::size_t bytes) {
  if (bytes == 0) return {};
  const auto doubles = static_cast<std::int64_t>(bytes / sizeof(double));
  return internal::NewArrayGuardedBy(out, Shape({doubles}), DType::kFloat64);
}
void* ScratchAt(const NDArray& scratch) { return scratch.empty() ? nullptr : At(scratch, 0); }

std::uint8_t* BoolsAt(const NDArray& out, std::int64_t index) {
  return reinterpret_cast<std::uint8_t*>(At(out, index));
}

NDArray Like(const NDArray& a, DType dtype) {
  return NDArray(a.shape(), dtype, a.device(), a.engine());
}

NDArray UnaryOf(OpName name, ops::UnaryOp op, const NDArray& a) {
  return Mapped(
      name, Like(a, a.dtype()), {a.var()}, 2 * ElementBytes(a),
      [op, a](const NDArray& out, std::int64_t begin, std::size_t count) {
        ops::Unary(op, a.dtype(), ConstAt(a, begin), At(out, begin), count);
      },
      [op, a](const GpuKernels& kernels, const NDArray& out, std::size_t count, GpuStream stream) {
        kernels.Unary(op, a.dtype(), ConstAt(a, 0), At(out, 0), count, stream);
      });
}

NDArray PairOf(OpName name, ops::PairOp op, const NDArray& a, const NDArray& b) {
  CheckPair(name.c_str(), a, b);
  return Mapped(
      name, Like(a, a.dtype()), {a.var(), b.var()}, 3 * ElementBytes(a),
      [op, a, b](const NDArray& out, std::int64_t begin, std::size_t count) {
        ops::Pair(op, a.dtype(), ConstAt(a, begin), ConstAt(b, begin), At(out, begin), count);
      },
      [op, a, b](const GpuKernels& kernels, const NDArray& out, std::size_t count,
                 GpuStream stream) {
        kernels.Pair(op, a.dtype(), ConstAt(a, 0), ConstAt(b, 0), At(out, 0), count, stream);
      });
}

NDArray PairOf(OpName name, ops::PairOp op, const NDArray& a, Scalar value) {
  storage::CheckNotEmpty(name.c_str(), a);
  storage::CheckScalar(name.c_str(), a.dtype(), value);
  const ops::Scalar b = ToKernel(value);
  return Mapped(
      name, Like(a, a.dtype()), {a.var()}, 2 * ElementBytes(a),
      [op, a, b](const NDArray& out, std::int64_t begin, std::size_t count) {
        ops::PairWithScalar(op, a.dtype(), ConstAt(a, begin), b, At(out, begin), count);
      },
      [op, a, b](const GpuKernels& kernels, const NDArray& out, std::size_t count,
                 GpuStream stream) {
        kernels.PairWithScalar(op, a.dtype(), ConstAt(a, 0), b, At(out, 0), count, stream);
      });
}
NDArray PairOf(OpName name, ops::PairOp op, Scalar value, const NDArray& b) {
  storage::CheckNotEmpty(name.c_str(), b);
  storage::CheckScalar(name.c_str(), b.dtype(), value);
  const ops::Scalar a = ToKernel(value);
  return Mapped(
      name, Like(b, b.dtype()), {b.var()}, 2 * ElementBytes(b),
      [op, a, b](const NDArray& out, std::int64_t begin, std::size_t count) {
        ops::PairWithScalar(op, b.dtype(), a, ConstAt(b, begin), At(out, begin), count);
      },
      [op, a, b](const GpuKernels& kernels, const NDArray& out, std::size_t count,
                 GpuStream stream) {
        kernels.PairWithScalar(op, b.dtype(), a, ConstAt(b, 0), At(out, 0), count, stream);
      });
}

NDArray Reduced(OpName name, const NDArray& a, std::optional<std::int64_t> axis, bool mean) {
  storage::CheckNotEmpty(name.c_str(), a);
  const auto axes = static_cast<std::int64_t>(a.shape().ndim());
  std::size_t outer = 1;
  std::size_t length = static_cast<std::size_t>(a.size());
  std::size_t inner = 1;
  std::vector<std::int64_t> dims;
  if (axis) {
    if (*axis < 0 || *axis >= axes) {
      throw InvalidArgument(fmt::format("{}: expected an axis in [0, {}) of shape {}, got {}",
                                        name.c_str(), axes, ToString(a.shape()), *axis));
    }
    length = static_cast<std::size_t>(a.shape()[static_cast<std::size_t>(*axis)]);
    for (std::int64_t i = 0; i < axes; ++i) {
      const std::int64_t extent = a.shape()[static_cast<std::size_t>(i)];
      if (i < *axis) outer *= static_cast<std::size_t>(extent);
      if (i > *axis) inner *= static_cast<std::size_t>(extent);
      if (i != *axis) dims.push_back(extent);
    }
  }
  if (dims.empty()) dims = {1};
  NDArray out(Shape(dims), a.dtype(), a.device(), a.engine());
  const std::size_t divisor = mean ? length : 1;
  const OpOptions options{
      .name = name, .reads = {a.var()}, .writes = {out.var()}, .device = a.device()};
  if (IsOnGpu(a)) {
    const NDArray scratch = ScratchFor(out, ops::SumAxisScratchBytes(outer, length, inner));
    PushKernel(options, out, [=](const GpuKernels& kernels, GpuStream stream) {
      kernels.SumAxis(a.dtype(), ConstAt(a, 0), outer, length, inner, divisor, At(out, 0),
                      ScratchAt(scratch), stream);
    });
    return out;
  }
  a.engine().Push(options, [=] {
    ops::SumAxis(a.dtype(), a.const_data(), outer, length, inner, divisor, out.data());
  });
  return out;
}

// The steps, in elements, between neighbours along each axis.
std::vector<std::int64_t> StridesOf(const Shape& shape) {
  std::vector<std::int64_t> strides(shape.ndim());
  std::int64_t step = 1;
  for (std::size_t axis = shape.ndim(); axis-- > 0;) {
    strides[axis] = step;
    step *= shape[axis];
  }
  return strides;
}

void CheckAxes(const char* operation, const Shape& shape) {
  if (shape.ndim() <= ops::StridedPart::kAxesMax) return;
  throw InvalidArgument(fmt::format("{}: expected at most {} axes, got shape {}", operation,
                                    ops::StridedPart::kAxesMax, ToString(shape)));
}

struct Part {
  ops::StridedPart layout;
  Shape shape;
};

Part PartOf(const char* operation, const NDArray& array, std::span<const AxisRange> ranges) {
  storage::CheckNotEmpty(operation, array);
  const Shape& shape = array.shape();
  CheckAxes(operation, shape);
  if (ranges.size() != shape.ndim()) {
    throw InvalidArgument(fmt::format("{}: expected {} ranges for shape {}, got {}", operation,
                                      shape.ndim(), ToString(shape), ranges.size()));
  }
  const std::vector<std::int64_t> strides = StridesOf(shape);
  Part part;
  part.layout.axes = shape.ndim();
  std::vector<std::int64_t> kept;
  for (std::size_t axis = 0; axis < ranges.size(); ++axis) {
    const AxisRange& range = ranges[axis];
    const auto inside = [&](std::int64_t i) { return i >= 0 && i < shape[axis]; };
    const auto is_last_inside = [&] {
      std::int64_t last = 0;
      return !__builtin_mul_overflow(range.count - 1, range.step, &last) &&
             !__builtin_add_overflow(range.begin, last, &last) && inside(last);
    };
    const bool fits =
        range.count == 0 || (range.count > 0 && inside(range.begin) && is_last_inside());
    if (range.step == 0 || !fits || (!range.keep && range.count != 1)) {
      throw InvalidArgument(fmt::format(
          "{}: axis {} of shape {}: expected elements within it, got {} from {} in steps of {}",
          operation, axis, ToString(shape), range.count, range.begin, range.step));
    }
    part.layout.extents[axis] = range.count;
    if (range.count > 1) part.layout.strides[axis] = strides[axis] * range.step;
    if (range.count > 0) part.layout.offset += strides[axis] * range.begin;
    if (range.keep) kept.push_back(range.count);
  }
  part.shape = Shape(kept);
  return part;
}

NDArray Gathered(OpName name, const NDArray& array, const ops::StridedPart& layout, Shape shape) {
  NDArray out(std::move(shape), array.dtype(), array.device(), array.engine());
  const OpOptions options{
      .name = name, .reads = {array.var()}, .writes = {out.var()}, .device = array.device()};
  const std::size_t bytes = SizeOf(array.dtype());
  if (IsOnGpu(array)) {
    PushKernel(options, out, [=](const GpuKernels& kernels, GpuStream stream) {
      kernels.Gather(bytes, ConstAt(array, 0), layout, At(out, 0), stream);
    });
    return out;
  }
  array.engine().Push(options, [=] { ops::Gather(bytes, array.const_data(), layout, out.data()); });
  return out;
}

}  // namespace

NDArray Compare(Comparison comparison, const NDArray& a, const NDArray& b) {
  CheckPair("Compare", a, b);
  const auto op = static_cast<ops::CompareOp>(comparison);
  return Mapped(
      "Compare", Like(a, DType::kBool), {a.var(), b.var()}, 2 * ElementBytes(a) + 1,
      [op, a, b](const NDArray& out, std::int64_t begin, std::size_t count) {
        ops::Compare(op, a.dtype(), ConstAt(a, begin), ConstAt(b, begin), BoolsAt(out, begin),
                     count);
      },
      [op, a, b](const GpuKernels& kernels, const NDArray& out, std::size_t count,
                 GpuStream stream) {
        kernels.Compare(op, a.dtype(), ConstAt(a, 0), ConstAt(b, 0), BoolsAt(out, 0), count,
                        stream);
      });
}

NDArray Compare(Comparison comparison, const NDArray& a, Scalar value) {
  storage::CheckNotEmpty("Compare", a);
  const auto op = static_cast<ops::CompareOp>(comparison);
  const ops::Scalar b = ToKernel(value);
  return Mapped(
      "Compare", Like(a, DType::kBool), {a.var()}, ElementBytes(a) + 1,
      [op, a, b](const NDArray& out, std::int64_t begin, std::size_t count) {
        ops::CompareWithScalar(op, a.dtype(), ConstAt(a, begin), b, BoolsAt(out, begin), count);
      },
      [op, a, b](const GpuKernels& kernels, const NDArray& out, std::size_t count,
                 GpuStream stream) {
        kernels.CompareWithScalar(op, a.dtype(), ConstAt(a, 0), b, BoolsAt(out, 0), count, stream);
      });
}

NDArray Negative(const NDArray& a) {
  storage::CheckNotEmpty("Negative", a);
  return UnaryOf("Negative", ops::UnaryOp::kNegative, a);
}
NDArray Abs(const NDArray& a) {
  storage::CheckNotEmpty("Abs", a);
  return UnaryOf("Abs", ops::UnaryOp::kAbs, a);
}
NDArray Sign(const NDArray& a) {
  storage::CheckNotEmpty("Sign", a);
  return UnaryOf("Sign", ops::UnaryOp::kSign, a);
}
NDArray Square(const NDArray& a) {
  storage::CheckNotEmpty("Square", a);
  return UnaryOf("Square", ops::UnaryOp::kSquare, a);
}
NDArray Sqrt(const NDArray& a) {
  CheckFloating("Sqrt", a);
  return UnaryOf("Sqrt", ops::UnaryOp::kSqrt, a);
}
NDArray Exp(const NDArray& a) {
  CheckFloating("Exp", a);
  return UnaryOf("Exp", ops::UnaryOp::kExp, a);
}
NDArray Log(const NDArray& a) {
  CheckFloating("Log", a);
  return UnaryOf("Log", ops::UnaryOp::kLog, a);
}

NDArray Maximum(const NDArray& a, const NDArray& b) {
  return PairOf("Maximum", ops::PairOp::kMaximum, a, b);
}
NDArray Maximum(const NDArray& a, Scalar b) {
  return PairOf("Maximum", ops::PairOp::kMaximum, a, b);
}
NDArray Minimum(const NDArray& a, const NDArray& b) {
  return PairOf("Minimum", ops::PairOp::kMinimum, a, b);
}
NDArray Minimum(const NDArray& a, Scalar b) {
  return PairOf("Minimum", ops::PairOp::kMinimum, a, b);
}
NDArray Power(const NDArray& a, const NDArray& b) {
  return PairOf("Power", ops::PairOp::kPower, a, b);
}
NDArray Power(const NDArray& a, Scalar b) { return PairOf("Power", ops::PairOp::kPower, a, b); }
NDArray Power(Scalar a, const NDArray& b) { return PairOf("Power", ops::PairOp::kPower, a, b); }
NDArray Remainder(const NDArray& a, const NDArray& b) {
  return PairOf("Remainder", ops::PairOp::kRemainder, a, b);
}
NDArray Remainder(const NDArray& a, Scalar b) {
  return PairOf("Remainder", ops::PairOp::kRemainder, a, b);
}
NDArray Remainder(Scalar a, const NDArray& b) {
  return PairOf("Remainder", ops::PairOp::kRemainder, a, b);
}

NDArray SumAlong(const NDArray& a, std::optional<std::int64_t> axis) {
  return Reduced("Sum", a, axis, /*mean=*/false);
}
NDArray MeanAlong(const NDArray& a, std::optional<std::int64_t> axis) {
  return Reduced("Mean", a, axis, /*mean=*/true);
}

NDArray Norm(const NDArray& a) {
  CheckFloating("Norm", a);
  NDArray out({1}, a.dtype(), a.device(), a.engine());
  const OpOptions options{
      .name = "Norm", .reads = {a.var()}, .writes = {out.var()}, .device = a.device()};
  const auto count = static_cast<std::size_t>(a.size());
  if (IsOnGpu(a)) {
    const NDArray scratch = ScratchFor(out, ops::NormScratchBytes(count));
    PushKernel(options, out, [=](const GpuKernels& kernels, GpuStream stream) {
      kernels.Norm(a.dtype(), ConstAt(a, 0), count, At(out, 0), ScratchAt(scratch), stream);
    });
    return out;
  }
  a.engine().Push(options, [=] {
    std::vector<double> blocks(ops::ReductionBlocks(count));
    ops::SquaredNormBlocks(a.dtype(), a.const_data(), count, blocks.data());
    const double norm = std::sqrt(ops::AddBlocks(blocks));
    ops::DispatchFloating(out.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      *out.data<T>() = ops::Convert<T>(norm);
    });
  });
  return out;
}

NDArray Dot(const NDArray& a, const NDArray& b) {
  storage::CheckNotEmpty("Dot", a);
  storage::CheckNotEmpty("Dot", b);
  storage::CheckSameEngine("Dot", a, b);
  storage::CheckSameDType("Dot", a, b);
  storage::CheckSameDevice("Dot", a, b);
  const Shape& x = a.shape();
  const Shape& y = b.shape();
  const bool ranks_fit =
      (x.ndim() == 1 && y.ndim() == 1) || (x.ndim() == 2 && y.ndim() >= 1 && y.ndim() <= 2);
  if (!ranks_fit || x[x.ndim() - 1] != y[0]) {
    throw InvalidArgument(fmt::format(
        "Dot: expected shapes (n, k) and (k, m), (n, k) and (k,), or (k,) and (k,), got {} and {}",
        ToString(x), ToString(y)));
  }
  std::vector<std::int64_t> dims;
  if (x.ndim() == 2) dims.push_back(x[0]);
  if (y.ndim() == 2) dims.push_back(y[1]);
  if (dims.empty()) dims.push_back(1);
  NDArray out(Shape(dims), a.dtype(), a.device(), a.engine());
  const auto inner = static_cast<std::size_t>(y[0]);
  const auto rows = static_cast<std::size_t>(x.ndim() == 2 ? x[0] : 1);
  const auto columns = static_cast<std::size_t>(y.ndim() == 2 ? y[1] : 1);
  const OpOptions options{
      .name = "Dot", .reads = {a.var(), b.var()}, .writes = {out.var()}, .device = a.device()};
  if (IsOnGpu(a)) {
    const NDArray scratch = ScratchFor(out, ops::MatrixProductScratchBytes(rows, inner, columns));
    PushKernel(options, out, [=](const GpuKernels& kernels, GpuStream stream) {
      kernels.MatrixProduct(a.dtype(), ConstAt(a, 0), ConstAt(b, 0), rows, inner, columns,
                            At(out, 0), ScratchAt(scratch), stream);
    });
    return out;
  }
  a.engine().Push(options, [=] {
    std::byte* const product = static_cast<std::byte*>(out.data());
    const std::size_t bytes = SizeOf(a.dtype());
    const auto* const left = static_cast<const std::byte*>(a.const_data());
    const void* const right = b.const_data();
    // Blocks of rows: the bytes that one touches are those of its products.
    const auto row_bytes = static_cast<std::int64_t>((columns + 1) * inner * bytes);
    ForBlocks(out.engine(), static_cast<std::int64_t>(rows), row_bytes,
              [&](std::int64_t begin, std::int64_t end, ops::StoreMode) {
                const auto first = static_cast<std::size_t>(begin);
                ops::MatrixProduct(a.dtype(), left + first * inner * bytes, right,
                                   static_cast<std::size_t>(end - begin), inner, columns,
                                   product + first * columns * bytes);
              });
  });
  return out;
}

NDArray CopyPart(const NDArray& array, std::span<const AxisRange> part) {
  Part checked = PartOf("CopyPart", array, part);
  return Gathered("CopyPart", array, checked.layout, std::move(checked.shape));
}

void AssignPart(const NDArray& array, std::span<const AxisRange> part, const NDArray& values) {
  const Part checked = PartOf("AssignPart", array, part);
  storage::CheckNotEmpty("AssignPart", values);
  storage::CheckSameEngine("AssignPart", array, values);
  storage::CheckSameDType("AssignPart", array, values);
  storage::CheckSameDevice("AssignPart", array, values);
  if (values.shape() != checked.shape) {
    storage::ThrowShape("AssignPart", checked.shape, values.shape());
  }
  const NDArray from = values.Overlaps(array) ? values.Copy() : values;
  const OpOptions options{.name = "AssignPart",
                          .reads = {array.var(), from.var()},
                          .writes = {array.var()},
                          .device = array.device()};
  const std::size_t bytes = SizeOf(array.dtype());
  if (IsOnGpu(array)) {
    PushKernel(
        options, array,
        [array, bytes, layout = checked.layout, from](const GpuKernels& kernels, GpuStream stream) {
          if (from.size() == 0) return;
          kernels.Scatter(bytes, ConstAt(from, 0), layout, At(array, 0), stream);
        });
    return;
  }
  array.engine().Push(options, [array, bytes, layout = checked.layout, from] {
    ops::Scatter(bytes, from.const_data(), layout, array.data());
  });
}

NDArray Transpose(const NDArray& array, std::span<const std::int64_t> axes) {
  storage::CheckNotEmpty("Transpose", array);
  const Shape& shape = array.shape();
  CheckAxes("Transpose", shape);
  std::vector<bool> named(shape.ndim());
  bool fits = axes.size() == shape.ndim();
  for (std::size_t i = 0; fits && i < axes.size(); ++i) {
    const auto axis = static_cast<std::size_t>(axes[i]);
    fits = axes[i] >= 0 && axis < shape.ndim() && !named[axis];
    if (fits) named[axis] = true;
  }
  if (!fits) {
    throw InvalidArgument(fmt::format("Transpose: expected each axis of shape {} once, got ({})",
                                      ToString(shape), fmt::join(axes, ", ")));
  }
  const std::vector<std::int64_t> strides = StridesOf(shape);
  ops::StridedPart layout{.axes = shape.ndim()};
  std::vector<std::int64_t> dims;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const auto axis = static_cast<std::size_t>(axes[i]);
    layout.extents[i] = shape[axis];
    layout.strides[i] = strides[axis];
    dims.push_back(shape[axis]);
  }
  return Gathered("Transpose", array, layout, Shape(dims));
}

NDArray BroadcastTo(const NDArray& array, const Shape& shape) {
  storage::CheckNotEmpty("BroadcastTo", array);
  CheckAxes("BroadcastTo", shape);
  const Shape& from = array.shape();
  const std::vector<std::int64_t> strides = StridesOf(from);
  ops::StridedPart layout{.axes = shape.ndim()};
  bool fits = from.ndim() <= shape.ndim();
  for (std::size_t i = 0; fits && i < shape.ndim(); ++i) {
    const std::size_t missing = shape.ndim() - from.ndim();
    layout.extents[i] = shape[i];
    if (i < missing) continue;
    const std::int64_t extent = from[i - missing];
    layout.strides[i] = extent == 1 ? 0 : strides[i - missing];
    fits = extent == 1 || extent == shape[i];
  }
  if (!fits) storage::ThrowShape("BroadcastTo", shape, from);
  return Gathered("BroadcastTo", array, layout, shape);
}

}  // namespace heddle
