// The functions of ops/math.h on simulated GPUs: those of the CPU. Scratch memory is written, so
// that too little of it, or memory that is used elsewhere, shows.
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/convert.h"
#include "ops/dispatch.h"
#include "ops/gpu_scratch.h"
#include "ops/reduce.h"
#include "tests/engine/sim_gpu.h"

namespace heddle::engine_test {
namespace {

std::int64_t Bytes(DType dtype, std::size_t count) {
  return static_cast<std::int64_t>(SizeOf(dtype) * count);
}

// From the start of the array to the end of the last element of the part.
std::int64_t SpanBytes(std::size_t element_bytes, const ops::StridedPart& part) {
  std::int64_t last = part.offset;
  for (std::size_t axis = 0; axis < part.axes; ++axis) {
    if (part.strides[axis] > 0) last += (part.extents[axis] - 1) * part.strides[axis];
  }
  return (last + 1) * static_cast<std::int64_t>(element_bytes);
}
std::int64_t PackedBytes(std::size_t element_bytes, const ops::StridedPart& part) {
  auto bytes = static_cast<std::int64_t>(element_bytes);
  for (std::size_t axis = 0; axis < part.axes; ++axis) bytes *= part.extents[axis];
  return bytes;
}

using At = std::vector<std::byte*>;

// Arrays and, behind them, what scratch there is.
class Arrays {
 public:
  Arrays(std::vector<const void*> arrays, std::vector<std::int64_t> bytes, const void* scratch,
         std::size_t scratch_bytes)
      : arrays_(std::move(arrays)), bytes_(std::move(bytes)), scratch_(scratch_bytes) {
    if (scratch_bytes == 0) return;
    arrays_.push_back(scratch);
    bytes_.push_back(static_cast<std::int64_t>(scratch_bytes));
  }

  template <class Kernel>
  void Launch(const SimGpu& gpu, GpuStream stream, Kernel kernel) const {
    gpu.LaunchOn(stream, arrays_, bytes_, [kernel, scratch = scratch_](const At& at) {
      if (scratch > 0) std::memset(at.back(), 0x5A, scratch);
      kernel(at);
    });
  }

 private:
  std::vector<const void*> arrays_;
  std::vector<std::int64_t> bytes_;
  std::size_t scratch_;
};

}  // namespace

void SimGpu::Compare(ops::CompareOp op, DType dtype, const void* a, const void* b,
                     std::uint8_t* out, std::size_t count, GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, a, b}, {static_cast<std::int64_t>(count), bytes, bytes},
           [=](const At& at) {
             ops::Compare(op, dtype, at[1], at[2], reinterpret_cast<std::uint8_t*>(at[0]), count);
           });
}

void SimGpu::CompareWithScalar(ops::CompareOp op, DType dtype, const void* a, ops::Scalar b,
                               std::uint8_t* out, std::size_t count, GpuStream stream) const {
  LaunchOn(
      stream, {out, a}, {static_cast<std::int64_t>(count), Bytes(dtype, count)}, [=](const At& at) {
        ops::CompareWithScalar(op, dtype, at[1], b, reinterpret_cast<std::uint8_t*>(at[0]), count);
      });
}

void SimGpu::Unary(ops::UnaryOp op, DType dtype, const void* a, void* out, std::size_t count,
                   GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, a}, {bytes, bytes},
           [=](const At& at) { ops::Unary(op, dtype, at[1], at[0], count); });
}

void SimGpu::Pair(ops::PairOp op, DType dtype, const void* a, const void* b, void* out,
                  std::size_t count, GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, a, b}, {bytes, bytes, bytes},
           [=](const At& at) { ops::Pair(op, dtype, at[1], at[2], at[0], count); });
}

void SimGpu::PairWithScalar(ops::PairOp op, DType dtype, const void* a, ops::Scalar b, void* out,
                            std::size_t count, GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, a}, {bytes, bytes},
           [=](const At& at) { ops::PairWithScalar(op, dtype, at[1], b, at[0], count); });
}

void SimGpu::PairWithScalar(ops::PairOp op, DType dtype, ops::Scalar a, const void* b, void* out,
                            std::size_t count, GpuStream stream) const {
  const std::int64_t bytes = Bytes(dtype, count);
  LaunchOn(stream, {out, b}, {bytes, bytes},
           [=](const At& at) { ops::PairWithScalar(op, dtype, a, at[1], at[0], count); });
}

void SimGpu::SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length,
                     std::size_t inner, std::size_t divisor, void* out, void* scratch,
                     GpuStream stream) const {
  Arrays({out, a}, {Bytes(dtype, outer * inner), Bytes(dtype, outer * length * inner)}, scratch,
         ops::SumAxisScratchBytes(outer, length, inner))
      .Launch(*this, stream, [=](const At& at) {
        ops::SumAxis(dtype, at[1], outer, length, inner, divisor, at[0]);
      });
}

void SimGpu::MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows,
                           std::size_t inner, std::size_t columns, void* out, void* scratch,
                           GpuStream stream) const {
  Arrays({out, a, b},
         {Bytes(dtype, rows * columns), Bytes(dtype, rows * inner), Bytes(dtype, inner * columns)},
         scratch, ops::MatrixProductScratchBytes(rows, inner, columns))
      .Launch(*this, stream, [=](const At& at) {
        ops::MatrixProduct(dtype, at[1], at[2], rows, inner, columns, at[0]);
      });
}

void SimGpu::Norm(DType dtype, const void* x, std::size_t count, void* out, void* scratch,
                  GpuStream stream) const {
  Arrays({out, x}, {Bytes(dtype, 1), Bytes(dtype, count)}, scratch, ops::NormScratchBytes(count))
      .Launch(*this, stream, [=](const At& at) {
        std::vector<double> blocks(ops::ReductionBlocks(count));
        ops::SquaredNormBlocks(dtype, at[1], count, blocks.data());
        const double norm = std::sqrt(ops::AddBlocks(blocks));
        ops::DispatchFloating(dtype, [&](auto type) {
          using T = typename decltype(type)::type;
          *reinterpret_cast<T*>(at[0]) = ops::Convert<T>(norm);
        });
      });
}

void SimGpu::Gather(std::size_t element_bytes, const void* array, const ops::StridedPart& part,
                    void* packed, GpuStream stream) const {
  LaunchOn(stream, {packed, array},
           {PackedBytes(element_bytes, part), SpanBytes(element_bytes, part)},
           [=](const At& at) { ops::Gather(element_bytes, at[1], part, at[0]); });
}

void SimGpu::Scatter(std::size_t element_bytes, const void* packed, const ops::StridedPart& part,
                     void* array, GpuStream stream) const {
  LaunchOn(stream, {packed, array},
           {PackedBytes(element_bytes, part), SpanBytes(element_bytes, part)},
           [=](const At& at) { ops::Scatter(element_bytes, at[0], part, at[1]); });
}

}  // namespace heddle::engine_test
