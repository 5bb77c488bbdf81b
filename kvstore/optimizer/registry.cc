// Optimizers by name.
#include "kvstore/registry.h"

#include <heddle/error.h>
#include <heddle/optimizer.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/mutex.h"
#include "engine/fork.h"
#include "kvstore/optimizer/fixed_parameters.h"
#include "kvstore/optimizer/foreign.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "kvstore/optimizer/update_plan.h"

namespace heddle {

namespace kvstore {

#define HEDDLE_OPTIMIZER(name, type, source) const OptimizerType& type();
#include "kvstore/optimizer/optimizers.inc"
#undef HEDDLE_OPTIMIZER

namespace {

struct OptimizerEntry {
  std::string_view name;
  const OptimizerType& (*type)();
};

constexpr OptimizerEntry kOptimizers[] = {
#define HEDDLE_OPTIMIZER(name, type, source) {#name, &type},
#include "kvstore/optimizer/optimizers.inc"
#undef HEDDLE_OPTIMIZER
};

// Insertions, removals and replacements of a letter that make `a` of `b`; case does not matter.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return std::tolower(static_cast<unsigned char>(c)); };
  std::vector<std::size_t> row(b.size() + 1);  // distances of the letters of `a` so far
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (char letter : a) {
    std::size_t diagonal = row[0]++;
    for (std::size_t i = 0; i < b.size(); ++i) {
      const std::size_t replaced = diagonal + (lower(letter) == lower(b[i]) ? 0 : 1);
      diagonal = row[i + 1];
      row[i + 1] = std::min({replaced, diagonal + 1, row[i] + 1});
    }
  }
  return row.back();
}

// The known name that `name` is most probably a slip or a short form of.
std::string_view Nearest(std::string_view name, std::span<const std::string_view> known) {
  // Abbreviations that other libraries use.
  constexpr std::pair<std::string_view, std::string_view> kShortForms[] = {
      {"lr", "learning_rate"}, {"wd", "weight_decay"}, {"eps", "epsilon"}};
  for (const auto& [form, meaning] : kShortForms) {
    if (name == form && std::find(known.begin(), known.end(), meaning) != known.end()) {
      return meaning;
    }
  }
  return *std::min_element(known.begin(), known.end(), [&](auto a, auto b) {
    return EditDistance(name, a) < EditDistance(name, b);
  });
}

const OptimizerType& FindType(std::string_view name) {
  const std::string lower = LowerCase(name);
  for (const OptimizerEntry& entry : kOptimizers) {
    if (entry.name == lower) return entry.type();
  }
  const std::vector<std::string_view> names = OptimizerNames();
  throw InvalidArgument(fmt::format("unknown optimizer '{}': did you mean '{}'? Expected one of {}",
                                    name, Nearest(name, names), fmt::join(names, ", ")));
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
  const auto is_in_range = [&type](double number) {
    const bool above = type.min_bound == Bound::kOpen ? number > type.min : number >= type.min;
    const bool below = type.max_bound == Bound::kOpen ? number < type.max : number <= type.max;
    return above && below;
  };
  const bool fits = !type.is_integer || value == std::floor(value);
  const bool is_allowed = std::isfinite(value) && is_in_range(value) && fits;
  // Nearly all values are updated in float32: a bound that is not allowed must not come about by
  // rounding, nor infinity.
  const double rounded = static_cast<float>(value);
  const bool is_on_bound = (type.is_float32 && std::isinf(rounded)) ||
                           (type.min_bound == Bound::kOpen && rounded == type.min) ||
                           (type.max_bound == Bound::kOpen && rounded == type.max);
  if (is_allowed && !is_on_bound) return;
  throw InvalidArgument(
      fmt::format("optimizer {}: parameter {}: expected a{} number in {}{}, got {}", optimizer,
                  type.name, type.is_integer ? " whole" : "", RangeOf(type),
                  is_allowed ? " when rounded to float32" : "", value));
}

// What no rate of the schedule is above.
double HighestRate(const LearningRateSchedule& schedule) {
  return std::visit(
      [](const auto& s) {
        if constexpr (requires { s.stop_rate; }) return std::max(s.base_rate, s.stop_rate);
        if constexpr (requires { s.final_rate; }) return std::max(s.base_rate, s.final_rate);
        return s.base_rate;
      },
      schedule);
}

// Whether the multiplier of a key may go with a rate.
void CheckProduct(std::string_view optimizer, std::string_view rate_name, KeyRef key, double rate,
                  double multiplier) {
  if (std::isfinite(static_cast<float>(rate * multiplier))) return;
  throw InvalidArgument(
      fmt::format("optimizer {}: {} of key {}: expected a product that float32 can hold, got {} "
                  "times the key's multiplier {}",
                  optimizer, rate_name, ToString(key), rate, multiplier));
}

class LiveOptimizer final : public Optimizer {
 public:
  LiveOptimizer(const OptimizerType& type, std::vector<double> values)
      : type_(type), values_(std::move(values)) {}

  std::string_view name() const override { return type_.name; }

  double Get(std::string_view parameter) const override EXCLUDES(mutex_) {
    const std::size_t index = IndexOf(type_, parameter);
    const engine::CallLock lock(mutex_, "an optimizer");
    return values_[index];
  }

  void Set(std::string_view parameter, double value) override EXCLUDES(mutex_) {
    const std::size_t index = IndexOf(type_, parameter);
    const ParameterType& type = type_.parameters[index];
    CheckValue(type_.name, type, value);
    const engine::CallLock lock(mutex_, "an optimizer");
    if (schedule_ && parameter == "learning_rate") {
      throw InvalidState(fmt::format(
          "optimizer {}: its schedule sets the learning rate: expected SetSchedule, got "
          "learning_rate {}",
          type_.name, value));
    }
    if (value == values_[index]) return;
    if (type.fixed) {
      throw InvalidArgument(fmt::format(
          "optimizer {}: parameter {} is fixed once the optimizer is made: expected {}, got {}",
          type_.name, parameter, values_[index], value));
    }
    if (parameter == kLearningRate.name) CheckProductsLocked(kLearningRate, value);
    if (parameter == kWeightDecayRate.name) CheckProductsLocked(kWeightDecayRate, value);
    values_[index] = value;
    plan_ = nullptr;
  }

  std::vector<std::pair<std::string_view, double>> Parameters() const override EXCLUDES(mutex_) {
    std::vector<std::pair<std::string_view, double>> parameters;
    const engine::CallLock lock(mutex_, "an optimizer");
    for (std::size_t i = 0; i < values_.size(); ++i) {
      parameters.emplace_back(type_.parameters[i].name, values_[i]);
    }
    return parameters;
  }

  void SetSchedule(std::optional<LearningRateSchedule> schedule) override EXCLUDES(mutex_) {
    if (schedule) CheckSchedule(*schedule);
    const engine::CallLock lock(mutex_, "an optimizer");
    if (schedule) CheckProductsLocked(kLearningRate, HighestRate(*schedule));
    schedule_ = std::move(schedule);
    plan_ = nullptr;
  }

  std::optional<LearningRateSchedule> schedule() const override EXCLUDES(mutex_) {
    const engine::CallLock lock(mutex_, "an optimizer");
    return schedule_;
  }

  void SetLearningRateMultiplier(KeyRef key, double multiplier) override EXCLUDES(mutex_) {
    SetMultiplier(kLearningRate, key, multiplier);
  }
  void SetWeightDecayMultiplier(KeyRef key, double multiplier) override EXCLUDES(mutex_) {
    SetMultiplier(kWeightDecayRate, key, multiplier);
  }

  std::shared_ptr<const internal::UpdatePlan> plan() const override EXCLUDES(mutex_) {
    const engine::CallLock lock(mutex_, "an optimizer");
    if (plan_ == nullptr) plan_ = MakePlanLocked();
    return plan_;
  }

  static std::size_t IndexOf(const OptimizerType& type, std::string_view parameter) {
    std::vector<std::string_view> names;
    for (const ParameterType& known : type.parameters) {
      if (known.name == parameter) return names.size();
      names.push_back(known.name);
    }
    throw InvalidArgument(
        fmt::format("optimizer {}: unknown parameter '{}': did you mean '{}'? Expected one of {}",
                    type.name, parameter, Nearest(parameter, names), fmt::join(names, ", ")));
  }

 private:
  // A parameter that keys have multipliers of.
  struct Rate {
    std::string_view name;
    std::string_view words;
    double internal::RateMultipliers::*multiplier;
  };
  static constexpr Rate kLearningRate = {"learning_rate", "learning rate",
                                         &internal::RateMultipliers::learning_rate};
  static constexpr Rate kWeightDecayRate = {"weight_decay", "weight decay",
                                            &internal::RateMultipliers::weight_decay};

  void SetMultiplier(const Rate& rate, KeyRef key, double multiplier) EXCLUDES(mutex_) {
    if (!std::isfinite(multiplier) || multiplier < 0) {
      throw InvalidArgument(fmt::format(
          "optimizer {}: {} multiplier of key {}: expected a finite number of at least 0, got {}",
          type_.name, rate.words, ToString(key), multiplier));
    }
    const engine::CallLock lock(mutex_, "an optimizer");
    double highest = ValueOr0Locked(rate.name);
    if (schedule_ && rate.name == kLearningRate.name) {
      highest = std::max(highest, HighestRate(*schedule_));
    }
    CheckProduct(type_.name, rate.words, key, highest, multiplier);
    multipliers_[key.ToKey()].*rate.multiplier = multiplier;
    plan_ = nullptr;
  }

  // With the multipliers that there are.
  void CheckProductsLocked(const Rate& rate, double value) const REQUIRES(mutex_) {
    for (const auto& [key, multipliers] : multipliers_) {
      CheckProduct(type_.name, rate.words, key, value, multipliers.*rate.multiplier);
    }
  }

  double ValueOr0Locked(std::string_view name) const REQUIRES(mutex_) {
    const ParameterValues values(type_.parameters, values_);
    return values.Has(name) ? values[name] : 0.0;
  }

  std::shared_ptr<const internal::UpdatePlan> MakePlanLocked() const REQUIRES(mutex_) {
    const ParameterValues values(type_.parameters, values_);
    return std::make_shared<internal::UpdatePlan>(
        internal::UpdatePlan{.rule = type_.make_rule(values),
                             .learning_rate = values[kLearningRate.name],
                             .weight_decay = ValueOr0Locked(kWeightDecayRate.name),
                             .multi_precision = ValueOr0Locked("multi_precision") != 0,
                             .schedule = schedule_,
                             .multipliers = multipliers_});
  }

  const OptimizerType& type_;
  mutable Mutex mutex_;
  std::vector<double> values_ GUARDED_BY(mutex_);
  std::optional<LearningRateSchedule> schedule_ GUARDED_BY(mutex_);
  KeyTable<internal::RateMultipliers> multipliers_ GUARDED_BY(mutex_);
  mutable std::shared_ptr<const internal::UpdatePlan> plan_ GUARDED_BY(mutex_);  // null: to be made
};

class ForeignRule final : public internal::UpdateRule {
 public:
  bool by_rows() const override { return true; }
  void Update(const internal::UpdateRun& /*run*/) const override {
    throw InvalidState("an optimizer that heddle does not have: expected a server that has it");
  }
};

// Owns what its type refers to.
struct ForeignOptimizer {
  ForeignOptimizer(std::string its_name, std::vector<std::pair<std::string, double>> its_parameters)
      : name(std::move(its_name)), named(std::move(its_parameters)) {
    for (const std::string_view rate : {"learning_rate", "weight_decay"}) {
      if (std::ranges::find(named, rate, &std::pair<std::string, double>::first) == named.end()) {
        named.emplace_back(rate, 0);
      }
    }
    std::vector<double> values;
    for (const auto& [parameter, value] : named) {
      types.push_back({.name = parameter,
                       .value = 0,
                       .min = std::numeric_limits<double>::lowest(),
                       .is_float32 = false});
      CheckValue(name, types.back(), value);
      values.push_back(value);
    }
    type = {
        .name = name,
        .parameters = types,
        .make_rule =
            [](const ParameterValues& /*values*/) -> std::shared_ptr<const internal::UpdateRule> {
          return std::make_shared<const ForeignRule>();
        }};
    live.emplace(type, std::move(values));
  }

  const std::string name;
  std::vector<std::pair<std::string, double>> named;
  std::vector<ParameterType> types;
  OptimizerType type;
  std::optional<LiveOptimizer> live;
};

}  // namespace

OptimizerPtr MakeForeignOptimizer(std::string name,
                                  std::vector<std::pair<std::string, double>> parameters) {
  const auto made = std::make_shared<ForeignOptimizer>(std::move(name), std::move(parameters));
  return {made, &*made->live};
}

OptimizerPtr MakeOptimizerOf(const OptimizerType& type,
                             const std::vector<std::pair<std::string_view, double>>& parameters) {
  std::vector<double> values;
  for (const ParameterType& parameter : type.parameters) values.push_back(parameter.value);
  for (const auto& [parameter, value] : parameters) {
    const std::size_t index = LiveOptimizer::IndexOf(type, parameter);
    CheckValue(type.name, type.parameters[index], value);
    values[index] = value;
  }
  return std::make_shared<LiveOptimizer>(type, std::move(values));
}

bool IsForeignOptimizer(std::string_view name) {
  return std::ranges::find(kOptimizers, LowerCase(name), &OptimizerEntry::name) ==
         std::ranges::end(kOptimizers);
}

std::map<std::string, double> FixedParameters(const Optimizer& optimizer) {
  std::map<std::string, double> fixed;
  if (IsForeignOptimizer(optimizer.name())) return fixed;
  for (const ParameterType& type : FindType(optimizer.name()).parameters) {
    if (!type.fixed || type.name == kMultiPrecision.name) continue;
    fixed.emplace(type.name, optimizer.Get(type.name));
  }
  return fixed;
}

}  // namespace kvstore

OptimizerPtr MakeOptimizer(std::string_view name,
                           const std::vector<std::pair<std::string_view, double>>& parameters) {
  return kvstore::MakeOptimizerOf(kvstore::FindType(name), parameters);
}

std::vector<std::string_view> OptimizerNames() {
  std::vector<std::string_view> names;
  for (const kvstore::OptimizerEntry& entry : kvstore::kOptimizers) names.push_back(entry.name);
  return names;
}

}  // namespace heddle
