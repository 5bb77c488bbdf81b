#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/ndarray.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ops/convert.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"

namespace heddle {
namespace {

using engine_test::Hold;
using Floats = std::vector<float>;
using namespace std::chrono_literals;

class NDArrays : public engine_test::EveryEngine {
 protected:
  NDArray Array(const Floats& values, Shape shape, Device device = Cpu()) {
    return NDArray::FromVector(values, std::move(shape), DType::kFloat32, device, engine_);
  }
  NDArray Array(const Floats& values) {
    return Array(values, Shape{static_cast<std::int64_t>(values.size())});
  }
  NDArray Ints(const std::vector<std::int32_t>& values) {
    return NDArray::FromVector(values, Shape{static_cast<std::int64_t>(values.size())},
                               DType::kInt32, Cpu(), engine_);
  }
  // Poisons the array's variable.
  void Poison(const NDArray& array) {
    engine_.Push({.name = "bad", .writes = {array.var()}},
                 [] { throw std::runtime_error("poison"); });
  }

  Engine engine_{GetParam().options};
};

TEST_P(NDArrays, SayWhatTheyAre) {
  const NDArray array({2, 3}, DType::kFloat64, Cpu(5), engine_);
  EXPECT_FALSE(array.empty());
  EXPECT_EQ(array.shape(), (Shape{2, 3}));
  EXPECT_EQ(array.dtype(), DType::kFloat64);
  EXPECT_EQ(array.device(), Cpu(5));
  EXPECT_EQ(&array.engine(), &engine_);
  EXPECT_EQ(array.size(), 6);
  EXPECT_EQ(array.bytes(), 48);
  EXPECT_FALSE(array.is_partial());
  EXPECT_TRUE(NDArray().empty());
  const NDArray handle = array;
  EXPECT_TRUE(handle.IsSameAs(array));
  EXPECT_EQ(handle.var(), array.var());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.data()) % 64, 0u);
}

TEST_P(NDArrays, AreMadeFromValues) {
  EXPECT_EQ(Array({1, 2, 3, 4}, {2, 2}).ToVector<float>(), (Floats{1, 2, 3, 4}));
  EXPECT_EQ(NDArray::Zeros({3}, DType::kFloat32, Cpu(), engine_).ToVector<float>(),
            (Floats{0, 0, 0}));
  EXPECT_EQ(NDArray::Ones({2, 1}, DType::kInt8, Cpu(), engine_).ToVector<std::int8_t>(),
            (std::vector<std::int8_t>{1, 1}));
  EXPECT_EQ(NDArray::Full({2}, 2.5, DType::kFloat16, Cpu(), engine_).ToVector<float>(),
            (Floats{2.5f, 2.5f}));
  EXPECT_EQ(NDArray::Arange(4, DType::kInt64, Cpu(), engine_).ToVector<std::int64_t>(),
            (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(NDArray::Full({}, 3, DType::kFloat32, Cpu(), engine_).ToVector<float>(), Floats{3});
  const std::int64_t exact = (std::int64_t{1} << 62) + 1;  // no double holds it
  EXPECT_EQ(NDArray::Full({1}, -0x1p63, DType::kInt64, Cpu(), engine_).ToVector<std::int64_t>()[0],
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(NDArray::Full({1}, exact, DType::kInt64, Cpu(), engine_).ToVector<std::int64_t>(),
            std::vector<std::int64_t>{exact});
}

TEST_P(NDArrays, ConvertBetweenAllDTypes) {
  const NDArray source = Array({0, 1, 2, 100});
  for (const DType dtype : kAllDTypes) {
    const NDArray converted = source.AsType(dtype);
    EXPECT_EQ(converted.dtype(), dtype);
    const Floats expected = dtype == DType::kBool ? Floats{0, 1, 1, 1} : Floats{0, 1, 2, 100};
    EXPECT_EQ(converted.ToVector<float>(), expected) << Name(dtype);
    EXPECT_EQ(
        NDArray::FromVector(Floats{0, 1, 2, 100}, {4}, dtype, Cpu(), engine_).ToVector<float>(),
        expected)
        << Name(dtype);
  }
}

TEST_P(NDArrays, EmptyShapesWork) {
  const NDArray none({0, 3}, DType::kFloat32, Cpu(), engine_);
  const NDArray other({0, 3}, DType::kFloat32, Cpu(), engine_);
  none.Fill(1);
  none.CopyTo(other);
  other += none * 2;
  Sum({none, other}, other);
  EXPECT_EQ(other.ToVector<float>(), Floats{});
  EXPECT_EQ(other.Slice(0, 0).size(), 0);
  EXPECT_FALSE(none.Overlaps(none));
}

TEST_P(NDArrays, TakeEffectInProgramOrder) {
  const NDArray a = Array({1, 2});
  const NDArray b = a + a;
  a.Fill(5);
  const NDArray c = a.Copy();
  a *= b;
  EXPECT_EQ(b.ToVector<float>(), (Floats{2, 4}));
  EXPECT_EQ(c.ToVector<float>(), (Floats{5, 5}));
  EXPECT_EQ(a.ToVector<float>(), (Floats{10, 20}));
}

TEST_P(NDArrays, Compute) {
  const NDArray a = Array({6, 8});
  const NDArray b = Array({2, 4});
  EXPECT_EQ((a + b).ToVector<float>(), (Floats{8, 12}));
  EXPECT_EQ((a - b).ToVector<float>(), (Floats{4, 4}));
  EXPECT_EQ((a * b).ToVector<float>(), (Floats{12, 32}));
  EXPECT_EQ((a / b).ToVector<float>(), (Floats{3, 2}));
  EXPECT_EQ((a + 1).ToVector<float>(), (Floats{7, 9}));
  EXPECT_EQ((a - 1).ToVector<float>(), (Floats{5, 7}));
  EXPECT_EQ((a * 0.5).ToVector<float>(), (Floats{3, 4}));
  EXPECT_EQ((a / 2).ToVector<float>(), (Floats{3, 4}));
  EXPECT_EQ((1 + a).ToVector<float>(), (Floats{7, 9}));
  EXPECT_EQ((1 - a).ToVector<float>(), (Floats{-5, -7}));
  EXPECT_EQ((2 * a).ToVector<float>(), (Floats{12, 16}));
  EXPECT_EQ((24 / a).ToVector<float>(), (Floats{4, 3}));
  a += b;
  EXPECT_EQ(a.ToVector<float>(), (Floats{8, 12}));
  a -= b;
  a *= b;
  EXPECT_EQ(a.ToVector<float>(), (Floats{12, 32}));
  a /= b;
  a += 1;
  a -= 2;
  a *= 3;
  a /= 5;
  EXPECT_EQ(a.ToVector<float>(), (Floats{3, 4.2f}));
  a += a;
  EXPECT_EQ(a.ToVector<float>(), (Floats{6, 8.4f}));
}

TEST_P(NDArrays, IntegerArithmeticWrapsAndDividesTowardsZero) {
  const NDArray a = Ints({std::numeric_limits<std::int32_t>::max(), -7, 3});
  EXPECT_EQ((a + 1).ToVector<std::int32_t>(),
            (std::vector<std::int32_t>{std::numeric_limits<std::int32_t>::min(), -6, 4}));
  EXPECT_EQ((a / 2).ToVector<std::int32_t>(), (std::vector<std::int32_t>{1073741823, -3, 1}));
  EXPECT_EQ((a / 0).ToVector<std::int32_t>(), (std::vector<std::int32_t>{0, 0, 0}));
}

TEST_P(NDArrays, ViewsShareValuesAndVariable) {
  const NDArray array = Array({1, 2, 3, 4, 5, 6}, {3, 2});
  const NDArray middle = array.Slice(1, 2);
  EXPECT_EQ(middle.shape(), (Shape{1, 2}));
  EXPECT_EQ(middle.var(), array.var());
  EXPECT_TRUE(middle.is_partial());
  middle *= 10;
  EXPECT_EQ(array.ToVector<float>(), (Floats{1, 2, 30, 40, 5, 6}));
  const NDArray flat = array.Reshape({6});
  EXPECT_FALSE(flat.is_partial());
  flat.Slice(4, 6).Fill(0);
  EXPECT_EQ(array.ToVector<float>(), (Floats{1, 2, 30, 40, 0, 0}));
  const NDArray nested = array.Slice(1, 3).Slice(1, 2).Reshape({2});
  nested.CopyFromHost(Floats{7, 8});
  EXPECT_EQ(array.ToVector<float>(), (Floats{1, 2, 30, 40, 7, 8}));
  EXPECT_TRUE(nested.Overlaps(array));
  EXPECT_FALSE(nested.Overlaps(middle));
  EXPECT_FALSE(nested.IsSameAs(array));
  EXPECT_TRUE(array.Slice(0, 3).IsSameAs(flat));
  EXPECT_FALSE(array.Slice(0, 3).is_partial());
}

TEST_P(NDArrays, OverlappingViewsCopyAsByMemmove) {
  const NDArray array = Array({0, 1, 2, 3, 4, 5});
  array.Slice(0, 4).CopyTo(array.Slice(2, 6));
  EXPECT_EQ(array.ToVector<float>(), (Floats{0, 1, 0, 1, 2, 3}));
  array.Slice(2, 6).CopyTo(array.Slice(0, 4));
  EXPECT_EQ(array.ToVector<float>(), (Floats{0, 1, 2, 3, 2, 3}));
}

TEST_P(NDArrays, ArithmeticOnOverlappingViewsReadsTheOldValues) {
  const NDArray array = Array({1, 2, 3, 4, 5, 6});
  array.Slice(1, 6) += array.Slice(0, 5);
  EXPECT_EQ(array.ToVector<float>(), (Floats{1, 3, 5, 7, 9, 11}));
  Sum({array.Slice(0, 5), array.Slice(1, 6)}, array.Slice(1, 6));
  EXPECT_EQ(array.ToVector<float>(), (Floats{1, 4, 8, 12, 16, 20}));
}

TEST_P(NDArrays, CopyingOntoItselfDoesNothing) {
  const NDArray array = Array({1, 2});
  array.Fill(3);
  array.WaitToRead();
  const std::uint64_t version = engine_.version(array.var());
  array.CopyTo(array);
  array.Reshape({2, 1}).CopyTo(array.Reshape({2, 1}));
  engine_.WaitForAll();
  EXPECT_EQ(engine_.version(array.var()), version);
}

TEST_P(NDArrays, CopiesGoToOtherDevices) {
  const NDArray array = Array({1, 2});
  const NDArray there = array.Copy(Cpu(3));
  EXPECT_EQ(there.device(), Cpu(3));
  array.Fill(0);
  EXPECT_EQ(there.ToVector<float>(), (Floats{1, 2}));
  there.CopyTo(array);
  EXPECT_EQ(array.ToVector<float>(), (Floats{1, 2}));
}

TEST_P(NDArrays, HostValuesMayGoRightAfterTheCall) {
  const NDArray array({3}, DType::kInt32, Cpu(), engine_);
  const Var gate = engine_.NewVar();
  Hold hold(engine_, {.name = "hold", .reads = {array.var()}, .writes = {gate}});
  {
    Floats values = {1.9f, 2, -3};
    array.CopyFromHost(values);  // cannot run yet
    values.assign(3, 100);
  }
  hold.Release();
  EXPECT_EQ(array.ToVector<std::int32_t>(), (std::vector<std::int32_t>{1, 2, -3}));
}

TEST_P(NDArrays, SumAddsInListOrder) {
  const NDArray out({1}, DType::kFloat32, Cpu(), engine_);
  const NDArray big = Array({1e8f});
  const NDArray one = Array({1});
  const NDArray minus = Array({-1e8f});
  Sum({big, one, minus}, out);
  EXPECT_EQ(out.ToVector<float>(), Floats{0});
  Sum({big, minus, one}, out);
  EXPECT_EQ(out.ToVector<float>(), Floats{1});
}

TEST_P(NDArrays, SumTakesAnyNumberOfInputsAndTheOutputItself) {
  for (const int count : {1, 2, 4, 5, 16, 17, 40}) {
    std::vector<NDArray> inputs;
    for (int i = 0; i < count; ++i) inputs.push_back(Array({static_cast<float>(i), 1}));
    const NDArray out({2}, DType::kFloat32, Cpu(), engine_);
    Sum(inputs, out);
    const auto n = static_cast<float>(count);
    EXPECT_EQ(out.ToVector<float>(), (Floats{n * (n - 1) / 2, n}));
    inputs.push_back(out);
    Sum(inputs, out);
    EXPECT_EQ(out.ToVector<float>(), (Floats{n * (n - 1), 2 * n}));
  }
  const NDArray a = Array({1, 2}, {2}, Cpu(0));
  const NDArray b = Array({10, 20}, {2}, Cpu(1));
  Sum({a, b, a}, b);  // a twice; devices of one memory
  EXPECT_EQ(b.ToVector<float>(), (Floats{12, 24}));
}

TEST_P(NDArrays, SumOfBFloat16RoundsOnce) {
  const NDArray big = NDArray::Full({1}, 256, DType::kBFloat16, Cpu(), engine_);
  const NDArray one = NDArray::Full({1}, 1, DType::kBFloat16, Cpu(), engine_);
  const NDArray out({1}, DType::kBFloat16, Cpu(), engine_);
  Sum({big, one, one}, out);  // 256 + 1 is 256 in bfloat16, 258 is itself
  EXPECT_EQ(out.ToVector<float>(), Floats{258});
}

// The blocks of a split array meet without gap or overlap, whatever the number of workers.
TEST_P(NDArrays, LargeArraysGiveTheValuesOfAPlainLoop) {
  const std::int64_t count = (3 << 20) / 4 + 77;
  Floats x(static_cast<std::size_t>(count));
  Floats y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(static_cast<float>(i));
    y[i] = std::cos(static_cast<float>(i)) * 1000;
  }
  const NDArray a = Array(x);
  const NDArray b = Array(y);
  const NDArray sum({count}, DType::kFloat32, Cpu(), engine_);
  Sum({a, b, a}, sum);
  const NDArray product = a * b;
  const NDArray scaled = b * 0.1f;
  const NDArray bytes = b.AsType(DType::kInt8);
  const NDArray copy = a.Copy();
  const NDArray filled({count}, DType::kFloat32, Cpu(), engine_);
  filled.Fill(3);
  const Floats sums = sum.ToVector<float>();
  const Floats products = product.ToVector<float>();
  const Floats scaleds = scaled.ToVector<float>();
  const auto eighths = bytes.ToVector<std::int8_t>();
  EXPECT_EQ(copy.ToVector<float>(), x);
  EXPECT_EQ(filled.ToVector<float>(), Floats(x.size(), 3));
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(sums[i], x[i] + y[i] + x[i]) << i;
    ASSERT_EQ(products[i], x[i] * y[i]) << i;
    ASSERT_EQ(scaleds[i], y[i] * 0.1f) << i;
    ASSERT_EQ(eighths[i], ops::Convert<std::int8_t>(y[i])) << i;
  }
}

TEST_P(NDArrays, WaitToReadWaitsForWritesAndWaitToWriteForReadsToo) {
  const NDArray array = Array({1});
  const Var other = engine_.NewVar();
  Hold reader(engine_, {.name = "reader", .reads = {array.var()}, .writes = {other}});
  array.WaitToRead();
  EXPECT_THROW(array.WaitToWrite(1ms), TimeoutError);
  reader.Release();
  array.WaitToWrite();
  Hold writer(engine_, {.name = "writer", .writes = {array.var()}});
  EXPECT_THROW(array.WaitToRead(1ms), TimeoutError);
  writer.Release();
  array.WaitToRead();
}

TEST_P(NDArrays, FailureComesOutOfEveryWaitAndPassesOn) {
  const NDArray array = Array({1, 2});
  Poison(array);
  const NDArray doubled = array * 2;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { array.WaitToRead(); }), "poison");
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { array.WaitToWrite(); }), "poison");
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { (void)doubled.ToVector<float>(); }), "poison");
  }
  ASSERT_TRUE(engine_.FailureOf(doubled.var()).has_value());
  EXPECT_EQ(engine_.FailureOf(doubled.var())->op, "bad");
}

TEST_P(NDArrays, OnlyAWriteOfTheWholeBufferCuresAPoisonedArray) {
  const NDArray array = Array({1, 2, 3});
  Poison(array);
  array.Slice(0, 1).Fill(7);
  array.Slice(0, 2).CopyFromHost(Floats{7, 7});
  Array({7, 7}).CopyTo(array.Slice(1, 3));
  Sum({Array({7, 7})}, array.Slice(1, 3));
  array += 1;
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { array.WaitToRead(); }), "poison");
  const auto expect_cured = [&](const char* how) {
    EXPECT_NO_THROW(array.WaitToRead()) << how;
    Poison(array);
  };
  array.Fill(1);
  expect_cured("Fill");
  array.Reshape({3, 1}).Fill(1);
  expect_cured("Fill of the whole in another shape");
  array.CopyFromHost(Floats{4, 5, 6});
  expect_cured("CopyFromHost");
  Array({7, 8, 9}).CopyTo(array);
  expect_cured("CopyTo");
  Sum({Array({7, 8, 9})}, array);
  EXPECT_EQ(array.ToVector<float>(), (Floats{7, 8, 9}));
}

TEST_P(NDArrays, OpBodiesMayQueueButNotWait) {
  const NDArray array = Array({1, 2});
  const NDArray out = Array({0, 0});
  std::atomic<int> refused = 0;
  engine_.Push({.name = "nested"}, [&] {
    (array * 3).CopyTo(out);
    array.CopyFromHost(Floats{8, 9});
    for (const auto& wait :
         {+[](const NDArray& a) { a.WaitToRead(); }, +[](const NDArray& a) { a.WaitToWrite(); },
          +[](const NDArray& a) { (void)a.ToVector<float>(); }}) {
      try {
        wait(array);
      } catch (const InvalidState&) {
        ++refused;
      }
    }
  });
  engine_.WaitForAll();
  EXPECT_EQ(refused, 3);
  EXPECT_EQ(out.ToVector<float>(), (Floats{3, 6}));
  EXPECT_EQ(array.ToVector<float>(), (Floats{8, 9}));
}

// ToVector while another thread writes: each result is one of the values that the array had, never
// a mixture.
TEST_P(NDArrays, ToVectorTakesOneMomentsValues) {
  const std::int64_t count = 10'000;
  const NDArray array = NDArray::Zeros({count}, DType::kInt32, Cpu(), engine_);
  const int rounds = Scaled(200);
  std::thread writer([&] {
    for (int i = 1; i <= rounds; ++i) array.Fill(i);
  });
  std::int32_t last = 0;
  for (int i = 0; i < rounds; ++i) {
    const auto values = array.ToVector<std::int32_t>();
    EXPECT_EQ(values, std::vector<std::int32_t>(count, values[0]));
    EXPECT_GE(values[0], last);
    last = values[0];
  }
  writer.join();
  EXPECT_EQ(array.ToVector<std::int32_t>()[0], rounds);
}

INSTANTIATE_TEST_SUITE_P(All, NDArrays, testing::ValuesIn(engine_test::AllConfigs()),
                         engine_test::ConfigLabel);

TEST(NDArray, LivesOnTheDefaultEngineUnlessToldOtherwise) {
  const NDArray array = NDArray::Ones({2});
  EXPECT_EQ(&array.engine(), &Engine::Default());
  EXPECT_EQ((array + NDArray::FromVector<float>({1, 2})).ToVector<float>(), (Floats{2, 3}));
}

// With a list of pushed copies in the queue of the only worker, the one of highest priority runs
// first.
TEST(NDArray, OperationsObeyTheirPriority) {
  for (const engine_test::Config& config : engine_test::ThreadedConfigs(1)) {
    EngineOptions options = config.options;
    options.ageing = 0;
    Engine engine(options);
    const NDArray source = NDArray::Ones({4}, DType::kFloat32, Cpu(), engine);
    source.WaitToRead();
    std::vector<int> order;
    {
      engine_test::Blocker blocker(engine);
      for (const int priority : {1, 3, 2}) {
        const NDArray target({4}, DType::kFloat32, Cpu(), engine);
        source.CopyTo(target, priority);
        engine.Push({.name = "note", .reads = {target.var()}, .priority = priority},
                    [&order, priority] { order.push_back(priority); });
      }
    }
    engine.WaitForAll();
    EXPECT_EQ(order, (std::vector<int>{3, 2, 1})) << config.label;
  }
}

}  // namespace
}  // namespace heddle
