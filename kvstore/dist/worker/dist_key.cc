#include "kvstore/dist/worker/dist_key.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kvstore/dist/transport/transport.h"
#include "kvstore/dist/worker/call_batch.h"
#include "kvstore/dist/worker/parts_call.h"

namespace heddle::kvstore::dist {

namespace {

std::int64_t RowSize(const Shape& shape) {
  std::int64_t size = 1;
  for (std::size_t axis = 1; axis < shape.ndim(); ++axis) size *= shape[axis];
  return size;
}

PlacementOptions PlacementOf(const WorkerLink& link, bool whole) {
  PlacementOptions placement = link.placement();
  placement.whole_keys = whole;
  return placement;
}

}  // namespace

DistKey::DistKey(std::shared_ptr<WorkerLink> link, std::uint32_t store, Key key, Shape shape,
                 DType dtype, bool row_sparse, bool whole, std::uint64_t removals)
    : link_(std::move(link)),
      store_(store),
      key_(std::move(key)),
      id_(KeyId(key_, removals)),
      shape_(std::move(shape)),
      dtype_(dtype),
      row_sparse_(row_sparse),
      row_size_(RowSize(shape_)),
      name_(std::make_shared<const std::string>(ToString(KeyRef(key_)))),
      parts_(PlaceKey(id_, shape_, dtype_, row_sparse_, PlacementOf(*link_, whole))) {}

PartInfo DistKey::InfoOf(const PlacedPart& part) const {
  return {key_,       shape_,  dtype_, row_sparse_, static_cast<std::uint32_t>(parts_.size()),
          part.begin, part.end};
}

void DistKey::Enter(const std::shared_ptr<PartsCall>& call) {
  if (IsPush(call->options_.kind)) call->not_submitted_ = link_->pushes().Enter();
  MutexLock lock(mutex_);
  calls_.push_back(call);
}

bool DistKey::is_small() const {
  if (parts_.size() != 1 || row_sparse_) return false;
  const auto elements = static_cast<std::size_t>(parts_[0].end - parts_[0].begin);
  return elements * SizeOf(dtype_) <= Transport::kCopiedMax;
}

void DistKey::Ready(PartsCall& call) {
  CallBatch* const batch = is_small() ? CallBatch::OfThread(*link_) : nullptr;
  if (batch != nullptr) {
    std::shared_ptr<PartsCall> first;
    {
      MutexLock lock(mutex_);
      call.ready_ = true;
      if (calls_.front().get() != &call) return;  // the one before it will take it along
      call.in_batch_ = true;
      first = calls_.front();
    }
    batch->Add(std::move(first));
    return;
  }
  ReusedOutputs out;
  // Let go of without locks: barriers may begin.
  boost::container::small_vector<PushGate::Entry, 2> submitted;
  {
    MutexLock lock(mutex_);
    call.ready_ = true;
    while (!calls_.empty() && calls_.front()->ready_ && !calls_.front()->in_batch_) {
      const std::shared_ptr<PartsCall> next = std::move(calls_.front());
      calls_.pop_front();
      if (next->not_submitted_) submitted.push_back(std::move(next->not_submitted_));
      if (next->requests_.empty()) continue;
      link_->Submit(next->requests(), &*out);
      next->requests_.clear();
    }
  }
  link_->Carry(*out);
}

std::shared_ptr<PartsCall> DistKey::Submitted(PartsCall& call,
                                              std::vector<PushGate::Entry>* submitted) {
  std::shared_ptr<PartsCall> gone;  // without the lock
  MutexLock lock(mutex_);
  DCHECK(calls_.front().get() == &call);  // B1
  gone = std::move(calls_.front());
  calls_.pop_front();
  if (call.not_submitted_) submitted->push_back(std::move(call.not_submitted_));
  call.requests_.clear();
  if (calls_.empty() || !calls_.front()->ready_) return nullptr;
  calls_.front()->in_batch_ = true;
  return calls_.front();
}

}  // namespace heddle::kvstore::dist
