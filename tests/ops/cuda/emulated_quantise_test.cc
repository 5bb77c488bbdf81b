// Quantising as a GPU's threads do it, against the CPU's kernels: codes, residuals and values bit
// by bit.
#include <heddle/error.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/cast.h"
#include "ops/cuda/quantise_plan.h"
#include "ops/quantise.h"
#include "tests/ops/cuda/emulated_launch.h"
#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::ops::cuda {
namespace {

class EmulatedQuantise : public KernelTest {
 protected:
  std::size_t RandomCountOfBlocks() { return Below(6) == 0 ? Below(20000) : RandomCount(); }

  template <int kBits, typename T>
  void CompareWithCpu(std::size_t count, std::size_t offset) {
    constexpr auto kCodeBytes = kBits == 2 ? &TwoBitCodeBytes : &OneBitCodeBytes;
    const float threshold = Below(2) == 0 ? 0.5F : 1.25F;
    Array<T> gradient(count, offset);
    Array<float> residual(count, Below(4) == 0 ? Below(8) : offset);
    Randomize(gradient, random_);
    Randomize(residual, random_);
    if (count > 0)
      residual[Below(count)] = threshold;  // with a gradient of 0: the threshold itself
    Array<float> expected_residual(count);
    expected_residual.CopyFrom(residual);
    Array<std::uint8_t> code(kCodeBytes(count), Below(3));
    Array<std::uint8_t> expected_code(code.size());

    (kBits == 2 ? &ops::QuantiseTwoBit : &ops::QuantiseOneBit)(
        threshold, kDTypeOf<T>, gradient.data(), expected_residual.data(), expected_code.data(),
        count);
    const QuantiseTask task{gradient.data(), residual.data(), code.data(), count};
    PlanQuantise<kBits>(threshold, kDTypeOf<T>, {&task, 1}, launch_);
    ExpectSame(code, expected_code, "code");
    ExpectSame(residual, expected_residual, "residual");

    Randomize(code, random_);  // any bits, also those that quantising never writes
    Array<float> out(count, Below(2) * Below(8));
    Array<float> expected(count);
    if constexpr (kBits == 2) {
      ops::DequantiseTwoBit(threshold, code.data(), expected.data(), count);
    } else {
      ops::DequantiseOneBit(code.data(), expected.data(), count);
    }
    const DequantiseTask back{code.data(), out.data(), count};
    PlanDequantise<kBits>(threshold, {&back, 1}, launch_);
    ExpectSame(out, expected, "value");
  }

  // Any bits as codes; the sum in float32, in their order, rounded once.
  template <int kBits, typename T>
  void CompareSumWithCpu(std::size_t count) {
    const float threshold = 0.375F;
    std::vector<std::unique_ptr<Array<std::uint8_t>>> codes;
    std::vector<const void*> pointers;
    std::vector<float> sum(count);
    std::vector<float> values(count);
    const std::size_t size = count < 100 && Below(6) == 0 ? 250 + Below(400) : 1 + Below(5);
    for (std::size_t k = 0; k < size; ++k) {
      codes.push_back(std::make_unique<Array<std::uint8_t>>(
          kBits == 2 ? TwoBitCodeBytes(count) : OneBitCodeBytes(count), Below(3)));
      Randomize(*codes.back(), random_);
      pointers.push_back(codes.back()->data());
      if constexpr (kBits == 2) {
        ops::DequantiseTwoBit(threshold, pointers.back(), values.data(), count);
      } else {
        ops::DequantiseOneBit(pointers.back(), values.data(), count);
      }
      for (std::size_t i = 0; i < count; ++i) sum[i] = k == 0 ? values[i] : sum[i] + values[i];
    }
    Array<T> expected(count);
    ops::Cast(DType::kFloat32, sum.data(), kDTypeOf<T>, expected.data(), count);
    Array<T> out(count, Below(2) * Below(8));
    Array<float> carry(count);
    PlanCodeSum<kBits>(threshold, pointers, kDTypeOf<T>, out.data(), carry.data(), count, launch_);
    ExpectSame(out, expected, "sum");
  }

  int launches_ = 0;
  const EmulatedLaunch launch_{&launches_};
};

TEST_F(EmulatedQuantise, HasTheBitsOfTheCpu) {
  for (int round = 0; round < Scaled(40); ++round) {
    const std::size_t count = RandomCountOfBlocks();
    const std::size_t offset = Below(2) * Below(8);
    CompareWithCpu<2, float>(count, offset);
    CompareWithCpu<2, Float16>(count, offset);
    CompareWithCpu<2, BFloat16>(count, offset);
    CompareWithCpu<1, float>(count, offset);
    CompareWithCpu<1, Float16>(count, offset);
    CompareWithCpu<1, BFloat16>(count, offset);
  }
}

TEST_F(EmulatedQuantise, SumsOfCodesHaveTheBitsOfTheCpu) {
  for (int round = 0; round < Scaled(40); ++round) {
    const std::size_t count = RandomCountOfBlocks();
    CompareSumWithCpu<2, float>(count);
    CompareSumWithCpu<2, Float16>(count);
    CompareSumWithCpu<1, BFloat16>(count);
    CompareSumWithCpu<1, float>(count);
  }
}

// As many as a launch takes, and no more without memory to put the sum aside.
TEST_F(EmulatedQuantise, ASumTakesAsManyCodesAsItSays) {
  const std::vector<std::uint8_t> code(4, 0xFF);  // 16 times the threshold
  const std::vector<const void*> codes(kGpuSumInputsMax + 1, code.data());
  const auto fits = std::span(codes).first(kGpuSumInputsMax);
  float out[3] = {};
  float carry[3] = {};
  PlanCodeSum<2>(0.5F, fits, DType::kFloat32, out, nullptr, 3, launch_);
  EXPECT_EQ(out[0], kGpuSumInputsMax * 0.5F);
  EXPECT_EQ(out[2], kGpuSumInputsMax * 0.5F);
  EXPECT_EQ(launches_, 1);
  EXPECT_THROW(PlanCodeSum<2>(0.5F, codes, DType::kFloat32, out, nullptr, 3, launch_),
               InvalidArgument);
  EXPECT_THROW(PlanCodeSum<2>(0.5F, {}, DType::kFloat32, out, carry, 3, launch_), InvalidArgument);
  EXPECT_EQ(launches_, 1);
  PlanCodeSum<2>(0.5F, codes, DType::kFloat32, out, carry, 3, launch_);
  EXPECT_EQ(out[0], (kGpuSumInputsMax + 1) * 0.5F);
  EXPECT_EQ(out[2], (kGpuSumInputsMax + 1) * 0.5F);
  EXPECT_EQ(launches_, 3);
}

TEST_F(EmulatedQuantise, LaysBitsOutAsDocumented) {
  alignas(16) float gradient[4] = {0.6F, -0.7F, 0.1F, 0.5F};
  alignas(16) float residual[4] = {};
  std::uint8_t code[4] = {9, 9, 9, 9};
  const QuantiseTask task{gradient, residual, code, 4};
  PlanQuantise<2>(0.5F, DType::kFloat32, {&task, 1}, launch_);
  EXPECT_EQ(code[0], 0xE3);
  EXPECT_EQ(code[1] | code[2] | code[3], 0);
}

TEST_F(EmulatedQuantise, ManySmallArraysTakeFewLaunches) {
  std::vector<std::unique_ptr<Array<float>>> gradients;
  std::vector<std::unique_ptr<Array<float>>> residuals;
  std::vector<std::unique_ptr<Array<std::uint8_t>>> codes;
  std::vector<QuantiseTask> tasks;
  for (int i = 0; i < 161; ++i) {
    const std::size_t count = 1 + Below(300);
    gradients.push_back(std::make_unique<Array<float>>(count));
    residuals.push_back(std::make_unique<Array<float>>(count));
    codes.push_back(std::make_unique<Array<std::uint8_t>>(TwoBitCodeBytes(count)));
    Randomize(*gradients.back(), random_);
    tasks.push_back(
        {gradients.back()->data(), residuals.back()->data(), codes.back()->data(), count});
    std::fill_n(residuals.back()->data(), count, 0.0F);
  }
  PlanQuantise<2>(0.5F, DType::kFloat32, tasks, launch_);
  EXPECT_LE(launches_, 3);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    Array<std::uint8_t> expected(codes[i]->size());
    Array<float> residual(tasks[i].count);
    std::fill_n(residual.data(), residual.size(), 0.0F);
    ops::QuantiseTwoBit(0.5F, DType::kFloat32, tasks[i].gradient, residual.data(), expected.data(),
                        tasks[i].count);
    ExpectSame(*codes[i], expected, "array " + std::to_string(i));
  }
}

TEST_F(EmulatedQuantise, AnotherDTypeIsAnErrorThatNamesIt) {
  std::uint8_t code = 9;
  const QuantiseTask task{nullptr, nullptr, &code, 4};
  try {
    PlanQuantise<2>(0.5F, DType::kFloat64, {&task, 1}, launch_);
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "quantise: expected float32, float16 or bfloat16, got float64");
  }
  EXPECT_EQ(launches_, 0);
}

}  // namespace
}  // namespace heddle::ops::cuda
