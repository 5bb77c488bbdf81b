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
  const std::size_t requests = SendAll();
  link_.TakeAnswers(requests);
}

std::size_t CallBatch::SendAll() {
  ReusedOutputs out;
  std::vector<PushGate::Entry> submitted;  // let go of last: barriers may begin
  std::vector<std::span<Request>> together;
  std::size_t requests = 0;
  // Calls that this thread makes ready meanwhile are added to calls_.
  for (auto calls = std::exchange(calls_, {}); !calls.empty();) {
    together.clear();
    for (const auto& call : calls) together.push_back(call->requests());
    requests += together.size();  // of small keys: one each
    link_.Submit(together, &*out);
    std::size_t next = 0;  // calls behind those on the same keys, which have become ready meanwhile
    for (const auto& call : calls) {
      if (auto behind = call->key().Submitted(*call, &submitted)) calls[next++] = std::move(behind);
    }
    calls.resize(next);
  }
  link_.Carry(*out);
  return requests;
}

}  // namespace heddle::kvstore::dist
