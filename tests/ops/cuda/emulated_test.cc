// The kernels for GPUs against those of ops/, without a GPU: their launches are planned as for one,
// and the work of each thread runs on the CPU. For every dtype, random sizes and alignments; guards
// around the arrays and checked alignments show accesses that a GPU would fault on.
#include <algorithm>
#include <memory>
#include <string>

#include "ops/cast.h"
#include "ops/cuda/cast_plan.h"
#include "ops/cuda/copy_plan.h"
#include "ops/cuda/elementwise_plan.h"
#include "ops/cuda/sum_plan.h"
#include "ops/elementwise.h"
#include "ops/fill.h"
#include "ops/sum.h"
#include "tests/ops/cuda/emulated_launch.h"
#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::ops::cuda {
namespace {

class EmulatedKernelTest : public KernelTest {
 protected:
  // Now and then more than a block takes.
  std::size_t RandomCountOfBlocks() { return Below(6) == 0 ? Below(20000) : RandomCount(); }
  // Mostly aligned alike; then also otherwise.
  std::size_t RandomOffset(std::size_t common) { return Below(4) == 0 ? Below(16) : common; }

  template <typename T>
  std::unique_ptr<Array<T>> RandomArray(std::size_t count, std::size_t common_offset) {
    auto array = std::make_unique<Array<T>>(count, RandomOffset(common_offset));
    Randomize(*array, random_);
    return array;
  }

  int launches_ = 0;
  const EmulatedLaunch launch_{&launches_};
};

using EmulatedSum = EmulatedKernelTest;

TEST_F(EmulatedSum, HasTheBitsOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < Scaled(12); ++round) {
      const std::size_t count = RandomCountOfBlocks();
      const std::size_t offset = Below(16);
      std::vector<std::unique_ptr<Array<T>>> inputs;
      std::vector<const void*> pointers;
      for (std::size_t k = 0; k <= Below(6); ++k) {
        inputs.push_back(RandomArray<T>(count, offset));
        pointers.push_back(inputs.back()->data());
      }
      Array<T> expected(count);
      ops::Sum(kDTypeOf<T>, pointers, expected.data(), count);
      auto out = RandomArray<T>(count, offset);
      if (Below(3) == 0) out = std::move(inputs[Below(inputs.size())]);  // in place
      const SumTask task{pointers, out->data(), count};
      PlanSums(kDTypeOf<T>, {&task, 1}, launch_);
      ExpectSame(*out, expected);
    }
  });
}

// In several launches, between which 16-bit sums are not rounded; in place, too.
TEST_F(EmulatedSum, OfMoreInputsThanALaunchTakesHasTheBitsOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (const std::size_t size :
         {kGpuSumInputsMax, kGpuSumInputsMax + 1, 2 * kGpuSumInputsMax + Below(9)}) {
      const std::size_t count = 1 + Below(60);
      const std::size_t offset = Below(16);
      std::vector<std::unique_ptr<Array<T>>> inputs;
      std::vector<const void*> pointers;
      for (std::size_t k = 0; k < size; ++k) {
        inputs.push_back(RandomArray<T>(count, offset));
        pointers.push_back(inputs.back()->data());
      }
      Array<T> expected(count);
      ops::Sum(kDTypeOf<T>, pointers, expected.data(), count);
      Array<std::uint8_t> carry(count * SizeOf(CarryDType(kDTypeOf<T>)));
      Array<T>& out = *inputs[Below(size)];
      const SumTask task{pointers, out.data(), count, carry.data()};
      launches_ = 0;
      PlanSums(kDTypeOf<T>, {&task, 1}, launch_);
      EXPECT_EQ(launches_, (size + kGpuSumInputsMax - 1) / kGpuSumInputsMax);
      ExpectSame(out, expected);
    }
  });
}

TEST_F(EmulatedSum, ManySmallSumsTakeFewLaunches) {
  constexpr std::size_t kKeys = 161;
  for (std::size_t inputs : {1, 2, 8}) {
    std::vector<std::unique_ptr<Array<float>>> arrays;
    std::vector<std::unique_ptr<Array<float>>> outs;
    std::vector<std::vector<const void*>> pointers(kKeys);
    std::vector<SumTask> tasks;
    for (std::size_t key = 0; key < kKeys; ++key) {
      const std::size_t count = RandomCount();
      for (std::size_t k = 0; k < inputs; ++k) {
        arrays.push_back(RandomArray<float>(count, 0));
        pointers[key].push_back(arrays.back()->data());
      }
      outs.push_back(RandomArray<float>(count, 0));
      tasks.push_back({pointers[key], outs.back()->data(), count});
    }
    launches_ = 0;
    PlanSums(DType::kFloat32, tasks, launch_);
    EXPECT_LE(launches_, 5) << inputs << " inputs";
    for (std::size_t key = 0; key < kKeys; ++key) {
      Array<float> expected(tasks[key].count);
      ops::Sum(DType::kFloat32, pointers[key], expected.data(), expected.size());
      ExpectSame(*outs[key], expected, "key " + std::to_string(key));
    }
  }
}

TEST_F(EmulatedSum, ANumberOfInputsThatDoesNotFitIsAnErrorBeforeAnyLaunch) {
  Array<float> array(4);
  const std::vector<const void*> fits(kGpuSumInputsMax, array.data());
  const std::vector<const void*> too_many(kGpuSumInputsMax + 1, array.data());
  Array<float> out(4);
  out[0] = 7;
  const SumTask tasks[] = {{fits, out.data(), 4}, {too_many, out.data(), 4}};
  try {
    PlanSums(DType::kFloat32, tasks, launch_);
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "sum on a GPU: expected 1 to 288 inputs, or memory to put sums aside, got 289");
  }
  EXPECT_EQ(launches_, 0);
  EXPECT_EQ(out[0], 7);
  PlanSums(DType::kFloat32, {tasks, 1}, launch_);
  EXPECT_EQ(launches_, 1);
}

using EmulatedCopy = EmulatedKernelTest;

TEST_F(EmulatedCopy, CopiesEveryByteAtAnyAlignment) {
  for (int round = 0; round < Scaled(30); ++round) {
    std::vector<std::unique_ptr<Array<std::uint8_t>>> sources;
    std::vector<std::unique_ptr<Array<std::uint8_t>>> outs;
    std::vector<CopyTask> tasks;
    for (std::size_t i = 0; i < 1 + Below(5); ++i) {
      const std::size_t unit = std::size_t{1} << Below(5);
      const std::size_t bytes = RandomCountOfBlocks() * unit;
      sources.push_back(std::make_unique<Array<std::uint8_t>>(bytes, Below(8) * unit));
      outs.push_back(std::make_unique<Array<std::uint8_t>>(bytes, Below(8) * unit));
      Randomize(*sources.back(), random_);
      tasks.push_back({sources.back()->data(), outs.back()->data(), bytes});
    }
    PlanCopies(tasks, launch_);
    for (std::size_t i = 0; i < tasks.size(); ++i) ExpectSame(*outs[i], *sources[i]);
  }
}

TEST_F(EmulatedCopy, ManySmallCopiesTakeFewLaunches) {
  Array<float> source(100);
  Array<float> out(161 * 100);
  std::vector<CopyTask> tasks;
  for (std::size_t i = 0; i < 161; ++i) {
    tasks.push_back({source.data(), out.data() + 100 * i, 100 * sizeof(float)});
  }
  PlanCopies(tasks, launch_);
  EXPECT_LE(launches_, 2);
}

TEST_F(EmulatedCopy, FillsLikeTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (const Scalar value : {Scalar(0), Scalar(-3), Scalar(2.7), Scalar(1e30)}) {
      Array<T> expected(RandomCountOfBlocks());
      ops::Fill(kDTypeOf<T>, value, expected.data(), expected.size());
      auto out = RandomArray<T>(expected.size(), Below(16));
      const FillTask task{out->data(), out->size()};
      PlanFills(kDTypeOf<T>, value, {&task, 1}, launch_);
      ExpectSame(*out, expected);
    }
  });
}

using EmulatedCast = EmulatedKernelTest;

TEST_F(EmulatedCast, HasTheBitsOfTheCpuForEveryPair) {
  ForEveryDType([&](auto from_type) {
    using From = typename decltype(from_type)::type;
    ForEveryDType([&](auto to_type) {
      using To = typename decltype(to_type)::type;
      const std::size_t offset = Below(16);
      const auto source = RandomArray<From>(RandomCount() + Below(2) * 6000, offset);
      Array<To> expected(source->size());
      ops::Cast(kDTypeOf<From>, source->data(), kDTypeOf<To>, expected.data(), source->size());
      Array<To> out(source->size(), RandomOffset(offset));
      const CastTask task{source->data(), out.data(), source->size()};
      PlanCasts(kDTypeOf<From>, kDTypeOf<To>, {&task, 1}, launch_);
      ExpectSame(out, expected);
    });
  });
}

using EmulatedElementwise = EmulatedKernelTest;

TEST_F(EmulatedElementwise, HasTheBitsOfTheCpu) {
  constexpr BinaryOp kOps[] = {BinaryOp::kAdd, BinaryOp::kSubtract, BinaryOp::kMultiply,
                               BinaryOp::kDivide};
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    constexpr DType kDType = kDTypeOf<T>;
    for (BinaryOp op : kOps) {
      const std::size_t count = RandomCountOfBlocks();
      const std::size_t offset = Below(16);
      const auto a = RandomArray<T>(count, offset);
      const auto b = RandomArray<T>(count, offset);
      const Scalar number = Below(2) == 0 ? Scalar(-3) : Scalar(0.3);
      Array<T> expected(count);
      Array<T> out(count, RandomOffset(offset));

      ops::Binary(op, kDType, a->data(), b->data(), expected.data(), count);
      PlanBinary(op, kDType, a->data(), 0, b->data(), 0, out.data(), count, launch_);
      ExpectSame(out, expected, "array, array");

      ops::BinaryWithScalar(op, kDType, number, b->data(), expected.data(), count);
      PlanBinary(op, kDType, nullptr, number, b->data(), 0, out.data(), count, launch_);
      ExpectSame(out, expected, "number, array");

      ops::BinaryWithScalar(op, kDType, a->data(), number, expected.data(), count);
      PlanBinary(op, kDType, a->data(), 0, nullptr, number, a->data(), count, launch_);
      ExpectSame(*a, expected, "array, number, in place");
    }
  });
}

TEST_F(EmulatedElementwise, NoElementsAreNoLaunch) {
  PlanBinary(BinaryOp::kAdd, DType::kFloat32, nullptr, 0, nullptr, 0, nullptr, 0, launch_);
  EXPECT_EQ(launches_, 0);
}

// ---- How elements are shared out

TEST(GpuRun, HeadReachesTheFirstVectorOfArraysThatAreAlignedAlike) {
  alignas(64) static char memory[256];
  const auto at = [](std::size_t bytes) { return memory + bytes; };
  EXPECT_EQ(MakeRun(100, 4, {{at(0), 4}, {at(64), 4}}).head, 0U);
  EXPECT_EQ(MakeRun(100, 4, {{at(4), 4}, {at(20), 4}}).head, 3U);
  EXPECT_EQ(MakeRun(100, 4, {{at(4), 4}, {at(2), 2}, {nullptr, 4}}).head, 3U);
  EXPECT_EQ(MakeRun(2, 4, {{at(4), 4}}).head, 2U);  // no more than there are
  EXPECT_EQ(MakeRun(100, 4, {{at(4), 4}, {at(8), 4}}).head, Run::kNotAlike);
}

TEST(GpuRun, EveryBlockOfATableBelongsToItsTask) {
  constexpr std::uint32_t kEnds[] = {1, 5, 6, 20, 21};
  std::uint32_t task = 0;
  for (std::uint32_t block = 0; block < 21; ++block) {
    while (kEnds[task] <= block) ++task;
    EXPECT_EQ(TaskOfBlock(kEnds, 5, block), task);
  }
  EXPECT_EQ(TaskOfBlock(kEnds, 1, 0), 0U);
}

}  // namespace
}  // namespace heddle::ops::cuda
