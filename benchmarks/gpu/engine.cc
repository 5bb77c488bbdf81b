// What the engine adds to GPU work: the time of an op over that of a bare launch, what steps make
// afresh, and whether copies in, kernels and copies out run beside each other.
//
// Bars: an op takes at most 1 us more than CUDA takes bare; push and wait at most twice as long as
// launch and synchronise; a step that has run before makes no stream, event or memory, and waits
// for no device; a pipeline of copies in, kernels and copies out takes at most 1.1 times the
// longest of the three alone.
#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <algorithm>
#include <array>
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
  const int waits = ops / 10;
  const auto driver = std::make_shared<CountingDriver>();
  EngineOptions options = EngineOptions::FromEnvironment();
  options.gpu_driver = driver;
  Engine engine(options);
  const GpuMemory memory(2 * sizeof(float));
  const ops::CopyTask tiny = {memory.as<float>(), memory.as<float>() + 1, sizeof(float)};
  std::vector<Var> vars;
  for (int i = 0; i < 64; ++i) vars.push_back(engine.NewVar());
  std::array<cudaStream_t, 2> streams = {};
  std::array<cudaEvent_t, 2> events = {};
  for (cudaStream_t& one : streams) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  }
  for (cudaEvent_t& event : events) {
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  const cudaStream_t stream = streams[0];

  const auto bare = [&] {
    for (int i = 0; i < ops; ++i) ops::cuda::Copy({&tiny, 1}, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
  };
  const auto push_one = [&](const Var& var, Lane lane) {
    engine.PushGpu(
        {.name = "tiny", .reads = {var}, .writes = {var}, .device = Gpu(0), .lane = lane},
        [&tiny](GpuStream on) {
          ops::cuda::Copy({&tiny, 1}, static_cast<cudaStream_t>(on.handle));
        });
  };
  const auto push = [&](std::size_t distinct) {
    for (int i = 0; i < ops; ++i) {
      push_one(vars[static_cast<std::size_t>(i) % distinct], Lane::kNormal);
    }
    engine.WaitForAll();
  };
  // Each op waits for the one before it, on the other stream.
  const auto bare_across = [&] {
    for (int i = 0; i < ops; ++i) {
      const std::size_t on = static_cast<std::size_t>(i) % 2;
      CUDA_CHECK(cudaStreamWaitEvent(streams[on], events[1 - on], 0));
      ops::cuda::Copy({&tiny, 1}, streams[on]);
      CUDA_CHECK(cudaEventRecord(events[on], streams[on]));
    }
    for (const cudaStream_t one : streams) CUDA_CHECK(cudaStreamSynchronize(one));
  };
  const auto push_across = [&] {
    for (int i = 0; i < ops; ++i) push_one(vars[0], i % 2 == 0 ? Lane::kNormal : Lane::kCopy);
    engine.WaitForAll();
  };
  const auto bare_and_wait = [&] {
    for (int i = 0; i < waits; ++i) {
      ops::cuda::Copy({&tiny, 1}, stream);
      CUDA_CHECK(cudaStreamSynchronize(stream));
    }
  };
  const auto push_and_wait = [&] {
    for (int i = 0; i < waits; ++i) {
      push_one(vars[0], Lane::kNormal);
      engine.WaitForVar(vars[0]);
    }
  };
  std::vector<double> limits, chain, independent, across_limits, across, wait_limits, wait;
  std::int64_t made_before = 0;
  for (int round = -1; round < rounds; ++round) {
    if (round == 0) made_before = driver->made();
    const double one = SecondsOf(bare) / ops;
    const double in_chain = SecondsOf([&] { push(1); }) / ops;
    const double alone = SecondsOf([&] { push(vars.size()); }) / ops;
    const double one_across = SecondsOf(bare_across) / ops;
    const double in_chain_across = SecondsOf(push_across) / ops;
    const double one_and_wait = SecondsOf(bare_and_wait) / waits;
    const double pushed_and_waited = SecondsOf(push_and_wait) / waits;
    if (round < 0) continue;
    across_limits.push_back(one_across + kOverhead);
    across.push_back(in_chain_across);
    wait_limits.push_back(one_and_wait);
    wait.push_back(pushed_and_waited);
    limits.push_back(one + kOverhead);
    chain.push_back(in_chain);
    independent.push_back(alone);
  }
  for (const cudaEvent_t event : events) CUDA_CHECK(cudaEventDestroy(event));
  for (const cudaStream_t one : streams) CUDA_CHECK(cudaStreamDestroy(one));
  AddBar(report, "an op of a chain", "a bare launch and 1 us", chain, limits, 1e6, "us", 1);
  AddBar(report, "an independent op", "a bare launch and 1 us", independent, limits, 1e6, "us", 1);
  AddBar(report, "an op of a chain over two streams", "launch, event and wait, and 1 us", across,
         across_limits, 1e6, "us", 1);
  AddBar(report, "push and wait", "launch and synchronise", wait, wait_limits, 1e6, "us", 2);
  const auto made = static_cast<double>(driver->made() - made_before);
  const int counted = rounds * (3 * ops + waits);
  report.Add(
      {{"what", fmt::format("streams, events and memory made, and waits for the device, by {} "
                            "ops",
                            counted)},
       {"ours", made},
       {"unit", "made"},
       {"against", "limit"},
       {"limit", 0},
       {"ratio", made},
       {"spread", Spread({made})},
       {"bar", "0"},
       {"holds", made == 0}});
}

// Copies in, `kernels` and copies out of 8 MiB at a time, against the longest of the three alone.
// Copies of both directions together take longer than one alone, whoever makes them: the second
// line shows what is beyond that.
void MeasureOverlap(BarReport& report, int kernels, bool quick) {
  constexpr double kBar = 1.1;
  const int rounds = quick ? 3 : 9;
  const std::size_t chunks = quick ? 8 : 64;
  constexpr std::int64_t kBytes = std::int64_t{8} << 20;
  constexpr std::int64_t kCount = kBytes >> 2;
  Engine engine(EngineOptions::FromEnvironment());
  std::vector<NDArray> in, on_gpu, out;
  for (std::size_t i = 0; i < chunks; ++i) {
    in.push_back(NDArray::Full({kCount}, 1, DType::kFloat32, CpuPinned(0), engine));
    on_gpu.push_back(NDArray::Full({kCount}, 1, DType::kFloat32, Gpu(0), engine));
    out.push_back(NDArray::Full({kCount}, 1, DType::kFloat32, CpuPinned(0), engine));
  }
  engine.WaitForAll();
  std::array<cudaStream_t, 2> streams = {};
  for (cudaStream_t& one : streams) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  }
  const auto bare_copies = [&] {
    for (std::size_t i = 0; i < chunks; ++i) {
      CUDA_CHECK(
          cudaMemcpyAsync(on_gpu[i].data(), in[i].data(), kBytes, cudaMemcpyDefault, streams[0]));
      CUDA_CHECK(
          cudaMemcpyAsync(out[i].data(), on_gpu[i].data(), kBytes, cudaMemcpyDefault, streams[1]));
    }
    for (const cudaStream_t one : streams) CUDA_CHECK(cudaStreamSynchronize(one));
  };
  const auto copy_in = [&](std::size_t i) { in[i].CopyTo(on_gpu[i]); };
  const auto compute = [&](std::size_t i) {
    for (int kernel = 0; kernel < kernels; ++kernel) on_gpu[i] += 1;
  };
  const auto copy_out = [&](std::size_t i) { on_gpu[i].CopyTo(out[i]); };
  const auto all = [&](const std::function<void(std::size_t)>& step) {
    return SecondsOf([&] {
      for (std::size_t i = 0; i < chunks; ++i) step(i);
      engine.WaitForAll();
    });
  };
  std::vector<double> together, longest, both_ways;
  for (int round = -1; round < rounds; ++round) {
    const double kernels_alone = all(compute);
    const double alone = std::max({all(copy_in), kernels_alone, all(copy_out)});
    const double both = std::max(SecondsOf(bare_copies), kernels_alone);
    const double piped = all([&](std::size_t i) {
      copy_in(i);
      compute(i);
      copy_out(i);
    });
    if (round < 0) continue;
    longest.push_back(alone);
    both_ways.push_back(both);
    together.push_back(piped);
  }
  for (const cudaStream_t one : streams) CUDA_CHECK(cudaStreamDestroy(one));
  const std::string what = fmt::format("{} times 8 MiB in, {} kernels, out", chunks, kernels);
  AddBar(report, what, "the longest alone", together, longest, 1e3, "ms", kBar);
  AddBar(report, what, "bare copies both ways, or the kernels", together, both_ways, 1e3, "ms",
         kBar);
}

}  // namespace

void MeasureGpuEngine(BarReport& report, bool quick) {
  MeasureOps(report, quick);
  MeasureOverlap(report, /*kernels=*/4, quick);   // about half as long as the copies
  MeasureOverlap(report, /*kernels=*/48, quick);  // longer
}

}  // namespace heddle::bench
