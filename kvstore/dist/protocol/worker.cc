#include "kvstore/dist/protocol/worker.h"

#include <heddle/error.h>

#include <algorithm>
#include <span>
#include <string_view>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {

namespace {

constexpr std::size_t kPartsInCloseStore = 32768;  // in one message
static_assert(kPartsInCloseStore * 24 < kMetaBytesMax);
constexpr std::size_t kPushesInLeave = 32768;
static_assert(kPushesInLeave * 24 < kMetaBytesMax);

}  // namespace

void WorkerMachine::OnRoster(Time /*now*/, const RosterBody& roster, Outputs& /*out*/) {
  rank_ = roster.rank;
  nodes_ = roster.nodes;
  servers_ = std::vector<Server>(static_cast<std::size_t>(roster.num_servers));
}

void SetValue(PushValue&& value, Request* request) {
  request->awaits_value = false;
  if (!value.failure) {
    request->payload = std::move(value.payload);
    return;
  }
  request->flags = static_cast<std::uint8_t>((request->flags & ~kFlagRates) | kFlagFailed);
  request->meta = Encode(*value.failure);
}

// Sending.

void WorkerMachine::Submit(Time now, Request&& request, Outputs& out) {
  CHECK(rank_ >= 0, "a request before the roster");
  CHECK(request.server >= 0 && request.server < std::ssize(servers_));
  if (failure_) {
    out.GiveBack(request.payload);
    out.answers.push_back({request.token, FailureError(request.what.text()), {}});
    return;
  }
  if (leave_token_) {
    const std::string why =
        fmt::format("{}: worker {} has left the job", request.what.text(), rank_);
    out.GiveBack(request.payload);
    out.answers.push_back({request.token, std::make_exception_ptr(InvalidState(why)), {}});
    return;
  }
  if (request.meta.size() > kMetaBytesMax) {
    const std::string why = fmt::format("{}: {} bytes beside the arrays: expected at most {}",
                                        request.what.text(), request.meta.size(), kMetaBytesMax);
    out.GiveBack(request.payload);
    out.answers.push_back({request.token, std::make_exception_ptr(InvalidArgument(why)), {}});
    return;
  }
  if (request.kind == Kind::kOpenStore) {
    OpenStoreBody body;
    CHECK(Decode(request.meta, &body));
    async_[request.part.store] = body.type.find("async") != std::string::npos;
  }
  ++state_.requests;
  state_.bytes += request.payload.bytes();
  Enqueue(now, std::move(request), out);
}

void WorkerMachine::Supply(Time now, std::int32_t server, const PartId& id, std::uint64_t token,
                           PushValue&& value, Outputs& out) {
  Part* const part = FindPart(server, id);
  if (part == nullptr) return;
  for (std::size_t i = part->sent; i < part->open.size(); ++i) {
    Open& open = part->open[i];
    if (open.request.token != token || !open.request.awaits_value) continue;
    SetValue(std::move(value), &open.request);
    open.bytes = open.request.payload.bytes();
    state_.bytes += open.bytes;
    Pump(now, *part, out);
    return;
  }
}

StateBody WorkerMachine::State() const {
  StateBody state = state_;
  state.waiting = state.requests - ended_;
  return state;
}

WorkerMachine::Part& WorkerMachine::MadePart(const PartId& id) {
  std::unique_ptr<Part>& part = parts_[id];
  if (part == nullptr) part = std::make_unique<Part>();
  return *part;
}

WorkerMachine::Part& WorkerMachine::PartOf(std::int32_t server, const PartId& id) {
  Part& part = id.part == kControlPart
                   ? servers_[static_cast<std::size_t>(server)].control[id.store]
                   : MadePart(id);
  if (part.next == 0 && part.open.empty()) {
    part.id = id;
    part.server = server;
    const auto mode = async_.find(id.store);
    part.async = mode != async_.end() && mode->second;
  }
  CHECK(part.server == server, "a part on two servers");
  return part;
}

void WorkerMachine::Enqueue(Time now, Request&& request, Outputs& out) {
  Part& part = PartOf(request.server, request.part);
  // What is urgent must not wait behind what is not.
  for (std::size_t i = part.open.size(); i > 0; --i) {
    Open& before = part.open[i - 1];
    if (before.request.priority >= request.priority) break;
    before.request.priority = request.priority;
    if (i > part.sent || before.answered || before.request.payload.empty()) continue;
    out.raised.push_back({.to = TheServer(part.server),
                          .part = part.id,
                          .sequence = before.sequence,
                          .token = before.request.token,
                          .priority = request.priority});
  }
  if (part.to_come > 0) --part.to_come;
  Open& open = part.open.emplace_back();
  open.request = std::move(request);
  open.submitted = now;
  open.warn_at = now + options_.warn_after;
  WakeAt(open.warn_at);
  if (const Time deadline = open.request.deadline; deadline != Time{0}) {
    part.timed = true;
    WakeAt(now + (deadline - now) / 2);
  }
  if (IsPush(open.request.kind)) {
    open.bytes = open.request.payload.bytes();
    open.barriers = barriers_open_;
    ++unacknowledged_.back();
  }
  Pump(now, part, out);
}

void WorkerMachine::Pump(Time now, Part& part, Outputs& out) {
  while (part.sent < part.open.size()) {
    Open& open = part.open[part.sent];
    if (!MaySend(now, part, open, out)) return;
    Number(now, part, open);
    SendRequest(part, open, out);
  }
}

// W2 and W6.
bool WorkerMachine::MaySend(Time now, Part& part, Open& open, Outputs& out) {
  if (part.sent >= (part.id.part == kControlPart ? 1 : kRequestsAheadMax)) return false;
  if (open.request.awaits_value) return false;
  if (!IsPush(open.request.kind)) return true;
  if (part.pushes - part.complete >= kPushesAheadMax) {
    // Where messages are lost, one that would have told of complete rounds may be among them.
    if (options_.resend_after > Time{0} && !part.asked) {
      part.asked = now;
      WakeAt(now + options_.resend_after);
    }
    return false;
  }
  return MaySendBytes(now, part, open, out);
}

// W3.
bool WorkerMachine::MaySendBytes(Time now, Part& part, Open& open, Outputs& out) {
  Server& server = servers_[static_cast<std::size_t>(part.server)];
  if (open.granted || open.bytes == 0 || server.unfinished_bytes == 0 ||
      server.unfinished_bytes + open.bytes <= options_.unfinished_bytes_max) {
    return true;
  }
  if (!part.waits_for_bytes) {
    part.waits_for_bytes = true;
    server.waiting.push_back(&part);
    // A server of dist_async ends pushes without waiting for anyone.
    if (!part.async) Ask(now, part, out);
  }
  return false;
}

void WorkerMachine::StopWaitingForBytes(Part& part) {
  if (!part.waits_for_bytes) return;
  part.waits_for_bytes = false;
  std::erase(servers_[static_cast<std::size_t>(part.server)].waiting, &part);
}

// Gives the request its place in the part's order.
void WorkerMachine::Number(Time now, Part& part, Open& open) {
  open.sequence = part.next++;
  open.sent = now;
  if (options_.resend_after > Time{0}) WakeAt(now + options_.resend_after);
  ++part.sent;
  part.asked.reset();
  StopWaitingForBytes(part);
  if (!IsPush(open.request.kind)) return;
  open.counted = true;
  if (!part.async) part.unfinished[part.pushes - part.complete] = open.bytes;
  ++part.pushes;
  servers_[static_cast<std::size_t>(part.server)].unfinished_bytes += open.bytes;
}

// To be granted the bytes that it waits for, or else only to hear of complete rounds.
void WorkerMachine::Ask(Time now, Part& part, Outputs& out) {
  part.asked = now;
  if (options_.resend_after > Time{0}) WakeAt(now + options_.resend_after);
  const std::uint64_t bytes = part.waits_for_bytes ? part.open[part.sent].bytes : 0;
  out.Send(TheServer(part.server), {.kind = Kind::kAsk,
                                    .rank = rank_,
                                    .incarnation = options_.incarnation,
                                    .part = part.id,
                                    .sequence = part.next,
                                    .meta = Encode(AskBody{.bytes = bytes})});
}

void WorkerMachine::SendRequest(const Part& part, const Open& open, Outputs& out) const {
  const Request& request = open.request;
  const std::uint64_t token = request.payload.empty() ? 0 : request.token;
  Message& message = out.Add(TheServer(part.server), token);
  out.messages.back().deadline = request.deadline;
  message.kind = request.kind;
  message.flags = request.flags;
  message.dtype = request.dtype;
  message.rank = rank_;
  message.priority = request.priority;
  message.incarnation = options_.incarnation;
  message.part = part.id;
  message.sequence = open.sequence;
  message.version = request.version;
  message.meta = request.meta;
  message.payload = request.payload;
  message.op = request.op;
}

// Bytes have come free: the parts that wait for them go on, the longest waiting first.
void WorkerMachine::PumpWaiting(Time now, Server& server, Outputs& out) {
  while (!server.waiting.empty()) {
    Part& part = *server.waiting.front();
    Open& open = part.open[part.sent];
    if (!open.granted && server.unfinished_bytes != 0 &&
        server.unfinished_bytes + open.bytes > options_.unfinished_bytes_max) {
      return;
    }
    StopWaitingForBytes(part);
    Pump(now, part, out);
  }
}

bool WorkerMachine::Barrier(Time now, std::uint64_t token, Time deadline, Outputs& out) {
  CHECK(rank_ >= 0, "a barrier before the roster");
  if (failure_) {
    out.answers.push_back({token, FailureError("barrier"), {}});
    return false;
  }
  if (leave_token_) {
    const std::string why = fmt::format("barrier: worker {} has left the job", rank_);
    out.answers.push_back({token, std::make_exception_ptr(InvalidState(why)), {}});
    return false;
  }
  barriers_.push_back(
      {.token = token, .called = now, .warn_at = now + options_.warn_after, .deadline = deadline});
  WakeAt(barriers_.back().warn_at);
  if (deadline != Time{0}) WakeAt(now + (deadline - now) / 2);
  return true;
}

void WorkerMachine::OpenBarrier(Time now, Outputs& out) {
  if (failure_) return;
  DCHECK(barriers_open_ < barriers_done_ + barriers_.size());
  ++barriers_open_;
  unacknowledged_.push_back(0);
  SendBarriers(now, out);
}

void WorkerMachine::SendBarriers(Time now, Outputs& out) {
  while (unacknowledged_.front() == 0 && barriers_sent_ < barriers_open_) {
    unacknowledged_.pop_front();
    if (options_.resend_after > Time{0}) WakeAt(now + options_.resend_after);
    SendBarrier(now, barriers_sent_++, out);
  }
}

void WorkerMachine::SendBarrier(Time now, std::uint64_t number, Outputs& out) {
  BarrierCall& call = barriers_[number - barriers_done_];
  call.sent = now;
  out.Send(kTheScheduler, {.kind = Kind::kBarrier,
                           .flags = call.last ? kFlagLast : std::uint8_t{0},
                           .rank = rank_,
                           .incarnation = options_.incarnation,
                           .sequence = number});
}

void WorkerMachine::CloseBarriers(Time now) {
  if (!failure_) barriers_.push_back({.called = now, .ended = true, .last = true});
}

void WorkerMachine::WillRequest(std::int32_t server, const PartId& id, std::uint64_t requests) {
  if (!failure_) PartOf(server, id).to_come += requests;
}

void WorkerMachine::WontRequest(std::int32_t server, const PartId& id) {
  Part& part = PartOf(server, id);
  if (part.to_come > 0) --part.to_come;
}

std::vector<CloseStoreBody> WorkerMachine::RequestsToCome(std::uint32_t store) const {
  std::vector<CloseStoreBody> bodies(servers_.size());
  for (const auto& [id, part] : parts_) {
    if (id.store != store) continue;
    // Servers take them in order.
    const Open* const last = part->open.empty() ? nullptr : &part->open[part->open.size() - 1];
    const bool all_taken = last == nullptr || last->acked || last->answered;
    if (all_taken && part->to_come == 0) continue;
    const std::uint64_t unsent = part->open.size() - part->sent;
    bodies[static_cast<std::size_t>(part->server)].parts.push_back(
        {id, part->next + unsent + part->to_come});
  }
  return bodies;
}

void WorkerMachine::CloseStore(Time now, std::uint32_t store, Outputs& out) {
  if (failure_) return;
  const auto [closed, first] = closed_.try_emplace(store);
  std::set<std::int32_t>& waiting = closed->second;
  const std::vector<CloseStoreBody> bodies = RequestsToCome(store);
  for (std::int32_t server = 0; server < std::ssize(servers_); ++server) {
    const CloseStoreBody& body = bodies[static_cast<std::size_t>(server)];
    const bool waited = waiting.erase(server) > 0;
    if (!body.parts.empty()) waiting.insert(server);
    if (first || waited) SendCloseStore(now, server, store, body, out);
  }
}

void WorkerMachine::StoreClosed(Time now, std::uint32_t store, Outputs& out) {
  if (!closed_.contains(store)) return;
  for (const auto& [id, part] : parts_) {
    if (id.store == store) part->to_come = 0;
  }
  CloseStore(now, store, out);
}

void WorkerMachine::SendCloseStore(Time now, std::int32_t server, std::uint32_t store,
                                   const CloseStoreBody& body, Outputs& out) {
  const std::span<const CloseStoreBody::Requests> all(body.parts);
  std::size_t begin = 0;
  do {
    const std::size_t count = std::min(kPartsInCloseStore, all.size() - begin);
    const auto some = all.subspan(begin, count);
    begin += count;
    const CloseStoreBody one{.more = begin < all.size(), .parts = {some.begin(), some.end()}};
    Request close{.kind = Kind::kCloseStore,
                  .server = server,
                  .part = ControlPart(store),
                  .meta = Encode(one),
                  .what = "close of a store"};
    Enqueue(now, std::move(close), out);
  } while (begin < all.size());
}

void WorkerMachine::Leave(Time now, std::uint64_t token, Outputs& out) {
  CHECK(rank_ >= 0 && !leave_token_, "leaves once, after the roster");
  leave_token_ = token;
  if (failure_) {
    out.answers.push_back({token, FailureError("leave"), {}});
    return;
  }
  WakeAt(now);  // pushes that have ended are watched from now on
  SendLeaves(now, out);
}

void WorkerMachine::SendLeaves(Time now, Outputs& out) {
  if (!leave_token_ || leaves_open_) return;
  if (std::any_of(unacknowledged_.begin(), unacknowledged_.end(),
                  [](std::uint64_t pushes) { return pushes != 0; })) {
    return;
  }
  std::vector<LeaveBody> bodies(servers_.size());
  if (late_pushes_ > 0) bodies = DropLatePushes(now, out);
  if (late_pushes_ > 0) return;  // these are on their way
  leaves_open_ = 0;
  for (std::int32_t server = 0; server < std::ssize(servers_); ++server) {
    SendLeave(now, server, bodies[static_cast<std::size_t>(server)], out);
  }
  if (servers_.empty()) OnLeft(out);
}

void WorkerMachine::SendLeave(Time now, std::int32_t server, const LeaveBody& body, Outputs& out) {
  const std::span<const LeaveBody::Push> all(body.missing);
  std::size_t begin = 0;
  do {
    const std::size_t count = std::min(kPushesInLeave, all.size() - begin);
    const auto some = all.subspan(begin, count);
    begin += count;
    const LeaveBody one{.more = begin < all.size(), .missing = {some.begin(), some.end()}};
    Request leave{.kind = Kind::kLeave,
                  .server = server,
                  .part = ControlPart(0),
                  .meta = all.empty() ? std::string() : Encode(one),
                  .what = "leave"};
    ++*leaves_open_;
    Enqueue(now, std::move(leave), out);
  } while (begin < all.size());
}

void WorkerMachine::OnLeft(Outputs& out) {
  left_ = true;
  out.Send(kTheScheduler,
           {.kind = Kind::kLeaveJob, .rank = rank_, .incarnation = options_.incarnation});
  out.answers.push_back({*leave_token_, nullptr, {}});
}

void WorkerMachine::OnReconnected(Time now, std::int32_t server, Outputs& out) {
  if (failure_) return;
  ForEachPart(*this, [&](Part& part) {
    if (part.server == server) Resend(now, part, /*all=*/true, out);
  });
}

// Sends again what is unanswered: all of it, or what was sent resend_after ago.
void WorkerMachine::Resend(Time now, Part& part, bool all, Outputs& out) {
  const auto due = [&](Time sent) {
    if (all || sent + options_.resend_after <= now) return true;
    WakeAt(sent + options_.resend_after);
    return false;
  };
  for (std::size_t i = 0; i < part.sent; ++i) {
    Open& open = part.open[i];
    if (open.answered || !due(open.sent)) continue;
    open.sent = now;
    SendRequest(part, open, out);
    if (options_.resend_after > Time{0}) WakeAt(now + options_.resend_after);
  }
  // Grants and news of complete rounds may be lost as well.
  if (part.async || part.id.part == kControlPart) return;
  if (!part.waits_for_bytes && part.pushes == part.complete) return;
  if (all || (part.asked && due(*part.asked))) Ask(now, part, out);
}

// Answers.

WorkerMachine::Part* WorkerMachine::FindPart(std::int32_t server, const PartId& id) {
  if (id.part == kControlPart) {
    auto& control = servers_[static_cast<std::size_t>(server)].control;
    const auto found = control.find(id.store);
    return found == control.end() ? nullptr : &found->second;
  }
  const auto found = parts_.find(id);
  if (found == parts_.end() || found->second->server != server) return nullptr;
  return found->second.get();
}

WorkerMachine::Open* WorkerMachine::FindOpen(Part& part, std::uint64_t sequence) {
  if (part.sent == 0) return nullptr;
  const std::uint64_t first = part.open.front().sequence;
  if (sequence < first || sequence - first >= part.sent) return nullptr;
  return &part.open[sequence - first];
}

const Request* WorkerMachine::Find(std::int32_t server, const PartId& id,
                                   std::uint64_t sequence) const {
  if (server < 0 || server >= std::ssize(servers_)) return nullptr;
  auto& self = const_cast<WorkerMachine&>(*this);  // NOLINT: the search changes nothing
  Part* part = self.FindPart(server, id);
  Open* open = part != nullptr ? FindOpen(*part, sequence) : nullptr;
  return open != nullptr && !open->ended ? &open->request : nullptr;
}

void WorkerMachine::OnMessage(Time now, NodeId from, Message&& message, Outputs& out) {
  if (failure_) return;
  if (from.role == Role::kScheduler) {
    OnSchedulerMessage(now, message, out);
  } else if (from.role == Role::kServer && from.rank >= 0 && from.rank < std::ssize(servers_)) {
    if (message.kind == Kind::kRefused) {  // the connection ends, which does not say why
      ErrorBody error;
      if (!Decode(message.meta, &error)) error.message = "for a reason that cannot be read";
      out.log.emplace_back(LogLevel::kError,
                           fmt::format("{} refuses this process: {}", NameOf(from), error.message));
      return;
    }
    // What was meant for an earlier process of this rank is none of ours.
    if (message.incarnation != options_.incarnation) return;
    OnServerMessage(now, from.rank, std::move(message), out);
  }
}

void WorkerMachine::OnServerMessage(Time now, std::int32_t server, Message&& message,
                                    Outputs& out) {
  servers_[static_cast<std::size_t>(server)].heard = now;
  if (message.kind == Kind::kAcks) {
    OnAcks(now, server, message, out);
    return;
  }
  if (message.kind == Kind::kJobFailed) {
    OnJobFailed(message, out);
    return;
  }
  Part* part = FindPart(server, message.part);
  if (part == nullptr) return;
  switch (message.kind) {
    case Kind::kValue:
    case Kind::kDone:
    case Kind::kError:
      OnAnswer(now, *part, std::move(message), out);
      break;
    case Kind::kCredit:
      LearnComplete(*part, message.version);
      Settle(now, *part, out);
      break;
    case Kind::kGrant:
      OnGrant(now, *part, message, out);
      break;
    case Kind::kStatusReply:
      OnFacts(now, *part, message, out);
      break;
    default:
      out.log.emplace_back(LogLevel::kWarning,
                           fmt::format("{} sent a message of kind {}, which no worker expects",
                                       NameOf(TheServer(server)), static_cast<int>(message.kind)));
  }
}

void WorkerMachine::OnAcks(Time now, std::int32_t server, const Message& message, Outputs& out) {
  AcksBody body;
  if (!Decode(message.meta, &body)) {
    out.log.emplace_back(
        LogLevel::kWarning,
        fmt::format("{} sent acknowledgements that cannot be read", NameOf(TheServer(server))));
    return;
  }
  for (const AcksBody::Ack& ack : body.acks) Expect(ack.part);
  for (const AcksBody::Ack& ack : body.acks) {
    Part* part = FindPart(server, ack.part);
    Open* open = part != nullptr ? FindOpen(*part, ack.sequence) : nullptr;
    if (open == nullptr || !IsPush(open->request.kind)) continue;
    Acknowledge(*part, *open, out);
    if (open->request.kind == Kind::kPush) {
      open->answered = true;
      if (Answer* answer = End(*open, out)) answer->message.kind = Kind::kAcks;
    }
    Settle(now, *part, out);
  }
}

void WorkerMachine::OnAnswer(Time now, Part& part, Message&& message, Outputs& out) {
  LearnComplete(part, message.version);
  Open* open = FindOpen(part, message.sequence);
  if (open == nullptr || open->answered) {
    Settle(now, part, out);
    return;
  }
  std::exception_ptr error;
  if (message.kind == Kind::kError) {
    ErrorBody body;
    if (!Decode(message.meta, &body)) body.message = "an error that cannot be read";
    if (body.code == ErrorBody::Code::kUnknownKey) Uncount(part, *open);
    const bool of_server = open->request.kind == Kind::kCommand;  // whose own it may be
    body.message =
        fmt::format("{}: {}{}", open->request.what.text(),
                    of_server ? ToString(TheServer(part.server)) + ": " : "", body.message);
    error = ToException(body);
  }
  if (IsPush(open->request.kind)) Acknowledge(part, *open, out);
  open->answered = true;
  const bool leave = open->request.kind == Kind::kLeave;
  if (IsOwn(open->request.kind)) {
    open->ended = true;
    if (error) {
      out.log.emplace_back(LogLevel::kError, ToErrorBody(error).message);
    }
  } else {
    End(*open, error, std::move(message), out);
  }
  Settle(now, part, out);
  if (leave && --*leaves_open_ == 0) OnLeft(out);
}

void WorkerMachine::OnGrant(Time now, Part& part, const Message& message, Outputs& out) {
  if (part.sent == part.open.size() || message.sequence != part.next) return;
  part.open[part.sent].granted = true;
  Pump(now, part, out);
}

void WorkerMachine::Acknowledge(Part& part, Open& open, Outputs& out) {
  if (open.acked) return;
  open.acked = true;
  out.GiveBack(open.request.payload);  // sent again, it would be answered without
  --(open.stays ? late_pushes_ : unacknowledged_[open.barriers - barriers_sent_]);
  if (part.async && open.counted) {
    open.counted = false;
    --part.pushes;
    servers_[static_cast<std::size_t>(part.server)].unfinished_bytes -= open.bytes;
  }
}

// The server has not counted this push, since there is no such part.
void WorkerMachine::Uncount(Part& part, Open& open) {
  if (part.async || !open.counted) return;
  open.counted = false;
  std::uint64_t after = 0;  // pushes after it
  for (std::size_t i = open.sequence - part.open.front().sequence + 1; i < part.sent; ++i) {
    after += part.open[i].counted ? 1 : 0;
  }
  const std::uint64_t known = part.pushes - part.complete;
  if (after >= known) return;
  for (std::uint64_t i = known - 1 - after; i + 1 < known; ++i) {
    part.unfinished[i] = part.unfinished[i + 1];
  }
  --part.pushes;
  servers_[static_cast<std::size_t>(part.server)].unfinished_bytes -= open.bytes;
}

void WorkerMachine::LearnComplete(Part& part, std::uint64_t complete) {
  if (part.async) return;
  complete = std::min(complete, part.pushes);
  Server& server = servers_[static_cast<std::size_t>(part.server)];
  for (; part.complete < complete; ++part.complete) {
    server.unfinished_bytes -= part.unfinished.front();
    std::shift_left(part.unfinished.begin(), part.unfinished.end(), 1);
  }
}

// After answers: forgets what is over, and sends what may go now.
void WorkerMachine::Settle(Time now, Part& part, Outputs& out) {
  while (!part.open.empty() && part.sent > 0 && part.open.front().answered) {
    out.GiveBack(part.open.front().request.payload);
    part.open.pop_front();
    --part.sent;
    part.facts.clear();  // they were about that one
  }
  Pump(now, part, out);
  PumpWaiting(now, servers_[static_cast<std::size_t>(part.server)], out);
  SendBarriers(now, out);
  SendLeaves(now, out);
}

Answer* WorkerMachine::End(Open& open, Outputs& out) {
  if (open.ended) return nullptr;
  open.ended = true;
  ++ended_;
  Answer& answer = out.answers.emplace_back();
  answer.token = open.request.token;
  return &answer;
}

void WorkerMachine::End(Open& open, std::exception_ptr error, Message&& message, Outputs& out) {
  Answer* const answer = End(open, out);
  if (answer == nullptr) return;
  if (!error) answer->message = std::move(message);
  answer->error = std::move(error);
}

void WorkerMachine::OnSchedulerMessage(Time now, const Message& message, Outputs& out) {
  switch (message.kind) {
    case Kind::kBarrierDone:
      OnBarrierDone(message.sequence, out);
      break;
    case Kind::kJobFailed:
      OnJobFailed(message, out);
      break;
    case Kind::kRoster: {
      RosterBody body;
      if (rank_ < 0 && Decode(message.meta, &body)) OnRoster(now, body, out);
      break;
    }
    case Kind::kStatusReply:
      OnFactsOfBarriers(now, message, out);
      break;
    default:  // heartbeats and the like are its node's
      break;
  }
}

void WorkerMachine::OnBarrierDone(std::uint64_t number, Outputs& out) {
  if (number >= barriers_sent_) return;
  // A later one cannot be done before an earlier one.
  for (; barriers_done_ <= number; ++barriers_done_) {
    const BarrierCall& call = barriers_.front();
    if (!call.ended) out.answers.push_back({call.token, nullptr, {.kind = Kind::kBarrierDone}});
    barriers_.pop_front();
    barrier_facts_.clear();  // they were about that one
  }
}

void WorkerMachine::WakeAt(Time time) {
  next_time_ = next_time_ ? std::min(*next_time_, time) : time;
}

}  // namespace heddle::kvstore::dist
