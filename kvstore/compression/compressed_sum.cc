#include "kvstore/compression/compressed_sum.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "ops/cast.h"
#include "ops/sum.h"
#include "storage/parallel.h"

namespace heddle::kvstore {

namespace {

// Elements whose codes, values and sums stay in the first-level cache beside the gradients and
// residuals that they come from. All devices of this process share one memory, so codes that have
// been made and read there need not be written out to reach the store.
constexpr std::int64_t kRun = 1024;
constexpr std::int64_t kCodeBytesMax = kRun * 4;  // a code is no longer than the gradient
static_assert(kRun % Compressor::kRunElements == 0);

struct Sender {
  const std::byte* gradient;
  float* residual;
};

}  // namespace

void SumCompressed(std::span<const NDArray> inputs, const Compressor& compressor,
                   std::span<const NDArray> residuals, const NDArray& out) {
  const DType dtype = out.dtype();
  const auto element_bytes = static_cast<std::int64_t>(SizeOf(dtype));
  std::vector<Sender> senders;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    senders.push_back(
        {static_cast<const std::byte*>(inputs[i].const_data()), residuals[i].data<float>()});
  }
  auto* const to = static_cast<std::byte*>(out.data());

  const auto sum_run = [&](std::int64_t begin, std::int64_t end) {
    const auto count = static_cast<std::size_t>(end - begin);
    alignas(64) std::array<std::byte, kCodeBytesMax> code;
    alignas(64) std::array<float, kRun> sum;
    alignas(64) std::array<float, kRun> term;
    for (const Sender& sender : senders) {
      compressor.Compress(dtype, sender.gradient + begin * element_bytes, sender.residual + begin,
                          code.data(), count);
      if (&sender == senders.data()) {
        compressor.Decompress(code.data(), sum.data(), count);
        continue;
      }
      compressor.Decompress(code.data(), term.data(), count);
      const std::array<const void*, 2> both = {sum.data(), term.data()};
      ops::Sum(DType::kFloat32, both, sum.data(), count, ops::StoreMode::kCached);
    }
    ops::Cast(DType::kFloat32, sum.data(), dtype, to + begin * element_bytes, count,
              ops::StoreMode::kCached);
  };
  const auto moved = static_cast<std::int64_t>(inputs.size()) * (element_bytes + 8) + element_bytes;
  storage::ForBlocks(out.engine(), out.size(), moved,
                     [&](std::int64_t begin, std::int64_t end, ops::StoreMode) {
                       for (std::int64_t i = begin; i < end; i += kRun) {
                         sum_run(i, std::min(i + kRun, end));
                       }
                     });
}

void CompressArray(const NDArray& gradient, const Compressor& compressor, float* residual,
                   const NDArray& code) {
  const DType dtype = gradient.dtype();
  const auto element_bytes = static_cast<std::int64_t>(SizeOf(dtype));
  const auto* const from = static_cast<const std::byte*>(gradient.const_data());
  auto* const to = static_cast<std::byte*>(code.data());
  storage::ForBlocks(gradient.engine(), gradient.size(), element_bytes + 8,
                     [&](std::int64_t begin, std::int64_t end, ops::StoreMode) {
                       compressor.Compress(dtype, from + begin * element_bytes, residual + begin,
                                           to + compressor.CodeBytes(begin),
                                           static_cast<std::size_t>(end - begin));
                     });
}

}  // namespace heddle::kvstore
