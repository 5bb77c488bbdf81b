#include "kvstore/dist/protocol/scheduler.h"

#include <heddle/logging.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "kvstore/dist/protocol/wire.h"
#include "kvstore/dist/protocol/words.h"

namespace heddle::kvstore::dist {
namespace {

// A worker that is so many barriers ahead of one that is not done does not follow the protocol.
constexpr std::uint64_t kBarriersAheadMax = 1 << 16;

// "127.0.0.1:9091", or what stands for it.
std::string At(const std::string& address) { return address.empty() ? "?" : address; }

}  // namespace

SchedulerMachine::SchedulerMachine(Time now, SchedulerOptions options)
    : options_(std::move(options)),
      started_(now),
      ticked_(now),
      tick_at_(now + options_.heartbeat_every / 2),
      warn_at_(now + options_.warn_after) {}

// Who is who.

SchedulerMachine::Node* SchedulerMachine::Find(NodeId peer) {
  const auto found = by_peer_.find(peer);
  return found == by_peer_.end() ? nullptr : &nodes_[found->second];
}

std::optional<std::size_t> SchedulerMachine::IndexOf(NodeId id) const {
  const auto found =
      std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.id == id; });
  if (id.rank < 0 || found == nodes_.end()) return std::nullopt;
  return found - nodes_.begin();
}

std::int32_t SchedulerMachine::NumWanted(Role role) const {
  return role == Role::kWorker ? options_.num_workers : options_.num_servers;
}

std::int32_t SchedulerMachine::NumJoined(Role role) const {
  return static_cast<std::int32_t>(std::count_if(
      nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.id.role == role; }));
}

void SchedulerMachine::OnConnected(NodeId peer, const std::string& address) {
  connected_[peer] = {.address = address};
}

void SchedulerMachine::OnMessage(Time now, NodeId from, const Message& message, Outputs& out) {
  if (message.kind == Kind::kJoin) {
    OnJoin(now, from, message, out);
    CheckDone(now);
    return;
  }
  if (message.kind == Kind::kStatus) return OnStatus(now, from, out);
  Node* const node = Find(from);
  if (node == nullptr) return;  // what a refused one had sent already
  if (message.incarnation != 0 && message.incarnation != node->incarnation) {
    return AnswerStale(*node, message, out);
  }
  node->heard = now;
  switch (message.kind) {
    case Kind::kHeartbeat:
      NoteState(now, *node, message);
      if (failure_) {
        out.Send(node->peer, {.kind = Kind::kJobFailed, .meta = Encode(*failure_)});
      } else if (phase_ == Phase::kShuttingDown && node->id.role == Role::kServer) {
        out.Send(node->peer, {.kind = Kind::kShutdown});
      }
      out.Send(node->peer, {.kind = Kind::kHeartbeat, .sequence = message.sequence});
      break;
    case Kind::kBarrier:
      if (node->id.role == Role::kWorker) OnBarrier(now, *node, message, out);
      break;
    case Kind::kLeaveJob:
      if (node->id.role == Role::kWorker) OnLeaveJob(now, *node, out);
      break;
    case Kind::kPeerDown:
      OnPeerDown(now, *node, message, out);
      break;
    case Kind::kShutdownDone:
      if (phase_ == Phase::kShuttingDown && node->id.role == Role::kServer) ServerEnded(*node);
      break;
    default:
      out.log.emplace_back(LogLevel::kWarning,
                           fmt::format("{} sent a {}, which is not for a scheduler",
                                       NameOf(*node, now), Name(message.kind)));
  }
  CheckDone(now);
}

// From an earlier process of that rank. The present one, which may get the answer, ignores it.
void SchedulerMachine::AnswerStale(const Node& node, const Message& message, Outputs& out) {
  const std::string why =
      fmt::format("{} is incarnation {:016x} in this job; a {} came from {:016x}",
                  ToString(node.id), node.incarnation, Name(message.kind), message.incarnation);
  out.log.emplace_back(LogLevel::kWarning, why);
  out.Send(node.peer, {.kind = Kind::kError,
                       .incarnation = message.incarnation,
                       .meta = Encode(ErrorBody{ErrorBody::Code::kInvalidState, why})});
}

// Gathering.

void SchedulerMachine::OnJoin(Time now, NodeId from, const Message& message, Outputs& out) {
  JoinBody join;
  if (!Decode(message.meta, &join)) return Refuse(from, "its join cannot be read", out);
  if (const Node* known = Find(from)) {
    if (join.incarnation != known->incarnation) {
      return Refuse(from, "it has joined already, as another process", out);
    }
    if (phase_ == Phase::kGathering || failure_) return;
    RosterBody roster = RosterFor(known->id.role);
    return SendRoster(*known, &roster, out);  // it was lost
  }
  const auto connected = connected_.find(from);
  std::string address = join.address;
  if (address.empty() && connected != connected_.end()) address = connected->second.address;
  if (const std::string why = WhyNotJoin(join, address); !why.empty()) {
    if (failure_) ++told_late_;
    return Refuse(from, why, out);
  }
  if (connected != connected_.end()) connected_.erase(connected);
  by_peer_[from] = nodes_.size();
  nodes_.push_back({.id = {join.role, join.rank},
                    .peer = from,
                    .incarnation = join.incarnation,
                    .address = std::move(address),
                    .heard = now});
  if (NumJoined(Role::kWorker) < options_.num_workers ||
      NumJoined(Role::kServer) < options_.num_servers) {
    return;
  }
  SettleRanks(out);
  phase_ = Phase::kRunning;
  workers_here_ = options_.num_workers;
  warn_at_ = now + options_.warn_after;
  for (const Role role : {Role::kServer, Role::kWorker}) {
    RosterBody roster = RosterFor(role);
    for (const Node& node : nodes_) {
      if (node.id.role == role) SendRoster(node, &roster, out);
    }
  }
  out.log.emplace_back(LogLevel::kInfo,
                       fmt::format("the job begins: {} workers and {} servers have joined",
                                   options_.num_workers, options_.num_servers));
}

std::string SchedulerMachine::WhyNotJoin(const JoinBody& join, const std::string& address) const {
  if (failure_) {
    return fmt::format("the job has failed: {} ({}): {}", ToString(failure_->node),
                       At(failure_->address), failure_->why);
  }
  if (join.role == Role::kScheduler) {
    return fmt::format("the job has a scheduler, {}; another one, {}, cannot join it",
                       At(options_.address), At(address));
  }
  if (join.rank < -1) return fmt::format("rank {}: expected one of at least 0", join.rank);
  const auto counts = [](std::int32_t workers, std::int32_t servers) {
    return fmt::format("{} workers and {} servers", workers, servers);
  };
  if ((join.num_workers != 0 && join.num_workers != options_.num_workers) ||
      (join.num_servers != 0 && join.num_servers != options_.num_servers)) {
    return fmt::format("the scheduler was told of {}, the {} at {} of {}",
                       counts(options_.num_workers, options_.num_servers), RoleName(join.role),
                       At(address), counts(join.num_workers, join.num_servers));
  }
  const std::int32_t wanted = NumWanted(join.role);
  if (join.rank >= wanted) {
    return fmt::format("{} at {}: expected a rank from 0 to {}",
                       ToString(NodeId{join.role, join.rank}), At(address), wanted - 1);
  }
  if (const auto other = IndexOf({join.role, join.rank})) {
    return fmt::format(
        "{} has joined already: from {}, incarnation {:016x}; a second one is at "
        "{}, incarnation {:016x}",
        ToString(nodes_[*other].id), At(nodes_[*other].address), nodes_[*other].incarnation,
        At(address), join.incarnation);
  }
  if (NumJoined(join.role) == wanted) {
    return fmt::format("all {} {}s have joined{}; one more is at {}", wanted, RoleName(join.role),
                       phase_ == Phase::kGathering ? "" : " and the job has begun", At(address));
  }
  return {};
}

void SchedulerMachine::Refuse(NodeId peer, const std::string& why, Outputs& out) {
  out.log.emplace_back(LogLevel::kWarning, "refused a process: " + why);
  out.Send(peer, {.kind = Kind::kRefused,
                  .meta = Encode(ErrorBody{ErrorBody::Code::kInvalidState, why})});
  out.disconnects.push_back(peer);
  connected_.erase(peer);
}

// S1: wanted ranks differ (WhyNotJoin), the others take what is free.
void SchedulerMachine::SettleRanks(Outputs& out) {
  for (const Role role : {Role::kServer, Role::kWorker}) {
    std::int32_t free = 0;
    for (Node& node : nodes_) {
      if (node.id.role != role || node.id.rank >= 0) continue;
      while (IndexOf({role, free})) ++free;
      node.id.rank = free;
    }
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    Node& node = nodes_[i];
    if (node.peer == node.id) continue;
    out.renames.emplace_back(node.peer, node.id);
    node.peer = node.id;
    by_peer_[node.id] = i;  // besides the old name
  }
}

RosterBody SchedulerMachine::RosterFor(Role role) const {
  RosterBody roster;
  roster.num_workers = options_.num_workers;
  roster.num_servers = options_.num_servers;
  roster.epoch = 1;
  roster.slice_bytes = options_.slice_bytes;
  roster.cut_bytes = options_.cut_bytes;
  for (const Node& node : nodes_) {
    if (role == Role::kWorker && node.id.role == Role::kWorker) continue;
    roster.nodes.push_back({node.id, node.incarnation, node.address});
  }
  std::ranges::sort(roster.nodes, {}, &NodeEntry::node);
  return roster;
}

void SchedulerMachine::SendRoster(const Node& node, RosterBody* roster, Outputs& out) {
  roster->rank = node.id.rank;
  out.Send(node.peer, {.kind = Kind::kRoster, .meta = Encode(*roster)});
}

// Barriers and the end.

void SchedulerMachine::OnBarrier(Time now, Node& worker, const Message& message, Outputs& out) {
  if (phase_ != Phase::kRunning || worker.presence != Presence::kHere) return;
  const std::uint64_t number = message.sequence;
  const bool last = (message.flags & kFlagLast) != 0;
  if (number < barriers_done_ && !last) {  // it has not heard that it is done
    out.Send(worker.peer, {.kind = Kind::kBarrierDone, .sequence = number});
    return;
  }
  if (number > barriers_done_ && number - barriers_done_ >= kBarriersAheadMax) {
    return FailNode(
        now, worker,
        fmt::format("it came to barrier {} while barrier {} is not done", number, barriers_done_),
        out);
  }
  if (come_to_next_ == 0) next_barrier_since_ = now;
  Count(worker, -1);
  worker.last_barrier = worker.last_barrier || last;
  worker.barriers = std::max(worker.barriers, last ? number : number + 1);
  Count(worker, 1);
  FinishBarriers(now, out);
}

void SchedulerMachine::Count(const Node& worker, std::int32_t workers) {
  if (worker.barriers > barriers_done_) {
    come_to_next_ += workers;
  } else if (worker.last_barrier) {
    excused_ += workers;
  }
}

// S2: these count identities, of those that are here.
void SchedulerMachine::FinishBarriers(Time now, Outputs& out) {
  while (come_to_next_ > 0 && come_to_next_ + excused_ == workers_here_) {
    const std::uint64_t number = barriers_done_++;
    come_to_next_ = excused_ = 0;
    next_barrier_since_ = now;
    for (const Node& node : nodes_) {
      if (node.id.role != Role::kWorker || node.presence != Presence::kHere) continue;
      out.Send(node.peer, {.kind = Kind::kBarrierDone, .sequence = number});
      Count(node, 1);
    }
  }
}

void SchedulerMachine::OnLeaveJob(Time now, Node& worker, Outputs& out) {
  if (failure_ || phase_ == Phase::kGathering) return;
  out.Send(worker.peer, {.kind = Kind::kDone});
  if (worker.presence != Presence::kHere) return;
  worker.presence = Presence::kLeft;
  Count(worker, -1);
  --workers_here_;
  std::erase_if(suspicions_,
                [&](const Suspicion& suspicion) { return &nodes_[suspicion.node] == &worker; });
  FinishBarriers(now, out);
  if (workers_here_ > 0) return;
  for (const Node& node : nodes_) {
    if (node.end) return FailNode(now, node, node.end->why, out);
  }
  phase_ = Phase::kShuttingDown;  // S4
  suspicions_.clear();            // whoever held them has ended well
  for (Node& node : nodes_) {
    if (node.id.role != Role::kServer || node.presence != Presence::kHere) continue;
    node.heard = now;  // it may have its last seconds in full
    out.Send(node.peer, {.kind = Kind::kShutdown});
  }
}

void SchedulerMachine::ServerEnded(Node& server) { server.presence = Presence::kGone; }

// Failures.

void SchedulerMachine::OnPeerDown(Time now, const Node& from, const Message& message,
                                  Outputs& out) {
  FailureBody report;
  if (!Decode(message.meta, &report)) {
    return FailNode(now, from, "its report of a lost peer cannot be read", out);
  }
  if (failure_) return;
  // Also of one that has left in order, and then ended badly.
  if (report.node.role == from.id.role &&
      (report.node.rank == from.id.rank || report.node.rank < 0)) {
    if (phase_ == Phase::kShuttingDown || from.presence == Presence::kGone) return;
    if (HasReported(from)) return;
    // The others shall see its end, and a launcher its status, before they end because of it.
    Node& ending = nodes_[static_cast<std::size_t>(&from - nodes_.data())];
    if (ending.end) return;
    ending.end = End{report.why, now + options_.confirm_after};
    tick_at_ = std::min(tick_at_, ending.end->due);
    return;
  }
  if (from.presence != Presence::kHere) return;
  const auto index = IndexOf(report.node);
  if (!index || nodes_[*index].presence != Presence::kHere) return;
  if (phase_ == Phase::kShuttingDown) return;  // servers end
  const auto by = static_cast<std::size_t>(&from - nodes_.data());
  const auto known = std::find_if(suspicions_.begin(), suspicions_.end(),
                                  [&](const Suspicion& s) { return s.node == *index; });
  if (known != suspicions_.end()) {
    if (std::find(known->by.begin(), known->by.end(), by) == known->by.end()) {
      known->by.push_back(by);
    }
    return;
  }
  suspicions_.push_back({*index, {by}, report.why, now + options_.confirm_after});
  tick_at_ = std::min(tick_at_, suspicions_.back().due);
}

// Who has said that it lost another one ends because of that: its report is the cause, which shows
// in what happens to the other one soon, or is taken for true.
bool SchedulerMachine::HasReported(const Node& node) const {
  const auto by = static_cast<std::size_t>(&node - nodes_.data());
  return std::any_of(suspicions_.begin(), suspicions_.end(), [&](const Suspicion& suspicion) {
    return std::find(suspicion.by.begin(), suspicion.by.end(), by) != suspicion.by.end();
  });
}

void SchedulerMachine::CheckSuspicions(Time now, Outputs& out) {
  for (const Node& node : nodes_) {
    if (node.end && now >= node.end->due) return FailNode(now, node, node.end->why, out);
  }
  for (const Suspicion& suspicion : suspicions_) {
    if (now < suspicion.due) continue;
    const Node& node = nodes_[suspicion.node];
    if (node.end) return FailNode(now, node, node.end->why, out);
    return FailNode(
        now, node,
        fmt::format("{} has lost it: {}", NameOf(nodes_[suspicion.by.front()], now), suspicion.why),
        out);
  }
}

void SchedulerMachine::OnLost(Time now, NodeId peer, const std::string& address,
                              const std::string& why, Outputs& out) {
  Node* const node = Find(peer);
  if (const auto stranger = connected_.find(peer); stranger != connected_.end()) {
    if (node == nullptr && !stranger->second.has_asked) {
      out.log.emplace_back(
          LogLevel::kWarning,
          fmt::format("lost a connection from {}, which had not joined: {}", At(address), why));
    }
    connected_.erase(stranger);
  }
  if (node == nullptr || node->presence == Presence::kGone) return CheckDone(now);
  if (node->address.empty()) node->address = address;
  const bool expected = node->presence == Presence::kLeft || failure_ ||
                        (phase_ == Phase::kShuttingDown && node->id.role == Role::kServer);
  node->presence = Presence::kGone;
  if (node->end) {
    FailNode(now, *node, node->end->why, out);
    return CheckDone(now);
  }
  if (!expected && !HasReported(*node))
    FailNode(now, *node, "its connection was lost: " + why, out);
  CheckDone(now);
}

void SchedulerMachine::CheckSilence(Time now, Outputs& out) {
  for (Node& node : nodes_) {
    if (node.presence != Presence::kHere || now - node.heard < options_.dead_after) continue;
    const std::string silent = "silent for " + InSeconds(now - node.heard);
    if (phase_ == Phase::kShuttingDown) {
      out.log.emplace_back(LogLevel::kWarning,
                           fmt::format("{} at {} was told to end and is {}", ToString(node.id),
                                       At(node.address), silent));
      ServerEnded(node);
      continue;
    }
    return FailNode(now, node, silent, out);
  }
}

void SchedulerMachine::FailNode(Time now, const Node& node, const std::string& why, Outputs& out) {
  Fail(now, node.id, node.address, why, out);
}

// S3.
void SchedulerMachine::Fail(Time now, const NodeId& node, const std::string& address,
                            const std::string& why, Outputs& out) {
  if (failure_ || phase_ == Phase::kEnded) return;
  failure_ = FailureBody{.node = node, .address = address, .why = why};
  phase_ = Phase::kFailed;
  ended_at_ = now;
  suspicions_.clear();
  out.log.emplace_back(LogLevel::kError, fmt::format("the job has failed: {} at {}: {}",
                                                     ToString(node), At(address), why));
  const std::string meta = Encode(*failure_);
  for (const Node& other : nodes_) {
    if (other.presence != Presence::kHere) continue;
    out.Send(other.peer, {.kind = Kind::kJobFailed, .meta = meta});
  }
}

void SchedulerMachine::Abort(Time now, const std::string& why, Outputs& out) {
  Fail(now, kTheScheduler, options_.address, why, out);
  CheckDone(now);
}

void SchedulerMachine::CheckDone(Time now) {
  if (phase_ != Phase::kShuttingDown && phase_ != Phase::kFailed) return;
  const bool all_gone = std::none_of(nodes_.begin(), nodes_.end(), [](const Node& node) {
    return node.presence == Presence::kHere;
  });
  if (phase_ == Phase::kShuttingDown && all_gone) {
    phase_ = Phase::kEnded;
    done_ = true;
  }
  const bool all_told = all_gone && connected_.empty() && !AwaitsLate(now);
  if (failure_ && (all_told || now - ended_at_ >= options_.linger)) done_ = true;
}

// Who has not joined yet shall hear why it cannot, and not find nobody: until all must have joined.
// But whoever ends the scheduler itself awaits nobody any more.
bool SchedulerMachine::AwaitsLate(Time now) const {
  const std::size_t wanted = static_cast<std::size_t>(options_.num_workers) +
                             static_cast<std::size_t>(options_.num_servers);
  return nodes_.size() + told_late_ < wanted && !StartIsOver(now) &&
         (!failure_ || failure_->node.role != Role::kScheduler);
}

// Time.

std::optional<Time> SchedulerMachine::next_time() const {
  if (done_) return std::nullopt;
  return tick_at_;
}

void SchedulerMachine::OnTime(Time now, Outputs& out) {
  const Time late = now - ticked_ - options_.heartbeat_every;
  ticked_ = now;
  tick_at_ = now + options_.heartbeat_every / 2;
  if (late > options_.heartbeat_every) {
    // This process stood still; what the nodes have said since lies unread.
    for (Node& node : nodes_) node.heard = now;
    for (Suspicion& suspicion : suspicions_) suspicion.due = now + options_.confirm_after;
  }
  if (!failure_) {
    CheckSilence(now, out);
    CheckSuspicions(now, out);
    if (phase_ == Phase::kGathering && StartIsOver(now)) {
      Fail(now, kTheScheduler, options_.address,
           fmt::format("the job did not begin within {}: {}", InSeconds(options_.start_timeout),
                       Missing()),
           out);
    }
    Warn(now, out);
  }
  for (const Suspicion& suspicion : suspicions_) tick_at_ = std::min(tick_at_, suspicion.due);
  for (const Node& node : nodes_) {
    if (failure_) break;
    if (node.end) tick_at_ = std::min(tick_at_, node.end->due);
    // Heartbeats may be far apart: not up to half of one later.
    if (node.presence == Presence::kHere) {
      tick_at_ = std::min(tick_at_, node.heard + options_.dead_after);
    }
  }
  if (phase_ == Phase::kGathering && options_.start_timeout > Time{0}) {
    tick_at_ = std::min(tick_at_, started_ + options_.start_timeout);
  }
  CheckDone(now);
}

void SchedulerMachine::Warn(Time now, Outputs& out) {
  const bool barrier = phase_ == Phase::kRunning && come_to_next_ > 0;
  // What has waited for less than warn_after is not named yet.
  if (barrier) warn_at_ = std::max(warn_at_, next_barrier_since_ + options_.warn_after);
  if (now < warn_at_) return;
  warn_at_ = now + options_.warn_after;
  const std::string waits = WhatWaits(now);
  if (!waits.empty()) out.log.emplace_back(LogLevel::kWarning, waits);
}

// Words.

std::string SchedulerMachine::NameOf(const Node& node, Time now) const {
  const std::string heard = InSeconds(now - node.heard);
  return fmt::format("{} ({}, last heard {} ago)", ToString(node.id), At(node.address), heard);
}

std::string SchedulerMachine::Missing() const {
  std::vector<std::string> missing;
  for (const Role role : {Role::kServer, Role::kWorker}) {
    std::vector<std::int32_t> ranks;  // that nobody has asked for
    for (std::int32_t rank = 0; rank < NumWanted(role); ++rank) {
      if (!IndexOf({role, rank})) ranks.push_back(rank);
    }
    // Those that joined without a rank will take some of these.
    const std::int32_t count = NumWanted(role) - NumJoined(role);
    if (count == 0) continue;
    const std::string who = fmt::format("{} of {} {}s", count, NumWanted(role), RoleName(role));
    if (count == std::ssize(ranks)) {
      missing.push_back(fmt::format("{} ({})", who, Ranks(ranks)));
    } else {
      missing.push_back(who);
    }
  }
  std::vector<std::string> joined;
  for (const Node& node : nodes_) {
    joined.push_back(fmt::format("{} ({})", ToString(node.id), At(node.address)));
  }
  return fmt::format("missing: {}; joined: {}", JoinWords(missing),
                     joined.empty() ? "nobody" : JoinWords(joined));
}

std::string SchedulerMachine::Workers(Time now, bool come) const {
  std::vector<std::string> names;
  for (const Node& node : nodes_) {
    if (node.id.role != Role::kWorker || node.presence != Presence::kHere) continue;
    if ((node.barriers > barriers_done_) != come || (!come && node.last_barrier)) continue;
    names.push_back(come ? ToString(node.id) : NameOf(node, now));
  }
  return JoinWords(names);
}

std::string SchedulerMachine::WhoHasCome(Time now) const {
  return fmt::format("come: {}; missing: {}", Workers(now, true), Workers(now, false));
}

std::string SchedulerMachine::WhatWaits(Time now) const {
  switch (phase_) {
    case Phase::kGathering:
      return fmt::format("the job has not begun for {}: {}", InSeconds(now - started_), Missing());
    case Phase::kRunning:
      if (come_to_next_ == 0) return {};
      return fmt::format("barrier {} has waited {}: {}", barriers_done_,
                         InSeconds(now - next_barrier_since_), WhoHasCome(now));
    case Phase::kShuttingDown: {
      std::vector<std::string> names;
      for (const Node& node : nodes_) {
        if (node.presence == Presence::kHere) names.push_back(NameOf(node, now));
      }
      return "all workers have left; still to end: " + JoinWords(names);
    }
    case Phase::kEnded:
      return {};
    case Phase::kFailed:
      return fmt::format("the job has failed: {} at {}: {}", ToString(failure_->node),
                         At(failure_->address), failure_->why);
  }
  return {};
}

// A node of the job asks because it waits, and shows the answer to people behind what it says of
// its barrier itself; anyone else may be a program.
void SchedulerMachine::OnStatus(Time now, NodeId from, Outputs& out) {
  if (const auto stranger = connected_.find(from); stranger != connected_.end()) {
    stranger->second.has_asked = true;
  }
  const bool joined = by_peer_.contains(from);
  const bool barrier = phase_ == Phase::kRunning && come_to_next_ > 0;
  const std::string waits = barrier ? WhoHasCome(now) : WhatWaits(now);
  out.Send(from, {.kind = Kind::kStatusReply,
                  .sequence = barriers_done_,
                  .meta = Encode(TextBody{!joined         ? Status(now)
                                          : waits.empty() ? "nothing waits at the scheduler"
                                                          : waits})});
}

void SchedulerMachine::NoteState(Time now, Node& node, const Message& message) {
  StateBody state;
  if (message.meta.empty() || !Decode(message.meta, &state)) return;
  node.state_before = std::exchange(node.state, std::move(state));
  node.state_before_at = std::exchange(node.state_at, now);
}

namespace {

// Of a status, which is one message: beside the workers, of which there may be very many, all else
// has room.
constexpr std::size_t kStatusWorkersBytesMax = kMetaBytesMax / 2;
constexpr std::size_t kStatusNodesBytesMax = std::size_t{kMetaBytesMax} / 8 * 7;

std::string TextOfStatus(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// How a count grew, a second.
double Rate(std::uint64_t from, std::uint64_t to, Time time) {
  if (to <= from || time <= Time{0}) return 0;
  return static_cast<double>(to - from) / std::chrono::duration<double>(time).count();
}

}  // namespace

std::string SchedulerMachine::Status(Time now) const {
  const auto seconds = [](Time time) { return std::chrono::duration<double>(time).count(); };
  constexpr const char* kPhases[] = {"gathering", "running", "shutting_down", "ended", "failed"};
  constexpr const char* kPresences[] = {"here", "left", "gone"};
  nlohmann::ordered_json status = {{"phase", kPhases[static_cast<int>(phase_)]},
                                   {"address", options_.address},
                                   {"seconds", seconds(now - started_)},
                                   {"num_workers", options_.num_workers},
                                   {"num_servers", options_.num_servers},
                                   {"barriers_done", barriers_done_},
                                   {"waits", WhatWaits(now)},
                                   {"nodes", nlohmann::ordered_json::array()}};
  std::size_t bytes = 0;
  std::int64_t left_out = 0;
  for (const Node& node : nodes_) {
    const bool is_worker = node.id.role == Role::kWorker;
    if (bytes > (is_worker ? kStatusWorkersBytesMax : kStatusNodesBytesMax)) {
      ++left_out;
      continue;
    }
    nlohmann::ordered_json entry = {{"role", RoleName(node.id.role)},
                                    {"rank", node.id.rank},
                                    {"address", node.address},
                                    {"incarnation", fmt::format("{:016x}", node.incarnation)},
                                    {"presence", kPresences[static_cast<int>(node.presence)]},
                                    {"last_heard_seconds_ago", seconds(now - node.heard)}};
    if (node.id.role == Role::kWorker) entry["barriers"] = node.barriers;
    if (node.state_at) {
      const StateBody &state = node.state, &before = node.state_before;
      const Time time = node.state_before_at ? *node.state_at - *node.state_before_at : Time{0};
      const bool server = node.id.role == Role::kServer;
      entry["requests"] = state.requests;
      entry["requests_per_second"] = Rate(before.requests, state.requests, time);
      entry["bytes"] = state.bytes;
      entry["bytes_per_second"] = Rate(before.bytes, state.bytes, time);
      entry[server ? "unfinished_bytes" : "open_requests"] = state.waiting;
      if (server) {
        entry["rounds"] = state.rounds;
        entry["rounds_per_second"] = Rate(before.rounds, state.rounds, time);
        entry["stalled_parts"] = state.stalled;
      }
      if (!state.stall.empty()) entry["stall"] = state.stall;
    }
    // Addresses are a stranger's words: bytes that are no UTF-8 are replaced.
    bytes += TextOfStatus(entry).size();
    status["nodes"].push_back(std::move(entry));
  }
  if (left_out > 0) status["nodes_left_out"] = left_out;
  if (failure_) {
    status["failure"] = {{"role", RoleName(failure_->node.role)},
                         {"rank", failure_->node.rank},
                         {"address", failure_->address},
                         {"why", failure_->why}};
  }
  return TextOfStatus(status);
}

std::string SchedulerMachine::DescribeState(Time now) const {
  std::string text = fmt::format("scheduler at {}, up for {}, {} barriers done\n",
                                 At(options_.address), InSeconds(now - started_), barriers_done_);
  const std::string waits = WhatWaits(now);
  if (!waits.empty()) text += "  " + waits + "\n";
  for (const Node& node : nodes_) {
    constexpr const char* kPresences[] = {"", ", has left", ", is gone"};
    text += fmt::format("  {}{}\n", NameOf(node, now), kPresences[static_cast<int>(node.presence)]);
  }
  return text;
}

}  // namespace heddle::kvstore::dist
