// The updates of all optimizers on a GPU: for each, which formulas a run takes. What the CPU does
// is in kvstore/optimizer/<name>.cc.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kvstore/optimizer/cuda/all_numbers.h"
#include "kvstore/optimizer/cuda/passes.h"
#include "kvstore/optimizer/least_rate.h"
#include "kvstore/optimizer/norms.h"
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

// These formulas divide by the learning rate.

template <class Planner>
void Plan(const FtmlNumbers& numbers, const UpdateRun& run, Planner& planner) {
  if (run.update->learning_rate < kLeastDividingRate) return;
  planner.Apply(run, numbers.gradient, [&](auto gradient) {
    return one_lane::FtmlFormula<decltype(gradient)>(gradient, *run.update, numbers);
  });
}

template <class Planner>
void Plan(const FtrlNumbers& numbers, const UpdateRun& run, Planner& planner) {
  if (run.update->learning_rate < kLeastDividingRate) return;
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

// ---- By rows

template <class Gradient>
struct LateGroupAdaGradStep : one_lane::GroupAdaGradStep<Gradient> {
  using C = typename Gradient::Number;

  LateGroupAdaGradStep(Gradient gradient, const internal::KeyUpdate& update,
                       const GroupAdaGradNumbers& numbers)
      : one_lane::GroupAdaGradStep<Gradient>(gradient, update.learning_rate, 1),
        epsilon(numbers.epsilon) {}

  HEDDLE_FORMULA void TakeRow(double mean_square, C& history) {
    history = history + static_cast<C>(mean_square);
    this->root = static_cast<C>(std::sqrt(static_cast<double>(history) + epsilon));
  }

  double epsilon;
};

template <class Planner>
void Plan(const GroupAdaGradNumbers& numbers, const UpdateRun& run, Planner& planner) {
  planner.ApplyRows(
      run, static_cast<std::uint64_t>(run.update->row_length), numbers.gradient,
      [](auto gradient) { return one_lane::ScaledGradient<decltype(gradient)>(gradient); },
      [&](auto gradient) {
        return LateGroupAdaGradStep<decltype(gradient)>(gradient, *run.update, numbers);
      });
}

// ---- With norms. The numbers that depend on them are made by the threads of the last pass.

// The gradient as it is, for its norm.
template <class Gradient>
struct PushedGradient : ops::one_lane::Formula<Gradient> {
  static constexpr int kOutputs = 1;
  static constexpr bool kWritesWeight = false;

  template <class E>
  HEDDLE_FORMULA void operator()(E& e) const {
    e.output[0] = e.gradient;
  }
};

template <class Gradient>
struct LateLambStep : one_lane::LambStep<Gradient> {
  using C = typename Gradient::Number;
  static constexpr bool kTakesSums = true;

  LateLambStep(const internal::KeyUpdate& update, const LambNumbers& numbers)
      : one_lane::LambStep<Gradient>(update, numbers, 1),
        learning_rate(update.learning_rate),
        lower(numbers.lower_bound),
        upper(numbers.upper_bound) {}

  HEDDLE_FORMULA void TakeSums(const double* sums) {
    const double weight_norm = BoundedNorm(sums[0], lower, upper);
    this->rate = static_cast<C>(learning_rate * TrustRatio(weight_norm, std::sqrt(sums[1])));
  }

  double learning_rate, lower, upper;
};

template <class Planner>
void Plan(const LambNumbers& numbers, const GpuRun& run, Planner& planner) {
  const internal::KeyUpdate& update = *run.update;
  if (update.pass == 0) {
    planner.template ApplySums<true>(
        run, numbers.gradient,
        [&](auto gradient) {
          return one_lane::LambMoments<decltype(gradient)>(gradient, update, numbers);
        },
        run.block_sums.data(), run.SumsOfPass(0));
    return;
  }
  planner.Apply(
      run, {}, [&](auto gradient) { return LateLambStep<decltype(gradient)>(update, numbers); }, 0,
      run.sums);
}

// By what gradients are divided: of pass 0 the sum of their squares.
template <typename C>
HEDDLE_FORMULA C LansScale(double rescale, const double* sums) {
  const C norm = static_cast<C>(std::abs(rescale) * std::sqrt(sums[0]));
  return norm > 0 ? norm : C{1};
}

template <class Gradient>
struct LateLansMoments : one_lane::LansMoments<Gradient> {
  using C = typename Gradient::Number;
  static constexpr bool kTakesSums = true;

  LateLansMoments(Gradient gradient, const internal::KeyUpdate& update, const LansNumbers& numbers)
      : one_lane::LansMoments<Gradient>(gradient, update, numbers),
        rescale(numbers.gradient.rescale) {}

  HEDDLE_FORMULA void TakeSums(const double* sums) {
    this->directions.scale = LansScale<C>(rescale, sums);
  }

  double rescale;
};

template <class Gradient>
struct LateLansStep : one_lane::LansStep<Gradient> {
  using C = typename Gradient::Number;
  static constexpr bool kTakesSums = true;

  LateLansStep(Gradient gradient, const internal::KeyUpdate& update, const LansNumbers& numbers)
      : one_lane::LansStep<Gradient>(gradient, update, numbers, 1, 1),
        rescale(numbers.gradient.rescale),
        learning_rate(update.learning_rate),
        beta1(numbers.beta1),
        lower(numbers.lower_bound),
        upper(numbers.upper_bound) {}

  HEDDLE_FORMULA void TakeSums(const double* sums) {
    this->directions.scale = LansScale<C>(rescale, sums);
    const double* const of_directions = sums + internal::kUpdateSumsMax;
    const double weight_norm = BoundedNorm(of_directions[0], lower, upper);
    const double mean_ratio = TrustRatio(weight_norm, std::sqrt(of_directions[1]));
    const double gradient_ratio = TrustRatio(weight_norm, std::sqrt(of_directions[2]));
    this->mean_rate = static_cast<C>(learning_rate * mean_ratio * beta1);
    this->gradient_rate = static_cast<C>(learning_rate * gradient_ratio * (1 - beta1));
  }

  double rescale, learning_rate, beta1, lower, upper;
};

template <class Planner>
void Plan(const LansNumbers& numbers, const GpuRun& run, Planner& planner) {
  const internal::KeyUpdate& update = *run.update;
  if (update.pass == 0) {
    planner.template ApplySums<false>(
        run, {}, [](auto gradient) { return PushedGradient<decltype(gradient)>(); },
        run.block_sums.data(), run.SumsOfPass(0));
  } else if (update.pass == 1) {
    planner.template ApplySums<true>(
        run, numbers.gradient,
        [&](auto gradient) {
          return LateLansMoments<decltype(gradient)>(gradient, update, numbers);
        },
        run.block_sums.data(), run.SumsOfPass(1), run.sums);
  } else {
    planner.Apply(
        run, numbers.gradient,
        [&](auto gradient) { return LateLansStep<decltype(gradient)>(gradient, update, numbers); },
        0, run.sums);
  }
}

template <class Gradient, bool kMomentum>
struct LateLarsFormula : one_lane::MomentumFormula<Gradient, kMomentum> {
  using C = typename Gradient::Number;
  static constexpr bool kTakesSums = true;

  LateLarsFormula(Gradient gradient, const internal::KeyUpdate& update, const LarsNumbers& numbers)
      : one_lane::MomentumFormula<Gradient, kMomentum>(
            gradient, update.learning_rate, update.weight_decay, numbers.MomentumOf(update)),
        numbers(numbers),
        learning_rate(update.learning_rate),
        weight_decay(update.weight_decay) {}

  HEDDLE_FORMULA void TakeSums(const double* sums) {
    this->rate = static_cast<C>(learning_rate * numbers.Scale(sums, weight_decay));
    this->decay = this->rate * static_cast<C>(weight_decay);
  }

  LarsNumbers numbers;
  double learning_rate, weight_decay;
};

template <class Planner>
void Plan(const LarsNumbers& numbers, const GpuRun& run, Planner& planner) {
  const internal::KeyUpdate& update = *run.update;
  if (!LarsNumbers::IsScaled(update.key)) {
    SgdNumbers sgd = {.gradient = numbers.gradient, .momentum = numbers.MomentumOf(update)};
    return Plan(sgd, run, planner);
  }
  if (update.pass == 0) {
    planner.template ApplySums<true>(
        run, {}, [](auto gradient) { return PushedGradient<decltype(gradient)>(); },
        run.block_sums.data(), run.SumsOfPass(0));
    return;
  }
  const auto apply = [&](auto momentum) {
    planner.Apply(
        run, numbers.gradient,
        [&](auto gradient) {
          return LateLarsFormula<decltype(gradient), decltype(momentum)::value>(gradient, update,
                                                                                numbers);
        },
        0, run.sums);
  };
  run.states[0] != nullptr ? apply(std::true_type()) : apply(std::false_type());
}

template <class Gradient, bool kMomentum>
struct LateLbSgdStep : one_lane::LbSgdStep<Gradient, kMomentum> {
  using C = typename Gradient::Number;
  static constexpr bool kTakesSums = true;

  LateLbSgdStep(Gradient gradient, const internal::KeyUpdate& update, const LbSgdNumbers& numbers)
      : one_lane::LbSgdStep<Gradient, kMomentum>(
            gradient, update, update.learning_rate * numbers.WarmupFactor(numbers.Count(update)),
            numbers.momentum, numbers.batch_scale),
        by_norms(numbers.strategy == LbSgdNumbers::kLars),
        learning_rate(update.learning_rate),
        weight_decay(update.weight_decay) {}

  HEDDLE_FORMULA void TakeSums(const double* sums) {
    if (!by_norms) return;
    this->rate = static_cast<C>(learning_rate * LbSgdNumbers::LarsFactor(sums, weight_decay));
  }

  bool by_norms;
  double learning_rate, weight_decay;
};

template <class Planner>
void Plan(const LbSgdNumbers& numbers, const GpuRun& run, Planner& planner) {
  const internal::KeyUpdate& update = *run.update;
  if (!numbers.Steps(update)) {
    planner.Apply(run, {},
                  [](auto gradient) { return one_lane::LbSgdAccumulate<decltype(gradient)>(); });
    return;
  }
  if (numbers.strategy == LbSgdNumbers::kLars && update.pass == 0) {
    planner.template ApplySums<true>(
        run, {},
        [&](auto gradient) {
          return one_lane::LbSgdBatch<decltype(gradient)>(numbers.batch_scale);
        },
        run.block_sums.data(), run.SumsOfPass(0));
    return;
  }
  const auto apply = [&](auto momentum) {
    planner.Apply(
        run, numbers.gradient,
        [&](auto gradient) {
          return LateLbSgdStep<decltype(gradient), decltype(momentum)::value>(gradient, update,
                                                                              numbers);
        },
        0, run.sums);
  };
  run.states[1] != nullptr ? apply(std::true_type()) : apply(std::false_type());
}

}  // namespace heddle::kvstore::cuda
