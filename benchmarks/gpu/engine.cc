// What the engine adds to GPU work: the time of an op over that of a bare launch, what steps make
// afresh, and whether copies in, kernels and copies out run beside each other.
//
// Bars: an op takes at most 1 us more than a launch; a step that has run before makes no stream,
// event or memory; a pipeline of copies in, kernels and copies out takes at most 1.1 times the
// longest of the three alone.
#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/cuda/check.h"
#include "benchmarks/gpu/sections.h"
#include "benchmarks/gpu/timing.h"
#include "engine/gpu/driver.h"
#include "ops/cuda/copy.h"

namespace heddle::bench {
namespace {

using internal::GpuDriver;

// CUDA's driver, which counts what is made on devices.
class CountingDriver final : public GpuDriver {
 public:
  std::int64_t made() const { return made_; }

  int device_count() const override { return driver_.device_count(); }
  std::string WhyNoGpu(int id) const override { return driver_.WhyNoGpu(id); }
  std::string UniqueName(int device) const override { return driver_.UniqueName(device); }
  Context Enter(int device) override { return driver_.Enter(device); }
  void Leave(Context outer) noexcept override { driver_.Leave(outer); }
  Stream NewStream(bool urgent, int priority) override {
    ++made_;
    return driver_.NewStream(urgent, priority);
  }
  Event NewEvent() override {
    ++made_;
    return driver_.NewEvent();
  }
  void Free(int device, Stream stream) noexcept override { driver_.Free(device, stream); }
  void FreeEvent(int device, Event event) noexcept override { driver_.FreeEvent(device, event); }
  void Record(Event event, Stream stream) override { driver_.Record(event, stream); }
  void Wait(Stream stream, Event event) override { driver_.Wait(stream, event); }
  State Query(Event event) noexcept override { return driver_.Query(event); }
  void AwaitAll(int device) noexcept override {
    ++made_;
    driver_.AwaitAll(device);
  }
  void CheckLaunches() override { driver_.CheckLaunches(); }
  void* AllocateDevice(int device, std::int64_t bytes) override {
    ++made_;
    return driver_.AllocateDevice(device, bytes);
  }
  void FreeDevice(int device, void* block) noexcept override { driver_.FreeDevice(device, block); }
  void TrimDevice(int device) noexcept override { driver_.TrimDevice(device); }
  void* AllocatePinned(int near, std::int64_t bytes) override {
    ++made_;
    return driver_.AllocatePinned(near, bytes);
  }
  void FreePinned(int near, void* block) noexcept override { driver_.FreePinned(near, block); }
  bool EnablePeer(int device, int peer) override { return driver_.EnablePeer(device, peer); }
  internal::GpuLink LinkOf(int device, int peer) noexcept override {
    return driver_.LinkOf(device, peer);
  }
  void Copy(Stream stream, void* to, const void* from, std::int64_t bytes) override {
    driver_.Copy(stream, to, from, bytes);
  }
  void CopyPeer(Stream stream, int to_device, void* to, int from_device, const void* from,
                std::int64_t bytes) override {
    driver_.CopyPeer(stream, to_device, to, from_device, from, bytes);
  }

 private:
  GpuDriver& driver_ = *internal::DefaultGpuDriver();
  std::atomic<std::int64_t> made_{0};
};

double SecondsOf(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Ours against a limit, a pair a round.
void AddBar(BarReport& report, const std::string& what, const std::string& against,
            const std::vector<double>& ours, const std::vector<double>& limits, double scale,
            const char* unit, double bar) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / limits[i]);
  report.Add({{"what", what},
              {"ours", Median(ours) * scale},
              {"unit", unit},
              {"against", against},
              {"limit", Median(limits) * scale},
              {"ratio", Median(ratios)},
              {"spread", Spread(ratios)},
              {"bar", fmt::format("<= {:g}", bar)},
              {"holds", Median(ratios) <= bar}});
}

void MeasureOps(BarReport& report, bool quick) {
  constexpr double kOverhead = 1e-6;
  const int rounds = quick ? 3 : 15;
  const int ops = quick ? 1000 : 20000;
  const auto driver = std::make_shared<CountingDriver>();
  EngineOptions options = EngineOptions::FromEnvironment();
  options.gpu_driver = driver;
  Engine engine(options);
  const GpuMemory memory(2 * sizeof(float));
  const ops::CopyTask tiny = {memory.as<float>(), memory.as<float>() + 1, sizeof(float)};
  std::vector<Var> vars;
  for (int i = 0; i < 64; ++i) vars.push_back(engine.NewVar());
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

  const auto bare = [&] {
    for (int i = 0; i < ops; ++i) ops::cuda::Copy({&tiny, 1}, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
  };
  const auto push = [&](std::size_t distinct) {
    for (int i = 0; i < ops; ++i) {
      const Var& var = vars[static_cast<std::size_t>(i) % distinct];
      engine.PushGpu({.name = "tiny", .reads = {var}, .writes = {var}, .device = Gpu(0)},
                     [&tiny](GpuStream on) {
                       ops::cuda::Copy({&tiny, 1}, static_cast<cudaStream_t>(on.handle));
                     });
    }
    engine.WaitForAll();
  };
  std::vector<double> limits, chain, independent;
  std::int64_t made_before = 0;
  for (int round = -1; round < rounds; ++round) {
    if (round == 0) made_before = driver->made();
    const double one = SecondsOf(bare) / ops;
    const double in_chain = SecondsOf([&] { push(1); }) / ops;
    const double alone = SecondsOf([&] { push(vars.size()); }) / ops;
    if (round < 0) continue;
    limits.push_back(one + kOverhead);
    chain.push_back(in_chain);
    independent.push_back(alone);
  }
  CUDA_CHECK(cudaStreamDestroy(stream));
  AddBar(report, "an op of a chain", "a bare launch and 1 us", chain, limits, 1e6, "us", 1);
  AddBar(report, "an independent op", "a bare launch and 1 us", independent, limits, 1e6, "us", 1);
  const auto made = static_cast<double>(driver->made() - made_before);
  report.Add({{"what", fmt::format("streams, events and memory made by {} ops", 2 * rounds * ops)},
              {"ours", made},
              {"unit", "made"},
              {"against", "limit"},
              {"limit", 0},
              {"ratio", made},
              {"spread", Spread({made})},
              {"bar", "0"},
              {"holds", made == 0}});
}

void MeasureOverlap(BarReport& report, bool quick) {
  constexpr double kBar = 1.1;
  constexpr int kKernels = 16;  // a chunk: about as long as its copies
  const int rounds = quick ? 3 : 9;
  const std::size_t chunks = quick ? 8 : 64;
  const std::int64_t count = std::int64_t{8} << 20 >> 2;
  Engine engine(EngineOptions::FromEnvironment());
  std::vector<NDArray> in, on_gpu, out;
  for (std::size_t i = 0; i < chunks; ++i) {
    in.push_back(NDArray::Full({count}, 1, DType::kFloat32, CpuPinned(0), engine));
    on_gpu.push_back(NDArray::Full({count}, 1, DType::kFloat32, Gpu(0), engine));
    out.push_back(NDArray::Full({count}, 1, DType::kFloat32, CpuPinned(0), engine));
  }
  const auto copy_in = [&](std::size_t i) { in[i].CopyTo(on_gpu[i]); };
  const auto compute = [&](std::size_t i) {
    for (int kernel = 0; kernel < kKernels; ++kernel) on_gpu[i] += 1;
  };
  const auto copy_out = [&](std::size_t i) { on_gpu[i].CopyTo(out[i]); };
  const auto all = [&](const std::function<void(std::size_t)>& step) {
    return SecondsOf([&] {
      for (std::size_t i = 0; i < chunks; ++i) step(i);
      engine.WaitForAll();
    });
  };
  std::vector<double> together, longest;
  for (int round = -1; round < rounds; ++round) {
    const double alone = std::max({all(copy_in), all(compute), all(copy_out)});
    const double piped = all([&](std::size_t i) {
      copy_in(i);
      compute(i);
      copy_out(i);
    });
    if (round < 0) continue;
    longest.push_back(alone);
    together.push_back(piped);
  }
  AddBar(report, fmt::format("{} times 8 MiB in, {} kernels, out", chunks, kKernels),
         "the longest alone", together, longest, 1e3, "ms", kBar);
}

}  // namespace

void MeasureGpuEngine(BarReport& report, bool quick) {
  MeasureOps(report, quick);
  MeasureOverlap(report, quick);
}

}  // namespace heddle::bench
