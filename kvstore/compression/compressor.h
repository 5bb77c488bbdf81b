// How gradients become codes on their way to the store, and back.
#pragma once

#include <heddle/dtype.h>
#include <heddle/gpu.h>
#include <heddle/kvstore.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "ops/gpu_kernels.h"

namespace heddle::kvstore {

// Immutable. What the code could not carry stays in a residual at the sender and is added the next
// time. An array may be compressed in runs that begin at multiples of kRunElements; each run has a
// code of its own, right behind the one before it, and the bits are those of the whole.
// Threads: any; calls on disjoint residuals may run together.
class Compressor {
 public:
  static constexpr std::int64_t kRunElements = 32;

  explicit Compressor(const CompressionOptions& options) : options_(options) {}
  virtual ~Compressor() = default;
  Compressor(const Compressor&) = delete;
  Compressor& operator=(const Compressor&) = delete;

  const CompressionOptions& options() const { return options_; }

  virtual std::int64_t CodeBytes(std::int64_t count) const = 0;
  // gradient: `count` elements of `dtype` (float32, float16 or bfloat16), added to `residual`, from
  // which is taken what `code`, of CodeBytes(count) bytes, says.
  virtual void Compress(DType dtype, const void* gradient, float* residual, void* code,
                        std::size_t count) const = 0;
  virtual void Decompress(const void* code, float* out, std::size_t count) const = 0;

  // Issues on `stream` what Compress does, with arrays that its device reaches.
  virtual void CompressOnGpu(const ops::GpuKernels& kernels, DType dtype, const void* gradient,
                             float* residual, void* code, std::size_t count,
                             GpuStream stream) const = 0;
  // The same for the sum of what codes, one at least, stand for: added in their order in float32,
  // and rounded once to `dtype`. `carry`: as that of an ops::SumTask.
  virtual void SumOnGpu(const ops::GpuKernels& kernels, std::span<const void* const> codes,
                        DType dtype, void* out, float* carry, std::size_t count,
                        GpuStream stream) const = 0;

 private:
  const CompressionOptions options_;
};

// A type as registry.cc lists it.
struct CompressorType {
  std::string_view name;
  // Throws InvalidArgument for options that cannot work; the threshold is finite.
  std::shared_ptr<const Compressor> (*make)(const CompressionOptions& options);
};

// InvalidArgument for an unknown type (listing the known ones; case does not matter) or a threshold
// that it cannot work with.
std::shared_ptr<const Compressor> MakeCompressor(const CompressionOptions& options);

bool IsCompressible(DType dtype);

}  // namespace heddle::kvstore
