#include "kvstore/dist/protocol/member.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/protocol/words.h"

namespace heddle::kvstore::dist {
Member::Member(MemberOptions options) : options_(std::move(options)) {}

Message Member::Say(Kind kind) const {
  return {.kind = kind, .rank = self().rank, .incarnation = options_.join.incarnation};
}

void Member::Join(Time now, Outputs& out, std::optional<Time> started) {
  joined_ = true;
  started_ = started.value_or(now);
  heard_ = now;
  tick_at_ = now + options_.heartbeat_every;
  if (options_.start_timeout > Time{0}) {
    tick_at_ = std::min(tick_at_, started_ + options_.start_timeout);
  }
  Message join = Say(Kind::kJoin);
  join.meta = Encode(options_.join);
  out.Send(kTheScheduler, std::move(join));
}

void Member::OnMessage(Time now, const Message& message, Outputs& out) {
  heard_ = now;
  if (failure_) return;
  switch (message.kind) {
    case Kind::kRoster: {
      RosterBody roster;
      if (roster_) break;
      if (!Decode(message.meta, &roster)) {
        SetFailure(kTheScheduler, options_.scheduler_address, "its roster cannot be read");
        break;
      }
      roster_ = std::move(roster);
      break;
    }
    case Kind::kRefused: {
      ErrorBody error;
      if (!Decode(message.meta, &error)) error.message = "for a reason that cannot be read";
      refused_ = true;
      SetFailure(kTheScheduler, options_.scheduler_address,
                 "refused this process: " + error.message);
      break;
    }
    case Kind::kJobFailed: {
      FailureBody failure;
      if (!Decode(message.meta, &failure)) {
        failure = {kTheScheduler, options_.scheduler_address,
                   "the job has failed, for a reason that cannot be read"};
      }
      if (!over()) failure_ = std::move(failure);
      break;
    }
    case Kind::kDone:
      left_ = left_ || leaving_;
      break;
    case Kind::kShutdown:
      if (shut_down_) {
        out.Send(kTheScheduler, Say(Kind::kShutdownDone));  // it was lost
      } else {
        shutdown_wanted_ = options_.join.role == Role::kServer;
      }
      break;
    case Kind::kStatusReply: {
      TextBody body;
      if (Decode(message.meta, &body)) facts_ = std::move(body.text);
      break;
    }
    default:  // heartbeats, and what the worker's machine waits for
      break;
  }
}

void Member::SetFailure(NodeId node, const std::string& address, const std::string& why) {
  if (!over()) failure_ = FailureBody{.node = node, .address = address, .why = why};
}

void Member::OnSchedulerLost(Time /*now*/, const std::string& why) {
  if (leaving_) left_ = true;  // nothing is left to lose
  SetFailure(kTheScheduler, options_.scheduler_address, "its connection was lost: " + why);
}

std::optional<Time> Member::next_time() const {
  if (over()) return std::nullopt;
  return tick_at_;
}

void Member::OnTime(Time now, Outputs& out, const StateBody& state) {
  if (over() || now < tick_at_) return;
  const bool stood_still = now - tick_at_ > options_.heartbeat_every;
  tick_at_ = now + options_.heartbeat_every;
  if (stood_still) heard_ = now;  // what the scheduler has said since lies unread
  if (now - heard_ >= options_.dead_after) {
    return SetFailure(kTheScheduler, options_.scheduler_address,
                      "silent for " + InSeconds(now - heard_));
  }
  Message heartbeat = Say(Kind::kHeartbeat);
  heartbeat.sequence = heartbeats_++;
  if (roster_) heartbeat.meta = Encode(state);
  tick_at_ = std::min(tick_at_, heard_ + options_.dead_after);  // not up to a heartbeat later
  out.Send(kTheScheduler, std::move(heartbeat));
  if (leaving_) out.Send(kTheScheduler, Say(Kind::kLeaveJob));
  if (roster_) return;
  if (options_.start_timeout > Time{0}) {
    if (now - started_ >= options_.start_timeout) {
      return SetFailure(
          kTheScheduler, options_.scheduler_address,
          fmt::format("the job did not begin within {}{}", InSeconds(options_.start_timeout),
                      facts_.empty() ? "" : ": " + facts_));
    }
    tick_at_ = std::min(tick_at_, started_ + options_.start_timeout);
    if (!asked_ && now - started_ >= options_.start_timeout / 2) {
      asked_ = true;
      out.Send(kTheScheduler, Say(Kind::kStatus));
    }
  }
  Message join = Say(Kind::kJoin);  // this one or the roster may be lost
  join.meta = Encode(options_.join);
  out.Send(kTheScheduler, std::move(join));
}

Message Member::SignOfLife() const {
  Message alive = Say(Kind::kHeartbeat);
  alive.sequence = std::numeric_limits<std::uint64_t>::max();  // no heartbeat's, in traces
  return alive;
}

void Member::OnLeft(Time now) {
  leaving_ = true;
  tick_at_ = std::min(tick_at_, now + options_.heartbeat_every);
}

void Member::ShutDown(Outputs& out) {
  shut_down_ = true;
  out.Send(kTheScheduler, Say(Kind::kShutdownDone));
}

void Member::Fail(const std::string& why, Outputs& out) {
  if (failure_ || shut_down_) return;
  Message report = Say(Kind::kPeerDown);
  const std::string line = InOneLine(why);
  report.meta = Encode(FailureBody{self(), options_.join.address, line});
  out.Send(kTheScheduler, std::move(report));
  SetFailure(self(), options_.join.address, line);
}

std::string Member::DescribeState(Time now) const {
  std::string text = fmt::format(
      "{}, scheduler at {}, {}\n", ToString(self()), options_.scheduler_address,
      joined_ ? fmt::format("last heard {} ago", InSeconds(now - heard_)) : "not reached so far");
  if (failure_) {
    text += fmt::format("  the job has failed: {} at {}: {}\n", ToString(failure_->node),
                        failure_->address, failure_->why);
  } else if (!roster_) {
    if (joined_)
      text += fmt::format("  has waited {} for the job to begin\n", InSeconds(now - started_));
  } else if (leaving_) {
    text += left_ ? "  has left\n" : "  leaves\n";
  } else if (shutdown_wanted_) {
    text += shut_down_ ? "  has ended\n" : "  ends\n";
  }
  return text;
}

}  // namespace heddle::kvstore::dist
