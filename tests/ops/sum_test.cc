// Sum against the plain loop of its contract: on every SIMD target, for every dtype, for random
// sizes, alignments and numbers of inputs.
#include "ops/sum.h"

#include <memory>
#include <vector>

#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::ops {
namespace {

template <typename T>
using Arrays = std::vector<std::unique_ptr<Array<T>>>;

template <typename T>
std::vector<const void*> Pointers(Arrays<T>& arrays, std::size_t begin = 0) {
  std::vector<const void*> pointers;
  for (auto& array : arrays) pointers.push_back(array->data() + begin);
  return pointers;
}

template <typename T>
void PlainSum(Arrays<T>& inputs, Array<T>& out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    if constexpr (std::is_same_v<T, bool>) {
      bool any = false;
      for (auto& input : inputs) any = any || (*input)[i] != 0;
      out[i] = any ? 1 : 0;
    } else if constexpr (std::is_integral_v<T>) {
      std::uint64_t sum = 0;
      for (auto& input : inputs) sum += static_cast<std::uint64_t>((*input)[i]);
      out[i] = static_cast<T>(sum);
    } else {
      auto sum = static_cast<ComputeType<T>>((*inputs[0])[i]);
      for (std::size_t k = 1; k < inputs.size(); ++k) {
        sum += static_cast<ComputeType<T>>((*inputs[k])[i]);
      }
      out[i] = static_cast<T>(sum);
    }
  }
}

class SumTest : public KernelTest {
 protected:
  template <typename T>
  Arrays<T> RandomArrays(std::size_t arrays, std::size_t count) {
    Arrays<T> result;
    for (std::size_t k = 0; k < arrays; ++k) {
      result.push_back(std::make_unique<Array<T>>(count, Below(3) == 0 ? Below(64) : 0));
      Randomize(*result.back(), random_);
    }
    return result;
  }
};

TEST_F(SumTest, EqualsThePlainLoop) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < Scaled(60); ++round) {
      const std::size_t count = RandomCount();
      Arrays<T> inputs = RandomArrays<T>(1 + Below(17), count);
      Array<T> expected(count);
      PlainSum(inputs, expected);
      OnEveryTarget([&] {
        for (StoreMode mode : kEveryStoreMode) {
          Array<T> out(count, Below(2) == 0 ? 0 : Below(64));
          Sum(kDTypeOf<T>, Pointers(inputs), out.data(), count, mode);
          ExpectSame(out, expected);
        }
      });
    }
  });
}

// More inputs than stream at a time, and more elements than lie in the caches meanwhile.
TEST_F(SumTest, ManyInputsThatStream) {
  const auto check = [&](auto type) {
    using T = decltype(type);
    const std::vector<std::size_t> all = {8, 9, 12, 16, 17, 24, 35};
    for (std::size_t arrays : kSanitized ? std::vector<std::size_t>{9, 17} : all) {
      SCOPED_TRACE(arrays);
      // A few more than stream at a time do so in groups from that many bytes on only.
      const bool a_few_more = arrays == (sizeof(T) < sizeof(float) ? 12 : 9);
      const std::size_t beyond_caches = kStreamingBytesMin / ((arrays + 1) * sizeof(T)) + 1;
      const std::size_t count = (a_few_more ? beyond_caches : 65536 - 70) + Below(140);
      Arrays<T> inputs = RandomArrays<T>(arrays, count);
      Array<T> expected(count);
      PlainSum(inputs, expected);
      OnEveryTarget([&] {
        Array<T> out(count, Below(64));
        Sum(kDTypeOf<T>, Pointers(inputs), out.data(), count, StoreMode::kStreaming);
        ExpectSame(out, expected);
      });
    }
  };
  check(float{});
  check(BFloat16{});
}

TEST_F(SumTest, MayWriteOverAnInput) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    OnEveryTarget([&] {
      for (std::size_t target = 0; target < 3; ++target) {
        const std::size_t count = 700;
        Arrays<T> inputs = RandomArrays<T>(3, count);
        Array<T> expected(count);
        PlainSum(inputs, expected);
        Sum(kDTypeOf<T>, Pointers(inputs), inputs[target]->data(), count, StoreMode::kStreaming);
        ExpectSame(*inputs[target], expected);
      }
    });
  });
}

TEST_F(SumTest, EveryCutGivesTheSameBits) {
  constexpr std::size_t kCount = 300;
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    Arrays<T> inputs = RandomArrays<T>(3, kCount);
    Array<T> expected(kCount);
    PlainSum(inputs, expected);
    OnEveryTarget([&] {
      for (std::size_t cut = 0; cut <= kCount; ++cut) {
        const StoreMode mode = kEveryStoreMode[cut % 3];
        Array<T> out(kCount);
        Sum(kDTypeOf<T>, Pointers(inputs), out.data(), cut, mode);
        Sum(kDTypeOf<T>, Pointers(inputs, cut), out.data() + cut, kCount - cut, mode);
        ExpectSame(out, expected);
      }
    });
  });
}

TEST_F(SumTest, AddsInListOrder) {
  const float values[] = {1e8f, 1, -1e8f, 3};
  const void* inputs[] = {&values[0], &values[1], &values[2], &values[3]};
  const void* reordered[] = {&values[0], &values[2], &values[1], &values[3]};
  OnEveryTarget([&] {
    float out = 0;
    Sum(DType::kFloat32, inputs, &out, 1);
    EXPECT_EQ(out, 3);  // 1e8 + 1 is 1e8
    Sum(DType::kFloat32, reordered, &out, 1);
    EXPECT_EQ(out, 4);
  });
}

// 256 + 1 is no bfloat16: rounding after each addition would stay at 256.
TEST_F(SumTest, SixteenBitFloatsRoundOnce) {
  std::vector<BFloat16> large(100, BFloat16(256));
  std::vector<BFloat16> one(100, BFloat16(1));
  const void* inputs[] = {large.data(), one.data(), one.data(), one.data(), one.data()};
  OnEveryTarget([&] {
    std::vector<BFloat16> out(100);
    Sum(DType::kBFloat16, inputs, out.data(), out.size());
    for (BFloat16 value : out) EXPECT_EQ(static_cast<float>(value), 260);
  });
}

// Large enough that the automatic choice streams.
TEST_F(SumTest, LargeArraysStreamByThemselves) {
  const std::size_t count = kStreamingBytesMin / sizeof(float) / 3 + 1001;
  std::vector<float> a(count);
  std::vector<float> b(count);
  for (std::size_t i = 0; i < count; ++i) {
    a[i] = static_cast<float>(i);
    b[i] = 0.5f;
  }
  const void* inputs[] = {a.data() + 1, b.data() + 1};
  std::vector<float> out(count);
  Sum(DType::kFloat32, inputs, out.data() + 1, count - 1);
  for (std::size_t i = 1; i < count; ++i) ASSERT_EQ(out[i], a[i] + 0.5f) << i;
  EXPECT_EQ(out[0], 0);
}

}  // namespace
}  // namespace heddle::ops
