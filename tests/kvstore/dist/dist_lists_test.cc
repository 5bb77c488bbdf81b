// Calls on lists of keys, whose requests go to the servers together: they do what the calls on the
// single keys would.
#include <heddle/error.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/dist/forwarding_transport.h"
#include "tests/kvstore/dist/job.h"

namespace heddle::kvstore::dist {
namespace {

class DistListsTest : public ::testing::TestWithParam<Network> {};

INSTANTIATE_TEST_SUITE_P(Networks, DistListsTest,
                         ::testing::Values(Network::kSim, Network::kTcp, Network::kSharedMemory),
                         [](const auto& info) {
                           return info.param == Network::kSim   ? "Sim"
                                  : info.param == Network::kTcp ? "Tcp"
                                                                : "SharedMemory";
                         });

NDArray Filled(Engine& engine, std::int64_t count, float value) {
  return NDArray::Full({count}, value, DType::kFloat32, Cpu(), engine);
}

std::vector<Key> Names(std::size_t count) {
  std::vector<Key> names;
  for (std::size_t i = 0; i < count; ++i) names.emplace_back(static_cast<std::int64_t>(i));
  return names;
}

// Short keys, long ones and some that are cut.
std::int64_t SizeOfKey(std::size_t key) { return key % 7 == 3 ? 40'000 : key % 5 == 1 ? 2000 : 64; }

// All ranks make the same calls, one by one or as lists, and wait for nothing until the end.
// Oracle: a key holds the sum of what the ranks have pushed last.
TEST_P(DistListsTest, RandomListsHoldWhatTheirSingleCallsWould) {
  constexpr std::size_t kKeys = 150;
  constexpr int kWorkers = 2;
  const std::uint64_t seed = kvstore_test::TestSeed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Job job({.network = GetParam(), .num_workers = kWorkers, .num_servers = 2});
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    std::mt19937_64 random(seed);
    std::vector<float> held(kKeys, 1);
    std::vector<NDArray> first;
    for (std::size_t key = 0; key < kKeys; ++key) {
      first.push_back(Filled(engine, SizeOfKey(key), held[key]));
    }
    store.Init(Names(kKeys), first);
    struct Pulled {
      std::size_t key;
      NDArray out;
      float expected;
    };
    std::vector<Pulled> pulled;
    for (int call = 0; call < 40; ++call) {
      std::vector<std::size_t> named(kKeys);
      for (std::size_t i = 0; i < kKeys; ++i) named[i] = i;
      std::shuffle(named.begin(), named.end(), random);
      named.resize(random() % 3 == 0 ? 1 : 1 + random() % kKeys);
      std::vector<Key> keys;
      std::vector<NDArray> values;
      std::vector<NDArray> outs;
      const std::uint64_t kind = random() % 3;
      for (const std::size_t key : named) {
        const auto value = static_cast<float>(random() % 1000);
        keys.emplace_back(static_cast<std::int64_t>(key));
        if (kind != 1) {
          values.push_back(Filled(engine, SizeOfKey(key), value + static_cast<float>(rank)));
          held[key] = kWorkers * value + 1;
        }
        if (kind != 0) {
          outs.emplace_back(Shape{SizeOfKey(key)}, DType::kFloat32, Cpu(), engine);
          pulled.push_back({key, outs.back(), held[key]});
        }
      }
      if (kind == 0) {
        store.Push(keys, values);
      } else if (kind == 1) {
        store.Pull(keys, outs);
      } else {
        store.PushPull(keys, values, outs);
      }
      if (random() % 16 == 0) store.Barrier();
    }
    for (const auto& [key, out, expected] : pulled) {
      ASSERT_EQ(out.ToVector<float>(),
                std::vector<float>(static_cast<std::size_t>(SizeOfKey(key)), expected))
          << "key " << key;
    }
    store.Barrier();
  });
}

TEST_P(DistListsTest, AnInputThatIsNotReadyHoldsUpNoOtherKey) {
  constexpr std::size_t kKeys = 100;
  constexpr std::size_t kLate = 30;
  Job job({.network = GetParam()});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    std::vector<NDArray> values;
    std::vector<NDArray> outs;
    for (std::size_t key = 0; key < kKeys; ++key) {
      values.push_back(Filled(engine, 64, 0));
      outs.push_back(Filled(engine, 64, -1));
    }
    store.Init(Names(kKeys), values);
    for (std::size_t key = 0; key < kKeys; ++key) values[key] = Filled(engine, 64, 2);
    engine.WaitForAll();
    std::promise<Completion> late;
    engine.PushAsync({.name = "late", .writes = {values[kLate].var()}},
                     [&late](Completion done) { late.set_value(std::move(done)); });
    store.Push(Names(kKeys), values);
    store.Pull(Names(kKeys), outs);
    for (std::size_t key = 0; key < kKeys; ++key) {
      if (key == kLate) continue;
      EXPECT_EQ(outs[key].ToVector<float>()[63], 2) << "key " << key;
    }
    late.get_future().get()();
    EXPECT_EQ(outs[kLate].ToVector<float>()[63], 2);
  });
}

TEST(DistLists, MoreArraysOfAKeyThanAnOpCanNameAreRefusedBeforeAnything) {
  Job job({.num_workers = 1});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    store.Init({0, 1}, {Filled(engine, 3, 5), Filled(engine, 3, 5)});
    const NDArray one = Filled(engine, 3, 1);
    const std::vector<NDArray> most(65'000, one);
    EXPECT_EQ(MessageOf<InvalidArgument>([&] {
                store.Push({0, 1, 1}, {{one}, most, {one}});
              }),
              "Push: key 1: expected at most 65000 arrays, got 65001");
    const NDArray out = Filled(engine, 3, 0);
    store.Pull(0, out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(3, 5));
  });
}

TEST_P(DistListsTest, AFailedInputFailsItsKeyAlone) {
  constexpr std::size_t kKeys = 100;
  constexpr std::size_t kFailed = 70;
  Job job({.network = GetParam()});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    std::vector<NDArray> values;
    std::vector<NDArray> outs;
    for (std::size_t key = 0; key < kKeys; ++key) {
      values.push_back(Filled(engine, 64, 3));
      outs.push_back(Filled(engine, 64, -1));
    }
    store.Init(Names(kKeys), values);
    engine.Push({.name = "fails", .writes = {values[kFailed].var()}},
                [] { throw InvalidArgument("no gradient"); });
    store.PushPull(Names(kKeys), values, outs);
    for (std::size_t key = 0; key < kKeys; ++key) {
      if (key == kFailed) {
        EXPECT_THROW(outs[key].WaitToRead(), Error);
      } else {
        EXPECT_EQ(outs[key].ToVector<float>()[0], 3) << "key " << key;
      }
    }
  });
}

// One thread with lists, one with single keys: nothing is left behind, and of each thread what came
// last is the last.
TEST_P(DistListsTest, ThreadsMeetOnTheSameKeys) {
  constexpr std::size_t kKeys = 80;
  constexpr int kCalls = 60;
  Job job({.network = GetParam()});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const std::vector<NDArray> zeros(kKeys, Filled(engine, 64, 0));
    store.Init(Names(kKeys), zeros);
    std::thread with_lists([&] {
      for (int call = 1; call <= kCalls; ++call) {
        const std::vector<NDArray> values(kKeys, Filled(engine, 64, static_cast<float>(call)));
        store.Push(Names(kKeys), values);
      }
    });
    for (int call = 1; call <= kCalls; ++call) {
      const NDArray value = Filled(engine, 64, static_cast<float>(-call));
      for (std::size_t key = 0; key < kKeys; ++key) {
        store.Push(static_cast<std::int64_t>(key), value);
      }
    }
    with_lists.join();
    for (std::size_t key = 0; key < kKeys; ++key) {
      NDArray out({64}, DType::kFloat32, Cpu(), engine);
      store.Pull(static_cast<std::int64_t>(key), out);
      const float last = out.ToVector<float>()[0];
      EXPECT_TRUE(last == kCalls || last == -kCalls) << "key " << key << " holds " << last;
    }
  });
}

// What its answers touch is in its cache.
TEST(DistLists, WhoMakesManyRequestsTakesAnswersMeanwhile) {
  class Looking final : public ForwardingTransport {
   public:
    Looking(std::unique_ptr<Transport> transport, std::atomic<int>& looks)
        : ForwardingTransport(std::move(transport)), looks_(looks) {}
    void TakeArrived() override {
      ++looks_;
      ForwardingTransport::TakeArrived();
    }

   private:
    std::atomic<int>& looks_;
  };
  constexpr std::size_t kKeys = 500;
  std::atomic<int> looks = 0;
  Job job({.network = Network::kTcp, .wrap = [&looks](std::unique_ptr<Transport> transport) {
             return std::make_unique<Looking>(std::move(transport), looks);
           }});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    const std::vector<NDArray> values(kKeys, Filled(engine, 64, 1));
    store.Init(Names(kKeys), values);
    engine.WaitForAll();
    const int before = looks;
    store.Push(Names(kKeys), values);
    const int after_list = looks;
    EXPECT_GE(after_list - before, 2);
    for (std::size_t key = 0; key < kKeys; ++key) {
      store.Push(static_cast<std::int64_t>(key), values[key]);
    }
    EXPECT_GE(looks - after_list, 2);
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
