#include "kvstore/dist/worker/control_call.h"

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "engine/may_wait.h"
#include "engine/trace_source.h"

namespace heddle::kvstore::dist {

namespace {

// Deletes itself after the last answer.
class ControlCall {
 public:
  ControlCall(std::size_t count, CallEnded ended)
      : sinks_(count), answers_(count), missing_(count), ended_(std::move(ended)) {
    for (Sink& sink : sinks_) sink.call = this;
  }

  AnswerSink& sink(std::size_t i) { return sinks_[i]; }

 private:
  class Sink final : public AnswerSink {
   public:
    void OnAnswer(Answer&& answer) override { call->OnAnswer(*this, std::move(answer)); }
    std::shared_ptr<Landing> LandingFor(const Message&, std::uint64_t) override { return nullptr; }

    ControlCall* call = nullptr;
  };

  void OnAnswer(const Sink& sink, Answer&& answer) {
    {
      MutexLock lock(mutex_);
      answers_[static_cast<std::size_t>(&sink - sinks_.data())] = std::move(answer.message);
      if (error_ == nullptr) error_ = std::move(answer.error);
      if (--missing_ > 0) return;
    }
    const std::unique_ptr<ControlCall> self(this);
    ended_(std::move(error_), std::move(answers_));
  }

  std::vector<Sink> sinks_;
  Mutex mutex_;
  std::vector<Message> answers_;
  std::size_t missing_;
  std::exception_ptr error_;
  const CallEnded ended_;
};

// Waits for an op that `start` starts, with what it shall call at the end. Its error is the
// caller's alone: a failed op would be told to the engine's next WaitForAll as well.
std::vector<Message> RunAndWait(Engine& engine, const OpName& name,
                                std::function<void(CallEnded ended)> start) {
  const Var ended = engine.NewVar("dist.ended");
  struct Outcome {
    std::exception_ptr error;
    std::vector<Message> answers;
  };
  const auto outcome = std::make_shared<Outcome>();
  engine.PushAsync({.name = name, .writes = {ended}, .lane = Lane::kComm, .start_inline = true},
                   [start = std::move(start), outcome](Completion done) {
                     start([held = outcome, done = std::move(done)](
                               std::exception_ptr error, std::vector<Message> answers) mutable {
                       *held = {std::move(error), std::move(answers)};
                       held.reset();  // an error ends with the caller, on its thread
                       done();
                     });
                   });
  engine.WaitForVar(ended);
  if (outcome->error) std::rethrow_exception(outcome->error);
  return std::move(outcome->answers);
}

}  // namespace

void StartCall(WorkerLink& link, std::vector<Request> requests, CallEnded ended, Outputs* out) {
  auto* const call = new ControlCall(requests.size(), std::move(ended));  // ends itself
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].token = TokenOf(call->sink(i));
    requests[i].deadline = link.deadline();
    requests[i].op = engine::TracedOpOfThread();
  }
  link.Submit(requests, out);
}

std::vector<Message> CallAndWait(Engine& engine, WorkerLink& link,
                                 const std::vector<Request>& requests) {
  engine::CheckMayWait(requests.front().what.text());
  return RunAndWait(engine, "kvstore.control", [&link, requests](CallEnded ended) {
    Outputs out;
    StartCall(link, requests, std::move(ended), &out);
    link.Carry(out);
  });
}

void BarrierAndWait(Engine& engine, WorkerLink& link) {
  engine::CheckMayWait("Barrier");
  RunAndWait(engine, "kvstore.barrier", [&link](CallEnded ended) {
    auto* const call = new ControlCall(1, std::move(ended));  // ends itself
    Outputs called;
    const bool waits = link.Barrier(call->sink(0), &called);
    link.Carry(called);
    if (!waits) return;
    // The link stays: each store waits for its pushes before it lets go of it. If threads call at
    // once, the gate may take their barriers in another order. When it takes the n-th, n barriers
    // have been called, and the pushes before those have entered.
    link.pushes().WhenEmpty([&link] {
      Outputs opened;
      link.OpenBarrier(&opened);
      link.Carry(opened);
    });
  });
}

}  // namespace heddle::kvstore::dist
