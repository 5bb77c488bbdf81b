// The dist stores from the program's side: whole jobs, in one process.
#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/kvstore/dist/forwarding_transport.h"
#include "tests/kvstore/dist/job.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore::dist {
namespace {

NDArray Filled(Engine& engine, std::int64_t count, float value) {
  return NDArray::Full({count}, value, DType::kFloat32, Cpu(), engine);
}

class DistStoreTest : public ::testing::TestWithParam<Network> {};

INSTANTIATE_TEST_SUITE_P(Networks, DistStoreTest, ::testing::Values(Network::kSim, Network::kTcp),
                         [](const auto& info) {
                           return info.param == Network::kSim ? "Sim" : "Tcp";
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

// Which of two calls comes first at the key must be the one whose op comes first at the array: else
// each would wait for the other.
TEST_P(DistStoreTest, ThreadsMayShareKeysAndArrays) {
  constexpr int kThreads = 3;
  const int calls = Scaled(1500);
  const std::uint64_t seed = kvstore_test::TestSeed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Job job({.network = GetParam()});
  job.RunWorkers("dist_async", [&](int, KVStore& store, Engine& engine) {
    const std::vector<Key> keys{"a", "b"};
    const std::vector<NDArray> arrays{Filled(engine, 40, 1), Filled(engine, 40, 1)};
    store.Init(keys, arrays);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random(seed + static_cast<std::uint64_t>(thread));
        for (int call = 0; call < calls; ++call) {
          const Key& key = keys[random() % 2];
          const NDArray& array = arrays[random() % 2];
          switch (random() % 4) {
            case 0:
              store.Push(key, array);
              break;
            case 1:
              store.Pull(key, array);
              break;
            case 2:
              store.PushPull(key, array, array);
              break;
            default:
              store.Pull(keys, arrays);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_NO_THROW(engine.WaitForAll(std::chrono::seconds(60))) << engine.DumpState();
    for (const NDArray& array : arrays) {
      EXPECT_EQ(array.ToVector<float>(), std::vector<float>(40, 1));
    }
  });
}

TEST_P(DistStoreTest, ThePoisonOfAPartOfAnArrayDoesNotReachOtherOutputs) {
  Job job({.network = GetParam()});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.Init("k", Filled(engine, 40, 4));
    const NDArray large = Filled(engine, 100, 1);
    engine.Push({.name = "fail", .writes = {large.var()}},
                [] { throw std::runtime_error("broken"); });
    const NDArray other = Filled(engine, 40, 0);
    store.Pull("k", {large.Slice(10, 50), other});
    EXPECT_EQ(other.ToVector<float>(), std::vector<float>(40, 4));
    EXPECT_THROW(large.WaitToRead(), std::runtime_error);
    EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
    const NDArray whole = Filled(engine, 100, 1);
    store.Pull("k", {whole.Slice(10, 50), other});
    EXPECT_EQ(whole.ToVector<float>()[10], 4);
    EXPECT_EQ(whole.ToVector<float>()[50], 1);
  });
}

// The job is the parent's, whatever the child does with what it has got.
TEST(ForkedChildOfAJob, LetsGoOfItsStoreWithoutAWord) {
  if (kSanitized) GTEST_SKIP() << "a lock of the sanitizer's allocator may be held for ever";
  Job job({.network = Network::kTcp});
  const auto node = job.Join(0);
  {
    Engine engine(EngineOptions::FromEnvironment());
    auto store = MakeDistStore(engine, "dist_sync", node, node->NewStore());
    store->Init("k", Filled(engine, 3, 1));
    const NDArray gradient = Filled(engine, 3, 2);
    std::optional<Completion> done;
    std::latch started(1);
    engine.PushAsync({.name = "gradient", .writes = {gradient.var()}}, [&](Completion completion) {
      done = std::move(completion);
      started.count_down();
    });
    store->Push("k", gradient);  // a call is under way
    started.wait();
    const pid_t child = fork();
    if (child == 0) {
      store.reset();
      _exit(0);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    (*done)();
    const NDArray out = Filled(engine, 3, 0);
    store->Pull("k", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(3, 2));
  }
  node->Close();
}

// What rank `rank` pushes in a round; the same for whoever asks.
std::vector<float> Gradient(int rank, int round, std::int64_t count) {
  std::mt19937 random(static_cast<unsigned>(rank * 1000 + round));
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = uniform(random);
  return values;
}

NDArray ArrayOf(const std::vector<float>& values, Engine& engine, DType dtype = DType::kFloat32) {
  return NDArray::FromVector(values, {static_cast<std::int64_t>(values.size())}, dtype, Cpu(),
                             engine);
}

// The weights of a local store that sums what all ranks push, after each round.
std::vector<std::vector<float>> LocalRounds(int workers, int rounds, std::int64_t count,
                                            DType dtype, const OptimizerPtr& optimizer) {
  Engine engine(EngineOptions::FromEnvironment());
  const auto store = KVStore::Create("local", engine);
  if (optimizer != nullptr) store->SetOptimizer(optimizer);
  store->Init("w", ArrayOf(Gradient(0, 0, count), engine, dtype));
  std::vector<std::vector<float>> values;
  for (int round = 1; round <= rounds; ++round) {
    if (optimizer != nullptr) optimizer->Set("learning_rate", 0.5 / round);
    std::vector<NDArray> gradients;
    for (int rank = 0; rank < workers; ++rank) {
      gradients.push_back(ArrayOf(Gradient(rank, round, count), engine, dtype));
    }
    store->Push("w", gradients);
    NDArray out({count}, dtype, Cpu(), engine);
    store->Pull("w", out);
    values.push_back(out.ToVector<float>());
  }
  return values;
}

TEST_P(DistStoreTest, OptimizersOnServersHaveTheBitsOfALocalStore) {
  constexpr int kWorkers = 3;
  constexpr int kRounds = kSanitized ? 3 : 6;
  constexpr std::int64_t kCount = kSanitized ? 20'000 : 50'000;  // several parts a server
  for (const char* name : {"", "sgd", "adam"}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      SCOPED_TRACE(::testing::Message() << "'" << name << "' " << Name(dtype));
      const auto make = [&]() -> OptimizerPtr {
        if (*name == '\0') return nullptr;
        return MakeOptimizer(name, {{"learning_rate", 0.5},
                                    {"multi_precision", dtype == DType::kFloat16 ? 1.0 : 0.0}});
      };
      const auto expected = LocalRounds(kWorkers, kRounds, kCount, dtype, make());
      Job job({.network = GetParam(),
               .num_workers = kWorkers,
               .num_servers = 2,
               .cut_bound = kCount * 3 / 5});
      job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
        const OptimizerPtr optimizer = make();
        if (optimizer != nullptr) store.SetOptimizer(optimizer);
        store.Init("w", ArrayOf(Gradient(rank, 0, kCount), engine, dtype));
        for (int round = 1; round <= kRounds; ++round) {
          if (optimizer != nullptr) optimizer->Set("learning_rate", 0.5 / round);
          store.Push("w", ArrayOf(Gradient(rank, round, kCount), engine, dtype));
          NDArray out({kCount}, dtype, Cpu(), engine);
          store.Pull("w", out);
          ASSERT_EQ(out.ToVector<float>(), expected[static_cast<std::size_t>(round - 1)])
              << "round " << round;
        }
      });
    }
  }
}

// The message of the InvalidArgument that `call` throws.
template <class Call>
std::string ErrorOf(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  } catch (const InvalidState& error) {
    return error.what();
  }
  return "none";
}

// However the array is cut: 50'000 elements are 13 blocks, in several parts a server, and 30'000
// are 8.
TEST_P(DistStoreTest, NormsAreThoseOfTheWholeArray) {
  constexpr std::int64_t kCount = kSanitized ? 30'000 : 50'000;
  constexpr int kRounds = kSanitized ? 2 : 4;
  for (const std::string name : {"lamb", "lars", "lans"}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      if (dtype == DType::kFloat16 && name != "lamb") continue;  // what differs is master weights
      const auto make = [&] {
        return MakeOptimizer(name, {{"learning_rate", 0.5},
                                    {"multi_precision", dtype == DType::kFloat16 ? 1.0 : 0.0}});
      };
      const auto expected = LocalRounds(2, kRounds, kCount, dtype, make());
      for (const int servers : {1, 3}) {
        for (const std::int64_t cut_bound : {kCount * 3 / 5, std::int64_t{1'000'000}}) {
          SCOPED_TRACE(::testing::Message() << name << " " << Name(dtype) << " " << servers
                                            << " servers, cut bound " << cut_bound);
          Job job({.network = GetParam(),
                   .num_workers = 2,
                   .num_servers = servers,
                   .cut_bound = cut_bound});
          job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
            const OptimizerPtr optimizer = make();
            store.Init("w", ArrayOf(Gradient(0, 0, kCount), engine, dtype));
            store.SetOptimizer(optimizer);
            for (int round = 1; round <= kRounds; ++round) {
              optimizer->Set("learning_rate", 0.5 / round);
              store.Push("w", ArrayOf(Gradient(rank, round, kCount), engine, dtype));
              NDArray out({kCount}, dtype, Cpu(), engine);
              store.Pull("w", out);
              ASSERT_EQ(out.ToVector<float>(), expected[static_cast<std::size_t>(round - 1)])
                  << "round " << round;
            }
          });
        }
      }
    }
  }
}

TEST_P(DistStoreTest, NormsOverServersComeThroughFailedInputsAndManyKeys) {
  constexpr std::int64_t kCount = 50'000;
  constexpr int kRounds = 6;
  const auto make = [] { return MakeOptimizer("lamb", {{"learning_rate", 0.5}}); };
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 3});
  std::vector<std::vector<float>> expected;  // of the good rounds
  {
    Engine engine(EngineOptions::FromEnvironment());
    const auto store = KVStore::Create("local", engine);
    store->SetOptimizer(make());
    store->Init("w", ArrayOf(Gradient(0, 0, kCount), engine));
    for (int round = 1; round <= kRounds; ++round) {
      if (round != 3) {
        store->Push("w", {ArrayOf(Gradient(0, round, kCount), engine),
                          ArrayOf(Gradient(1, round, kCount), engine)});
      }
      NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
      store->Pull("w", out);
      expected.push_back(out.ToVector<float>());
    }
  }
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    store.SetOptimizer(make());
    for (const char* key : {"a", "b", "c"}) {
      store.Init(key, ArrayOf(Gradient(0, 0, kCount), engine));
    }
    for (int round = 1; round <= kRounds; ++round) {
      std::vector<NDArray> outs;
      for (const char* key : {"a", "b", "c"}) {
        const NDArray gradient = ArrayOf(Gradient(rank, round, kCount), engine);
        if (round == 3 && rank == 1) {
          engine.Push({.name = "backward", .writes = {gradient.var()}},
                      [] { throw std::runtime_error("no gradient today"); });
        }
        store.Push(key, gradient);
        outs.emplace_back(Shape{kCount}, DType::kFloat32, Cpu(), engine);
        store.Pull(key, outs.back());
      }
      for (const NDArray& out : outs) {
        if (round == 3) {
          EXPECT_THROW(out.WaitToRead(), Error);
        } else {
          ASSERT_EQ(out.ToVector<float>(), expected[static_cast<std::size_t>(round - 1)])
              << "round " << round;
        }
      }
    }
    try {
      engine.WaitForAll();
    } catch (const std::exception&) {  // the backward ops'
    }
  });
}

TEST_P(DistStoreTest, AsyncKeysAreNotCutIfTheOptimizerNeedsTheirNorms) {
  constexpr std::int64_t kCount = 50'000;
  const auto make = [] { return MakeOptimizer("lamb", {{"learning_rate", 0.5}}); };
  const auto expected = LocalRounds(1, 3, kCount, DType::kFloat32, make());
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 2});
  job.RunWorkers("dist_async", [&](int rank, KVStore& store, Engine& engine) {
    store.Init("cut", ArrayOf(Gradient(0, 0, kCount), engine));
    const OptimizerPtr optimizer = make();
    store.SetOptimizer(optimizer);
    const std::string refused =
        ErrorOf([&] { store.Push("cut", ArrayOf(Gradient(0, 1, kCount), engine)); });
    EXPECT_NE(refused.find("key 'cut': optimizer lamb"), std::string::npos) << refused;
    EXPECT_NE(refused.find("after SetOptimizer"), std::string::npos) << refused;
    if (rank == 0) {
      store.Init("w", ArrayOf(Gradient(0, 0, kCount), engine));
      for (int round = 1; round <= 3; ++round) {
        optimizer->Set("learning_rate", 0.5 / round);
        store.Push("w", ArrayOf(Gradient(0, round, kCount), engine));
        NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
        store.Pull("w", out);
        ASSERT_EQ(out.ToVector<float>(), expected[static_cast<std::size_t>(round - 1)])
            << "round " << round;
      }
    }
    store.Barrier();
    NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
    store.Pull("w", out);  // rank 1 asks where it is
    EXPECT_EQ(out.ToVector<float>(), expected[2]);
  });
}

TEST_P(DistStoreTest, AListIsSummedBeforeItIsSent) {
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 2});
  job.RunWorkers("dist_device_sync", [](int rank, KVStore& store, Engine& engine) {
    store.Init({"a", "b"}, {Filled(engine, 7, 0), Filled(engine, 60'000, 0)});
    NDArray a({7}, DType::kFloat32, Cpu(), engine);
    NDArray b({60'000}, DType::kFloat32, Cpu(), engine);
    NDArray b_half({60'000}, DType::kFloat16, Cpu(), engine);
    const auto one = static_cast<float>(rank + 1);
    store.Push({"a", "b"}, {{Filled(engine, 7, one), Filled(engine, 7, 1)},
                            {Filled(engine, 60'000, one), Filled(engine, 60'000, 10)}});
    store.Pull({"a", "b"}, {{a, a}, {b, b_half}});
    EXPECT_EQ(a.ToVector<float>(), std::vector<float>(7, 5));
    EXPECT_EQ(b.ToVector<float>(), std::vector<float>(60'000, 23));
    EXPECT_EQ(b_half.ToVector<float>(), std::vector<float>(60'000, 23));
  });
}

TEST_P(DistStoreTest, RowSparseRowsFindTheirParts) {
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 3, .cut_bound = 100});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    const Shape shape{200, 2};
    const auto rows = [&](const std::vector<std::int64_t>& ids, float value) {
      return RowSparseNDArray::FromVectors<float>(ids, std::vector<float>(ids.size() * 2, value),
                                                  shape, DType::kFloat32, Cpu(), engine);
    };
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    store.Init("e", rows({0, 50, 199}, 100));
    store.Push("e", rank == 0 ? rows({0, 70, 199}, 1) : rows({50, 70}, 2));
    RowSparseNDArray out(shape, DType::kFloat32, Cpu(), engine);
    const NDArray ids =
        NDArray::FromVector<std::int64_t>({199, 50, 70, 50, 3}, {5}, DType::kInt64, Cpu(), engine);
    store.RowSparsePull("e", out, ids);
    const RowVectors<float> got = out.ToVectors<float>();
    EXPECT_EQ(got.row_ids, (std::vector<std::int64_t>{3, 50, 70, 199}));
    EXPECT_EQ(got.rows, (std::vector<float>{0, 0, 98, 98, -3, -3, 99, 99}));
    store.Pull("e", out, 0, /*ignore_sparse=*/false);
    EXPECT_EQ(out.ToVectors<float>().row_ids, (std::vector<std::int64_t>{0, 50, 70, 199}));
    NDArray dense(shape, DType::kFloat32, Cpu(), engine);
    store.Pull("e", dense);
    EXPECT_EQ(dense.ToVector<float>()[398], 99);
  });
}

TEST_P(DistStoreTest, CompressionKeepsItsResidualsAtTheWorker) {
  constexpr std::int64_t kCount = 70'000;
  Job job({.network = GetParam(), .num_workers = 1, .num_servers = 2});
  Engine local_engine(EngineOptions::FromEnvironment());
  const auto local = KVStore::Create("local", local_engine);
  local->SetGradientCompression({.type = "2bit", .threshold = 0.5});
  local->Init("w", ArrayOf(Gradient(0, 0, kCount), local_engine));
  std::vector<std::vector<float>> expected;
  for (int round = 1; round <= 4; ++round) {
    local->Push("w", ArrayOf(Gradient(0, round, kCount), local_engine));
    NDArray out({kCount}, DType::kFloat32, Cpu(), local_engine);
    local->Pull("w", out);
    expected.push_back(out.ToVector<float>());
  }
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    store.SetGradientCompression({.type = "2bit", .threshold = 0.5});
    store.Init("w", ArrayOf(Gradient(0, 0, kCount), engine));
    for (int round = 1; round <= 4; ++round) {
      store.Push("w", ArrayOf(Gradient(0, round, kCount), engine));
      NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      ASSERT_EQ(out.ToVector<float>(), expected[static_cast<std::size_t>(round - 1)]);
    }
    EXPECT_EQ(store.transfers().pushed_bytes, 4 * ((kCount + 15) / 16) * 4);
  });
}

// The store's end waits for all calls that have begun.
TEST_P(DistStoreTest, CallsThatCannotBeQueuedLeaveNothingBehind) {
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    store.Init("w", Filled(engine, 10, 0));
    const NDArray value = Filled(engine, 10, 1);
    value.WaitToRead();
    engine.Stop();
    EXPECT_THROW(store.Push("w", value), InvalidState);
    EXPECT_THROW(store.Pull("w", value), InvalidState);
    EXPECT_THROW(store.PushPull("w", value), InvalidState);
    EXPECT_THROW(store.Init("rank " + std::to_string(rank), value), InvalidState);
    EXPECT_THROW(store.Remove("w"), InvalidState);
  });
}

TEST_P(DistStoreTest, AFailedInputFailsItsRoundForAllAndNoOther) {
  Job job({.network = GetParam(), .num_workers = 3, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    store.Init("w", Filled(engine, 10, 0));
    for (int round = 1; round <= 7; ++round) {
      const NDArray gradient = Filled(engine, 10, static_cast<float>(round));
      if (round == 5 && rank == 1) {
        engine.Push({.name = "backward", .writes = {gradient.var()}},
                    [] { throw std::runtime_error("no gradient today"); });
      }
      store.Push("w", gradient);
      NDArray out({10}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      if (round != 5) {
        EXPECT_EQ(out.ToVector<float>(), std::vector<float>(10, static_cast<float>(3 * round)));
        continue;
      }
      try {
        out.WaitToRead();
        ADD_FAILURE() << "round 5 has a value";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("backward: no gradient today"), std::string::npos)
            << error.what();
        EXPECT_NE(std::string(error.what()).find("1"), std::string::npos) << error.what();
      }
    }
    try {
      engine.WaitForAll();
    } catch (const std::exception&) {  // the backward op's
    }
  });
}

TEST_P(DistStoreTest, WhatAFailedInputSaysIsCutBetweenLetters) {
  Job job({.network = GetParam()});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    for (const std::string begin : {"", "a"}) {  // one of the two puts a letter across the limit
      const Key key = "w" + begin;
      store.Init(key, Filled(engine, 10, 0));
      const NDArray gradient = Filled(engine, 10, 1);
      engine.Push({.name = "backward", .writes = {gradient.var()}}, [begin] {
        std::string letters = begin;
        for (int i = 0; i < 40'000; ++i) letters += "\xc3\xa9";
        throw std::runtime_error(letters);
      });
      store.Push(key, gradient);
      NDArray out({10}, DType::kFloat32, Cpu(), engine);
      store.Pull(key, out);
      const std::string message = MessageOf<Error>([&] { out.WaitToRead(); });
      EXPECT_GT(std::ranges::count(message, '\xc3'), 30'000);
      EXPECT_EQ(std::ranges::count(message, '\xc3'), std::ranges::count(message, '\xa9'));
    }
    try {
      engine.WaitForAll();
    } catch (const std::exception&) {  // the backward ops'
    }
  });
}

TEST_P(DistStoreTest, WorkersMayLeaveAfterDifferentRounds) {
  Job job({.network = GetParam(), .num_workers = 3, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    store.Init("w", Filled(engine, 40'000, 0));
    for (int round = 1; round <= 10 + rank; ++round) {
      store.Push("w", Filled(engine, 40'000, static_cast<float>(rank + 1)));
      NDArray out({40'000}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      const float sum = round <= 10 ? 6 : round == 11 ? 5 : 3;
      ASSERT_EQ(out.ToVector<float>(), std::vector<float>(40'000, sum)) << "round " << round;
    }
  });
}

// Into `values`, once the array is there, without waiting for it.
void LookAt(const NDArray& array, std::vector<float>* values) {
  array.engine().Push({.name = "look", .reads = {array.var()}}, [array, values] {
    const auto* const first = static_cast<const float*>(array.const_data());
    values->assign(first, first + array.size());
  });
}

// Each worker pushes five times to a key of its own, and to the other's once: neither waits.
TEST_P(DistStoreTest, WorkersThatLeaveWhileEachWaitsForTheOtherEnd) {
  constexpr std::int64_t kCount = 40'000;
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 2});
  std::vector<std::vector<float>> last(2);
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    const std::vector<std::string> keys = {"a", "b"};
    for (const std::string& key : keys) store.Init(key, Filled(engine, kCount, 0));
    const std::string& mine = keys[static_cast<std::size_t>(rank)];
    const std::string& others = keys[static_cast<std::size_t>(1 - rank)];
    store.Push(others, Filled(engine, kCount, 100));
    const NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
    for (int round = 1; round <= 5; ++round) {
      store.Push(mine, Filled(engine, kCount, static_cast<float>(round)));
      store.Pull(mine, out);
    }
    LookAt(out, &last[static_cast<std::size_t>(rank)]);
  });
  for (const auto& values : last) EXPECT_EQ(values, std::vector<float>(kCount, 5)) << "of round 5";
}

// What it pushes to "b" is made of what it pulls of "a", which waits for the other to leave; and
// the other way round.
TEST_P(DistStoreTest, PushesThatAreNotSentWhenAWorkerLeavesAreInTheirRounds) {
  constexpr std::int64_t kCount = 1000;
  Job job({.network = GetParam(), .num_workers = 2});
  std::vector<std::vector<float>> sums(2);
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    const std::vector<std::string> keys = {"a0", "b0", "a1", "b1"};
    for (const std::string& key : keys) store.Init(key, Filled(engine, kCount, 0));
    const std::string& first = keys[static_cast<std::size_t>(2 * rank)];
    const std::string& second = keys[static_cast<std::size_t>(2 * rank + 1)];
    const NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
    store.Push(first, Filled(engine, kCount, static_cast<float>(rank + 1)));
    store.Pull(first, out);
    store.Push(second, out);
    const NDArray sum({kCount}, DType::kFloat32, Cpu(), engine);
    store.Pull(second, sum);
    LookAt(sum, &sums[static_cast<std::size_t>(rank)]);
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(sums[static_cast<std::size_t>(rank)],
              std::vector<float>(kCount, static_cast<float>(rank + 1)));
  }
}

// The pull of the one waits for a push that comes after a barrier, to which the one never comes.
TEST_P(DistStoreTest, BarriersDoNotWaitForTheOpenCallsOfAWorkerThatLeaves) {
  constexpr std::int64_t kCount = 1000;
  Job job({.network = GetParam(), .num_workers = 2});
  std::vector<float> pulled;
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    store.Init("w", Filled(engine, kCount, 0));
    if (rank == 1) store.Barrier();
    store.Push("w", Filled(engine, kCount, static_cast<float>(rank + 1)));
    if (rank == 1) return;
    const NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
    store.Pull("w", out);
    LookAt(out, &pulled);
  });
  EXPECT_EQ(pulled, std::vector<float>(kCount, 3));
}

// Worker 0 keeps another store, and so stays in the job.
TEST_P(DistStoreTest, AStoreThatOneWorkerHasDroppedGoesOnWithoutIt) {
  constexpr std::int64_t kRows = 40'000;  // cut over two servers
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 2});
  std::latch gone(1);  // from the rounds of "w", and so the servers know of the drop
  job.RunNodes([&](int rank, const std::shared_ptr<WorkerNode>& node, Engine& engine) {
    const auto kept = Job::NewStore(node, engine, "dist_sync");
    auto dropped = Job::NewStore(node, engine, "dist_sync");
    const auto ones = [&](double value) {
      return NDArray::Full({kRows, 2}, value, DType::kFloat32, Cpu(), engine);
    };
    dropped->Init("w", ones(0));
    dropped->Init("rows", RowSparseNDArray::FromDense(ones(0)));
    dropped->Push("w", ones(rank + 1));
    dropped->Push("rows", ones(rank + 1));
    if (rank == 0) {
      // When the ids are there it makes no requests, as there is no such row.
      const NDArray ids =
          NDArray::FromVector(std::vector<std::int64_t>{kRows}, {1}, DType::kInt64, Cpu(), engine);
      std::optional<Completion> computed;
      engine.PushAsync(
          {.name = "ids", .reads = {ids.var()}, .writes = {ids.var()}, .start_inline = true},
          [&](Completion done) { computed.emplace(std::move(done)); });
      const RowSparseNDArray out({kRows, 2}, DType::kFloat32, Cpu(), engine);
      dropped->RowSparsePull("rows", out, ids);
      std::thread later([&] {
        gone.wait();
        (*computed)();
      });
      dropped.reset();
      later.join();
      EXPECT_THROW(out.WaitToRead(), InvalidArgument);
    } else {
      for (const char* key : {"w", "rows"}) {
        for (int round = 2; round <= 5; ++round) dropped->Push(key, ones(round));
        const NDArray out = ones(0);
        dropped->Pull(key, out);
        EXPECT_EQ(out.ToVector<float>(), std::vector<float>(2 * kRows, 5)) << key;
        if (key == std::string("w")) gone.count_down();
      }
    }
    kept->Init("k", ones(0));
    kept->Push("k", ones(1));
    const NDArray out = ones(0);
    kept->Pull("k", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(2 * kRows, 2));
  });
}

// Store 1 was never made, so the last one is store 0.
TEST_P(DistStoreTest, AStoreThatWasRefusedIsNotWaitedForWhenAWorkerLeaves) {
  constexpr std::int64_t kCount = 1000;
  Job job({.network = GetParam(), .num_workers = 2});
  std::vector<float> pulled;
  std::latch opened(2);
  job.RunNodes([&](int rank, const std::shared_ptr<WorkerNode>& node, Engine& engine) {
    const auto store = Job::NewStore(node, engine, "dist_sync");
    if (rank == 1) {
      const auto other = Job::NewStore(node, engine, "dist_async");
      opened.arrive_and_wait();
    } else {
      opened.arrive_and_wait();
      EXPECT_THROW(Job::NewStore(node, engine, "dist_sync"), InvalidArgument);
    }
    store->Init("w", Filled(engine, kCount, 0));
    if (rank == 1) store->Barrier();
    store->Push("w", Filled(engine, kCount, static_cast<float>(rank + 1)));
    if (rank == 1) return;
    const NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
    store->Pull("w", out);
    LookAt(out, &pulled);
  });
  EXPECT_EQ(pulled, std::vector<float>(kCount, 3));
}

TEST_P(DistStoreTest, AsyncPushesAreAppliedOnceEach) {
  constexpr int kWorkers = 3;
  Job job({.network = GetParam(), .num_workers = kWorkers, .num_servers = 2});
  job.RunWorkers("dist_async", [](int, KVStore& store, Engine& engine) {
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    store.Init("w", Filled(engine, 50'000, 0));
    for (int i = 1; i <= 20; ++i) {
      store.Push("w", Filled(engine, 50'000, -1));
      NDArray out({50'000}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      const std::vector<float> values = out.ToVector<float>();
      EXPECT_GE(values[0], static_cast<float>(i));
      EXPECT_LE(values[0], static_cast<float>(20 * kWorkers));
    }
    store.Barrier();
    NDArray out({50'000}, DType::kFloat32, Cpu(), engine);
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(50'000, 20 * kWorkers));
  });
}

// Ones that are still being computed.
class LateGradient {
 public:
  LateGradient(Engine& engine, std::int64_t count) : array(Filled(engine, count, 1)) {
    engine.PushAsync({.name = "computed", .writes = {array.var()}, .start_inline = true},
                     [this](Completion done) { computed_.emplace(std::move(done)); });
  }
  void Come() { (*computed_)(); }

  const NDArray array;

 private:
  std::optional<Completion> computed_;
};

TEST_P(DistStoreTest, ABarrierBehindAGradientThatNeverComesEndsAtTheDeadline) {
  Job job({.network = GetParam(), .op_deadline = std::chrono::seconds(4)});
  job.RunWorkers("dist_async", [](int, KVStore& store, Engine& engine) {
    store.Init("w", Filled(engine, 10, 0));
    LateGradient gradient(engine, 10);
    store.Push("w", gradient.array);
    try {
      store.Barrier();
      ADD_FAILURE() << "it came";
    } catch (const TimeoutError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("barrier 0"));
      EXPECT_THAT(error.what(), testing::HasSubstr("gradients of earlier pushes are not there"));
    }
    gradient.Come();
  });
}

// Its turn at the servers has not come; the round of a push fails for everybody all the same.
TEST_P(DistStoreTest, CallsBehindAGradientThatNeverComesEndAtTheDeadline) {
  Job job({.network = GetParam(), .op_deadline = std::chrono::seconds(4)});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    constexpr std::int64_t kCount = 5000;  // too many to be copied as they are sent
    store.Init("w", Filled(engine, kCount, 0));
    LateGradient gradient(engine, kCount);
    store.Push("w", gradient.array);
    std::vector<NDArray> outputs;
    for (int i = 0; i < 4; ++i) outputs.push_back(Filled(engine, kCount, 0));
    store.Pull("w", outputs[0]);
    // More than go ahead of the rounds.
    for (int i = 1; i < 4; ++i) store.PushPull("w", Filled(engine, kCount, 2), outputs[i]);
    for (const NDArray& output : outputs) {
      const char* const call = output.IsSameAs(outputs[0]) ? "pull" : "pushpull";
      try {
        output.WaitToRead();
        ADD_FAILURE() << call << " came";
      } catch (const TimeoutError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(call));
        EXPECT_THAT(error.what(), testing::HasSubstr("key 'w'"));
        EXPECT_THAT(error.what(), testing::HasSubstr("this worker's push before it"));
      }
    }
    gradient.Come();
    NDArray out = Filled(engine, kCount, 0);
    store.Pull("w", out);
    EXPECT_THROW(out.WaitToRead(), Error) << "of round 4";
    store.Push("w", Filled(engine, kCount, 3));
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(kCount, 3));
  });
}

TEST_P(DistStoreTest, CallsOfAKeyThatIsRemovedMeanwhileEndAtTheDeadline) {
  Job job({.network = GetParam(), .op_deadline = std::chrono::seconds(4)});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.Init("w", Filled(engine, 10, 0));
    LateGradient gradient(engine, 10);
    store.Push("w", gradient.array);
    NDArray out = Filled(engine, 10, 0);
    store.Pull("w", out);
    store.Remove("w");
    EXPECT_THROW(out.WaitToRead(), TimeoutError);
    gradient.Come();
    store.Init("w", Filled(engine, 10, 7));
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(10, 7));
  });
}

TEST_P(DistStoreTest, ABarrierComesAfterPushesWhoseGradientsAreStillBeingComputed) {
  constexpr int kWorkers = 2;
  Job job({.network = GetParam(), .num_workers = kWorkers});
  job.RunWorkers("dist_async", [](int rank, KVStore& store, Engine& engine) {
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    for (const char* key : {"w", "late"}) store.Init(key, Filled(engine, 1000, 0));
    for (int round = 1; round <= 10; ++round) {
      const NDArray gradient = Filled(engine, 1000, -1);
      std::thread computation;
      if (rank == round % kWorkers) {
        // An op that another thread completes only now or later.
        engine.PushAsync({.name = "computed", .writes = {gradient.var()}, .start_inline = true},
                         [&](Completion done) {
                           computation = std::thread([done = std::move(done)]() mutable {
                             std::this_thread::sleep_for(std::chrono::milliseconds(5));
                             done();
                           });
                         });
      }
      store.Push("late", gradient);
      for (int i = 0; i < 3; ++i) store.Push("w", Filled(engine, 1000, -1));
      store.Barrier();
      for (const auto& [key, pushes] : {std::pair("late", 1), std::pair("w", 3)}) {
        NDArray out({1000}, DType::kFloat32, Cpu(), engine);
        store.Pull(key, out);
        EXPECT_EQ(out.ToVector<float>(),
                  std::vector<float>(1000, static_cast<float>(round * kWorkers * pushes)))
            << key << " in round " << round;
      }
      store.Barrier();
      if (computation.joinable()) computation.join();
    }
  });
}

TEST_P(DistStoreTest, PublishedScriptsPushWithoutWaitingAndInitOnRankZeroAlone) {
  Job job({.network = GetParam(), .num_workers = 3, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    if (rank == 0) store.Init(3, Filled(engine, 1000, 0));
    store.Barrier();
    for (int round = 0; round < 20; ++round) store.Push(3, Filled(engine, 1000, 1));
    NDArray out({1000}, DType::kFloat32, Cpu(), engine);
    store.Pull(3, out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(1000, 3));
    EXPECT_TRUE(store.Contains(3));
    EXPECT_FALSE(store.Contains(4));
    EXPECT_EQ(store.Keys(), std::vector<Key>{Key(std::int64_t{3})});
  });
}

TEST_P(DistStoreTest, StatesAreGatheredAndLoadedByAnotherNumberOfServers) {
  constexpr std::int64_t kCount = 50'000;
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  const auto expected =
      LocalRounds(2, 6, kCount, DType::kFloat32, MakeOptimizer("adam", {{"learning_rate", 0.5}}));
  std::vector<float> weights;
  const auto train = [&](int rank, KVStore& store, Engine& engine, const OptimizerPtr& optimizer,
                         int first, int last) {
    for (int round = first; round <= last; ++round) {
      optimizer->Set("learning_rate", 0.5 / round);
      store.Push("w", ArrayOf(Gradient(rank, round, kCount), engine));
      NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      ASSERT_EQ(out.ToVector<float>(), expected[static_cast<std::size_t>(round - 1)])
          << "round " << round;
    }
  };
  {
    Job job({.network = GetParam(), .num_workers = 2, .num_servers = 3});
    job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
      const OptimizerPtr optimizer = MakeOptimizer("adam", {{"learning_rate", 0.5}});
      store.SetOptimizer(optimizer);
      store.Init("w", ArrayOf(Gradient(0, 0, kCount), engine));
      train(rank, store, engine, optimizer, 1, 3);
      if (rank == 0) store.SaveOptimizerStates(file, /*with_optimizer=*/true);
      store.Barrier();
    });
  }
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 1});
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    const OptimizerPtr optimizer = MakeOptimizer("adam", {{"learning_rate", 0.5}});
    store.SetOptimizer(optimizer);
    store.Init("w", ArrayOf(expected[2], engine));
    if (rank == 0) store.LoadOptimizerStates(file);
    store.Barrier();
    train(rank, store, engine, optimizer, 4, 6);
  });
}

// Parts of one block each, whose states take more than one message allows to say of them (but under
// the sanitizers, where so many take half a minute).
TEST_P(DistStoreTest, StatesOfVeryManyPartsAreSavedAndLoaded) {
  constexpr int kKeys = kSanitized ? 3'000 : 12'000;
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  const OptimizerPtr optimizer = Sgd({.learning_rate = 1, .momentum = 0.5});
  const auto init = [&](KVStore& store, Engine& engine) {
    store.SetOptimizer(optimizer);
    for (int key = 0; key < kKeys; ++key) store.Init(key, Filled(engine, 1, 0));
  };
  // The value of all keys after a push of 1 to each.
  const auto push = [&](KVStore& store, Engine& engine) {
    const NDArray one = Filled(engine, 1, 1);
    std::vector<NDArray> out;
    for (int key = 0; key < kKeys; ++key) {
      store.PushPull(key, one, out.emplace_back(Filled(engine, 1, 0)));
    }
    std::set<float> values;
    for (const NDArray& value : out) values.insert(value.ToVector<float>()[0]);
    EXPECT_EQ(values.size(), 1u);
    return *values.begin();
  };
  {
    Job job({.network = GetParam()});
    job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
      init(store, engine);
      EXPECT_EQ(push(store, engine), -1);
      store.SaveOptimizerStates(file, /*with_optimizer=*/false);
    });
  }
  Job job({.network = GetParam()});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    init(store, engine);
    store.LoadOptimizerStates(file);
    EXPECT_EQ(push(store, engine), -1.5F) << "half of the last momentum, and the gradient";
  });
}

TEST_P(DistStoreTest, CommandsRunOnEveryServer) {
  std::atomic<int> ran{0};
  Job job({.network = GetParam(),
           .num_workers = 2,
           .num_servers = 3,
           .program = {.controller = [&](int head, std::string_view body) {
             if (head == 9) throw std::runtime_error("no such head");
             EXPECT_EQ(head, 4);
             EXPECT_EQ(body, "abc");
             ++ran;
           }}});
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine&) {
    if (rank == 0) {
      store.SendCommandToServers(4, "abc");
      EXPECT_EQ(ran.load(), 3);
      EXPECT_THROW(store.SendCommandToServers(9, ""), Error);
    }
    store.Barrier();
  });
}

// What is refused inside an op is not sent either: a barrier would count as this worker's.
TEST_P(DistStoreTest, CallsThatWaitSendNothingFromInsideAnOp) {
  std::atomic<int> ran{0};
  Job job({.network = GetParam(),
           .num_workers = 2,
           .program = {.controller = [&](int, std::string_view) { ++ran; }}});
  std::promise<void> refused, passed;
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    if (rank == 1) {
      refused.get_future().wait();
      store.Barrier();
      passed.set_value();
      return;
    }
    for (const auto& call :
         {std::function<void()>([&] { store.Barrier(); }),
          std::function<void()>([&] { store.SendCommandToServers(4, "inside"); })}) {
      std::string error;
      engine.Push({.name = "outer", .writes = {engine.NewVar()}}, [&] { error = ErrorOf(call); });
      engine.WaitForAll();
      EXPECT_THAT(error, testing::HasSubstr("inside op 'outer'"));
    }
    store.SendCommandToServers(4, "outside");  // comes after what was sent before
    EXPECT_EQ(ran.load(), 1);
    refused.set_value();
    EXPECT_EQ(passed.get_future().wait_for(std::chrono::milliseconds(50)),
              std::future_status::timeout);
    store.Barrier();
  });
}

namespace {

class CountedSets final : public ForwardingTransport {
 public:
  CountedSets(std::unique_ptr<Transport> transport, std::atomic<int>& sent)
      : ForwardingTransport(std::move(transport)), sent_(sent) {}

  SendId Send(NodeId to, Message message, std::function<void()> sent) override {
    const bool is_set =
        message.kind == Kind::kSetOptimizer || message.kind == Kind::kSetCompression;
    sent_ += is_set ? 1 : 0;
    return ForwardingTransport::Send(to, std::move(message), std::move(sent));
  }

 private:
  std::atomic<int>& sent_;
};

}  // namespace

// What one thread asks for inside an op must not take back what another one sets meanwhile.
TEST_P(DistStoreTest, WhatIsRefusedInsideAnOpIsNotTakenBack) {
  std::atomic<int> sent{0};
  Job job({.network = GetParam(), .wrap = [&](std::unique_ptr<Transport> transport) {
             return std::make_unique<CountedSets>(std::move(transport), sent);
           }});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const auto refused = [&](const std::string& name, const std::function<void()>& call) {
      std::string error;
      engine.Push({.name = "outer", .writes = {engine.NewVar()}}, [&] { error = ErrorOf(call); });
      engine.WaitForAll();
      EXPECT_THAT(
          error, testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("inside op 'outer'")));
    };
    refused("SetOptimizer", [&] { store.SetOptimizer(MakeOptimizer("sgd", {})); });
    refused("SetGradientCompression", [&] { store.SetGradientCompression({.type = "2bit"}); });
    EXPECT_EQ(sent, 0);
    store.SetGradientCompression({.type = "1bit"});
    EXPECT_EQ(sent, 1);
  });
}

TEST_P(DistStoreTest, BadInputIsNamedAndChangesNothing) {
  Job job({.network = GetParam(), .num_workers = 2, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int rank, KVStore& store, Engine& engine) {
    EXPECT_EQ(ErrorOf([&] { store.Push("x", Filled(engine, 3, 1)); }),
              "Push: unknown key 'x': expected one that was initialised");
    EXPECT_EQ(ErrorOf([&] { store.SetUpdater([](KeyRef, const NDArray&, const NDArray&) {}); }),
              "SetUpdater: stores of type unnamed update on their servers: expected SetOptimizer, "
              "which names an optimizer for them");
    // A rank whose value differs is told, by itself.
    const std::string init = ErrorOf([&] { store.Init("w", Filled(engine, 3 + rank, 1)); });
    if (rank == 0) {
      EXPECT_EQ(init, "none");
    } else {
      EXPECT_NE(init.find("(3,)"), std::string::npos) << init;
      EXPECT_NE(init.find("(4,)"), std::string::npos) << init;
    }
    store.Barrier();
    EXPECT_EQ(ErrorOf([&] { store.Push("w", Filled(engine, 5, 1)); }),
              "Push: key 'w': expected shape (3,), got (5,)");
    store.Push("w", Filled(engine, 3, 1));
    NDArray out({3}, DType::kFloat32, Cpu(), engine);
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(3, 2));
  });
}

// Names of more than a MiB in all.
TEST_P(DistStoreTest, KeysNamesAllHoweverManyThereAre) {
  Job job({.network = GetParam(), .num_servers = 2});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    std::vector<std::string> names;
    for (int i = 0; i < 40; ++i) {
      names.push_back(std::string(100'000, static_cast<char>('A' + i)));
    }
    store.Init(names, std::vector<NDArray>(names.size(), Filled(engine, 1, 1)));
    const std::vector<Key> expected(names.begin(), names.end());
    EXPECT_TRUE(store.Keys() == expected);
  });
}

// One of the others could be initialised, but could not be again with the rest of the list.
TEST_P(DistStoreTest, AListWithAKeyThatIsTooLongToBeSentInitialisesNone) {
  Job job({.network = GetParam()});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    const std::vector<std::string> keys = {"w", std::string(2 << 20, 'k')};
    const NDArray ones = Filled(engine, 3, 1);
    const std::string error = ErrorOf([&] { store.Init(keys, std::vector{ones, ones}); });
    EXPECT_NE(error.find("Init: key 'kkk"), std::string::npos) << error;
    EXPECT_NE(error.find("at most 1048576 bytes"), std::string::npos) << error;
    EXPECT_LT(error.size(), 300u);
    EXPECT_FALSE(store.Contains("w"));
    store.Init("w", ones);
  });
}

// One call wins, on all servers, whatever overtakes what; the others are told of both.
TEST_P(DistStoreTest, OfDifferentOptimizersOfSeveralRanksTheFirstCountsEverywhere) {
  constexpr int kWorkers = 3;
  constexpr std::int64_t kCount = 50'000;
  const std::array<std::string, kWorkers> names = {"sgd", "adam", "signum"};
  const auto make = [&](int rank) {
    return MakeOptimizer(names[static_cast<std::size_t>(rank)], {{"learning_rate", 0.5}});
  };
  const std::uint64_t first = kvstore_test::TestSeed();
  for (std::uint64_t seed = first; seed < first + (GetParam() == Network::kSim ? 20 : 4); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::atomic<int> winner{-1};
    std::array<std::string, kWorkers> errors;
    Job job({.network = GetParam(), .num_workers = kWorkers, .num_servers = 3, .seed = seed});
    job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
      std::string& error = errors[static_cast<std::size_t>(rank)];
      error = ErrorOf([&] { store.SetOptimizer(make(rank)); });
      if (error == "none") {
        EXPECT_EQ(winner.exchange(rank), -1) << "two calls won";
      }
      store.Barrier();
      ASSERT_GE(winner.load(), 0) << "no call won";
      const std::string& won = names[static_cast<std::size_t>(winner.load())];
      if (error != "none") {
        EXPECT_NE(error.find(won), std::string::npos) << error;
        EXPECT_NE(error.find(names[static_cast<std::size_t>(rank)]), std::string::npos) << error;
        EXPECT_NE(error.find("worker " + std::to_string(winner.load())), std::string::npos)
            << error;
        EXPECT_NE(error.find("worker " + std::to_string(rank)), std::string::npos) << error;
        EXPECT_EQ(ErrorOf([&] { store.SetOptimizer(make(winner.load())); }), "none");
      }
      store.Init("w", ArrayOf(Gradient(0, 0, kCount), engine));
      store.Push("w", ArrayOf(Gradient(rank, 1, kCount), engine));
      NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      EXPECT_EQ(out.ToVector<float>(),
                LocalRounds(kWorkers, 1, kCount, DType::kFloat32, make(winner.load()))[0]);
    });
  }
}

// Likewise. Codes of one kind are none of the other.
TEST_P(DistStoreTest, OfDifferentCompressionsOfSeveralRanksTheFirstCountsEverywhere) {
  constexpr int kWorkers = 2;
  constexpr std::int64_t kCount = 50'000;
  const std::array<CompressionOptions, kWorkers> options = {
      {{.type = "1bit", .threshold = 0.25}, {.type = "2bit", .threshold = 0.5}}};
  std::array<std::vector<float>, kWorkers> expected;
  for (int winner = 0; winner < kWorkers; ++winner) {
    Engine engine(EngineOptions::FromEnvironment());
    const auto store = KVStore::Create("local", engine);
    store->SetGradientCompression(options[static_cast<std::size_t>(winner)]);
    store->Init("w", ArrayOf(Gradient(0, 0, kCount), engine));
    store->Push("w", std::vector{ArrayOf(Gradient(0, 1, kCount), engine),
                                 ArrayOf(Gradient(1, 1, kCount), engine)});
    NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
    store->Pull("w", out);
    expected[static_cast<std::size_t>(winner)] = out.ToVector<float>();
  }
  const std::uint64_t first = kvstore_test::TestSeed();
  for (std::uint64_t seed = first; seed < first + (GetParam() == Network::kSim ? 20 : 4); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::atomic<int> winner{-1};
    Job job({.network = GetParam(), .num_workers = kWorkers, .num_servers = 3, .seed = seed});
    job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
      std::string error;
      try {
        store.SetGradientCompression(options[static_cast<std::size_t>(rank)]);
        EXPECT_EQ(winner.exchange(rank), -1) << "two calls won";
      } catch (const InvalidArgument& refused) {
        error = refused.what();
      }
      store.Barrier();
      ASSERT_GE(winner.load(), 0) << "no call won";
      const auto won = static_cast<std::size_t>(winner.load());
      if (!error.empty()) {
        for (const char* const text : {"worker 0", "worker 1", "1bit", "2bit", "0.25", "0.5"}) {
          EXPECT_THAT(error, testing::HasSubstr(text));
        }
        store.SetGradientCompression(options[won]);
      }
      store.Init("w", ArrayOf(Gradient(0, 0, kCount), engine));
      store.Push("w", ArrayOf(Gradient(rank, 1, kCount), engine));
      NDArray out({kCount}, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      EXPECT_EQ(out.ToVector<float>(), expected[won]);
    });
  }
}

// As "never" is written; no array has so many bytes as such a number of float32.
TEST_P(DistStoreTest, ACutBoundBeyondAllBytesCutsNothing) {
  for (const std::int64_t cut_bound :
       {std::numeric_limits<std::int64_t>::max(), std::int64_t{1} << 62}) {
    SCOPED_TRACE(cut_bound);
    Job job(
        {.network = GetParam(), .num_servers = 2, .slice_bytes = 1 << 20, .cut_bound = cut_bound});
    job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
      const Shape shape{300, 200};
      const NDArray ones = NDArray::Full(shape, 1, DType::kFloat32, Cpu(), engine);
      store.Init("w", ones);
      store.SetOptimizer(MakeOptimizer("groupadagrad", {}));
      store.Push("w", ones);  // an error if it is cut
      NDArray out(shape, DType::kFloat32, Cpu(), engine);
      store.Pull("w", out);
      EXPECT_LT(out.ToVector<float>()[0], 1);
    });
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist
