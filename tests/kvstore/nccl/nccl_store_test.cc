// The store type "nccl" on a simulated NCCL.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/nccl/nccl_kvstore.h"
#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/nccl/sim_nccl.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle::kvstore_test {
namespace {

using engine_test::SimGpu;
using kvstore::NcclKVStore;

class NcclStoreTest : public StoreTest {
 protected:
  std::unique_ptr<KVStore> NewStore(const KVStoreOptions& options = {}) override {
    nccl = std::make_shared<SimNccl>(std::static_pointer_cast<SimGpu>(engine.options().gpu_driver));
    return std::make_unique<NcclKVStore>(engine, nccl,
                                         KVStore::Create(GetParam().store, engine, options),
                                         kvstore::DeviceGroupOptions{});
  }
  // value, 2 value, ... on the first `count` devices.
  std::vector<NDArray> OnDevices(double value, int count = 4) {
    std::vector<NDArray> arrays;
    for (int i = 0; i < count; ++i) arrays.push_back(Full(value * (i + 1), Cpu(i)));
    return arrays;
  }
  void ExpectAll(const std::vector<NDArray>& arrays, float value) {
    for (const NDArray& array : arrays) EXPECT_EQ(array.ToVector<float>(), All(value));
  }

  std::shared_ptr<SimNccl> nccl;
};
INSTANTIATE_TEST_SUITE_P(Gpus, NcclStoreTest, testing::ValuesIn(GpuSetups()), SetupName);

TEST_P(NcclStoreTest, SumsListsAndBringsTheValueToAllDevices) {
  store->Init("w", Full(0));
  store->Push("w", OnDevices(1));
  const std::vector<NDArray> out = OnDevices(0);
  store->Pull("w", out);
  ExpectAll(out, 10);
  EXPECT_EQ(nccl->inits(), 4);
  EXPECT_EQ(nccl->reductions(), 4);
  EXPECT_EQ(nccl->broadcasts(), 4);
  EXPECT_EQ(store->transfers().pushed_bytes, 4 * 6 * 4);
  EXPECT_EQ(store->transfers().pulled_bytes, 4 * 6 * 4);
}

TEST_P(NcclStoreTest, AListCallIsOneGroupOfNccl) {
  store->Init({"a", "b", "c"}, {Full(0), Full(0, Cpu(2)), Full(0)});
  store->Push({"a", "b", "c"}, {OnDevices(1), OnDevices(2), Full(5)});
  EXPECT_EQ(Pulled(*store, "a"), All(10));
  EXPECT_EQ(Pulled(*store, "b"), All(20));
  EXPECT_EQ(Pulled(*store, "c"), All(5));
  EXPECT_EQ(nccl->groups(), 1);
  const auto a = OnDevices(0), b = OnDevices(0), c = OnDevices(0, 2);
  store->Pull({"a", "b", "c"}, {a, b, c});
  ExpectAll(a, 10);
  ExpectAll(b, 20);
  ExpectAll(c, 5);  // not all devices: without NCCL
  EXPECT_EQ(nccl->groups(), 2);
  EXPECT_EQ(nccl->broadcasts(), 8);
}

// An op names 65 535 variables at most, and each key of a call has one for each array. Fewer keys
// under the sanitizers, where these take far longer.
TEST(NcclStoreListTest, AListOfManyKeysIsSeveralGroups) {
  constexpr int kGpus = 8, kKeys = kSanitized ? 1100 : 8200;
  const auto gpu = std::make_shared<SimStoreGpu>(kGpus, TestSeed());
  gpu->set_turns_max(0);
  EngineOptions options = EngineOptions::FromEnvironment();
  options.gpu_driver = gpu;
  Engine engine(options);
  const auto nccl = std::make_shared<SimNccl>(gpu);
  const std::unique_ptr<KVStore> store = std::make_unique<NcclKVStore>(
      engine, nccl, KVStore::Create("device", engine), kvstore::DeviceGroupOptions{});
  const auto arrays = [&] {
    std::vector<NDArray> all;
    for (int i = 0; i < kGpus; ++i) all.emplace_back(Shape{1}, DType::kFloat32, Gpu(i), engine);
    return all;
  };
  std::vector<Key> keys;
  std::vector<std::vector<NDArray>> values;
  for (int key = 0; key < kKeys; ++key) {
    keys.emplace_back(key);
    values.push_back(arrays());
  }
  const std::vector<int> some = {0, 1023, 1024, kKeys - 1};
  for (const int key : some) {
    for (const NDArray& array : values[static_cast<std::size_t>(key)]) array.Fill(key);
  }
  store->Push(keys, values);
  for (const int key : some) {
    const std::vector<NDArray> out = arrays();
    store->Pull(key, out);
    for (const NDArray& array : out) {
      EXPECT_EQ(array.ToVector<float>(), std::vector(1, static_cast<float>(kGpus * key)));
    }
  }
  EXPECT_EQ(nccl->reductions(), kGpus * kKeys);
  EXPECT_EQ(nccl->groups(), (kKeys + 1023) / 1024 + 4);
}

TEST_P(NcclStoreTest, AFirstPushMakesAKey) {
  store->Push(7, OnDevices(1));
  store->Push(7, OnDevices(2));
  EXPECT_EQ(Pulled(*store, 7), All(20));
  EXPECT_EQ(store->Keys(), std::vector<Key>{7});
}

TEST_P(NcclStoreTest, AKeyNamedSeveralTimesIsOneList) {
  store->Push({"k", "other", "k"}, {Full(1, Cpu(3)), Full(9), Full(2, Cpu(1))});
  EXPECT_EQ(Pulled(*store, "k"), All(3));
  EXPECT_EQ(Pulled(*store, "other"), All(9));
  EXPECT_EQ(nccl->inits(), 2);
}

TEST_P(NcclStoreTest, WhatIsPushedMayBeOverwrittenAtOnce) {
  std::vector<NDArray> values = OnDevices(1);
  store->Push("k", values);
  for (NDArray& value : values) value += 100;
  EXPECT_EQ(Pulled(*store, "k"), All(10));
}

TEST_P(NcclStoreTest, PushPullAndBroadcast) {
  const std::vector<NDArray> out = OnDevices(0);
  store->Broadcast("k", Full(3, Cpu(1)), out);
  ExpectAll(out, 3);
  std::vector<NDArray> values = OnDevices(1);
  store->PushPull("k", values);  // back to where it comes from
  ExpectAll(values, 10);
  // One list for all keys: all is read before anything is written, and the last key wins.
  values = OnDevices(1);
  store->PushPull({"k", "l"}, {values, values});
  ExpectAll(values, 10);
  store->Push("l", Full(4));
  store->Pull({"k", "l"}, {values, values});
  ExpectAll(values, 4);
}

TEST_P(NcclStoreTest, PullCastsWhereDTypesDiffer) {
  store->Push("k", OnDevices(1));
  std::vector<NDArray> out = {Full(0, Cpu(0)), Full(0, Cpu(1), DType::kInt32), Full(0, Cpu(2)),
                              Full(0, Cpu(3), DType::kFloat64)};
  store->Pull("k", out);
  for (const NDArray& array : out) {
    EXPECT_EQ(array.AsType(DType::kFloat32).ToVector<float>(), All(10));
  }
  EXPECT_EQ(nccl->broadcasts(), 0);
  std::vector<NDArray> halves;  // all alike, if not like the value
  for (int i = 0; i < 4; ++i) halves.push_back(Full(0, Cpu(i), DType::kFloat16));
  store->Pull("k", halves);
  for (const NDArray& array : halves) {
    EXPECT_EQ(array.AsType(DType::kFloat32).ToVector<float>(), All(10));
  }
  EXPECT_EQ(nccl->broadcasts(), 4);
}

TEST_P(NcclStoreTest, PartsOfArrays) {
  store->Push("k", OnDevices(1));
  std::vector<NDArray> large, parts;
  for (int i = 0; i < 4; ++i) {
    large.push_back(NDArray::Full({6, 3}, 1, DType::kFloat32, Gpu(i), engine));
    parts.push_back(large.back().Slice(2, 4));
  }
  store->Pull("k", parts);
  ExpectAll(parts, 10);
  for (const NDArray& array : large) {
    EXPECT_EQ(array.Slice(0, 2).ToVector<float>(), All(1));
    EXPECT_EQ(array.Slice(4, 6).ToVector<float>(), All(1));
  }
  store->Push("k", parts);
  EXPECT_EQ(Pulled(*store, "k"), All(40));
}

TEST_P(NcclStoreTest, UpdatersGetTheSum) {
  store->Init("w", Full(100));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) {
    NDArray value = stored;
    value += input.Copy(stored.device()) * 2.0;
  });
  store->Push("w", OnDevices(1));
  store->Push("w", Full(1));
  EXPECT_EQ(Pulled(*store, "w"), All(122));
}

TEST_P(NcclStoreTest, OptimizersUpdateByTheSum) {
  store->Init("w", Full(1));
  store->SetOptimizer(Sgd({.learning_rate = 0.125}));
  store->Push("w", OnDevices(1));
  EXPECT_EQ(Pulled(*store, "w"), All(1 - 1.25f));
  EXPECT_TRUE(store->IsCapable("Optimizer"));
  EXPECT_FALSE(store->IsCapable("compression"));
}

TEST_P(NcclStoreTest, AKeyRemovedAndMadeAnewHasItsNewShape) {
  store->Push("k", OnDevices(1));
  store->Remove("k");
  EXPECT_FALSE(store->Contains("k"));
  std::vector<NDArray> values;
  for (int i = 0; i < 4; ++i) {
    values.push_back(NDArray::Full({5}, i, DType::kFloat64, Gpu(i), engine));
  }
  store->Push("k", values);
  NDArray out({5}, DType::kFloat64, Gpu(0), engine);
  store->Pull("k", out);
  EXPECT_EQ(out.ToVector<double>(), std::vector<double>(5, 6));
  store->Reset("k", values[3]);
  store->Pull("k", out);
  EXPECT_EQ(out.ToVector<double>(), std::vector<double>(5, 3));
}

TEST_P(NcclStoreTest, ValuesAloneGoWithoutNccl) {
  store->Push("k", Full(3, Cpu(2)));
  store->Push("l", NDArray::Full(shape, 4, DType::kFloat32, Cpu(), engine));
  EXPECT_EQ(Pulled(*store, "k"), All(3));
  EXPECT_EQ(Pulled(*store, "l"), All(4));
  EXPECT_EQ(nccl->inits(), 0);
}

TEST_P(NcclStoreTest, AFailedInputLeavesTheValueAndTheOtherKeysAlone) {
  store->Init({"a", "b"}, {Full(1), Full(1)});
  std::vector<NDArray> bad = OnDevices(1);
  bad[0] = Poisoned("no gradient");
  store->Push({"a", "b"}, {bad, OnDevices(1)});
  const std::vector<NDArray> a = OnDevices(0), b = OnDevices(0);
  store->Pull({"a", "b"}, {a, b});
  for (const NDArray& array : a) {
    EXPECT_NE(MessageOf<std::runtime_error>([&] { array.WaitToRead(); }).find("no gradient"),
              std::string::npos);
  }
  ExpectAll(b, 10);
  store->Push("a", OnDevices(2));
  store->Pull("a", a);
  ExpectAll(a, 20);
}

TEST_P(NcclStoreTest, BadListsAreErrorsAndNothingHappens) {
  store->Init("k", Full(1));
  const std::vector<NDArray> good = OnDevices(1);
  const auto refused = [&](const std::vector<NDArray>& list,
                           const std::vector<std::string>& parts) {
    ExpectInvalid([&] { store->Push({"other", "k"}, {good, list}); }, parts);
    EXPECT_FALSE(store->Contains("other"));
    EXPECT_EQ(Pulled(*store, "k"), All(1));
  };
  std::vector<NDArray> list = good;
  list[2] = list[1];
  refused(list, {"'k'", "several on gpu(1)"});
  list[2] = NDArray::Ones(shape, DType::kFloat32, Cpu(), engine);
  refused(list, {"'k'", "gpu(i)", "cpu(0)"});
  refused({good[0], good[1]}, {"'k'", "gpu(0), gpu(1), gpu(2), gpu(3)", "got gpu(0), gpu(1)"});
  list[2] = Full(1, Cpu(2), DType::kFloat64);
  refused(list, {"'k'", "float32", "float64"});
  list.clear();
  for (int i = 0; i < 4; ++i) list.push_back(Full(1, Cpu(i), DType::kBool));
  refused(list, {"'k'", "NCCL", "bool"});
  EXPECT_EQ(nccl->inits(), 0);
  const RowSparseNDArray rows(shape, DType::kFloat32, Cpu(), engine);
  ExpectInvalid([&] { store->Init("rows", rows); }, {"'rows'", "dense"});
  ExpectInvalid([&] { store->Push("k", rows); }, {"'k'", "dense"});
  EXPECT_NE(MessageOf<InvalidState>([&] {
              store->RowSparsePull("k", rows, good[0]);
            }).find("not supported"),
            std::string::npos);
}

TEST_P(NcclStoreTest, APushThatIsRefusedDoesNotSettleTheDevices) {
  store->Init("k", Full(1));
  const std::vector<NDArray> bad = {NDArray::Ones({5}, DType::kFloat32, Gpu(0), engine),
                                    NDArray::Ones({5}, DType::kFloat32, Gpu(1), engine)};
  EXPECT_THROW(store->Push("k", bad), InvalidArgument);
  EXPECT_EQ(nccl->inits(), 0);
  store->SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1}}));
  EXPECT_THROW(store->Push("other", OnDevices(1, 2)), UnknownKey);
  store->Push("k", OnDevices(1));
  EXPECT_EQ(Pulled(*store, "k"), All(-9));
}

TEST_P(NcclStoreTest, ThePoisonOfAPartReachesNoOtherOutputAndIsNotCured) {
  store->Push({"k", "l"}, {OnDevices(1), OnDevices(2)});
  for (const bool is_list : {false, true}) {
    const NDArray large = NDArray::Full({6, 3}, 1, DType::kFloat32, Gpu(1), engine);
    engine.Push({.name = "fail", .writes = {large.var()}},
                [] { throw std::runtime_error("broken"); });
    std::vector<NDArray> out = OnDevices(0);
    out[1] = large.Slice(2, 4);
    const std::vector<NDArray> others = OnDevices(0);
    if (is_list) {
      store->Pull({"k", "l"}, {out, others});
      ExpectAll(others, 20);
    } else {
      store->Pull("k", out);
    }
    for (const int i : {0, 2, 3}) EXPECT_EQ(out[i].ToVector<float>(), All(10));
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { large.WaitToRead(); }), "broken");
  }
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(NcclStoreTest, TheDevicesAreThoseOfTheFirstList) {
  store->Push("k", {Full(1, Cpu(2)), Full(2, Cpu(0))});
  ExpectInvalid([&] { store->Push("k", OnDevices(1)); },
                {"'k'", "gpu(0), gpu(2)", "got gpu(0), gpu(1), gpu(2), gpu(3)"});
  EXPECT_EQ(Pulled(*store, "k"), All(3));
}

// Random calls on a few keys against plain numbers.
TEST_P(NcclStoreTest, RandomCallsGiveWhatTheContractSays) {
  std::mt19937_64 random(TestSeed());
  const auto draw = [&](int n) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(n));
  };
  constexpr int kKeys = 3;
  std::map<int, double> expected;
  for (int key = 0; key < kKeys; ++key) store->Init(key, Full(expected[key] = key, Cpu(draw(4))));
  std::vector<std::pair<NDArray, double>> pulled;
  for (int step = 0; step < 50; ++step) {
    const int key = draw(kKeys);
    const int priority = draw(5) - 2;
    const double value = draw(100);
    switch (draw(4)) {
      case 0:
        store->Push(key, OnDevices(value), priority);
        expected[key] = 10 * value;
        break;
      case 1:
        store->Push(key, Full(value, Cpu(draw(4))), priority);
        expected[key] = value;
        break;
      case 2: {
        const int second = (key + 1) % kKeys;
        store->Push({key, second}, {OnDevices(value), OnDevices(1)}, priority);
        expected[key] = 10 * value;
        expected[second] = 10;
        break;
      }
      default:
        for (const NDArray& out : OnDevices(0)) pulled.emplace_back(out, expected[key]);
        store->Pull(key,
                    std::vector<NDArray>{pulled.end()[-4].first, pulled.end()[-3].first,
                                         pulled.end()[-2].first, pulled.end()[-1].first},
                    priority);
    }
  }
  for (const auto& [out, value] : pulled) {
    ASSERT_EQ(out.ToVector<float>(), All(static_cast<float>(value)));
  }
}

TEST(NcclStore, IsATypeThatSaysWhatIsMissing) {
  const std::vector<std::string> types = KVStore::Types();
  EXPECT_NE(std::ranges::find(types, "nccl"), types.end());
  try {
    const auto store = KVStore::Create("NCCL");
    EXPECT_EQ(store->type(), "nccl");  // a build with NCCL, which is there
  } catch (const NcclError& error) {
    EXPECT_NE(std::string(error.what()).find("nvidia-nccl-cu13"), std::string::npos);
  }
}

}  // namespace
}  // namespace heddle::kvstore_test
