// The worker's half of the data plane, as a state machine: no thread, clock or socket inside.
//
// The program's requests enter by Submit, each about one part (or about a whole server: the part is
// ControlPart(store)) and with a token; each ends with one Answer of that token. In between the
// machine numbers the request among those of its part, holds it back until the worker may send it,
// and keeps it until it is answered, so that it can be sent again after a cut.
//
// Invariants:
//   (W1) Requests of a part are sent in the order of Submit, numbered without gaps from 0.
//   (W2) Of a part, at most kRequestsAheadMax requests are sent and unanswered, one of a control
//        part; in dist_sync at most kPushesAheadMax pushes are sent whose round the worker does not
//        know to be complete, in dist_async at most as many that are not acknowledged.
//   (W3) The pushes of W2 to one server have at most unfinished_bytes_max bytes in all, unless the
//        server has granted more or a single push is larger.
//   (W4) Every token is answered once.
//   (W5) After a failure (a peer is lost, the job has failed) everything open is answered with that
//        failure, and everything later at once.
//   (W6) A push that awaits its value has its place among the requests of its part, and holds up
//        those behind it there, as one without credit does. It has no bytes until Supply.
//   (W7) In dist_sync a push that times out unsent keeps its round, which fails when it comes to
//        it. No barrier waits for it, nor does Leave: the round goes on without it, or, if the push
//        is one of several parts, fails as the server is told then.
#pragma once

#include <heddle/dtype.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/fifo.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/limits.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/outputs.h"
#include "kvstore/dist/protocol/part_table.h"

namespace heddle::kvstore::dist {

struct WorkerOptions {
  Incarnation incarnation = 1;
  // What is open for so long is named in the log, again and again.
  Time warn_after = std::chrono::seconds(10);
  // What is unanswered for so long is sent again; 0: only by OnReconnected. For links that lose
  // single messages.
  Time resend_after{0};
  std::uint64_t unfinished_bytes_max = kUnfinishedBytesMax;  // W3; the same on servers
};

// What a request is, in messages to people; put together only when there is one.
class RequestName {
 public:
  RequestName() = default;
  RequestName(std::string text)  // NOLINT(google-explicit-constructor): it is one
      : about_(std::make_shared<const std::string>(std::move(text))) {}
  RequestName(const char* text) : verb_(text) {}  // NOLINT(google-explicit-constructor): likewise
  // "push key 'a'" of "push" and "'a'"; `verb` stays.
  RequestName(const char* verb, std::shared_ptr<const std::string> key)
      : verb_(verb), about_(std::move(key)) {}

  bool empty() const { return *verb_ == 0 && about_ == nullptr; }
  std::string text() const {
    const bool is_key = *verb_ != 0 && about_ != nullptr;
    return std::string(verb_) + (is_key ? " key " : "") + (about_ != nullptr ? *about_ : "");
  }

 private:
  const char* verb_ = "";
  std::shared_ptr<const std::string> about_;
};

// Something that the program wants of one server.
struct Request {
  Kind kind{};  // kInit .. kDescribe, or kOpenStore .. kKeys
  std::int32_t server = 0;
  PartId part = {};
  std::int32_t priority = 0;
  DType dtype = DType::kFloat32;
  std::uint8_t flags = 0;
  // Of pushes, kSetOptimizer and kSetParameters: of the optimizer.
  std::uint64_t version = 0;
  std::string meta = {};  // as bodies.h says for the kind
  Payload payload = {};
  std::uint64_t token = 0;
  Time deadline{0};  // when it ends with a TimeoutError; 0: never
  RequestName what = {};
  std::uint64_t op = 0;       // as Message::op
  bool awaits_value = false;  // of pushes: payload, or failure, come by Supply
  // Of pushes: other parts of the array have places of the same number, so this one keeps its own.
  bool one_of_several = false;
};

// The value of a push that has awaited it: its bytes, or why there are none.
struct PushValue {
  Payload payload = {};
  std::optional<ErrorBody> failure = {};
};
// Makes it that of the push.
void SetValue(PushValue&& value, Request* request);

// Threads: one call at a time. OnRoster comes before everything else.
class WorkerMachine {
 public:
  explicit WorkerMachine(WorkerOptions options) : options_(options) {}

  void OnRoster(Time now, const RosterBody& roster, Outputs& out);

  // Ends with what the server answered: kValue to pulls (with the payload) and to kDescribe (meta:
  // InitBody), kAcks to pushes (empty), kDone to the others; or with the server's error, a
  // TimeoutError at the deadline, a NetworkError after a failure, an InvalidState after Leave.
  void Submit(Time now, Request&& request, Outputs& out);
  // The value of the push of this token and part, once. Nothing happens if that has ended.
  void Supply(Time now, std::int32_t server, const PartId& id, std::uint64_t token,
              PushValue&& value, Outputs& out);
  // Ends when all workers that have not left have come to their barrier of the same number; they do
  // once it is open and all pushes that they submitted before that are acknowledged, or have timed
  // out unsent. False: it has ended with an error already, and is not to be opened.
  [[nodiscard]] bool Barrier(Time now, std::uint64_t token, Time deadline, Outputs& out);
  // Of the barriers that are not open, the first: once for each.
  void OpenBarrier(Time now, Outputs& out);
  // The program calls nothing more on the store: the servers are told how many requests of each
  // part are still to come, so that the others' rounds go on without this worker behind them, even
  // while it has open requests that wait for others in turn. Of calls whose requests have not been
  // submitted yet, WillRequest has to say before how many there may be, and WontRequest of each
  // that does not come after all; then CloseStore again, so that nobody waits for it. StoreClosed:
  // all calls have ended, and what is still missing does not come.
  void WillRequest(std::int32_t server, const PartId& id, std::uint64_t requests);
  void WontRequest(std::int32_t server, const PartId& id);
  void CloseStore(Time now, std::uint32_t store, Outputs& out);
  void StoreClosed(Time now, std::uint32_t store, Outputs& out);
  // The program calls no more barriers: those of others are done without this worker, once it has
  // come to this one, for which OpenBarrier is called as for others.
  void CloseBarriers(Time now);
  // Ends when all pushes are acknowledged or will not come (W7), all servers know that nothing more
  // will, and the scheduler has been told.
  void Leave(Time now, std::uint64_t token, Outputs& out);

  void OnMessage(Time now, NodeId from, Message&& message, Outputs& out);
  // The connection to `peer` is gone for good: W5, and the scheduler is told.
  void OnLost(Time now, NodeId peer, const std::string& address, const std::string& why,
              Outputs& out);
  // The connection to the server was cut and stands again: sends again what is unanswered.
  void OnReconnected(Time now, std::int32_t server, Outputs& out);
  // Nothing of a request whose answer is given, and which had a payload, will arrive: its bytes
  // were given up before they left. What keeps its place in the sequence goes instead.
  void OnDropped(std::int32_t server, const PartId& id, std::uint64_t sequence, Outputs& out);
  void OnTime(Time now, Outputs& out);
  // When OnTime wants to be called; earlier does no harm.
  std::optional<Time> next_time() const { return next_time_; }

  // The next calls are about this part; only for speed.
  void Expect(const PartId& id) const { dist::Expect(parts_, id); }

  // The open request that a message from `server` answers; null if there is none (any more). Valid
  // until the next call.
  const Request* Find(std::int32_t server, const PartId& part, std::uint64_t sequence) const;

  std::int32_t rank() const { return rank_; }
  bool left() const { return left_; }
  const std::optional<FailureBody>& failure() const { return failure_; }
  // Asks for the facts that DescribeState says, of the parts that have waited longest; false: there
  // is nothing to ask for.
  bool AskWhatWaits(Outputs& out) const;
  // What is open, for people.
  StateBody State() const;  // what the scheduler hears of this worker
  std::string DescribeState(Time now) const;

 private:
  struct Open {
    Request request;
    std::uint64_t sequence = 0;  // once it is sent
    Time submitted{0};
    Time sent{0};
    Time warn_at{0};
    std::uint64_t bytes = 0;     // of the push
    std::uint64_t barriers = 0;  // that were called before it
    bool granted = false;        // may be sent whatever W3 says
    bool stays = false;          // has ended unsent, and still takes its place
    int asked_why = 0;           // how often the server was asked for the facts of a TimeoutError
    bool counted = false;        // among Part::pushes
    bool ended = false;          // the program has its answer
    bool acked = false;          // of pushes: recorded by the server
    bool answered = false;       // nothing more is wanted from the server
  };
  struct Part {
    PartId id;
    std::int32_t server = 0;
    bool async = false;
    bool waits_for_bytes = false;  // is in its server's `waiting`
    bool warned = false;           // the server was asked for the facts of a warning
    bool timed = false;            // has had requests with a deadline
    std::optional<Time> asked;     // when a kAsk for the first unsent push was sent last
    std::size_t sent = 0;          // of open, from its front
    std::uint64_t next = 0;        // sequence number
    std::uint64_t pushes = 0;      // sent; in dist_async: sent and not acknowledged
    std::uint64_t to_come = 0;     // requests that are announced and not submitted
    std::uint64_t complete = 0;    // dist_sync: rounds known to be complete
    // dist_sync: bytes of the pushes after those.
    std::array<std::uint64_t, kPushesAheadMax> unfinished{};
    Fifo<Open> open;    // in order; the front is not answered
    std::string facts;  // what the part waits for, as its server said last
  };
  struct Server {
    std::uint64_t unfinished_bytes = 0;               // W3
    std::vector<Part*> waiting;                       // for bytes, the longest first
    std::unordered_map<std::uint32_t, Part> control;  // by store
    std::optional<Time> warned;
    std::optional<Time> heard;  // its last message about requests
  };
  struct BarrierCall {
    std::uint64_t token = 0;
    Time called{0};
    Time sent{0};
    Time warn_at{0};
    Time deadline{0};
    int asked_why = 0;
    bool warns = false;  // with what the scheduler was asked for
    bool ended = false;
    bool last = false;  // CloseBarriers
  };

  // Sending.
  Part& MadePart(const PartId& id);
  Part& PartOf(std::int32_t server, const PartId& id);
  void Enqueue(Time now, Request&& request, Outputs& out);
  void Pump(Time now, Part& part, Outputs& out);
  bool MaySend(Time now, Part& part, Open& open, Outputs& out);
  bool MaySendBytes(Time now, Part& part, Open& open, Outputs& out);
  void StopWaitingForBytes(Part& part);
  void Number(Time now, Part& part, Open& open);
  void Ask(Time now, Part& part, Outputs& out);
  void SendRequest(const Part& part, const Open& open, Outputs& out) const;
  void PumpWaiting(Time now, Server& server, Outputs& out);
  void SendBarriers(Time now, Outputs& out);
  void SendBarrier(Time now, std::uint64_t number, Outputs& out);
  std::vector<CloseStoreBody> RequestsToCome(std::uint32_t store) const;  // for each server
  void SendCloseStore(Time now, std::int32_t server, std::uint32_t store,
                      const CloseStoreBody& body, Outputs& out);
  void SendLeaves(Time now, Outputs& out);
  void SendLeave(Time now, std::int32_t server, const LeaveBody& body, Outputs& out);
  void Resend(Time now, Part& part, bool all, Outputs& out);

  // A request of the machine's own, whose end nobody is told.
  static bool IsOwn(Kind kind) { return kind == Kind::kLeave || kind == Kind::kCloseStore; }

  // Answers.
  Part* FindPart(std::int32_t server, const PartId& id);
  static Open* FindOpen(Part& part, std::uint64_t sequence);
  void OnServerMessage(Time now, std::int32_t server, Message&& message, Outputs& out);
  void OnAcks(Time now, std::int32_t server, const Message& message, Outputs& out);
  void OnAnswer(Time now, Part& part, Message&& message, Outputs& out);
  void OnGrant(Time now, Part& part, const Message& message, Outputs& out);
  void OnFacts(Time now, Part& part, const Message& message, Outputs& out);
  void OnSchedulerMessage(Time now, const Message& message, Outputs& out);
  void OnBarrierDone(std::uint64_t number, Outputs& out);
  void OnLeft(Outputs& out);
  void Acknowledge(Part& part, Open& open, Outputs& out);
  void Uncount(Part& part, Open& open);
  void LearnComplete(Part& part, std::uint64_t complete);
  void Settle(Time now, Part& part, Outputs& out);
  // The answer, to be filled in; null: the program has it.
  Answer* End(Open& open, Outputs& out);
  void End(Open& open, std::exception_ptr error, Message&& message, Outputs& out);

  // Time and failures.
  template <class Machine, class Function>
  static void ForEachPart(Machine& machine, Function function) {
    for (auto& [id, part] : machine.parts_) function(*part);
    for (auto& server : machine.servers_) {
      for (auto& [store, part] : server.control) function(part);
    }
  }
  void CheckOpen(Time now, Part& part, Outputs& out);
  void CheckBarriers(Time now, Outputs& out);
  void OnFactsOfBarriers(Time now, const Message& message, Outputs& out);
  static bool KeepsRound(const Part& part, const Open& open, bool held_up);
  void GiveUp(Time now, const Part& part, Open& open, bool sent, Outputs& out);
  static bool StaysUnsent(const Part& part, const Open& open);
  // For each server; drops none while some are on their way.
  std::vector<LeaveBody> DropLatePushes(Time now, Outputs& out);
  bool DropTimedOut(Part& part, Outputs& out);
  void Warn(Time now, Part& part, Outputs& out);
  void AskWhy(const Part& part, Outputs& out) const;
  void AskScheduler(Outputs& out) const;
  // The parts with open requests, those first whose first one is the oldest.
  std::vector<const Part*> WaitingParts() const;
  std::exception_ptr TimedOut(Time now, const Part& part, const Open& open) const;
  std::string OwnFacts(Time now, const Part& part) const;
  std::string BarrierFacts(Time now, std::uint64_t number) const;
  void WakeAt(Time time);
  void OnJobFailed(const Message& message, Outputs& out);
  void Fail(FailureBody failure, Outputs& out);
  std::exception_ptr FailureError(const std::string& what) const;
  std::string NameOf(NodeId node) const;

  const WorkerOptions options_;
  std::int32_t rank_ = -1;
  std::optional<Time> next_time_;
  std::vector<NodeEntry> nodes_;
  std::vector<Server> servers_;
  PartTable<std::unique_ptr<Part>> parts_;
  StateBody state_;                                // but for what waits
  std::uint64_t ended_ = 0;                        // requests
  std::unordered_map<std::uint32_t, bool> async_;  // by store
  // The stores that are closed: the servers that wait for requests to come.
  std::map<std::uint32_t, std::set<std::int32_t>> closed_;

  std::deque<BarrierCall> barriers_;  // those that are not done: number barriers_done_, ...
  std::uint64_t barriers_done_ = 0;
  std::uint64_t barriers_open_ = 0;
  std::uint64_t barriers_sent_ = 0;
  // Pushes that are not acknowledged, by how many barriers were called before them: the first
  // element is of barriers_sent_. So the next barrier may be sent when that element is 0.
  std::deque<std::uint64_t> unacknowledged_{0};
  std::uint64_t late_pushes_ = 0;  // those that stay, likewise not acknowledged: W7
  std::string barrier_facts_;      // what the first waits for, as the scheduler said last

  std::optional<std::uint64_t> leave_token_;  // Leave was called
  std::optional<std::size_t> leaves_open_;    // kLeave was sent; those that are not answered
  bool left_ = false;
  std::optional<FailureBody> failure_;
};

}  // namespace heddle::kvstore::dist
