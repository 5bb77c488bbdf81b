// What a worker's lack of memory does to its pushes.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/memory.h>

#include <cstdint>
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
