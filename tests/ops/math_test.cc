// Comparisons, functions, reductions, products and strided copies against plain loops: on every
// SIMD target, for every dtype and operation.
#include "ops/math.h"

#include <heddle/error.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "ops/reduce.h"
#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

class MathTest : public KernelTest {};

template <typename C>
bool PlainCompare(CompareOp op, C a, C b) {
  switch (op) {
    case CompareOp::kEqual:
      return a == b;
    case CompareOp::kNotEqual:
      return a != b;
    case CompareOp::kLess:
      return a < b;
    case CompareOp::kLessEqual:
      return a <= b;
    case CompareOp::kGreater:
      return a > b;
    default:
      return a >= b;
  }
}

constexpr CompareOp kEveryCompareOp[] = {CompareOp::kEqual,   CompareOp::kNotEqual,
                                         CompareOp::kLess,    CompareOp::kLessEqual,
                                         CompareOp::kGreater, CompareOp::kGreaterEqual};

// Few distinct values, so that elements are equal now and then.
template <typename T>
void RandomizeFew(Array<T>& array, std::mt19937_64& random) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    const int number = static_cast<int>(random() % 4);
    array[i] = random() % 16 == 0 ? RandomValue<T>(random)
                                  : static_cast<StorageType<T>>(Convert<T>(std::int64_t{number}));
  }
}

TEST_F(MathTest, ComparisonsEqualThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = ComputeType<StorageType<T>>;
    for (CompareOp op : kEveryCompareOp) {
      const std::size_t count = RandomCount();
      Array<T> a(count, Below(64));
      Array<T> b(count, Below(64));
      RandomizeFew(a, random_);
      RandomizeFew(b, random_);
      for (double number : {0.0, 1.0, 2.5, -1.0}) {
        const bool whole = number == std::floor(number);
        const Scalar scalar = whole ? Scalar(static_cast<int>(number)) : Scalar(number);
        OnEveryTarget([&] {
          Array<bool> out(count);
          Compare(op, kDTypeOf<T>, a.data(), b.data(), out.data(), count);
          for (std::size_t i = 0; i < count; ++i) {
            ASSERT_EQ(out[i], PlainCompare(op, static_cast<C>(a[i]), static_cast<C>(b[i])) ? 1 : 0)
                << i;
          }
          CompareWithScalar(op, kDTypeOf<T>, a.data(), scalar, out.data(), count);
          for (std::size_t i = 0; i < count; ++i) {
            const auto wide = static_cast<double>(static_cast<C>(a[i]));
            ASSERT_EQ(out[i], PlainCompare(op, wide, number) ? 1 : 0) << i << " with " << number;
          }
        });
      }
    }
  });
}

TEST_F(MathTest, IntegersAreComparedWithFloatsExactly) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kOdd = (std::int64_t{1} << 53) + 1;
  struct Case {
    std::int64_t a;
    double b;
    int sign;  // of a - b
  };
  for (const Case& c :
       {Case{kOdd, 0x1p53, 1}, Case{kMost, 0x1p63, -1}, Case{kLeast, -0x1p63, 0},
        Case{kLeast, -0x1.8p63, 1}, Case{kMost, kInfinity, -1}, Case{kLeast, -kInfinity, 1},
        Case{3, 2.5, 1}, Case{-3, -2.5, -1}, Case{0, -0.0, 0}, Case{kOdd, 1.5, 1}}) {
    OnEveryTarget([&] {
      for (CompareOp op : kEveryCompareOp) {
        std::uint8_t out = 2;
        CompareWithScalar(op, DType::kInt64, &c.a, c.b, &out, 1);
        EXPECT_EQ(out, PlainCompare(op, c.sign, 0) ? 1 : 0) << c.a << " and " << c.b;
      }
    });
  }
}

template <typename C>
C PlainUnary(UnaryOp op, C a) {
  switch (op) {
    case UnaryOp::kNegative:
      return -a;
    case UnaryOp::kAbs:
      return a < 0 ? -a : a == 0 ? C{0} : a;
    case UnaryOp::kSign:
      return a > 0 ? C{1} : a < 0 ? C{-1} : a;
    case UnaryOp::kSquare:
      return a * a;
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<C>) {
    if (op == UnaryOp::kSqrt) return std::sqrt(a);
    return op == UnaryOp::kExp ? std::exp(a) : std::log(a);
  }
  return a;
}

TEST_F(MathTest, FunctionsEqualThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = ComputeType<StorageType<T>>;
    for (UnaryOp op : {UnaryOp::kNegative, UnaryOp::kAbs, UnaryOp::kSign, UnaryOp::kSquare,
                       UnaryOp::kSqrt, UnaryOp::kExp, UnaryOp::kLog}) {
      const std::size_t count = RandomCount();
      Array<T> a(count, Below(64));
      Randomize(a, random_);
      OnEveryTarget([&] {
        Array<T> out(count);
        if (!IsFloating(kDTypeOf<T>) && op >= UnaryOp::kSqrt) {
          EXPECT_THROW(Unary(op, kDTypeOf<T>, a.data(), out.data(), count), InvalidArgument);
          return;
        }
        Unary(op, kDTypeOf<T>, a.data(), out.data(), count);
        for (std::size_t i = 0; i < count; ++i) {
          if constexpr (std::is_same_v<T, bool>) {
            ASSERT_EQ(out[i], a[i]);
          } else if constexpr (std::is_integral_v<T>) {
            __extension__ using Wide = __int128;
            ASSERT_EQ(out[i], static_cast<T>(PlainUnary<Wide>(
                                  op < UnaryOp::kSqrt ? op : UnaryOp::kAbs, a[i])));
          } else {
            const C expected = static_cast<C>(static_cast<T>(PlainUnary(op, static_cast<C>(a[i]))));
            const C given = static_cast<C>(out[i]);
            if (expected != expected) {
              ASSERT_NE(given, given);
            } else {
              ASSERT_EQ(given, expected) << static_cast<C>(a[i]);
            }
          }
        }
      });
    }
  });
}

TEST_F(MathTest, PairsEqualThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using S = StorageType<T>;
    using C = ComputeType<S>;
    const std::size_t count = RandomCount();
    Array<T> a(count, Below(64));
    Array<T> b(count, Below(64));
    Randomize(a, random_);
    Randomize(b, random_);
    const auto check = [&](Array<T>& out, bool maximum, auto right) {
      for (std::size_t i = 0; i < count; ++i) {
        const C x = static_cast<C>(a[i]);
        const C y = right(i);
        const C given = static_cast<C>(out[i]);
        if (x != x || y != y) {
          ASSERT_NE(given, given);
        } else {
          ASSERT_EQ(given, maximum ? std::max(x, y) : std::min(x, y));
        }
      }
    };
    OnEveryTarget([&] {
      for (const bool maximum : {false, true}) {
        const PairOp op = maximum ? PairOp::kMaximum : PairOp::kMinimum;
        Array<T> out(count);
        Pair(op, kDTypeOf<T>, a.data(), b.data(), out.data(), count);
        check(out, maximum, [&](std::size_t i) { return static_cast<C>(b[i]); });
        PairWithScalar(op, kDTypeOf<T>, a.data(), 1, out.data(), count);
        check(out, maximum, [&](std::size_t) { return C{1}; });
        PairWithScalar(op, kDTypeOf<T>, 1, a.data(), out.data(), count);
        check(out, maximum, [&](std::size_t) { return C{1}; });
      }
    });
  });
}

TEST_F(MathTest, PowersOfIntegersWrapAndOfNegativeExponentsTruncate) {
  const std::vector<std::int32_t> bases = {-3, -1, 0, 1, 2, 3, 10};
  for (const std::int32_t base : bases) {
    for (std::int32_t exponent = -3; exponent < 40; ++exponent) {
      std::int32_t given = 0;
      Pair(PairOp::kPower, DType::kInt32, &base, &exponent, &given, 1);
      std::uint32_t product = 1;
      for (int i = 0; i < exponent; ++i) product *= static_cast<std::uint32_t>(base);
      const bool unit = base == 1 || base == -1;
      const std::int32_t reciprocal = !unit ? 0 : exponent % 2 != 0 ? base : 1;
      EXPECT_EQ(given, exponent < 0 ? reciprocal : static_cast<std::int32_t>(product))
          << base << " to the " << exponent;
    }
  }
  const double base = 2;
  double given = 0;
  PairWithScalar(PairOp::kPower, DType::kFloat64, &base, 0.5, &given, 1);
  EXPECT_EQ(given, std::pow(2.0, 0.5));
}

// By the definition: a - b * floor(a / b), in numbers that are exact everywhere.
TEST_F(MathTest, RemaindersHaveTheSignOfTheDivisor) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = ComputeType<StorageType<T>>;
    constexpr bool kFractions = !std::is_integral_v<C>;
    const std::size_t count = 200;
    Array<T> a(count), b(count);
    const auto number = [&] {
      const auto whole = static_cast<C>(Below(std::is_same_v<T, bool> ? 2 : 30));
      const C positive = kFractions ? whole / static_cast<C>(4) : whole;
      return std::is_signed_v<C> && Below(2) == 0 ? static_cast<C>(-positive) : positive;
    };
    for (std::size_t i = 0; i < count; ++i) {
      a[i] = static_cast<StorageType<T>>(number());
      b[i] = static_cast<StorageType<T>>(number());
    }
    const auto expected = [](C x, C y) {
      if (y == 0) return C{0};
      const double quotient = std::floor(static_cast<double>(x) / static_cast<double>(y));
      return static_cast<C>(static_cast<double>(x) - static_cast<double>(y) * quotient);
    };
    OnEveryTarget([&] {
      Array<T> out(count);
      Pair(PairOp::kRemainder, kDTypeOf<T>, a.data(), b.data(), out.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        const C x = static_cast<C>(a[i]), y = static_cast<C>(b[i]);
        ASSERT_EQ(static_cast<C>(out[i]), expected(x, y)) << +x << " % " << +y;
      }
      PairWithScalar(PairOp::kRemainder, kDTypeOf<T>, 1, b.data(), out.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        const C y = static_cast<C>(b[i]);
        ASSERT_EQ(static_cast<C>(out[i]), expected(C{1}, y)) << "1 % " << +y;
      }
    });
  });
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  std::int64_t given = 7;
  PairWithScalar(PairOp::kRemainder, DType::kInt64, &kLeast, -1, &given, 1);
  EXPECT_EQ(given, 0);
  const float numbers[] = {-4, 4, -4};
  const float divisors[] = {2, -2, -2};
  float rests[3];
  Pair(PairOp::kRemainder, DType::kFloat32, numbers, divisors, rests, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(rests[i], 0);
    EXPECT_EQ(std::signbit(rests[i]), divisors[i] < 0) << i;
  }
}

TEST_F(MathTest, MeansAreQuotients) {
  OnEveryTarget([&] {
    for (std::size_t count = 1; count < 200; ++count) {
      const std::vector<std::int32_t> sevens(count, 7);
      std::int32_t mean = 0;
      SumAxis(DType::kInt32, sevens.data(), 1, count, 1, count, &mean);
      ASSERT_EQ(mean, 7) << count;
      const std::vector<double> ones(count, 1.0);
      double one = 0;
      SumAxis(DType::kFloat64, ones.data(), 1, count, 1, count, &one);
      ASSERT_EQ(one, 1.0) << count;
    }
    const std::int64_t large[] = {(std::int64_t{1} << 60) + 1, -3};
    std::int64_t mean = 0;
    SumAxis(DType::kInt64, large, 1, 1, 1, 1, &mean);
    EXPECT_EQ(mean, large[0]);
    SumAxis(DType::kInt64, large + 1, 1, 1, 1, 2, &mean);
    EXPECT_EQ(mean, -1);
    SumAxis(DType::kInt64, large, 1, 0, 1, 0, &mean);
    EXPECT_EQ(mean, 0);
  });
}

TEST_F(MathTest, SumsAlongAnAxisEqualThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = ComputeType<StorageType<T>>;
    const std::size_t outer = Below(5), inner = 1 + Below(20);
    const std::size_t length = Below(3) == 0 ? 8192 + Below(40) : Below(40);
    Array<T> a(outer * length * inner);
    RandomizeFew(a, random_);
    OnEveryTarget([&] {
      Array<T> out(outer * inner);
      SumAxis(kDTypeOf<T>, a.data(), outer, length, inner, 1, out.data());
      for (std::size_t o = 0; o < outer; ++o) {
        for (std::size_t i = 0; i < inner; ++i) {
          using Wide = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;
          Wide sum = 0, block = 0;
          for (std::size_t k = 0; k < length; ++k) {
            block += static_cast<Wide>(static_cast<C>(a[(o * length + k) * inner + i]));
            if ((k + 1) % kReductionBlock == 0) sum += std::exchange(block, Wide{0});
          }
          sum += block;
          Array<T> expected(1);
          if constexpr (std::is_integral_v<T>) {
            expected[0] = Convert<T>(static_cast<std::int64_t>(sum));
          } else {
            expected[0] = Convert<T>(sum);
          }
          Array<T> given(1);
          given[0] = out[o * inner + i];
          ExpectSame(given, expected);
        }
      }
    });
  });
}

TEST_F(MathTest, MatrixProductsEqualThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = ComputeType<StorageType<T>>;
    const std::size_t rows = Below(6), inner = Below(9), columns = Below(7);
    Array<T> a(rows * inner);
    Array<T> b(inner * columns);
    for (std::size_t i = 0; i < a.size(); ++i)
      a[i] = static_cast<StorageType<T>>(Convert<T>(std::int64_t(Below(5))));
    for (std::size_t i = 0; i < b.size(); ++i)
      b[i] = static_cast<StorageType<T>>(Convert<T>(std::int64_t(Below(5))));
    OnEveryTarget([&] {
      Array<T> out(rows * columns);
      MatrixProduct(kDTypeOf<T>, a.data(), b.data(), rows, inner, columns, out.data());
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t c = 0; c < columns; ++c) {
          double sum = 0;  // exact
          for (std::size_t k = 0; k < inner; ++k) {
            sum += static_cast<double>(static_cast<C>(a[r * inner + k])) *
                   static_cast<double>(static_cast<C>(b[k * columns + c]));
          }
          if (std::is_same_v<T, bool>) sum = sum != 0;
          ASSERT_EQ(static_cast<double>(static_cast<C>(out[r * columns + c])), sum);
        }
      }
    });
  });
}

// A part given by the elements' places, walked by a recursion instead of a loop.
void Walk(const StridedPart& part, std::size_t axis, std::int64_t at,
          const std::function<void(std::int64_t)>& visit) {
  if (axis == part.axes) return visit(at);
  for (std::int64_t i = 0; i < part.extents[axis]; ++i) {
    Walk(part, axis + 1, at + i * part.strides[axis], visit);
  }
}

TEST_F(MathTest, GatherAndScatterTouchThePartAndNothingElse) {
  for (int round = 0; round < 300; ++round) {
    StridedPart part;
    part.axes = Below(5);
    std::int64_t stride = 1;
    for (std::size_t axis = part.axes; axis-- > 0;) {
      const auto extent = static_cast<std::int64_t>(1 + Below(5));
      part.extents[axis] = static_cast<std::int64_t>(Below(static_cast<std::size_t>(extent) + 1));
      part.strides[axis] = stride;
      if (part.extents[axis] > 0 && Below(3) == 0) {  // backwards
        part.offset += (part.extents[axis] - 1) * stride;
        part.strides[axis] = -stride;
      }
      stride *= extent;
    }
    const auto size = static_cast<std::size_t>(stride);
    Array<std::int32_t> array(size);
    for (std::size_t i = 0; i < size; ++i) array[i] = static_cast<std::int32_t>(i);
    std::vector<std::int32_t> expected;
    Walk(part, 0, part.offset,
         [&](std::int64_t at) { expected.push_back(static_cast<std::int32_t>(at)); });
    Array<std::int32_t> packed(expected.size());
    Gather(4, array.data(), part, packed.data());
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(packed[i], expected[i]);
    for (std::size_t i = 0; i < expected.size(); ++i) packed[i] = -1;
    Scatter(4, packed.data(), part, array.data());
    std::vector<std::int32_t> after(size);
    std::iota(after.begin(), after.end(), 0);
    for (std::int32_t at : expected) after[static_cast<std::size_t>(at)] = -1;
    for (std::size_t i = 0; i < size; ++i) ASSERT_EQ(array[i], after[i]);
  }
}

}  // namespace
}  // namespace heddle::ops
