#include "kvstore/dist/worker/staged_parts.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "kvstore/dist/worker/parts_call.h"
#include "kvstore/near_arrays.h"
#include "storage/array_ops.h"
#include "storage/array_state.h"
#include "storage/gpus.h"

namespace heddle::kvstore::dist {

using internal::GpuDriver;
using internal::StateOf;

std::vector<std::size_t> StageOrder(std::span<const PlacedPart> parts) {
  std::vector<std::size_t> place(parts.size());  // in its shard
  for (std::size_t i = 1; i < parts.size(); ++i) {
    place[i] = parts[i].server == parts[i - 1].server ? place[i - 1] + 1 : 0;
  }
  std::vector<std::size_t> order(parts.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](std::size_t part) { return place[part]; });
  return order;
}

// ---- PartArrivals

void PartArrivals::Await(std::size_t part, Completion done) {
  {
    MutexLock lock(mutex_);
    if (parts_[part].state == State::kAwaited) {
      parts_[part].done = std::move(done);
      return;
    }
  }
  done();
}

void PartArrivals::Settle(std::size_t part, State state) {
  std::optional<Completion> done;
  {
    MutexLock lock(mutex_);
    if (parts_[part].state != State::kAwaited) return;
    parts_[part].state = state;
    done = std::exchange(parts_[part].done, std::nullopt);
  }
  if (done) (*done)();
}

void PartArrivals::Arrived(std::size_t part) { Settle(part, State::kHere); }

void PartArrivals::End() {
  for (std::size_t part = 0; part < count_; ++part) Settle(part, State::kMissing);
}

bool PartArrivals::HasArrived(std::size_t part) const {
  MutexLock lock(mutex_);
  return parts_[part].state == State::kHere;
}

// ---- StagedParts

namespace {

// The elements of the pinned array, past the access checker: each part has a Var of its own (S1).
std::byte* PartOf(const NDArray& pinned, std::int64_t first_byte) {
  return StateOf(pinned).elements() + first_byte;
}

}  // namespace

bool StagedParts::Suits(const DistKey& key, const NDArray& array) {
  return IsOnGpu(array.device()) && !key.is_row_sparse() && key.parts().size() > 1;
}

StagedParts::StagedParts(KeyPtr key, const NDArray& array)
    : key_(std::move(key)),
      pinned_(array.shape(), array.dtype(), CpuPinned(array.device().id), array.engine()),
      order_(StageOrder(key_->parts())) {
  vars_.reserve(order_.size());
  while (vars_.size() < order_.size()) vars_.push_back(array.engine().NewVar("kvstore.part"));
}

std::int64_t StagedParts::FirstByte(std::size_t part) const {
  return parts()[part].begin * storage::ElementBytes(pinned_);
}

std::int64_t StagedParts::Bytes(std::size_t part) const {
  return (parts()[part].end - parts()[part].begin) * storage::ElementBytes(pinned_);
}

// ---- OutgoingParts

OutgoingParts::OutgoingParts(KeyPtr key, const NDArray& array, int priority)
    : StagedParts(std::move(key), array) {
  Engine& engine = array.engine();
  GpuDriver& driver = storage::Gpus::Of(engine).driver();
  OpOptions options{.name = "CopyTo", .reads = {array.var()}, .device = array.device()};
  options.lane = Lane::kCopyOut;
  options.priority = priority;
  for (const std::size_t part : order_) {
    options.writes = {vars_[part]};
    engine.PushGpu(options, [&driver, from = array, to = pinned_, first = FirstByte(part),
                             bytes = Bytes(part)](GpuStream stream) {
      driver.Copy(stream.handle, PartOf(to, first), storage::ConstAt(from, 0) + first, bytes);
    });
    options.reads = {array.var(), vars_[part]};  // S3
  }
}

void OutgoingParts::SupplyTo(const std::shared_ptr<PartsCall>& call, int priority) const {
  std::size_t queued = 0;
  try {
    for (; queued < order_.size(); ++queued) QueueSupply(call, order_[queued], priority);
  } catch (...) {
    // The engine has been stopped, say. The requests have their places, and end by their values.
    const ErrorBody failure = ToErrorBody(std::current_exception());
    for (; queued < order_.size(); ++queued) call->Supply(order_[queued], {.failure = failure});
    throw;
  }
}

void OutgoingParts::QueueSupply(const std::shared_ptr<PartsCall>& call, std::size_t part,
                                int priority) const {
  OpOptions options{.name = "kvstore.supply", .reads = {vars_[part]}};
  options.lane = Lane::kComm;
  options.priority = priority;
  options.run_when_poisoned = true;
  pinned_.engine().Push(options, [call, pinned = pinned_, part, var = vars_[part],
                                  first = FirstByte(part), bytes = Bytes(part)] {
    PushValue value;
    value.failure = FailureOfInput(pinned.engine(), var);
    if (!value.failure) {
      value.payload = Payload(std::make_shared<const NDArray>(pinned),
                              {PartOf(pinned, first), static_cast<std::size_t>(bytes)});
    }
    call->Supply(part, std::move(value));
  });
}

// ---- IncomingParts

IncomingParts::IncomingParts(KeyPtr key, const NDArray& out)
    : StagedParts(std::move(key), out),
      arrivals_(std::make_shared<PartArrivals>(key_->parts().size())) {}

void IncomingParts::QueueArrivals(int priority) const {
  for (const std::size_t part : order_) {
    OpOptions options{.name = "kvstore.arrival", .writes = {vars_[part]}};
    options.lane = Lane::kComm;
    options.priority = priority;
    options.start_inline = true;
    pinned_.engine().PushAsync(options, [arrivals = arrivals_, part](Completion done) {
      arrivals->Await(part, std::move(done));
    });
  }
}

void IncomingParts::CopyTo(const NDArray& out, int priority) const {
  Engine& engine = out.engine();
  GpuDriver& driver = storage::Gpus::Of(engine).driver();
  for (const std::size_t part : order_) {
    OpOptions options{.name = "CopyTo", .writes = {out.var()}, .device = out.device()};
    const bool is_read = part != order_.front() || out.is_partial();
    if (part == order_.back()) {
      options.reads = is_read ? VarList{vars_[part], pinned_.var(), out.var()}
                              : VarList{vars_[part], pinned_.var()};
    } else {
      options.reads = is_read ? VarList{vars_[part], out.var()} : VarList{vars_[part]};
    }
    options.lane = Lane::kCopy;
    options.priority = priority;
    engine.PushGpu(options, [&driver, arrivals = arrivals_, part, from = pinned_, to = out,
                             first = FirstByte(part), bytes = Bytes(part)](GpuStream stream) {
      if (!arrivals->HasArrived(part)) return;  // S4
      driver.Copy(stream.handle, storage::At(to, 0) + first, PartOf(from, first), bytes);
    });
  }
}

}  // namespace heddle::kvstore::dist
