#include "ops/reduce.h"

#include <heddle/error.h>

#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

// One block by the formula of the contract.
template <typename T>
double PlainBlock(const T* a, const T* b, std::size_t count) {
  double partial[32] = {};
  for (std::size_t i = 0; i < count; ++i) partial[i % 32] += ToDouble(a[i]) * ToDouble(b[i]);
  for (int half = 16; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) partial[j] += partial[j + half];
  }
  return partial[0];
}

class ReduceTest : public KernelTest {};

TEST_F(ReduceTest, BlocksEqualThePlainLoop) {
  ForEveryFloatingDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < 30; ++round) {
      const std::size_t count = round % 2 == 0 ? RandomCount() : Below(4 * kReductionBlock);
      Array<T> a(count, Below(64));
      Array<T> b(count, Below(64));
      Randomize(a, random_);
      Randomize(b, random_);
      OnEveryTarget([&] {
        Array<double> dots(ReductionBlocks(count));
        Array<double> norms(ReductionBlocks(count));
        DotBlocks(kDTypeOf<T>, a.data(), b.data(), count, dots.data());
        SquaredNormBlocks(kDTypeOf<T>, a.data(), count, norms.data());
        for (std::size_t j = 0; j < dots.size(); ++j) {
          const std::size_t begin = j * kReductionBlock;
          const std::size_t size = std::min(kReductionBlock, count - begin);
          const T* x = a.data() + begin;
          ASSERT_TRUE(SameBits(dots[j], PlainBlock(x, b.data() + begin, size))) << j;
          ASSERT_TRUE(SameBits(norms[j], PlainBlock(x, x, size))) << j;
        }
      });
    }
  });
}

TEST_F(ReduceTest, EveryCutBetweenBlocksGivesTheSameBits) {
  const std::size_t count = 5 * kReductionBlock + 77;
  Array<float> x(count);
  for (std::size_t i = 0; i < count; ++i) {
    x[i] = std::uniform_real_distribution<float>(-1, 1)(random_);
  }
  std::vector<double> whole(ReductionBlocks(count));
  SquaredNormBlocks(DType::kFloat32, x.data(), count, whole.data());
  OnEveryTarget([&] {
    for (std::size_t cut = 0; cut <= 5; ++cut) {
      std::vector<double> parts(whole.size());
      const std::size_t middle = cut * kReductionBlock;
      SquaredNormBlocks(DType::kFloat32, x.data(), middle, parts.data());
      SquaredNormBlocks(DType::kFloat32, x.data() + middle, count - middle, parts.data() + cut);
      EXPECT_EQ(AddBlocks(parts), AddBlocks(whole));
    }
  });
}

TEST_F(ReduceTest, AddsBlocksInIndexOrder) {
  EXPECT_EQ(AddBlocks({}), 0);
  const double blocks[] = {1e17, 1, -1e17, 3};
  EXPECT_EQ(AddBlocks(blocks), 3);
}

TEST_F(ReduceTest, RefusesIntegers) {
  const std::int32_t x[] = {1};
  double block = 7;
  EXPECT_THROW(DotBlocks(DType::kInt32, x, x, 1, &block), InvalidArgument);
  EXPECT_THROW(SquaredNormBlocks(DType::kBool, x, 1, &block), InvalidArgument);
  EXPECT_EQ(block, 7);
}

}  // namespace
}  // namespace heddle::ops
