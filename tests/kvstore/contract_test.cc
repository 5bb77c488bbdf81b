// What heddle/kvstore.h promises of the stores of one process.
#include <heddle/kvstore.h>

#include <atomic>
#include <cstdint>
#include <latch>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

class ContractTest : public StoreTest {};

// ---- Init

TEST_P(ContractTest, InitTakesACopy) {
  NDArray value = Full(1);
  store->Init("k", value);
  value += 1;
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ContractTest, InitReturnsAfterTheValueIsInTheStore) {
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

TEST_P(ContractTest, SecondInitIsAnErrorAndKeepsTheValue) {
  store->Init("k", Full(1));
  ExpectInvalid([&] { store->Init("k", Full(2)); }, {"Init", "'k'", "already", "new key"});
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ContractTest, InitOfAListIsAllOrNothing) {
  store->Init("b", Full(1));
  ExpectInvalid([&] { store->Init({"a", "b"}, {Full(2), Full(2)}); }, {"'b'", "already"});
  EXPECT_FALSE(store->Contains("a"));
  ExpectInvalid(
      [&] {
        store->Init({"a", "c", "a"}, {Full(2), Full(2), Full(2)});
      },
      {"'a'", "twice"});
  ExpectInvalid([&] { store->Init({"a", "c"}, {Full(2)}); }, {"2 keys", "got 1"});
  ExpectInvalid([&] { store->Init({"a", "c"}, {Full(2), NDArray()}); }, {"'c'", "empty"});
  ExpectInvalid(
      [&] {
        store->Init({"a", "c"}, {{Full(2)}, {Full(2), Full(3)}});
      },
      {"'c'", "one array", "got 2"});
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"b"}));
}

TEST_P(ContractTest, InitWithAFailedValueThrowsItsErrorAndLeavesTheKeyFree) {
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { store->Init("k", Poisoned("no data")); }),
            "no data");
  EXPECT_FALSE(store->Contains("k"));
  store->Init("k", Full(3));
  EXPECT_EQ(Pulled(*store, "k"), All(3));
}

TEST_P(ContractTest, InitInsideAnOpIsAnErrorAndLeavesTheKeyFree) {
  NDArray value = Full(1);
  std::string message;
  engine.Push({.name = "outer", .writes = {engine.NewVar()}},
              [&] { message = MessageOf<InvalidState>([&] { store->Init("k", value); }); });
  engine.WaitForAll();
  EXPECT_NE(message, "");
  EXPECT_FALSE(store->Contains("k"));
}

// ---- Push

TEST_P(ContractTest, PushAndPullReturnBeforeTheirInputsAreWritten) {
  NDArray gradient = Full(1);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  NDArray out = Full(0);
  store->Push("k", gradient);
  store->Pull("k", out);  // would hang here if it waited
  writer.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
}

TEST_P(ContractTest, PushedArrayMayBeOverwrittenAtOnce) {
  NDArray gradient = Full(1);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("k", gradient);
  gradient.Fill(100);
  writer.Release();
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ContractTest, StoreNeverAliasesThePushedArray) {
  NDArray value = Full(1);
  store->Push("new", value);
  value += 1;
  EXPECT_EQ(Pulled(*store, "new"), All(1));
  store->Push("new", value);
  value += 1;
  EXPECT_EQ(Pulled(*store, "new"), All(2));
}

TEST_P(ContractTest, AKeyRepeatedInOnePushMakesOneListInOrder) {
  // Only added from left to right is the sum 0: the 1 is lost in 1e8.
  store->Push({"a", "b", "a", "a"}, {Full(1e8), Full(7), Full(1), Full(-1e8)});
  EXPECT_EQ(Pulled(*store, "a"), All(0));
  EXPECT_EQ(Pulled(*store, "b"), All(7));
  store->Push({"a", "a"}, {{Full(1e8), Full(-1e8)}, {Full(1)}});
  EXPECT_EQ(Pulled(*store, "a"), All(1));
}

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

TEST_P(ContractTest, PushesOfEveryDType) {
  for (DType dtype : kAllDTypes) {
    const std::string key(Name(dtype));
    store->Init(key, Full(0, Cpu(), dtype));
    store->Push(key, {Full(1, Cpu(), dtype), Full(1, Cpu(1), dtype)});
    EXPECT_EQ(Pulled(*store, key), All(dtype == DType::kBool ? 1 : 2)) << key;
  }
}

TEST_P(ContractTest, ManyArraysInOnePush) {
  std::vector<NDArray> arrays;
  for (int i = 0; i < 40; ++i) arrays.push_back(Full(i, Cpu(i)));
  store->Push("k", arrays);
  EXPECT_EQ(Pulled(*store, "k"), All(780));
}

TEST_P(ContractTest, LargeArraysAreSummedWhole) {
  const std::int64_t size = 300'001;  // several blocks of the kernels, and a rest
  std::vector<NDArray> arrays;
  for (int i = 0; i < 3; ++i) {
    arrays.push_back(NDArray::Arange(size, DType::kFloat64, Cpu(i), engine));
  }
  store->Push("k", arrays);
  std::vector<NDArray> out(2, NDArray());
  for (int i = 0; i < 2; ++i) out[i] = NDArray(Shape{size}, DType::kFloat64, Cpu(i), engine);
  store->Pull("k", out);
  for (const NDArray& array : out) {
    const std::vector<double> values = array.ToVector<double>();
    for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(values[i], 3.0 * static_cast<double>(i));
  }
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

TEST_P(ContractTest, StrictInitRefusesPushesToNewKeys) {
  const auto strict = NewStore({.strict_init = true});
  ExpectInvalid([&] { strict->Push(3, Full(1)); }, {"3", "never initialised", "strict_init"});
  EXPECT_FALSE(strict->Contains(3));
  strict->Init(3, Full(1));
  strict->Push(3, Full(2));
  EXPECT_EQ(Pulled(*strict, 3), All(2));
}

TEST_P(ContractTest, PushesFromInsideOps) {
  NDArray gradient = Full(0);
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

// ---- Order

TEST_P(ContractTest, PullSeesAllEarlierPushesAndNoLaterOne) {
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

TEST_P(ContractTest, PushWaitsForAnEarlierPull) {
  store->Init("k", Full(1));
  NDArray out = Full(0);
  Hold reader(engine, {out.var()}, {});
  store->Pull("k", out);  // cannot write `out` yet
  store->Push("k", Full(2));
  reader.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "k"), All(2));
}

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

TEST_P(ContractTest, PullToSeveralDevices) {
  store->Init("k", Full(4));
  const std::vector<NDArray> outs = OnFour(0);
  store->Pull("k", outs);
  for (const NDArray& out : outs) EXPECT_EQ(out.ToVector<float>(), All(4));
  store->Push("k", Full(5));
  store->Pull("k", {outs[0], outs[3]});
  EXPECT_EQ(outs[3].ToVector<float>(), All(5));
  EXPECT_EQ(outs[1].ToVector<float>(), All(4));
}

TEST_P(ContractTest, PullCastsToTheDTypeOfItsOutput) {
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

TEST_P(ContractTest, PullIntoAPartOfAnArray) {
  store->Init("k", Full(4));
  NDArray large = NDArray::Full({6, 3}, 1, DType::kFloat32, Cpu(), engine);
  NDArray other = Full(0);
  store->Pull("k", {large.Slice(2, 4), other});
  EXPECT_EQ(large.Slice(2, 4).ToVector<float>(), All(4));
  EXPECT_EQ(large.Slice(0, 2).ToVector<float>(), All(1));
  EXPECT_EQ(large.Slice(4, 6).ToVector<float>(), All(1));
  EXPECT_EQ(other.ToVector<float>(), All(4));
}

TEST_P(ContractTest, ThePoisonOfOneOutputDoesNotReachTheOthers) {
  store->Init("k", Full(4));
  NDArray large = NDArray::Full({6, 3}, 1, DType::kFloat32, Cpu(), engine);
  engine.Push({.name = "fail", .writes = {large.var()}},
              [] { throw std::runtime_error("broken"); });
  NDArray whole = Poisoned("also broken");
  NDArray other = Full(0);
  store->Pull("k", {large.Slice(2, 4), whole, other});
  EXPECT_EQ(other.ToVector<float>(), All(4));
  EXPECT_EQ(whole.ToVector<float>(), All(4));  // overwritten whole, hence cured
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { large.WaitToRead(); }), "broken");
}

TEST_P(ContractTest, TheLastKeyWinsAnOutputOfSeveral) {
  store->Init({1, 2, 3}, {Full(1), Full(2), Full(3)});
  NDArray out = Full(0);
  store->Pull({2, 3, 1}, {out, out, out});
  EXPECT_EQ(out.ToVector<float>(), All(1));
}

TEST_P(ContractTest, PullOfAnUnknownKeyLeavesItFree) {
  NDArray out = Full(7);
  ExpectInvalid([&] { store->Pull("k", out); }, {"Pull", "unknown key", "'k'"});
  EXPECT_EQ(out.ToVector<float>(), All(7));
  EXPECT_FALSE(store->Contains("k"));
  store->Init("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

// ---- PushPull and Broadcast

TEST_P(ContractTest, PushPullWithoutOutWritesTheValue) {
  store->Init("k", Full(1));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  const std::vector<NDArray> values = OnFour(2);
  store->PushPull("k", values);
  for (const NDArray& value : values) EXPECT_EQ(value.ToVector<float>(), All(9));
}

TEST_P(ContractTest, PushPullReadsAllInputsBeforeItWritesAnOutput) {
  NDArray x = Full(1);
  NDArray y = Full(2);
  store->Init({"a", "b"}, {Full(0), Full(0)});
  store->PushPull({"a", "b"}, {x, y}, {y, x});
  EXPECT_EQ(x.ToVector<float>(), All(2));
  EXPECT_EQ(y.ToVector<float>(), All(1));
}

TEST_P(ContractTest, PushPullWithRepeatedKeys) {
  const std::vector<NDArray> outs = {Full(0), Full(0)};
  store->PushPull({"a", "a"}, {Full(1), Full(2)}, outs);
  EXPECT_EQ(outs[0].ToVector<float>(), All(3));
  EXPECT_EQ(outs[1].ToVector<float>(), All(3));
}

TEST_P(ContractTest, BroadcastReadsAllInputsBeforeItWritesAnOutput) {
  NDArray x = Full(1);
  NDArray y = Full(2);
  store->Broadcast({"a", "b"}, {x, y}, {y, x});
  EXPECT_EQ(x.ToVector<float>(), All(2));
  EXPECT_EQ(y.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "b"), All(2));
}

TEST_P(ContractTest, BroadcastOfAKnownKeyIsAnErrorAndWritesNothing) {
  store->Init("b", Full(1));
  const std::vector<NDArray> outs = {Full(7), Full(7)};
  ExpectInvalid(
      [&] {
        store->Broadcast({"a", "b"}, {Full(2), Full(2)}, outs);
      },
      {"'b'", "already"});
  const NDArray wrong = NDArray::Zeros({4}, DType::kFloat32, Cpu(), engine);
  ExpectInvalid(
      [&] {
        store->Broadcast({"a", "c"}, {Full(2), Full(2)}, {outs[0], wrong});
      },
      {"'c'", "(2, 3)", "(4,)"});
  EXPECT_EQ(outs[0].ToVector<float>(), All(7));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"b"}));
}

// ---- Keys

TEST_P(ContractTest, KeysContainsRemove) {
  store->Init({"z", "a"}, {Full(1), Full(2)});
  store->Push("m", Full(3));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"z", "a", "m"}));
  EXPECT_TRUE(store->Contains("a"));
  EXPECT_TRUE(store->Contains(std::string("m")));
  EXPECT_FALSE(store->Contains("b"));

  store->Remove("a");
  EXPECT_FALSE(store->Contains("a"));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"z", "m"}));
  ExpectInvalid([&] { store->Pull("a", Full(0)); }, {"unknown key", "'a'"});
  ExpectInvalid([&] { store->Remove("a"); }, {"Remove", "unknown key", "'a'"});

  // A removed key is free, for another shape as well.
  store->Init("a", NDArray::Ones({5}, DType::kInt32, Cpu(), engine));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"z", "m", "a"}));
}

TEST_P(ContractTest, OperationsPushedBeforeRemoveComplete) {
  NDArray gradient = Full(1);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  NDArray out = Full(-1);
  store->Push("k", gradient);
  store->Pull("k", out);
  store->Remove("k");
  store->Push("k", Full(9));
  writer.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "k"), All(9));
}

TEST_P(ContractTest, StoreMayBeDroppedWithOperationsPending) {
  NDArray gradient = Full(1);
  NDArray out = Full(-1);
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("k", gradient);
  store->Pull("k", out);
  store.reset();
  writer.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
}

TEST_P(ContractTest, KeysAreOfOneKind) {
  ExpectInvalid(
      [&] {
        store->Init(std::vector<Key>{1, "a"}, {Full(1), Full(2)});
      },
      {"1", "'a'", "one kind"});
  store->Init(7, Full(1));
  const std::vector<std::string> parts = {"'a'", "an integer key", "got a string"};
  ExpectInvalid([&] { store->Init("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->Push("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->Pull("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->PushPull("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->Broadcast("a", Full(1), Full(1)); }, parts);
  ExpectInvalid([&] { store->Contains("a"); }, parts);
  ExpectInvalid([&] { store->Remove("a"); }, parts);
  ExpectInvalid([&] { store->Reset("a", Full(1)); }, parts);

  const auto strings = NewStore();
  strings->Init("7", Full(1));
  ExpectInvalid([&] { strings->Push(7, Full(1)); }, {"key 7", "a string key", "got an integer"});
}

TEST_P(ContractTest, KeysUseAll64BitsAndAnyText) {
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

// ---- Bad input

TEST_P(ContractTest, WrongShapeOrDTypeIsAnErrorOfTheCall) {
  store->Init("k", Full(1));
  const NDArray wrong = NDArray::Zeros({3, 2}, DType::kFloat32, Cpu(), engine);
  const NDArray doubles = Full(1, Cpu(), DType::kFloat64);
  const std::vector<std::string> shapes = {"'k'", "(2, 3)", "(3, 2)"};
  const std::vector<std::string> dtypes = {"'k'", "float32", "float64"};
  ExpectInvalid([&] { store->Push("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Push("k", {Full(1), wrong}); }, shapes);
  ExpectInvalid([&] { store->Push("k", doubles); }, dtypes);
  ExpectInvalid([&] { store->Push("k", {Full(1), doubles}); }, dtypes);
  ExpectInvalid([&] { store->Push("new", {Full(1), wrong}); }, {"'new'", "(2, 3)", "(3, 2)"});
  ExpectInvalid([&] { store->Pull("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Pull("k", {Full(1), wrong}); }, shapes);
  ExpectInvalid([&] { store->PushPull("k", Full(2), wrong); }, shapes);
  ExpectInvalid([&] { store->PushPull("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Reset("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Reset("k", doubles); }, dtypes);
  EXPECT_EQ(Pulled(*store, "k"), All(1));
  EXPECT_FALSE(store->Contains("new"));
}

TEST_P(ContractTest, EmptyHandlesAndListsAreErrors) {
  store->Init("k", Full(1));
  const NDArray none;
  const std::vector<NDArray> no_arrays;
  ExpectInvalid([&] { store->Init("n", none); }, {"'n'", "empty"});
  ExpectInvalid([&] { store->Init("n", no_arrays); }, {"'n'", "got none"});
  ExpectInvalid([&] { store->Push("k", none); }, {"'k'", "empty"});
  ExpectInvalid([&] { store->Push("k", no_arrays); }, {"'k'", "got none"});
  ExpectInvalid([&] { store->Pull("k", none); }, {"'k'", "empty"});
  ExpectInvalid([&] { store->Pull("k", no_arrays); }, {"'k'", "got none"});
  ExpectInvalid([&] { store->PushPull("k", Full(2), no_arrays); }, {"'k'", "got none"});
  ExpectInvalid([&] { store->Broadcast("n", Full(2), no_arrays); }, {"'n'", "got none"});
  ExpectInvalid([&] { store->Reset("k", none); }, {"'k'", "empty"});
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ContractTest, ArraysOfAnotherEngineAreErrors) {
  Engine other(OptionsOf(GetParam()));
  const NDArray foreign = NDArray::Ones(shape, DType::kFloat32, Cpu(), other);
  store->Init("k", Full(1));
  const std::vector<std::string> parts = {"engine"};
  ExpectInvalid([&] { store->Init("n", foreign); }, parts);
  ExpectInvalid([&] { store->Push("k", {Full(2), foreign}); }, parts);
  ExpectInvalid([&] { store->Pull("k", {Full(2), foreign}); }, parts);
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ContractTest, NothingOfAListCallHappensIfOneOfItIsBad) {
  store->Init({"a", "b"}, {Full(1), Full(1)});
  const NDArray wrong = NDArray::Zeros({4}, DType::kFloat32, Cpu(), engine);
  NDArray out = Full(7);
  ExpectInvalid([&] { store->Push({"a", "new", "b"}, {Full(2), Full(2), wrong}); }, {"'b'"});
  ExpectInvalid([&] { store->Push({"a", "b"}, {Full(2), Full(2), Full(2)}); }, {"2 keys", "got 3"});
  ExpectInvalid([&] { store->Pull({"a", "b"}, {out, wrong}); }, {"'b'"});
  ExpectInvalid([&] { store->Pull({"a", "none"}, {out, out}); }, {"'none'"});
  ExpectInvalid([&] { store->Pull({"a", "b"}, {out}); }, {"2 keys", "got 1"});
  ExpectInvalid([&] { store->PushPull({"a", "b"}, {Full(2), Full(2)}, {out, wrong}); }, {"'b'"});
  ExpectInvalid([&] { store->PushPull({"a", "b"}, {Full(2), Full(2)}, {out}); }, {"got 1"});
  engine.WaitForAll();
  EXPECT_EQ(out.ToVector<float>(), All(7));
  EXPECT_EQ(Pulled(*store, "a"), All(1));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"a", "b"}));
}

TEST_P(ContractTest, ListCallsWithoutKeysDoNothing) {
  store->Push(std::vector<Key>{}, std::vector<NDArray>{});
  store->Pull(std::vector<Key>{}, std::vector<NDArray>{});
  store->PushPull(std::vector<Key>{}, std::vector<NDArray>{});
  EXPECT_TRUE(store->Keys().empty());
}

TEST_P(ContractTest, UseAfterTheEngineHasStopped) {
  store->Init("k", Full(1));
  NDArray out = Full(0);
  engine.Stop();
  EXPECT_THROW(store->Push("k", out), InvalidState);
  EXPECT_THROW(store->Pull("k", out), InvalidState);
  EXPECT_THROW(store->Init("n", out), InvalidState);
  EXPECT_FALSE(store->Contains("n"));
}

// ---- Failed input

TEST_P(ContractTest, AFailedInputIsReportedByPullsUntilAPushSucceeds) {
  store->Init("k", Full(1));
  NDArray before = Full(0);
  store->Pull("k", before);
  store->Push("k", {Full(2), Poisoned("bad gradient")});
  for (int i = 0; i < 2; ++i) {
    NDArray out = Full(0);
    store->Pull("k", out);
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "bad gradient");
  }
  EXPECT_EQ(before.ToVector<float>(), All(1));
  store->Push("k", Full(3));
  EXPECT_EQ(Pulled(*store, "k"), All(3));
}

TEST_P(ContractTest, AFailedInputLeavesValueAndOptimizerStateAlone) {
  store->Init("k", Full(0));
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Push("k", Full(1));  // m = -1, w = -1
  store->Push("k", Poisoned("bad gradient"));
  store->Push("k", {Poisoned("worse"), Full(1)});
  store->Push("k", Full(1));  // m = -1.5, w = -2.5
  EXPECT_EQ(Pulled(*store, "k"), All(-2.5f));
}

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

TEST_P(ContractTest, OtherKeysOfAListCallWithAFailedInputGoOn) {
  store->Push({"a", "b"}, {Poisoned("bad gradient"), Full(2)});
  EXPECT_EQ(Pulled(*store, "b"), All(2));
}

TEST_P(ContractTest, EveryKindOfFirstWriteAfterInitOnAnotherDevice) {
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

TEST_P(FailedUpdateTest, ResetForgetsTheOptimizerState) {
  store->Init("k", Full(0));
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Push("k", Full(1));
  store->Reset("k", Full(0));
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(-1));
}

// Whichever comes first: a push of zeros has no momentum to go on with, and leaves none behind.
TEST_P(FailedUpdateTest, ResetForgetsTheOptimizerStateInTheOrderOfThePushes) {
  if (GetParam().engine != "threaded") GTEST_SKIP() << "calls of several threads";
  const NDArray zero = Full(0);
  zero.WaitToRead();
  for (int round = 0; round < 300; ++round) {
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

TEST_P(FailedUpdateTest, ResetOfAnUnknownKeyIsAnError) {
  ExpectInvalid([&] { store->Reset("k", Full(1)); }, {"Reset", "unknown key", "'k'"});
  EXPECT_FALSE(store->Contains("k"));
}

TEST_P(FailedUpdateTest, ResetComesAfterEarlierPushesAndPulls) {
  NDArray gradient = Full(1);
  NDArray out = Full(0);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("k", gradient);
  store->Pull("k", out);
  store->Reset("k", Full(9));
  writer.Release();
  EXPECT_EQ(out.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "k"), All(9));
}

// ---- The rest

TEST_P(ContractTest, OneProcessAnswersForItself) {
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

INSTANTIATE_TEST_SUITE_P(All, ContractTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(All, FailedUpdateTest, testing::ValuesIn(AllSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
