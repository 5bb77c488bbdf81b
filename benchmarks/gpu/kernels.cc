// The kernels over arrays of 256 MiB of float32, against the device's own copy of as much: at least
// 90% of its bytes a second, counting what each must read and write.
#include <heddle/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/cuda/check.h"
#include "benchmarks/gpu/sections.h"
#include "benchmarks/gpu/timing.h"
#include "kvstore/optimizer/cuda/update.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/cuda/quantise.h"
#include "ops/cuda/sum.h"
#include "ops/quantise.h"

namespace heddle::bench {
namespace {

constexpr double kBar = 0.9;
constexpr int kArrays = 5;

struct Kernel {
  std::string name;
  double bytes;  // that it must move
  std::function<void(cudaStream_t)> run;
};

void AddBar(const Kernel& kernel, std::size_t array_bytes, int rounds, int repeats,
            const std::function<void(cudaStream_t)>& copy, BarReport& report) {
  const auto seconds = MeasureOnGpu({kernel.run, copy}, rounds, repeats);
  const auto rates = [](const std::vector<double>& times, double bytes) {
    std::vector<double> result;
    for (double time : times) result.push_back(bytes / time / 1e9);
    return result;
  };
  const std::vector<double> ours = rates(seconds[0], kernel.bytes);
  const std::vector<double> limit = rates(seconds[1], 2 * static_cast<double>(array_bytes));
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / limit[i]);
  report.Add({{"what", fmt::format("{}, {}", kernel.name, BytesText(array_bytes))},
              {"ours", Median(ours)},
              {"unit", "GB/s"},
              {"against", "copy on the device"},
              {"limit", Median(limit)},
              {"ratio", Median(ratios)},
              {"spread", Spread(ratios)},
              {"bar", fmt::format(">= {:g}", kBar)},
              {"holds", Median(ratios) >= kBar}});
}

}  // namespace

void MeasureGpuKernels(BarReport& report, bool quick) {
  const std::size_t bytes = std::size_t{quick ? 16U : 256U} << 20;
  const std::size_t count = bytes / sizeof(float);
  std::vector<GpuMemory> arrays;
  for (int i = 0; i < kArrays; ++i) arrays.emplace_back(bytes);
  const GpuMemory code(ops::TwoBitCodeBytes(count));
  const auto array = [&](int i) { return arrays[static_cast<std::size_t>(i)].as<float>(); };

  internal::KeyUpdate update = {};
  update.learning_rate = 1e-6;
  update.step = 1;
  internal::UpdateRun run = {};
  run.update = &update;
  run.dtype = DType::kFloat32;
  run.weight = array(0);
  run.gradient = array(1);
  run.states = {array(2), array(3), nullptr, nullptr};
  run.count = count;
  const auto sgd = Sgd({.momentum = 0.9F})->plan()->rule;
  const auto adam = Adam()->plan()->rule;
  internal::UpdateRun sgd_run = run;
  sgd_run.states[1] = nullptr;

  const std::vector<const void*> inputs = {array(0), array(1), array(2), array(3)};
  const ops::SumTask sum = {inputs, array(4), count};
  const ops::cuda::QuantiseTask quantise = {array(0), array(1), code.as<void>(), count};
  const ops::cuda::DequantiseTask dequantise = {code.as<void>(), array(0), count};
  const double one = static_cast<double>(bytes);
  const double codes = static_cast<double>(code.bytes());
  const std::vector<Kernel> kernels = {
      {"sum of 4", 5 * one,
       [&](auto s) {
         ops::cuda::Sum(DType::kFloat32, {&sum, 1}, s);
       }},
      {"sgd with momentum", 5 * one,
       [&](auto s) {
         kvstore::cuda::Update(*sgd, {&sgd_run, 1}, {1, 0, 1}, nullptr, s);
       }},
      {"adam", 7 * one,
       [&](auto s) {
         kvstore::cuda::Update(*adam, {&run, 1}, {1, 0, 1}, nullptr, s);
       }},
      {"two-bit codes", 3 * one + codes,
       [&](auto s) {
         ops::cuda::QuantiseTwoBit(0.5F, DType::kFloat32, {&quantise, 1}, s);
       }},
      {"two-bit codes back", one + codes,
       [&](auto s) {
         ops::cuda::DequantiseTwoBit(0.5F, {&dequantise, 1}, s);
       }},
  };
  const auto copy = [&](cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(array(4), array(3), bytes, cudaMemcpyDeviceToDevice, stream));
  };
  for (const Kernel& kernel : kernels) {
    AddBar(kernel, bytes, quick ? 3 : 15, quick ? 2 : 10, copy, report);
  }
}

}  // namespace heddle::bench
