// The dist stores from the program's side: whole jobs, in one process.
#include <heddle/error.h>

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/job.h"

namespace heddle::kvstore::dist {
namespace {

NDArray Filled(Engine& engine, std::int64_t count, float value) {
  return NDArray::Full({count}, value, DType::kFloat32, Cpu(), engine);
}

class DistStoreTest : public ::testing::TestWithParam<Network> {};

INSTANTIATE_TEST_SUITE_P(Networks, DistStoreTest, ::testing::Values(Network::kLoop, Network::kTcp),
                         [](const auto& info) {
                           return info.param == Network::kLoop ? "Loop" : "Tcp";
                         });

TEST_P(DistStoreTest, ARoundIsTheSumOfAllWorkers) {
  Job job({.network = GetParam(), .num_workers = 3, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    EXPECT_EQ(store.rank(), rank);
    EXPECT_EQ(store.num_workers(), 3);
    for (const std::int64_t count : {1, 1000, 100'000}) {
      const Key key = std::to_string(count);
      store.Init(key, Filled(engine, count, static_cast<float>(rank + 1)));
      NDArray out({count}, DType::kFloat32, Cpu(), engine);
      store.Pull(key, out);
      EXPECT_EQ(out.ToVector<float>(), std::vector<float>(static_cast<std::size_t>(count), 1));
      for (int round = 1; round <= 5; ++round) {
        store.Push(key, Filled(engine, count, static_cast<float>(rank + round)));
        store.Pull(key, out);
        EXPECT_EQ(out.ToVector<float>(), std::vector<float>(static_cast<std::size_t>(count),
                                                            static_cast<float>(3 * round + 3)));
      }
      store.PushPull(key, Filled(engine, count, 2), out);
      EXPECT_EQ(out.ToVector<float>(), std::vector<float>(static_cast<std::size_t>(count), 6));
    }
    store.Barrier();
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
