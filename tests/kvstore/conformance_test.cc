// What heddle/kvstore.h promises of every store.
#include "tests/kvstore/conformance.h"

#include <heddle/kvstore.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore_test {
namespace {

TEST_P(ConformanceTest, InitTakesACopy) {
  NDArray value = Full(1);
  store->Init("k", value);
  value += 1;
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ConformanceTest, InitReturnsAfterTheValueIsInTheStore) {
  if (GetParam().engine != "threaded") GTEST_SKIP() << "another thread releases the value";
  NDArray value = Full(1);
  Hold writer(engine, {}, {value.var()});
  std::atomic<bool> released = false;
  std::thread other([&] {
    released = true;
    writer.Release();
  });
  store->Init("k", value);
  EXPECT_TRUE(released);
  other.join();
}

TEST_P(ConformanceTest, PushAndPullReturnBeforeTheirInputsAreWritten) {
  NDArray gradient = Full(1);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  NDArray out = Full(0);
  store->Push("k", gradient);
  store->Pull("k", out);  // would hang here if it waited
  writer.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
}

TEST_P(ConformanceTest, PushedArrayMayBeOverwrittenAtOnce) {
  NDArray gradient = Full(1);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("k", gradient);
  gradient.Fill(100);
  writer.Release();
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ConformanceTest, StoreNeverAliasesThePushedArray) {
  NDArray value = Full(1);
  store->Init("new", Full(0));
  store->Push("new", value);
  value += 1;
  EXPECT_EQ(Pulled(*store, "new"), All(1));
  store->Push("new", value);
  value += 1;
  EXPECT_EQ(Pulled(*store, "new"), All(2));
}

TEST_P(ConformanceTest, AKeyRepeatedInOnePushMakesOneListInOrder) {
  store->Init({"a", "b"}, {Full(0), Full(0)});
  // Only added from left to right is the sum 0: the 1 is lost in 1e8.
  store->Push({"a", "b", "a", "a"}, {Full(1e8), Full(7), Full(1), Full(-1e8)});
  EXPECT_EQ(Pulled(*store, "a"), All(0));
  EXPECT_EQ(Pulled(*store, "b"), All(7));
  store->Push({"a", "a"}, {{Full(1e8), Full(-1e8)}, {Full(1)}});
  EXPECT_EQ(Pulled(*store, "a"), All(1));
}

TEST_P(ConformanceTest, PushesOfEveryDType) {
  for (DType dtype : kAllDTypes) {
    const std::string key(Name(dtype));
    store->Init(key, Full(0, Cpu(), dtype));
    store->Push(key, {Full(1, Cpu(), dtype), Full(1, Cpu(1), dtype)});
    EXPECT_EQ(Pulled(*store, key), All(dtype == DType::kBool ? 1 : 2)) << key;
  }
}

TEST_P(ConformanceTest, ManyArraysInOnePush) {
  std::vector<NDArray> arrays;
  for (int i = 0; i < 40; ++i) arrays.push_back(Full(i, Cpu(i)));
  store->Init("k", Full(0));
  store->Push("k", arrays);
  EXPECT_EQ(Pulled(*store, "k"), All(780));
}

TEST_P(ConformanceTest, LargeArraysAreSummedWhole) {
  const std::int64_t size = 300'001;  // several blocks of the kernels, and a rest
  std::vector<NDArray> arrays;
  for (int i = 0; i < 3; ++i) {
    arrays.push_back(NDArray::Arange(size, DType::kFloat64, On(Cpu(i)), engine));
  }
  store->Init("k", NDArray::Zeros({size}, DType::kFloat64, On(Cpu()), engine));
  store->Push("k", arrays);
  std::vector<NDArray> out(2, NDArray());
  for (int i = 0; i < 2; ++i) out[i] = NDArray(Shape{size}, DType::kFloat64, On(Cpu(i)), engine);
  store->Pull("k", out);
  for (const NDArray& array : out) {
    const std::vector<double> values = array.ToVector<double>();
    for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(values[i], 3.0 * static_cast<double>(i));
  }
}

TEST_P(ConformanceTest, PushesFromInsideOps) {
  NDArray gradient = NDArray::Zeros(shape, DType::kFloat32, Cpu(), engine);
  NDArray out = Full(0);
  store->Init("k", Full(0));
  engine.Push({.name = "step", .writes = {gradient.var()}}, [&] {
    for (std::int64_t i = 0; i < shape.size(); ++i) gradient.data<float>()[i] = 5;
    store->Push("k", gradient);
    store->Pull("k", out);
  });
  engine.WaitForAll();
  EXPECT_EQ(out.ToVector<float>(), All(5));
}

TEST_P(ConformanceTest, PullSeesAllEarlierPushesAndNoLaterOne) {
  store->Init("k", Full(0));
  std::vector<NDArray> outs;
  for (int i = 1; i <= 50; ++i) {
    // Priorities must not reorder what the key orders.
    store->Push("k", Full(i), /*priority=*/i % 7 - 3);
    outs.push_back(Full(-1));
    store->Pull("k", outs.back(), /*priority=*/i % 5 - 2);
  }
  for (int i = 1; i <= 50; ++i)
    EXPECT_EQ(outs[i - 1].ToVector<float>(), All(static_cast<float>(i)));
}

TEST_P(ConformanceTest, PushWaitsForAnEarlierPull) {
  store->Init("k", Full(1));
  NDArray out = Full(0);
  Hold reader(engine, {out.var()}, {});
  store->Pull("k", out);  // cannot write `out` yet
  store->Push("k", Full(2));
  reader.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "k"), All(2));
}

TEST_P(ConformanceTest, PullToSeveralDevices) {
  store->Init("k", Full(4));
  const std::vector<NDArray> outs = OnFour(0);
  store->Pull("k", outs);
  for (const NDArray& out : outs) EXPECT_EQ(out.ToVector<float>(), All(4));
  store->Push("k", Full(5));
  store->Pull("k", {outs[0], outs[3]});
  EXPECT_EQ(outs[3].ToVector<float>(), All(5));
  EXPECT_EQ(outs[1].ToVector<float>(), All(4));
}

TEST_P(ConformanceTest, PullCastsToTheDTypeOfItsOutput) {
  store->Init("k", Full(2.75));
  for (DType dtype : kAllDTypes) {
    NDArray out = Full(0, Cpu(), dtype);
    store->Pull("k", out);
    const float expected = dtype == DType::kBool ? 1.0f : IsFloating(dtype) ? 2.75f : 2.0f;
    EXPECT_EQ(out.ToVector<float>(), All(expected)) << Name(dtype);
  }
  NDArray half = Full(0, Cpu(), DType::kFloat16);
  NDArray whole = Full(0, Cpu(1), DType::kInt32);
  store->Pull("k", {half, whole});
  EXPECT_EQ(half.ToVector<float>(), All(2.75f));
  EXPECT_EQ(whole.ToVector<float>(), All(2));
}

TEST_P(ConformanceTest, PullIntoAPartOfAnArray) {
  store->Init("k", Full(4));
  NDArray large = NDArray::Full({6, shape[1]}, 1, DType::kFloat32, On(Cpu()), engine);
  NDArray other = Full(0);
  store->Pull("k", {large.Slice(2, 4), other});
  EXPECT_EQ(large.Slice(2, 4).ToVector<float>(), All(4));
  EXPECT_EQ(large.Slice(0, 2).ToVector<float>(), All(1));
  EXPECT_EQ(large.Slice(4, 6).ToVector<float>(), All(1));
  EXPECT_EQ(other.ToVector<float>(), All(4));
}

TEST_P(ConformanceTest, TheLastKeyWinsAnOutputOfSeveral) {
  store->Init({1, 2, 3}, {Full(1), Full(2), Full(3)});
  NDArray out = Full(0);
  store->Pull({2, 3, 1}, {out, out, out});
  EXPECT_EQ(out.ToVector<float>(), All(1));
}

TEST_P(ConformanceTest, PushPullReadsAllInputsBeforeItWritesAnOutput) {
  NDArray x = Full(1);
  NDArray y = Full(2);
  store->Init({"a", "b"}, {Full(0), Full(0)});
  store->PushPull({"a", "b"}, {x, y}, {y, x});
  EXPECT_EQ(x.ToVector<float>(), All(2));
  EXPECT_EQ(y.ToVector<float>(), All(1));
}

TEST_P(ConformanceTest, PushPullWithRepeatedKeys) {
  const std::vector<NDArray> outs = {Full(0), Full(0)};
  store->Init("a", Full(0));
  store->PushPull({"a", "a"}, {Full(1), Full(2)}, outs);
  EXPECT_EQ(outs[0].ToVector<float>(), All(3));
  EXPECT_EQ(outs[1].ToVector<float>(), All(3));
}

TEST_P(ConformanceTest, BroadcastReadsAllInputsBeforeItWritesAnOutput) {
  NDArray x = Full(1);
  NDArray y = Full(2);
  store->Broadcast({"a", "b"}, {x, y}, {y, x});
  EXPECT_EQ(x.ToVector<float>(), All(2));
  EXPECT_EQ(y.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "b"), All(2));
}

TEST_P(ConformanceTest, StoreMayBeDroppedWithOperationsPending) {
  NDArray gradient = Full(1);
  NDArray out = Full(-1);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("k", gradient);
  store->Pull("k", out);
  ReleaseWhile(writer, [&] { store.reset(); });
  EXPECT_EQ(out.ToVector<float>(), All(1));
}

TEST_P(ConformanceTest, KeysUseAll64BitsAndAnyText) {
  const std::vector<std::int64_t> numbers = {std::numeric_limits<std::int64_t>::min(), -1, 0,
                                             std::int64_t{1} << 40,
                                             std::numeric_limits<std::int64_t>::max()};
  for (std::size_t i = 0; i < numbers.size(); ++i)
    store->Init(numbers[i], Full(static_cast<int>(i)));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_EQ(Pulled(*store, numbers[i]), All(static_cast<float>(i)));
  }
  ExpectInvalid([&] { store->Push(std::numeric_limits<std::uint64_t>::max(), Full(1)); },
                {"18446744073709551615", "63 bits"});

  const auto strings = NewStore();
  const std::string with_zero("a\0b", 3);
  strings->Init({std::string_view(""), std::string_view("a"), std::string_view(with_zero)},
                {Full(1), Full(2), Full(3)});
  EXPECT_EQ(Pulled(*strings, ""), All(1));
  EXPECT_EQ(Pulled(*strings, "a"), All(2));
  EXPECT_EQ(Pulled(*strings, with_zero), All(3));
}

TEST_P(ConformanceTest, ListCallsWithoutKeysDoNothing) {
  store->Push(std::vector<Key>{}, std::vector<NDArray>{});
  store->Pull(std::vector<Key>{}, std::vector<NDArray>{});
  store->PushPull(std::vector<Key>{}, std::vector<NDArray>{});
  EXPECT_TRUE(store->Keys().empty());
}

TEST_P(ConformanceTest, EveryKindOfFirstWriteAfterInitOnAnotherDevice) {
  // `device` gives a key its place at the first push of a list, here another one than that of Init.
  const std::vector<NDArray> gradients = {Full(1, Cpu(1)), Full(1, Cpu(2))};
  for (const char* key : {"assign", "failed", "reset", "untouched"}) store->Init(key, Full(5));
  store->Push("assign", gradients);
  EXPECT_EQ(Pulled(*store, "assign"), All(2));
  EXPECT_EQ(Pulled(*store, "untouched"), All(5));
  store->Push("failed", {gradients[0], Poisoned("bad gradient")});
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  store->Push("failed", gradients);
  EXPECT_EQ(Pulled(*store, "failed"), All(3));
  store->Reset("reset", Full(7));
  EXPECT_EQ(Pulled(*store, "reset"), All(7));
  store->Push("reset", gradients);
  EXPECT_EQ(Pulled(*store, "reset"), All(5));
}

TEST_P(ConformanceTest, OneProcessAnswersForItself) {
  EXPECT_EQ(store->rank(), 0);
  EXPECT_EQ(store->num_workers(), 1);
  EXPECT_EQ(store->NumDeadNodes(), 0);
  EXPECT_EQ(&store->engine(), &engine);
  store->Barrier();
  store->SendCommandToServers(7, "body");
  EXPECT_TRUE(store->IsCapable("optimizer"));
  EXPECT_TRUE(store->IsCapable("OPTIMIZER"));
  EXPECT_FALSE(store->IsCapable("time travel"));
}

// In the order of their creation, which a job does not have.
TEST_P(ConformanceTest, KeysAreListed) {
  store->Init({"z", "a"}, {Full(1), Full(2)});
  store->Init("m", Full(3));
  EXPECT_EQ(store->Keys(),
            is_dist() ? (std::vector<Key>{"a", "m", "z"}) : (std::vector<Key>{"z", "a", "m"}));
  EXPECT_TRUE(store->Contains("a"));
  EXPECT_TRUE(store->Contains(std::string("m")));
  EXPECT_FALSE(store->Contains("b"));
}

TEST_P(ConformanceTest, SumsOfShortFloatsRoundOnce) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const std::string key(Name(dtype));
    const int large = dtype == DType::kFloat16 ? 2048 : 256;  // and 1 is a half of its last place
    store->Init(key, Full(0, Cpu(), dtype));
    store->Push(key, {Full(large, Cpu(), dtype), Full(1, Cpu(1), dtype), Full(1, Cpu(2), dtype)});
    EXPECT_EQ(Pulled(*store, key), All(static_cast<float>(large + 2))) << key;
  }
}

TEST_P(ConformanceTest, AnOptimizerUpdatesAsItsFormulaSays) {
  const auto sgd = Sgd({.learning_rate = 0.5, .momentum = 0.5});
  store->SetOptimizer(sgd);
  store->Init("k", Full(1));
  float weight = 1, momentum = 0, rate = 0.5;
  for (int i = 1; i <= 6; ++i) {
    if (i == 4) sgd->Set("learning_rate", rate = 0.25);  // counts from the next push on
    store->Push("k", Full(i));
    momentum = 0.5f * momentum - rate * static_cast<float>(i);
    weight += momentum;
    EXPECT_EQ(Pulled(*store, "k"), All(weight)) << i;
  }
}

TEST_P(ConformanceTest, SavedStatesAreThoseOfTheMomentOfSaving) {
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Init("k", Full(0));
  store->Push("k", Full(1));  // m = -1, w = -1
  store->SaveOptimizerStates(file);
  store->Push("k", Full(100));
  store->LoadOptimizerStates(file);
  store->Push("k", Full(1));  // m = -1.5
  EXPECT_EQ(Pulled(*store, "k"), All(-1 - 100.5f - 1.5f));
}

TEST_P(ConformanceTest, CompressionKeepsWhatItCouldNotSend) {
  const auto array = [&](const std::vector<float>& values) {
    return NDArray::FromVector(values, {4}, DType::kFloat32, On(Cpu()), engine);
  };
  const NDArray out = array({0, 0, 0, 0});
  store->SetGradientCompression({.type = "2bit", .threshold = 0.5});
  store->Init("k", array({0, 0, 0, 0}));
  store->PushPull("k", array({0.6f, -0.7f, 0.1f, 0.5f}), out);
  EXPECT_EQ(out.ToVector<float>(), (std::vector<float>{0.5f, -0.5f, 0, 0.5f}));
  store->PushPull("k", array({0.4f, -0.3f, 0.1f, 0.4f}), out);
  EXPECT_EQ(out.ToVector<float>(), (std::vector<float>{0.5f, -0.5f, 0, 0}));
  ExpectInvalid([&] { store->SetGradientCompression({.type = "3bit"}); }, {"3bit", "2bit"});
}

TEST_P(ConformanceTest, RowsOfRowSparseValues) {
  const Shape whole{100, 2};
  const auto rows = [&](const std::vector<std::int64_t>& ids, float value) {
    return RowSparseNDArray::FromVectors<float>(ids, std::vector<float>(ids.size() * 2, value),
                                                whole, DType::kFloat32, On(Cpu()), engine);
  };
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  store->Init("k", rows({0, 50, 99}, 10));
  store->Push("k", {rows({0, 70}, 1), rows({70, 99}, 2)});
  RowSparseNDArray out(whole, DType::kFloat32, On(Cpu()), engine);
  const NDArray ids =
      NDArray::FromVector<std::int64_t>({99, 50, 70, 50}, {4}, DType::kInt64, On(Cpu()), engine);
  store->RowSparsePull("k", out, ids);
  const RowVectors<float> got = out.ToVectors<float>();
  EXPECT_EQ(got.row_ids, (std::vector<std::int64_t>{50, 70, 99}));
  EXPECT_EQ(got.rows, (std::vector<float>{10, 10, -3, -3, 8, 8}));
  ExpectInvalid([&] { store->RowSparsePull("none", out, ids); }, {"unknown key", "'none'"});
}

TEST_P(ConformanceTest, ARemovedKeyIsUnknownAndFree) {
  store->Init({"z", "a"}, {Full(1), Full(2)});
  store->Remove("a");
  EXPECT_FALSE(store->Contains("a"));
  EXPECT_TRUE(store->Contains("z"));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"z"}));
  ExpectInvalid([&] { store->Pull("a", Full(0)); }, {"unknown key", "'a'"});
  ExpectInvalid([&] { store->Remove("a"); }, {"Remove", "unknown key", "'a'"});
  ExpectInvalid([&] { store->Remove("none"); }, {"Remove", "unknown key", "'none'"});
  // For another shape and dtype as well, without anything of the value before.
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  for (int life = 0; life < 3; ++life) {
    const std::int64_t size = life == 1 ? 100'000 : 5;  // which a job cuts
    store->Init("a", NDArray::Ones({size}, DType::kFloat64, On(Cpu()), engine));
    store->Push("a", NDArray::Ones({size}, DType::kFloat64, On(Cpu()), engine));
    NDArray out({size}, DType::kFloat64, On(Cpu()), engine);
    store->Pull("a", out);
    EXPECT_EQ(out.ToVector<double>(), std::vector<double>(static_cast<std::size_t>(size), 0));
    EXPECT_EQ(store->Keys().size(), 2);
    store->Remove("a");
  }
  EXPECT_EQ(Pulled(*store, "z"), All(1));
}

TEST_P(ConformanceTest, OperationsPushedBeforeRemoveComplete) {
  NDArray gradient = Full(1);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  NDArray out = Full(-1);
  store->Push("k", gradient);
  store->Pull("k", out);
  store->Remove("k");
  store->Init("k", Full(9));
  writer.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "k"), All(9));
}

// Of an array that a job cuts over its servers, the first part of which ends within row 54.
TEST_P(ConformanceTest, RowSparseGradientsOfDenseValues) {
  const Shape whole{600, 300};
  const auto rows = [&](const std::vector<std::int64_t>& ids, float value) {
    return RowSparseNDArray::FromVectors<float>(ids, std::vector<float>(ids.size() * 300, value),
                                                whole, DType::kFloat32, On(Cpu()), engine);
  };
  const auto expect = [&](const std::string& key, float others,
                          const std::vector<std::pair<std::int64_t, float>>& changed) {
    std::vector<float> expected(600 * 300, others);
    for (const auto& [id, value] : changed) {
      std::fill_n(expected.begin() + id * 300, 300, value);
    }
    NDArray out(whole, DType::kFloat32, On(Cpu()), engine);
    store->Pull(key, out);
    EXPECT_TRUE(out.ToVector<float>() == expected) << key;
  };
  for (const bool lazy : {true, false}) {
    // Momenta go on in all rows, or in those of the gradient.
    store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5, .lazy_update = lazy}));
    const std::string key = lazy ? "lazy" : "standard";
    store->Init(key, NDArray::Full(whole, 10, DType::kFloat32, On(Cpu()), engine));
    store->Push(key, {rows({0, 54, 599}, 1), rows({54, 55}, 2)});
    expect(key, 10, {{0, 9}, {54, 7}, {55, 8}, {599, 9}});
    store->Push(key, rows({}, 0));
    if (lazy) {
      expect(key, 10, {{0, 9}, {54, 7}, {55, 8}, {599, 9}});
      store->Push(key, rows({54}, 0));
      expect(key, 10, {{0, 9}, {54, 5.5f}, {55, 8}, {599, 9}});
    } else {
      expect(key, 10, {{0, 8.5f}, {54, 5.5f}, {55, 7}, {599, 8.5f}});
    }
    store->Push(key, NDArray::Full(whole, 0, DType::kFloat32, On(Cpu()), engine));
    if (lazy) {
      expect(key, 10, {{0, 8.5f}, {54, 4.75f}, {55, 7}, {599, 8.5f}});
    } else {
      expect(key, 10, {{0, 8.25f}, {54, 4.75f}, {55, 6.5f}, {599, 8.25f}});
    }
  }
}

TEST_P(ConformanceTest, TheDefaultUpdaterTakesRowsForDenseValuesAndTheOtherWayRound) {
  const Shape whole{100, 2};
  const auto rows = RowSparseNDArray::FromVectors<float>({3, 99}, {1, 2, 3, 4}, whole,
                                                         DType::kFloat32, On(Cpu()), engine);
  std::vector<float> expected(200, 0);
  expected[6] = 1, expected[7] = 2, expected[198] = 3, expected[199] = 4;
  const NDArray sevens = NDArray::Full(whole, 7, DType::kFloat32, On(Cpu()), engine);
  store->Init("dense", sevens);
  store->Init("rows", rows);
  NDArray out(whole, DType::kFloat32, On(Cpu()), engine);
  for (const char* const key : {"dense", "rows"}) {
    store->Push(key, sevens);
    store->Pull(key, out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(200, 7)) << key;
    store->Push(key, rows);
    store->Pull(key, out);
    EXPECT_EQ(out.ToVector<float>(), expected) << key;
    store->PushPull(key, sevens, out);
    EXPECT_EQ(out.ToVector<float>(), std::vector<float>(200, 7)) << key;
    store->PushPull(key, rows, RowSparseNDArray(rows));
    RowSparseNDArray got(whole, DType::kFloat32, On(Cpu()), engine);
    store->Pull(key, got, 0, /*ignore_sparse=*/false);
    EXPECT_EQ(got.ToVectors<float>().row_ids, (std::vector<std::int64_t>{3, 99})) << key;
    EXPECT_EQ(got.ToVectors<float>().rows, (std::vector<float>{1, 2, 3, 4})) << key;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceTest, testing::ValuesIn(ConformanceSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, ConformanceTest, testing::ValuesIn(GpuSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(DistGpus, ConformanceTest, testing::ValuesIn(DistGpuSetups()), SetupName);

// What only dist stores with arrays on GPUs show.
class DistGpuTest : public ConformanceTest {
 protected:
  SimStoreGpu& gpus() { return dynamic_cast<SimStoreGpu&>(*engine.options().gpu_driver); }
  // Of 4096 elements each, which are copied one after another where they are sent and received.
  int parts() const { return static_cast<int>((shape.size() + 4095) / 4096); }
  RowSparseNDArray Rows(const std::vector<std::int64_t>& ids, float value, Device device) {
    return RowSparseNDArray::FromVectors<float>(ids, std::vector<float>(3 * ids.size(), value),
                                                {5, 3}, DType::kFloat32, device, engine);
  }
};
INSTANTIATE_TEST_SUITE_P(All, DistGpuTest, testing::ValuesIn(DistGpuSetups()), SetupName);

// Where the type says "device" a list is one array before it leaves the GPU.
TEST_P(DistGpuTest, ListsAreSummedWhereTheTypeSays) {
  store->Init("k", Full(0));
  const std::vector<NDArray> list = {Full(1e8F), Full(1), Full(-1e8F), Full(3)};
  engine.WaitForAll();
  const int launches = gpus().launches();
  store->Push("k", list);
  engine.WaitForAll();
  const bool on_gpu = GetParam().store.find("device") != std::string::npos;
  // A sum and a copy, or copies.
  EXPECT_EQ(gpus().launches() - launches, on_gpu ? 1 + parts() : 4);
  EXPECT_EQ(Pulled(*store, "k"), All(3));  // in list order
}

// One request for both, also when the array is pulled over itself.
TEST_P(DistGpuTest, PushPullGoesThroughOneCopyEachWay) {
  store->Init("k", Full(0));
  const NDArray array = Full(7, Cpu(2));
  engine.WaitForAll();
  const int launches = gpus().launches();
  store->PushPull("k", array, array);
  EXPECT_EQ(array.ToVector<float>(), All(7));
  EXPECT_EQ(gpus().launches() - launches, 2 * parts() + 1);  // in, out, and that of ToVector
}

TEST_P(DistGpuTest, RowSparseValuesGoAndComeFromAnyDevice) {
  store->Init("k", Rows({0, 2}, 1, Gpu(1)));
  store->Push("k", {Rows({1}, 2, Gpu(0)), Rows({1, 4}, 3, Gpu(1)), Rows({4}, 4, Cpu())});
  const auto ids = NDArray::FromVector<int>({4, 0, 1, 1}, {4}, DType::kInt32, Gpu(2), engine);
  const std::vector<RowSparseNDArray> out = {Rows({}, 0, Gpu(3)), Rows({3}, 9, Cpu())};
  store->RowSparsePull("k", out, ids);
  for (const RowSparseNDArray& array : out) {
    const RowVectors<float> rows = array.ToVectors<float>();
    EXPECT_EQ(rows.row_ids, (std::vector<std::int64_t>{0, 1, 4}));
    EXPECT_EQ(rows.rows, (std::vector<float>{0, 0, 0, 5, 5, 5, 7, 7, 7}));
  }
  store->Pull("k", out[0], 0, /*ignore_sparse=*/false);
  EXPECT_EQ(out[0].ToVectors<float>().row_ids, (std::vector<std::int64_t>{1, 4}));
}

}  // namespace
}  // namespace heddle::kvstore_test
