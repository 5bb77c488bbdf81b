// Files of optimizer states: docs/files.md says what is in them.
#pragma once

#include <heddle/key.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <array>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvstore/optimizer/update_rule.h"

namespace heddle::kvstore {

// What a store keeps of one key.
struct KeyStates {
  Key key;
  Shape shape;  // of the value
  DType dtype = DType::kFloat32;
  std::int64_t updates = 0;  // pushed
  std::int64_t step = 0;     // done
  std::array<double, internal::kUpdateNumbersMax> numbers = {};
  NDArray master;                                          // empty: none
  std::array<NDArray, internal::kUpdateStatesMax> arrays;  // empty: none
  NDArray own;               // bytes of an optimizer that only servers have; empty: none
  std::exception_ptr error;  // why there is none of all this; null: it is there
};

// What the value of a key looks like.
struct KeyForm {
  Key key;
  Shape shape;
  DType dtype = DType::kFloat32;
};

// The optimizer itself, so far as it can change.
struct OptimizerSettings {
  struct Multipliers {
    Key key;
    double learning_rate;
    double weight_decay;
  };
  std::vector<std::pair<std::string, double>> parameters;
  std::optional<LearningRateSchedule> schedule;
  std::vector<Multipliers> multipliers;
};

struct OptimizerStates {
  std::string optimizer;  // its name
  bool multi_precision = false;
  std::map<std::string, double> fixed;  // FixedParameters
  std::int64_t num_update = 0;
  std::vector<KeyStates> keys;
  std::optional<OptimizerSettings> settings;  // saved with the optimizer
};

// Returns when the file is in place. `rule` names the arrays. Errors as SaveArrays.
void WriteStates(const std::string& file, const OptimizerStates& states,
                 const internal::UpdateRule& rule);

// Arrays that nothing writes any more, on the CPU. IoError for a file that cannot be read, is not
// one of states, or of a version or with arrays that do not fit `rule`.
OptimizerStates ReadStates(const std::string& file, std::string_view optimizer,
                           const internal::UpdateRule& rule, Engine& engine);

OptimizerSettings SettingsOf(const Optimizer& optimizer);
// InvalidArgument, naming the file that they come from, unless `optimizer` can take the settings.
void CheckSettings(const std::string& file, const OptimizerSettings& settings,
                   const Optimizer& optimizer);
// Gives `optimizer` settings that CheckSettings accepted.
void ApplySettings(const OptimizerSettings& settings, Optimizer& optimizer);

}  // namespace heddle::kvstore
