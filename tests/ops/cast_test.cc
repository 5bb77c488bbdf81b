// Cast against an oracle in long double, whose 64 bits of precision hold every element exactly.
#include "ops/cast.h"

#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

using LongDouble = long double;
static_assert(std::numeric_limits<LongDouble>::digits >= 64);

// `value` rounded to a format with `digits` significant bits and exponents from exponent_min.
LongDouble RoundTo(LongDouble value, int digits, int exponent_min, LongDouble finite_max) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), exponent_min);
  const int shift = digits - 1 - exponent;
  const LongDouble rounded = std::ldexp(std::nearbyint(std::ldexp(value, shift)), -shift);
  if (std::fabs(rounded) > finite_max) {
    return std::copysign(std::numeric_limits<LongDouble>::infinity(), value);
  }
  return rounded;
}

template <typename T>
LongDouble Exact(StorageType<T> value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value != 0 ? 1 : 0;
  } else if constexpr (std::is_same_v<ComputeType<T>, float>) {
    return static_cast<float>(value);
  } else {
    return static_cast<LongDouble>(value);
  }
}

template <typename From, typename To>
StorageType<To> PlainCast(StorageType<From> from) {
  const LongDouble value = Exact<From>(from);
  if constexpr (std::is_same_v<To, bool>) {
    return value != 0 ? 1 : 0;
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    const auto wide = static_cast<std::int64_t>(value);
    To low;
    std::memcpy(&low, &wide, sizeof(To));  // little-endian
    return low;
  } else if constexpr (std::is_integral_v<To>) {
    if (std::isnan(value)) return 0;
    const LongDouble low = static_cast<LongDouble>(std::numeric_limits<To>::min());
    const LongDouble high = static_cast<LongDouble>(std::numeric_limits<To>::max());
    return static_cast<To>(std::min(std::max(std::trunc(value), low), high));
  } else if constexpr (std::is_same_v<To, double>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_same_v<To, float>) {
    return static_cast<float>(value);
  } else if constexpr (std::is_same_v<To, Float16>) {
    return Float16(static_cast<float>(RoundTo(value, 11, -14, 65504)));
  } else {
    return BFloat16(static_cast<float>(RoundTo(value, 8, -126, 0x1.FEp127L)));
  }
}

class CastTest : public KernelTest {
 protected:
  // As RandomValue, and often a value close to where a rounding changes direction or a range ends.
  template <typename T>
  StorageType<T> DifficultValue() {
    if constexpr (std::is_same_v<T, double>) {
      if (Below(2) == 0) {
        const double tie =
            std::ldexp(static_cast<double>(2 * Below(5000) + 1), static_cast<int>(Below(60)) - 40);
        const double near = Below(3) == 0 ? tie : std::nextafter(tie, Below(2) == 0 ? 0 : 1e300);
        return Below(2) == 0 ? near : -near;
      }
    } else if constexpr (std::is_same_v<T, float>) {
      if (Below(4) == 0) {
        const float power = std::ldexp(1.0f, static_cast<int>(Below(70)));
        const float near = std::nextafter(power, Below(2) == 0 ? 0.0f : 1e38f);
        return Below(2) == 0 ? near : -near;
      }
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      if (Below(2) == 0) {
        const auto tie = static_cast<std::int64_t>((2 * Below(5000) + 1) << Below(50));
        const std::int64_t near = tie + static_cast<std::int64_t>(Below(3)) - 1;
        return Below(2) == 0 ? near : -near;
      }
    }
    return RandomValue<T>(random_);
  }
};

// Casts `count` elements on every target in every store mode. Not a template, as there are 81
// pairs.
void ExpectCast(DType from, const void* source, DType to, const void* expected, std::size_t count,
                std::size_t offset) {
  OnEveryTarget([&] {
    for (StoreMode mode : kEveryStoreMode) {
      DispatchDType(to, [&](auto type) {
        using To = typename decltype(type)::type;
        Array<To> out(count, offset);
        Cast(from, source, to, out.data(), count, mode);
        Array<To> wanted(count);
        std::memcpy(static_cast<void*>(wanted.data()), expected, count * sizeof(To));
        ExpectSame(out, wanted);
      });
    }
  });
}

TEST_F(CastTest, EveryPairEqualsTheOracle) {
  ForEveryDType([&](auto from_type) {
    using From = typename decltype(from_type)::type;
    ForEveryDType([&](auto to_type) {
      using To = typename decltype(to_type)::type;
      for (int round = 0; round < 12; ++round) {
        const std::size_t count = RandomCount();
        Array<From> source(count, Below(64));
        Array<To> expected(count);
        for (std::size_t i = 0; i < count; ++i) {
          source[i] = DifficultValue<From>();
          if constexpr (std::is_same_v<From, To>) {
            expected[i] = source[i];
          } else {
            expected[i] = PlainCast<From, To>(source[i]);
          }
        }
        ExpectCast(kDTypeOf<From>, source.data(), kDTypeOf<To>, expected.data(), count, Below(64));
      }
    });
  });
}

TEST_F(CastTest, FloatsOutOfRangeSaturate) {
  const float source[] = {-1e30f, 1e30f, -129, 128, 127.9f, -128.9f, -0.5f, NAN, -INFINITY};
  const std::int8_t expected[] = {-128, 127, -128, 127, 127, -128, 0, 0, -128};
  std::int8_t out[9];
  Cast(DType::kFloat32, source, DType::kInt8, out, 9);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(out[i], expected[i]) << source[i];
  std::int64_t wide[9];
  Cast(DType::kFloat32, source, DType::kInt64, wide, 9);
  EXPECT_EQ(wide[0], std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(wide[1], std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(wide[7], 0);
  std::uint8_t bytes[9];
  Cast(DType::kFloat32, source, DType::kUInt8, bytes, 9);
  EXPECT_EQ(bytes[2], 0);
  EXPECT_EQ(bytes[3], 128);
}

TEST_F(CastTest, IntegersWrap) {
  const std::int32_t source[] = {256, -1, 300, 128};
  std::uint8_t out[4];
  Cast(DType::kInt32, source, DType::kUInt8, out, 4);
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 255);
  EXPECT_EQ(out[2], 44);
  std::int8_t signed_out[4];
  Cast(DType::kInt32, source, DType::kInt8, signed_out, 4);
  EXPECT_EQ(signed_out[3], -128);
}

// By way of float32 the first step would round to a tie, and the second away from the nearest.
TEST_F(CastTest, DoubleRoundsOnceToSixteenBits) {
  const double source = 1 + 0x1p-11 + 0x1p-40;
  Float16 half;
  Cast(DType::kFloat64, &source, DType::kFloat16, &half, 1);
  EXPECT_EQ(half.bits, Float16(1 + 0x1p-10f).bits);
  const std::int64_t integer = (std::int64_t{1} << 60) + (std::int64_t{1} << 52) + 1;
  BFloat16 brain;
  Cast(DType::kInt64, &integer, DType::kBFloat16, &brain, 1);
  EXPECT_EQ(static_cast<float>(brain), 0x1p60f + 0x1p53f);
}

}  // namespace
}  // namespace heddle::ops
