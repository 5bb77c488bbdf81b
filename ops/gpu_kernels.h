// The kernels that arrays on GPUs need, behind one interface: CUDA's (ops/cuda/), or those of
// simulated devices in tests.
#pragma once

#include <heddle/dtype.h>
#include <heddle/gpu.h>

#include <cstddef>
#include <span>

#include "ops/convert.h"
#include "ops/elementwise.h"
#include "ops/gpu_tasks.h"
#include "ops/math.h"

namespace heddle::ops {

// Each issues on `stream`, whose device is current and reaches all pointers, what the function of
// its name in ops/ does at once: the same shapes and bits (of a NaN, only that it is one). Counts
// are above 0. Aliasing: as there, but nothing overlaps the output of Cast, nor that of one task
// what another one uses.
//
// Errors:  CudaError if a launch fails.
// Threads: all methods, any thread.
class GpuKernels {
 public:
  virtual ~GpuKernels() = default;

  virtual void Fill(DType dtype, Scalar value, void* out, std::size_t count,
                    GpuStream stream) const = 0;
  // Lists take a launch for some dozens of tasks; see ops/cuda/. Tasks without elements are none.
  virtual void Copy(std::span<const CopyTask> tasks, GpuStream stream) const = 0;
  virtual void Cast(DType from, DType to, std::span<const CastTask> tasks,
                    GpuStream stream) const = 0;
  virtual void Binary(BinaryOp op, DType dtype, const void* a, const void* b, void* out,
                      std::size_t count, GpuStream stream) const = 0;
  virtual void BinaryWithScalar(BinaryOp op, DType dtype, const void* a, Scalar b, void* out,
                                std::size_t count, GpuStream stream) const = 0;
  virtual void BinaryWithScalar(BinaryOp op, DType dtype, Scalar a, const void* b, void* out,
                                std::size_t count, GpuStream stream) const = 0;
  virtual void Sum(DType dtype, std::span<const SumTask> tasks, GpuStream stream) const = 0;
  virtual void QuantiseOneBit(float threshold, DType dtype, const void* gradient, float* residual,
                              void* code, std::size_t count, GpuStream stream) const = 0;
  virtual void QuantiseTwoBit(float threshold, DType dtype, const void* gradient, float* residual,
                              void* code, std::size_t count, GpuStream stream) const = 0;
  // out, float32, float16 or bfloat16: the sum of what the codes stand for, added in their order in
  // float32 and rounded once. `carry`: as that of a SumTask.
  virtual void SumOneBit(std::span<const void* const> codes, DType dtype, void* out, float* carry,
                         std::size_t count, GpuStream stream) const = 0;
  virtual void SumTwoBit(float threshold, std::span<const void* const> codes, DType dtype,
                         void* out, float* carry, std::size_t count, GpuStream stream) const = 0;

  // Functions of ops/math.h; kExp, kLog and kPower of floating dtypes only within 1e-6. Scratch:
  // memory of the device of as many bytes as ops/gpu_scratch.h says, null if none.
  virtual void Compare(CompareOp op, DType dtype, const void* a, const void* b, std::uint8_t* out,
                       std::size_t count, GpuStream stream) const = 0;
  virtual void CompareWithScalar(CompareOp op, DType dtype, const void* a, Scalar b,
                                 std::uint8_t* out, std::size_t count, GpuStream stream) const = 0;
  virtual void Unary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count,
                     GpuStream stream) const = 0;
  virtual void Pair(PairOp op, DType dtype, const void* a, const void* b, void* out,
                    std::size_t count, GpuStream stream) const = 0;
  virtual void PairWithScalar(PairOp op, DType dtype, const void* a, Scalar b, void* out,
                              std::size_t count, GpuStream stream) const = 0;
  virtual void PairWithScalar(PairOp op, DType dtype, Scalar a, const void* b, void* out,
                              std::size_t count, GpuStream stream) const = 0;
  virtual void SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length,
                       std::size_t inner, std::size_t divisor, void* out, void* scratch,
                       GpuStream stream) const = 0;
  virtual void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows,
                             std::size_t inner, std::size_t columns, void* out, void* scratch,
                             GpuStream stream) const = 0;
  // *out, of `dtype`, a floating one: the square root of the sum of all squares, as
  // SquaredNormBlocks and AddBlocks (ops/reduce.h) add.
  virtual void Norm(DType dtype, const void* x, std::size_t count, void* out, void* scratch,
                    GpuStream stream) const = 0;
  virtual void Gather(std::size_t element_bytes, const void* array, const StridedPart& part,
                      void* packed, GpuStream stream) const = 0;
  virtual void Scatter(std::size_t element_bytes, const void* packed, const StridedPart& part,
                       void* array, GpuStream stream) const = 0;
};

// Those of ops/cuda/. Without CUDA there is no device to call them for.
const GpuKernels& CudaKernels();

}  // namespace heddle::ops
