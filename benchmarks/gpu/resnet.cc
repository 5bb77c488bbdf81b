// The kernels of a training step's traffic on one GPU, with the sizes of ResNet-50's 161
// parameters: the updates of all weights by SGD, and a copy of each. At most 1.2 times the bytes
// over the bandwidth of the device's own copy, plus 16 launches.
#include "benchmarks/support/resnet.h"

#include <heddle/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <fmt/format.h>

#include "base/cuda/check.h"
#include "benchmarks/gpu/sections.h"
#include "benchmarks/gpu/timing.h"
#include "kvstore/optimizer/cuda/update.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/cuda/copy.h"

namespace heddle::bench {

void MeasureGpuResNet(BarReport& report, bool quick) {
  constexpr double kBar = 1.2;
  constexpr int kLaunches = 16;
  constexpr std::size_t kAlignment = 256;
  const std::vector<std::int64_t> sizes = ResNet50();
  std::size_t bytes = 0;
  std::vector<std::size_t> offsets;
  for (std::int64_t size : sizes) {
    offsets.push_back(bytes);
    const std::size_t own = static_cast<std::size_t>(size) * sizeof(float);
    bytes += (own + kAlignment - 1) / kAlignment * kAlignment;
  }
  const GpuMemory weights(bytes);
  const GpuMemory gradients(bytes);
  const GpuMemory outs(bytes);

  internal::KeyUpdate update = {};
  update.learning_rate = 1e-6;
  update.step = 1;
  std::vector<internal::UpdateRun> runs;
  std::vector<ops::CopyTask> copies;
  for (std::size_t key = 0; key < sizes.size(); ++key) {
    internal::UpdateRun run = {};
    run.update = &update;
    run.dtype = DType::kFloat32;
    run.weight = weights.as<char>() + offsets[key];
    run.gradient = gradients.as<char>() + offsets[key];
    run.count = static_cast<std::size_t>(sizes[key]);
    runs.push_back(run);
    copies.push_back({run.weight, outs.as<char>() + offsets[key], run.count * sizeof(float)});
  }
  const auto rule = Sgd()->plan()->rule;
  const auto step = [&](cudaStream_t stream) {
    kvstore::cuda::Update(*rule, runs, 1, nullptr, stream);
    ops::cuda::Copy(copies, stream);
  };
  const auto copy = [&](cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(outs.as<void>(), gradients.as<void>(), bytes,
                               cudaMemcpyDeviceToDevice, stream));
  };
  const ops::CopyTask tiny = {weights.as<void>(), outs.as<void>(), sizeof(float)};
  const auto launch = [&](cudaStream_t stream) { ops::cuda::Copy({&tiny, 1}, stream); };
  const auto seconds = MeasureOnGpu({step, copy, launch}, quick ? 3 : 15, quick ? 2 : 20);
  std::vector<double> limits;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < seconds[0].size(); ++i) {
    // Update: weight read and written, gradient read. Copy: read and written.
    limits.push_back(5.0 / 2 * seconds[1][i] + kLaunches * seconds[2][i]);
    ratios.push_back(seconds[0][i] / limits.back());
  }
  report.Add({{"what", fmt::format("sgd and copies of ResNet-50's {} keys", sizes.size())},
              {"ours", Median(seconds[0]) * 1e6},
              {"unit", "us"},
              {"against", fmt::format("bytes over bandwidth and {} launches", kLaunches)},
              {"limit", Median(limits) * 1e6},
              {"ratio", Median(ratios)},
              {"spread", Spread(ratios)},
              {"bar", fmt::format("<= {:g}", kBar)},
              {"holds", Median(ratios) <= kBar}});
}

}  // namespace heddle::bench
