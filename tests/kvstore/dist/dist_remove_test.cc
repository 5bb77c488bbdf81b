// Keys that the workers of a job remove.
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <string>
#include <vector>

#include <fmt/format.h>
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

TEST_P(DistRemoveTest, NeighboursOfARemovedKeyAreOthers) {
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 1});
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    const auto filled = [&](double value) {
      return NDArray::Full({2}, value, DType::kFloat32, Cpu(), engine);
    };
    for (int i = 0; i < 10; ++i) store.Init(fmt::format("fc{}", i), filled(i));
    store.Barrier();
    const NDArray out = filled(0);
    for (int i = 0; i < 10; i += 2) {
      const std::string key = fmt::format("fc{}", i);
      store.Remove(key);
      EXPECT_FALSE(store.Contains(key)) << key;
      EXPECT_THROW(store.Pull(key, out), UnknownKey) << key;
    }
    store.Barrier();
    for (int i = 0; i < 10; i += 4) store.Init(fmt::format("fc{}", i), filled(100 + i));
    for (int i = 0; i < 10; ++i) {
      const std::string key = fmt::format("fc{}", i);
      if (i % 4 == 2) {
        EXPECT_THROW(store.Pull(key, out), UnknownKey) << key << " on worker " << rank;
        continue;
      }
      store.Pull(key, out);
      EXPECT_EQ(out.ToVector<float>()[0], static_cast<float>(i % 4 == 0 ? 100 + i : i)) << key;
    }
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
