// What a worker and a server have in common towards the scheduler, as a state machine: joining,
// signs of life both ways, the end. The requests, barriers and reports of lost peers are the
// business of the worker's and the server's machines; a node gives what comes from the scheduler to
// both.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/protocol/outputs.h"

namespace heddle::kvstore::dist {

struct MemberOptions {
  JoinBody join;                  // who it is
  std::string scheduler_address;  // in messages to people

  // By when the roster must be there, from the start on; 0: it may take forever.
  Time start_timeout = std::chrono::seconds(60);
  Time heartbeat_every = std::chrono::seconds(1);
  Time dead_after = std::chrono::seconds(3);  // of the scheduler's silence
};

// Threads: one call at a time. Times never go back. Join comes first, once, when the scheduler is
// connected.
class Member {
 public:
  explicit Member(MemberOptions options);

  // `started`: when this node began to look for the scheduler; unless said, now.
  void Join(Time now, Outputs& out, std::optional<Time> started = std::nullopt);
  // From the scheduler. Others' messages are no business of this machine.
  void OnMessage(Time now, const Message& message, Outputs& out);
  // The connection to the scheduler is gone for good.
  void OnSchedulerLost(Time now, const std::string& why);
  // `state` goes with a heartbeat.
  void OnTime(Time now, Outputs& out, const StateBody& state = {});
  // A heartbeat of a node whose machines are held up, while it is in the job.
  Message SignOfLife() const;
  bool in_job() const { return roster_.has_value() && !over(); }
  // When OnTime wants to be called. A much later call means that this process itself stood still,
  // and the scheduler is not taken for dead for it.
  std::optional<Time> next_time() const;

  // A worker's machine has sent kLeaveJob: it is said again until the scheduler has heard it.
  void OnLeft(Time now);
  // A server has ended its work, as shutdown_wanted() asks.
  void ShutDown(Outputs& out);
  // This node cannot go on, or has ended badly after it left: tells the scheduler, which fails the
  // job when this node's connection ends, or soon; for this node it has failed. `why`: "its program
  // threw std::bad_alloc"; of a long text the first 1000 bytes go, in one line.
  void Fail(const std::string& why, Outputs& out);

  const std::optional<RosterBody>& roster() const { return roster_; }
  NodeId self() const { return {options_.join.role, roster_ ? roster_->rank : -1}; }
  // The job's, by the scheduler's word, or the loss of the scheduler: to be made known to the other
  // machine as a kJobFailed. Once there is one, it stays.
  const std::optional<FailureBody>& failure() const { return failure_; }
  // It is no failure of the job, but of this node alone: the scheduler does not want it.
  bool refused() const { return refused_; }
  // Of a server: all workers have left.
  bool shutdown_wanted() const { return shutdown_wanted_; }
  // Of a worker: the scheduler knows that it has left. The connection may go.
  bool left() const { return left_; }
  std::string DescribeState(Time now) const;

 private:
  Message Say(Kind kind) const;
  void SetFailure(NodeId node, const std::string& address, const std::string& why);
  bool over() const { return failure_.has_value() || left_ || shut_down_; }

  const MemberOptions options_;
  bool joined_ = false;  // there is a connection, and since then the times
  Time started_{0};
  Time heard_{0};
  Time tick_at_{0};
  std::uint64_t heartbeats_ = 0;
  bool asked_ = false;   // why the roster does not come
  std::string facts_{};  // the answer
  bool leaving_ = false;
  bool left_ = false;
  bool shutdown_wanted_ = false;
  bool shut_down_ = false;
  bool refused_ = false;
  std::optional<RosterBody> roster_;
  std::optional<FailureBody> failure_;
};

}  // namespace heddle::kvstore::dist
