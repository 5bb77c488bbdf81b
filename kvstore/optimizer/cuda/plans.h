// The updates of all optimizers on a GPU: for each, which formulas a run takes. What the CPU does
// is in kvstore/optimizer/<name>.cc.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kvstore/optimizer/cuda/all_numbers.h"
#include "kvstore/optimizer/update_rule.h"
#include "ops/cuda/update_plan.h"

namespace heddle::kvstore::cuda {

using internal::UpdateRun;

// ---- Formulas that differ by the parameters alone

#define HEDDLE_PLAN_ONE_FORMULA(name)                                                     \
  template <class Planner>                                                                \
  void Plan(const name##Numbers& numbers, const UpdateRun& run, Planner& planner) {       \
    planner.Apply(run, numbers.gradient, [&](auto gradient) {                             \
      return one_lane::name##Formula<decltype(gradient)>(gradient, *run.update, numbers); \
    });                                                                                   \
  }
HEDDLE_PLAN_ONE_FORMULA(AdaBelief)
HEDDLE_PLAN_ONE_FORMULA(AdaDelta)
HEDDLE_PLAN_ONE_FORMULA(AdaGrad)
HEDDLE_PLAN_ONE_FORMULA(Adam)
HEDDLE_PLAN_ONE_FORMULA(Adamax)
HEDDLE_PLAN_ONE_FORMULA(AdamW)
HEDDLE_PLAN_ONE_FORMULA(Nadam)
#undef HEDDLE_PLAN_ONE_FORMULA

// By what a schedule may end with, 0, these formulas divide: nothing changes then.

template <class Planner>
void Plan(const FtmlNumbers& numbers, const UpdateRun& run, Planner& planner) {
  if (run.update->learning_rate == 0) return;
  planner.Apply(run, numbers.gradient, [&](auto gradient) {
    return one_lane::FtmlFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

template <class Planner>
void Plan(const FtrlNumbers& numbers, const UpdateRun& run, Planner& planner) {
  if (run.update->learning_rate == 0) return;
  planner.Apply(run, numbers.gradient, [&](auto gradient) {
    return one_lane::FtrlFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

// ---- With momentum or without. A momentum that was kept once is kept on, also while the parameter
// is 0.

template <class Planner>
void Plan(const SgdNumbers& numbers, const UpdateRun& run, Planner& planner) {
  const auto apply = [&](auto momentum) {
    planner.Apply(run, numbers.gradient, [&](auto gradient) {
      return one_lane::MomentumFormula<decltype(gradient), decltype(momentum)::value>(
          gradient, run.update->learning_rate, run.update->weight_decay, numbers.momentum);
    });
  };
  run.states[0] != nullptr ? apply(std::true_type()) : apply(std::false_type());
}

template <class Planner>
void Plan(const NagNumbers& numbers, const UpdateRun& run, Planner& planner) {
  const auto apply = [&](auto momentum) {
    planner.Apply(run, numbers.gradient, [&](auto gradient) {
      return one_lane::NagFormula<decltype(gradient), decltype(momentum)::value>(
          gradient, *run.update, numbers);
    });
  };
  run.states[0] != nullptr ? apply(std::true_type()) : apply(std::false_type());
}

template <class Planner>
void Plan(const DcaSgdNumbers& numbers, const UpdateRun& run, Planner& planner) {
  const auto apply = [&](auto momentum) {
    planner.Apply(run, numbers.gradient, [&](auto gradient) {
      return one_lane::DcaSgdFormula<decltype(gradient), decltype(momentum)::value>(
          gradient, *run.update, numbers);
    });
  };
  run.states[1] != nullptr ? apply(std::true_type()) : apply(std::false_type());
}

template <class Planner>
void Plan(const SignumNumbers& numbers, const UpdateRun& run, Planner& planner) {
  const auto apply = [&](auto momentum) {
    planner.Apply(run, numbers.gradient, [&](auto gradient) {
      return one_lane::SignumFormula<decltype(gradient), decltype(momentum)::value>(
          gradient, *run.update, numbers);
    });
  };
  numbers.momentum != 0 ? apply(std::true_type()) : apply(std::false_type());
}

// ---- Others

template <class Planner>
void Plan(const RmsPropNumbers& numbers, const UpdateRun& run, Planner& planner) {
  const auto apply = [&](auto centered) {
    planner.Apply(run, numbers.gradient, [&](auto gradient) {
      return one_lane::RmsPropFormula<decltype(gradient), decltype(centered)::value>(
          gradient, *run.update, numbers);
    });
  };
  numbers.centered ? apply(std::true_type()) : apply(std::false_type());
}

template <class Planner>
void Plan(const TestNumbers& numbers, const UpdateRun& run, Planner& planner) {
  planner.Apply(run, numbers.gradient,
                [&](auto gradient) { return one_lane::TestFormula<decltype(gradient)>(gradient); });
}

// SgldFormula with noise that is drawn on the way, rounded as the CPU's buffer of it is.
template <class Gradient>
struct SgldDrawing : one_lane::SgldFormula<Gradient> {
  using Base = one_lane::SgldFormula<Gradient>;
  using C = typename Gradient::Number;
  static constexpr int kStates = 0;
  static constexpr bool kTakesPlace = true;

  SgldDrawing(Gradient gradient, const internal::KeyUpdate& update, const SgldNumbers& numbers)
      : Base(gradient, update),
        normal(numbers.seed, update),
        deviation(std::sqrt(update.learning_rate)) {}

  template <typename S>
  HEDDLE_FORMULA void TakePlace(std::uint64_t place) {
    noise = ops::cuda::Widen(ops::cuda::Narrow<S>(static_cast<C>(deviation * normal[place])));
  }
  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.state[0] = {noise};
    Base::operator()(e);
  }

  NormalNumbers normal;
  double deviation;
  C noise = 0;
};

template <class Planner>
void Plan(const SgldNumbers& numbers, const UpdateRun& run, Planner& planner) {
  planner.Apply(
      run, numbers.gradient,
      [&](auto gradient) {
        return SgldDrawing<decltype(gradient)>(gradient, *run.update, numbers);
      },
      static_cast<std::uint64_t>(run.first));
}

}  // namespace heddle::kvstore::cuda
