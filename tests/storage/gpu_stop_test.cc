// Ops that push others for a GPU and are cut short, as by an engine that is being stopped: copies
// in several slices, operations on rows, which take two steps.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "storage/device_copy.h"
#include "storage/gpu_steps.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/sanitized.h"

namespace heddle::storage_test {
namespace {

using engine_test::BaseSeed;
using engine_test::SimGpu;

constexpr std::int64_t kBytes = 3 * storage::kStagingBytes + 12345;

// Says when pinned memory is taken, as the op of a copy does before it pushes others.
class TellingGpu final : public SimGpu {
 public:
  TellingGpu() : SimGpu(1, BaseSeed()) { set_turns_max(1); }
  std::function<void()> when_pinned;
  void* AllocatePinned(int near, std::int64_t bytes) override {
    if (const auto tell = std::exchange(when_pinned, nullptr)) tell();
    return SimGpu::AllocatePinned(near, bytes);
  }
};

class GpuArrayStopTest : public engine_test::EveryEngine {
 protected:
  EngineOptions Options() const {
    EngineOptions options = GetParam().options;
    options.gpu_driver = gpu_;
    return options;
  }
  static NDArray Filled(Engine& engine, int value, Device device) {
    return NDArray::Full({kBytes}, value, DType::kUInt8, device, engine);
  }

  std::shared_ptr<TellingGpu> gpu_ = std::make_shared<TellingGpu>();
};
INSTANTIATE_TEST_SUITE_P(All, GpuArrayStopTest, testing::ValuesIn(engine_test::ThreadedConfigs(2)),
                         engine_test::ConfigLabel);

bool IsStopping(Engine& engine) {
  try {
    engine.NewVar();
  } catch (const InvalidState&) {
    return true;
  }
  return false;
}

TEST_P(GpuArrayStopTest, ACopyThatStopFindsAtWorkIsDone) {
  Engine engine(Options());
  const NDArray host = Filled(engine, 7, Cpu());
  const NDArray there = Filled(engine, 1, Gpu(0));
  const NDArray back = Filled(engine, 0, Cpu());
  engine.WaitForAll();
  std::latch began(1);
  gpu_->when_pinned = [&] {
    began.count_down();
    // From outside of the op.
    std::thread([&] {
      while (!IsStopping(engine)) std::this_thread::yield();
    }).join();
  };
  engine_test::Hold both(engine, {.name = "both", .writes = {host.var()}});
  host.CopyTo(there);
  there.CopyTo(back);
  both.Release();
  began.wait();
  engine.Stop();
  const auto* const bytes = back.data<const std::uint8_t>();
  EXPECT_EQ(std::count(bytes, bytes + kBytes, 7), kBytes);
}

// A thread for each of `to` calls queue(array) until the engine stops, which it does at any moment.
template <class Array, class Queue>
void RaceWithStop(Engine& engine, const std::vector<Array>& to, const Queue& queue) {
  std::atomic<int> queued = 0;
  std::vector<std::thread> threads;
  for (const Array& array : to) {
    threads.emplace_back([&, array] {
      try {
        for (;; ++queued) queue(array);
      } catch (const InvalidState&) {
      }
    });
  }
  while (queued < 3) std::this_thread::yield();
  engine.Stop();
  for (std::thread& thread : threads) thread.join();
  for (const Array& array : to) {
    if (const std::exception_ptr error = engine.ErrorOf(array.var())) {
      EXPECT_THROW(std::rethrow_exception(error), InvalidState);
    }
  }
}

// The streams were gone when the op of a copy that came last pushed for them.
TEST_P(GpuArrayStopTest, CopiesThatRaceWithStopAreDoneOrRefused) {
  for (int round = 0; round < Scaled(6); ++round) {
    EngineOptions options = Options();
    options.max_pending_ops = 4;
    Engine engine(options);
    std::vector<NDArray> to;
    for (int i = 0; i < 2; ++i) to.push_back(Filled(engine, i, Gpu(0)));
    const NDArray host = Filled(engine, 7, Cpu());
    engine.WaitForAll();
    RaceWithStop(engine, to, [&host](const NDArray& array) { host.CopyTo(array); });
  }
}

TEST_P(GpuArrayStopTest, AdditionsThatRaceWithStopAreDoneOrRefused) {
  for (int round = 0; round < Scaled(30); ++round) {
    EngineOptions options = Options();
    options.max_pending_ops = 4;
    Engine engine(options);
    const auto rows = [&engine](std::int64_t id) {
      return RowSparseNDArray::FromVectors<float>({id}, {1, 2}, {9, 2}, DType::kFloat32, Gpu(0),
                                                  engine);
    };
    const std::vector<RowSparseNDArray> to = {rows(1), rows(2)};
    const RowSparseNDArray added = rows(5);
    engine.WaitForAll();
    RaceWithStop(engine, to, [&added](RowSparseNDArray array) { array += added; });
  }
}

// Steps of which the first takes its time, and the second cannot be pushed: see below.
struct CutWork {
  CutWork(Engine& in, Var written) : engine(in), var(std::move(written)) {}
  static bool Begin() { return true; }
  void First(GpuStream stream) {
    SimGpu::Launch(stream, [this] {
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
      while (std::chrono::steady_clock::now() < until && !over_too_soon) {
        over_too_soon = engine.version(var) > 0;
        std::this_thread::yield();
      }
      ++firsts;
    });
  }

  Engine& engine;
  const Var var;
  std::atomic<bool> over_too_soon = false;  // the op was over while the first step was at work
  std::atomic<int> firsts = 0;
};

}  // namespace
}  // namespace heddle::storage_test

template <>
struct heddle::storage::gpu_steps::Second<heddle::storage_test::CutWork> {
  explicit Second(const std::shared_ptr<storage_test::CutWork>& /*work*/) {
    throw OutOfMemory("cut short");
  }
  void operator()(GpuStream /*stream*/) const {}
};

namespace heddle::storage_test {
namespace {

// The first step uses the arrays of the op until it is done.
TEST_P(GpuArrayStopTest, StepsThatAreCutShortEndBeforeTheirOpDoes) {
  Engine engine(Options());
  const Var var = engine.NewVar("x");
  const auto work = std::make_shared<CutWork>(engine, var);
  storage::PushGpuSteps(engine, {.name = "steps", .writes = {var}, .device = Gpu(0)}, work);
  EXPECT_THROW(engine.WaitForVar(var), OutOfMemory);
  engine.Stop();
  EXPECT_FALSE(work->over_too_soon);
  EXPECT_EQ(work->firsts, 1);
}

}  // namespace
}  // namespace heddle::storage_test
