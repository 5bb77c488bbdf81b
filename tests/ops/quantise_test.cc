// The quantisers against a scalar loop that follows the formulas of their contract, bit by bit, and
// the bytes of the documentation.
#include "ops/quantise.h"

#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::ops {
namespace {

using Bytes = std::vector<std::uint8_t>;

// One element: its code, and what stays of r.
unsigned PlainTwoBit(float t, float g, float& r) {
  r = r + g;
  if (r >= t) {
    r = r - t;
    return 3;
  }
  if (r <= -t) {
    r = r + t;
    return 2;
  }
  return 0;
}

unsigned PlainOneBit(float t, float g, float& r) {
  r = r + g;
  const bool plus = r > t;
  r = plus ? r - 1 : r + 1;
  return plus ? 1 : 0;
}

// Element i in byte i / per_byte, the first in the most significant bits; whole words of 4 bytes.
void PutCode(Bytes& code, std::size_t bits, std::size_t i, unsigned value) {
  const std::size_t per_byte = 8 / bits;
  const std::size_t shift = 8 - bits * (i % per_byte + 1);
  code[i / per_byte] = static_cast<std::uint8_t>(code[i / per_byte] | value << shift);
}

float PlainValue(std::size_t bits, float t, const Bytes& code, std::size_t i) {
  const std::size_t per_byte = 8 / bits;
  const unsigned value = code[i / per_byte] >> (8 - bits * (i % per_byte + 1)) & ((1U << bits) - 1);
  if (bits == 1) return value == 1 ? 1.0F : -1.0F;
  if (value == 3) return t;
  return value == 2 ? -t : 0.0F;
}

std::size_t CodeBytes(std::size_t bits, std::size_t count) {
  return bits == 2 ? TwoBitCodeBytes(count) : OneBitCodeBytes(count);
}

void Quantise(std::size_t bits, float t, DType dtype, const void* g, float* r, void* code,
              std::size_t count) {
  (bits == 2 ? &QuantiseTwoBit : &QuantiseOneBit)(t, dtype, g, r, code, count);
}

void Dequantise(std::size_t bits, float t, const void* code, float* out, std::size_t count,
                StoreMode mode) {
  if (bits == 2) {
    DequantiseTwoBit(t, code, out, count, mode);
  } else {
    DequantiseOneBit(code, out, count, mode);
  }
}

constexpr float kNoNumber = std::numeric_limits<float>::quiet_NaN();

class QuantiseTest : public KernelTest {};

TEST_F(QuantiseTest, TwoBitGivesTheDocumentedByte) {
  OnEveryTarget([] {
    const float g[] = {0.6F, -0.7F, 0.1F, 0.5F};
    float r[4] = {};
    Bytes code(4, 0xFF);
    QuantiseTwoBit(0.5F, DType::kFloat32, g, r, code.data(), 4);
    EXPECT_EQ(code, (Bytes{0xE3, 0, 0, 0}));
    EXPECT_FLOAT_EQ(r[0], 0.1F);
    EXPECT_FLOAT_EQ(r[1], -0.2F);
    EXPECT_FLOAT_EQ(r[2], 0.1F);
    EXPECT_FLOAT_EQ(r[3], 0.0F);
    float out[4];
    DequantiseTwoBit(0.5F, code.data(), out, 4);
    EXPECT_EQ(std::vector<float>(out, out + 4), (std::vector<float>{0.5F, -0.5F, 0, 0.5F}));
  });
}

TEST_F(QuantiseTest, OneBitGivesTheDocumentedByte) {
  OnEveryTarget([] {
    const float g[] = {1, -1, 0.2F, 0, 3, -2, 0.5F, -0.1F};
    float r[8] = {};
    Bytes code(4, 0xFF);
    QuantiseOneBit(0, DType::kFloat32, g, r, code.data(), 8);
    EXPECT_EQ(code, (Bytes{0xAA, 0, 0, 0}));
    float out[8];
    DequantiseOneBit(code.data(), out, 8);
    EXPECT_EQ(std::vector<float>(out, out + 8), (std::vector<float>{1, -1, 1, -1, 1, -1, 1, -1}));
    EXPECT_EQ(r[4], 2);
    EXPECT_EQ(r[5], -1);
  });
}

TEST_F(QuantiseTest, CodesAreWholeWords) {
  EXPECT_EQ(TwoBitCodeBytes(0), 0u);
  EXPECT_EQ(TwoBitCodeBytes(1), 4u);
  EXPECT_EQ(TwoBitCodeBytes(16), 4u);
  EXPECT_EQ(TwoBitCodeBytes(17), 8u);
  EXPECT_EQ(OneBitCodeBytes(0), 0u);
  EXPECT_EQ(OneBitCodeBytes(32), 4u);
  EXPECT_EQ(OneBitCodeBytes(33), 8u);
}

// Residuals, codes with their padding, and decoded values, for any length, alignment and cut.
TEST_F(QuantiseTest, EqualsTheScalarLoop) {
  OnEveryTarget([&] {
    for (const std::size_t bits : {std::size_t{1}, std::size_t{2}}) {
      for (int round = 0; round < Scaled(60); ++round) {
        ForEveryFloatingDType([&](auto type) {
          using T = typename decltype(type)::type;
          if constexpr (!std::is_same_v<T, double>) {
            const float t = bits == 2
                                ? std::vector<float>{0.5F, 0.1F, 3.0F, 4e-41F, 5e-41F}[Below(5)]
                                : std::vector<float>{0, -0.5F, 0.5F, 2}[Below(4)];
            const std::size_t count = Below(8) == 0 ? 4000 + Below(6000) : RandomCount();
            Array<T> g(count, Below(32));
            Array<float> r(count, Below(16)), expected_r(count);
            Randomize(g, random_);
            Randomize(r, random_);
            for (std::size_t i = 0; i < count; i += 7) r[i] = -0.0F;
            for (std::size_t i = 3; i < count; i += 11) {  // exactly at the threshold
              r[i] = Below(2) == 0 ? t : -t;
              g[i] = static_cast<T>(0.0F);
            }
            for (std::size_t i = 5; i < count; i += 13) r[i] = kNoNumber;
            expected_r.CopyFrom(r);
            Bytes expected(CodeBytes(bits, count));
            for (std::size_t i = 0; i < count; ++i) {
              const float gradient = static_cast<float>(g[i]);
              PutCode(expected, bits, i,
                      bits == 2 ? PlainTwoBit(t, gradient, expected_r[i])
                                : PlainOneBit(t, gradient, expected_r[i]));
            }
            Array<std::uint8_t> code(expected.size(), Below(5));
            const std::size_t cut = Below(count / 32 + 1) * 32;
            const std::size_t code_cut = CodeBytes(bits, cut);
            Quantise(bits, t, kDTypeOf<T>, g.data(), r.data(), code.data(), cut);
            Quantise(bits, t, kDTypeOf<T>, g.data() + cut, r.data() + cut, code.data() + code_cut,
                     count - cut);
            ExpectSame(r, expected_r, "residual");
            ASSERT_TRUE(std::equal(expected.begin(), expected.end(), code.data()))
                << bits << " bits, " << count << " elements";
            for (const StoreMode mode : kEveryStoreMode) {
              Array<float> out(count, Below(2) == 0 ? 0 : Below(16)), expected_out(count);
              for (std::size_t i = 0; i < count; ++i) {
                expected_out[i] = PlainValue(bits, t, expected, i);
              }
              Dequantise(bits, t, code.data(), out.data(), cut, mode);
              Dequantise(bits, t, code.data() + code_cut, out.data() + cut, count - cut, mode);
              ExpectSame(out, expected_out, "decoded");
            }
          }
        });
      }
    }
  });
}

// Of an output of about the caches' size a part is streamed.
TEST_F(QuantiseTest, LongCodesDecodeAlike) {
  OnEveryTarget([&] {
    const std::size_t count = (std::size_t{13} << 20) / sizeof(float) + Below(500);
    Bytes code(CodeBytes(2, count));
    for (std::size_t i = 0; i < code.size(); ++i) code[i] = static_cast<std::uint8_t>(i * i >> 3);
    for (const std::size_t bits : {1, 2}) {
      Array<float> out(count), expected(count);
      Dequantise(bits, 0.25F, code.data(), expected.data(), count, StoreMode::kCached);
      Dequantise(bits, 0.25F, code.data(), out.data(), count, StoreMode::kAuto);
      ExpectSame(out, expected);
    }
  });
}

// Any bytes decode; 01 is nothing.
TEST_F(QuantiseTest, EveryCodeHasAValue) {
  OnEveryTarget([&] {
    Bytes code(256);
    for (std::size_t i = 0; i < code.size(); ++i) code[i] = static_cast<std::uint8_t>(i);
    Array<float> two(1024), expected_two(1024), one(2048), expected_one(2048);
    for (std::size_t i = 0; i < 1024; ++i) expected_two[i] = PlainValue(2, 0.25F, code, i);
    for (std::size_t i = 0; i < 2048; ++i) expected_one[i] = PlainValue(1, 0, code, i);
    DequantiseTwoBit(0.25F, code.data(), two.data(), 1024);
    DequantiseOneBit(code.data(), one.data(), 2048);
    ExpectSame(two, expected_two);
    ExpectSame(one, expected_one);
  });
}

TEST_F(QuantiseTest, OtherDTypesAreRefusedAndNothingIsWritten) {
  for (const DType dtype : {DType::kFloat64, DType::kInt32, DType::kBool}) {
    const double g[4] = {1, 1, 1, 1};
    float r[4] = {5, 5, 5, 5};
    Bytes code(4, 7);
    for (const auto quantise : {&QuantiseTwoBit, &QuantiseOneBit}) {
      try {
        quantise(0.5F, dtype, g, r, code.data(), 4);
        ADD_FAILURE() << "accepted " << Name(dtype);
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find(Name(dtype)), std::string::npos) << error.what();
      }
    }
    EXPECT_EQ(code, Bytes(4, 7));
    EXPECT_EQ(r[0], 5);
  }
}

}  // namespace
}  // namespace heddle::ops
