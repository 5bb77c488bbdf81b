// Learning rates that change with the number of updates.
//
//   sgd->SetSchedule(heddle::CosineSchedule{.max_update = 10000, .base_rate = 0.4});
//
// The number n counts from 1: the most updates that any key of the store has had, with the update
// that is about to be. A push counts when it is made, also if its input fails and it updates
// nothing.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

namespace heddle {

// For n < steps the rate grows from begin_rate towards base_rate, or is begin_rate all the time.
struct WarmUp {
  std::int64_t steps = 0;  // >= 0
  double begin_rate = 0;   // at most base_rate
  bool is_constant = false;

  friend bool operator==(const WarmUp&, const WarmUp&) = default;
};

// base_rate, multiplied by `factor` each time another `step` updates are done; stop_rate where that
// falls below it.
struct FactorSchedule {
  std::int64_t step = 1;  // >= 1
  double factor = 1;      // in (0, 1]
  double stop_rate = 1e-8;
  double base_rate = 0.01;
  WarmUp warm_up = {};

  friend bool operator==(const FactorSchedule&, const FactorSchedule&) = default;
};

// base_rate, multiplied by `factor` after each of these updates.
struct MultiFactorSchedule {
  std::vector<std::int64_t> steps = {};  // one at least, >= 1, increasing
  double factor = 1;                     // in (0, 1]
  double base_rate = 0.01;
  WarmUp warm_up = {};

  friend bool operator==(const MultiFactorSchedule&, const MultiFactorSchedule&) = default;
};

// final_rate + (base_rate - final_rate) * (1 - p)^power, where p goes from 0 at the end of the
// warm-up to 1 at max_update and stays there.
struct PolySchedule {
  std::int64_t max_update = 1;  // >= 1, more than the steps of the warm-up
  double power = 2;             // >= 0
  double final_rate = 0;
  double base_rate = 0.01;
  WarmUp warm_up = {};

  friend bool operator==(const PolySchedule&, const PolySchedule&) = default;
};

// final_rate + (base_rate - final_rate) * (1 + cos(pi * p)) / 2, with the same p.
struct CosineSchedule {
  std::int64_t max_update = 1;
  double final_rate = 0;
  double base_rate = 0.01;
  WarmUp warm_up = {};

  friend bool operator==(const CosineSchedule&, const CosineSchedule&) = default;
};

using LearningRateSchedule =
    std::variant<FactorSchedule, MultiFactorSchedule, PolySchedule, CosineSchedule>;

// InvalidArgument, naming the field, for numbers outside of what the comments above say, rates that
// are negative or not finite, and a warm-up that begins above base_rate.
void CheckSchedule(const LearningRateSchedule& schedule);

// Of a schedule that CheckSchedule accepts, for n >= 0.
double RateAt(const LearningRateSchedule& schedule, std::int64_t n);

}  // namespace heddle
