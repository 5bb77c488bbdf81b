// The SGD updates against the formula of their contract, element by element.
#include "ops/sgd.h"

#include <heddle/error.h>

#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

template <typename C>
C Clip(C value, C limit) {
  if (value < -limit) return -limit;
  return value > limit ? limit : value;
}

// Returns the new weight; m becomes the new momentum.
template <typename C>
C PlainUpdate(const SgdParams& params, C w, C g, C& m, bool has_momentum) {
  const C rate = static_cast<C>(params.learning_rate);
  const C rescale = static_cast<C>(params.rescale);
  const C decay = rate * static_cast<C>(params.weight_decay);
  m = (has_momentum ? static_cast<C>(params.momentum) * m : C{0}) - decay * w;
  if (params.clip >= 0) {
    m = m - rate * Clip(rescale * g, static_cast<C>(params.clip));
  } else {
    m = m - (rate * rescale) * g;
  }
  return w + m;
}

class SgdTest : public KernelTest {
 protected:
  SgdParams RandomParams() {
    return {.learning_rate = 0.01 + 0.1 * static_cast<double>(Below(10)),
            .momentum = Below(2) == 0 ? 0 : 0.9,
            .weight_decay = Below(2) == 0 ? 0 : 1e-2,
            .rescale = Below(2) == 0 ? 1 : 1.0 / 3,
            .clip = Below(2) == 0 ? -1 : 0.5};
  }
};

TEST_F(SgdTest, EqualsThePlainLoopForAnyCut) {
  ForEveryFloatingDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = ComputeType<T>;
    for (int round = 0; round < 60; ++round) {
      const SgdParams params = RandomParams();
      const bool has_momentum = Below(2) == 0;
      const std::size_t count = RandomCount();
      Array<T> w(count), g(count, Below(64)), m(count), expected_w(count), expected_m(count);
      Randomize(w, random_);
      Randomize(g, random_);
      Randomize(m, random_);
      for (std::size_t i = 0; i < count; ++i) {
        C momentum = static_cast<C>(m[i]);
        expected_w[i] = static_cast<T>(PlainUpdate(params, static_cast<C>(w[i]),
                                                   static_cast<C>(g[i]), momentum, has_momentum));
        expected_m[i] = has_momentum ? static_cast<T>(momentum) : m[i];
      }
      const std::size_t cut = Below(count + 1);
      OnEveryTarget([&] {
        Array<T> new_w(count, Below(64)), new_m(count, Below(64));
        new_w.CopyFrom(w);
        new_m.CopyFrom(m);
        T* momentum = has_momentum ? new_m.data() : nullptr;
        SgdUpdate(params, kDTypeOf<T>, new_w.data(), g.data(), momentum, cut);
        SgdUpdate(params, kDTypeOf<T>, new_w.data() + cut, g.data() + cut,
                  has_momentum ? momentum + cut : nullptr, count - cut);
        ExpectSame(new_w, expected_w, "weight");
        ExpectSame(new_m, expected_m, "momentum");
      });
    }
  });
}

template <typename T>
void CheckMultiPrecision(const SgdParams& params, bool has_momentum, std::size_t count,
                         std::mt19937_64& random) {
  Array<T> g(count), expected_w(count);
  Array<float> master(count), m(count), expected_master(count), expected_m(count);
  Randomize(g, random);
  Randomize(master, random);
  Randomize(m, random);
  for (std::size_t i = 0; i < count; ++i) {
    float momentum = m[i];
    expected_master[i] =
        PlainUpdate(params, master[i], static_cast<float>(g[i]), momentum, has_momentum);
    expected_m[i] = has_momentum ? momentum : m[i];
    expected_w[i] = T(expected_master[i]);
  }
  OnEveryTarget([&] {
    Array<T> new_w(count, 3);
    Array<float> new_master(count, 5), new_m(count, 1);
    new_master.CopyFrom(master);
    new_m.CopyFrom(m);
    SgdUpdateMultiPrecision(params, kDTypeOf<T>, new_w.data(), g.data(), new_master.data(),
                            has_momentum ? new_m.data() : nullptr, count);
    ExpectSame(new_w, expected_w, "weight");
    ExpectSame(new_master, expected_master, "master");
    ExpectSame(new_m, expected_m, "momentum");
  });
}

TEST_F(SgdTest, MultiPrecisionEqualsThePlainLoop) {
  for (int round = 0; round < 60; ++round) {
    CheckMultiPrecision<Float16>(RandomParams(), Below(2) == 0, RandomCount(), random_);
    CheckMultiPrecision<BFloat16>(RandomParams(), Below(2) == 0, RandomCount(), random_);
  }
}

TEST_F(SgdTest, DefaultStepFromZeroIsTheLearningRate) {
  float w = 0;
  const float g = 1;
  SgdUpdate({}, DType::kFloat32, &w, &g, nullptr, 1);
  EXPECT_EQ(w, -0.01f);
}

TEST_F(SgdTest, ClippingKeepsNaN) {
  std::vector<float> w(40, 1.0f);
  const std::vector<float> g(40, std::nanf(""));
  OnEveryTarget([&] {
    std::vector<float> updated = w;
    SgdUpdate({.clip = 1}, DType::kFloat32, updated.data(), g.data(), nullptr, updated.size());
    for (float value : updated) EXPECT_TRUE(std::isnan(value));
  });
}

TEST_F(SgdTest, RefusesOtherDTypes) {
  std::int32_t w = 5;
  const std::int32_t g = 1;
  EXPECT_THROW(SgdUpdate({}, DType::kInt32, &w, &g, nullptr, 1), InvalidArgument);
  float master = 3;
  float low = 2;
  EXPECT_THROW(SgdUpdateMultiPrecision({}, DType::kFloat32, &low, &low, &master, nullptr, 1),
               InvalidArgument);
  EXPECT_EQ(w, 5);
  EXPECT_EQ(master, 3);
}

}  // namespace
}  // namespace heddle::ops
