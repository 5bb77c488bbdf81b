// The kernels on a GPU against those of ops/ on the CPU. emulated_test.cc has the thorough
// comparisons of what threads do; here the compiler and the hardware do it.
#include <memory>

#include "ops/cast.h"
#include "ops/cuda/cast.h"
#include "ops/cuda/copy.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/quantise.h"
#include "ops/cuda/sum.h"
#include "ops/elementwise.h"
#include "ops/fill.h"
#include "ops/quantise.h"
#include "ops/sum.h"
#include "tests/ops/cuda/device_array.h"

namespace heddle::ops::cuda {
namespace {

using GpuSum = GpuKernelTest;

TEST_F(GpuSum, HasTheBitsOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < 4; ++round) {
      const std::size_t count = RandomCountOfBlocks();
      const std::size_t offset = Below(8);
      std::vector<std::unique_ptr<Array<T>>> inputs;
      std::vector<std::unique_ptr<DeviceArray<T>>> device_inputs;
      std::vector<const void*> pointers;
      std::vector<const void*> device_pointers;
      for (std::size_t k = 0; k <= Below(5); ++k) {
        inputs.push_back(std::make_unique<Array<T>>(count));
        Randomize(*inputs.back(), random_);
        device_inputs.push_back(
            std::make_unique<DeviceArray<T>>(*inputs.back(), Below(4) == 0 ? Below(8) : offset));
        pointers.push_back(inputs.back()->data());
        device_pointers.push_back(device_inputs.back()->data());
      }
      Array<T> expected(count);
      ops::Sum(kDTypeOf<T>, pointers, expected.data(), count);
      DeviceArray<T> out(*inputs[0], offset);
      const SumTask task{device_pointers, out.data(), count};
      Sum(kDTypeOf<T>, {&task, 1}, nullptr);
      out.ExpectSameAs(expected);
    }
  });
}

using GpuCopy = GpuKernelTest;

TEST_F(GpuCopy, CopiesAndFillsLikeTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    Array<T> source(RandomCountOfBlocks());
    Randomize(source, random_);
    DeviceArray<T> device_source(source, Below(8));
    Array<T> expected(source.size());
    ops::Fill(kDTypeOf<T>, 2.7, expected.data(), expected.size());
    DeviceArray<T> out(source, Below(8));
    const FillTask fill{out.data(), out.size()};
    Fill(kDTypeOf<T>, 2.7, {&fill, 1}, nullptr);
    out.ExpectSameAs(expected, "fill");
    const CopyTask copy{device_source.data(), out.data(), source.size() * sizeof(T)};
    Copy({&copy, 1}, nullptr);
    out.ExpectSameAs(source, "copy");
  });
}

using GpuCast = GpuKernelTest;

TEST_F(GpuCast, HasTheBitsOfTheCpuForEveryPair) {
  ForEveryDType([&](auto from_type) {
    using From = typename decltype(from_type)::type;
    Array<From> source(10000 + Below(5));
    Randomize(source, random_);
    DeviceArray<From> device_source(source);
    ForEveryDType([&](auto to_type) {
      using To = typename decltype(to_type)::type;
      Array<To> expected(source.size());
      ops::Cast(kDTypeOf<From>, source.data(), kDTypeOf<To>, expected.data(), source.size());
      DeviceArray<To> out(expected);
      const FillTask fill{out.data(), out.size()};
      Fill(kDTypeOf<To>, 1, {&fill, 1}, nullptr);
      const CastTask task{device_source.data(), out.data(), source.size()};
      Cast(kDTypeOf<From>, kDTypeOf<To>, {&task, 1}, nullptr);
      out.ExpectSameAs(expected);
    });
  });
}

using GpuElementwise = GpuKernelTest;

TEST_F(GpuElementwise, HasTheBitsOfTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    constexpr DType kDType = kDTypeOf<T>;
    Array<T> a(RandomCountOfBlocks());
    Array<T> b(a.size());
    Array<T> expected(a.size());
    Randomize(a, random_);
    Randomize(b, random_);
    DeviceArray<T> device_a(a);
    DeviceArray<T> device_b(b);
    DeviceArray<T> out(a);
    for (BinaryOp op :
         {BinaryOp::kAdd, BinaryOp::kSubtract, BinaryOp::kMultiply, BinaryOp::kDivide}) {
      ops::Binary(op, kDType, a.data(), b.data(), expected.data(), a.size());
      Binary(op, kDType, device_a.data(), device_b.data(), out.data(), a.size(), nullptr);
      out.ExpectSameAs(expected, "array, array");
      ops::BinaryWithScalar(op, kDType, 0.3, b.data(), expected.data(), a.size());
      BinaryWithScalar(op, kDType, 0.3, device_b.data(), out.data(), a.size(), nullptr);
      out.ExpectSameAs(expected, "number, array");
    }
  });
}

class GpuQuantise : public GpuKernelTest {
 protected:
  template <typename T>
  void CompareWithCpu(bool two_bit) {
    const std::size_t count = RandomCountOfBlocks();
    const std::size_t code_bytes = two_bit ? TwoBitCodeBytes(count) : OneBitCodeBytes(count);
    Array<T> gradient(count);
    Array<float> residual(count);
    Array<std::uint8_t> code(code_bytes);
    Randomize(gradient, random_);
    Randomize(residual, random_);
    DeviceArray<T> device_gradient(gradient);
    DeviceArray<float> device_residual(residual, Below(2));
    DeviceArray<std::uint8_t> device_code(code);

    (two_bit ? &ops::QuantiseTwoBit : &ops::QuantiseOneBit)(0.5F, kDTypeOf<T>, gradient.data(),
                                                            residual.data(), code.data(), count);
    const QuantiseTask task{device_gradient.data(), device_residual.data(), device_code.data(),
                            count};
    (two_bit ? &QuantiseTwoBit : &QuantiseOneBit)(0.5F, kDTypeOf<T>, {&task, 1}, nullptr);
    device_code.ExpectSameAs(code, "code");
    device_residual.ExpectSameAs(residual, "residual");

    const DequantiseTask back{device_code.data(), device_residual.data(), count};
    if (two_bit) {
      ops::DequantiseTwoBit(0.5F, code.data(), residual.data(), count);
      DequantiseTwoBit(0.5F, {&back, 1}, nullptr);
    } else {
      ops::DequantiseOneBit(code.data(), residual.data(), count);
      DequantiseOneBit({&back, 1}, nullptr);
    }
    device_residual.ExpectSameAs(residual, "value");

    const std::vector<const void*> codes(3, device_code.data());
    for (std::size_t i = 0; i < count; ++i) {
      residual.data()[i] = residual.data()[i] + residual.data()[i] + residual.data()[i];
    }
    Array<T> sum(count);
    ops::Cast(DType::kFloat32, residual.data(), kDTypeOf<T>, sum.data(), count);
    if (two_bit) {
      SumTwoBit(0.5F, codes, kDTypeOf<T>, device_gradient.data(), nullptr, count, nullptr);
    } else {
      SumOneBit(codes, kDTypeOf<T>, device_gradient.data(), nullptr, count, nullptr);
    }
    device_gradient.ExpectSameAs(sum, "sum");
  }
};

TEST_F(GpuQuantise, HasTheBitsOfTheCpu) {
  for (bool two_bit : {true, false}) {
    CompareWithCpu<float>(two_bit);
    CompareWithCpu<Float16>(two_bit);
    CompareWithCpu<BFloat16>(two_bit);
  }
}

}  // namespace
}  // namespace heddle::ops::cuda
