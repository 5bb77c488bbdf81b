// Quantising with residual, and back, 64 KiB to 64 MiB of float32 gradients: at least 85% of the
// roofline. One thread. Quantising reads gradient and residual and writes residual and code;
// the way back reads code and writes values.
#include "ops/quantise.h"

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/kernels/sections.h"
#include "benchmarks/support/roofline.h"

namespace heddle::bench {
namespace {

constexpr float kThreshold = 0.5F;

void MeasureSize(int bits, std::size_t bytes, int rounds, BarReport& report) {
  const std::size_t count = bytes / sizeof(float);
  const Memory gradient(bytes);
  const Memory residual(bytes);
  const Memory code(bits == 2 ? ops::TwoBitCodeBytes(count) : ops::OneBitCodeBytes(count));
  const Memory values(bytes);
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (std::size_t i = 0; i < count; ++i) gradient.as<float>()[i] = uniform(random);

  using Use = Stream::Use;
  MeasureKernel({.what = fmt::format("{}-bit quantise with residual, {}", bits, BytesText(bytes)),
                 .count = count,
                 .places = {{.streams = {{gradient.data(), bytes, Use::kRead},
                                         {residual.data(), bytes, Use::kUpdate},
                                         {code.data(), code.bytes(), Use::kWrite}},
                             .run =
                                 [&](std::size_t elements) {
                                   (bits == 2 ? &ops::QuantiseTwoBit : &ops::QuantiseOneBit)(
                                       kThreshold, DType::kFloat32, gradient.data(),
                                       residual.as<float>(), code.data(), elements);
                                 }}}},
                rounds, report);
  MeasureKernel({.what = fmt::format("{}-bit dequantise, {}", bits, BytesText(bytes)),
                 .count = count,
                 .places = {{.streams = {{code.data(), code.bytes(), Use::kRead},
                                         {values.data(), bytes, Use::kWrite}},
                             .run =
                                 [&](std::size_t elements) {
                                   if (bits == 2) {
                                     ops::DequantiseTwoBit(kThreshold, code.data(),
                                                           values.as<float>(), elements);
                                   } else {
                                     ops::DequantiseOneBit(code.data(), values.as<float>(),
                                                           elements);
                                   }
                                 }}}},
                rounds, report);
}

}  // namespace

void MeasureQuantise(BarReport& report, bool quick) {
  const std::vector<std::size_t> sizes_kib =
      quick ? std::vector<std::size_t>{64, 4096}
            : std::vector<std::size_t>{64, 256, 1024, 4096, 16384, 65536};
  for (const int bits : {2, 1}) {
    for (const std::size_t kib : sizes_kib) MeasureSize(bits, kib << 10, quick ? 1 : 5, report);
  }
}

}  // namespace heddle::bench
