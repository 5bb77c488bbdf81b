// The Adam updates against the formula of their contract, element by element.
#include "ops/adam.h"

#include <heddle/error.h>

#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

// Returns the new weight; m and v become the new moments.
template <typename C>
C PlainUpdate(const AdamParams& params, C w, C g, C& m, C& v) {
  const C beta1 = static_cast<C>(params.beta1);
  const C beta2 = static_cast<C>(params.beta2);
  C G = static_cast<C>(params.rescale) * g + static_cast<C>(params.weight_decay) * w;
  if (params.clip >= 0) {
    const C limit = static_cast<C>(params.clip);
    if (G < -limit) {
      G = -limit;
    } else if (G > limit) {
      G = limit;
    }
  }
  m = beta1 * m + (C{1} - beta1) * G;
  v = beta2 * v + (C{1} - beta2) * G * G;
  return w -
         static_cast<C>(params.learning_rate) * m / (std::sqrt(v) + static_cast<C>(params.epsilon));
}

class AdamTest : public KernelTest {
 protected:
  AdamParams RandomParams() {
    return {.learning_rate = 0.001 * static_cast<double>(1 + Below(9)),
            .beta1 = Below(2) == 0 ? 0.9 : 0.5,
            .beta2 = Below(2) == 0 ? 0.999 : 0.7,
            .epsilon = Below(2) == 0 ? 1e-8 : 1e-3,
            .weight_decay = Below(2) == 0 ? 0 : 1e-2,
            .rescale = Below(2) == 0 ? 1 : 1.0 / 3,
            .clip = Below(2) == 0 ? -1 : 0.5};
  }

  // Variances are not negative.
  template <typename T>
  void RandomizeVariance(Array<T>& array) {
    Randomize(array, random_);
    for (std::size_t i = 0; i < array.size(); ++i) {
      array[i] = static_cast<T>(std::fabs(static_cast<ComputeType<T>>(array[i])));
    }
  }

  template <typename T>
  void CheckMultiPrecision();
};

TEST_F(AdamTest, EqualsThePlainLoopForAnyCut) {
  ForEveryFloatingDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = ComputeType<T>;
    for (int round = 0; round < 60; ++round) {
      const AdamParams params = RandomParams();
      const std::size_t count = RandomCount();
      Array<T> w(count), g(count, Below(64)), m(count), v(count);
      Array<T> expected_w(count), expected_m(count), expected_v(count);
      Randomize(w, random_);
      Randomize(g, random_);
      Randomize(m, random_);
      RandomizeVariance(v);
      for (std::size_t i = 0; i < count; ++i) {
        C mean = static_cast<C>(m[i]);
        C variance = static_cast<C>(v[i]);
        expected_w[i] = static_cast<T>(
            PlainUpdate(params, static_cast<C>(w[i]), static_cast<C>(g[i]), mean, variance));
        expected_m[i] = static_cast<T>(mean);
        expected_v[i] = static_cast<T>(variance);
      }
      const std::size_t cut = Below(count + 1);
      OnEveryTarget([&] {
        Array<T> new_w(count, Below(64)), new_m(count, Below(64)), new_v(count, Below(64));
        new_w.CopyFrom(w);
        new_m.CopyFrom(m);
        new_v.CopyFrom(v);
        AdamUpdate(params, kDTypeOf<T>, new_w.data(), g.data(), new_m.data(), new_v.data(), cut);
        AdamUpdate(params, kDTypeOf<T>, new_w.data() + cut, g.data() + cut, new_m.data() + cut,
                   new_v.data() + cut, count - cut);
        ExpectSame(new_w, expected_w, "weight");
        ExpectSame(new_m, expected_m, "mean");
        ExpectSame(new_v, expected_v, "variance");
      });
    }
  });
}

template <typename T>
void AdamTest::CheckMultiPrecision() {
  const AdamParams params = RandomParams();
  const std::size_t count = RandomCount();
  Array<T> g(count), expected_w(count);
  Array<float> master(count), m(count), v(count);
  Array<float> expected_master(count), expected_m(count), expected_v(count);
  Randomize(g, random_);
  Randomize(master, random_);
  Randomize(m, random_);
  RandomizeVariance(v);
  for (std::size_t i = 0; i < count; ++i) {
    expected_m[i] = m[i];
    expected_v[i] = v[i];
    expected_master[i] =
        PlainUpdate(params, master[i], static_cast<float>(g[i]), expected_m[i], expected_v[i]);
    expected_w[i] = T(expected_master[i]);
  }
  OnEveryTarget([&] {
    Array<T> new_w(count, 3);
    Array<float> new_master(count, 5), new_m(count, 1), new_v(count);
    new_master.CopyFrom(master);
    new_m.CopyFrom(m);
    new_v.CopyFrom(v);
    AdamUpdateMultiPrecision(params, kDTypeOf<T>, new_w.data(), g.data(), new_master.data(),
                             new_m.data(), new_v.data(), count);
    ExpectSame(new_w, expected_w, "weight");
    ExpectSame(new_master, expected_master, "master");
    ExpectSame(new_m, expected_m, "mean");
    ExpectSame(new_v, expected_v, "variance");
  });
}

TEST_F(AdamTest, MultiPrecisionEqualsThePlainLoop) {
  for (int round = 0; round < 60; ++round) {
    CheckMultiPrecision<Float16>();
    CheckMultiPrecision<BFloat16>();
  }
}

// The first step moves by the learning rate, whatever the gradient's size.
TEST_F(AdamTest, FirstStepIsTheLearningRate) {
  const double rate = 0.001 * std::sqrt(1 - 0.999) / (1 - 0.9);
  for (double g : {1e-3, 1.0, 1e3}) {
    double w = 2;
    double m = 0;
    double v = 0;
    AdamUpdate({.learning_rate = rate}, DType::kFloat64, &w, &g, &m, &v, 1);
    EXPECT_NEAR(w, 2 - 0.001, 1e-6);
  }
}

TEST_F(AdamTest, RefusesOtherDTypes) {
  std::int64_t w = 5;
  EXPECT_THROW(AdamUpdate({}, DType::kInt64, &w, &w, &w, &w, 1), InvalidArgument);
  float master = 3;
  EXPECT_THROW(AdamUpdateMultiPrecision({}, DType::kFloat64, &w, &w, &master, &master, &master, 1),
               InvalidArgument);
  EXPECT_EQ(w, 5);
  EXPECT_EQ(master, 3);
}

}  // namespace
}  // namespace heddle::ops
