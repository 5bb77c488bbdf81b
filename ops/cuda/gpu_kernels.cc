#include "ops/gpu_kernels.h"

#include "ops/cuda/cast.h"
#include "ops/cuda/copy.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/math.h"
#include "ops/cuda/quantise.h"
#include "ops/cuda/sum.h"

namespace heddle::ops {
namespace {

cuda::Stream ToStream(GpuStream stream) { return static_cast<cuda::Stream>(stream.handle); }

class AllCudaKernels final : public GpuKernels {
 public:
  void Fill(DType dtype, Scalar value, void* out, std::size_t count,
            GpuStream stream) const override {
    const cuda::FillTask task{out, count};
    cuda::Fill(dtype, value, {&task, 1}, ToStream(stream));
  }
  void Copy(std::span<const CopyTask> tasks, GpuStream stream) const override {
    cuda::Copy(tasks, ToStream(stream));
  }
  void Cast(DType from, DType to, std::span<const CastTask> tasks,
            GpuStream stream) const override {
    cuda::Cast(from, to, tasks, ToStream(stream));
  }
  void Binary(BinaryOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
              GpuStream stream) const override {
    cuda::Binary(op, dtype, a, b, out, count, ToStream(stream));
  }
  void BinaryWithScalar(BinaryOp op, DType dtype, const void* a, Scalar b, void* out,
                        std::size_t count, GpuStream stream) const override {
    cuda::BinaryWithScalar(op, dtype, a, b, out, count, ToStream(stream));
  }
  void BinaryWithScalar(BinaryOp op, DType dtype, Scalar a, const void* b, void* out,
                        std::size_t count, GpuStream stream) const override {
    cuda::BinaryWithScalar(op, dtype, a, b, out, count, ToStream(stream));
  }
  void Sum(DType dtype, std::span<const SumTask> tasks, GpuStream stream) const override {
    cuda::Sum(dtype, tasks, ToStream(stream));
  }
  void QuantiseOneBit(float threshold, DType dtype, const void* gradient, float* residual,
                      void* code, std::size_t count, GpuStream stream) const override {
    const cuda::QuantiseTask task{gradient, residual, code, count};
    cuda::QuantiseOneBit(threshold, dtype, {&task, 1}, ToStream(stream));
  }
  void QuantiseTwoBit(float threshold, DType dtype, const void* gradient, float* residual,
                      void* code, std::size_t count, GpuStream stream) const override {
    const cuda::QuantiseTask task{gradient, residual, code, count};
    cuda::QuantiseTwoBit(threshold, dtype, {&task, 1}, ToStream(stream));
  }
  void SumOneBit(std::span<const void* const> codes, DType dtype, void* out, float* carry,
                 std::size_t count, GpuStream stream) const override {
    cuda::SumOneBit(codes, dtype, out, carry, count, ToStream(stream));
  }
  void SumTwoBit(float threshold, std::span<const void* const> codes, DType dtype, void* out,
                 float* carry, std::size_t count, GpuStream stream) const override {
    cuda::SumTwoBit(threshold, codes, dtype, out, carry, count, ToStream(stream));
  }
  void Compare(CompareOp op, DType dtype, const void* a, const void* b, std::uint8_t* out,
               std::size_t count, GpuStream stream) const override {
    cuda::Compare(op, dtype, a, b, out, count, ToStream(stream));
  }
  void CompareWithScalar(CompareOp op, DType dtype, const void* a, Scalar b, std::uint8_t* out,
                         std::size_t count, GpuStream stream) const override {
    cuda::CompareWithScalar(op, dtype, a, b, out, count, ToStream(stream));
  }
  void Unary(UnaryOp op, DType dtype, const void* a, void* out, std::size_t count,
             GpuStream stream) const override {
    cuda::Unary(op, dtype, a, out, count, ToStream(stream));
  }
  void Pair(PairOp op, DType dtype, const void* a, const void* b, void* out, std::size_t count,
            GpuStream stream) const override {
    cuda::Pair(op, dtype, a, b, out, count, ToStream(stream));
  }
  void PairWithScalar(PairOp op, DType dtype, const void* a, Scalar b, void* out, std::size_t count,
                      GpuStream stream) const override {
    cuda::PairWithScalar(op, dtype, a, b, out, count, ToStream(stream));
  }
  void PairWithScalar(PairOp op, DType dtype, Scalar a, const void* b, void* out, std::size_t count,
                      GpuStream stream) const override {
    cuda::PairWithScalar(op, dtype, a, b, out, count, ToStream(stream));
  }
  void SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length, std::size_t inner,
               std::size_t divisor, void* out, void* scratch, GpuStream stream) const override {
    cuda::SumAxis(dtype, a, outer, length, inner, divisor, out, scratch, ToStream(stream));
  }
  void MatrixProduct(DType dtype, const void* a, const void* b, std::size_t rows, std::size_t inner,
                     std::size_t columns, void* out, void* scratch,
                     GpuStream stream) const override {
    cuda::MatrixProduct(dtype, a, b, rows, inner, columns, out, scratch, ToStream(stream));
  }
  void Norm(DType dtype, const void* x, std::size_t count, void* out, void* scratch,
            GpuStream stream) const override {
    cuda::Norm(dtype, x, count, out, scratch, ToStream(stream));
  }
  void Gather(std::size_t element_bytes, const void* array, const StridedPart& part, void* packed,
              GpuStream stream) const override {
    cuda::Gather(element_bytes, array, part, packed, ToStream(stream));
  }
  void Scatter(std::size_t element_bytes, const void* packed, const StridedPart& part, void* array,
               GpuStream stream) const override {
    cuda::Scatter(element_bytes, packed, part, array, ToStream(stream));
  }
};

}  // namespace

const GpuKernels& CudaKernels() {
  static const AllCudaKernels kernels;
  return kernels;
}

}  // namespace heddle::ops
