// What one optimizer is: a row for each parameter, and how to make the rule for their values.
#pragma once

#include <heddle/optimizer.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/optimizer/update_rule.h"

namespace heddle::kvstore {

struct ParameterType {
  std::string_view name;
  double value;  // the default
  double min = 0;
  double max = std::numeric_limits<double>::max();
  enum class Bound { kClosed, kOpen };  // whether min, max themselves are allowed
  Bound min_bound = Bound::kClosed;
  Bound max_bound = Bound::kClosed;
  bool fixed = false;       // cannot change once the optimizer is made
  bool is_integer = false;  // only whole numbers
  bool is_float32 = true;   // updates compute with it in float32, which has to hold it
};

// Rows that optimizers share.
inline constexpr ParameterType kWeightDecay = {.name = "weight_decay", .value = 0};
inline constexpr ParameterType kRescaleGrad = {
    .name = "rescale_grad", .value = 1, .min = std::numeric_limits<double>::lowest()};
inline constexpr ParameterType kClipGradient = {.name = "clip_gradient", .value = 0};
// Row-sparse gradients touch only their rows.
inline constexpr ParameterType kLazyUpdate = {
    .name = "lazy_update", .value = 1, .max = 1, .is_integer = true};
// It decides what is kept for each key.
inline constexpr ParameterType kMultiPrecision = {
    .name = "multi_precision", .value = 0, .max = 1, .fixed = true, .is_integer = true};

constexpr ParameterType Positive(std::string_view name, double value) {
  return {.name = name, .value = value, .min_bound = ParameterType::Bound::kOpen};
}
// 0 or 1.
constexpr ParameterType Switch(std::string_view name, bool value) {
  return {.name = name, .value = value ? 1.0 : 0.0, .max = 1, .is_integer = true};
}
constexpr ParameterType FractionBelowOne(std::string_view name, double value) {
  return {.name = name, .value = value, .max = 1, .max_bound = ParameterType::Bound::kOpen};
}

// The parameters of an optimizer with a value each, all within their ranges.
class ParameterValues {
 public:
  ParameterValues(std::span<const ParameterType> types, std::span<const double> values)
      : types_(types), values_(values) {}

  bool Has(std::string_view name) const { return IndexOf(name) < types_.size(); }
  double operator[](std::string_view name) const {
    CHECK(Has(name));
    return values_[IndexOf(name)];
  }

 private:
  std::size_t IndexOf(std::string_view name) const {
    std::size_t i = 0;
    while (i < types_.size() && types_[i].name != name) ++i;
    return i;
  }

  std::span<const ParameterType> types_;
  std::span<const double> values_;
};

inline ops::GradientOptions GradientOptionsOf(const ParameterValues& values) {
  return {.rescale = values["rescale_grad"], .limit = values["clip_gradient"]};
}

// ---- What rules share

// Puts the bias correction of Adam into the learning rate.
inline void CorrectBias(internal::KeyUpdate& update, double beta1, double beta2) {
  const double step = static_cast<double>(update.step);
  update.learning_rate *= std::sqrt(1 - std::pow(beta2, step));
  update.learning_rate /= 1 - std::pow(beta1, step);
}

inline std::string RefusalOfDecay(const internal::UpdateRule::Subject& subject,
                                  std::string_view where) {
  if (subject.weight_decay == 0) return {};
  return fmt::format("expected weight_decay 0{}, got {}", where, subject.weight_decay);
}

// Every optimizer has a parameter learning_rate; weight_decay and multi_precision if they have a
// meaning for it. These three the store looks at, all others only the rule.
struct OptimizerType {
  std::string_view name;
  std::span<const ParameterType> parameters;
  std::shared_ptr<const internal::UpdateRule> (*make_rule)(const ParameterValues& values);
};

template <class Rule>
std::shared_ptr<const internal::UpdateRule> MakeRule(const ParameterValues& values) {
  return std::make_shared<const Rule>(values);
}

// heddle::MakeOptimizer once the name is found. `type` outlives the optimizer.
OptimizerPtr MakeOptimizerOf(
    const OptimizerType& type,
    const std::vector<std::pair<std::string_view, double>>& parameters = {});

}  // namespace heddle::kvstore
