// How an optimizer changes one key's value, with its parameters as they were at one moment.
//
// An update of a key is one call of UpdateRule::Begin and then one or more passes over its
// elements. A pass calls Update for runs of elements: all elements, cut into runs in any way, on
// any threads, without changing the bits of the result.
//
// Row-sparse gradients. A lazy rule leaves the rows that are not in the gradient alone, states
// included: its last pass gets runs of rows that are there, and `gradient` points at their
// values. All else, and the earlier passes of a lazy rule, takes the gradient as if it were dense,
// with zeros in the missing rows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <typeinfo>

#include "ops/update.h"

namespace heddle::internal {

inline constexpr std::size_t kUpdateStatesMax = ops::kUpdateStatesMax;
inline constexpr std::size_t kUpdatePassesMax = 3;
inline constexpr std::size_t kUpdateSumsMax = 3;  // in a pass
inline constexpr std::size_t kUpdateNumbersMax = 2;

// One array that is kept for each key.
struct UpdateStateType {
  std::string_view name;  // "momentum": how files of states call it
  enum class Start { kZeros, kWeight };
  Start start = Start::kZeros;  // kWeight: as a copy of the value before the first update
  bool per_row = false;         // one number for each row of the value, else one for each element
};

// What the elements of one update of one key share.
struct KeyUpdate {
  double learning_rate;     // as scheduled, times the key's multiplier
  double weight_decay;      // times the key's multiplier
  std::int64_t step;        // 1 for the first update of the key
  std::string_view key;     // its text; empty for an integer key
  std::uint64_t key_hash;   // the same in every process
  std::int64_t row_length;  // elements in a row: of shape (n, a, b) a * b, of shape (n) 1
  // Numbers that the rule keeps for the key, 0 at first.
  std::array<double, kUpdateNumbersMax> numbers;
  int pass;  // 0 for the first
  // What each pass but the last has summed, once it has.
  std::array<std::array<double, kUpdateSumsMax>, kUpdatePassesMax - 1> sums;
};

// A run of consecutive elements of one key. The states are those of the run's first element, or of
// its first row; null is one that has not been needed so far.
struct UpdateRun : ops::UpdateArrays {
  const KeyUpdate* update;
  std::int64_t first;  // the place of the run's first element among those of the value
  // In passes that sum: where the sums of each block of ops::kReductionBlock elements go, from the
  // block of the run's first element on. Such runs start at the start of a block, and end at the
  // end of one or of the value. Null in the last pass.
  std::array<double*, kUpdateSumsMax> block_sums;
};

// What a rule computes with, for others that compute the same: the kernels for GPUs. A struct of
// one type for each optimizer (kvstore/optimizer/<name>-inl.h), which lives as long as the rule.
struct RuleNumbers {
  const std::type_info* type = nullptr;
  const void* value = nullptr;
};
template <class Numbers>
RuleNumbers NumbersOf(const Numbers& numbers) {
  return {&typeid(Numbers), &numbers};
}

// Immutable: an optimizer makes a new one when a parameter changes, and each push keeps the one
// that was current. Threads: any.
class UpdateRule {
 public:
  UpdateRule() = default;
  virtual ~UpdateRule() = default;
  UpdateRule(const UpdateRule&) = delete;
  UpdateRule& operator=(const UpdateRule&) = delete;

  // All states that such an optimizer may keep, at most kUpdateStatesMax; the first num_states() of
  // them are needed with these parameters.
  virtual std::span<const UpdateStateType> states() const { return {}; }
  virtual std::size_t num_states() const { return states().size(); }
  // Row-sparse gradients touch only their rows of such a weight.
  virtual bool lazy(bool /*row_sparse_weight*/) const { return false; }
  // Runs consist of whole rows.
  virtual bool by_rows() const { return false; }
  // Why such an update cannot be: what was expected and given. Empty: it can.
  struct Subject {
    int dimensions;  // of the value
    double weight_decay;
    bool row_sparse;  // the gradient
  };
  virtual std::string Refusal(const Subject& /*subject*/) const { return {}; }

  // Called once before the first run. May change all of `update`. Returns the number of passes,
  // at most kUpdatePassesMax; all but the last one sum.
  virtual int Begin(KeyUpdate& /*update*/) const { return 1; }
  virtual void Update(const UpdateRun& run) const = 0;
  // Empty: such a rule works on CPUs alone.
  virtual RuleNumbers numbers() const { return {}; }
};

}  // namespace heddle::internal
