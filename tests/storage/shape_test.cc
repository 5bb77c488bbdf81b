#include <heddle/error.h>
#include <heddle/shape.h>

#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Shape, CountsElements) {
  EXPECT_EQ(Shape().size(), 1);
  EXPECT_EQ(Shape().ndim(), 0u);
  EXPECT_EQ((Shape{2, 3, 4}).size(), 24);
  EXPECT_EQ((Shape{2, 0, 4}).size(), 0);
  EXPECT_EQ((Shape{5})[0], 5);
  EXPECT_EQ((Shape{std::int64_t{1} << 40, 1 << 20}).size(), std::int64_t{1} << 60);
}

TEST(Shape, HoldsMoreThanFourDimensions) {
  const std::vector<std::int64_t> dims = {1, 2, 3, 4, 5, 6};
  const Shape shape{std::span<const std::int64_t>(dims)};
  Shape copy = shape;
  EXPECT_EQ(copy, shape);
  EXPECT_EQ(copy[5], 6);
  EXPECT_EQ(copy.size(), 720);
  const Shape moved = std::move(copy);
  EXPECT_EQ(moved, shape);
  EXPECT_EQ(copy, Shape());  // NOLINT(bugprone-use-after-move): a moved-from shape is a scalar
  copy = Shape{7};
  copy = moved;
  EXPECT_EQ(copy, shape);
  copy = Shape{7};
  EXPECT_EQ(copy, Shape{7});
}

TEST(Shape, ComparesExtentsNotSizes) {
  EXPECT_NE((Shape{2, 3}), (Shape{3, 2}));
  EXPECT_NE((Shape{2}), (Shape{2, 1}));
}

TEST(Shape, Prints) {
  EXPECT_EQ(ToString(Shape()), "()");
  EXPECT_EQ(ToString(Shape{5}), "(5,)");
  EXPECT_EQ(ToString(Shape{2, 3}), "(2, 3)");
}

TEST(Shape, RefusesNegativeAndImpossibleExtents) {
  EXPECT_THROW((Shape{2, -1}), InvalidArgument);
  const std::int64_t huge = std::int64_t{1} << 32;
  EXPECT_THROW((Shape{huge, huge}), InvalidArgument);
  EXPECT_EQ((Shape{huge, huge, 0}).size(), 0);
}

}  // namespace
}  // namespace heddle
