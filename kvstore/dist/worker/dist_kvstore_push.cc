#include <heddle/error.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "engine/fork.h"
#include "kvstore/checks.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/worker/call_batch.h"
#include "kvstore/dist/worker/dist_kvstore.h"
#include "kvstore/dist/worker/staged_parts.h"
#include "kvstore/gpu_sums.h"
#include "kvstore/near_arrays.h"
#include "kvstore/optimizer/foreign.h"

namespace heddle::kvstore::dist {

void DistKVStore::CheckPushLocked(std::string_view call, const KeyPush& push,
                                  const internal::UpdatePlan* plan) const {
  const KeyRef name(push.key->key());
  const bool row_sparse = !push.row_sparse.empty();
  if (plan != nullptr && push.key->is_row_sparse() && !row_sparse) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected row-sparse arrays, as the value is and an optimizer is "
                    "set, got dense ones",
                    call, ToString(name)));
  }
  if (compressor_ != nullptr && push.key->is_row_sparse() && !row_sparse) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected a dense value, since gradient compression {} is set, got "
                    "a row-sparse one",
                    call, ToString(name), compressor_->options().type));
  }
  // Dense arrays for row-sparse values travel as rows.
  const PushedKind pushed{name, push.key->shape(), push.key->dtype(),
                          row_sparse || push.key->is_row_sparse()};
  if (compressor_ != nullptr) CheckCompression(call, pushed, *compressor_);
  if (plan == nullptr) return;
  CheckUpdate(call, pushed, *optimizer_, *plan);
  if (push.key->is_row_sparse() && IsForeignOptimizer(optimizer_->name())) {
    throw InvalidArgument(
        fmt::format("{}: key {}: expected a dense value for optimizer {}, which is the servers' "
                    "own, got a row-sparse one",
                    call, ToString(name), optimizer_->name()));
  }
  if (push.key->parts().size() > 1 && NeedsWholeKey(*plan, push.key->is_row_sparse())) {
    throw InvalidArgument(fmt::format(
        "{}: key {}: optimizer {} needs the {}: expected a key of a {} store that was initialised "
        "after SetOptimizer, and so is not cut, got one of {} parts",
        call, ToString(name), optimizer_->name(),
        plan->NeedsNorms() ? "norm of the whole array" : "rows of the array whole", type(),
        push.key->parts().size()));
  }
}

DistKVStore::KeyPushes DistKVStore::PreparePush(std::string_view call,
                                                std::span<const KeyArrays> pairs, int priority,
                                                Places* push_of) {
  const KeyPtrs keys = FindAll(call, pairs);
  const Places places = PlacesOf(keys);
  KeyPushes pushes;
  pushes.reserve(pairs.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const KeyArrays& pair = pairs[i];
    if (places[i] == pushes.size()) pushes.emplace_back().key = keys[i];
    KeyPush& push = pushes[places[i]];
    ForEachArray(pair,
                 [&](const auto& array) { CheckShapeAndDType(call, pair.key, *push.key, array); });
    push.arrays.insert(push.arrays.end(), pair.arrays.begin(), pair.arrays.end());
    push.row_sparse.insert(push.row_sparse.end(), pair.row_sparse.begin(), pair.row_sparse.end());
    if (!push.arrays.empty() && !push.row_sparse.empty()) ThrowMixedKinds(call, pair.key);
    CheckArrayCount(call, pair.key, push.arrays.size() + push.row_sparse.size());
  }
  if (push_of != nullptr) *push_of = places;
  ReusedOutputs told;
  std::int64_t pushed_bytes = 0;
  {
    const engine::CallLock lock(mutex_, "a store");
    std::shared_ptr<const internal::UpdatePlan> plan;
    if (optimizer_ != nullptr) plan = optimizer_->plan();
    for (const KeyPush& push : pushes) CheckPushLocked(call, push, plan.get());
    // From here on nothing fails.
    pushed_ = pushed_ || !pushes.empty();
    if (plan != nullptr) TellParametersLocked(*plan, &*told);
    for (KeyPush& push : pushes) {
      push.options = OptionsOf(Kind::kPush, *push.key, priority);
      push.options.version = version_;
      push.compressor = compressor_;
      if (!push.arrays.empty()) {
        pushed_bytes += compressor_ != nullptr ? compressor_->CodeBytes(push.key->shape().size())
                                               : push.arrays[0].bytes();
      }
      if (plan == nullptr) continue;
      const KeyRef name(push.key->key());
      num_update_ = std::max(num_update_, ++push.key->updates);
      push.options.rates = {plan->LearningRate(name, num_update_), plan->WeightDecay(name)};
    }
  }
  link_->Carry(*told);
  pushed_bytes_.fetch_add(pushed_bytes, std::memory_order_relaxed);
  return pushes;
}

namespace {

// Where the sum of a list is made: on the first GPU in it, if there is one and `on_gpus`.
Device SumsOn(std::span<const NDArray> arrays, bool on_gpus) {
  if (!on_gpus) return Cpu();
  const auto on_gpu =
      std::ranges::find_if(arrays, [](const NDArray& array) { return IsOnGpu(array.device()); });
  return on_gpu != arrays.end() ? on_gpu->device() : Cpu();
}
Device SumsOn(std::span<const RowSparseNDArray> /*arrays*/, bool /*on_gpus*/) { return Cpu(); }

// The sum of a list where it is made; a single array is itself.
template <class Array>
Array SumOf(std::span<const Array> arrays, bool on_gpus, GpuSumPlanner* planner, int priority) {
  if (arrays.size() == 1) return arrays[0];
  const InputsOfSum<Array> near(arrays, SumsOn(arrays, on_gpus), planner, priority);
  const std::span<const Array> inputs = near.view();
  if (inputs.size() == 1) return inputs[0];  // made elsewhere
  const Array sum(inputs[0].shape(), inputs[0].dtype(), inputs[0].device(), inputs[0].engine());
  Sum(inputs, sum, priority);
  return sum;
}

// `array` in memory of the CPUs, from which it is sent.
template <class Array>
Array OnCpus(const Array& array, int priority) {
  return NearInputs<Array>({&array, 1}, Cpu(), priority).view()[0];
}

// From an op that reads `value` and runs in any case.
template <class Array>
void SendValue(PartsCall& call, const Array& value) {
  if (auto failure = FailureOfInput(value.engine(), value.var())) {
    call.SendFailure(*failure);
  } else if constexpr (std::is_same_v<Array, NDArray>) {
    call.SendElements(value);
  } else {
    call.SendRows(value);
  }
}

}  // namespace

void DistKVStore::QueuePush(const KeyPush& push, int priority) {
  const auto queue = [&](const auto& value) {
    PushOpOf(PartsCall::Make(calls_, push.key, push.options), engine(),
             {.name = "kvstore.push",
              .reads = {value.var()},
              .priority = priority,
              .run_when_poisoned = true},
             [value](PartsCall& call) { SendValue(call, value); });
  };
  GpuSumPlanner* const planner = sums_along_links_ ? &push.key->sums : nullptr;
  if (!push.row_sparse.empty()) {
    return queue(OnCpus(SumOf<RowSparseNDArray>(push.row_sparse, sums_on_gpus_, planner, priority),
                        priority));
  }
  const NDArray sum =
      SumOf<NDArray>({push.arrays.data(), push.arrays.size()}, sums_on_gpus_, planner, priority);
  if (push.compressor == nullptr && StagedParts::Suits(*push.key, sum)) {
    return QueueStagedPush(push, sum, priority);
  }
  const NDArray value = OnCpus(sum, priority);
  if (push.compressor != nullptr) return QueueCompressedPush(push, value, priority);
  if (push.key->is_row_sparse()) return queue(RowSparseNDArray::FromDense(value, priority));
  queue(value);
}

void DistKVStore::QueueStagedPush(const KeyPush& push, const NDArray& value, int priority) {
  const auto call = PartsCall::Make(calls_, push.key, push.options);
  call->AwaitElements();
  const OutgoingParts outgoing(push.key, value, priority);
  PushOpOf(call, engine(),
           {.name = "kvstore.push",
            .reads = {outgoing.first()},
            .priority = priority,
            .run_when_poisoned = true},
           [](PartsCall&) {});
  outgoing.SupplyTo(call, priority);
}

// The codes are made by an op of their own, in the order of the pushes, which write the residual.
void DistKVStore::QueueCompressedPush(const KeyPush& push, const NDArray& value, int priority) {
  const auto residual_or = [&](const NDArray& first) {
    const engine::CallLock lock(mutex_, "a store");
    if (push.key->residual.empty()) push.key->residual = first;
    return push.key->residual;
  };
  NDArray residual = residual_or({});
  if (residual.empty()) {
    residual = residual_or(NDArray::Zeros(value.shape(), DType::kFloat32, Cpu(), engine()));
  }
  const std::shared_ptr<const Compressor> compressor = push.compressor;
  const NDArray codes({compressor->CodeBytes(value.size())}, DType::kUInt8, Cpu(), engine());
  engine().Push({.name = "kvstore.compress",
                 .reads = {value.var(), residual.var()},
                 .writes = {residual.var(), codes.var()},
                 .priority = priority,
                 .run_when_poisoned = true},
                [value, residual, codes, compressor] {
                  if (std::exception_ptr error = value.engine().ErrorOf(value.var())) {
                    // The residual stays as it is: only the codes have the error.
                    return;
                  }
                  compressor->Compress(value.dtype(), value.const_data(), residual.data<float>(),
                                       codes.data(), static_cast<std::size_t>(value.size()));
                });
  PushOpOf(PartsCall::Make(calls_, push.key, push.options), engine(),
           {.name = "kvstore.push",
            .reads = {codes.var(), value.var()},
            .priority = priority,
            .run_when_poisoned = true},
           [value, codes, compressor](PartsCall& call) {
             auto failure = FailureOfInput(value.engine(), value.var());
             // There was no memory for them.
             if (!failure) failure = FailureOfInput(codes.engine(), codes.var());
             if (failure) {
               call.SendFailure(*failure);
             } else {
               call.SendCodes(codes, *compressor);
             }
           });
}

void DistKVStore::DoPush(std::span<const KeyArrays> pairs, int priority) {
  for (const KeyArrays& pair : pairs) CheckArrays("Push", pair, engine());
  CheckOneKind("Push", pairs);
  const KeyPushes pushes = PreparePush("Push", pairs, priority, nullptr);
  const CallBatch together(*link_, pushes.size());
  for (const KeyPush& push : pushes) QueuePush(push, priority);
}

// One request may do both if no output is read by another push of the call.
bool DistKVStore::CanFuse(const KeyPushes& pushes, std::span<const KeyArrays> out) const {
  if (out.size() != pushes.size()) return false;  // a key was named twice
  for (std::size_t i = 0; i < pushes.size(); ++i) {
    const KeyPush& push = pushes[i];
    if (push.compressor != nullptr || push.key->is_row_sparse() || push.arrays.size() != 1 ||
        out[i].arrays.size() != 1) {
      return false;
    }
    const NDArray& to = out[i].arrays[0];
    if (to.dtype() != push.key->dtype()) return false;
    const bool same = to.IsSameAs(push.arrays[0]);
    if (!same && (to.is_partial() || to.Overlaps(push.arrays[0]))) return false;
  }
  if (pushes.size() == 1) return true;
  std::unordered_map<internal::VarState*, std::size_t> reader;
  for (std::size_t i = 0; i < pushes.size(); ++i) {
    if (!reader.emplace(VarRef(pushes[i].arrays[0].var()).state(), i).second) return false;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto found = reader.find(VarRef(out[i].arrays[0].var()).state());
    if (found != reader.end() && found->second != i) return false;
  }
  return true;
}

// Either array, or both, lie on a GPU and are copied part by part.
void DistKVStore::QueueStagedPushPull(const KeyPush& push, const NDArray& out, int priority) {
  CallOptions options = push.options;
  options.kind = Kind::kPushPull;
  const auto call = PartsCall::Make(calls_, push.key, options);
  std::optional<OutgoingParts> outgoing;
  NDArray value;  // if it is not outgoing
  if (StagedParts::Suits(*push.key, push.arrays[0])) {
    call->AwaitElements();
    outgoing.emplace(push.key, push.arrays[0], priority);
  } else {
    value = OnCpus(push.arrays[0], priority);
  }
  std::optional<IncomingParts> incoming;
  NDArray into = out;
  if (StagedParts::Suits(*push.key, out)) {
    incoming.emplace(push.key, out);
    into = incoming->pinned();
    call->TellArrivals(incoming->arrivals());
  }
  PushOpOf(call, engine(),
           {.name = "kvstore.pushpull",
            .reads = {outgoing ? outgoing->first() : value.var()},
            .writes = {into.var()},
            .priority = priority,
            .run_when_poisoned = true},
           [value, into](PartsCall& parts) {
             if (!value.empty()) SendValue(parts, value);
             parts.ReceiveElementsOrFail(into);
           });
  if (outgoing) outgoing->SupplyTo(call, priority);
  if (incoming) {
    incoming->QueueArrivals(priority);
    incoming->CopyTo(out, priority);
  }
  pulled_bytes_.fetch_add(out.bytes(), std::memory_order_relaxed);
}

void DistKVStore::QueuePushPull(const KeyPush& push, const NDArray& out, int priority) {
  if (StagedParts::Suits(*push.key, push.arrays[0]) || StagedParts::Suits(*push.key, out)) {
    return QueueStagedPushPull(push, out, priority);
  }
  if (const std::span<const NDArray> list(&out, 1); !AreNear(list, Cpu())) {
    const RelayedOutputs<NDArray> outputs(list, Cpu());
    QueuePushPull(push, outputs.near()[0], priority);
    outputs.Forward(priority);
    return;
  }
  const NearInputs<NDArray> near({push.arrays.data(), 1}, Cpu(), priority);
  const NDArray& value = near.view()[0];
  CallOptions options = push.options;
  options.kind = Kind::kPushPull;
  PushOpOf(PartsCall::Make(calls_, push.key, options), engine(),
           {.name = "kvstore.pushpull",
            .reads = {value.var()},
            .writes = {out.var()},
            .priority = priority,
            .run_when_poisoned = true},
           [value, out](PartsCall& call) {
             SendValue(call, value);
             call.ReceiveElementsOrFail(out);
           });
  pulled_bytes_.fetch_add(out.bytes(), std::memory_order_relaxed);
}

void DistKVStore::DoPushPull(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                             int priority) {
  CheckPushPull(values, out, engine());
  Places push_of;
  const KeyPushes pushes = PreparePush("PushPull", values, priority, &push_of);
  const CallBatch together(*link_, pushes.size());
  if (CanFuse(pushes, out)) {
    for (std::size_t i = 0; i < pushes.size(); ++i) {
      QueuePushPull(pushes[i], out[i].arrays[0], priority);
    }
    return;
  }
  for (const KeyPush& push : pushes) QueuePush(push, priority);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const KeyPtr& key = pushes[push_of[i]].key;
    if (out[i].arrays.empty()) {
      TellIgnored(*key);
    } else {
      QueuePull(key, out[i].arrays, priority);
    }
  }
}

}  // namespace heddle::kvstore::dist
