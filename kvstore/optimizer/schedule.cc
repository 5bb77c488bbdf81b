#include <heddle/error.h>
#include <heddle/schedule.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <string_view>

#include <fmt/format.h>

namespace heddle {

namespace {

void Check(bool holds, std::string_view field, std::string_view expected, double given) {
  if (holds) return;
  throw InvalidArgument(
      fmt::format("learning rate schedule: {}: expected {}, got {}", field, expected, given));
}

void CheckRate(std::string_view field, double rate) {
  // Nearly all values are updated in float32.
  Check(std::isfinite(static_cast<float>(rate)) && rate >= 0, field,
        "a number of at least 0 that float32 can hold", rate);
}

void CheckFactor(double factor) {
  Check(factor > 0 && factor <= 1, "factor", "a number in (0, 1]", factor);
}

void CheckMaxUpdate(std::int64_t max_update, const WarmUp& warm_up) {
  Check(max_update >= 1, "max_update", "at least 1", static_cast<double>(max_update));
  Check(max_update > warm_up.steps, "max_update",
        fmt::format("more than the {} steps of the warm-up", warm_up.steps),
        static_cast<double>(max_update));
}

void CheckFields(const FactorSchedule& s) {
  Check(s.step >= 1, "step", "at least 1", static_cast<double>(s.step));
  CheckFactor(s.factor);
  CheckRate("stop_rate", s.stop_rate);
}

void CheckFields(const MultiFactorSchedule& s) {
  if (s.steps.empty()) {
    throw InvalidArgument("learning rate schedule: steps: expected one at least, got none");
  }
  Check(s.steps[0] >= 1, "steps", "numbers of at least 1", static_cast<double>(s.steps[0]));
  for (std::size_t i = 1; i < s.steps.size(); ++i) {
    Check(s.steps[i] > s.steps[i - 1], "steps",
          fmt::format("increasing numbers, so more than {}", s.steps[i - 1]),
          static_cast<double>(s.steps[i]));
  }
  CheckFactor(s.factor);
}

void CheckFields(const PolySchedule& s) {
  CheckMaxUpdate(s.max_update, s.warm_up);
  Check(std::isfinite(s.power) && s.power >= 0, "power", "a finite number of at least 0", s.power);
  CheckRate("final_rate", s.final_rate);
}

void CheckFields(const CosineSchedule& s) {
  CheckMaxUpdate(s.max_update, s.warm_up);
  CheckRate("final_rate", s.final_rate);
}

double AfterWarmUp(const FactorSchedule& s, std::int64_t n) {
  const std::int64_t times = n > 0 ? (n - 1) / s.step : 0;
  if (times == 0) return s.base_rate;
  return std::max(s.base_rate * std::pow(s.factor, static_cast<double>(times)), s.stop_rate);
}

double AfterWarmUp(const MultiFactorSchedule& s, std::int64_t n) {
  const auto passed = std::lower_bound(s.steps.begin(), s.steps.end(), n) - s.steps.begin();
  return s.base_rate * std::pow(s.factor, static_cast<double>(passed));
}

double Part(std::int64_t n, std::int64_t max_update, const WarmUp& warm_up) {
  return static_cast<double>(std::min(n, max_update) - warm_up.steps) /
         static_cast<double>(max_update - warm_up.steps);
}

double AfterWarmUp(const PolySchedule& s, std::int64_t n) {
  return s.final_rate +
         (s.base_rate - s.final_rate) * std::pow(1 - Part(n, s.max_update, s.warm_up), s.power);
}

double AfterWarmUp(const CosineSchedule& s, std::int64_t n) {
  const double angle = std::numbers::pi * Part(n, s.max_update, s.warm_up);
  return s.final_rate + (s.base_rate - s.final_rate) * (1 + std::cos(angle)) / 2;
}

}  // namespace

void CheckSchedule(const LearningRateSchedule& schedule) {
  std::visit(
      [](const auto& s) {
        CheckRate("base_rate", s.base_rate);
        Check(s.warm_up.steps >= 0, "warm_up.steps", "at least 0",
              static_cast<double>(s.warm_up.steps));
        CheckRate("warm_up.begin_rate", s.warm_up.begin_rate);
        Check(s.warm_up.begin_rate <= s.base_rate, "warm_up.begin_rate",
              fmt::format("at most base_rate, {}", s.base_rate), s.warm_up.begin_rate);
        CheckFields(s);
      },
      schedule);
}

double RateAt(const LearningRateSchedule& schedule, std::int64_t n) {
  return std::visit(
      [n](const auto& s) {
        const WarmUp& warm_up = s.warm_up;
        if (n >= warm_up.steps) return AfterWarmUp(s, n);
        if (warm_up.is_constant) return warm_up.begin_rate;
        return warm_up.begin_rate + (s.base_rate - warm_up.begin_rate) * static_cast<double>(n) /
                                        static_cast<double>(warm_up.steps);
      },
      schedule);
}

}  // namespace heddle
