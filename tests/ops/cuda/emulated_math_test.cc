// The functions of ops/math.h as a GPU's threads compute them, against the CPU's kernels.
#include <heddle/error.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/cuda/math_plan.h"
#include "ops/cuda/part_plan.h"
#include "ops/cuda/product_plan.h"
#include "ops/cuda/reduce_plan.h"
#include "ops/gpu_scratch.h"
#include "ops/math.h"
#include "tests/ops/cuda/emulated_launch.h"
#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::ops::cuda {
namespace {

class EmulatedMath : public KernelTest {
 protected:
  std::size_t RandomCountOfBlocks() { return Below(6) == 0 ? Below(20000) : RandomCount(); }
  // Mostly aligned alike; then also otherwise.
  std::size_t RandomOffset(std::size_t common) { return Below(4) == 0 ? Below(16) : common; }

  // Now and then equal numbers, zeros, small integers.
  template <typename T>
  void RandomizeMixed(Array<T>& array) {
    for (std::size_t i = 0; i < array.size(); ++i) {
      array[i] =
          Below(2) == 0
              ? RandomValue<T>(random_)
              : static_cast<StorageType<T>>(Convert<T>(static_cast<std::int64_t>(Below(7)) - 3));
    }
  }

  // Floats whose sums depend on the order of their additions, and never overflow: no NaN hides what
  // is wrong.
  template <typename T>
  void RandomizeToAdd(Array<T>& array) {
    for (std::size_t i = 0; i < array.size(); ++i) {
      if constexpr (std::is_integral_v<T>) {
        array[i] = RandomValue<T>(random_);
      } else {
        const double fraction = std::uniform_real_distribution<double>(-1, 1)(random_);
        array[i] = Convert<T>(std::ldexp(fraction, static_cast<int>(Below(8))));
      }
    }
  }

  int launches_ = 0;
  const EmulatedLaunch launch_{&launches_};
};

constexpr CompareOp kCompareOps[] = {CompareOp::kEqual,   CompareOp::kNotEqual,
                                     CompareOp::kLess,    CompareOp::kLessEqual,
                                     CompareOp::kGreater, CompareOp::kGreaterEqual};

TEST_F(EmulatedMath, ComparisonsAreThoseOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    constexpr DType kDType = kDTypeOf<T>;
    for (const CompareOp op : kCompareOps) {
      const std::size_t count = RandomCountOfBlocks();
      const std::size_t offset = Below(16);
      Array<T> a(count, offset);
      Array<T> b(count, RandomOffset(offset));
      RandomizeMixed(a);
      RandomizeMixed(b);
      Array<std::uint8_t> expected(count);
      Array<std::uint8_t> out(count, RandomOffset(offset));
      ops::Compare(op, kDType, a.data(), b.data(), expected.data(), count);
      PlanCompare(op, kDType, a.data(), b.data(), 0, out.data(), count, launch_);
      ExpectSame(out, expected, "array");
      for (const Scalar number : {Scalar(2), Scalar(0.5), Scalar(-1), Scalar(std::nan(""))}) {
        ops::CompareWithScalar(op, kDType, a.data(), number, expected.data(), count);
        PlanCompare(op, kDType, a.data(), nullptr, number, out.data(), count, launch_);
        ExpectSame(out, expected, "number");
      }
    }
  });
}

TEST_F(EmulatedMath, FunctionsOfOneNumberAreThoseOfTheCpu) {
  constexpr UnaryOp kOps[] = {UnaryOp::kNegative, UnaryOp::kAbs, UnaryOp::kSign, UnaryOp::kSquare,
                              UnaryOp::kSqrt,     UnaryOp::kExp, UnaryOp::kLog};
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    constexpr DType kDType = kDTypeOf<T>;
    for (const UnaryOp op : kOps) {
      const std::size_t count = 1 + RandomCountOfBlocks();
      const std::size_t offset = Below(16);
      Array<T> a(count, offset);
      RandomizeMixed(a);
      Array<T> expected(count);
      Array<T> out(count, RandomOffset(offset));
      if (!IsFloating(kDType) && op >= UnaryOp::kSqrt) {
        EXPECT_THROW(PlanUnary(op, kDType, a.data(), out.data(), count, launch_), InvalidArgument);
        continue;
      }
      ops::Unary(op, kDType, a.data(), expected.data(), count);
      PlanUnary(op, kDType, a.data(), out.data(), count, launch_);
      ExpectSame(out, expected);
      PlanUnary(op, kDType, a.data(), a.data(), count, launch_);
      ExpectSame(a, expected, "in place");
    }
  });
}

TEST_F(EmulatedMath, FunctionsOfTwoNumbersAreThoseOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    constexpr DType kDType = kDTypeOf<T>;
    for (const PairOp op :
         {PairOp::kMaximum, PairOp::kMinimum, PairOp::kPower, PairOp::kRemainder}) {
      const std::size_t count = RandomCountOfBlocks();
      const std::size_t offset = Below(16);
      Array<T> a(count, offset);
      Array<T> b(count, RandomOffset(offset));
      RandomizeMixed(a);
      RandomizeMixed(b);
      const Scalar number = Below(2) == 0 ? Scalar(3) : Scalar(-1.5);
      Array<T> expected(count);
      Array<T> out(count, RandomOffset(offset));

      ops::Pair(op, kDType, a.data(), b.data(), expected.data(), count);
      PlanPair(op, kDType, a.data(), 0, b.data(), 0, out.data(), count, launch_);
      ExpectSame(out, expected, "array, array");
      ops::PairWithScalar(op, kDType, number, b.data(), expected.data(), count);
      PlanPair(op, kDType, nullptr, number, b.data(), 0, out.data(), count, launch_);
      ExpectSame(out, expected, "number, array");
      ops::PairWithScalar(op, kDType, a.data(), number, expected.data(), count);
      PlanPair(op, kDType, a.data(), 0, nullptr, number, a.data(), count, launch_);
      ExpectSame(a, expected, "array, number, in place");
    }
  });
}

// Several blocks, inexact sums, rows that vectors cover and rows that they do not.
TEST_F(EmulatedMath, SumsAlongAnAxisHaveTheBitsOfTheCpu) {
  struct Case {
    std::size_t outer, length, inner;
  };
  const Case cases[] = {{1, 9000 + Below(5000), 1},
                        {3, 5000, 1 + Below(3)},
                        {2 + Below(4), Below(60), 1 + Below(40)},
                        {4, 0, 3},
                        {1, 4096, 1},
                        {2, 4097, 2},
                        // So many that threads take vectors.
                        {1 + Below(2), 2, 1 << 20}};
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (const Case& c : cases) {
      if (c.inner > 100 && Below(3) > 0) continue;  // now and then: it takes long
      SCOPED_TRACE(std::to_string(c.outer) + " x " + std::to_string(c.length) + " x " +
                   std::to_string(c.inner));
      Array<T> a(c.outer * c.length * c.inner, Below(2) * Below(16));
      RandomizeToAdd(a);
      Array<T> expected(c.outer * c.inner);
      Array<T> out(c.outer * c.inner, Below(2) * Below(16));
      Array<double> scratch(ops::SumAxisScratchBytes(c.outer, c.length, c.inner) / 8);
      for (const std::size_t divisor : {1, 7}) {
        ops::SumAxis(kDTypeOf<T>, a.data(), c.outer, c.length, c.inner, divisor, expected.data());
        PlanSumAxis(kDTypeOf<T>, a.data(), c.outer, c.length, c.inner, divisor, out.data(),
                    scratch.data(), launch_);
        ExpectSame(out, expected);
      }
    }
  });
}

TEST_F(EmulatedMath, NormsHaveTheBitsOfTheCpu) {
  ForEveryFloatingDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (const std::size_t count : {std::size_t{0}, 1 + Below(40), 4096 + Below(10000)}) {
      Array<T> a(count, Below(16));
      Array<T> b(count, Below(16));
      RandomizeToAdd(a);
      RandomizeToAdd(b);
      const std::size_t size = ReductionBlocks(count);
      Array<double> expected(size);
      Array<double> blocks(size);
      ops::DotBlocks(kDTypeOf<T>, a.data(), b.data(), count, expected.data());
      const DotBlocksBody<T> body{a.data(), b.data(), count, blocks.data()};
      for (std::size_t block = 0; block < size; ++block) {
        double lanes[kWarpLanes];
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) lanes[lane] = body.SumLane(block, lane);
        for (unsigned half = kWarpLanes / 2; half > 0; half /= 2) {
          for (unsigned lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        }
        blocks[block] = lanes[0];
      }
      ExpectSame(blocks, expected);

      Array<T> norm(1);
      Array<T> expected_norm(1);
      expected_norm[0] = Convert<T>(std::sqrt(ops::AddBlocks({expected.data(), size})));
      PlanNorm(kDTypeOf<T>, blocks.data(), size, norm.data(), launch_);
      ExpectSame(norm, expected_norm);
    }
  });
}

// What the threads of a block do between two barriers, one after another.
struct EmulatedTiles {
  template <class Body>
  void operator()(const Body& body, std::size_t blocks) const {
    const auto slice = std::make_unique<typename Body::Slice>();
    for (std::size_t block = 0; block < blocks; ++block) {
      const typename Body::Tile tile = body.TileOf(block);
      std::vector<typename Body::Sums> sums(kBlockThreads);
      for (std::uint64_t begin = tile.begin; begin < tile.end; begin += kTileDepth) {
        for (unsigned t = 0; t < kBlockThreads; ++t) body.Load(tile, begin, t, *slice);
        for (unsigned t = 0; t < kBlockThreads; ++t) body.Add(tile, begin, t, *slice, sums[t]);
      }
      for (unsigned t = 0; t < kBlockThreads; ++t) body.Store(tile, t, sums[t]);
    }
  }
};

TEST_F(EmulatedMath, ProductsHaveTheBitsOfTheCpu) {
  struct Case {
    std::size_t rows, inner, columns;
  };
  const Case cases[] = {{1 + Below(150), Below(70), 1 + Below(150)},
                        {1, 9000, 1},  // `inner` shared out
                        {3, 4096 + Below(100), 2},
                        {70, 5, 1},
                        {2, 0, 3},
                        {64 * 17, 4200 + Below(90), 1}};  // several blocks in one thread
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (const Case& c : cases) {
      if (c.rows > 1000 && kDTypeOf<T> != DType::kFloat64) continue;  // it takes long
      SCOPED_TRACE(std::to_string(c.rows) + " x " + std::to_string(c.inner) + " x " +
                   std::to_string(c.columns));
      Array<T> a(c.rows * c.inner);
      Array<T> b(c.inner * c.columns);
      RandomizeToAdd(a);
      RandomizeToAdd(b);
      Array<T> expected(c.rows * c.columns);
      Array<T> out(c.rows * c.columns);
      Array<double> scratch(ops::MatrixProductScratchBytes(c.rows, c.inner, c.columns) / 8);
      ops::MatrixProduct(kDTypeOf<T>, a.data(), b.data(), c.rows, c.inner, c.columns,
                         expected.data());
      PlanMatrixProduct(kDTypeOf<T>, a.data(), b.data(), c.rows, c.inner, c.columns, out.data(),
                        scratch.data(), EmulatedTiles{}, launch_);
      ExpectSame(out, expected);
    }
  });
}

// A part of random axes, of elements of random size: each axis a range of an array's, turned
// around, repeated, or whole; then the axes in any order.
class EmulatedParts : public EmulatedMath {
 protected:
  struct Given {
    StridedPart part;
    std::size_t array_elements = 1;
    std::size_t elements = 1;
  };
  Given RandomPart(bool repeats) {
    Given given;
    given.part.axes = Below(5);
    std::vector<std::int64_t> dims;
    for (std::size_t i = 0; i < given.part.axes; ++i) {
      const std::int64_t unit = Below(2) == 0 ? 16 : 1;
      dims.push_back(unit * static_cast<std::int64_t>(1 + Below(6)));
    }
    std::int64_t stride = 1;
    for (std::size_t i = given.part.axes; i-- > 0;) {
      const std::int64_t dim = dims[i];
      std::int64_t extent = dim;
      std::int64_t step = 1;
      std::int64_t begin = 0;
      switch (Below(5)) {
        case 0:  // every other one, from the end
          step = -2;
          extent = (dim + 1) / 2;
          begin = dim - 1;
          break;
        case 1:
          extent = static_cast<std::int64_t>(Below(static_cast<std::size_t>(dim) + 1));
          begin = static_cast<std::int64_t>(Below(static_cast<std::size_t>(dim - extent) + 1));
          break;
        case 2:
          if (repeats) step = 0;
          break;
        default:
          break;
      }
      given.part.extents[i] = extent;
      given.part.strides[i] = step * stride;
      given.part.offset += begin * stride;
      given.elements *= static_cast<std::size_t>(extent);
      stride *= dim;
    }
    given.array_elements = static_cast<std::size_t>(stride);
    if (given.part.axes > 1 && Below(3) == 0) {
      const std::size_t other = Below(given.part.axes);
      std::swap(given.part.extents[0], given.part.extents[other]);
      std::swap(given.part.strides[0], given.part.strides[other]);
    }
    return given;
  }
};

TEST_F(EmulatedParts, AreGatheredAndScatteredLikeOnTheCpu) {
  for (int round = 0; round < Scaled(300); ++round) {
    const std::size_t bytes = std::size_t{1} << Below(4);
    const Given given = RandomPart(/*repeats=*/true);
    if (given.elements > 20000) continue;
    Array<std::uint8_t> array(given.array_elements * bytes, Below(2) * Below(4) * bytes);
    Randomize(array, random_);
    Array<std::uint8_t> packed(given.elements * bytes, Below(2) * Below(4) * bytes);
    Array<std::uint8_t> expected(packed.size());
    ops::Gather(bytes, array.data(), given.part, expected.data());
    PlanPartCopy<false>(bytes, array.data(), given.part, packed.data(), launch_);
    ExpectSame(packed, expected, "gather");
  }
  for (int round = 0; round < Scaled(300); ++round) {
    const std::size_t bytes = std::size_t{1} << Below(4);
    const Given given = RandomPart(/*repeats=*/false);
    if (given.elements > 20000) continue;
    Array<std::uint8_t> array(given.array_elements * bytes, Below(2) * Below(4) * bytes);
    Array<std::uint8_t> expected(array.size());
    Array<std::uint8_t> packed(given.elements * bytes);
    Randomize(array, random_);
    Randomize(packed, random_);
    expected.CopyFrom(array);
    ops::Scatter(bytes, packed.data(), given.part, expected.data());
    PlanPartCopy<true>(bytes, packed.data(), given.part, array.data(), launch_);
    ExpectSame(array, expected, "scatter");
  }
}

TEST(GpuParts, MoveInTheWidestUnitsThatFit) {
  alignas(64) static std::uint8_t memory[256];
  StridedPart rows{.axes = 2, .offset = 0, .extents = {3, 8}, .strides = {16, 1}};
  EXPECT_EQ(InUnits(4, rows, memory, memory).unit, 16U);
  EXPECT_EQ(InUnits(4, rows, memory, memory).part.extents[1], 2);
  EXPECT_EQ(InUnits(4, rows, memory, memory).part.strides[0], 4);
  EXPECT_EQ(InUnits(4, rows, memory + 8, memory).unit, 8U);
  rows.offset = 3;
  EXPECT_EQ(InUnits(4, rows, memory, memory).unit, 4U);
  rows = {.axes = 2, .offset = 4, .extents = {3, 8}, .strides = {8, 1}};  // one piece
  EXPECT_EQ(InUnits(4, rows, memory, memory).part.axes, 1U);
  EXPECT_EQ(InUnits(4, rows, memory, memory).count(), 6U);
  rows = {.axes = 2, .offset = 0, .extents = {8, 8}, .strides = {1, 8}};  // turned
  EXPECT_EQ(InUnits(4, rows, memory, memory).unit, 4U);
  EXPECT_EQ(InUnits(4, rows, memory, memory).count(), 64U);
}

}  // namespace
}  // namespace heddle::ops::cuda
