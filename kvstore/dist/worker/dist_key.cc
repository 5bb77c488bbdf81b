#include "kvstore/dist/worker/dist_key.h"

#include <algorithm>
#include <utility>

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

void DistKey::Ready(PartsCall& call) {
  ReusedOutputs out;
  // Let go of without locks: barriers may begin.
  boost::container::small_vector<PushGate::Entry, 2> submitted;
  {
    MutexLock lock(mutex_);
    call.ready_ = true;
    while (!calls_.empty() && calls_.front()->ready_) {
      const std::shared_ptr<PartsCall> next = std::move(calls_.front());
      calls_.pop_front();
      if (next->not_submitted_) submitted.push_back(std::move(next->not_submitted_));
      if (next->requests_.empty()) continue;
      link_->Submit({next->requests_.data(), next->requests_.size()}, &*out);
      next->requests_.clear();
    }
  }
  link_->Carry(*out);
}

}  // namespace heddle::kvstore::dist
