#include "kvstore/dist/worker/dist_key.h"

#include <heddle/error.h>

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/dist/protocol/words.h"
#include "kvstore/dist/transport/transport.h"
#include "kvstore/dist/worker/call_batch.h"
#include "kvstore/dist/worker/parts_call.h"

namespace heddle::kvstore::dist {

namespace {

PlacementOptions PlacementOf(const WorkerLink& link, bool whole) {
  PlacementOptions placement = link.placement();
  placement.whole_keys = whole;
  return placement;
}

boost::container::small_vector<PlacedPart, 1> PartsOf(std::uint64_t id, const Shape& shape,
                                                      DType dtype, bool row_sparse,
                                                      const PlacementOptions& placement) {
  const std::vector<PlacedPart> parts = PlaceKey(id, shape, dtype, row_sparse, placement);
  return {parts.begin(), parts.end()};
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
      row_size_(RowSizeOf(shape_)),
      name_(std::make_shared<const std::string>(ToString(KeyRef(key_)))),
      parts_(PartsOf(id_, shape_, dtype_, row_sparse_, PlacementOf(*link_, whole))) {}

PartInfo DistKey::InfoOf(const PlacedPart& part) const {
  return {key_,       shape_,  dtype_, row_sparse_, static_cast<std::uint32_t>(parts_.size()),
          part.begin, part.end};
}

void DistKey::Enter(PartsCall& call, std::uint64_t ticket) {
  MutexLock lock(mutex_);
  EnterLocked(call, ticket);
}

void DistKey::EnterLocked(PartsCall& call, std::uint64_t ticket) {
  if (std::exchange(call.entered_, true)) return;
  call.op_ticket_ = ticket;
  const bool is_last = last_ != nullptr && last_->op_ticket_ < ticket;
  std::shared_ptr<PartsCall>* place = is_last ? &last_->behind_ : &first_;
  while (*place != nullptr && ((*place)->in_batch_ || (*place)->op_ticket_ < ticket)) {
    place = &(*place)->behind_;
  }
  call.behind_ = std::move(*place);
  if (call.behind_ == nullptr) last_ = &call;
  *place = call.shared_from_this();
}

bool DistKey::is_small() const {
  if (parts_.size() != 1 || row_sparse_) return false;
  const auto elements = static_cast<std::size_t>(parts_[0].end - parts_[0].begin);
  return elements * SizeOf(dtype_) <= Transport::kCopiedMax;
}

void DistKey::Ready(PartsCall& call, std::uint64_t ticket) {
  CallBatch* const batch = is_small() ? CallBatch::OfThread(*link_) : nullptr;
  if (batch != nullptr) {
    std::shared_ptr<PartsCall> first;
    {
      MutexLock lock(mutex_);
      EnterLocked(call, ticket);
      call.ready_ = true;
      if (first_.get() != &call) return;  // the one before it will take it along
      call.in_batch_ = true;
      first = first_;
    }
    batch->Add(std::move(first));
    return;
  }
  const std::size_t requests = SendReady(call, ticket);
  link_->TakeAnswers(requests);
}

void DistKey::Drop(PartsCall& call) {
  PushGate::Entry not_submitted;  // let go of without the lock
  std::uint64_t ticket = 0;
  {
    MutexLock lock(mutex_);
    call.requests_.clear();
    if (!std::exchange(call.entered_, true)) {
      not_submitted = std::move(call.not_submitted_);
      return;
    }
    ticket = call.op_ticket_;
  }
  Ready(call, ticket);
}

bool DistKey::SetUnsent(PartsCall& call, std::size_t part, PushValue* value) {
  MutexLock lock(mutex_);
  if (call.submitted_) return false;
  if (!call.requests_.empty() && !call.given_up_) {
    SetValue(std::move(*value), &call.requests_[part]);
  }
  return true;
}

std::size_t DistKey::SendReady(PartsCall& call, std::uint64_t ticket) {
  ReusedOutputs out;
  // Let go of without locks: barriers may begin.
  boost::container::small_vector<PushGate::Entry, 2> submitted;
  std::size_t requests = 0;
  bool withdrawn = false;
  {
    MutexLock lock(mutex_);
    EnterLocked(call, ticket);
    call.ready_ = true;
    while (first_ != nullptr && first_->ready_ && !first_->in_batch_) {
      const std::shared_ptr<PartsCall> next = PopLocked();
      withdrawn |= WithdrawMissingLocked(*next);
      if (next->not_submitted_) submitted.push_back(std::move(next->not_submitted_));
      if (next->requests_.empty()) continue;
      requests += next->requests_.size();
      link_->Submit(next->requests(), &*out);
      next->requests_.clear();
      next->submitted_ = true;
    }
  }
  link_->Carry(*out);
  if (withdrawn) link_->CorrectClose(store_);
  return requests;
}

void DistKey::CheckUnsent(Time now, Time warn_after, UnsentFound* found) {
  MutexLock lock(mutex_);
  for (std::shared_ptr<PartsCall>* each = &first_; *each != nullptr; each = &(*each)->behind_) {
    PartsCall& call = **each;
    if (!call.ready_ || call.in_batch_ || call.given_up_ || call.requests_.empty()) continue;
    if (call.ready_since_ == Time{0}) call.ready_since_ = call.warned_ = now;
    const Time deadline = call.options_.deadline;
    if (deadline != Time{0} && now >= deadline) {
      GiveUpLocked(*each, now, found);
      continue;
    }
    if (deadline != Time{0}) found->LookAt(deadline);
    if (now >= call.warned_ + warn_after) {
      // One for all that wait: the reason is most often the same.
      if (found->warnings.empty()) found->warnings.push_back(WhyUnsentLocked(call, now));
      call.warned_ = now;
    }
    found->LookAt(call.warned_ + warn_after);
  }
}

void DistKey::TellUnsent() {
  MutexLock lock(mutex_);  // none is submitted meanwhile
  if (first_ == nullptr) return;
  boost::container::small_vector<std::uint64_t, 1> requests(parts_.size());
  for (PartsCall* call = first_.get(); call != nullptr; call = call->behind_.get()) {
    if (call->ready_) {
      for (const Request& request : call->requests_) ++requests[request.part.part];
    } else {  // its requests may be being made
      for (std::uint64_t& count : requests) ++count;
      call->counted_for_all_ = true;
    }
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (requests[i] > 0) link_->WillRequest(parts_[i].server, IdOf(parts_[i]), requests[i]);
  }
}

bool DistKey::WithdrawMissingLocked(const PartsCall& call) {
  if (!call.counted_for_all_ || call.requests_.size() == parts_.size()) return false;
  boost::container::small_vector<bool, 1> has(parts_.size());
  for (const Request& request : call.requests_) has[request.part.part] = true;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!has[i]) link_->WontRequest(parts_[i].server, IdOf(parts_[i]));
  }
  return true;
}

std::string DistKey::WhyUnsentLocked(const PartsCall& call, Time now) const {
  return fmt::format(
      "{} has waited {} for this worker's {} before it, whose array other ops still work with",
      call.requests_.front().what.text(), InSeconds(now - call.ready_since_),
      NameOf(first_->options_.kind));
}

void DistKey::GiveUpLocked(const std::shared_ptr<PartsCall>& call, Time now, UnsentFound* found) {
  const auto error = std::make_exception_ptr(
      TimeoutError("the deadline has passed: " + WhyUnsentLocked(*call, now)));
  for (Request& request : call->requests_) {
    found->answers.emplace_back(call, Answer{request.token, error, {}});
    found->given_back.push_back(std::exchange(request.payload, {}));
    request.token = kNoSink;
    if (IsPush(request.kind)) SetValue({.failure = ToErrorBody(error)}, &request);
  }
  call->given_up_ = true;
  const Kind kind = call->options_.kind;
  if (!IsPush(kind) && kind != Kind::kRemove) call->requests_.clear();
}

std::shared_ptr<PartsCall> DistKey::Submitted(PartsCall& call,
                                              std::vector<PushGate::Entry>* submitted) {
  std::shared_ptr<PartsCall> gone;  // without the lock
  MutexLock lock(mutex_);
  DCHECK(first_.get() == &call);  // B1
  gone = PopLocked();
  if (call.not_submitted_) submitted->push_back(std::move(call.not_submitted_));
  call.requests_.clear();
  if (first_ == nullptr || !first_->ready_) return nullptr;
  first_->in_batch_ = true;
  return first_;
}

std::shared_ptr<PartsCall> DistKey::PopLocked() {
  std::shared_ptr<PartsCall> first = std::move(first_);
  first_ = std::move(first->behind_);
  if (first_ == nullptr) last_ = nullptr;
  return first;
}

}  // namespace heddle::kvstore::dist
