// What a worker's lack of memory does to its pushes.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/memory.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/job.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore::dist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Its release function may come for locks of the program's, for which other threads may hold the
// store up.
TEST(DistMemory, IsReleasedWithNoLockHeld) {
  for (const Network network : {Network::kSim, Network::kTcp, Network::kSharedMemory}) {
    Job job({.network = network});
    job.RunWorkers("dist_async", [](int, KVStore& store, Engine& engine) {
      std::atomic<int> released{0};
      const NDArray out({100}, DType::kFloat32, Cpu(), engine);
      store.SetOptimizer(Sgd({.learning_rate = 1}));
      store.Init("w", NDArray::Full({100}, 0, DType::kFloat32, Cpu(), engine));
      for (int i = 1; i <= 50; ++i) {
        std::vector<float> gradient(100, -1);
        const auto release = [&store, &released] {
          EXPECT_EQ(store.NumDeadNodes(), 0);
          ++released;
        };
        store.Push("w", NDArray::FromForeign(gradient.data(), {100}, DType::kFloat32, release,
                                             Cpu(), engine));
        store.Pull("w", out);
        EXPECT_THAT(out.ToVector<float>(), testing::Each(i));
        while (released < i) std::this_thread::yield();
      }
    });
  }
}

// The push was dropped, or sent whatever lay in memory that came free meanwhile.
TEST(DistMemory, CodesThatThereIsNoMemoryForFailTheirRound) {
  constexpr std::int64_t kCount = 100'000;
  Job job({.network = Network::kSim});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    const auto filled = [&](double value) {
      return NDArray::Full({kCount}, value, DType::kFloat32, Cpu(), engine);
    };
    store.SetGradientCompression({.type = "2bit", .threshold = 0.5});
    store.Init("w", filled(0));
    const NDArray gradient = filled(0.5);
    const NDArray out = filled(-1);
    for (int round = 0; round < 2; ++round) {
      store.PushPull("w", gradient, out);
      EXPECT_THAT(out.ToVector<float>(), testing::Each(0.5F));
      kvstore_test::Hold backward(engine, {}, {gradient.var()});
      store.Push("w", gradient);
      TrimMemory(DeviceType::kCpu);
      ConfigureMemory(DeviceType::kCpu, {.bytes_max = GetMemoryStats(DeviceType::kCpu).used});
      backward.Release();
      EXPECT_THROW(engine.WaitForAll(), OutOfMemory);
      ConfigureMemory(DeviceType::kCpu, MemoryOptions::FromEnvironment(DeviceType::kCpu));
      store.Pull("w", out);
      EXPECT_THAT(MessageOf<Error>([&] { out.WaitToRead(); }),
                  AllOf(HasSubstr("worker 0"), HasSubstr("kvstore.compress"), HasSubstr("cap")));
      EXPECT_THROW(engine.WaitForAll(), Error);
    }
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
