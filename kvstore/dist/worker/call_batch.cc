#include "kvstore/dist/worker/call_batch.h"

#include <span>
#include <utility>

#include "kvstore/dist/worker/dist_key.h"
#include "kvstore/dist/worker/parts_call.h"

namespace heddle::kvstore::dist {

namespace {

thread_local CallBatch* batch_of_thread = nullptr;

}  // namespace

CallBatch::CallBatch(WorkerLink& link, std::size_t keys)
    : link_(link), active_(keys > 1 && batch_of_thread == nullptr) {
  if (active_) batch_of_thread = this;
}

CallBatch::~CallBatch() {
  if (!active_) return;
  batch_of_thread = nullptr;
  Send();
}

CallBatch* CallBatch::OfThread(const WorkerLink& link) {
  return batch_of_thread != nullptr && &batch_of_thread->link_ == &link ? batch_of_thread : nullptr;
}

void CallBatch::Add(std::shared_ptr<PartsCall> call) {
  if (calls_.empty()) calls_.reserve(kTogetherMax);
  calls_.push_back(std::move(call));
  if (calls_.size() == kTogetherMax) Send();
}

void CallBatch::Send() {
  ReusedOutputs out;
  std::vector<PushGate::Entry> submitted;  // let go of last: barriers may begin
  std::vector<std::span<Request>> requests;
  // Calls that this thread makes ready meanwhile are added to calls_.
  for (auto calls = std::exchange(calls_, {}); !calls.empty();) {
    requests.clear();
    for (const auto& call : calls) requests.push_back(call->requests());
    link_.Submit(requests, &*out);
    std::size_t next = 0;  // calls behind those on the same keys, which have become ready meanwhile
    for (const auto& call : calls) {
      if (auto behind = call->key().Submitted(*call, &submitted)) calls[next++] = std::move(behind);
    }
    calls.resize(next);
  }
  link_.Carry(*out);
}

}  // namespace heddle::kvstore::dist
