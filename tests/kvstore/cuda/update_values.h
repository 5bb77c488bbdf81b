// Arrays and rules for tests of updates on GPUs.
#pragma once

#include <heddle/optimizer.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "kvstore/optimizer/gpu_updates.h"
#include "kvstore/optimizer/update_plan.h"
#include "ops/reduce.h"
#include "tests/ops/ops_testing.h"

namespace heddle::kvstore::cuda {

using Parameters = std::vector<std::pair<std::string_view, double>>;
using RulePtr = std::shared_ptr<const internal::UpdateRule>;

// The rule of an optimizer with those of the wanted parameters that it has.
inline RulePtr MakeRuleOf(std::string_view optimizer, const Parameters& wanted) {
  Parameters parameters;
  for (const auto& [name, value] : MakeOptimizer(optimizer)->Parameters()) {
    for (const auto& [other, number] : wanted) {
      if (name == other) parameters.emplace_back(name, number);
    }
  }
  return MakeOptimizer(optimizer, parameters)->plan()->rule;
}

// The arrays of one key.
template <typename T>
struct Value {
  Value(std::size_t count, std::size_t offset, bool multi_precision, std::mt19937_64& random)
      : weight(count, offset), gradient(count, offset), has_master(multi_precision) {
    const auto some = [&] { return std::uniform_real_distribution<float>(-2, 2)(random); };
    master = std::make_unique<ops::Array<float>>(count, offset);
    for (std::size_t k = 0; k < internal::kUpdateStatesMax; ++k) {
      states.push_back(std::make_unique<ops::Array<T>>(count, offset));
      wide_states.push_back(std::make_unique<ops::Array<float>>(count, offset));
    }
    for (std::size_t i = 0; i < count; ++i) {
      weight[i] = T(some());
      gradient[i] = random() % 32 == 0 ? T(0.0F) : T(some());
      (*master)[i] = some();
      for (std::size_t k = 0; k < internal::kUpdateStatesMax; ++k) {
        const float state = random() % 32 == 0 ? 0 : std::abs(some());
        (*states[k])[i] = T(state);
        (*wide_states[k])[i] = state;
      }
    }
  }

  void CopyFrom(Value& other) {
    weight.CopyFrom(other.weight);
    gradient.CopyFrom(other.gradient);
    master->CopyFrom(*other.master);
    for (std::size_t k = 0; k < internal::kUpdateStatesMax; ++k) {
      states[k]->CopyFrom(*other.states[k]);
      wide_states[k]->CopyFrom(*other.wide_states[k]);
    }
  }

  internal::UpdateRun Run(const internal::UpdateRule& rule, const internal::KeyUpdate& update) {
    internal::UpdateRun run = {};
    run.update = &update;
    run.dtype = kDTypeOf<T>;
    run.weight = weight.data();
    run.gradient = gradient.data();
    if (has_master) run.master = master->data();
    for (std::size_t k = 0; k < rule.num_states(); ++k) {
      run.states[k] = has_master ? static_cast<void*>(wide_states[k]->data())
                                 : static_cast<void*>(states[k]->data());
    }
    run.count = weight.size();
    run.first = 12345;
    return run;
  }

  ops::Array<T> weight, gradient;
  std::unique_ptr<ops::Array<float>> master;
  std::vector<std::unique_ptr<ops::Array<T>>> states;
  std::vector<std::unique_ptr<ops::Array<float>>> wide_states;
  bool has_master;
};

// What the passes of one update have summed.
using PassSums =
    std::array<std::array<double, internal::kUpdateSumsMax>, internal::kUpdatePassesMax - 1>;

// Passes of one update: those that sum of a whole value.
inline void PassesOnCpu(const internal::UpdateRule& rule, internal::UpdateRun run,
                        internal::KeyUpdate update, const GpuUpdates::Passes& passes,
                        PassSums* kept) {
  run.update = &update;
  update.pass = passes.begin;
  update.sums = *kept;
  const std::size_t blocks = ops::ReductionBlocks(run.count);
  std::vector<double> sums(internal::kUpdateSumsMax * blocks);
  for (; update.pass < passes.end; ++update.pass) {
    const bool last = update.pass + 1 == passes.all;
    for (std::size_t k = 0; k < internal::kUpdateSumsMax; ++k) {
      run.block_sums[k] = last ? nullptr : sums.data() + k * blocks;
    }
    rule.Update(run);
    if (last) return;
    for (std::size_t k = 0; k < internal::kUpdateSumsMax; ++k) {
      update.sums[static_cast<std::size_t>(update.pass)][k] =
          ops::AddBlocks({sums.data() + k * blocks, blocks});
    }
  }
  *kept = update.sums;
}

// All passes of one update of a whole value.
inline void UpdateOnCpu(const internal::UpdateRule& rule, const internal::UpdateRun& run,
                        const internal::KeyUpdate& update, int passes) {
  PassSums sums = update.sums;
  PassesOnCpu(rule, run, update, {passes, 0, passes}, &sums);
}

}  // namespace heddle::kvstore::cuda
