#include "ops/fill.h"

#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

class FillTest : public KernelTest {};

TEST_F(FillTest, SetsEveryElementAndNothingElse) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < 20; ++round) {
      const std::size_t count = RandomCount();
      const int number = static_cast<int>(Below(100));
      Array<T> expected(count);
      for (std::size_t i = 0; i < count; ++i) {
        if constexpr (std::is_same_v<T, bool>) {
          expected[i] = number != 0;
        } else {
          expected[i] = static_cast<T>(number);
        }
      }
      OnEveryTarget([&] {
        for (StoreMode mode : kEveryStoreMode) {
          Array<T> out(count, Below(64));
          Fill(kDTypeOf<T>, number, out.data(), count, mode);
          ExpectSame(out, expected);
        }
      });
    }
  });
}

TEST_F(FillTest, ConvertsTheValue) {
  std::int64_t integer = 0;
  Fill(DType::kInt64, (std::int64_t{1} << 62) + 1, &integer, 1);
  EXPECT_EQ(integer, (std::int64_t{1} << 62) + 1);
  std::uint8_t byte = 0;
  Fill(DType::kUInt8, 1e9, &byte, 1);
  EXPECT_EQ(byte, 255);
  Fill(DType::kBool, 0.25, &byte, 1);
  EXPECT_EQ(byte, 1);
  Float16 half;
  Fill(DType::kFloat16, 1e9, &half, 1);
  EXPECT_EQ(half.bits, 0x7C00);
}

}  // namespace
}  // namespace heddle::ops
