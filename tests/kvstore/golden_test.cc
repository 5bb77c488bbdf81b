// Optimizers and schedules against the values that MXNet 1.9.1 computed: tests/golden/optimizers.py
// says what is in optimizers.json.
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>
#include <heddle/schedule.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

using nlohmann::json;

const json& Golden() {
  static const json golden = [] {
    std::ifstream file(HEDDLE_GOLDEN_FILE);
    return json::parse(file);
  }();
  return golden;
}

// As in the script.
std::vector<double> Numbers(std::uint32_t stream, std::int64_t count) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits = (stream * 1000003 + static_cast<std::uint32_t>(i)) * 2654435761u + 974711;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    values.push_back((2.0 * (bits >> 22) - 1023) / 512);
  }
  return values;
}

std::vector<std::uint8_t> FromBase64(const std::string& text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<std::uint8_t> bytes;
  std::uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<std::uint32_t>(kDigits.find(c));
    count += 6;
    if (count >= 8) bytes.push_back(static_cast<std::uint8_t>(bits >> (count -= 8)));
  }
  return bytes;
}

template <class T>
std::vector<double> Values(const std::vector<std::uint8_t>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(static_cast<void*>(values.data()), bytes.data(), bytes.size());
  std::vector<double> wide;
  for (const T& value : values) {
    if constexpr (std::is_same_v<T, Float16>) {
      wide.push_back(static_cast<double>(static_cast<float>(value)));
    } else {
      wide.push_back(static_cast<double>(value));
    }
  }
  return wide;
}

std::vector<double> Expected(const json& base64, DType dtype) {
  const std::vector<std::uint8_t> bytes = FromBase64(base64.get<std::string>());
  if (dtype == DType::kFloat16) return Values<Float16>(bytes);
  return dtype == DType::kFloat64 ? Values<double>(bytes) : Values<float>(bytes);
}

WarmUp WarmUpOf(const json& options) {
  return {.steps = options.value("warmup_steps", 0),
          .begin_rate = options.value("warmup_begin_lr", 0.0),
          .is_constant = options.value("warmup_mode", "linear") == "constant"};
}

LearningRateSchedule ScheduleOf(const json& options) {
  const std::string name = options["name"];
  const double base_rate = options.value("base_lr", 0.01);
  const WarmUp warm_up = WarmUpOf(options);
  if (name == "factor") {
    return FactorSchedule{.step = options["step"],
                          .factor = options.value("factor", 1.0),
                          .stop_rate = options.value("stop_factor_lr", 1e-8),
                          .base_rate = base_rate,
                          .warm_up = warm_up};
  }
  if (name == "multi_factor") {
    return MultiFactorSchedule{.steps = options["steps"],
                               .factor = options.value("factor", 1.0),
                               .base_rate = base_rate,
                               .warm_up = warm_up};
  }
  if (name == "poly") {
    return PolySchedule{.max_update = options["max_update"],
                        .power = options.value("pwr", 2.0),
                        .final_rate = options.value("final_lr", 0.0),
                        .base_rate = base_rate,
                        .warm_up = warm_up};
  }
  return CosineSchedule{.max_update = options["max_update"],
                        .final_rate = options.value("final_lr", 0.0),
                        .base_rate = base_rate,
                        .warm_up = warm_up};
}

OptimizerPtr OptimizerOf(const json& test) {
  std::vector<std::pair<std::string_view, double>> parameters;
  for (const auto& [name, value] : test["parameters"].items()) {
    parameters.emplace_back(name, value.get<double>());
  }
  OptimizerPtr made = MakeOptimizer(test["optimizer"].get<std::string>(), parameters);
  const auto multipliers = test.value("lr_mult", json::object());
  for (const auto& [key, value] : multipliers.items()) {
    made->SetLearningRateMultiplier("key" + key, value);
  }
  const auto decays = test.value("wd_mult", json::object());
  for (const auto& [key, value] : decays.items()) {
    made->SetWeightDecayMultiplier("key" + key, value);
  }
  if (test.contains("schedule")) made->SetSchedule(ScheduleOf(test["schedule"]));
  return made;
}

// How far a weight may be from that of MXNet, relative to the greater of its size and its size at
// the start, or 1 where MXNet's norms sum thousands of elements in float32. float64: MXNet rounds
// the parameters to float32, heddle does not. float16: MXNet rounds after each operation, heddle
// computes in float32 and rounds what it stores; with multi_precision both round the weight once.
double Tolerance(const json& test) {
  if (test["dtype"] == "float32") return 1e-6;
  if (test["dtype"] == "float64") return 2e-5;
  return test["parameters"].contains("multi_precision") ? 0x1p-10 : 0x1p-5;
}

// Without the rows that the script leaves out. No number of a stream is 0.
RowSparseNDArray SomeRows(const NDArray& gradient, std::int64_t stream) {
  std::vector<std::int64_t> ids;
  for (std::int64_t row = 0; row < gradient.shape()[0]; ++row) {
    if ((stream + row) % 3 != 0) ids.push_back(row);
  }
  const Shape shape{static_cast<std::int64_t>(ids.size())};
  return RowSparseNDArray::FromDense(gradient).Retain(
      NDArray::FromVector(ids, shape, DType::kInt64, Cpu(), gradient.engine()));
}

class GoldenTest : public testing::TestWithParam<std::size_t> {};

TEST_P(GoldenTest, EqualsMxnet) {
  const json& test = Golden()["cases"][GetParam()];
  SCOPED_TRACE(test["optimizer"].get<std::string>() + " " + test["dtype"].get<std::string>() + " " +
               test["parameters"].dump() + " " + test.value("row_sparse", ""));
  const DType dtype = test["dtype"] == "float64"   ? DType::kFloat64
                      : test["dtype"] == "float16" ? DType::kFloat16
                                                   : DType::kFloat32;
  Engine engine(OptionsOf({"local", "serial", 1}));
  const auto store = KVStore::Create("local", engine);
  const std::string row_sparse = test.value("row_sparse", "");
  const std::size_t every = test.value("every", std::size_t{1});
  const double size = every > 1 ? 1 : 0;
  std::uint32_t stream = 0;
  const auto draw = [&](const Shape& shape) {
    return NDArray::FromVector(Numbers(++stream, shape.size()), shape, dtype, Cpu(), engine);
  };
  std::vector<Shape> shapes;
  for (const auto& dims : test["shapes"]) {
    shapes.push_back(Shape(std::span<const std::int64_t>(dims.get<std::vector<std::int64_t>>())));
  }
  std::vector<double> start;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const NDArray weight = draw(shapes[i]);
    for (double value : weight.AsType(DType::kFloat64).ToVector<double>()) start.push_back(value);
    if (row_sparse == "all") {
      store->Init("key" + std::to_string(i), RowSparseNDArray::FromDense(weight));
    } else {
      store->Init("key" + std::to_string(i), weight);
    }
  }
  store->SetOptimizer(OptimizerOf(test));
  const int steps = test["steps"];
  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const NDArray gradient = draw(shapes[i]);
      if (row_sparse.empty()) {
        store->Push("key" + std::to_string(i), gradient);
      } else {
        store->Push("key" + std::to_string(i), SomeRows(gradient, stream));
      }
    }
    if (step != 0 && step != steps - 1) continue;
    const std::vector<double> expected = Expected(test["weights"][step == 0 ? 0 : 1], dtype);
    std::vector<double> actual;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      NDArray out(shapes[i], DType::kFloat64, Cpu(), engine);
      store->Pull("key" + std::to_string(i), out);
      for (double value : out.ToVector<double>()) actual.push_back(value);
    }
    ASSERT_EQ((actual.size() + every - 1) / every, expected.size());
    for (std::size_t k = 0; k < expected.size(); ++k) {
      const std::size_t i = k * every;
      EXPECT_LE(std::abs(actual[i] - expected[k]),
                Tolerance(test) * std::max({std::abs(expected[k]), std::abs(start[i]), size}))
          << "element " << i << " after step " << step << ": " << actual[i] << ", expected "
          << expected[k];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTest, testing::Range<std::size_t>(0, Golden()["cases"].size()));

TEST(GoldenSchedules, EqualMxnet) {
  for (const json& test : Golden()["schedules"]) {
    SCOPED_TRACE(test["schedule"].dump());
    const LearningRateSchedule schedule = ScheduleOf(test["schedule"]);
    CheckSchedule(schedule);
    for (std::size_t i = 0; i < test["rates"].size(); ++i) {
      const double expected = test["rates"][i];
      EXPECT_NEAR(RateAt(schedule, static_cast<std::int64_t>(i + 1)), expected, 1e-14)
          << "update " << i + 1;
    }
  }
}

}  // namespace
}  // namespace heddle::kvstore_test
