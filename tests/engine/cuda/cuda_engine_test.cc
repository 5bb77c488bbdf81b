// GPU ops on the GPUs of this machine. gpu_test.cc has what simulated ones can show. What spoils a
// device, or ends a process, runs in a process of its own.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/cuda/check.h"
#include "base/gpus.h"
#include "tests/base/cuda/has_context.h"
#include "tests/engine/cuda/kernels.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle::engine_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

cudaStream_t AsStream(GpuStream stream) { return static_cast<cudaStream_t>(stream.handle); }

// tools/gpu.sh runs the tests under compute-sanitizer.
bool Checked() { return std::getenv("HEDDLE_TEST_COMPUTE_SANITIZER") != nullptr; }

// Waits for what another thread brings about.
[[nodiscard]] bool Soon(const std::function<bool()>& holds) {
  const auto deadline = std::chrono::steady_clock::now() + kSoon;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Ints in pinned memory, which kernels reach and the host may look at meanwhile.
class PinnedInts {
 public:
  explicit PinnedInts(std::size_t count) : size_(count) {
    void* block = nullptr;
    CUDA_CHECK(cudaHostAlloc(&block, count * sizeof(int), cudaHostAllocMapped));
    values_ = static_cast<int*>(block);
    std::fill_n(values_, count, 0);
  }
  ~PinnedInts() { LogIfFailed(cudaFreeHost(values_), "cudaFreeHost"); }
  PinnedInts(const PinnedInts&) = delete;
  PinnedInts& operator=(const PinnedInts&) = delete;

  int* at(std::size_t i) const { return values_ + i; }
  int Load(std::size_t i) const { return std::atomic_ref<int>(values_[i]).load(); }
  void Store(std::size_t i, int value) const { std::atomic_ref<int>(values_[i]).store(value); }
  std::size_t size() const { return size_; }

 private:
  int* values_ = nullptr;
  std::size_t size_;
};

// One in the memory of gpu(0).
class DeviceInt {
 public:
  DeviceInt() {
    CUDA_CHECK(cudaMalloc(&value_, sizeof(int)));
    CUDA_CHECK(cudaMemset(value_, 0, sizeof(int)));
  }
  ~DeviceInt() { LogIfFailed(cudaFree(value_), "cudaFree"); }
  DeviceInt(const DeviceInt&) = delete;
  DeviceInt& operator=(const DeviceInt&) = delete;

  int* at() const { return static_cast<int*>(value_); }
  int Load() const {
    int value = 0;
    CUDA_CHECK(cudaMemcpy(&value, value_, sizeof(int), cudaMemcpyDeviceToHost));
    return value;
  }

 private:
  void* value_ = nullptr;
};

class CudaEngine : public testing::Test {
 protected:
  void SetUp() override {
    if (GpuCount() == 0) GTEST_SKIP() << WhyNoGpu(0);
  }
};
class CudaEngineChild : public CudaEngine {
 protected:
  void SetUp() override {
    if (!InChild()) GTEST_SKIP() << "runs in a child process";
    CudaEngine::SetUp();
  }
};

// CUDA loads a kernel when it is first launched, and may wait for the device then.
void LoadKernels() {
  const PinnedInts ints(2);
  ints.Store(0, 1);
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  LaunchAwaitFlag(ints.at(0), stream);
  LaunchSlowIncrement(ints.at(1), 0, stream);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_F(CudaEngine, OpsAreIssuedBehindWorkThatIsNotDoneAndRunAfterIt) {
  LoadKernels();
  const PinnedInts ints(2);  // the flag, a copy of the sum
  const DeviceInt sum;
  Engine engine;
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  std::atomic<int> issued = 0;
  std::atomic<bool> host_ran = false;
  engine.PushGpu({.name = "wait", .writes = {x}, .device = Gpu(0)}, [&](GpuStream stream) {
    LaunchAwaitFlag(ints.at(0), AsStream(stream));
    LaunchSlowIncrement(sum.at(), 0, AsStream(stream));
    ++issued;
  });
  engine.PushGpu(
      {.name = "copy", .reads = {x}, .writes = {y}, .device = Gpu(0), .lane = Lane::kCopyOut},
      [&](GpuStream stream) {
        CUDA_CHECK(cudaMemcpyAsync(ints.at(1), sum.at(), sizeof(int), cudaMemcpyDefault,
                                   AsStream(stream)));
        ++issued;
      });
  engine.PushGpu({.name = "add", .reads = {y}, .writes = {x}, .device = Gpu(0)},
                 [&](GpuStream stream) {
                   LaunchSlowIncrement(sum.at(), 0, AsStream(stream));
                   ++issued;
                 });
  int seen_copy = -1;
  engine.Push({.name = "host", .reads = {y}, .writes = {z}}, [&] {
    seen_copy = ints.Load(1);
    host_ran = true;
  });
  ASSERT_TRUE(Soon([&] { return issued == 3; })) << issued << " of 3 bodies have run";
  EXPECT_FALSE(host_ran);
  EXPECT_EQ(engine.version(z), 0u);
  ints.Store(0, 1);
  engine.WaitForAll();
  EXPECT_EQ(seen_copy, 1);
  EXPECT_EQ(sum.Load(), 2);
  EXPECT_EQ(engine.version(x), 2u);
  EXPECT_EQ(engine.version(y), 1u);
}

TEST_F(CudaEngine, SoManyOpsAreIssuedAheadAndTheMostUrgentNext) {
  LoadKernels();
  const PinnedInts ints(2);
  EngineOptions options;
  options.gpu.issued_ahead = 3;
  Engine engine(options);
  std::mutex mutex;
  std::vector<int> order;
  const auto push = [&](int priority) {
    engine.PushGpu({.name = "op", .device = Gpu(0), .priority = priority}, [&, priority](auto on) {
      LaunchAwaitFlag(ints.at(0), AsStream(on));
      const std::lock_guard lock(mutex);
      order.push_back(priority);
    });
  };
  const auto issued = [&] {
    const std::lock_guard lock(mutex);
    return order.size();
  };
  for (const int priority : {-9, -9, -9}) push(priority);
  ASSERT_TRUE(Soon([&] { return issued() == 3; }));
  for (const int priority : {-8, -2, -5, -1, -7}) push(priority);
  // Time enough for a fourth to be issued, were it.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(issued(), 3u);
  ints.Store(0, 1);
  engine.WaitForAll();
  EXPECT_THAT(order, ElementsAre(-9, -9, -9, -1, -2, -5, -7, -8));
}

// Increments that would be lost if two of one variable overlapped, on random lanes and variables,
// with ops of the CPU between.
TEST_F(CudaEngine, RandomOpsOnAllLanesRunOneByOneOnTheirVariables) {
  std::mt19937 random(static_cast<unsigned>(BaseSeed()));
  SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}", BaseSeed()));
  constexpr std::size_t kVars = 8;
  const PinnedInts ints(kVars);
  Engine engine;
  std::vector<Var> vars;
  for (std::size_t i = 0; i < kVars; ++i) vars.push_back(engine.NewVar());
  std::vector<int> expected(kVars, 0);
  const int ops = 4000 * Rounds(1);
  for (int i = 0; i < ops; ++i) {
    const std::size_t to = random() % kVars;
    const std::size_t other = random() % kVars;
    ++expected[to];
    const OpOptions on_cpu = {
        .name = "add", .reads = {vars[to], vars[other]}, .writes = {vars[to]}};
    if (random() % 4 == 0) {
      engine.Push(on_cpu, [&ints, to] { ints.Store(to, ints.Load(to) + 1); });
      continue;
    }
    OpOptions on_gpu = on_cpu;
    on_gpu.device = Gpu(static_cast<int>(random() % static_cast<unsigned>(GpuCount())));
    on_gpu.lane =
        std::vector{Lane::kNormal, Lane::kCopy, Lane::kCopyOut, Lane::kComm}[random() % 4];
    on_gpu.priority = static_cast<int>(random() % 5) - 2;
    engine.PushGpu(on_gpu, [&ints, to, us = static_cast<int>(random() % 20)](GpuStream stream) {
      LaunchSlowIncrement(ints.at(to), us, AsStream(stream));
    });
  }
  engine.WaitForAll();
  for (std::size_t i = 0; i < kVars; ++i) {
    EXPECT_EQ(ints.Load(i), expected[i]);
    EXPECT_EQ(engine.version(vars[i]), static_cast<std::uint64_t>(expected[i]));
  }
}

TEST_F(CudaEngine, ALaunchThatFailsPoisonsWhatComesAfterAndTheDeviceGoesOn) {
  if (Checked()) GTEST_SKIP() << "compute-sanitizer reports the launch";
  const PinnedInts ints(1);
  LaunchTooManyThreads(nullptr);
  const cudaError_t error = cudaGetLastError();  // which one depends on CUDA's version
  ASSERT_NE(error, cudaSuccess);
  Engine engine;
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  std::atomic<bool> ran = false;
  engine.PushGpu({.name = "launch", .writes = {x}, .device = Gpu(0)},
                 [](GpuStream stream) { LaunchTooManyThreads(AsStream(stream)); });
  engine.PushGpu({.name = "after", .reads = {x}, .writes = {y}, .device = Gpu(0)},
                 [&](GpuStream) { ran = true; });
  const std::string said = MessageOf<CudaError>([&] { engine.WaitForVar(y); });
  EXPECT_THAT(said, HasSubstr(DescribeCudaError(error)));
  ASSERT_TRUE(engine.FailureOf(y));
  EXPECT_EQ(engine.FailureOf(y)->op, "launch");
  EXPECT_FALSE(ran);
  engine.PushGpu({.name = "next", .writes = {z}, .device = Gpu(0)},
                 [&](GpuStream stream) { LaunchSlowIncrement(ints.at(0), 0, AsStream(stream)); });
  engine.WaitForVar(z);
  EXPECT_EQ(ints.Load(0), 1);
}

// What torch.cuda.graph does, while ops run, streams, events and memory are made, and copies
// staged.
TEST_F(CudaEngine, CapturesOfTheProgramGoOnBeside) {
  LoadKernels();
  const PinnedInts ints(2);
  cudaStream_t captured = nullptr;
  CUDA_CHECK(cudaSetDevice(0));
  CUDA_CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
  LaunchSlowIncrement(ints.at(0), 0, captured);
  std::thread([&] {
    Engine engine;
    const Var x = engine.NewVar("x");
    for (const Lane lane : {Lane::kNormal, Lane::kCopy, Lane::kCopyOut, Lane::kComm}) {
      engine.PushGpu(
          {.name = "add", .reads = {x}, .writes = {x}, .device = Gpu(0), .lane = lane},
          [&](GpuStream stream) { LaunchSlowIncrement(ints.at(1), 0, AsStream(stream)); });
    }
    const std::vector<float> values(3 << 20, 2.5F);
    const NDArray host = NDArray::FromVector(values, {3 << 20}, DType::kFloat32, Cpu(), engine);
    const NDArray on_gpu = host.Copy(Gpu(0));
    EXPECT_EQ((on_gpu + on_gpu).ToVector<float>(), std::vector<float>(3 << 20, 5.0F));
    engine.WaitForAll();
  }).join();
  EXPECT_EQ(ints.Load(1), 4);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
  cudaGraphExec_t ready = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  EXPECT_EQ(ints.Load(0), 0);
  CUDA_CHECK(cudaGraphLaunch(ready, captured));
  CUDA_CHECK(cudaStreamSynchronize(captured));
  EXPECT_EQ(ints.Load(0), 1);
  CUDA_CHECK(cudaGraphExecDestroy(ready));
  CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaStreamDestroy(captured));
}

TEST_F(CudaEngineChild, AnErrorOfTheDevice) {
  Engine engine;
  const Var x = engine.NewVar("x"), y = engine.NewVar("y"), z = engine.NewVar("z");
  std::atomic<bool> ran = false;
  engine.PushGpu({.name = "illegal", .writes = {x}, .device = Gpu(0)},
                 [](GpuStream stream) { LaunchIllegalWrite(AsStream(stream)); });
  engine.Push({.name = "host", .reads = {x}, .writes = {y}}, [&] { ran = true; });
  const std::string said = MessageOf<CudaError>([&] { engine.WaitForVar(y); });
  EXPECT_THAT(said, HasSubstr("cudaErrorIllegalAddress"));
  ASSERT_TRUE(engine.FailureOf(y));
  EXPECT_EQ(engine.FailureOf(y)->op, "illegal");
  EXPECT_FALSE(ran);
  engine.PushGpu({.name = "later", .writes = {z}, .device = Gpu(0)}, [](GpuStream) {});
  EXPECT_THAT(MessageOf<CudaError>([&] { engine.WaitForVar(z); }),
              HasSubstr("cudaErrorIllegalAddress"));
  // What lies on the CPU is there to be saved.
  EXPECT_EQ(NDArray::Ones({3}, DType::kInt32, Cpu(), engine).ToVector<int>(),
            std::vector<int>(3, 1));
  const NDArray there = NDArray::Ones({3}, DType::kInt32, Gpu(0), engine);
  EXPECT_THROW(there.WaitToRead(), CudaError);
  engine.Stop();
}

TEST_F(CudaEngine, AnErrorOfTheDeviceFailsItByItsNameAndTheProgramEndsInOrder) {
  if (Checked()) GTEST_SKIP() << "compute-sanitizer ends the kernel in a way of its own";
  EXPECT_EQ(RunInChild("CudaEngineChild.AnErrorOfTheDevice", {}, /*one_cpu=*/false), 0);
}

TEST_F(CudaEngineChild, EndsWithWorkPending) {
  static const PinnedInts ints(1);  // freed behind the engine
  static Engine engine;
  static const NDArray array = NDArray::Ones({1000}, DType::kFloat32, Gpu(0), engine);
  const Var x = engine.NewVar("x");
  for (int i = 0; i < 100; ++i) {
    engine.PushGpu(
        {.name = "slow", .reads = {x}, .writes = {x}, .device = Gpu(0)},
        [](GpuStream stream) { LaunchSlowIncrement(ints.at(0), 1000, AsStream(stream)); });
  }
}

TEST_F(CudaEngine, AProcessEndsWithWorkPendingAndArraysInStaticObjects) {
  EXPECT_EQ(RunInChild("CudaEngineChild.EndsWithWorkPending", {}, /*one_cpu=*/false), 0);
}

TEST_F(CudaEngineChild, NamesNoGpu) {
  Engine engine;
  const NDArray array = NDArray::Ones({1000}, DType::kFloat32, Cpu(), engine);
  EXPECT_EQ((array + array).ToVector<float>(), std::vector<float>(1000, 2));
  for (int device = 0; device < GpuCount(); ++device) EXPECT_FALSE(HasContext(device));
}

TEST_F(CudaEngine, AProgramThatNamesNoGpuHasNoContextOnAny) {
  EXPECT_EQ(RunInChild("CudaEngineChild.NamesNoGpu", {}, /*one_cpu=*/false), 0);
}

}  // namespace
}  // namespace heddle::engine_test
