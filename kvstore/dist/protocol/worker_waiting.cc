// What does not come: warnings, deadlines, lost peers, and what people are told of it.
#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/protocol/words.h"
#include "kvstore/dist/protocol/worker.h"

namespace heddle::kvstore::dist {

namespace {

// Requests that stay when they time out before they are sent: the program counts on them. It has
// forgotten a key that it removes, and the others would wait for its pushes; pushes that have gone
// wait at the servers for the optimizer's parameters that they are of; and an optimizer or a
// compression that is taken back would be in the way of the next one.
bool GoesAllTheSame(const Request& request) {
  const bool is_set = request.kind == Kind::kSetOptimizer || request.kind == Kind::kSetCompression;
  return request.kind == Kind::kRemove || request.kind == Kind::kSetParameters ||
         (is_set && (request.flags & kFlagFailed) != 0);
}

// The facts of a TimeoutError are asked for twice: halfway, since an answer may take long, and
// again close to the deadline, since they change.
struct AskTimes {
  AskTimes(Time begun, Time deadline)
      : first(begun + (deadline - begun) / 2),
        again(deadline - std::min<Time>(std::chrono::milliseconds(500), (deadline - begun) / 4)),
        deadline(deadline) {}

  // Whether to ask now, having done so `asked` times.
  bool IsDue(Time now, int asked) const { return now >= (asked == 0 ? first : again) && asked < 2; }
  Time Next(int asked) const { return asked == 0 ? first : asked == 1 ? again : deadline; }

  Time first;
  Time again;
  Time deadline;
};

constexpr std::size_t kShownMax = 20;  // parts, and barriers
constexpr int kLooksAWarning = 32;     // at most, in the time of a warning

}  // namespace

void WorkerMachine::OnTime(Time now, Outputs& out) {
  if (failure_ || !next_time_ || now < *next_time_) return;
  next_time_.reset();
  ForEachPart(*this, [&](Part& part) {
    if (part.open.empty()) return;
    CheckOpen(now, part, out);
    if (options_.resend_after > Time{0}) Resend(now, part, /*all=*/false, out);
  });
  CheckBarriers(now, out);
  SendBarriers(now, out);  // pushes that timed out before they were sent hold up none
  SendLeaves(now, out);
}

// Without deadlines the first that waits has waited longest, and the next one may follow it before
// the next look: no others matter. The node's lock is held, and there may be millions.
void WorkerMachine::CheckOpen(Time now, Part& part, Outputs& out) {
  bool held_up = false;  // by a push whose value has not come
  bool kept = false;     // the place of one that has ended
  int seen = 0;
  for (std::size_t i = 0; i < part.open.size(); ++i) {
    Open& open = part.open[i];
    held_up |= open.request.awaits_value || (open.stays && i >= part.sent);
    const bool holds_up_leave = leave_token_ && IsPush(open.request.kind) && !open.acked;
    if (open.ended && !holds_up_leave) continue;
    if (now >= open.warn_at) {
      open.warn_at = now + options_.warn_after;
      Warn(now, part, out);
    }
    // With deadlines a look is at all: not for each of many that have come one after the other.
    WakeAt(std::max(open.warn_at, now + options_.warn_after / kLooksAWarning));
    if (!part.timed && ++seen == 2) break;
    const Time deadline = open.request.deadline;
    if (open.ended || deadline == Time{0}) continue;
    const AskTimes ask(open.submitted, deadline);
    if (now >= deadline) {
      open.stays =
          i >= part.sent && (KeepsRound(part, open, held_up) || GoesAllTheSame(open.request));
      kept |= open.stays;
      GiveUp(now, part, open, i < part.sent, out);
    } else {
      if (ask.IsDue(now, open.asked_why)) {
        AskWhy(part, out);
        ++open.asked_why;
      }
      WakeAt(ask.Next(open.asked_why));
    }
  }
  const bool dropped = part.timed && DropTimedOut(part, out);
  if (held_up || kept || dropped) Pump(now, part, out);
}

// Whether a push that times out unsent takes its place all the same, as one that failed. In
// dist_sync the next one is of another round. In dist_async the parts of an array keep together: of
// one of several, one whose value has not come, and those that it holds up, other parts may have
// gone; one that had failed has been counted on since its call has ended.
bool WorkerMachine::KeepsRound(const Part& part, const Open& open, bool held_up) {
  if (!IsPush(open.request.kind)) return false;
  return !part.async || held_up || open.request.one_of_several ||
         (open.request.flags & kFlagFailed) != 0;
}

// The program takes its arrays back. A request that was sent has its place in the sequence, so
// should it have to go once more, it goes without them: a push as one that failed, another request
// as one that changes nothing. So do pushes that keep their rounds unsent, and what GoesAllTheSame
// as it is.
//
// A push that keeps its round unsent waits for the other workers, and must not hold up what they
// wait for (W7): a barrier of all, before which one of them has pushed less, would never be done.
void WorkerMachine::GiveUp(Time now, const Part& part, Open& open, bool sent, Outputs& out) {
  const std::exception_ptr error = TimedOut(now, part, open);
  Request& request = open.request;
  if (open.stays || (sent && !open.acked && !request.payload.empty())) {
    out.GiveBack(request.payload);
    if (IsPush(request.kind)) {
      if ((request.flags & kFlagFailed) == 0) {  // else why it has failed is known
        SetValue({.failure = ToErrorBody(error)}, &request);
      }
      if (!sent) {
        open.bytes = 0;
        --unacknowledged_[open.barriers - barriers_sent_];
        ++late_pushes_;
      }
    } else if (!GoesAllTheSame(request)) {
      request.kind = part.id.part == kControlPart ? Kind::kKeys : Kind::kDescribe;
      request.flags = 0;
      request.meta.clear();
    }
  }
  End(open, error, {}, out);
}

void WorkerMachine::OnDropped(std::int32_t server, const PartId& id, std::uint64_t sequence,
                              Outputs& out) {
  Part* const part = FindPart(server, id);
  if (part == nullptr) return;
  const Open* const open = FindOpen(*part, sequence);
  if (open != nullptr && !open->answered) SendRequest(*part, *open, out);
}

// A late push that need not come when the worker leaves. In dist_async the server takes it as soon
// as it has acknowledged those before it; in dist_sync it may wait for the others for ever.
bool WorkerMachine::StaysUnsent(const Part& part, const Open& open) {
  return open.stays && IsPush(open.request.kind) && !(part.async && open.request.one_of_several);
}

// Unless some are on their way: the others' credit may yet come for more of them. Nor before all
// servers have the parameters that the pushes are of, since these will tell of them. Other parts of
// an array count on each to have its round, and fail it, as the servers are told. What has ended
// behind them ends with the worker; so does the removal of the key, before which the servers would
// have to hear of these pushes.
std::vector<LeaveBody> WorkerMachine::DropLatePushes(Time now, Outputs& out) {
  std::vector<LeaveBody> bodies(servers_.size());
  std::uint64_t unsent = 0;
  bool knows_all = true;  // the parameters that the pushes are of
  ForEachPart(*this, [&](const Part& part) {
    for (std::size_t i = 0; i < part.open.size(); ++i) {
      const Open& open = part.open[i];
      knows_all = knows_all && (open.answered || open.request.kind != Kind::kSetParameters);
    }
    std::vector<LeaveBody::Push>& missing = bodies[static_cast<std::size_t>(part.server)].missing;
    for (std::size_t i = part.sent; i < part.open.size(); ++i) {
      const Open& open = part.open[i];
      if (!StaysUnsent(part, open)) continue;
      ++unsent;
      if (open.request.one_of_several) missing.push_back({part.id, open.request.version});
    }
  });
  if (unsent < late_pushes_ || !knows_all) return bodies;
  late_pushes_ = 0;
  ForEachPart(*this, [&](Part& part) {
    const std::size_t before = part.open.size();
    bool is_behind = false;
    part.open.RemoveFrom(part.sent, [&](Open& open) {
      is_behind = is_behind || StaysUnsent(part, open);
      if (is_behind && open.request.kind == Kind::kRemove) {
        End(open, nullptr, {.kind = Kind::kDone}, out);
      }
      return is_behind && open.ended;
    });
    if (part.sent == part.open.size()) StopWaitingForBytes(part);
    if (part.open.size() < before) Pump(now, part, out);
  });
  return bodies;
}

// What was never sent needs no answer, unless it stays; what was sent keeps its place until it is
// answered. Whether there was any.
bool WorkerMachine::DropTimedOut(Part& part, Outputs& out) {
  const std::size_t before = part.open.size();
  part.open.RemoveFrom(part.sent, [&](Open& open) {
    if (!open.ended || open.stays) return false;
    out.GiveBack(open.request.payload);
    if (IsPush(open.request.kind)) --unacknowledged_[open.barriers - barriers_sent_];
    return true;
  });
  if (part.sent == part.open.size()) StopWaitingForBytes(part);
  return part.open.size() < before;
}

// One request a server, not all that wait for the same reason.
void WorkerMachine::Warn(Time now, Part& part, Outputs& out) {
  Server& server = servers_[static_cast<std::size_t>(part.server)];
  if (server.warned && now - *server.warned < options_.warn_after) return;
  server.warned = now;
  if (const Open& front = part.open.front(); front.request.awaits_value) {
    out.log.emplace_back(LogLevel::kWarning,
                         fmt::format("{} has waited {} for the copy of its values from the GPU",
                                     front.request.what.text(), InSeconds(now - front.submitted)));
    return;
  }
  if (part.warned) {
    out.log.emplace_back(LogLevel::kWarning,
                         fmt::format("{} has waited {} for {}, which does not say why: {}",
                                     part.open.front().request.what.text(),
                                     InSeconds(now - part.open.front().submitted),
                                     NameOf(TheServer(part.server)), OwnFacts(now, part)));
  }
  part.warned = true;
  AskWhy(part, out);
}

void WorkerMachine::AskWhy(const Part& part, Outputs& out) const {
  out.Send(
      TheServer(part.server),
      {.kind = Kind::kStatus, .rank = rank_, .incarnation = options_.incarnation, .part = part.id});
}

void WorkerMachine::AskScheduler(Outputs& out) const {
  out.Send(kTheScheduler,
           {.kind = Kind::kStatus, .rank = rank_, .incarnation = options_.incarnation});
}

bool WorkerMachine::AskWhatWaits(Outputs& out) const {
  if (failure_) return false;
  std::vector<const Part*> waiting = WaitingParts();
  waiting.resize(std::min(waiting.size(), kShownMax));
  for (const Part* part : waiting) AskWhy(*part, out);
  const auto sent = static_cast<std::ptrdiff_t>(barriers_sent_ - barriers_done_);
  const bool barrier = std::any_of(barriers_.begin(), barriers_.begin() + sent,
                                   [](const BarrierCall& call) { return !call.ended; });
  if (barrier) AskScheduler(out);
  return barrier || !waiting.empty();
}

void WorkerMachine::OnFacts(Time now, Part& part, const Message& message, Outputs& out) {
  TextBody body;
  if (!Decode(message.meta, &body) || part.open.empty()) return;
  part.facts = std::move(body.text);
  if (!part.warned) return;
  part.warned = false;
  const Open& open = part.open.front();
  out.log.emplace_back(
      LogLevel::kWarning,
      fmt::format("{} has waited {} for {}: {}", open.request.what.text(),
                  InSeconds(now - open.submitted), NameOf(TheServer(part.server)), part.facts));
}

std::exception_ptr WorkerMachine::TimedOut(Time now, const Part& part, const Open& open) const {
  if (open.request.deadline <= open.submitted) {
    return std::make_exception_ptr(TimeoutError(
        fmt::format("{}: what it waited for in this process was there only {} after its deadline",
                    open.request.what.text(), InSeconds(open.submitted - open.request.deadline))));
  }
  if (open.request.awaits_value) {
    return std::make_exception_ptr(TimeoutError(
        fmt::format("{}: the copy of its values from the GPU was not done within {}",
                    open.request.what.text(), InSeconds(open.request.deadline - open.submitted))));
  }
  return std::make_exception_ptr(TimeoutError(fmt::format(
      "{}: no answer from {} within {}: {}{}", open.request.what.text(),
      NameOf(TheServer(part.server)), InSeconds(open.request.deadline - open.submitted),
      part.facts.empty() ? "it has not said why: " + OwnFacts(now, part) : part.facts,
      open.request.kind == Kind::kRemove ? "; the key goes from there as soon as it can" : "")));
}

// What the worker knows without being told why the part's requests wait.
std::string WorkerMachine::OwnFacts(Time now, const Part& part) const {
  const std::optional<Time> heard = servers_[static_cast<std::size_t>(part.server)].heard;
  const std::string last =
      heard ? fmt::format("last heard {} ago", InSeconds(now - *heard)) : "never heard";
  if (part.async || part.id.part == kControlPart) return last;
  return fmt::format("{} pushes, {} rounds known complete; {}", part.pushes, part.complete, last);
}

// What barrier `number` waits for.
std::string WorkerMachine::BarrierFacts(Time now, std::uint64_t number) const {
  if (number >= barriers_open_) return "gradients of earlier pushes are not there";
  if (number < barriers_sent_) {
    if (barrier_facts_.empty()) return "not all workers have come";
    if (number == barriers_done_) return barrier_facts_;
    return fmt::format("barrier {} is not done: {}", barriers_done_, barrier_facts_);
  }
  const Open* first = nullptr;
  const Part* its_part = nullptr;
  ForEachPart(*this, [&](const Part& part) {
    for (std::size_t i = 0; i < part.open.size(); ++i) {
      const Open& open = part.open[i];
      if (!IsPush(open.request.kind) || open.acked || open.stays) continue;
      if (open.barriers > number) continue;
      if (first != nullptr && first->submitted <= open.submitted) continue;
      first = &open;
      its_part = &part;
    }
  });
  if (first == nullptr) return "an earlier barrier is not sent";
  return fmt::format("earlier pushes are not acknowledged; the oldest is {}, by {}: {}",
                     first->request.what.text(), NameOf(TheServer(its_part->server)),
                     its_part->facts.empty() ? OwnFacts(now, *its_part) : its_part->facts);
}

void WorkerMachine::CheckBarriers(Time now, Outputs& out) {
  bool ask = false;
  for (std::uint64_t i = 0; i < barriers_.size(); ++i) {
    BarrierCall& call = barriers_[i];
    const std::uint64_t number = barriers_done_ + i;
    const bool sent = number < barriers_sent_;
    if (sent && options_.resend_after > Time{0}) {
      if (now >= call.sent + options_.resend_after) {
        SendBarrier(now, number, out);
      }
      WakeAt(call.sent + options_.resend_after);
    }
    if (call.ended) continue;
    if (now >= call.warn_at) {
      call.warn_at = now + options_.warn_after;
      // Whom a barrier that was sent waits for the scheduler knows: see OnFactsOfBarriers.
      const bool unanswered = std::exchange(call.warns, sent);
      if (!sent || unanswered) {
        out.log.emplace_back(
            LogLevel::kWarning,
            fmt::format("barrier {} has waited {}{}: {}", number, InSeconds(now - call.called),
                        sent ? ", and the scheduler does not say why" : "",
                        BarrierFacts(now, number)));
      }
      ask |= sent;
    }
    WakeAt(call.warn_at);
    if (call.deadline == Time{0}) continue;
    if (now >= call.deadline) {
      call.ended = true;
      out.answers.push_back(
          {call.token,
           std::make_exception_ptr(TimeoutError(
               fmt::format("barrier {}: not done within {}: {}", number,
                           InSeconds(call.deadline - call.called), BarrierFacts(now, number)))),
           {}});
      continue;
    }
    const AskTimes times(call.called, call.deadline);
    if (times.IsDue(now, call.asked_why)) {
      ask = true;
      ++call.asked_why;
    }
    WakeAt(times.Next(call.asked_why));
  }
  if (ask) AskScheduler(out);
}

void WorkerMachine::OnFactsOfBarriers(Time now, const Message& message, Outputs& out) {
  TextBody body;
  // Of another barrier: news of the end of one are lost, or have overtaken this.
  if (message.sequence != barriers_done_ || !Decode(message.meta, &body)) return;
  barrier_facts_ = std::move(body.text);
  for (std::uint64_t i = 0; i < barriers_.size(); ++i) {
    if (!std::exchange(barriers_[i].warns, false) || barriers_[i].ended) continue;
    const std::uint64_t number = barriers_done_ + i;
    out.log.emplace_back(LogLevel::kWarning, fmt::format("barrier {} has waited {}: {}", number,
                                                         InSeconds(now - barriers_[i].called),
                                                         BarrierFacts(now, number)));
  }
}

void WorkerMachine::OnLost(Time /*now*/, NodeId peer, const std::string& address,
                           const std::string& why, Outputs& out) {
  if (failure_ || left_) return;
  FailureBody failure{.node = peer, .address = address, .why = why};
  if (peer.role != Role::kScheduler) {
    out.Send(kTheScheduler, {.kind = Kind::kPeerDown,
                             .rank = rank_,
                             .incarnation = options_.incarnation,
                             .meta = Encode(failure)});
  }
  Fail(std::move(failure), out);
}

void WorkerMachine::OnJobFailed(const Message& message, Outputs& out) {
  FailureBody body;
  if (!Decode(message.meta, &body)) body.why = "the reason cannot be read";
  Fail(std::move(body), out);
}

// W5.
void WorkerMachine::Fail(FailureBody failure, Outputs& out) {
  failure_ = std::move(failure);
  ForEachPart(*this, [&](Part& part) {
    for (std::size_t i = 0; i < part.open.size(); ++i) {
      Open& open = part.open[i];
      out.GiveBack(open.request.payload);
      if (!IsOwn(open.request.kind)) {
        End(open, FailureError(open.request.what.text()), {}, out);
      }
    }
    part.open.clear();
    part.sent = 0;
  });
  for (const BarrierCall& call : barriers_) {
    if (!call.ended) out.answers.push_back({call.token, FailureError("barrier"), {}});
  }
  barriers_.clear();
  if (leave_token_ && !left_) out.answers.push_back({*leave_token_, FailureError("leave"), {}});
  next_time_.reset();
}

std::exception_ptr WorkerMachine::FailureError(const std::string& what) const {
  return ToException({.code = ErrorBody::Code::kNetwork,
                      .message = fmt::format("{}: lost {} ({}): {}", what, ToString(failure_->node),
                                             failure_->address, failure_->why)});
}

std::string WorkerMachine::NameOf(NodeId node) const {
  const auto entry = std::find_if(nodes_.begin(), nodes_.end(),
                                  [&](const NodeEntry& other) { return other.node == node; });
  if (entry == nodes_.end()) return ToString(node);
  return fmt::format("{} ({})", ToString(node), entry->address);
}

std::vector<const WorkerMachine::Part*> WorkerMachine::WaitingParts() const {
  std::vector<const Part*> waiting;
  ForEachPart(*this, [&](const Part& part) {
    if (!part.open.empty()) waiting.push_back(&part);
  });
  std::ranges::sort(waiting, {}, [](const Part* part) { return part->open.front().submitted; });
  return waiting;
}

std::string WorkerMachine::DescribeState(Time now) const {
  std::string text = fmt::format("worker {}, incarnation {:x}", rank_, options_.incarnation);
  if (failure_) {
    text += fmt::format("\n  failed: lost {} ({}): {}", ToString(failure_->node), failure_->address,
                        failure_->why);
  }
  const std::vector<const Part*> waiting = WaitingParts();
  std::size_t open = 0;
  for (const Part* part : waiting) open += part->open.size();
  text += fmt::format("\n  {} open requests of {} parts, {} open barriers ({} done)", open,
                      waiting.size(), std::ranges::count(barriers_, false, &BarrierCall::ended),
                      barriers_done_);
  for (std::uint64_t i = 0; i < std::min<std::size_t>(barriers_.size(), kShownMax); ++i) {
    if (barriers_[i].ended) continue;
    const std::uint64_t number = barriers_done_ + i;
    text += fmt::format("\n  barrier {}: since {}: {}", number,
                        InSeconds(now - barriers_[i].called), BarrierFacts(now, number));
  }
  for (const Part* part : waiting) {
    if (part == waiting[std::min(kShownMax, waiting.size() - 1)] && waiting.size() > kShownMax) {
      text += fmt::format("\n  and {} more", waiting.size() - kShownMax);
      break;
    }
    const Open& first = part->open.front();
    text += fmt::format(
        "\n  {} (part {}): since {}, {} of {} requests sent to {}, {} pushes, {} rounds known "
        "complete{}{}{}",
        first.request.what.text(), part->id.part, InSeconds(now - first.submitted), part->sent,
        part->open.size(), ToString(TheServer(part->server)), part->pushes, part->complete,
        first.request.awaits_value ? "; its values are being copied from the GPU" : "",
        part->facts.empty() ? "" : ": ", part->facts);
  }
  return text;
}

}  // namespace heddle::kvstore::dist
