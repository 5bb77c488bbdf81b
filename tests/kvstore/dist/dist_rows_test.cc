// Row-sparse gradients of dense values in whole jobs: the values are cut over the servers at
// elements, the gradients come by rows.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/job.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::kvstore::dist {
namespace {

class DistRowsTest : public ::testing::TestWithParam<Network> {};

INSTANTIATE_TEST_SUITE_P(Networks, DistRowsTest, ::testing::Values(Network::kSim, Network::kTcp),
                         [](const auto& info) {
                           return info.param == Network::kSim ? "Sim" : "Tcp";
                         });

const Shape kShape{700, 90};  // in 16 blocks of elements, none of which begins with a row

RowSparseNDArray RowsOf(const std::vector<std::int64_t>& ids, float value, Engine& engine) {
  return RowSparseNDArray::FromVectors<float>(
      ids, std::vector<float>(ids.size() * static_cast<std::size_t>(kShape[1]), value), kShape,
      DType::kFloat32, Cpu(), engine);
}

// The gradient of a worker in a round: no rows, some or all.
RowSparseNDArray RandomRows(std::uint64_t seed, Engine& engine) {
  std::mt19937_64 random(seed);
  const std::uint64_t one_in = std::vector<std::uint64_t>{1, 3, 40, 1'000'000}[random() % 4];
  RowVectors<float> all;
  for (std::int64_t id = 0; id < kShape[0]; ++id) {
    if (random() % one_in != 0) continue;
    all.row_ids.push_back(id);
    for (std::int64_t i = 0; i < kShape[1]; ++i) {
      all.rows.push_back(static_cast<float>(random() % 2001) / 700 - 1);
    }
  }
  return RowSparseNDArray::FromVectors<float>(all.row_ids, all.rows, kShape, DType::kFloat32, Cpu(),
                                              engine);
}

TEST_P(DistRowsTest, RowSparseGradientsOfDenseValuesHaveTheBitsOfALocalStore) {
  constexpr int kWorkers = 3;
  constexpr int kRounds = 5;
  using Parameters = std::vector<std::pair<std::string_view, double>>;
  const std::vector<std::pair<std::string, Parameters>> optimizers = {
      {"", {}},
      {"sgd", {{"momentum", 0.5}, {"lazy_update", 1}}},
      {"sgd", {{"momentum", 0.5}, {"lazy_update", 0}}},
      {"adam", {{"lazy_update", 1}}},
      {"lars", {{"momentum", 0.5}, {"lazy_update", 1}}},  // norms of the whole array
      {"lamb", {}},
      {"groupadagrad", {}}};  // works by rows
  const std::uint64_t seed = kvstore_test::TestSeed();
  const auto gradient = [&](int rank, int round, Engine& engine) {
    return RandomRows(seed + static_cast<std::uint64_t>(100 * round + rank), engine);
  };
  for (const auto& [name, parameters] : optimizers) {
    SCOPED_TRACE("'" + name + "'");
    std::vector<std::vector<float>> expected;
    Engine local_engine(EngineOptions::FromEnvironment());
    const NDArray start = NDArray::Full(kShape, 2, DType::kFloat32, Cpu(), local_engine);
    {
      const auto local = KVStore::Create("local", local_engine);
      if (!name.empty()) local->SetOptimizer(MakeOptimizer(name, parameters));
      local->Init("w", start);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<RowSparseNDArray> gradients;
        for (int rank = 0; rank < kWorkers; ++rank) {
          gradients.push_back(gradient(rank, round, local_engine));
        }
        local->Push("w", gradients);
        NDArray out(kShape, DType::kFloat32, Cpu(), local_engine);
        local->Pull("w", out);
        expected.push_back(out.ToVector<float>());
      }
    }
    Job job({.network = GetParam(), .num_workers = kWorkers, .num_servers = 2});
    job.RunWorkers("dist_sync", [&, &name = name, &parameters = parameters](
                                    int rank, KVStore& store, Engine& engine) {
      if (!name.empty()) store.SetOptimizer(MakeOptimizer(name, parameters));
      store.Init("w", NDArray::Full(kShape, 2, DType::kFloat32, Cpu(), engine));
      for (int round = 0; round < kRounds; ++round) {
        store.Push("w", gradient(rank, round, engine));
        NDArray out(kShape, DType::kFloat32, Cpu(), engine);
        store.Pull("w", out);
        ASSERT_TRUE(out.ToVector<float>() == expected[static_cast<std::size_t>(round)])
            << "round " << round;
      }
    });
  }
}

TEST_P(DistRowsTest, WorkersMayPushBothKindsInARound) {
  Job job({.network = GetParam(), .num_workers = 3, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    store.Init("w", NDArray::Full(kShape, 100, DType::kFloat32, Cpu(), engine));
    const auto push = [&](const std::vector<std::int64_t>& ids) {
      if (rank == 1) {
        store.Push("w", NDArray::Full(kShape, 1, DType::kFloat32, Cpu(), engine));
      } else {
        store.Push("w", RowsOf(ids, 2, engine));
      }
    };
    const auto expect = [&](float others, float row_45, float row_699) {
      NDArray out(kShape, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      std::vector<float> expected(700 * 90, others);
      std::fill_n(expected.begin() + 45 * 90, 90, row_45);
      std::fill_n(expected.begin() + 699 * 90, 90, row_699);
      EXPECT_TRUE(out.ToVector<float>() == expected);
    };
    push({45, 699});
    expect(1, 5, 5);
    push(rank == 0 ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{45});
    expect(1, 3, 1);
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    push({45});
    expect(0, -2, 0);
  });
}

TEST_P(DistRowsTest, AsyncRowsAreAppliedOnceEach) {
  constexpr int kWorkers = 3;
  Job job({.network = GetParam(), .num_workers = kWorkers, .num_servers = 2});
  job.RunWorkers("dist_async", [](int rank, KVStore& store, Engine& engine) {
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    store.Init("w", NDArray::Full(kShape, 0, DType::kFloat32, Cpu(), engine));
    for (int i = 0; i < 20; ++i) {
      store.Push("w", RowsOf(i % 5 == 4 ? std::vector<std::int64_t>{}
                                        : std::vector<std::int64_t>{rank, 45, 699},
                             -1, engine));
    }
    NDArray out(kShape, DType::kFloat32, Cpu(), engine);
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>()[static_cast<std::size_t>(rank) * 90], 16);
    store.Barrier();
    store.Pull("w", out);
    std::vector<float> expected(700 * 90, 0);
    std::fill_n(expected.begin(), 90 * kWorkers, 16);
    std::fill_n(expected.begin() + 45 * 90, 90, 16 * kWorkers);
    std::fill_n(expected.begin() + 699 * 90, 90, 16 * kWorkers);
    EXPECT_TRUE(out.ToVector<float>() == expected);
  });
}

// Rules that work by rows take no value whose parts end within rows.
TEST_P(DistRowsTest, KeysAreNotCutIfTheOptimizerWorksByRows) {
  Job job({.network = GetParam(), .num_workers = 1, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    const NDArray start = NDArray::Full(kShape, 1, DType::kFloat32, Cpu(), engine);
    store.Init("cut", start);
    store.SetOptimizer(MakeOptimizer("groupadagrad", {}));
    store.Init("whole", start);
    kvstore_test::ExpectInvalid([&] { store.Push("cut", start); },
                                {"key 'cut': optimizer groupadagrad", "after SetOptimizer"});
    kvstore_test::ExpectInvalid([&] { store.Push("cut", RowsOf({3}, 1, engine)); },
                                {"key 'cut': optimizer groupadagrad", "after SetOptimizer"});
    store.Push("whole", RowsOf({3}, 1, engine));
    NDArray out(kShape, DType::kFloat32, Cpu(), engine);
    store.Pull("whole", out);
    EXPECT_EQ(out.ToVector<float>()[0], 1);
    EXPECT_LT(out.ToVector<float>()[3 * 90], 1);
  });
}

// The parts of row-sparse values are updated one by one.
TEST_P(DistRowsTest, RowSparseKeysAreNotCutIfTheOptimizerNeedsTheirNorms) {
  Job job({.network = GetParam(), .num_workers = 1, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    const auto local = KVStore::Create("local", engine);
    const RowSparseNDArray start = RandomRows(7, engine);
    const RowSparseNDArray gradient = RandomRows(8, engine);
    store.Init("cut", start);
    for (KVStore* each : {&store, local.get()}) {
      each->SetOptimizer(MakeOptimizer("lamb", {}));
      each->Init("whole", start);
    }
    kvstore_test::ExpectInvalid([&] { store.Push("cut", gradient); },
                                {"key 'cut': optimizer lamb", "norm of the whole array"});
    std::vector<std::vector<float>> values;
    for (KVStore* each : {&store, local.get()}) {
      for (int round = 0; round < 3; ++round) each->Push("whole", gradient);
      RowSparseNDArray out(kShape, DType::kFloat32, Cpu(), engine);
      each->Pull("whole", out, 0, /*ignore_sparse=*/false);
      values.push_back(out.ToVectors<float>().rows);
    }
    EXPECT_EQ(values[0], values[1]);
  });
}

// Values of rows, a half of them on each of two servers.
const Shape kHalves{5000, 4};

RowSparseNDArray Rows(const std::vector<std::int64_t>& ids, float value, Engine& engine) {
  return RowSparseNDArray::FromVectors<float>(ids, std::vector<float>(ids.size() * 4, value),
                                              kHalves, DType::kFloat32, Cpu(), engine);
}

RowVectors<float> PulledRows(KVStore& store, std::string_view key,
                             const std::vector<std::int64_t>& ids, Engine& engine) {
  const RowSparseNDArray out(kHalves, DType::kFloat32, Cpu(), engine);
  store.RowSparsePull(key, out,
                      NDArray::FromVector(ids, {static_cast<std::int64_t>(ids.size())},
                                          DType::kInt64, Cpu(), engine));
  return out.ToVectors<float>();
}

TEST_P(DistRowsTest, RowsThatAreAskedForComeFromPartsWithoutRowsToo) {
  Job job({.network = GetParam(), .num_servers = 2});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.Init("w", Rows({1, 3}, 7, engine));
    store.Init("none", Rows({}, 0, engine));
    const RowVectors<float> both = PulledRows(store, "w", {4998, 2, 1, 3000}, engine);
    EXPECT_EQ(both.row_ids, (std::vector<std::int64_t>{1, 2, 3000, 4998}));
    std::vector<float> expected(16, 0);
    std::fill_n(expected.begin(), 4, 7);
    EXPECT_EQ(both.rows, expected);
    const RowVectors<float> lacking = PulledRows(store, "w", {3000, 4000}, engine);
    EXPECT_EQ(lacking.row_ids, (std::vector<std::int64_t>{3000, 4000}));
    EXPECT_EQ(lacking.rows, std::vector<float>(8, 0));
    EXPECT_TRUE(PulledRows(store, "w", {}, engine).row_ids.empty());
    EXPECT_TRUE(PulledRows(store, "none", {1, 4000}, engine).row_ids.empty());
  });
}

// Whatever part the ids are of, and though there are none.
TEST_P(DistRowsTest, APullOfRowsTellsOfAPushThatHasFailed) {
  Job job({.network = GetParam(), .num_servers = 2});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.Init("w", Rows({1, 4000}, 7, engine));
    const RowSparseNDArray failed(kHalves, DType::kFloat32, Cpu(), engine);
    engine.Push({.name = "backward", .writes = {failed.var()}},
                [] { throw std::runtime_error("no gradient"); });
    store.Push("w", failed);
    for (const std::vector<std::int64_t>& ids :
         std::vector<std::vector<std::int64_t>>{{}, {1}, {4000}}) {
      EXPECT_THAT(MessageOf<OpError>([&] { PulledRows(store, "w", ids, engine); }),
                  ::testing::HasSubstr("no gradient"));
    }
    store.Push("w", Rows({2}, 1, engine));
    EXPECT_EQ(PulledRows(store, "w", {2, 3}, engine).row_ids, (std::vector<std::int64_t>{2, 3}));
  });
}

TEST_P(DistRowsTest, EachOutputHasThePrecisionOfItsDType) {
  Job job({.network = GetParam(), .num_servers = 2});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    constexpr float kValue = 1000.0625F;
    const auto dense = [&](DType dtype) { return NDArray(kHalves, dtype, Cpu(), engine); };
    const auto sparse = [&](DType dtype) {
      return RowSparseNDArray(kHalves, dtype, Cpu(), engine);
    };
    store.Init("d", NDArray::Full(kHalves, kValue, DType::kFloat32, Cpu(), engine));
    store.Init("s", Rows({1, 4000}, kValue, engine));
    for (const DType first : {DType::kFloat16, DType::kInt32}) {
      const std::vector<NDArray> arrays{dense(first), dense(DType::kFloat32)};
      store.Pull("d", arrays);
      EXPECT_EQ(arrays[0].ToVector<float>()[0], 1000);
      EXPECT_EQ(arrays[1].ToVector<float>()[0], kValue);
      const std::vector<RowSparseNDArray> pulled{sparse(first), sparse(DType::kFloat32)};
      store.Pull("s", pulled, 0, /*ignore_sparse=*/false);
      EXPECT_EQ(pulled[0].ToVectors<float>().rows, std::vector<float>(8, 1000));
      EXPECT_EQ(pulled[1].ToVectors<float>().rows, std::vector<float>(8, kValue));
      const std::vector<RowSparseNDArray> asked{sparse(first), sparse(DType::kFloat32)};
      store.RowSparsePull(
          "s", asked,
          NDArray::FromVector(std::vector<std::int64_t>{4000}, {1}, DType::kInt64, Cpu(), engine));
      EXPECT_EQ(asked[0].ToVectors<float>().rows, std::vector<float>(4, 1000));
      EXPECT_EQ(asked[1].ToVectors<float>().rows, std::vector<float>(4, kValue));
    }
  });
}

// The last answer of a pull may be taken inside of another op, which does not declare its output.
TEST(DistRowsAccess, WhoTakesAnAnswerHasNotTouchedItsArrays) {
  Job job({.network = Network::kSharedMemory, .engine = [] {
             EngineOptions options = EngineOptions::FromEnvironment();
             options.check_access = true;
             return options;
           }});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.Init("a", Rows({1, 4000}, 7, engine));
    store.Init("b", Rows({}, 0, engine));
    const NDArray ids =
        NDArray::FromVector(std::vector<std::int64_t>{1, 5}, {2}, DType::kInt64, Cpu(), engine);
    for (int i = 0; i < Scaled(1000); ++i) {
      const RowSparseNDArray out(kHalves, DType::kFloat32, Cpu(), engine);
      store.RowSparsePull("a", out, ids);
      store.Push("b", Rows({i}, 1, engine));
      ASSERT_NO_THROW(out.WaitToRead());
    }
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
