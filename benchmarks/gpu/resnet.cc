// A training step's traffic on one GPU, with the sizes of ResNet-50's 161 parameters: the updates
// of all weights by SGD, and a copy of each; the kernels alone, and push and pull of a store of
// type "device". Each at most 1.2 times the bytes over the bandwidth of the device's own copy, plus
// 16 launches.
#include "benchmarks/support/resnet.h"

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/cuda/check.h"
#include "benchmarks/gpu/sections.h"
#include "benchmarks/gpu/timing.h"
#include "kvstore/optimizer/cuda/update.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/cuda/copy.h"

namespace heddle::bench {

namespace {

// Of one step, round by round: `repeats` steps are queued, as a training loop that runs ahead of
// its GPU does, and waited for.
std::vector<double> StoreSeconds(const std::vector<std::int64_t>& sizes, int rounds, int repeats) {
  Engine engine(EngineOptions::FromEnvironment());
  const auto store = KVStore::Create("device", engine);
  std::vector<Key> keys;
  std::vector<NDArray> values, gradients, outs;
  for (const std::int64_t size : sizes) {
    keys.emplace_back(static_cast<std::int64_t>(keys.size()));
    for (auto* const arrays : {&values, &gradients, &outs}) {
      arrays->push_back(NDArray::Full({size}, 0.5, DType::kFloat32, Gpu(0), engine));
    }
  }
  store->Init(keys, values);
  store->SetOptimizer(Sgd({.learning_rate = 1e-6F}));
  std::vector<double> seconds;
  for (int round = -1; round < rounds; ++round) {  // the first does not count
    const auto started = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) {
      store->Push(keys, gradients);
      store->Pull(keys, outs);
    }
    engine.WaitForAll();
    const std::chrono::duration<double> all = std::chrono::steady_clock::now() - started;
    if (round >= 0) seconds.push_back(all.count() / repeats);
  }
  return seconds;
}

}  // namespace

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
    kvstore::cuda::Update(*rule, runs, {1, 0, 1}, nullptr, stream);
    ops::cuda::Copy(copies, stream);
  };
  const auto copy = [&](cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(outs.as<void>(), gradients.as<void>(), bytes,
                               cudaMemcpyDeviceToDevice, stream));
  };
  const ops::CopyTask tiny = {weights.as<void>(), outs.as<void>(), sizeof(float)};
  const auto launch = [&](cudaStream_t stream) { ops::cuda::Copy({&tiny, 1}, stream); };
  const int rounds = quick ? 3 : 15;
  const int repeats = quick ? 2 : 20;
  const auto seconds = MeasureOnGpu({step, copy, launch}, rounds, repeats);
  std::vector<double> limits;
  for (std::size_t i = 0; i < seconds[0].size(); ++i) {
    // Update: weight read and written, gradient read. Copy: read and written.
    limits.push_back(5.0 / 2 * seconds[1][i] + kLaunches * seconds[2][i]);
  }
  const auto add = [&](const std::string& what, const std::vector<double>& ours) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / limits[i]);
    report.Add({{"what", fmt::format("{} of ResNet-50's {} keys", what, sizes.size())},
                {"ours", Median(ours) * 1e6},
                {"unit", "us"},
                {"against", fmt::format("bytes over bandwidth and {} launches", kLaunches)},
                {"limit", Median(limits) * 1e6},
                {"ratio", Median(ratios)},
                {"spread", Spread(ratios)},
                {"bar", fmt::format("<= {:g}", kBar)},
                {"holds", Median(ratios) <= kBar}});
  };
  add("sgd and copies", seconds[0]);
  add("push and pull, device, sgd,", StoreSeconds(sizes, rounds, repeats));
}

}  // namespace heddle::bench
