// A key of a dist store at a worker: where its parts are, and the order of what is asked of them.
#pragma once

#include <heddle/key.h>
#include <heddle/ndarray.h>
#include <heddle/shape.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <boost/container/small_vector.hpp>

#include "base/mutex.h"
#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/worker/worker_link.h"
#include "kvstore/gpu_sums.h"
#include "kvstore/part_rows.h"

namespace heddle::kvstore::dist {

class PartsCall;

// Shared by the store's table and the calls under way.
//
// Order. A call enters the queue of its key when its op has been pushed, in the order of the ops'
// tickets, and its requests go to the parts when it and all before it are ready: its inputs can be
// read, or its outputs be written. So every part sees the calls in program order, whatever is ready
// first. Where threads make calls at the same time their order at the key is that of their ops at
// the arrays: a call waits for calls and ops of lower tickets alone, and so never for ever. One
// whose op runs before its push has returned enters then (Ready); another thread's call that is
// ready meanwhile may have gone ahead.
//
// Deadlines. Those of requests are the machine's. A call that is ready but waits for one before it,
// whose gradient is still being computed, has not come that far: the key ends it (CheckUnsent). Its
// place in the queue stays: a push goes as one that has failed when its turn comes, for the sake of
// the round; anything else does not go.
class DistKey {
 public:
  // whole: one part, whatever its size. removals: how often the key was removed before.
  DistKey(std::shared_ptr<WorkerLink> link, std::uint32_t store, Key key, Shape shape, DType dtype,
          bool row_sparse, bool whole = false, std::uint64_t removals = 0);

  const Key& key() const { return key_; }
  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  bool is_row_sparse() const { return row_sparse_; }
  std::int64_t row_size() const { return row_size_; }  // elements
  std::span<const PlacedPart> parts() const { return {parts_.data(), parts_.size()}; }
  PartId IdOf(const PlacedPart& part) const { return {store_, part.part, id_}; }
  PartInfo InfoOf(const PlacedPart& part) const;
  PartRows RowsOf(const PlacedPart& part) const {
    return row_sparse_ ? PartRows::OfRows(part.begin, part.end, row_size_)
                       : PartRows::OfElements(part.begin, part.end, row_size_);
  }
  WorkerLink& link() const { return *link_; }
  const std::shared_ptr<const std::string>& name() const { return name_; }  // for people

  // The op of the call has been pushed and has this ticket. Nothing happens if the call has
  // entered, or was dropped.
  void Enter(PartsCall& call, std::uint64_t ticket) EXCLUDES(mutex_);
  // The call has its requests, or will have none: sends those of all that are ready at the front.
  void Ready(PartsCall& call, std::uint64_t ticket) EXCLUDES(mutex_);
  // The call will have no requests.
  void Drop(PartsCall& call) EXCLUDES(mutex_);
  // Gives a part of a push its value, if its requests have not been submitted: else false.
  bool SetUnsent(PartsCall& call, std::size_t part, PushValue* value) EXCLUDES(mutex_);
  // The requests of the call at the front, which is in a batch, have been submitted. Returns the
  // call behind it if that is ready: it is in the batch from here on.
  std::shared_ptr<PartsCall> Submitted(PartsCall& call, std::vector<PushGate::Entry>* submitted)
      EXCLUDES(mutex_);

  void CheckUnsent(Time now, Time warn_after, UnsentFound* found) EXCLUDES(mutex_);

  // No call enters any more: tells the link of the requests that wait here, once. Of a call that is
  // not ready it counts one for each part; if it has fewer in the end, the link is told that, too.
  void TellUnsent() EXCLUDES(mutex_);

  // Of gradient compression: what the codes so far have not carried. Made by the first push,
  // touched by ops that write its Var.
  NDArray residual;

  // Of lists of arrays that lie on GPUs. Always in their order: the servers' sums have the bits of
  // plain lists.
  GpuSumPlanner sums{GpuSums::kRelay};

  // The store's, under its lock.
  std::int64_t updates = 0;   // pushed with the present optimizer
  bool told_ignored = false;  // that pulls leave row-sparse outputs alone
  // The last list call that named the key, and the key's place among those that it named.
  std::uint64_t named_by = 0;
  std::size_t place = 0;

 private:
  void EnterLocked(PartsCall& call, std::uint64_t ticket) REQUIRES(mutex_);
  std::string WhyUnsentLocked(const PartsCall& call, Time now) const REQUIRES(mutex_);
  // Takes the requests of the call, or what they carry, away from it.
  void GiveUpLocked(const std::shared_ptr<PartsCall>& call, Time now, UnsentFound* found)
      REQUIRES(mutex_);
  // The call is ready: sends what is, from the front. How many requests.
  std::size_t SendReady(PartsCall& call, std::uint64_t ticket) EXCLUDES(mutex_);
  std::shared_ptr<PartsCall> PopLocked() REQUIRES(mutex_);
  // Whether `call`, which has its requests, was counted for more.
  bool WithdrawMissingLocked(const PartsCall& call) REQUIRES(mutex_);
  // Of one message: there and back it is cheaper with others.
  bool is_small() const;

  const std::shared_ptr<WorkerLink> link_;
  const std::uint32_t store_;
  const Key key_;
  const std::uint64_t id_;
  const Shape shape_;
  const DType dtype_;
  const bool row_sparse_;
  const std::int64_t row_size_;
  const std::shared_ptr<const std::string> name_;
  const boost::container::small_vector<PlacedPart, 1> parts_;  // most keys have one

  Mutex mutex_;
  // The queue, by tickets: each call keeps the one behind it. What is in a batch is in front.
  std::shared_ptr<PartsCall> first_ GUARDED_BY(mutex_);
  PartsCall* last_ GUARDED_BY(mutex_) = nullptr;
};

using KeyPtr = std::shared_ptr<DistKey>;

}  // namespace heddle::kvstore::dist
