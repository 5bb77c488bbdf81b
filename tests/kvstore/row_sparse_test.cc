// Row-sparse values in the stores of one process: published sessions, pushes and pulls of both
// kinds, row pulls, changes of kind, updaters, errors.
#include <heddle/kvstore.h>
#include <heddle/logging.h>
#include <heddle/optimizer.h>

#include <atomic>
#include <cstdint>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

class RowSparseStoreTest : public StoreTest {
 protected:
  // Rows of two elements each, all of them `value`.
  RowSparseNDArray Rows(const Ids& ids, float value, Device device = Cpu()) {
    return RowSparseNDArray::FromVectors<float>(ids, Floats(2 * ids.size(), value), rows_shape,
                                                DType::kFloat32, On(device), engine);
  }
  RowSparseNDArray NoRows(Device device = Cpu(), DType dtype = DType::kFloat32) {
    return RowSparseNDArray(rows_shape, dtype, On(device), engine);
  }
  NDArray Dense(Scalar value) {
    return NDArray::Full(rows_shape, value, DType::kFloat32, On(Cpu()), engine);
  }
  template <class T>
  NDArray RowIds(const std::vector<T>& ids, Device device = Cpu()) {
    return NDArray::FromVector<T>(ids, {static_cast<std::int64_t>(ids.size())}, kDTypeOf<T>,
                                  On(device), engine);
  }
  template <class Array>
  Array Poison(const Array& array, const std::string& error) {
    engine.Push({.name = "fail", .writes = {array.var()}},
                [error] { throw std::runtime_error(error); });
    return array;
  }
  // The first element of each of the five rows.
  template <class Array>
  Floats Column(const Array& array) {
    const Floats all = array.template ToVector<float>();
    Floats column;
    for (std::size_t i = 0; i < all.size(); i += 2) {
      EXPECT_EQ(all[i], all[i + 1]);
      column.push_back(all[i]);
    }
    return column;
  }
  // Of the stored rows, as updaters get it.
  RowSparseNDArray HandleOf(std::string_view key) {
    const auto stored = std::make_shared<RowSparseNDArray>();  // the updater stays
    store->SetUpdaters({.dense = {},
                        .row_sparse = [stored](KeyRef, const RowSparseNDArray&,
                                               const RowSparseNDArray& given) { *stored = given; },
                        .row_sparse_on_dense = {}});
    store->Push(key, Rows({1}, 1));
    return *stored;
  }
  Floats Stored(std::string_view key) {
    NDArray out = Dense(-1);
    store->Pull(key, out);
    return Column(out);
  }
  // The ids and the first elements of the rows that are there.
  void Expect(const RowSparseNDArray& array, const Ids& ids, const Floats& firsts) {
    const RowVectors<float> rows = array.ToVectors<float>();
    Floats given;
    for (std::size_t i = 0; i < rows.rows.size(); i += 2) given.push_back(rows.rows[i]);
    EXPECT_EQ(rows.row_ids, ids);
    EXPECT_EQ(given, firsts);
  }
  void ExpectRows(std::string_view key, const Ids& ids, const Floats& firsts) {
    RowSparseNDArray out = NoRows();
    store->Pull(key, out, 0, /*ignore_sparse=*/false);
    Expect(out, ids, firsts);
  }

  const Shape rows_shape{5, 2};
};

// ---- The published sessions

TEST_P(RowSparseStoreTest, PublishedInitAndRowPull) {
  store->Init("4", RowSparseNDArray::FromDense(Full(1)));
  RowSparseNDArray b(shape, DType::kFloat32, On(Cpu()), engine);
  store->RowSparsePull("4", b, RowIds<float>({0, 1}));
  EXPECT_EQ(b.shape(), (Shape{2, 3}));
  EXPECT_EQ(b.ToVector<float>(), All(1));
}

TEST_P(RowSparseStoreTest, PublishedPushOfARowSparseValue) {
  RowSparseNDArray b(shape, DType::kFloat32, On(Cpu()), engine);
  store->Init("10", RowSparseNDArray::Zeros(shape, DType::kFloat32, On(Cpu()), engine));
  store->Push("10", RowSparseNDArray::FromDense(Full(1)));
  store->RowSparsePull("10", b, RowIds<float>({0, 1}));
  EXPECT_EQ(b.ToVector<float>(), All(1));
}

TEST_P(RowSparseStoreTest, PublishedRowPulls) {
  const Shape square{3, 3};
  store->Init(
      "3", RowSparseNDArray::FromDense(NDArray::Ones(square, DType::kFloat32, On(Cpu()), engine)));
  RowSparseNDArray a(square, DType::kFloat32, On(Cpu()), engine);
  store->RowSparsePull("3", a, RowIds<std::int64_t>({0, 2}));
  EXPECT_EQ(a.ToVector<float>(), (Floats{1, 1, 1, 0, 0, 0, 1, 1, 1}));
  store->RowSparsePull("3", a, RowIds<std::int64_t>({2, 2}));
  EXPECT_EQ(a.ToVector<float>(), (Floats{0, 0, 0, 0, 0, 0, 1, 1, 1}));
  store->RowSparsePull("3", a, RowIds<std::int64_t>({1, 0}));
  EXPECT_EQ(a.ToVector<float>(), (Floats{1, 1, 1, 1, 1, 1, 0, 0, 0}));
}

// ---- Push and pull

TEST_P(RowSparseStoreTest, InitCopiesAndPushReplaces) {
  const RowSparseNDArray start = Rows({1, 3}, 5);
  store->Init("k", start);
  start.Clear();
  ExpectRows("k", {1, 3}, {5, 5});
  const RowSparseNDArray value = Rows({0, 3}, 7);
  store->Push("k", value);
  value.Clear();  // the store has a copy, and the write waits for it
  ExpectRows("k", {0, 3}, {7, 7});
  EXPECT_EQ(Stored("k"), (Floats{7, 0, 0, 7, 0}));
  store->Push("k", NoRows());
  ExpectRows("k", {}, {});
}

TEST_P(RowSparseStoreTest, ListsOfSeveralDevicesWithMixedNumbersOfRowsAreSummed) {
  store->Init("k", NoRows());
  store->Push("k", {Rows({0, 1, 2, 3, 4}, 1, Cpu(0)), NoRows(Cpu(1)), Rows({3}, 10, Cpu(2)),
                    Rows({1, 3}, 100, Cpu(3))});
  ExpectRows("k", {0, 1, 2, 3, 4}, {1, 101, 1, 111, 1});
  store->Push("k", {NoRows(Cpu(0)), NoRows(Cpu(1))});
  ExpectRows("k", {}, {});
  store->Push("k", std::vector<RowSparseNDArray>{Rows({2}, 3), Rows({2}, 4)});
  ExpectRows("k", {2}, {7});
}

TEST_P(RowSparseStoreTest, APushMakesANewKey) {
  store->Push("k", {Rows({1}, 1, Cpu(1)), Rows({2}, 1, Cpu(2))});
  ExpectRows("k", {1, 2}, {1, 1});
  store->RowSparsePull("k", NoRows(), RowIds<int>({1}));
}

TEST_P(RowSparseStoreTest, KeyListsMayMixKindsAndRepeatKeys) {
  store->Init({"s", "d"}, {Rows({0}, 1), Dense(1)});
  store->Push({"s", "d", "s"}, {Rows({1}, 2), Dense(3), Rows({1, 2}, 4)});
  ExpectRows("s", {1, 2}, {6, 4});
  EXPECT_EQ(Stored("d"), Floats(5, 3));
  ExpectInvalid(
      [&] {
        store->Push({"s", "s"}, {Rows({1}, 2), Dense(3)});
      },
      {"'s'", "one kind", "dense and row-sparse"});
  ExpectRows("s", {1, 2}, {6, 4});
}

TEST_P(RowSparseStoreTest, PullLeavesRowSparseOutputsAloneAndSaysSoOnceAKey) {
  std::vector<std::string> lines;
  SetLogSink([&lines](LogLevel, std::string_view line) { lines.emplace_back(line); });
  const LogLevel level = GetLogLevel();
  SetLogLevel(LogLevel::kInfo);
  store->Init("k", Rows({1}, 5));
  RowSparseNDArray out = Rows({4}, 9);
  store->Pull("k", out);
  store->Pull("k", {out, out});
  store->PushPull("k", Rows({2}, 6), out);
  store->PushPull("k", out);
  store->Broadcast("b", Rows({1}, 1), out);
  SetLogLevel(level);
  SetLogSink(nullptr);
  Expect(out, {4}, {9});
  ExpectRows("k", {4}, {9});
  ExpectRows("b", {1}, {1});
  int told = 0;
  for (const std::string& line : lines) told += line.find("left alone") != std::string::npos;
  EXPECT_EQ(told, 2) << "a line for 'k' and one for 'b'";
}

TEST_P(RowSparseStoreTest, PullConvertsBetweenKindsAndDTypes) {
  store->Init("s", Rows({1, 2}, 1.5));
  store->Init("d", Rows({0, 4}, 2).ToDense());
  RowSparseNDArray half = NoRows(Cpu(1), DType::kFloat16);
  NDArray ints = NDArray::Full(rows_shape, 9, DType::kInt32, On(Cpu(2)), engine);
  store->Pull("s", {half, half}, 0, /*ignore_sparse=*/false);
  store->Pull("s", ints);
  Expect(half, {1, 2}, {1.5, 1.5});
  EXPECT_EQ(ints.ToVector<int>(), (std::vector<int>{0, 0, 1, 1, 1, 1, 0, 0, 0, 0}));
  store->Pull("d", half, 0, /*ignore_sparse=*/false);
  Expect(half, {0, 4}, {2, 2});
}

TEST_P(RowSparseStoreTest, PushPullAndBroadcastFillDenseOutputs) {
  NDArray out = Dense(-1);
  store->Broadcast("k", Rows({1}, 5), out);
  EXPECT_EQ(Column(out), (Floats{0, 5, 0, 0, 0}));
  store->PushPull("k", {Rows({1}, 1), Rows({3}, 2)}, out);
  EXPECT_EQ(Column(out), (Floats{0, 1, 0, 2, 0}));
}

TEST_P(RowSparseStoreTest, ResetOverwritesAValueOfEitherKind) {
  store->Init({"s", "d"}, {Rows({1}, 5), Dense(1)});
  store->Reset("s", Rows({2, 3}, 6));
  ExpectRows("s", {2, 3}, {6, 6});
  store->Reset("s", Dense(2));
  EXPECT_EQ(Stored("s"), Floats(5, 2));
  ExpectInvalid([&] { store->RowSparsePull("s", NoRows(), RowIds<int>({1})); }, {"got a dense"});
  const RowSparseNDArray rows = Rows({1}, 3);
  store->Reset("d", rows);
  Poison(rows, "gone");  // which is not the stored array
  ExpectRows("d", {1}, {3});
  ExpectInvalid(
      [&] {
        store->Reset("d", RowSparseNDArray({4, 2}, DType::kFloat32, On(Cpu()), engine));
      },
      {"Reset", "'d'", "(5, 2)", "(4, 2)"});
  ExpectInvalid([&] { store->Reset("d", Dense(1).AsType(DType::kFloat16)); },
                {"Reset", "'d'", "float32", "float16"});
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { store->Reset("d", Poison(Dense(1), "broken")); }),
            "broken");
  ExpectRows("d", {1}, {3});
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

// A push that would have changed the kind has failed: who resets need not know what is there now.
TEST_P(RowSparseStoreTest, ResetCuresAKeyWhoseKindAFailedPushMayHaveChanged) {
  for (const bool to_rows : {true, false}) {
    store = NewStore();
    store->Init("k", Rows({1}, 5));
    store->Push("k", Poison(Dense(1), "broken"));
    if (to_rows) {
      store->Reset("k", Rows({2}, 7));
    } else {
      store->Reset("k", Dense(7));
    }
    EXPECT_EQ(Stored("k"), to_rows ? Floats({0, 0, 7, 0, 0}) : Floats(5, 7));
  }
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(RowSparseStoreTest, ResetToTheOtherKindForgetsTheOptimizerState) {
  store->Init("k", Dense(0));
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Push("k", Dense(1));
  store->Reset("k", NoRows());
  store->Push("k", Rows({0, 1}, 1));
  EXPECT_EQ(Stored("k"), (Floats{-1, -1, 0, 0, 0}));
}

// ---- Row pulls

TEST_P(RowSparseStoreTest, ThePulledArrayMayBeTheStoredOne) {
  store->Init("k", RowSparseNDArray::FromVectors<float>({0, 1, 3}, {5, 5, 6, 6, 8, 8}, rows_shape,
                                                        DType::kFloat32, On(Cpu()), engine));
  const RowSparseNDArray stored = HandleOf("k");
  store->Pull("k", stored, 0, /*ignore_sparse=*/false);
  Expect(stored, {0, 1, 3}, {5, 6, 8});
  const RowSparseNDArray half = NoRows(Cpu(), DType::kFloat16);
  const RowSparseNDArray other = NoRows();
  store->RowSparsePull("k", {half, stored, other, stored}, RowIds<int>({3, 2, 0}));
  for (const RowSparseNDArray& array : {stored, other, half.AsType(DType::kFloat32)}) {
    Expect(array, {0, 2, 3}, {5, 0, 8});
  }
  store->RowSparsePull("k", stored, RowIds<int>({3}));
  ExpectRows("k", {3}, {8});
}

TEST_P(RowSparseStoreTest, RowPullTakesIdsOfAnyNumericDTypeOrderAndDevice) {
  store->Init("k", RowSparseNDArray::FromVectors<float>({0, 1, 3}, {0, 0, 1, 1, 3, 3}, rows_shape,
                                                        DType::kFloat32, On(Cpu()), engine));
  RowSparseNDArray out = NoRows();
  const auto pull = [&](const NDArray& ids) {
    store->RowSparsePull("k", out, ids);
    return out;
  };
  Expect(pull(RowIds<std::int64_t>({3, 1, 3})), {1, 3}, {1, 3});
  Expect(pull(RowIds<std::int32_t>({4, 0})), {0, 4}, {0, 0});
  Expect(pull(RowIds<std::uint8_t>({2}, Cpu(2))), {2}, {0});
  Expect(pull(RowIds<std::int8_t>({1})), {1}, {1});
  Expect(pull(RowIds<float>({3, 0})), {0, 3}, {0, 3});
  Expect(pull(RowIds<double>({3})), {3}, {3});
  Expect(pull(RowIds<float>({3, 1}).AsType(DType::kFloat16)), {1, 3}, {1, 3});
  Expect(pull(RowIds<float>({3, 1}).AsType(DType::kBFloat16)), {1, 3}, {1, 3});
  Expect(pull(RowIds<std::int64_t>({0, 1, 3, 3}).Reshape({2, 2})), {0, 1, 3}, {0, 1, 3});
  Expect(pull(RowIds<std::int64_t>({})), {}, {});
  Expect(pull(RowIds<std::int64_t>({1, 3}).Slice(1, 2)), {3}, {3});
  store->Push("k", NoRows());
  Expect(pull(RowIds<std::int64_t>({1, 2})), {}, {});
}

TEST_P(RowSparseStoreTest, OneIdsArrayServesAllOutputsOrEachHasItsOwn) {
  store->Init("k", Rows({0, 1, 2, 3, 4}, 5));
  const std::vector<RowSparseNDArray> out = {NoRows(Cpu(0)), NoRows(Cpu(1)),
                                             NoRows(Cpu(2), DType::kFloat64)};
  store->RowSparsePull("k", out, RowIds<int>({3, 1}));
  for (const RowSparseNDArray& array : out) Expect(array, {1, 3}, {5, 5});
  store->RowSparsePull("k", out, {RowIds<int>({0}), RowIds<int>({}), RowIds<float>({2, 4})});
  Expect(out[0], {0}, {5});
  Expect(out[1], {}, {});
  Expect(out[2], {2, 4}, {5, 5});
}

TEST_P(RowSparseStoreTest, RowPullTakesListsOfKeys) {
  store->Init({"a", "b"}, {Rows({0, 1}, 1), Rows({0, 1}, 2)});
  const RowSparseNDArray a = NoRows();
  const RowSparseNDArray b = NoRows();
  const RowSparseNDArray c = NoRows();
  store->RowSparsePull({"a", "b"}, {{a}, {b, c}},
                       {{RowIds<int>({0})}, {RowIds<int>({1}), RowIds<int>({0, 1})}});
  Expect(a, {0}, {1});
  Expect(b, {1}, {2});
  Expect(c, {0, 1}, {2, 2});
  const NDArray ids = RowIds<int>({1, 1});
  store->RowSparsePull({"a", "b"}, std::vector<std::vector<RowSparseNDArray>>{{a}, {b, c}}, ids);
  Expect(a, {1}, {1});
  Expect(b, {1}, {2});
  Expect(c, {1}, {2});
}

TEST_P(RowSparseStoreTest, ARowIdThatIsNoneFailsItsOutputsAndNothingElse) {
  store->Init("k", Rows({0, 1, 2}, 5));
  const auto error = [&](const NDArray& ids) {
    const RowSparseNDArray out = Rows({4}, 9);
    store->RowSparsePull("k", out, ids);
    const std::string message = MessageOf<InvalidArgument>([&] { out.WaitToRead(); });
    EXPECT_EQ(MessageOf<InvalidArgument>([&] { engine.WaitForAll(); }), message);
    engine.ClearError(out.var());
    Expect(out, {4}, {9});
    return message;
  };
  EXPECT_EQ(error(RowIds<std::int64_t>({0, 5})),
            "RowSparsePull: key 'k': row id 5: expected one in [0, 5)");
  EXPECT_EQ(error(RowIds<std::int32_t>({-1})),
            "RowSparsePull: key 'k': row id -1: expected one in [0, 5)");
  EXPECT_EQ(error(RowIds<float>({1, 2.5})),
            "RowSparsePull: key 'k': row id 2.5: expected a whole number in [0, 5)");
  const RowSparseNDArray good = NoRows();
  const RowSparseNDArray bad = NoRows();
  store->RowSparsePull("k", {good, bad}, {RowIds<int>({1}), RowIds<int>({9})});
  Expect(good, {1}, {5});
  EXPECT_THROW(bad.WaitToRead(), InvalidArgument);
  ExpectRows("k", {0, 1, 2}, {5, 5, 5});
  EXPECT_THROW(engine.WaitForAll(), InvalidArgument);
}

TEST_P(RowSparseStoreTest, ARowPullSeesAllEarlierPushesAndNoLaterOne) {
  store->Init("k", Rows({0, 1}, 1));
  const RowSparseNDArray before = NoRows();
  const RowSparseNDArray after = NoRows();
  const RowSparseNDArray value = Rows({1}, 2);
  const NDArray ids = RowIds<int>({0, 1});
  const NDArray late_ids = RowIds<int>({0});
  {
    Hold hold(engine, {}, {value.var(), late_ids.var()});
    store->RowSparsePull("k", before, late_ids);  // its ids are not there yet
    store->Push("k", value);                      // waits for the row pull before it, too
    store->RowSparsePull("k", after, ids, /*priority=*/10);
  }
  Expect(before, {0}, {1});
  Expect(after, {0, 1}, {0, 2});
}

// ---- Changes of kind

TEST_P(RowSparseStoreTest, TheDefaultUpdaterChangesTheKindOfAKey) {
  store->Init("k", Dense(5));
  const RowSparseNDArray out = NoRows();
  NDArray old = Dense(-1);
  store->Pull("k", old);
  store->Push("k", {Rows({1}, 1), Rows({1, 2}, 2)});
  store->RowSparsePull("k", out, RowIds<int>({1, 2}));
  Expect(out, {1, 2}, {3, 2});
  EXPECT_EQ(Column(old), Floats(5, 5));
  store->Push("k", {Dense(1), Dense(2)});
  EXPECT_EQ(Stored("k"), Floats(5, 3));
  ExpectInvalid([&] { store->RowSparsePull("k", out, RowIds<int>({1})); },
                {"'k'", "row-sparse", "dense"});
  store->PushPull("k", Rows({4}, 4), old);
  EXPECT_EQ(Column(old), (Floats{0, 0, 0, 0, 4}));
}

TEST_P(RowSparseStoreTest, AFailedPushThatWouldChangeTheKindLeavesTheValues) {
  store->Init("d", Dense(5));
  store->Init("s", Rows({1}, 7));
  store->Push("d", Poison(Rows({0}, 1), "broken"));
  store->Push("s", Poison(Dense(1), "broken"));
  for (const char* key : {"d", "s"}) {
    NDArray out = Dense(-1);
    store->Pull(key, out);
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "broken");
  }
  // What was stored, now in the other kind, is what a good push updates.
  store->SetUpdaters(
      {.dense = [](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; },
       .row_sparse = [](KeyRef, const RowSparseNDArray& input,
                        const RowSparseNDArray& stored) { stored += input; },
       .row_sparse_on_dense = {}});
  store->Push("d", Rows({3}, 1));
  store->Push("s", Dense(1));
  EXPECT_EQ(Stored("d"), (Floats{5, 5, 5, 6, 5}));
  EXPECT_EQ(Stored("s"), (Floats{1, 8, 1, 1, 1}));
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(RowSparseStoreTest, AFailedInputLeavesTheRowsAloneWhateverOverwritesThem) {
  store->Init("k", Rows({1}, 7));
  const auto set_updater = [&](bool clears) {
    store->SetUpdaters(
        {.dense = {},
         .row_sparse =
             [clears](KeyRef, const RowSparseNDArray& input, const RowSparseNDArray& stored) {
               if (clears) stored.Clear();
               stored += input;
             },
         .row_sparse_on_dense = {}});
  };
  set_updater(true);
  store->Push("k", Poison(Rows({0}, 1), "broken"));
  set_updater(false);
  store->Push("k", Rows({1, 2}, 1));
  EXPECT_EQ(Stored("k"), (Floats{0, 8, 1, 0, 0}));
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

// Its rows move as those of the others come.
TEST_P(RowSparseStoreTest, TheStoredRowsMayBeAmongThePushedOnes) {
  store->Init("k", Rows({1, 3}, 8));
  const RowSparseNDArray stored = HandleOf("k");
  for (const char* name : {"sgd", "lamb"}) {  // lazy; with norms, and so all rows
    store->SetOptimizer(MakeOptimizer(name, {{"learning_rate", 0.5}}));
    const NDArray before = Dense(0);
    store->Pull("k", before);
    const RowSparseNDArray copy = stored.Copy(stored.device());
    store->Push("k", std::vector<RowSparseNDArray>{stored, Rows({0, 2}, 4)});
    const Floats together = Stored("k");
    store->Reset("k", copy);
    store->Push("k", std::vector<RowSparseNDArray>{copy, Rows({0, 2}, 4)});
    EXPECT_EQ(together, Stored("k")) << name;
    if (std::string_view(name) == "sgd") {
      EXPECT_EQ(together, (Floats{-2, 4, -2, 4, 0}));
    }
    store->Reset("k", copy);
  }
}

// Threads change the kind of a key to and fro; each pull sees one push whole.
TEST_P(RowSparseStoreTest, PullsSeeAValueWholeWhileItsKindChanges) {
  if (GetParam().engine != "threaded") GTEST_SKIP() << "calls of several threads";
  store->Init("k", Dense(0));
  std::atomic<int> failures = 0;
  const auto work = [&](float value, bool row_sparse) {
    for (int i = 0; i < 200; ++i) {
      if (row_sparse) {
        store->Push("k", Rows({0, 1, 2, 3, 4}, value));
      } else {
        store->Push("k", Dense(value));
      }
      NDArray out = Dense(-1);
      store->Pull("k", out);
      const Floats seen = out.ToVector<float>();
      const bool whole = seen == Floats(10, 1) || seen == Floats(10, 2) || seen == Floats(10, 3);
      if (!whole) ++failures;
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back(work, 1.0F, true);
  threads.emplace_back(work, 2.0F, false);
  threads.emplace_back(work, 3.0F, true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

// Whoever loses the key to the other has residuals and optimizer state of its own: what ops of
// several values touched without an order, the access checker would refuse.
TEST_P(RowSparseStoreTest, ThreadsThatChangeTheKindShareNoResiduals) {
  if (GetParam().engine != "threaded") GTEST_SKIP() << "calls of several threads";
  EngineOptions options = OptionsOf(GetParam());
  options.check_access = true;
  Engine checked(options);
  const NDArray gradient = NDArray::Full(rows_shape, 1, DType::kFloat32, Cpu(), checked);
  gradient.WaitToRead();
  for (int round = 0; round < 200; ++round) {
    const auto own = KVStore::Create(GetParam().store, checked);
    own->SetGradientCompression({.type = "2bit"});
    own->Init("k", RowSparseNDArray(rows_shape, DType::kFloat32, Cpu(), checked));
    const auto push = [&] { own->Push("k", gradient); };
    RunTogether(round, push, push);
    push();
    ASSERT_NO_THROW(checked.WaitForAll()) << "in round " << round;
  }
}

TEST_P(RowSparseStoreTest, AValueThatTakesThePlaceOfAnotherSharesNoOptimizerState) {
  if (GetParam().engine != "threaded") GTEST_SKIP() << "calls of several threads";
  EngineOptions options = OptionsOf(GetParam());
  options.check_access = true;
  Engine checked(options);
  const NDArray dense = NDArray::Full(rows_shape, 1, DType::kFloat32, Cpu(), checked);
  dense.WaitToRead();
  const auto rows = RowSparseNDArray::FromVectors<float>({1}, {1, 1}, rows_shape, DType::kFloat32,
                                                         Cpu(), checked);
  for (int round = 0; round < 200; ++round) {
    const auto own = KVStore::Create(GetParam().store, checked);
    own->Init("k", rows);
    bool refused = false;
    const auto change_kind = [&] {
      try {
        own->Push("k", dense);
      } catch (const InvalidArgument&) {  // the optimizer was there first
        refused = true;
      }
    };
    const auto update = [&] {
      own->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.5}));
      own->Push("k", rows);
    };
    RunTogether(round, change_kind, update);
    own->Push("k", rows);
    // Both updates count in either order: m = -0.5, w = 0.5; m = -0.75, w = -0.25.
    const NDArray out(rows_shape, DType::kFloat32, Cpu(), checked);
    own->Pull("k", out);
    const float rest = refused ? 0 : 1;
    ASSERT_EQ(Column(out), (Floats{rest, -0.25F, rest, rest, rest})) << "in round " << round;
    ASSERT_NO_THROW(checked.WaitForAll()) << "in round " << round;
  }
}

// A push that changes the kind of a key, and waits for room once that is settled: what another
// thread does meanwhile comes after it.
TEST(RowSparseAtTheBound, AChangeOfKindSwallowsNoUpdateOfAnotherThread) {
  for (const char* const type : {"local", "device"}) {
    SCOPED_TRACE(type);
    EngineOptions options = EngineOptions::FromEnvironment();
    options.type = "threaded";
    options.num_workers = 1;
    options.max_pending_ops = 4;
    Engine engine(options);
    const Shape shape{3, 1};
    const NDArray dense = NDArray::Full(shape, 1, DType::kFloat32, Cpu(), engine);
    const auto rows =
        RowSparseNDArray::FromVectors<float>({1}, {1}, shape, DType::kFloat32, Cpu(), engine);
    const auto store = KVStore::Create(type, engine);
    store->Init("k", rows);
    engine.WaitForAll();
    std::latch may_end(1), started(1);
    const Var busy = engine.NewVar("busy");
    engine.Push({.name = "blocks", .writes = {busy}}, [&] {
      started.count_down();
      may_end.wait();
    });
    started.wait();
    {
      const NoWaitScope no_wait;
      for (int i = 0; i < 8; ++i) engine.Push({.name = "waits", .writes = {busy}}, [] {});
    }
    std::thread changes_kind([&] { store->Push("k", dense); });
    while (store->transfers().pushed_bytes == 0) std::this_thread::yield();  // it is settled
    {
      const NoWaitScope no_wait;
      store->SetOptimizer(Sgd({.learning_rate = 0.5}));
      store->Push("k", rows);
    }
    may_end.count_down();
    changes_kind.join();
    const NDArray out(shape, DType::kFloat32, Cpu(), engine);
    store->Pull("k", out);
    EXPECT_EQ(out.ToVector<float>(), (Floats{1, 0.5F, 1}));
  }
}

// A key that was removed and made anew while Reset waited for its value.
TEST_P(RowSparseStoreTest, ResetRefusesAKeyThatHasAnotherShapeOrDTypeByThen) {
  if (GetParam().engine != "seeded") GTEST_SKIP() << "ops that run inside of waits alone";
  const Shape larger{7, 2};
  const auto expect = [&](const auto& before, const auto& anew, const std::string& expected,
                          const std::string& given) {
    store = NewStore();
    store->Init("k", before);
    const NDArray value = Dense(1);
    engine.Push({.name = "remake", .reads = {value.var()}, .writes = {value.var()}}, [&] {
      store->Remove("k");
      store->Push("k", anew);
    });
    ExpectInvalid([&] { store->Reset("k", value); }, {"Reset", "'k'", expected, given});
    const NDArray out(anew.shape(), DType::kFloat32, On(Cpu()), engine);
    store->Pull("k", out);
    EXPECT_EQ(out.ToVector<float>(), Floats(static_cast<std::size_t>(out.size()), 7));
  };
  const NDArray large = NDArray::Full(larger, 7, DType::kFloat32, On(Cpu()), engine);
  const NDArray wide = NDArray::Full(rows_shape, 7, DType::kFloat64, On(Cpu()), engine);
  const auto large_rows = RowSparseNDArray::FromVectors<float>(
      {0, 1, 2, 3, 4, 5, 6}, Floats(14, 7), larger, DType::kFloat32, On(Cpu()), engine);
  for (const NDArray& array : {large, wide}) array.WaitToRead();
  expect(Dense(0), large, "(7, 2)", "(5, 2)");
  expect(Dense(0), wide, "float64", "float32");
  expect(Dense(0), large_rows, "(7, 2)", "(5, 2)");
  expect(Rows({1}, 0), large, "(7, 2)", "(5, 2)");
  expect(Rows({1}, 0), large_rows, "(7, 2)", "(5, 2)");
}

// ---- Updaters

TEST_P(RowSparseStoreTest, UpdatersGetTheKindsThatTheyAreFor) {
  store->Init({"s", "d"}, {Rows({1}, 1), Dense(1)});
  std::vector<std::string> calls;
  store->SetUpdaters(
      {.dense =
           [&](KeyRef key, const NDArray& input, const NDArray& stored) {
             calls.push_back("dense " + ToString(key));
             stored += input;
           },
       .row_sparse =
           [&](KeyRef key, const RowSparseNDArray& input, const RowSparseNDArray& stored) {
             calls.push_back("row_sparse " + ToString(key));
             stored += input * 2;
           },
       .row_sparse_on_dense =
           [&](KeyRef key, const RowSparseNDArray& input, const NDArray& stored) {
             calls.push_back("mixed " + ToString(key));
             stored += input * 3;
           }});
  store->Push("s", {Rows({1, 2}, 1, Cpu(1)), Rows({2}, 10, Cpu(2))});
  store->Push("d", Dense(1));
  store->Push("d", {Rows({0}, 1), Rows({0, 4}, 1)});
  EXPECT_EQ(calls, (std::vector<std::string>{"row_sparse 's'", "dense 'd'", "mixed 'd'"}));
  ExpectRows("s", {1, 2}, {3, 22});
  EXPECT_EQ(Stored("d"), (Floats{8, 2, 2, 2, 5}));
}

TEST_P(RowSparseStoreTest, APairOfKindsWithoutAnUpdaterIsAnError) {
  store->Init({"s", "d"}, {Rows({1}, 1), Dense(1)});
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  ExpectInvalid([&] { store->Push("s", Dense(1)); },
                {"Push", "'s'", "expected row-sparse arrays", "an updater is set", "dense"});
  ExpectInvalid([&] { store->Push("s", Rows({1}, 1)); },
                {"'s'", "updater for row-sparse arrays and a row-sparse value"});
  ExpectInvalid([&] { store->PushPull("d", Rows({1}, 1), Dense(1)); },
                {"PushPull", "'d'", "updater for row-sparse arrays and a dense value"});
  ExpectInvalid([&] { store->SetUpdaters({}); }, {"SetUpdaters", "none"});
  store->SetUpdaters({.dense = {},
                      .row_sparse = [](KeyRef, const RowSparseNDArray& input,
                                       const RowSparseNDArray& stored) { stored += input; },
                      .row_sparse_on_dense = {}});
  ExpectInvalid([&] { store->Push("d", Dense(1)); },
                {"'d'", "updater for dense arrays and a dense value"});
  ExpectInvalid([&] { store->Push({"s", "d"}, {Rows({1}, 1), Rows({1}, 1)}); }, {"'d'"});
  ExpectRows("s", {1}, {1});  // nothing of the list call happened
  store->Push("s", Rows({1}, 1));
  ExpectRows("s", {1}, {2});
  EXPECT_EQ(Stored("d"), Floats(5, 1));
}

// ---- Failed inputs and failed updates

TEST_P(RowSparseStoreTest, AFailedPushLeavesTheValueAndPullsReportItUntilAPushSucceeds) {
  store->Init("k", Rows({1}, 1));
  store->SetUpdaters({.dense = {},
                      .row_sparse = [](KeyRef, const RowSparseNDArray& input,
                                       const RowSparseNDArray& stored) { stored += input; },
                      .row_sparse_on_dense = {}});
  store->Push("k", {Rows({1}, 1), Poison(Rows({1}, 1), "broken")});
  RowSparseNDArray out = NoRows();
  store->RowSparsePull("k", out, RowIds<int>({1}));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "broken");
  store->Push("k", Rows({1}, 10));
  store->RowSparsePull("k", out, RowIds<int>({1}));
  Expect(out, {1}, {11});
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(RowSparseStoreTest, AnUpdateThatFailsMidwayPoisonsTheKeyUntilReset) {
  store->Init("k", Rows({1}, 1));
  bool fails = true;
  store->SetUpdaters(
      {.dense = {},
       .row_sparse =
           [&](KeyRef, const RowSparseNDArray& input, const RowSparseNDArray& stored) {
             stored += input;
             if (fails) Poison(stored, "midway");
           },
       .row_sparse_on_dense = {}});
  store->Push("k", Rows({1}, 1));
  fails = false;
  store->Push("k", Rows({1}, 1));
  RowSparseNDArray out = NoRows();
  store->RowSparsePull("k", out, RowIds<int>({1}));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "midway");
  store->Reset("k", Rows({2}, 2));
  store->Push("k", Rows({2}, 3));
  ExpectRows("k", {2}, {5});
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(RowSparseStoreTest, APushOfAFailedArrayOntoANewKeyGivesItNoValue) {
  store->Push("k", Poison(Rows({1}, 1), "broken"));
  RowSparseNDArray out = NoRows();
  store->RowSparsePull("k", out, RowIds<int>({1}));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), "broken");
  store->Push("k", Rows({1}, 1));
  ExpectRows("k", {1}, {1});
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

// ---- Bad input

TEST_P(RowSparseStoreTest, BadInputIsRefusedAndChangesNothing) {
  store->Init({"s", "d"}, {Rows({1}, 1), Dense(1)});
  const RowSparseNDArray other_shape({4, 2}, DType::kFloat32, On(Cpu()), engine);
  const RowSparseNDArray half = NoRows(Cpu(), DType::kFloat16);
  const RowSparseNDArray out = NoRows();
  const NDArray ids = RowIds<int>({1});
  Engine other_engine{OptionsOf(GetParam())};
  const RowSparseNDArray foreign(rows_shape, DType::kFloat32, Cpu(), other_engine);
  const NDArray foreign_ids = NDArray::Zeros({1}, DType::kInt64, Cpu(), other_engine);

  ExpectInvalid([&] { store->Init("s", Rows({1}, 1)); }, {"'s'", "already"});
  ExpectInvalid([&] { store->Push("s", other_shape); }, {"'s'", "(5, 2)", "(4, 2)"});
  ExpectInvalid([&] { store->Push("s", half); }, {"'s'", "float32", "float16"});
  ExpectInvalid([&] { store->Push("s", {Rows({1}, 1), other_shape}); }, {"(5, 2)", "(4, 2)"});
  ExpectInvalid([&] { store->Push("d", other_shape); }, {"'d'", "(5, 2)", "(4, 2)"});
  ExpectInvalid([&] { store->Push("s", foreign); }, {"'s'", "another engine"});
  ExpectInvalid([&] { store->Push("s", RowSparseNDArray()); }, {"'s'", "empty handle"});
  ExpectInvalid([&] { store->Push("s", std::vector<RowSparseNDArray>{}); }, {"'s'", "none"});
  ExpectInvalid([&] { store->Pull("s", other_shape, 0, false); }, {"(5, 2)", "(4, 2)"});
  ExpectInvalid([&] { store->Pull("?", out); }, {"unknown key '?'"});

  ExpectInvalid([&] { store->RowSparsePull("?", out, ids); }, {"unknown key '?'"});
  ExpectInvalid([&] { store->RowSparsePull("d", out, ids); },
                {"'d'", "expected a row-sparse value, got a dense one"});
  ExpectInvalid([&] { store->RowSparsePull("s", Dense(1), ids); },
                {"'s'", "expected row-sparse outputs, got dense ones"});
  ExpectInvalid([&] { store->RowSparsePull("s", ArrayList(), ids); }, {"'s'", "got none"});
  ExpectInvalid([&] { store->RowSparsePull("s", out, out); }, {"'s'", "row ids", "row-sparse"});
  ExpectInvalid(
      [&] {
        store->RowSparsePull("s", {out, out, out}, {ids, ids});
      },
      {"'s'", "3 outputs", "got 2"});
  ExpectInvalid([&] { store->RowSparsePull("s", out, NDArray()); }, {"'s'", "empty handle"});
  ExpectInvalid([&] { store->RowSparsePull("s", RowSparseNDArray(), ids); }, {"empty handle"});
  ExpectInvalid([&] { store->RowSparsePull("s", other_shape, ids); }, {"(5, 2)", "(4, 2)"});
  ExpectInvalid([&] { store->RowSparsePull("s", out, foreign_ids); }, {"another engine"});
  ExpectInvalid([&] { store->RowSparsePull("s", out, ids.AsType(DType::kBool)); },
                {"'s'", "numeric dtype, got bool"});
  ExpectInvalid([&] { store->RowSparsePull({"s", "d"}, {out, out}, {ids, ids}); }, {"'d'"});
  ExpectInvalid(
      [&] {
        store->RowSparsePull({"s", "s"}, {out, out}, std::vector<NDArray>{ids});
      },
      {"RowSparsePull", "2 keys, got 1"});

  store->SetOptimizer(Sgd());
  ExpectInvalid([&] { store->Push("s", Dense(1)); },
                {"'s'", "expected row-sparse arrays", "optimizer", "dense"});
  Expect(out, {}, {});
  ExpectRows("s", {1}, {1});
  EXPECT_EQ(Stored("d"), Floats(5, 1));
}

TEST_P(RowSparseStoreTest, CompressionRefusesRowSparseArrays) {
  store->Init("k", Rows({1}, 1));
  store->SetGradientCompression({.type = "2bit"});
  ExpectInvalid([&] { store->Push("k", Rows({1}, 1)); },
                {"'k'", "dense arrays", "compression 2bit", "row-sparse"});
  ExpectRows("k", {1}, {1});
}

// Any step that touched all rows would need memory and time without end here.
TEST_P(RowSparseStoreTest, TheRowsOfTheShapeCostNothing) {
  const Shape vast{std::int64_t{1} << 50, 2};
  const std::int64_t last = vast[0] - 1;
  const auto rows = [&](const Ids& ids, float value) {
    return RowSparseNDArray::FromVectors<float>(ids, Floats(2 * ids.size(), value), vast,
                                                DType::kFloat32, On(Cpu()), engine);
  };
  store->Init("k", rows({}, 0));
  store->Push("k", {rows({0, last}, 1), rows({last}, 2)});
  RowSparseNDArray out = rows({}, 0);
  store->RowSparsePull("k", out, RowIds<std::int64_t>({last, 5}));
  Expect(out, {5, last}, {0, 3});
  store->SetUpdaters({.dense = {},
                      .row_sparse = [](KeyRef, const RowSparseNDArray& input,
                                       const RowSparseNDArray& stored) { stored += input; },
                      .row_sparse_on_dense = {}});
  store->Push("k", {rows({7, last}, 1), rows({7}, 2)});
  store->RowSparsePull("k", out, RowIds<std::int64_t>({last, 7, 0}));
  Expect(out, {0, 7, last}, {1, 3, 4});
}

INSTANTIATE_TEST_SUITE_P(All, RowSparseStoreTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, RowSparseStoreTest, testing::ValuesIn(GpuSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
