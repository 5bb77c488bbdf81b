// One bit an element: plus or minus one, as ops/quantise.h computes it.
#include "kvstore/compression/compressor.h"
#include "ops/quantise.h"

namespace heddle::kvstore {

namespace {

class OneBit final : public Compressor {
 public:
  explicit OneBit(const CompressionOptions& options)
      : Compressor(options), threshold_(static_cast<float>(options.threshold)) {}

  std::int64_t CodeBytes(std::int64_t count) const override {
    return static_cast<std::int64_t>(ops::OneBitCodeBytes(static_cast<std::size_t>(count)));
  }
  void Compress(DType dtype, const void* gradient, float* residual, void* code,
                std::size_t count) const override {
    ops::QuantiseOneBit(threshold_, dtype, gradient, residual, code, count);
  }
  void Decompress(const void* code, float* out, std::size_t count) const override {
    ops::DequantiseOneBit(code, out, count);
  }
  void CompressOnGpu(const ops::GpuKernels& kernels, DType dtype, const void* gradient,
                     float* residual, void* code, std::size_t count,
                     GpuStream stream) const override {
    kernels.QuantiseOneBit(threshold_, dtype, gradient, residual, code, count, stream);
  }
  void SumOnGpu(const ops::GpuKernels& kernels, std::span<const void* const> codes, DType dtype,
                void* out, float* carry, std::size_t count, GpuStream stream) const override {
    kernels.SumOneBit(codes, dtype, out, carry, count, stream);
  }

 private:
  const float threshold_;
};

std::shared_ptr<const Compressor> MakeOneBit(const CompressionOptions& options) {
  return std::make_shared<OneBit>(options);
}

constexpr CompressorType kOneBit = {"1bit", &MakeOneBit};

}  // namespace

const CompressorType& OneBitType() { return kOneBit; }

}  // namespace heddle::kvstore
