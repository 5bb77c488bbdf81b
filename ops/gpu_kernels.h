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

namespace heddle::ops {

// The most inputs that a sum takes: as many as one launch.
inline constexpr std::size_t kGpuSumInputsMax = 288;

// Each issues on `stream`, whose device is current and reaches all pointers, what the function of
// its name in ops/ does at once: the same shapes and bits (of a NaN, only that it is one). Counts
// are above 0. Aliasing: as there, but nothing overlaps the output of Cast, nor that of one task
// what another one uses.
//
// Errors:  CudaError if a launch fails; sums: InvalidArgument for more than kGpuSumInputsMax
// inputs. Threads: all methods, any thread.
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
  // float32 and rounded once.
  virtual void SumOneBit(std::span<const void* const> codes, DType dtype, void* out,
                         std::size_t count, GpuStream stream) const = 0;
  virtual void SumTwoBit(float threshold, std::span<const void* const> codes, DType dtype,
                         void* out, std::size_t count, GpuStream stream) const = 0;
};

// Those of ops/cuda/. Without CUDA there is no device to call them for.
const GpuKernels& CudaKernels();

}  // namespace heddle::ops
