// Row-sparse arrays: what each operation does, on every engine; errors; costs that must not depend
// on the rows of the shape.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/memory.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"
#include "tests/message_of.h"

namespace heddle {
namespace {

using engine_test::Contains;
using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

class RowSparse : public engine_test::EveryEngine {
 protected:
  RowSparseNDArray Make(const Ids& ids, const Floats& rows, Shape shape = {5, 2},
                        DType dtype = DType::kFloat32, Device device = Cpu()) {
    return RowSparseNDArray::FromVectors<float>(ids, rows, std::move(shape), dtype, device, engine);
  }
  RowSparseNDArray Make(const Ids& ids, float value) {
    return Make(ids, Floats(ids.size() * 2, value));
  }
  template <class T>
  NDArray RowIds(const std::vector<T>& ids, Device device = Cpu()) {
    return NDArray::FromVector<T>(ids, {static_cast<std::int64_t>(ids.size())}, kDTypeOf<T>, device,
                                  engine);
  }
  void Poison(const Var& var, const std::string& error) {
    engine.Push({.name = "fail", .writes = {var}}, [error] { throw std::runtime_error(error); });
  }
  void Expect(const RowSparseNDArray& array, const Ids& ids, const Floats& rows) {
    const RowVectors<float> there = array.ToVectors<float>();
    EXPECT_EQ(there.row_ids, ids);
    EXPECT_EQ(there.rows, rows);
  }

  Engine engine{GetParam().options};
};

TEST_P(RowSparse, AFreshArrayHasNoRowsAndIsAllZeros) {
  const RowSparseNDArray zeros = RowSparseNDArray::Zeros({3, 2}, DType::kFloat32, Cpu(1), engine);
  EXPECT_EQ(zeros.shape(), (Shape{3, 2}));
  EXPECT_EQ(zeros.dtype(), DType::kFloat32);
  EXPECT_EQ(zeros.device(), Cpu(1));
  EXPECT_EQ(&zeros.engine(), &engine);
  EXPECT_EQ(zeros.row_size(), 2);
  EXPECT_EQ(zeros.num_rows(), 0);
  Expect(zeros, {}, {});
  EXPECT_EQ(zeros.ToVector<float>(), Floats(6, 0));
}

TEST_P(RowSparse, IsMadeFromRowsInAnyOrder) {
  const RowSparseNDArray array = Make({4, 0, 2}, {41, 42, 1, 2, 21, 22});
  Expect(array, {0, 2, 4}, {1, 2, 21, 22, 41, 42});
  EXPECT_EQ(array.ToVector<float>(), (Floats{1, 2, 0, 0, 21, 22, 0, 0, 41, 42}));
}

TEST_P(RowSparse, RowsMayHaveAnyShape) {
  Expect(Make({1}, {7}, {3}), {1}, {7});
  Expect(Make({1}, {1, 2, 3, 4}, {3, 2, 2}), {1}, {1, 2, 3, 4});
  Expect(Make({0, 2}, {}, {3, 0}), {0, 2}, {});
  Expect(Make({}, {}, {0, 4}), {}, {});
}

TEST_P(RowSparse, DenseValuesGoThereAndBack) {
  const Floats values = {0, 0, 1, 0, 0, -0.0F, 0, 3, 0, 0};
  const NDArray dense = NDArray::FromVector(values, {5, 2}, DType::kFloat32, Cpu(), engine);
  const RowSparseNDArray array = RowSparseNDArray::FromDense(dense);
  Expect(array, {1, 3}, {1, 0, 0, 3});
  NDArray back = NDArray::Full({5, 2}, 9, DType::kFloat32, Cpu(), engine);
  array.CopyTo(back);
  EXPECT_EQ(back.ToVector<float>(), (Floats{0, 0, 1, 0, 0, 0, 0, 3, 0, 0}));
}

TEST_P(RowSparse, DensePartsOfArraysMayBeSourceAndDestination) {
  const NDArray dense = NDArray::Full({3, 2, 2}, 5, DType::kFloat32, Cpu(), engine);
  Make({0}, {1, 2}, {2, 2}).CopyTo(dense.Slice(1, 2).Reshape({2, 2}));
  EXPECT_EQ(dense.ToVector<float>(), (Floats{5, 5, 5, 5, 1, 2, 0, 0, 5, 5, 5, 5}));
  const NDArray part = dense.Slice(1, 2).Reshape({2, 2});
  Expect(RowSparseNDArray::FromDense(part), {0}, {1, 2});
}

TEST_P(RowSparse, CopiesCastAndCrossDevices) {
  const RowSparseNDArray array = Make({1, 4}, {1.5, 2, 3, 4});
  const RowSparseNDArray there = array.Copy(Cpu(3));
  EXPECT_EQ(there.device(), Cpu(3));
  Expect(there, {1, 4}, {1.5, 2, 3, 4});
  const RowSparseNDArray half = array.AsType(DType::kFloat16);
  EXPECT_EQ(half.dtype(), DType::kFloat16);
  Expect(half, {1, 4}, {1.5, 2, 3, 4});
  EXPECT_EQ(array.ToVectors<std::int32_t>().rows, (std::vector<std::int32_t>{1, 2, 3, 4}));
  NDArray ints({5, 2}, DType::kInt32, Cpu(), engine);
  array.CopyTo(ints);
  EXPECT_EQ(ints.ToVector<int>(), (std::vector<int>{0, 0, 1, 2, 0, 0, 0, 0, 3, 4}));

  const RowSparseNDArray copy = array.Copy();
  array *= 2;
  Expect(copy, {1, 4}, {1.5, 2, 3, 4});
  Expect(array, {1, 4}, {3, 4, 6, 8});
  array.CopyTo(array);
  Expect(array, {1, 4}, {3, 4, 6, 8});
}

TEST_P(RowSparse, RetainGivesEachRowAskedForOnceAndSorted) {
  const RowSparseNDArray array = Make({0, 2, 4}, {1, 2, 21, 22, 41, 42});
  Expect(array.Retain(RowIds<std::int64_t>({4, 0, 4})), {0, 4}, {1, 2, 41, 42});
  Expect(array.Retain(RowIds<float>({3, 2})), {2, 3}, {21, 22, 0, 0});  // 3 is not there: zeros
  Expect(array.Retain(RowIds<std::uint8_t>({1}, Cpu(2))), {1}, {0, 0});
  Expect(array.Retain(RowIds<std::int32_t>({4, 3, 2, 1}).Reshape({2, 2})), {1, 2, 3, 4},
         {0, 0, 21, 22, 0, 0, 41, 42});
  Expect(array.Retain(RowIds<std::int64_t>({})), {}, {});
  Expect(Make({}, {}).Retain(RowIds<std::int64_t>({1, 2})), {}, {});
  Expect(array, {0, 2, 4}, {1, 2, 21, 22, 41, 42});
}

TEST_P(RowSparse, ARowIdThatIsNoneFailsTheRetainAndNothingElse) {
  const RowSparseNDArray array = Make({0, 2}, 1);
  const auto retain = [&](const NDArray& ids) {
    const RowSparseNDArray kept = array.Retain(ids);
    return MessageOf<InvalidArgument>([&] { kept.WaitToRead(); });
  };
  EXPECT_TRUE(Contains(retain(RowIds<std::int64_t>({1, 5})), "row id 5: expected one in [0, 5)"));
  EXPECT_TRUE(Contains(retain(RowIds<std::int32_t>({-1})), "row id -1: expected one in [0, 5)"));
  EXPECT_TRUE(Contains(retain(RowIds<float>({1, 1.5})), "row id 1.5: expected a whole number"));
  Expect(array, {0, 2}, {1, 1, 1, 1});
  EXPECT_THROW(engine.WaitForAll(), InvalidArgument);
}

TEST_P(RowSparse, SumsTakeTheRowsOfAllInputs) {
  const RowSparseNDArray a = Make({0, 2}, 1);
  const RowSparseNDArray b = Make({2, 3}, 10);
  const RowSparseNDArray none = Make({}, {});
  Expect(a + b, {0, 2, 3}, {1, 1, 11, 11, 10, 10});
  const RowSparseNDArray out = Make({4}, 7);
  Sum({a, b, none, a}, out);
  Expect(out, {0, 2, 3}, {2, 2, 12, 12, 10, 10});
  Sum({out, b.Copy(Cpu(2)), out}, out);  // its own input, twice
  Expect(out, {0, 2, 3}, {4, 4, 34, 34, 30, 30});
  Sum({none, none}, out);
  Expect(out, {}, {});
  Sum({a}, out);
  Expect(out, {0, 2}, {1, 1, 1, 1});
}

TEST_P(RowSparse, SixteenBitSumsRoundOnce) {
  // In float16, 2048 + 1 is 2048: only a sum in float32 counts both ones.
  const RowSparseNDArray a = Make({0}, {2048, 0}).AsType(DType::kFloat16);
  const RowSparseNDArray one = Make({0, 1}, 1).AsType(DType::kFloat16);
  const RowSparseNDArray out = Make({}, {}).AsType(DType::kFloat16);
  Sum({a, one, one}, out);
  Expect(out, {0, 1}, {2050, 2, 2, 2});
}

TEST_P(RowSparse, AddingInPlaceInsertsTheRowsThatAreMissing) {
  const RowSparseNDArray array = Make({1, 3}, 1);
  array += Make({3}, 10);
  Expect(array, {1, 3}, {1, 1, 11, 11});
  array += Make({0, 2, 3, 4}, 100);
  Expect(array, {0, 1, 2, 3, 4}, {100, 100, 1, 1, 100, 100, 111, 111, 100, 100});
  array += array;
  Expect(array, {0, 1, 2, 3, 4}, {200, 200, 2, 2, 200, 200, 222, 222, 200, 200});
  array += Make({}, {});
  array += Make({1}, -2);
  Expect(array, {0, 1, 2, 3, 4}, {200, 200, 0, 0, 200, 200, 222, 222, 200, 200});
}

TEST_P(RowSparse, DenseArraysTakeTheRowsThatAreThere) {
  const NDArray weight = NDArray::Ones({5, 2}, DType::kFloat32, Cpu(), engine);
  weight += Make({1, 4}, {1, 2, 3, 4}) * -0.5;
  EXPECT_EQ(weight.ToVector<float>(), (Floats{1, 1, 0.5, 0, 1, 1, 1, 1, -0.5, -1}));
  Expect(2 * Make({3}, 4), {3}, {8, 8});
}

TEST_P(RowSparse, ClearLeavesNoRows) {
  const RowSparseNDArray array = Make({1, 3}, 1);
  array.Clear();
  Expect(array, {}, {});
}

TEST_P(RowSparse, OpsOfOnesOwnSetRowsAndReadThem) {
  const RowSparseNDArray array = Make({1}, 1);
  engine.Push({.name = "write", .writes = {array.var()}}, [array] {
    const Ids ids = {0, 4};
    array.SetRowIds(ids);
    for (int i = 0; i < 4; ++i) array.rows<float>()[i] = static_cast<float>(i);
  });
  std::int64_t rows = -1;
  Ids ids;
  engine.Push({.name = "read", .reads = {array.var()}}, [array, &rows, &ids] {
    rows = array.num_rows();
    ids.assign(array.row_ids().begin(), array.row_ids().end());
  });
  array.WaitToWrite();
  EXPECT_EQ(rows, 2);
  EXPECT_EQ(ids, (Ids{0, 4}));
  Expect(array, {0, 4}, {0, 1, 2, 3});
}

// Also where the array gives up the memory that they lie in.
TEST_P(RowSparse, AnArrayMayKeepSomeOfItsOwnRowIds) {
  constexpr std::int64_t kRows = 100'000;
  for (const std::size_t kept : {std::size_t{10}, static_cast<std::size_t>(kRows - 1)}) {
    const RowSparseNDArray array = Make({}, {}, {kRows, 1});
    engine.Push({.name = "prune", .writes = {array.var()}}, [array, kept] {
      Ids all(kRows);
      std::iota(all.begin(), all.end(), 0);
      array.SetRowIds(all);
      array.SetRowIds(array.row_ids().last(kept));
      std::fill_n(array.rows<float>(), kept, 1.0F);
    });
    array.WaitToRead();
    ASSERT_EQ(array.row_ids().size(), kept);
    for (std::size_t i = 0; i < kept; ++i) {
      ASSERT_EQ(array.row_ids()[i],
                kRows - static_cast<std::int64_t>(kept) + static_cast<std::int64_t>(i));
    }
  }
}

TEST_P(RowSparse, AFailedInputPoisonsTheResultAndAnOverwriteCuresIt) {
  const RowSparseNDArray bad = Make({1}, 1);
  Poison(bad.var(), "broken");
  const RowSparseNDArray sum = Make({1}, 1) + bad;
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sum.WaitToRead(); }), "broken");
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { bad.ToVector<float>(); }), "broken");
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { bad.ToVectors<float>(); }), "broken");
  const RowSparseNDArray to = Make({2}, 2);
  to += bad;
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { to.WaitToRead(); }), "broken");
  to += Make({2}, 2);  // reads what it changes: no cure
  EXPECT_THROW(to.WaitToRead(), std::runtime_error);
  Make({2}, 2).CopyTo(to);
  Expect(to, {2}, {2, 2});
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(RowSparse, HandlesMayBeDroppedWithWorkPending) {
  NDArray dense = NDArray::Zeros({5, 2}, DType::kFloat32, Cpu(), engine);
  const Var gate = engine.NewVar();
  {
    engine_test::Hold hold(engine, {.name = "hold", .writes = {gate}});
    {
      const RowSparseNDArray array = Make({1}, 1);
      engine.Push({.name = "wait", .reads = {gate}, .writes = {array.var()}}, [array] {
        array.SetRowIds(Ids{2});
        array.rows<float>()[0] = array.rows<float>()[1] = 3;
      });
      dense += array * 2;
    }
  }
  EXPECT_EQ(dense.ToVector<float>(), (Floats{0, 0, 0, 0, 6, 6, 0, 0, 0, 0}));
}

// Any step that touched all rows would need memory and time without end here.
TEST_P(RowSparse, TheRowsOfTheShapeCostNothing) {
  const std::int64_t rows = std::int64_t{1} << 50;
  const std::int64_t last = rows - 1;
  const RowSparseNDArray a = Make({0, last}, {1, 2, 3, 4}, {rows, 2});
  const RowSparseNDArray b = Make({5, last}, {10, 20, 30, 40}, {rows, 2});
  Expect(a + b, {0, 5, last}, {1, 2, 10, 20, 33, 44});
  a += b;
  a *= 2;
  Expect(a.Copy(Cpu(1)), {0, 5, last}, {2, 4, 20, 40, 66, 88});
  Expect(a.Retain(RowIds<std::int64_t>({last, 7})), {7, last}, {0, 0, 66, 88});
}

// The same of rows that have no elements.
TEST_P(RowSparse, RowsWithoutElementsCostNothing) {
  const Shape shape{std::int64_t{1} << 50, 0};
  const NDArray dense(shape, DType::kFloat32, Cpu(), engine);
  Expect(RowSparseNDArray::FromDense(dense), {}, {});
  const RowSparseNDArray rows = Make({3, 5}, {}, shape);
  Expect(rows + rows, {3, 5}, {});
  rows.CopyTo(dense);
  dense += rows;
  EXPECT_EQ(dense.ToVector<float>(), Floats());
}

// Of rows that are nowhere each may be larger than any memory.
TEST_P(RowSparse, RowsThatAreNotThereMayBeOfAnySize) {
  const Shape shape{1, std::numeric_limits<std::int64_t>::max() - 63};
  const auto none = [&] { return RowSparseNDArray(shape, DType::kInt8, Cpu(), engine); };
  const RowSparseNDArray sum = none();
  Sum({none(), none()}, sum);
  sum += none();
  const std::vector<RowSparseNDArray> all = {sum, sum.Copy(), sum.Retain(RowIds<int>({0}))};
  for (const RowSparseNDArray& array : all) {
    array.WaitToRead();
    EXPECT_EQ(array.num_rows(), 0);
  }
}

TEST_P(RowSparse, GivesItsMemoryBack) {
  const std::int64_t before = GetMemoryStats(DeviceType::kCpu).used;
  {
    const RowSparseNDArray many = Make({}, {}, {100000, 8});
    engine.Push({.name = "grow", .writes = {many.var()}}, [many] {
      Ids ids(50000);
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(2 * i);
      many.SetRowIds(ids);
    });
    many.WaitToRead();
    EXPECT_GE(GetMemoryStats(DeviceType::kCpu).used, before + 50000 * 8 * 4);
    many.Clear();
    many.WaitToRead();
    EXPECT_LT(GetMemoryStats(DeviceType::kCpu).used, before + 50000 * 4);
  }
  engine.WaitForAll();
  EXPECT_EQ(GetMemoryStats(DeviceType::kCpu).used, before);
}

INSTANTIATE_TEST_SUITE_P(All, RowSparse, testing::ValuesIn(engine_test::AllConfigs()),
                         engine_test::ConfigLabel);

// ---- Bad input

class RowSparseErrors : public testing::Test {
 protected:
  void ExpectRefused(const std::function<void()>& call, const std::vector<std::string>& parts) {
    engine_.WaitForAll();
    const std::uint64_t pushed = engine_.stats().pushed;
    const std::string message = MessageOf<InvalidArgument>(call);
    for (const std::string& part : parts) EXPECT_TRUE(Contains(message, part)) << message;
    EXPECT_EQ(engine_.stats().pushed, pushed) << message;
    EXPECT_EQ(a_.ToVectors<float>().row_ids, (Ids{1})) << message;
    EXPECT_EQ(a_.ToVectors<float>().rows, (Floats{1, 2})) << message;
  }
  RowSparseNDArray Make(const Ids& ids, const Floats& rows, Shape shape = {3, 2},
                        DType dtype = DType::kFloat32, Device device = Cpu()) {
    return RowSparseNDArray::FromVectors<float>(ids, rows, std::move(shape), dtype, device,
                                                engine_);
  }

  Engine engine_{EngineOptions::FromEnvironment()};
  Engine other_engine_{EngineOptions::FromEnvironment()};
  const RowSparseNDArray a_ = Make({1}, {1, 2});
};

TEST_F(RowSparseErrors, EmptyHandles) {
  const RowSparseNDArray none;
  const NDArray no_dense;
  EXPECT_TRUE(none.empty());
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { none.shape(); },        [&] { none.num_rows(); },
           [&] { none.row_ids(); },      [&] { none.rows(); },
           [&] { none.Copy(); },         [&] { none.ToDense(); },
           [&] { none.CopyTo(a_); },     [&] { a_.CopyTo(none); },
           [&] { a_.CopyTo(no_dense); }, [&] { a_ += none; },
           [&] { none += a_; },          [&] { none *= 2; },
           [&] { a_ + none; },           [&] { none * 2; },
           [&] { a_.Retain(no_dense); }, [&] { none.Clear(); },
           [&] { none.WaitToRead(); },   [&] { RowSparseNDArray::FromDense(no_dense); },
           [&] { Sum({a_, none}, a_); }, [&] { Sum({a_}, none); },
           [&] { no_dense += a_; },      [&] { none.ToVector<float>(); },
           [&] { none.SetRowIds({}); }}) {
    ExpectRefused(use, {"expected an array, got an empty handle"});
  }
}

TEST_F(RowSparseErrors, ShapesThatDoNotFit) {
  const RowSparseNDArray b = Make({}, {}, {3, 1});
  const NDArray dense({3, 1}, DType::kFloat32, Cpu(), engine_);
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { a_ += b; }, [&] { a_ + b; }, [&] { b.CopyTo(a_); }, [&] { Sum({b}, a_); }}) {
    ExpectRefused(use, {"expected shape", "(3, 2)", "(3, 1)"});
  }
  ExpectRefused([&] { a_.CopyTo(dense); }, {"shape (3, 2)", "(3, 1)"});
  ExpectRefused([&] { dense += a_; }, {"shape (3, 1)", "(3, 2)"});
  ExpectRefused([&] { Make({}, {}, {}); }, {"at least one axis"});
}

TEST_F(RowSparseErrors, DTypesDevicesAndEnginesThatDoNotFit) {
  const RowSparseNDArray half = Make({}, {}, {3, 2}, DType::kFloat16);
  const RowSparseNDArray there = Make({}, {}, {3, 2}, DType::kFloat32, Cpu(1));
  const RowSparseNDArray other({3, 2}, DType::kFloat32, Cpu(), other_engine_);
  const NDArray ids = NDArray::Zeros({1}, DType::kInt64, Cpu(), other_engine_);
  ExpectRefused([&] { a_ += half; }, {"Add", "expected dtype float32, got float16"});
  ExpectRefused([&] { Sum({half}, a_); }, {"Sum", "expected dtype float32, got float16"});
  ExpectRefused([&] { a_ += there; }, {"Add", "expected device cpu(0), got cpu(1)"});
  ExpectRefused([&] { a_ += other; }, {"Add", "another engine"});
  ExpectRefused([&] { a_.CopyTo(other); }, {"CopyTo", "another engine"});
  ExpectRefused([&] { a_.Retain(ids); }, {"Retain", "another engine"});
  ExpectRefused([&] { a_.Retain(NDArray({1}, DType::kBool, Cpu(), engine_)); },
                {"Retain", "numeric dtype, got bool"});
  const RowSparseNDArray ints = Make({}, {}, {3, 2}, DType::kInt32);
  ExpectRefused([&] { ints *= 0.5; }, {"Multiply", "int32", "0.5"});
  ExpectRefused([&] { Sum(std::vector<RowSparseNDArray>{}, a_); }, {"Sum", "at least one input"});
  ExpectRefused([&] { a_.rows<double>(); }, {"expected dtype float32, got float64"});
}

TEST_F(RowSparseErrors, RowIdsThatAreNone) {
  ExpectRefused([&] { Make({3}, {1, 2}); }, {"row id 3: expected one in [0, 3)"});
  ExpectRefused([&] { Make({-1}, {1, 2}); }, {"row id -1: expected one in [0, 3)"});
  ExpectRefused([&] { Make({2, 0, 2}, Floats(6)); }, {"unique row ids, got 2 after 2"});
  ExpectRefused([&] { Make({0}, {1, 2, 3}); }, {"expected 2 values for 1 rows", "got 3"});
  ExpectRefused([&] { a_.SetRowIds(Ids{2, 1}); }, {"sorted and unique", "got 1 after 2"});
  ExpectRefused([&] { a_.SetRowIds(Ids{3}); }, {"row id 3: expected one in [0, 3)"});
}

}  // namespace
}  // namespace heddle
