// Two bits an element: plus or minus the threshold, or nothing, as ops/quantise.h computes it.
#include <heddle/error.h>

#include <fmt/format.h>

#include "kvstore/compression/compressor.h"
#include "ops/quantise.h"

namespace heddle::kvstore {

namespace {

class TwoBit final : public Compressor {
 public:
  explicit TwoBit(const CompressionOptions& options)
      : Compressor(options), threshold_(static_cast<float>(options.threshold)) {
    if (!(threshold_ > 0)) {  // in float32, in which it counts
      throw InvalidArgument(
          fmt::format("gradient compression 2bit: threshold: expected a number above 0, got {}",
                      options.threshold));
    }
  }

  std::int64_t CodeBytes(std::int64_t count) const override {
    return static_cast<std::int64_t>(ops::TwoBitCodeBytes(static_cast<std::size_t>(count)));
  }
  void Compress(DType dtype, const void* gradient, float* residual, void* code,
                std::size_t count) const override {
    ops::QuantiseTwoBit(threshold_, dtype, gradient, residual, code, count);
  }
  void Decompress(const void* code, float* out, std::size_t count) const override {
    ops::DequantiseTwoBit(threshold_, code, out, count);
  }
  void CompressOnGpu(const ops::GpuKernels& kernels, DType dtype, const void* gradient,
                     float* residual, void* code, std::size_t count,
                     GpuStream stream) const override {
    kernels.QuantiseTwoBit(threshold_, dtype, gradient, residual, code, count, stream);
  }
  void SumOnGpu(const ops::GpuKernels& kernels, std::span<const void* const> codes, DType dtype,
                void* out, float* carry, std::size_t count, GpuStream stream) const override {
    kernels.SumTwoBit(threshold_, codes, dtype, out, carry, count, stream);
  }

 private:
  const float threshold_;
};

std::shared_ptr<const Compressor> MakeTwoBit(const CompressionOptions& options) {
  return std::make_shared<TwoBit>(options);
}

constexpr CompressorType kTwoBit = {"2bit", &MakeTwoBit};

}  // namespace

const CompressorType& TwoBitType() { return kTwoBit; }

}  // namespace heddle::kvstore
