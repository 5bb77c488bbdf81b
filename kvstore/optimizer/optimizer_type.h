// What one optimizer is: a row for each parameter, and how to make the rule for their values.
#pragma once

#include <limits>
#include <memory>
#include <span>
#include <string_view>

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
  bool fixed = false;  // cannot change once the optimizer is made
};

// Rows that optimizers share.
inline constexpr ParameterType kWeightDecay = {.name = "weight_decay", .value = 0};
inline constexpr ParameterType kRescaleGrad = {
    .name = "rescale_grad", .value = 1, .min = std::numeric_limits<double>::lowest()};
inline constexpr ParameterType kClipGradient = {.name = "clip_gradient", .value = 0};
// It decides what is kept for each key.
inline constexpr ParameterType kMultiPrecision = {
    .name = "multi_precision", .value = 0, .max = 1, .fixed = true};

constexpr ParameterType FractionBelowOne(std::string_view name, double value) {
  return {.name = name, .value = value, .max = 1, .max_bound = ParameterType::Bound::kOpen};
}

struct OptimizerType {
  std::string_view name;
  std::span<const ParameterType> parameters;
  // `values`: one for each parameter, in that order, all within their ranges.
  std::shared_ptr<const internal::UpdateRule> (*make_rule)(std::span<const double> values);
};

}  // namespace heddle::kvstore
