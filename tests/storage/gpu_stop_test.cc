// Copies in several slices, whose ops push others for a GPU, on an engine that is being stopped.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>

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

class GpuCopyStopTest : public engine_test::EveryEngine {
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
INSTANTIATE_TEST_SUITE_P(All, GpuCopyStopTest, testing::ValuesIn(engine_test::ThreadedConfigs(2)),
                         engine_test::ConfigLabel);

bool IsStopping(Engine& engine) {
  try {
    engine.NewVar();
  } catch (const InvalidState&) {
    return true;
  }
  return false;
}

TEST_P(GpuCopyStopTest, ACopyThatStopFindsAtWorkIsDone) {
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

// At any moment. The streams were gone when the op of a copy that came last pushed for them.
TEST_P(GpuCopyStopTest, CopiesThatRaceWithStopAreDoneOrRefused) {
  for (int round = 0; round < Scaled(6); ++round) {
    EngineOptions options = Options();
    options.max_pending_ops = 4;
    Engine engine(options);
    std::vector<NDArray> to;
    for (int i = 0; i < 2; ++i) to.push_back(Filled(engine, i, Gpu(0)));
    const NDArray host = Filled(engine, 7, Cpu());
    engine.WaitForAll();
    std::atomic<int> copies = 0;
    std::vector<std::thread> threads;
    for (const NDArray& array : to) {
      threads.emplace_back([&, array] {
        try {
          for (;; ++copies) host.CopyTo(array);
        } catch (const InvalidState&) {
        }
      });
    }
    while (copies < 3) std::this_thread::yield();
    engine.Stop();
    for (std::thread& thread : threads) thread.join();
    for (const NDArray& array : to) {
      if (const std::exception_ptr error = engine.ErrorOf(array.var())) {
        EXPECT_THROW(std::rethrow_exception(error), InvalidState);
      }
    }
  }
}

}  // namespace
}  // namespace heddle::storage_test
