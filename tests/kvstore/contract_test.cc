// What heddle/kvstore.h promises of the stores of one process, beyond what it promises of all
// (conformance_test.cc): updaters, keys made by a push, exact priorities.
#include <heddle/kvstore.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

class ContractTest : public StoreTest {};

// ---- Push

TEST_P(ContractTest, RepeatedKeysAreOnePushForTheUpdater) {
  store->Init({1, 2}, {Full(0), Full(0)});
  std::vector<std::int64_t> updated;
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    updated.push_back(key.number());
    stored += input;
  });
  store->Push({2, 1, 2}, {Full(1), Full(2), Full(4)});
  EXPECT_EQ(updated, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(Pulled(*store, 2), All(5));
}

TEST_P(ContractTest, AFirstPushMakesAKeyOfTheSumAndDoesNotAliasIt) {
  NDArray value = Full(1);
  store->Push({"one", "two", "two"}, {value, Full(2), Full(3)});
  value += 1;
  EXPECT_EQ(Pulled(*store, "one"), All(1));
  EXPECT_EQ(Pulled(*store, "two"), All(5));
  ExpectInvalid(
      [&] {
        store->Push("new", {Full(1), NDArray::Zeros({4}, DType::kFloat32, On(Cpu()), engine)});
      },
      {"'new'", "(2, 3)", "(4,)"});
  EXPECT_FALSE(store->Contains("new"));
}

TEST_P(ContractTest, PushToANewKeyCreatesItOnlyWithTheDefaultUpdater) {
  store->Push("made", Full(1));
  store->SetOptimizer(Sgd());
  ExpectInvalid([&] { store->Push("k", Full(1)); }, {"'k'", "never initialised", "optimizer"});
  store->SetUpdater([](KeyRef, const NDArray&, const NDArray&) {});
  ExpectInvalid([&] { store->Push("k", Full(1)); }, {"'k'", "never initialised", "updater"});
  ExpectInvalid([&] { store->PushPull("k", Full(1)); }, {"'k'", "never initialised"});
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"made"}));
  store->Init("k", Full(2));
  EXPECT_EQ(Pulled(*store, "k"), All(2));
}

// ---- Order

TEST_P(ContractTest, HigherPriorityRunsFirst) {
  if (GetParam().engine != "threaded" || GetParam().workers != 1) {
    GTEST_SKIP() << "exact on one worker";
  }
  std::vector<NDArray> values;
  std::vector<NDArray> outs;
  for (int i = 0; i < 4; ++i) {
    store->Init(i, Full(i));
    values.push_back(Full(10 + i));
    outs.push_back(Full(0));
  }
  engine.WaitForAll();
  std::latch started(1);
  std::latch released(1);
  engine.Push({.name = "blocker"}, [&] {
    started.count_down();
    released.wait();
  });
  started.wait();
  std::vector<int> order;
  std::latch noted(4);
  for (int i = 0; i < 4; ++i) {
    store->Push(i, values[i], /*priority=*/i);
    store->Pull(i, outs[i], /*priority=*/i);
    engine.Push({.name = "note", .reads = {outs[i].var()}, .priority = i}, [&, i] {
      order.push_back(i);
      noted.count_down();
    });
  }
  released.count_down();
  noted.wait();  // not a wait of the engine, which would help and so be a second worker
  EXPECT_EQ(order, (std::vector<int>{3, 2, 1, 0}));
  EXPECT_EQ(outs[3].ToVector<float>(), All(13));
}

// ---- Pull

TEST_P(ContractTest, ThePoisonOfOneOutputDoesNotReachTheOthers) {
  store->Init("k", Full(4));
  NDArray large = NDArray::Full({6, 3}, 1, DType::kFloat32, On(Cpu()), engine);
  engine.Push({.name = "fail", .writes = {large.var()}},
              [] { throw std::runtime_error("broken"); });
  NDArray whole = Poisoned("also broken");
  NDArray other = Full(0);
  store->Pull("k", {large.Slice(2, 4), whole, other});
  EXPECT_EQ(other.ToVector<float>(), All(4));
  EXPECT_EQ(whole.ToVector<float>(), All(4));  // overwritten whole, hence cured
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { large.WaitToRead(); }), "broken");
}

// A push of another thread comes before all of them or after: there is one op for it to be ordered
// by.
TEST_P(ContractTest, OutputsOfAKeyGetTheSameValue) {
  store->Init("k", Full(4));
  NDArray gradient = Full(5);
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("k", gradient);
  const auto parts = [&] {
    return NDArray::Full({6, 3}, 1, DType::kFloat32, On(Cpu()), engine).Slice(2, 4);
  };
  const std::vector<NDArray> out = {parts(), Full(0), parts(), Full(0, Cpu(), DType::kFloat64)};
  store->Pull("k", out);
  const std::string pending = engine.DumpState();
  std::size_t pulls = 0;
  for (std::size_t at = pending.find("'kvstore.pull' "); at != std::string::npos;
       at = pending.find("'kvstore.pull' ", at + 1)) {
    ++pulls;
  }
  EXPECT_LE(pulls, 1u) << pending;
  writer.Release();
  for (const NDArray& array : out) {
    EXPECT_EQ(array.AsType(DType::kFloat32).ToVector<float>(), All(5));
  }
}

// ---- PushPull and Broadcast

// Values of more than the caches hold go past them when they are pulled once more.
TEST(ContractOfLargeStores, PullsInTurnGetTheValuesWhateverTheCachesHold) {
  EngineOptions options;
  options.num_workers = 2;
  Engine engine(options);
  const std::unique_ptr<KVStore> store = KVStore::Create("local", engine);
  constexpr int kKeys = 9;
  // Whole numbers that a bfloat16 has; no two elements near one another are equal.
  const auto values = [](std::int64_t size, int key, int round) {
    std::vector<float> made(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < made.size(); ++i) {
      made[i] = static_cast<float>(i % 97) + static_cast<float>(key + 16 * round);
    }
    return made;
  };
  std::vector<NDArray> outs, halves;
  for (int key = 0; key < kKeys; ++key) {
    // No two of a size, and no whole cache lines; some too small to be split.
    const std::int64_t size = key % 3 == 0 ? 1001 + key : (std::int64_t{1} << 20) + 7 * key + 1;
    store->Init(key, NDArray::Zeros({size}, DType::kFloat32, Cpu(), engine));
    for (int copy = 0; copy < 2; ++copy) {
      outs.push_back(NDArray::Zeros({size}, DType::kFloat32, Cpu(copy), engine));
    }
    halves.push_back(NDArray::Zeros({size}, DType::kBFloat16, Cpu(), engine));
  }
  for (int round = 1; round <= 3; ++round) {
    for (int key = 0; key < kKeys; ++key) {
      const Shape& shape = outs[2 * key].shape();
      store->Push(key, NDArray::FromVector(values(outs[2 * key].size(), key, round), shape,
                                           DType::kFloat32, Cpu(), engine));
      store->Pull(key, {outs[2 * key], outs[2 * key + 1], halves[key]});
    }
    for (int key = 0; key < kKeys; ++key) {
      const std::vector<float> expected = values(outs[2 * key].size(), key, round);
      EXPECT_TRUE(outs[2 * key].ToVector<float>() == expected) << key;
      EXPECT_TRUE(outs[2 * key + 1].ToVector<float>() == expected) << key;
      EXPECT_TRUE(halves[key].AsType(DType::kFloat32).ToVector<float>() == expected) << key;
    }
  }
}

TEST_P(ContractTest, PushPullWithoutOutWritesTheValue) {
  store->Init("k", Full(1));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  const std::vector<NDArray> values = OnFour(2);
  store->PushPull("k", values);
  for (const NDArray& value : values) EXPECT_EQ(value.ToVector<float>(), All(9));
}

// ---- Keys

TEST_P(ContractTest, KeysAreInTheOrderOfTheirCreation) {
  store->Init({"z", "a"}, {Full(1), Full(2)});
  store->Push("m", Full(3));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"z", "a", "m"}));
  EXPECT_TRUE(store->Contains(std::string("m")));
  store->Remove("a");
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"z", "m"}));
  store->Init("a", NDArray::Ones({5}, DType::kInt32, On(Cpu()), engine));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"z", "m", "a"}));
}

TEST_P(ContractTest, APushMakesARemovedKeyAnew) {
  store->Init("k", Full(0));
  store->Remove("k");
  store->Push("k", Full(9));
  EXPECT_EQ(Pulled(*store, "k"), All(9));
}

// ---- Failed input

TEST_P(ContractTest, AFailedInputLeavesTheValueAloneWhateverTheUpdaterPushes) {
  store->Init("k", Full(1));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) {
    stored *= 10;  // does not look at the input
    stored += input;
  });
  store->Push("k", Poisoned("bad gradient"));
  NDArray out = Full(0);
  store->Pull("k", out);
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
  store->Push("k", Full(2));
  EXPECT_EQ(Pulled(*store, "k"), All(12));
}

TEST_P(ContractTest, MoreArraysThanAnOpCanNameAreRefusedBeforeAnything) {
  store->Init("a", Full(5));
  const std::vector<NDArray> many(65'001, Full(1));
  const auto refused = [](const auto& call) {
    const std::string message = MessageOf<InvalidArgument>(call);
    EXPECT_NE(message.find("expected at most 65000 arrays, got 65001"), std::string::npos);
    EXPECT_NE(message.find("key 'new'"), std::string::npos) << message;
  };
  refused([&] { store->Push("new", many); });
  refused([&] { store->Push({"a", "new"}, {{Full(1)}, many}); });
  // In several parts.
  const std::vector<NDArray> most(many.begin() + 1, many.end());
  refused([&] { store->Push({"a", "new", "new"}, {{Full(1)}, most, {Full(1)}}); });
  refused([&] { store->PushPull({"new", "new"}, {most, {Full(1)}}); });
  EXPECT_FALSE(store->Contains("new"));
  EXPECT_EQ(Pulled(*store, "a"), All(5));
}

// Overwritten whole, the value would be cured.
TEST_P(ContractTest, AFailedInputLeavesTheValueAloneWhateverOverwritesIt) {
  const NDArray nine = Full(9);
  const std::function<void(const NDArray&)> overwrites[] = {
      [](const NDArray& stored) { stored.Fill(0); },
      [&](const NDArray& stored) { nine.CopyTo(stored); },
      [&](const NDArray& stored) {
        if (stored.device().type == DeviceType::kGpu) return;
        engine.Push({.name = "own", .writes = {stored.var()}},
                    [stored] { std::fill_n(stored.data<float>(), stored.size(), 7.F); });
      }};
  int key = 0;
  for (const auto& overwrite : overwrites) {
    store->Init(++key, Full(1));
    store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
      overwrite(stored);
      stored += input;
    });
    store->Push(key, Poisoned("bad gradient"));
    NDArray out = Full(0);
    store->Pull(key, out);
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
    store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
    store->Push(key, Full(2));
    EXPECT_EQ(Pulled(*store, key), All(3));
    // What overwrites it is no less free to when all is well.
    store->SetUpdater([](KeyRef, const NDArray&, const NDArray& stored) { stored.Fill(4); });
    store->Push(key, Full(2));
    EXPECT_EQ(Pulled(*store, key), All(4));
  }
}

// Nor what is skipped because another array has failed, before something overwrites it.
TEST_P(ContractTest, AFailedInputLeavesTheValueAloneWhateverElseHasFailed) {
  store->Init("k", Full(7));
  const NDArray aux = Poisoned("bad array"), zero = Full(0);
  store->SetUpdater([&](KeyRef, const NDArray&, const NDArray& stored) {
    aux.CopyTo(stored);
    zero.CopyTo(stored);
  });
  store->Push("k", Poisoned("bad gradient"));
  NDArray out = Full(0);
  store->Pull("k", out);
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
  store->SetUpdater([](KeyRef, const NDArray&, const NDArray&) {});
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(7));
}

TEST_P(ContractTest, AFailedFirstPushOfAKey) {
  store->Push("k", Poisoned("bad gradient"));
  NDArray out = Full(0);
  store->Pull("k", out);
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
  store->Push("k", Full(3));
  EXPECT_EQ(Pulled(*store, "k"), All(3));
}

TEST_P(ContractTest, AKeyWhoseFirstPushFailedHasNoValueToUpdate) {
  store->Push({"a", "b"}, {Poisoned("bad gradient"), Poisoned("bad gradient")});
  NDArray out = Full(0);
  store->SetOptimizer(Sgd());
  store->Push("a", Full(1));
  store->Pull("a", out);
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  store->Push("b", Full(1));
  store->Pull("b", out);
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
  store->Reset("b", Full(1));
  store->Push("b", Full(1));
  EXPECT_EQ(Pulled(*store, "b"), All(2));
}

// ---- Failed update and Reset

class FailedUpdateTest : public StoreTest {
 protected:
  void BreakKey() {
    store->SetUpdater([this](KeyRef, const NDArray& input, const NDArray& stored) {
      engine.Push(
          {.name = "update", .reads = {input.var(), stored.var()}, .writes = {stored.var()}},
          [] { throw std::runtime_error("broke midway"); });
    });
    store->Push("k", Full(1));
  }
  void ExpectBroken() {
    NDArray out = Full(0);
    store->Pull("k", out);
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "broke midway");
  }
};

TEST_P(FailedUpdateTest, PoisonsTheKeyUntilReset) {
  store->Init({"k", "other"}, {Full(1), Full(1)});
  BreakKey();
  ExpectBroken();
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  store->Push("k", Full(1));
  ExpectBroken();
  store->SetUpdater([](KeyRef, const NDArray&, const NDArray& stored) { stored.Fill(3); });
  store->Push("k", Full(1));
  ExpectBroken();
  store->SetOptimizer(Sgd());
  store->Push("k", Full(1));
  store->Push("k", Poisoned("bad gradient"));
  ExpectBroken();
  EXPECT_EQ(Pulled(*store, "other"), All(1));

  store->Reset("k", Full(5));
  EXPECT_EQ(Pulled(*store, "k"), All(5));
  store->Push("k", Full(100));
  EXPECT_EQ(Pulled(*store, "k"), All(4));
}

TEST_P(FailedUpdateTest, ResetWithAFailedValueChangesNothing) {
  store->Init("k", Full(1));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { store->Reset("k", Poisoned("no data")); }),
            "no data");
  EXPECT_EQ(Pulled(*store, "k"), All(1));
  BreakKey();
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { store->Reset("k", Poisoned("no data")); }),
            "no data");
  ExpectBroken();
}

// Whichever comes first: a push of zeros has no momentum to go on with, and leaves none behind.
TEST_P(FailedUpdateTest, ResetForgetsTheOptimizerStateInTheOrderOfThePushes) {
  if (GetParam().engine != "threaded") GTEST_SKIP() << "calls of several threads";
  const NDArray zero = Full(0);
  zero.WaitToRead();
  for (int round = 0; round < Times(300); ++round) {
    store = NewStore();
    store->Init("k", zero);
    store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
    store->Push("k", Full(1));
    RunTogether(
        round, [&] { store->Push("k", zero); }, [&] { store->Reset("k", zero); });
    ASSERT_EQ(Pulled(*store, "k"), All(0)) << "in round " << round;
    store->Push("k", zero);
    ASSERT_EQ(Pulled(*store, "k"), All(0)) << "in round " << round;
  }
}

TEST_P(FailedUpdateTest, APushThatFailsCountsForTheSchedule) {
  const FactorSchedule schedule{.step = 1, .factor = 0.5, .base_rate = 1};
  const auto sgd = Sgd();
  sgd->SetSchedule(schedule);
  store->Init("k", Full(0));
  store->SetOptimizer(sgd);
  for (int i = 0; i < 3; ++i) store->Push("k", Poisoned("bad gradient"));
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(static_cast<float>(-RateAt(schedule, 4))));
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

INSTANTIATE_TEST_SUITE_P(All, ContractTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, ContractTest, testing::ValuesIn(GpuSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(All, FailedUpdateTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, FailedUpdateTest, testing::ValuesIn(GpuSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
