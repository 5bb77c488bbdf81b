// What a store keeps of one key for its optimizer.
#pragma once

#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/mutex.h"
#include "kvstore/optimizer/update_rule.h"

namespace heddle::kvstore {

class GpuWork;
struct KeyStates;

// An update that has begun: for all its passes, apart from the gradient.
struct ArrayUpdate {
  const internal::UpdateRule* rule;
  internal::KeyUpdate key;
  internal::UpdateRun run;  // what belongs to the first element; without `update`
  int passes;
  std::int64_t first_element = 0;  // of the value, in the array of which it is a part
};

// Like the value itself it is touched only by ops that write the value's Var, which orders them and
// guards the arrays.
struct UpdateState {
  explicit UpdateState(bool multi_precision) : multi_precision(multi_precision) {}

  // Counts the step and readies the arrays that `rule` needs: dense ones also for a row-sparse
  // value, whose `weight` is left to the caller.
  // `gpu`: of a value on a GPU.
  ArrayUpdate Begin(const internal::UpdateRule& rule, KeyRef key, const NDArray& value,
                    double learning_rate, double weight_decay, const GpuWork* gpu = nullptr);
  ArrayUpdate Begin(const internal::UpdateRule& rule, KeyRef key, const RowSparseNDArray& value,
                    double learning_rate, double weight_decay, const GpuWork* gpu = nullptr);

  // Copies all that is kept, in an op that writes the value's Var.
  void SnapshotTo(KeyStates* out, const GpuWork* gpu = nullptr) const;

  const bool multi_precision;
  // What `master` and `arrays` start as where these are not empty: from a file; arrays that nothing
  // writes any more.
  NDArray restored_master;
  std::array<NDArray, internal::kUpdateStatesMax> restored;

  NDArray master;  // float32; empty until the first update, and where there is no need for it
  std::array<NDArray, internal::kUpdateStatesMax> arrays;  // empty: not needed so far
  std::array<double, internal::kUpdateNumbersMax> numbers = {};
  std::int64_t step = 0;  // updates so far

 private:
  std::optional<std::uint64_t> key_hash_;  // once known: the key is always the same

  template <class Value>
  ArrayUpdate BeginFor(const internal::UpdateRule& rule, KeyRef key, const Value& value,
                       double learning_rate, double weight_decay, const GpuWork* gpu);
};

// Where the states of a key begin: at SetOptimizer, or at LoadOptimizerStates. Threads: any.
class StatesOrigin {
 public:
  // `number` counts the origins of a store. `loaded`: what the states start as; null: fresh ones.
  StatesOrigin(std::uint64_t number, bool multi_precision,
               std::unique_ptr<UpdateState> loaded = nullptr)
      : number(number), multi_precision(multi_precision), loaded_(std::move(loaded)) {}

  // What was loaded goes to the first who asks, fresh states to all others.
  std::unique_ptr<UpdateState> Start() EXCLUDES(mutex_);
  // `use` gets what was loaded, if it is still here.
  template <class Use>
  void ReadLoaded(const Use& use) const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (loaded_ != nullptr) use(*loaded_);
  }

  const std::uint64_t number;
  const bool multi_precision;

 private:
  mutable Mutex mutex_;
  std::unique_ptr<UpdateState> loaded_ GUARDED_BY(mutex_);
};

// What the updates of one key by a built-in optimizer share until either changes. One for each key:
// the ops of a key count theirs, and would take turns at a count that all keys shared, each on its
// core.
struct UpdateBasis {
  std::shared_ptr<const internal::UpdateRule> rule;
  std::shared_ptr<StatesOrigin> origin;
};

// An update by a built-in optimizer; without a basis: the sum replaces the value.
struct Update {
  std::shared_ptr<const UpdateBasis> basis;
  double learning_rate = 0;  // of the key
  double weight_decay = 0;
};

}  // namespace heddle::kvstore
