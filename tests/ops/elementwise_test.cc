// Arithmetic against plain loops: on every SIMD target, for every dtype and operation.
#include "ops/elementwise.h"

#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

constexpr BinaryOp kEveryOp[] = {BinaryOp::kAdd, BinaryOp::kSubtract, BinaryOp::kMultiply,
                                 BinaryOp::kDivide};

template <typename F>
F PlainFloating(BinaryOp op, F a, F b) {
  switch (op) {
    case BinaryOp::kAdd:
      return a + b;
    case BinaryOp::kSubtract:
      return a - b;
    case BinaryOp::kMultiply:
      return a * b;
    default:
      return a / b;
  }
}

// In 128 bits, where nothing overflows; the caller takes the low bits.
__extension__ using Wide = __int128;
Wide PlainInteger(BinaryOp op, Wide a, Wide b) {
  switch (op) {
    case BinaryOp::kAdd:
      return a + b;
    case BinaryOp::kSubtract:
      return a - b;
    case BinaryOp::kMultiply:
      return a * b;
    default:
      return b == 0 ? 0 : a / b;
  }
}

template <typename T>
StorageType<T> Plain(BinaryOp op, StorageType<T> a, StorageType<T> b) {
  if constexpr (std::is_same_v<T, bool>) {
    return PlainInteger(op, a != 0, b != 0) != 0 ? 1 : 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(PlainInteger(op, a, b));
  } else {
    using C = ComputeType<T>;
    return static_cast<T>(PlainFloating(op, static_cast<C>(a), static_cast<C>(b)));
  }
}

class ElementwiseTest : public KernelTest {};

TEST_F(ElementwiseTest, ArraysEqualThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (BinaryOp op : kEveryOp) {
      for (int round = 0; round < 15; ++round) {
        const std::size_t count = RandomCount();
        Array<T> a(count, Below(64));
        Array<T> b(count, Below(64));
        Array<T> expected(count);
        Randomize(a, random_);
        Randomize(b, random_);
        for (std::size_t i = 0; i < count; ++i) expected[i] = Plain<T>(op, a[i], b[i]);
        OnEveryTarget([&] {
          for (StoreMode mode : kEveryStoreMode) {
            Array<T> out(count, Below(64));
            Binary(op, kDTypeOf<T>, a.data(), b.data(), out.data(), count, mode);
            ExpectSame(out, expected);
          }
        });
      }
    }
  });
}

TEST_F(ElementwiseTest, WorksInPlace) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (BinaryOp op : kEveryOp) {
      const std::size_t count = 333;
      Array<T> a(count);
      Array<T> b(count);
      Array<T> expected(count);
      Array<T> squared(count);
      Randomize(a, random_);
      Randomize(b, random_);
      for (std::size_t i = 0; i < count; ++i) {
        expected[i] = Plain<T>(op, a[i], b[i]);
        squared[i] = Plain<T>(op, a[i], a[i]);
      }
      OnEveryTarget([&] {
        Array<T> x(count);
        x.CopyFrom(a);
        Binary(op, kDTypeOf<T>, x.data(), b.data(), x.data(), count, StoreMode::kStreaming);
        ExpectSame(x, expected, "into the left side");
        x.CopyFrom(b);
        Binary(op, kDTypeOf<T>, a.data(), x.data(), x.data(), count);
        ExpectSame(x, expected, "into the right side");
        x.CopyFrom(a);
        Binary(op, kDTypeOf<T>, x.data(), x.data(), x.data(), count);
        ExpectSame(x, squared, "with itself");
      });
    }
  });
}

TEST_F(ElementwiseTest, ScalarsEqualThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (BinaryOp op : kEveryOp) {
      for (int number : {-3, 0, 1, 2, 100}) {
        const std::size_t count = RandomCount();
        Array<T> a(count, Below(64));
        Array<T> left(count);
        Array<T> right(count);
        Randomize(a, random_);
        StorageType<T> value;
        if constexpr (std::is_integral_v<T>) {
          value = static_cast<T>(number);
        } else {
          value = T(static_cast<float>(number));
        }
        for (std::size_t i = 0; i < count; ++i) {
          left[i] = Plain<T>(op, value, a[i]);
          right[i] = Plain<T>(op, a[i], value);
        }
        OnEveryTarget([&] {
          Array<T> out(count, Below(64));
          BinaryWithScalar(op, kDTypeOf<T>, a.data(), number, out.data(), count);
          ExpectSame(out, right, "array with scalar");
          BinaryWithScalar(op, kDTypeOf<T>, number, a.data(), out.data(), count);
          ExpectSame(out, left, "scalar with array");
          out.CopyFrom(a);
          BinaryWithScalar(op, kDTypeOf<T>, out.data(), number, out.data(), count);
          ExpectSame(out, right, "in place");
        });
      }
    }
  });
}

TEST_F(ElementwiseTest, EveryCutGivesTheSameBits) {
  constexpr std::size_t kCount = 200;
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    Array<T> a(kCount);
    Array<T> b(kCount);
    Array<T> expected(kCount);
    Randomize(a, random_);
    Randomize(b, random_);
    for (std::size_t i = 0; i < kCount; ++i) expected[i] = Plain<T>(BinaryOp::kDivide, a[i], b[i]);
    OnEveryTarget([&] {
      for (std::size_t cut = 0; cut <= kCount; ++cut) {
        Array<T> out(kCount);
        Binary(BinaryOp::kDivide, kDTypeOf<T>, a.data(), b.data(), out.data(), cut);
        Binary(BinaryOp::kDivide, kDTypeOf<T>, a.data() + cut, b.data() + cut, out.data() + cut,
               kCount - cut);
        ExpectSame(out, expected);
      }
    });
  });
}

TEST_F(ElementwiseTest, IntegerDivisionIsDefinedEverywhere) {
  const std::int32_t a[] = {7, -7, 5, std::numeric_limits<std::int32_t>::min()};
  const std::int32_t b[] = {2, 2, 0, -1};
  std::int32_t out[4];
  Binary(BinaryOp::kDivide, DType::kInt32, a, b, out, 4);
  EXPECT_EQ(out[0], 3);
  EXPECT_EQ(out[1], -3);
  EXPECT_EQ(out[2], 0);
  EXPECT_EQ(out[3], std::numeric_limits<std::int32_t>::min());
}

TEST_F(ElementwiseTest, ScalarsAreConvertedFirst) {
  std::int32_t integers[] = {10};
  BinaryWithScalar(BinaryOp::kMultiply, DType::kInt32, integers, 2.9, integers, 1);
  EXPECT_EQ(integers[0], 20);
  std::int64_t large[] = {0};
  BinaryWithScalar(BinaryOp::kAdd, DType::kInt64, large, std::numeric_limits<std::int64_t>::max(),
                   large, 1);
  EXPECT_EQ(large[0], std::numeric_limits<std::int64_t>::max());
  // 1 + 2^-9 is no bfloat16, so it must not be rounded before the product is: 128 * it = 128.25.
  BFloat16 brain[] = {BFloat16(192)};
  BinaryWithScalar(BinaryOp::kMultiply, DType::kBFloat16, brain, 1 + 0x1p-8, brain, 1);
  EXPECT_EQ(brain[0].bits, BFloat16(192.75f).bits);
}

}  // namespace
}  // namespace heddle::ops
