// The scheduler of a job, as a state machine: no thread, clock or socket inside.
//
// It gathers the nodes and tells all of them who they are (kJoin, kRoster), counts barriers, knows
// who is alive, ends the job when all workers have left it, and says to all who has failed when one
// has. Everything is known by identity (role, rank, incarnation), nothing by counting messages:
// what comes twice, late or out of order changes nothing.
//
// Names. A node that has connected, but has no rank yet, has the provisional NodeId that the
// transport gave it (its role, a rank below -1). Ranks are settled when all have joined, the wanted
// ones first, the others in order of joining; then Outputs::renames says how the provisional ones
// are called from here on. Messages that still come under the old name are understood.
//
// Invariants:
//   (S1) At most one node has a (role, rank), from the roster to the end of the job.
//   (S2) kBarrierDone(n) is sent only after every worker has sent kBarrier(m), m >= n, or its last
//        one, or kLeaveJob.
//   (S3) There is at most one failure, the first; after it nobody is told anything else.
//   (S4) kShutdown is sent only after every worker has left.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/outputs.h"

namespace heddle::kvstore::dist {

struct SchedulerOptions {
  std::int32_t num_workers = 1;
  std::int32_t num_servers = 1;
  // How arrays are cut: to all nodes, in the roster.
  std::int64_t slice_bytes = 1 << 20;
  std::int64_t cut_bytes = 4'000'000;
  std::string address;  // where it listens; in messages to people

  // By when all must have joined, from the start; 0: they have forever.
  Time start_timeout = std::chrono::seconds(60);
  Time heartbeat_every = std::chrono::seconds(1);  // what the nodes keep to
  Time dead_after = std::chrono::seconds(3);       // of silence
  // A node that another one has lost, but not the scheduler, gets so long to be lost here too, so
  // that the first cause is named rather than one of its effects.
  Time confirm_after = std::chrono::milliseconds(500);
  // What waits for so long is named in the log, again and again.
  Time warn_after = std::chrono::seconds(10);
  // After a failure the scheduler stays for so long, so that all can hear of it: also those that
  // have not joined yet, as long as they may (start_timeout).
  Time linger = std::chrono::seconds(3);
};

// Threads: one call at a time. Times never go back.
class SchedulerMachine {
 public:
  SchedulerMachine(Time now, SchedulerOptions options);

  // A peer has connected; `address` is where it comes from.
  void OnConnected(NodeId peer, const std::string& address);
  void OnMessage(Time now, NodeId from, const Message& message, Outputs& out);
  // The connection to `peer` is gone for good. Of a node that has neither left nor been told to
  // end: the job has failed.
  void OnLost(Time now, NodeId peer, const std::string& address, const std::string& why,
              Outputs& out);
  void OnTime(Time now, Outputs& out);
  // When OnTime wants to be called: at least once a heartbeat, until the job is over. A much later
  // call means that this process itself stood still, and nobody is taken for dead for it.
  std::optional<Time> next_time() const;
  // Ends the job as failed, the scheduler being told to end: "it was interrupted by a signal".
  void Abort(Time now, const std::string& why, Outputs& out);

  // Nothing is left to do: the job has ended well, or has failed and all know it that could.
  bool done() const { return done_; }
  const std::optional<FailureBody>& failure() const { return failure_; }
  // For programs: a JSON object. docs/wire.md has its fields.
  std::string Status(Time now) const;
  // For people: who is here, who is missing, what waits.
  std::string DescribeState(Time now) const;

 private:
  enum class Phase : std::uint8_t { kGathering, kRunning, kShuttingDown, kEnded, kFailed };
  enum class Presence : std::uint8_t { kHere, kLeft, kGone };

  struct Stranger {
    std::string address;
    bool has_asked = false;  // for the status: a program that comes and goes
  };
  struct End {  // that a node has said it comes to
    std::string why;
    Time due{0};  // when the job fails because of it, unless its connection ends before
  };
  struct Node {
    NodeId id;    // rank -1 until the roster, unless it wants one
    NodeId peer;  // as the transport knows it
    Incarnation incarnation = 0;
    std::string address;
    Time heard{0};
    Presence presence = Presence::kHere;
    std::uint64_t barriers = 0;  // of a worker: it has come to all before this number
    bool last_barrier = false;   // and to all behind, which need somebody else to call them
    // Of its last two heartbeats that had one, and when they came.
    StateBody state{}, state_before{};
    std::optional<Time> state_at{}, state_before_at{};
    std::optional<End> end{};
  };
  struct Suspicion {  // a kPeerDown about a node that the scheduler has not lost
    std::size_t node;
    std::vector<std::size_t> by;  // in the order of their reports
    std::string why;              // as the first one said
    Time due{0};
  };

  Node* Find(NodeId peer);                              // among the joined, by any of its names
  std::optional<std::size_t> IndexOf(NodeId id) const;  // likewise, by its final name
  std::int32_t NumWanted(Role role) const;
  std::int32_t NumJoined(Role role) const;

  void AnswerStale(const Node& node, const Message& message, Outputs& out);
  void OnJoin(Time now, NodeId from, const Message& message, Outputs& out);
  std::string WhyNotJoin(const JoinBody& join, const std::string& address) const;
  void Refuse(NodeId peer, const std::string& why, Outputs& out);
  void SettleRanks(Outputs& out);
  // Workers need the servers alone: with all others for each it would grow with their square.
  RosterBody RosterFor(Role role) const;
  static void SendRoster(const Node& node, RosterBody* roster, Outputs& out);

  void OnBarrier(Time now, Node& worker, const Message& message, Outputs& out);
  void Count(const Node& worker, std::int32_t workers);  // in come_to_next_ or excused_
  void FinishBarriers(Time now, Outputs& out);
  void OnLeaveJob(Time now, Node& worker, Outputs& out);
  void OnPeerDown(Time now, const Node& from, const Message& message, Outputs& out);
  void OnStatus(Time now, NodeId from, Outputs& out);
  void ServerEnded(Node& server);
  static void NoteState(Time now, Node& node, const Message& message);

  bool AwaitsLate(Time now) const;
  // All must have joined by now.
  bool StartIsOver(Time now) const {
    return options_.start_timeout > Time{0} && now - started_ >= options_.start_timeout;
  }
  void CheckSilence(Time now, Outputs& out);
  void CheckSuspicions(Time now, Outputs& out);
  void Warn(Time now, Outputs& out);
  void Fail(Time now, const NodeId& node, const std::string& address, const std::string& why,
            Outputs& out);
  bool HasReported(const Node& node) const;
  void FailNode(Time now, const Node& node, const std::string& why, Outputs& out);
  void CheckDone(Time now);

  // For people.
  std::string Missing() const;                     // who has not joined
  std::string WhatWaits(Time now) const;           // in the present phase; empty: nothing does
  std::string WhoHasCome(Time now) const;          // to the next barrier, and who has not
  std::string Workers(Time now, bool come) const;  // who has come to the next barrier, or has not
  std::string NameOf(const Node& node, Time now) const;

  const SchedulerOptions options_;
  const Time started_;
  Phase phase_ = Phase::kGathering;
  bool done_ = false;
  std::optional<FailureBody> failure_;
  Time ended_at_{0};           // when it failed
  std::size_t told_late_ = 0;  // who came after that

  std::vector<Node> nodes_;                // in order of joining; none is ever removed
  std::map<NodeId, std::size_t> by_peer_;  // all names of the joined
  std::map<NodeId, Stranger> connected_;   // those that have not joined
  std::int32_t workers_here_ = 0;          // joined and not left, from the roster on

  std::uint64_t barriers_done_ = 0;
  // Of the workers that are here: those that have called barrier barriers_done_, and those that
  // have not and need not.
  std::int32_t come_to_next_ = 0;
  std::int32_t excused_ = 0;
  Time next_barrier_since_{0};  // when the first of them did

  std::vector<Suspicion> suspicions_;
  Time ticked_;   // the last OnTime
  Time tick_at_;  // the next
  Time warn_at_;
};

}  // namespace heddle::kvstore::dist
