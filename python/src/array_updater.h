// A built-in optimizer applied to arrays outside of any store: what heddle.optimizer.Updater calls.
#pragma once

#include <heddle/device.h>
#include <heddle/engine.h>
#include <heddle/key.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "kvstore/optimizer_states.h"
#include "kvstore/update_state.h"

namespace heddle::python {

// The rates of one update, in place of the optimizer's; by the multipliers of the key as those.
struct UpdateRates {
  std::optional<double> learning_rate;
  std::optional<double> weight_decay;
};

// Threads: all methods, any thread.
class ArrayUpdater {
 public:
  explicit ArrayUpdater(OptimizerPtr optimizer) : optimizer_(std::move(optimizer)) {}

  // Queues an update of `weight` by `gradient`, with the state that belongs to `key`.
  // InvalidArgument unless both are of one shape, dtype and device, those of the key's first update
  // among them, and fit the optimizer, as the rates do that are given; nothing happens then.
  // A row-sparse gradient of a lazy rule changes only the rows that it has.
  void Update(KeyRef key, const NDArray& gradient, const NDArray& weight,
              const UpdateRates& rates = {}) EXCLUDES(mutex_);
  void Update(KeyRef key, const RowSparseNDArray& gradient, const NDArray& weight,
              const UpdateRates& rates = {}) EXCLUDES(mutex_);
  // A row-sparse weight gets the rows that an update changes: of a lazy rule those of the gradient,
  // of any other one all.
  void Update(KeyRef key, const RowSparseNDArray& gradient, const RowSparseNDArray& weight,
              const UpdateRates& rates = {}) EXCLUDES(mutex_);
  // The next update of the key is the first one.
  void Forget(KeyRef key) EXCLUDES(mutex_);

  // A file of states as KVStore::SaveOptimizerStates writes it, of the keys that have any; errors
  // as there.
  void SaveStates(const std::string& file, bool with_optimizer) const EXCLUDES(mutex_);
  // Takes the states of a file in place of those that are. `forms`, unless null: the keys that
  // there are. Errors as KVStore::LoadOptimizerStates, but keys may lack states.
  void LoadStates(const std::string& file, Engine& engine,
                  const std::vector<kvstore::KeyForm>* forms = nullptr) EXCLUDES(mutex_);
  // How often each key has been updated.
  std::vector<std::pair<Key, std::int64_t>> Counts() const EXCLUDES(mutex_);

 private:
  template <class Gradient, class Weight>
  void UpdateBy(KeyRef key, const Gradient& gradient, const Weight& weight,
                const UpdateRates& rates) EXCLUDES(mutex_);

  struct Slot {
    // As the weight that the state is used for.
    template <class Weight>
    void CheckLike(const Weight& weight) const;

    std::shared_ptr<kvstore::UpdateState> state;
    // Of that weight: its Var guards the state. Nothing: there was none so far.
    std::optional<Var> guard = {};
    Engine* engine = nullptr;
    Device device = {};
    Shape shape;
    DType dtype = DType::kFloat32;
    std::int64_t updates = 0;
  };

  const OptimizerPtr optimizer_;
  mutable Mutex mutex_;
  std::map<Key, Slot> slots_ GUARDED_BY(mutex_);
  std::int64_t num_update_ GUARDED_BY(mutex_) = 0;  // the most of any key
};

}  // namespace heddle::python
