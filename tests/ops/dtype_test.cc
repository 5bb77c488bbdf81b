#include <heddle/dtype.h>

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(DType, NamesParseBack) {
  for (DType dtype : kAllDTypes) EXPECT_EQ(ParseDType(Name(dtype)), dtype);
  EXPECT_EQ(Name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(Name(DType::kBool), "bool");
  EXPECT_EQ(ParseDType("float"), std::nullopt);
  EXPECT_EQ(ParseDType(""), std::nullopt);
  EXPECT_EQ(ParseDType("Float32"), std::nullopt);
}

TEST(DType, SizesMatchTheTypes) {
  EXPECT_EQ(SizeOf(kDTypeOf<float>), sizeof(float));
  EXPECT_EQ(SizeOf(kDTypeOf<double>), sizeof(double));
  EXPECT_EQ(SizeOf(kDTypeOf<Float16>), 2u);
  EXPECT_EQ(SizeOf(kDTypeOf<BFloat16>), 2u);
  EXPECT_EQ(SizeOf(kDTypeOf<std::int8_t>), 1u);
  EXPECT_EQ(SizeOf(kDTypeOf<std::uint8_t>), 1u);
  EXPECT_EQ(SizeOf(kDTypeOf<std::int32_t>), 4u);
  EXPECT_EQ(SizeOf(kDTypeOf<std::int64_t>), 8u);
  EXPECT_EQ(SizeOf(kDTypeOf<bool>), 1u);
}

TEST(DType, FourAreFloating) {
  EXPECT_TRUE(IsFloating(DType::kFloat32) && IsFloating(DType::kFloat64) &&
              IsFloating(DType::kFloat16) && IsFloating(DType::kBFloat16));
  EXPECT_FALSE(IsFloating(DType::kInt8) || IsFloating(DType::kUInt8) || IsFloating(DType::kInt32) ||
               IsFloating(DType::kInt64) || IsFloating(DType::kBool));
}

// The value that the bits of a binary16 stand for, by the definition of the format.
double ValueOfFloat16(std::uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) {
    return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

TEST(Float16, EveryValueSurvivesFloat) {
  for (int i = 0; i < 65536; ++i) {
    const auto half = Float16::FromBits(static_cast<std::uint16_t>(i));
    const float value = static_cast<float>(half);
    const double expected = ValueOfFloat16(half.bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << i;
      EXPECT_TRUE(std::isnan(static_cast<float>(Float16(value)))) << i;
    } else {
      EXPECT_EQ(value, expected) << i;
      EXPECT_EQ(Float16(value).bits, half.bits) << i;
    }
  }
}

TEST(Float16, RoundsToNearestTiesToEven) {
  for (int i = 0; i < 0x7BFF; ++i) {  // neighbours i and i + 1, both finite
    const float low = static_cast<float>(Float16::FromBits(static_cast<std::uint16_t>(i)));
    const float high = static_cast<float>(Float16::FromBits(static_cast<std::uint16_t>(i + 1)));
    const float middle = (low + high) / 2;  // exact
    ASSERT_EQ(Float16(std::nextafter(middle, low)).bits, i);
    ASSERT_EQ(Float16(middle).bits, i % 2 == 0 ? i : i + 1);
    ASSERT_EQ(Float16(std::nextafter(middle, high)).bits, i + 1);
    ASSERT_EQ(Float16(-middle).bits, 0x8000 | (i % 2 == 0 ? i : i + 1));
  }
}

TEST(Float16, OverflowsToInfinity) {
  EXPECT_EQ(Float16(65504.0f).bits, 0x7BFF);
  EXPECT_EQ(Float16(std::nextafter(65520.0f, 0.0f)).bits, 0x7BFF);
  EXPECT_EQ(Float16(65520.0f).bits, 0x7C00);
  EXPECT_EQ(Float16(-1e30f).bits, 0xFC00);
  EXPECT_EQ(Float16(std::numeric_limits<float>::infinity()).bits, 0x7C00);
}

TEST(BFloat16, EveryValueSurvivesFloat) {
  for (int i = 0; i < 65536; ++i) {
    const auto brain = BFloat16::FromBits(static_cast<std::uint16_t>(i));
    const float value = static_cast<float>(brain);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(value), static_cast<std::uint32_t>(i) << 16);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(value)))) << i;
    } else {
      EXPECT_EQ(BFloat16(value).bits, brain.bits) << i;
    }
  }
}

TEST(BFloat16, RoundsToNearestTiesToEven) {
  for (std::uint32_t i = 0; i < 0x7F7F; ++i) {
    const std::uint32_t middle = (i << 16) | 0x8000;
    ASSERT_EQ(BFloat16(std::bit_cast<float>(middle - 1)).bits, i);
    ASSERT_EQ(BFloat16(std::bit_cast<float>(middle)).bits, i % 2 == 0 ? i : i + 1);
    ASSERT_EQ(BFloat16(std::bit_cast<float>(middle + 1)).bits, i + 1);
  }
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7F80);
}

TEST(BFloat16, KeepsNaNsWhosePayloadIsCutOff) {
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(0x7F800001u)))));
  EXPECT_TRUE(std::isnan(static_cast<float>(Float16(std::bit_cast<float>(0xFF800001u)))));
}

}  // namespace
}  // namespace heddle
