// What a dist store sees of its place in the job: requests go out, answers come to their sinks.
#pragma once

#include <heddle/engine.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/outputs.h"
#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/protocol/worker.h"
#include "kvstore/dist/transport/transport.h"
#include "kvstore/dist/worker/push_gate.h"

namespace heddle::kvstore::dist {

// Where the answer to a request goes: a request's token is the address of its sink, which lives
// until it has its answer.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;
  // The one answer; from any thread, without locks.
  virtual void OnAnswer(Answer&& answer) = 0;
  // Where the payload of the answer shall be received; null: anywhere. Called under the node's
  // lock.
  virtual std::shared_ptr<Landing> LandingFor(const Message& header, std::uint64_t bytes) = 0;
};

// The token of requests that nobody waits for (any more): no sink has this address.
inline constexpr std::uint64_t kNoSink = 1;

inline std::uint64_t TokenOf(AnswerSink& sink) { return reinterpret_cast<std::uintptr_t>(&sink); }

// What has come of a look at UnsentCalls.
struct UnsentFound {
  std::optional<Time> next{};  // when to look again; nothing: none waits
  // To be given without locks; each keeps the call that it is of until then.
  std::vector<std::pair<std::shared_ptr<const void>, Answer>> answers{};
  std::vector<Payload> given_back{};  // before the answers
  std::vector<std::string> warnings{};

  void LookAt(Time time) { next = next ? std::min(*next, time) : time; }
};

// Of a store: its calls that the node knows nothing of yet.
class UnsentCalls {
 public:
  virtual ~UnsentCalls() = default;

  // Takes back those whose deadline has passed, and says which have waited so long that people want
  // to know. Waits for nothing.
  virtual void CheckUnsent(Time now, Time warn_after, UnsentFound* found) = 0;
};

// What the stores see of a node. Threads: any.
class WorkerLink {
 public:
  virtual ~WorkerLink() = default;

  virtual std::int32_t rank() const = 0;
  virtual std::int32_t num_workers() const = 0;
  virtual const PlacementOptions& placement() const = 0;
  virtual std::int32_t num_dead() = 0;
  // This worker has failed: the job is told why, and what its stores wait for ends with an error.
  virtual void Fail(const std::string& why) = 0;
  // When a request of now has to be answered; 0: never has to.
  virtual Time deadline() const = 0;

  // A store begins, or ends, whose waiting threads may run the transport, and whose calls are
  // looked at now and then.
  virtual void Serve(Engine& engine, UnsentCalls& calls) = 0;
  virtual void Leave(Engine& engine, UnsentCalls& calls) = 0;

  // The program has made its last call on the store. WillRequest comes before, for each part of the
  // calls whose requests have not been submitted, and WontRequest, then CorrectClose, if one is not
  // made after all; see WorkerMachine::CloseStore. StoreClosed: all calls have ended.
  virtual void WillRequest(std::int32_t server, const PartId& part, std::uint64_t requests) = 0;
  virtual void WontRequest(std::int32_t server, const PartId& part) = 0;
  virtual void CloseStore(std::uint32_t store) = 0;
  virtual void CorrectClose(std::uint32_t store) = 0;
  virtual void StoreClosed(std::uint32_t store) = 0;
  // Instead of all these: it goes in disorder, which the others hear of otherwise, if at all.
  virtual void DropStore() = 0;

  // Takes (moves from) requests in their order. What follows of it is left to Carry, so that
  // callers can order requests under locks of theirs: Carry sends, and gives answers, which may run
  // anything.
  void Submit(std::span<Request> requests, Outputs* out) { Submit({&requests, 1}, out); }
  // The same of several calls.
  virtual void Submit(std::span<const std::span<Request>> calls, Outputs* out) = 0;
  // The value of a push that has been submitted without one, see WorkerMachine::Supply. The sink of
  // its token lives.
  virtual void Supply(std::int32_t server, const PartId& part, std::uint64_t token,
                      PushValue&& value, Outputs* out) = 0;
  // It waits until it is open. False: it has ended with an error already.
  [[nodiscard]] virtual bool Barrier(AnswerSink& sink, Outputs* out) = 0;
  // The first that is not: all pushes called before it have been submitted, see pushes().
  virtual void OpenBarrier(Outputs* out) = 0;
  virtual void Carry(Outputs& out) = 0;  // once

  // This thread has carried so many requests, and has no Outputs in use: takes, now and then,
  // answers that have come. They touch what the requests were made of, which is in this CPU's cache
  // and not in that of the network's thread. May run anything, as Carry.
  virtual void TakeAnswers(std::size_t requests) = 0;

  // The pushes of all stores that have not been submitted.
  PushGate& pushes() { return pushes_; }

 private:
  PushGate pushes_;
};

}  // namespace heddle::kvstore::dist
