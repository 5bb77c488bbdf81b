// Ops that push others for a GPU, on an engine that is being stopped: copies in several slices,
// additions of rows.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <atomic>
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
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"

namespace heddle::storage_test {
namespace {

using engine_test::BaseSeed;
using engine_test::Scaled;
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

// Which take two steps on the GPU: when an addition is over, neither is at work on its arrays.
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

}  // namespace
}  // namespace heddle::storage_test
