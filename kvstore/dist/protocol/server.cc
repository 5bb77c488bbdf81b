#include "kvstore/dist/protocol/server.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/protocol/server_state.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {

namespace {

constexpr std::size_t kBeforeRosterMax = 1 << 16;  // messages
constexpr std::size_t kAcksMax = 4096;             // in one message

constexpr bool IsPartRequest(Kind kind) { return kind >= Kind::kInit && kind <= Kind::kRemove; }

constexpr bool IsControlRequest(Kind kind) {
  return kind >= Kind::kOpenStore && kind <= Kind::kCloseStore;
}

std::string TextOf(const PartInfo& info) {
  return fmt::format("{} {}{}, part of {} over [{}, {})", Name(info.dtype), ToString(info.shape),
                     info.row_sparse ? " row-sparse" : "", info.num_parts, info.begin, info.end);
}

}  // namespace

ServerMachine::ServerMachine(ServerOptions options, PartStore& parts, ServerControl& control)
    : options_(options), values_(parts), control_(control) {}

ServerMachine::~ServerMachine() = default;

ServerMachine::Admission ServerMachine::Admit(const Message& message, Incarnation known,
                                              std::uint64_t next) const {
  if (message.incarnation != known) return Admission::kStale;
  if (message.sequence < next) return Admission::kRepeated;
  return message.sequence == next ? Admission::kTake : Admission::kEarly;
}

void ServerMachine::OnRoster(Time now, const RosterBody& roster, Outputs& out) {
  if (!workers_.empty()) return;
  workers_.resize(static_cast<std::size_t>(roster.num_workers));
  self_ = roster.rank;
  for (std::int32_t rank = 0; rank < roster.num_servers; ++rank) peers_[rank];
  for (const NodeEntry& entry : roster.nodes) {
    if (entry.node.role == Role::kServer) {
      if (const auto peer = peers_.find(entry.node.rank); peer != peers_.end()) {
        peer->second.incarnation = entry.incarnation;
      }
    }
    if (entry.node.role != Role::kWorker || entry.node.rank < 0 ||
        entry.node.rank >= roster.num_workers) {
      continue;
    }
    WorkerOf(entry.node.rank).incarnation = entry.incarnation;
    WorkerOf(entry.node.rank).address = entry.address;
  }
  next_check_ = now + options_.warn_after;
  for (auto& [from, message] : std::exchange(before_roster_, {})) {
    OnMessage(now, from, std::move(message), out);
  }
}

void ServerMachine::OnMessage(Time now, NodeId from, Message&& message, Outputs& out) {
  if (from.role != Role::kScheduler) {
    if (workers_.empty()) {
      if (before_roster_.size() < kBeforeRosterMax) {
        before_roster_.emplace_back(from, std::move(message));
      }
    } else if (from.role == Role::kWorker) {
      OnWorkerMessage(now, from, std::move(message), out);
    } else {
      OnBlockSums(now, from.rank, message, out);
    }
  } else if (message.kind == Kind::kRoster) {
    RosterBody roster;
    if (Decode(message.meta, &roster)) OnRoster(now, roster, out);
  } else if (message.kind == Kind::kJobFailed && !failure_) {
    failure_.emplace();
    if (!Decode(message.meta, &*failure_)) failure_->why = "the reason cannot be read";
  }
}

void ServerMachine::OnLost(Time /*now*/, NodeId peer, const std::string& address,
                           const std::string& why, Outputs& out) {
  if (failure_ || peer.role == Role::kScheduler) return;
  const bool is_worker =
      peer.role == Role::kWorker && peer.rank >= 0 && peer.rank < std::ssize(workers_);
  const bool is_server = peer.role == Role::kServer && peers_.contains(peer.rank);
  if (is_worker && WorkerOf(peer.rank).left) return;
  // Servers end when all workers have left, and not at the same time.
  const auto has_left = [](const Worker& worker) { return worker.left; };
  if (is_server && std::ranges::all_of(workers_, has_left)) return;
  const bool has_place = is_worker || is_server;
  out.log.emplace_back(LogLevel::kWarning,
                       fmt::format("lost {} ({}){}: {}", ToString(peer), address,
                                   has_place ? "" : ", which has no place in this job", why));
  if (!has_place) return;
  out.Send(kTheScheduler,
           {.kind = Kind::kPeerDown,
            .meta = Encode(FailureBody{.node = peer, .address = address, .why = why})});
}

ServerMachine::Part& ServerMachine::PartOf(const PartId& id) {
  auto& part = parts_[id];
  if (!part) part = std::make_unique<Part>(id, workers_.size());
  return *part;
}

// Requests.

void ServerMachine::OnWorkerMessage(Time now, NodeId from, Message&& message, Outputs& out) {
  const auto refuse = [&](ErrorBody::Code code, std::string why) {
    Message answer = AnswerTo(message, Kind::kError);
    answer.meta = Encode(ErrorBody{.code = code, .message = std::move(why)});
    out.Send(from, std::move(answer));
  };
  if (from.rank < 0 || from.rank >= std::ssize(workers_) || message.rank != from.rank) {
    refuse(ErrorBody::Code::kInvalidArgument,
           fmt::format("{} of {} workers sent a request as worker {}", ToString(from),
                       workers_.size(), message.rank));
    return;
  }
  if (failure_) {
    refuse(ErrorBody::Code::kNetwork,
           fmt::format("the job has failed: lost {} ({}): {}", ToString(failure_->node),
                       failure_->address, failure_->why));
    return;
  }
  Worker& worker = WorkerOf(from.rank);
  if (message.kind == Kind::kAsk || message.kind == Kind::kStatus) {
    if (message.incarnation != worker.incarnation) return;
    if (message.kind == Kind::kAsk) {
      worker.heard = now;
      OnAsk(message, out);
    } else {
      OnStatus(now, from, message, out);
    }
    return;
  }
  const bool control = message.part.part == kControlPart;
  if (control ? !IsControlRequest(message.kind) : !IsPartRequest(message.kind)) {
    refuse(ErrorBody::Code::kInvalidArgument,
           fmt::format("kind {} is not a request about {}", static_cast<int>(message.kind),
                       control ? "a server" : "a part"));
    return;
  }
  if (message.incarnation == worker.incarnation) worker.heard = now;
  ++state_.requests;
  state_.bytes += message.payload.bytes();
  OnRequest(now, std::move(message), out);
}

// S1.
void ServerMachine::OnRequest(Time now, Message&& message, Outputs& out) {
  const Worker& worker = WorkerOf(message.rank);
  Part& part = PartOf(message.part);
  const std::int32_t rank = message.rank;
  const std::uint64_t next = part.Of(rank).next;
  switch (Admit(message, worker.incarnation, next)) {
    case Admission::kStale: {
      Message answer = AnswerTo(message, Kind::kError);
      answer.meta = Encode(ErrorBody{
          .code = ErrorBody::Code::kInvalidState,
          .message = fmt::format("a request of incarnation {:x} of worker {}, which is incarnation "
                                 "{:x} in this job",
                                 message.incarnation, rank, worker.incarnation)});
      out.Send(TheWorker(rank), std::move(answer));
      break;
    }
    case Admission::kRepeated:
      Repeat(part, message, out);
      break;
    case Admission::kEarly:
      if (message.sequence - next < kRequestsAheadMax) {
        Hold(now, part, std::move(message), /*blocked=*/false);
      } else {
        const std::string why = fmt::format("request {} of worker {} comes before request {} of {}",
                                            message.sequence, rank, next, NameOf(part));
        SendError(part, message, {.code = ErrorBody::Code::kInvalidState, .message = why}, out);
      }
      break;
    case Admission::kTake:
      if (Blocked(part, message)) {
        Hold(now, part, std::move(message), /*blocked=*/true);
      } else {
        Apply(now, part, std::move(message), out);
        Drain(now, part, rank, out);
      }
  }
}

// Whether the request, which is its rank's next one, must wait, and those behind it too.
bool ServerMachine::Blocked(const Part& part, const Message& message) const {
  if (part.control()) return false;
  const Store* store = FindStore(part.id.store);
  if (store == nullptr) return true;  // whether it is dist_sync is not known yet
  if (message.kind == Kind::kInit && (message.flags & kFlagNoValue) != 0 && !part.created) {
    return !part.Of(message.rank).removed && !IsGone(part, 0);
  }
  if (IsPush(message.kind) && !store->Knows(message.version)) return true;
  return store->async && part.updating;
}

void ServerMachine::Hold(Time now, Part& part, Message&& message, bool blocked) {
  const std::int32_t rank = message.rank;
  RankState& state = part.Of(rank);
  const std::uint64_t sequence = message.sequence;
  state.Extra().early.emplace(sequence, std::move(message));
  if (!blocked) return;
  if (!state.blocked) part.blocked.push_back(rank);
  state.blocked = true;
  NoteWaiting(now, part);
}

// Takes what the rank has waiting, as far as it is in sequence and nothing blocks it.
void ServerMachine::Drain(Time now, Part& part, std::int32_t rank, Outputs& out) {
  RankState& state = part.Of(rank);
  while (state.extra && !state.extra->early.empty()) {
    const auto first = state.extra->early.begin();
    if (first->first < state.next) {  // came twice before its turn
      state.extra->early.erase(first);
      continue;
    }
    if (first->first > state.next) return;
    if (Blocked(part, first->second)) {
      if (!state.blocked) part.blocked.push_back(rank);
      state.blocked = true;
      NoteWaiting(now, part);
      return;
    }
    Message message = std::move(first->second);
    state.extra->early.erase(first);
    Apply(now, part, std::move(message), out);
  }
}

void ServerMachine::DrainBlocked(Time now, Part& part, Outputs& out) {
  std::vector<std::int32_t> ranks;
  ranks.swap(part.blocked);
  for (const std::int32_t rank : ranks) part.Of(rank).blocked = false;
  for (const std::int32_t rank : ranks) Drain(now, part, rank, out);
  NoteWaiting(now, part);
}

void ServerMachine::DrainStore(Time now, std::uint32_t store, Outputs& out) {
  for (const auto& [id, part] : parts_) {
    if (id.store == store && !part->blocked.empty()) DrainBlocked(now, *part, out);
  }
}

void ServerMachine::Apply(Time now, Part& part, Message&& message, Outputs& out) {
  const std::int32_t rank = message.rank;
  const bool closed = !part.control() && WorkerOf(rank).closed.contains(part.id.store);
  const bool was_gone = closed && IsGone(part, rank);
  part.Of(rank).next = message.sequence + 1;
  const bool bytes_are_free = EndAsks(part, rank);
  if (was_gone) {
    const std::string why = fmt::format("worker {} has left the job, or closed the store", rank);
    SendError(part, message, {.code = ErrorBody::Code::kInvalidState, .message = why}, out);
  } else {
    ApplyToPart(now, part, std::move(message), out);
  }
  if (bytes_are_free) GrantUnderCap(rank, out);
  if (closed && IsGone(part, rank)) GoOnWithout(now, part, rank, out);  // S9
}

void ServerMachine::ApplyToPart(Time now, Part& part, Message&& message, Outputs& out) {
  if (part.control()) {
    ApplyControl(now, part, message, out);
    return;
  }
  const bool removed = part.Of(message.rank).removed;
  if (message.kind == Kind::kInit && !removed) {
    ApplyInit(now, part, message, out);
    return;
  }
  if (!part.created || removed) {
    SendError(part, message,
              {.code = ErrorBody::Code::kUnknownKey,
               .message = fmt::format("{} was {}", NameOf(part),
                                      removed ? "removed before" : "never initialised")},
              out);
    return;
  }
  switch (message.kind) {
    case Kind::kDescribe:
      Describe(part, message, out);
      break;
    case Kind::kRemove:
      ApplyRemove(now, part, message, out);
      break;
    case Kind::kPush:
    case Kind::kPushPull:
      if (FindStore(part.id.store)->async) {
        PushAsync(now, part, std::move(message), out);
      } else {
        RecordPush(now, part, std::move(message), out);
      }
      break;
    default:
      ApplyRead(now, part, std::move(message), out);
  }
}

void ServerMachine::ApplyInit(Time now, Part& part, const Message& message, Outputs& out) {
  InitBody body;
  if (!Decode(message.meta, &body)) {
    SendError(part, message,
              {.code = ErrorBody::Code::kInvalidArgument, .message = "init: cannot be read"}, out);
    return;
  }
  if (!part.created && (message.flags & kFlagNoValue) != 0) {
    SendError(part, message,
              {.code = ErrorBody::Code::kInvalidState,
               .message = fmt::format(
                   "init of key {} by worker {}: the value that counts is that "
                   "of worker 0, which has left the job, or closed the store, without one",
                   ToString(KeyRef(body.info.key)), message.rank)},
              out);
    return;
  }
  if (part.created && (message.flags & kFlagNoValue) == 0) {
    SendError(part, message,
              {.code = ErrorBody::Code::kInvalidArgument,
               .message = fmt::format("{} is initialised already", NameOf(part))},
              out);
    return;
  }
  if (part.created) {
    if (body.info == part.info) {
      SendDone(part, message, out);
      return;
    }
    SendError(
        part, message,
        {.code = ErrorBody::Code::kInvalidArgument,
         .message = fmt::format("init of {} by worker {}: expected, as the store has it, {}; "
                                "given: {}",
                                NameOf(part), message.rank, TextOf(part.info), TextOf(body.info))},
        out);
    return;
  }
  if (const auto error = ErrorOf([&] { values_.Create(part.id, body.info, message.payload); })) {
    SendError(part, message, ToErrorBody(error), out);
    return;
  }
  part.info = std::move(body.info);
  part.created = true;
  SendDone(part, message, out);
  DrainBlocked(now, part, out);
}

// S3; also of resets, which are to come after the rounds that their rank has pushed to.
void ServerMachine::ApplyRead(Time now, Part& part, Message&& message, Outputs& out) {
  if (const auto error = ErrorOf([&] { values_.Check(part.id, message); })) {
    SendError(part, message, ToErrorBody(error), out);
    return;
  }
  const std::uint64_t round = FindStore(part.id.store)->async ? 0 : part.Of(message.rank).pushes;
  if (round > part.rounds || part.updating) {
    part.waiting.push_back({std::move(message), round});
    NoteWaiting(now, part);
  } else if (message.kind == Kind::kReset) {
    ApplyReset(part, message, out);
  } else {
    AnswerRead(part, message, out);
  }
}

void ServerMachine::ApplyReset(Part& part, const Message& message, Outputs& out) {
  if (const auto error = ErrorOf([&] { values_.Reset(part.id, message.payload); })) {
    SendError(part, message, ToErrorBody(error), out);
    return;
  }
  part.input_error.reset();
  part.update_error.reset();
  SendDone(part, message, out);
}

// S8. Answered at once: nobody waits for the others.
void ServerMachine::ApplyRemove(Time now, Part& part, const Message& message, Outputs& out) {
  part.Of(message.rank).removed = true;
  SendDone(part, message, out);
  if (FindStore(part.id.store)->async) {
    DropIfUnwanted(part);
  } else {
    Advance(now, part, out);
  }
}

void ServerMachine::DropIfUnwanted(Part& part) {
  if (!part.created || part.updating) return;
  bool unwanted = false;  // else the job ends
  for (std::int32_t rank = 0; rank < std::ssize(part.ranks); ++rank) {
    if (!IsGone(part, rank)) return;
    unwanted = unwanted || part.Of(rank).removed || WorkerOf(rank).closed.contains(part.id.store);
  }
  if (!unwanted) return;
  values_.Remove(part.id);
  part.created = false;
}

void ServerMachine::Describe(Part& part, const Message& message, Outputs& out) {
  Message answer = AnswerTo(message, Kind::kValue);
  answer.meta = Encode(InitBody{.info = part.info});
  SendAnswer(part, std::move(answer), out);
}

// A request that has taken effect already: its answer once more, if it has one yet.
void ServerMachine::Repeat(Part& part, const Message& message, Outputs& out) {
  RankState& state = part.Of(message.rank);
  if (state.extra) {
    for (const Message& answer : state.extra->answers) {
      if (answer.sequence == message.sequence) {
        out.Send(TheWorker(message.rank), answer);
        return;
      }
    }
    if (state.extra->running) return;
  }
  const bool waits =
      std::any_of(part.waiting.begin(), part.waiting.end(), [&](const Waiting& waiting) {
        return waiting.message.rank == message.rank && waiting.message.sequence == message.sequence;
      });
  const bool applying = part.applying && part.applying->rank == message.rank &&
                        part.applying->sequence == message.sequence;
  if (part.control() ? message.kind == Kind::kSaveStates : message.kind == Kind::kDescribe) {
    if (part.control()) {
      StartControl(part, message, out);
    } else if (part.created) {
      Describe(part, message, out);
    }
  } else if (part.control() || message.kind == Kind::kInit || message.kind == Kind::kReset ||
             message.kind == Kind::kRemove) {
    if (!waits) SendDone(part, message, out);
  } else if (message.kind == Kind::kPush || waits) {
    if (IsPush(message.kind) && !applying) Ack(message);
  } else if (!applying && part.created) {
    AnswerRead(part, message, out);
  }
}

// Answers.

void ServerMachine::AnswerWaiting(Part& part, Outputs& out) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < part.waiting.size(); ++i) {
    Waiting& waiting = part.waiting[i];
    if (waiting.round > part.rounds) {
      if (kept != i) part.waiting[kept] = std::move(waiting);
      ++kept;
    } else if (waiting.message.kind == Kind::kReset) {
      ApplyReset(part, waiting.message, out);
    } else {
      AnswerRead(part, waiting.message, out);
    }
  }
  part.waiting.resize(kept);
}

void ServerMachine::AnswerRead(Part& part, const Message& message, Outputs& out) {
  if (part.update_error || part.input_error) {
    SendError(part, message, part.update_error ? UpdateFailure(part) : *part.input_error, out);
    return;
  }
  Message answer = AnswerTo(message, Kind::kValue);
  answer.flags = message.flags & kFlagRowSparse;
  if (const auto error = ErrorOf([&] { answer.payload = values_.Read(part.id, message); })) {
    SendError(part, message, ToErrorBody(error), out);
    return;
  }
  SendAnswer(part, std::move(answer), out);
}

ErrorBody ServerMachine::UpdateFailure(const Part& part) const {
  return {.code = ErrorBody::Code::kUpdateFailed,
          .message = fmt::format("an update of {} failed, which only a reset cures: {}",
                                 NameOf(part), part.update_error->message)};
}

void ServerMachine::Ack(const Message& message) {
  Worker& worker = WorkerOf(message.rank);
  if (worker.acks.empty()) to_acknowledge_.push_back(message.rank);
  worker.acks.push_back({.part = message.part, .sequence = message.sequence});
}

void ServerMachine::EndTurn(Outputs& out) {
  for (const std::int32_t rank : to_acknowledge_) {
    Worker& worker = WorkerOf(rank);
    AcksBody body;
    for (std::size_t begin = 0; begin < worker.acks.size(); begin += kAcksMax) {
      const auto first = worker.acks.begin() + static_cast<std::ptrdiff_t>(begin);
      const std::size_t count = std::min(kAcksMax, worker.acks.size() - begin);
      body.acks.assign(first, first + static_cast<std::ptrdiff_t>(count));
      out.Send(TheWorker(rank), {.kind = Kind::kAcks,
                                 .rank = rank,
                                 .incarnation = worker.incarnation,
                                 .meta = Encode(body)});
    }
    worker.acks.clear();
  }
  to_acknowledge_.clear();
}

Message ServerMachine::AnswerTo(const Message& request, Kind kind) {
  return {.kind = kind,
          .dtype = request.dtype,
          .rank = request.rank,
          .priority = request.priority,
          .incarnation = request.incarnation,
          .part = request.part,
          .sequence = request.sequence};
}

void ServerMachine::SendAnswer(Part& part, Message&& answer, Outputs& out) {
  if (answer.meta.size() > kMetaBytesMax) {  // of very many keys or states
    return SendError(
        part, answer,
        {.code = ErrorBody::Code::kInvalidArgument,
         .message = fmt::format("the answer takes {} bytes beside the arrays: expected at most {}",
                                answer.meta.size(), kMetaBytesMax)},
        out);
  }
  RankState& state = part.Of(answer.rank);
  answer.version = part.rounds;
  state.told = std::max(state.told, part.rounds);
  const std::size_t keep = part.control() ? 1 : options_.answers_kept;
  if (keep > 0 && (!part.control() || answer.payload.empty())) {
    auto& answers = state.Extra().answers;
    answers.push_back(answer);
    if (answers.size() > keep) answers.erase(answers.begin());
  }
  const NodeId to = TheWorker(answer.rank);
  out.Send(to, std::move(answer));
}

void ServerMachine::SendDone(Part& part, const Message& request, Outputs& out) {
  SendAnswer(part, AnswerTo(request, Kind::kDone), out);
}

void ServerMachine::SendError(Part& part, const Message& request, const ErrorBody& error,
                              Outputs& out) {
  Message answer = AnswerTo(request, Kind::kError);
  answer.meta = Encode(error);
  SendAnswer(part, std::move(answer), out);
}

}  // namespace heddle::kvstore::dist
