// Keys that the workers of a job remove.
#include <heddle/kvstore.h>

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/job.h"

namespace heddle::kvstore::dist {
namespace {

class DistRemoveTest : public ::testing::TestWithParam<Network> {};

INSTANTIATE_TEST_SUITE_P(Networks, DistRemoveTest, ::testing::Values(Network::kSim, Network::kTcp),
                         [](const auto& info) {
                           return info.param == Network::kSim ? "Sim" : "Tcp";
                         });

// Of one key many times: each life has another size, on one server or on all.
TEST_P(DistRemoveTest, LivesOfAKeyDoNotMix) {
  constexpr int kWorkers = 3;
  for (const std::string type : {"dist_sync", "dist_async"}) {
    Job job({.network = GetParam(), .num_workers = kWorkers, .num_servers = 2});
    job.RunWorkers(type, [&](int rank, KVStore& store, Engine& engine) {
      store.SetOptimizer(Sgd({.learning_rate = 1}));
      for (int life = 0; life < 6; ++life) {
        const std::int64_t size = life % 2 == 0 ? 10 : 50'000;
        const auto filled = [&](double value) {
          return NDArray::Full({size}, value, DType::kFloat32, Cpu(), engine);
        };
        store.Init("k", filled(100 * life));
        // One worker pushes less than the others, and does not wait for them.
        for (int i = 0; i < (rank == 1 ? 2 : 5); ++i) store.Push("k", filled(-1));
        const NDArray out = filled(0);
        store.Pull("k", out);
        if (rank == 1) {
          store.Remove("k");
          EXPECT_FALSE(store.Contains("k"));
          EXPECT_TRUE(store.Keys().empty());
        }
        const float now = out.ToVector<float>()[static_cast<std::size_t>(size) - 1];
        EXPECT_GE(now, 100 * life + (rank == 1 ? 2 : 5));
        EXPECT_LE(now, 100 * life + 12);
        store.Barrier();
        if (rank != 1) {
          store.Pull("k", out);
          EXPECT_EQ(out.ToVector<float>(), std::vector<float>(static_cast<std::size_t>(size),
                                                              static_cast<float>(100 * life + 12)));
          store.Remove("k");
        }
      }
    });
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist
