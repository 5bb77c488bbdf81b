// Operations of heddle/math.h: what the kernels' own tests cannot show, parts, errors and order.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/math.h>
#include <heddle/ndarray.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/message_of.h"

namespace heddle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

NDArray Numbers(Shape shape) {
  const std::int64_t count = shape.size();
  return NDArray::Arange(count).Reshape(std::move(shape));
}

TEST(ArrayMathTest, TheResultIsOrderedLikeAnyOp) {
  const NDArray a = NDArray::Full({3}, 4);
  const NDArray root = Sqrt(a);
  a *= 0;  // waits for the read
  EXPECT_THAT(root.ToVector<float>(), ElementsAre(2, 2, 2));
  EXPECT_THAT(Compare(Comparison::kEqual, a, 0).ToVector<std::uint8_t>(), ElementsAre(1, 1, 1));
}

TEST(ArrayMathTest, SumsAndMeansDropTheirAxis) {
  const NDArray a = Numbers({2, 3});
  EXPECT_THAT(SumAlong(a, 0).ToVector<float>(), ElementsAre(3, 5, 7));
  EXPECT_THAT(SumAlong(a, 1).ToVector<float>(), ElementsAre(3, 12));
  EXPECT_EQ(SumAlong(a, 1).shape(), Shape({2}));
  EXPECT_THAT(SumAlong(a, std::nullopt).ToVector<float>(), ElementsAre(15));
  EXPECT_THAT(MeanAlong(a, 0).ToVector<float>(), ElementsAre(1.5, 2.5, 3.5));
  EXPECT_EQ(SumAlong(Numbers({4}), 0).shape(), Shape({1}));
  EXPECT_THAT(MessageOf([&] { SumAlong(a, 2); }), HasSubstr("expected an axis in [0, 2)"));
}

TEST(ArrayMathTest, NormAndProducts) {
  EXPECT_THAT(Norm(NDArray::FromVector<float>({3, 4})).ToVector<float>(), ElementsAre(5));
  EXPECT_THAT(Dot(Numbers({2, 3}), Numbers({3, 2})).ToVector<float>(), ElementsAre(10, 13, 28, 40));
  EXPECT_THAT(Dot(Numbers({2, 3}), Numbers({3})).ToVector<float>(), ElementsAre(5, 14));
  EXPECT_THAT(Dot(Numbers({3}), Numbers({3})).ToVector<float>(), ElementsAre(5));
  EXPECT_THAT(MessageOf([] {
                Dot(Numbers({2, 3}), Numbers({2, 3}));
              }),
              HasSubstr("(2, 3) and (2, 3)"));
}

TEST(ArrayMathTest, PartsAreCopiedAndAssigned) {
  const NDArray a = Numbers({3, 4});
  const AxisRange every_other[] = {{.begin = 2, .step = -2, .count = 2}, {.begin = 1, .count = 2}};
  EXPECT_THAT(CopyPart(a, every_other).ToVector<float>(), ElementsAre(9, 10, 1, 2));
  const AxisRange column[] = {{.count = 3}, {.begin = 1, .count = 1, .keep = false}};
  EXPECT_EQ(CopyPart(a, column).shape(), Shape({3}));
  AssignPart(a, column, NDArray::Full({3}, -1));
  EXPECT_THAT(a.ToVector<float>(), ElementsAre(0, -1, 2, 3, 4, -1, 6, 7, 8, -1, 10, 11));
  const AxisRange outside[] = {{.count = 4}, {.begin = 1, .count = 1}};
  EXPECT_THAT(MessageOf([&] { CopyPart(a, outside); }), HasSubstr("axis 0 of shape (3, 4)"));
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const AxisRange& wraps :
       {AxisRange{0, kMin, 3}, AxisRange{0, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 1},
        AxisRange{2, kMax, 2}, AxisRange{0, 1, kMin}, AxisRange{kMin, -1, 2}}) {
    const AxisRange ranges[] = {wraps, {.begin = 1, .count = 1}};
    EXPECT_THAT(MessageOf([&] { CopyPart(a, ranges); }), HasSubstr("axis 0 of shape (3, 4)"));
    EXPECT_THAT(MessageOf([&] { AssignPart(a, ranges, a); }), HasSubstr("axis 0 of shape (3, 4)"));
  }
  EXPECT_THAT(MessageOf([&] { AssignPart(a, column, NDArray::Zeros({4})); }), HasSubstr("(4,)"));
  // The values lie in the array itself.
  AssignPart(a, std::vector<AxisRange>{{.count = 1, .keep = false}, {.count = 4}},
             a.Slice(2, 3).Reshape({4}));
  EXPECT_THAT(a.Slice(0, 1).ToVector<float>(), ElementsAre(8, -1, 10, 11));
}

TEST(ArrayMathTest, TransposeAndBroadcast) {
  const std::vector<std::int64_t> turned = {1, 0};
  EXPECT_THAT(Transpose(Numbers({2, 3}), turned).ToVector<float>(), ElementsAre(0, 3, 1, 4, 2, 5));
  const std::vector<std::int64_t> twice = {1, 1};
  EXPECT_THAT(MessageOf([&] { Transpose(Numbers({2, 3}), twice); }), HasSubstr("(1, 1)"));
  EXPECT_THAT(BroadcastTo(Numbers({2, 1}), {2, 2, 2}).ToVector<float>(),
              ElementsAre(0, 0, 1, 1, 0, 0, 1, 1));
  EXPECT_THAT(MessageOf([] { BroadcastTo(Numbers({2}), {3}); }), HasSubstr("(3,)"));
}

// Where an array has no elements the other extents cost neither time nor memory.
TEST(ArrayMathTest, ExtentsBesideNoneCostNothing) {
  const auto none = [](Shape shape) { return NDArray(std::move(shape)); };
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  const std::vector<std::int64_t> turned = {1, 0};
  for (const NDArray& result :
       {SumAlong(none({kMany, 5, 0}), 1), SumAlong(none({0, 5, kMany}), 1),
        MeanAlong(none({kMany, 3, 0}), 0), Dot(none({kMany, 0}), none({0, 0})),
        Dot(none({0, 0}), none({0, kMany})), Transpose(none({kMany, 0}), turned),
        BroadcastTo(none({1, 0}), {kMany, 0})}) {
    EXPECT_EQ(result.ToVector<float>(), std::vector<float>());
  }
}

TEST(ArrayMathTest, ArraysThatDoNotFitAreRefused) {
  const NDArray a = NDArray::Zeros({2});
  EXPECT_THROW(Maximum(a, NDArray::Zeros({3})), InvalidArgument);
  EXPECT_THROW(Maximum(a, NDArray::Zeros({2}, DType::kInt32)), InvalidArgument);
  EXPECT_THROW(Compare(Comparison::kLess, a, NDArray::Zeros({2}, DType::kFloat32, Cpu(1))),
               InvalidArgument);
  EXPECT_THROW(Sqrt(NDArray::Zeros({2}, DType::kInt32)), InvalidArgument);
  EXPECT_THROW(Negative(NDArray()), InvalidArgument);
}

}  // namespace
}  // namespace heddle
