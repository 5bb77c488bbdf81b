#include "kvstore/stored_value.h"

#include <heddle/error.h>

#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/array_kernels.h"
#include "storage/array_state.h"

namespace heddle::kvstore {

namespace {

std::span<const NDArray> View(const NDArray& array) { return {&array, 1}; }
std::span<const NDArray> View(const std::vector<NDArray>& arrays) { return arrays; }

std::vector<VarRef> VarsOf(std::span<const NDArray> arrays) {
  std::vector<VarRef> vars;
  vars.reserve(arrays.size());
  for (const NDArray& array : arrays) vars.push_back(array.var());
  return vars;
}

// out = the sum of the inputs as they reach the store.
void SumReceived(std::span<const NDArray> inputs, const Compression* compression,
                 const NDArray& out) {
  if (compression != nullptr) {
    SumCompressed(inputs, *compression, out);
  } else {
    SumArrays(inputs, out);
  }
}

}  // namespace

StoredValue::StoredValue(Key key, const NDArray& like, Device device, Engine& engine)
    : key_(std::move(key)), array_(like.shape(), like.dtype(), device, engine) {}

std::shared_ptr<StoredValue> StoredValue::MovedTo(Device device) const {
  auto moved = std::make_shared<StoredValue>(key_, array_, device, array_.engine());
  if (has_value_) moved->source_ = Current();
  moved->has_value_ = has_value_;
  return moved;
}

// ---- What the ops do

void StoredValue::FetchSource() {
  if (source_.empty()) return;
  CopyArray(source_, View(array_));
  source_ = NDArray();
}

std::exception_ptr StoredValue::ErrorOfInputs(std::span<const NDArray> inputs) const {
  for (const NDArray& input : inputs) {
    if (std::exception_ptr error = input.engine().ErrorOf(input.var())) return error;
  }
  return nullptr;
}

void StoredValue::RethrowIfPoisoned() const {
  if (std::exception_ptr error = array_.engine().ErrorOf(array_.var())) {
    std::rethrow_exception(std::move(error));
  }
}

void StoredValue::ApplyUpdate(std::span<const NDArray> inputs, const Update& update) {
  UpdateArray(
      update.state->Begin(*update.rule, key_, array_, update.learning_rate, update.weight_decay),
      inputs, array_);
}

// Sum and update in one op. Inputs: NDArray or std::vector<NDArray>.
template <class Inputs>
struct StoredValue::PushOp {
  std::shared_ptr<StoredValue> value;
  Inputs inputs;
  std::shared_ptr<const Compression> compression;
  Update update;

  void operator()() const {
    StoredValue& v = *value;
    v.RethrowIfPoisoned();
    if (std::exception_ptr error = v.ErrorOfInputs(View(inputs))) {
      v.input_error_ = std::move(error);
      return;
    }
    if (update.rule == nullptr) {
      SumReceived(View(inputs), compression.get(), v.array_);
      v.source_ = NDArray();
      v.has_value_ = true;
    } else {
      if (!v.has_value_) return;  // nothing to update: the push that made the key failed, see E2
      v.FetchSource();
      if (compression != nullptr) {
        // A value of its own: compressing is no pure function, and updates may take several passes.
        if (v.decompressed_.empty()) {
          v.decompressed_ =
              internal::NewArrayGuardedBy(v.array_, v.array_.shape(), v.array_.dtype());
        }
        SumCompressed(View(inputs), *compression, v.decompressed_);
        v.ApplyUpdate(View(v.decompressed_), update);
      } else {
        v.ApplyUpdate(View(inputs), update);
      }
    }
    v.input_error_ = nullptr;
  }
};

// Outputs: NDArray or std::vector<NDArray>.
template <class Outputs>
struct StoredValue::PullOp {
  std::shared_ptr<StoredValue> value;
  Outputs out;

  void operator()() const {
    const StoredValue& v = *value;
    if (v.input_error_ != nullptr) std::rethrow_exception(v.input_error_);  // E2
    if (!v.has_value_) {
      throw InvalidArgument(
          fmt::format("Pull: key {} was created by a push that came later", ToString(v.key_)));
    }
    CopyArray(v.Current(), View(out));
  }
};

struct StoredValue::ResetOp {
  std::shared_ptr<StoredValue> value;
  NDArray input;

  void operator()() const {
    StoredValue& v = *value;
    if (std::exception_ptr error = v.ErrorOfInputs(View(input))) {
      v.RethrowIfPoisoned();
      v.input_error_ = std::move(error);
      return;
    }
    SumArrays(View(input), v.array_);
    v.source_ = NDArray();
    v.has_value_ = true;
    v.input_error_ = nullptr;
  }
};

// The sum for an updater. If it fails it poisons the value as well as the sum, so that nothing that
// the updater pushes changes the value; SettleOp lifts that again.
struct StoredValue::MergeOp {
  std::shared_ptr<StoredValue> value;
  std::vector<NDArray> inputs;
  std::shared_ptr<const Compression> compression;
  NDArray merged;

  void operator()() const {
    StoredValue& v = *value;
    v.RethrowIfPoisoned();
    if (std::exception_ptr error = v.ErrorOfInputs(inputs))
      v.input_error_ = std::move(error);
    else if (v.has_value_)
      v.input_error_ = nullptr;
    if (v.input_error_ != nullptr) std::rethrow_exception(v.input_error_);
    v.FetchSource();
    SumReceived(inputs, compression.get(), merged);
  }
};

// After what the updater has pushed: a failed input leaves the value as it was and unpoisoned, a
// failed update leaves it poisoned.
struct StoredValue::SettleOp {
  std::shared_ptr<StoredValue> value;

  void operator()() const {
    const StoredValue& v = *value;
    std::exception_ptr error = v.array_.engine().ErrorOf(v.array_.var());
    if (error != nullptr && error != v.input_error_) std::rethrow_exception(std::move(error));
  }
};

// ---- How they are queued

void StoredValue::QueueInitialize(const NDArray& value) { value.CopyTo(array_); }

void StoredValue::WaitUntilInitialized() {
  array_.WaitToRead();
  has_value_ = true;
}

void StoredValue::QueuePush(const std::shared_ptr<StoredValue>& self,
                            std::span<const NDArray> values,
                            std::shared_ptr<const Compression> compression, Update update,
                            int priority) {
  Engine& engine = self->array_.engine();
  // The value is only in `writes`, although an update reads it: its body looks at poison itself.
  if (values.size() == 1) {
    engine.Push({.name = "kvstore.push",
                 .reads = {values[0].var()},
                 .writes = {self->array_.var()},
                 .device = self->array_.device(),
                 .priority = priority,
                 .run_when_poisoned = true},
                PushOp<NDArray>{self, values[0], std::move(compression), std::move(update)});
    return;
  }
  engine.Push({.name = "kvstore.push",
               .reads = VarsOf(values),
               .writes = {self->array_.var()},
               .device = self->array_.device(),
               .priority = priority,
               .run_when_poisoned = true},
              PushOp<std::vector<NDArray>>{
                  self, {values.begin(), values.end()}, std::move(compression), std::move(update)});
}

void StoredValue::QueuePull(const std::shared_ptr<StoredValue>& self, std::span<const NDArray> out,
                            int priority) {
  Engine& engine = self->array_.engine();
  const VarRef stored = self->array_.var();
  if (out.size() == 1) {
    OpOptions options{.name = "kvstore.pull",
                      .reads = {stored},
                      .writes = {out[0].var()},
                      .device = out[0].device(),
                      .lane = Lane::kCopy,
                      .priority = priority};
    if (out[0].is_partial()) options.reads = {stored, out[0].var()};
    engine.Push(options, PullOp<NDArray>{self, out[0]});
    return;
  }
  // Whole arrays take one op, which reads the value once. A part of an array has an op of its own:
  // that op does not run if its array is poisoned, which must not keep the others from their value.
  std::vector<NDArray> whole;
  for (const NDArray& array : out) {
    if (array.is_partial()) {
      QueuePull(self, View(array), priority);
    } else {
      whole.push_back(array);
    }
  }
  if (whole.empty()) return;
  const std::vector<VarRef> written = VarsOf(whole);
  const Device device = whole[0].device();  // before `whole` moves into the body
  engine.Push({.name = "kvstore.pull",
               .reads = {stored},
               .writes = written,
               .device = device,
               .lane = Lane::kCopy,
               .priority = priority},
              PullOp<std::vector<NDArray>>{self, std::move(whole)});
}

void StoredValue::QueueReset(const std::shared_ptr<StoredValue>& self, const NDArray& value) {
  self->array_.engine().Push({.name = "kvstore.reset",
                              .reads = {value.var()},
                              .writes = {self->array_.var()},
                              .device = self->array_.device(),
                              .run_when_poisoned = true},
                             ResetOp{self, value});
}

void StoredValue::RunUpdater(const std::shared_ptr<StoredValue>& self,
                             std::span<const NDArray> values,
                             std::shared_ptr<const Compression> compression, const Updater& updater,
                             int priority) {
  StoredValue& v = *self;
  const std::thread::id me = std::this_thread::get_id();
  // relaxed: only a store of this very thread can make them equal
  if (v.updater_thread_.load(std::memory_order_relaxed) == me) {
    throw InvalidState(
        fmt::format("Push: key {} is pushed from inside its own updater", ToString(v.key_)));
  }
  MutexLock lock(v.updater_mutex_);
  v.updater_thread_.store(me, std::memory_order_relaxed);
  struct Leave {
    std::atomic<std::thread::id>& thread;
    ~Leave() { thread.store(std::thread::id(), std::memory_order_relaxed); }
  } leave{v.updater_thread_};

  Engine& engine = v.array_.engine();
  const Device device = v.array_.device();
  if (v.merged_.empty()) {
    v.merged_ = NDArray(v.array_.shape(), v.array_.dtype(), device, engine);
  }
  engine.Push({.name = "kvstore.merge",
               .reads = VarsOf(values),
               .writes = {v.merged_.var(), v.array_.var()},
               .device = device,
               .priority = priority,
               .run_when_poisoned = true},
              MergeOp{self, {values.begin(), values.end()}, std::move(compression), v.merged_});
  std::exception_ptr error;
  try {
    updater(v.key_, v.merged_, v.array_);
  } catch (...) {
    error = std::current_exception();
  }
  engine.Push({.name = "kvstore.settle",
               .writes = {v.array_.var()},
               .device = device,
               .priority = priority,
               .run_when_poisoned = true},
              SettleOp{self});
  if (error != nullptr) std::rethrow_exception(std::move(error));
}

}  // namespace heddle::kvstore
