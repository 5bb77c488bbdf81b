// The one list of optimizers, and optimizers by name.
#include "kvstore/registry.h"

#include <heddle/error.h>
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
#include <fmt/ranges.h>

#include "base/mutex.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/update_plan.h"

namespace heddle {

namespace kvstore {

const OptimizerType& AdamType();  // adam.cc
const OptimizerType& SgdType();   // sgd.cc

namespace {

struct OptimizerEntry {
  std::string_view name;
  const OptimizerType& (*type)();
};

// Sorted by name.
constexpr OptimizerEntry kOptimizers[] = {{"adam", &AdamType}, {"sgd", &SgdType}};

const OptimizerType& FindType(std::string_view name) {
  const std::string lower = LowerCase(name);
  for (const OptimizerEntry& entry : kOptimizers) {
    if (entry.name == lower) return entry.type();
  }
  throw InvalidArgument(fmt::format("unknown optimizer '{}': expected one of {}", name,
                                    fmt::join(OptimizerNames(), ", ")));
}

// "[0, 1)"
std::string RangeOf(const ParameterType& type) {
  using Bound = ParameterType::Bound;
  const auto number = [](double value) {
    if (value == std::numeric_limits<double>::max()) return std::string("inf");
    if (value == std::numeric_limits<double>::lowest()) return std::string("-inf");
    return fmt::format("{}", value);
  };
  const bool no_max = type.max == std::numeric_limits<double>::max();
  const bool no_min = type.min == std::numeric_limits<double>::lowest();
  return fmt::format("{}{}, {}{}", no_min || type.min_bound == Bound::kOpen ? '(' : '[',
                     number(type.min), number(type.max),
                     no_max || type.max_bound == Bound::kOpen ? ')' : ']');
}

void CheckValue(std::string_view optimizer, const ParameterType& type, double value) {
  using Bound = ParameterType::Bound;
  const bool above_min = type.min_bound == Bound::kOpen ? value > type.min : value >= type.min;
  const bool below_max = type.max_bound == Bound::kOpen ? value < type.max : value <= type.max;
  if (std::isfinite(value) && above_min && below_max) return;
  throw InvalidArgument(fmt::format("optimizer {}: parameter {}: expected a number in {}, got {}",
                                    optimizer, type.name, RangeOf(type), value));
}

std::shared_ptr<const internal::UpdatePlan> MakePlan(const OptimizerType& type,
                                                     std::span<const double> numbers) {
  const ParameterValues values(type.parameters, numbers);
  const auto value_or_0 = [&](std::string_view name) {
    return values.Has(name) ? values[name] : 0.0;
  };
  return std::make_shared<internal::UpdatePlan>(
      internal::UpdatePlan{.rule = type.make_rule(values),
                           .learning_rate = values["learning_rate"],
                           .weight_decay = value_or_0("weight_decay"),
                           .multi_precision = value_or_0("multi_precision") != 0});
}

class LiveOptimizer final : public Optimizer {
 public:
  LiveOptimizer(const OptimizerType& type, std::vector<double> values)
      : type_(type), values_(std::move(values)), plan_(MakePlan(type, values_)) {}

  std::string_view name() const override { return type_.name; }

  double Get(std::string_view parameter) const override EXCLUDES(mutex_) {
    const std::size_t index = IndexOf(type_, parameter);
    MutexLock lock(mutex_);
    return values_[index];
  }

  void Set(std::string_view parameter, double value) override EXCLUDES(mutex_) {
    const std::size_t index = IndexOf(type_, parameter);
    const ParameterType& type = type_.parameters[index];
    CheckValue(type_.name, type, value);
    MutexLock lock(mutex_);
    if (value == values_[index]) return;
    if (type.fixed) {
      throw InvalidArgument(fmt::format(
          "optimizer {}: parameter {} is fixed once the optimizer is made: expected {}, got {}",
          type_.name, parameter, values_[index], value));
    }
    values_[index] = value;
    plan_ = MakePlan(type_, values_);
  }

  std::vector<std::pair<std::string_view, double>> Parameters() const override EXCLUDES(mutex_) {
    std::vector<std::pair<std::string_view, double>> parameters;
    MutexLock lock(mutex_);
    for (std::size_t i = 0; i < values_.size(); ++i) {
      parameters.emplace_back(type_.parameters[i].name, values_[i]);
    }
    return parameters;
  }

  std::shared_ptr<const internal::UpdatePlan> plan() const override EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return plan_;
  }

  static std::size_t IndexOf(const OptimizerType& type, std::string_view parameter) {
    std::vector<std::string_view> names;
    for (const ParameterType& known : type.parameters) {
      if (known.name == parameter) return names.size();
      names.push_back(known.name);
    }
    throw InvalidArgument(fmt::format("optimizer {}: unknown parameter '{}': expected one of {}",
                                      type.name, parameter, fmt::join(names, ", ")));
  }

 private:
  const OptimizerType& type_;
  mutable Mutex mutex_;
  std::vector<double> values_ GUARDED_BY(mutex_);
  std::shared_ptr<const internal::UpdatePlan> plan_ GUARDED_BY(mutex_);  // of values_
};

}  // namespace

}  // namespace kvstore

OptimizerPtr MakeOptimizer(std::string_view name,
                           const std::vector<std::pair<std::string_view, double>>& parameters) {
  const kvstore::OptimizerType& type = kvstore::FindType(name);
  std::vector<double> values;
  for (const kvstore::ParameterType& parameter : type.parameters) values.push_back(parameter.value);
  for (const auto& [parameter, value] : parameters) {
    const std::size_t index = kvstore::LiveOptimizer::IndexOf(type, parameter);
    kvstore::CheckValue(type.name, type.parameters[index], value);
    values[index] = value;
  }
  return std::make_shared<kvstore::LiveOptimizer>(type, std::move(values));
}

std::vector<std::string_view> OptimizerNames() {
  std::vector<std::string_view> names;
  for (const kvstore::OptimizerEntry& entry : kvstore::kOptimizers) names.push_back(entry.name);
  return names;
}

}  // namespace heddle
