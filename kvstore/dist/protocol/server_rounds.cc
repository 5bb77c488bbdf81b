// Pushes: rounds of dist_sync, updates of dist_async, and how far workers may run ahead.
#include <algorithm>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/dist/protocol/server_state.h"

namespace heddle::kvstore::dist {

// What is wrong with a push, if anything; and its rates, or those that its rank sent before.
std::unique_ptr<ErrorBody> ServerMachine::TakePush(Part& part, Message& message,
                                                   std::optional<UpdateRates>* rates) {
  RankState& state = part.Of(message.rank);
  ErrorBody error;
  if ((message.flags & kFlagFailed) != 0) {
    if (!Decode(message.meta, &error)) error.message = "an error that cannot be read";
    return std::make_unique<ErrorBody>(std::move(error));
  }
  if ((message.flags & kFlagRates) != 0) {
    RatesBody body;
    if (!Decode(std::string_view(message.meta).substr(0, kRatesBytes), &body)) {
      error.code = ErrorBody::Code::kInvalidArgument;
      error.message = "its rates cannot be read";
      return std::make_unique<ErrorBody>(std::move(error));
    }
    state.Extra().rates = body.rates;
    state.Extra().rates_generation = GenerationOf(message.version);
  }
  *rates = state.RatesFor(GenerationOf(message.version));
  if (const std::uint64_t generation = GenerationOf(message.version); generation > 0) {
    const auto& known = FindStore(part.id.store)->generations[generation - 1];
    if (known.error) return std::make_unique<ErrorBody>(*known.error);
  }
  if (const auto wrong = ErrorOf([&] { values_.Check(part.id, message); })) {
    return std::make_unique<ErrorBody>(ToErrorBody(wrong));
  }
  return nullptr;
}

// S2, S4, S5.
void ServerMachine::RecordPush(Time now, Part& part, Message&& message, Outputs& out) {
  const std::int32_t rank = message.rank;
  RankState& state = part.Of(rank);
  Worker& worker = WorkerOf(rank);
  if (state.pushes - part.rounds >= kPushesAheadMax || worker.left) {
    const std::string why =
        worker.left ? fmt::format("worker {} has left the job", rank)
                    : fmt::format("push {} of worker {} to {}, of which {} rounds are complete",
                                  state.pushes + 1, rank, NameOf(part), part.rounds);
    SendError(part, message, {.code = ErrorBody::Code::kInvalidState, .message = why}, out);
    return;
  }
  Message request = AnswerTo(message, message.kind);  // without what the sum is made of
  request.flags = message.flags;
  Contribution contribution{.message = std::move(message)};
  contribution.error = TakePush(part, contribution.message, &contribution.rates);
  const bool refused = contribution.error && (request.flags & kFlagFailed) == 0;
  const ErrorBody refusal = refused ? *contribution.error : ErrorBody{};

  const std::size_t slot = ++state.pushes % kPushesAheadMax;
  state.arrived[slot] = now;
  state.bytes[slot] = contribution.message.payload.bytes();
  worker.unfinished_bytes += state.bytes[slot];
  if (state.pushes == part.rounds + 1) ++part.arrived;
  if (part.next_rank == rank && state.pushes == part.rounds + 1 && !part.updating) {
    AddContribution(part, rank, std::move(contribution));
    ++part.next_rank;
  } else {
    state.held[slot] = std::make_unique<Contribution>(std::move(contribution));
  }
  const std::uint64_t round = state.pushes;
  if (request.kind == Kind::kPushPull && !refused) part.waiting.push_back({request, round});
  Advance(now, part, out);
  NoteWaiting(now, part);
  if (refused) {
    SendError(part, request, refusal, out);
  } else if (request.kind == Kind::kPush || round > part.rounds) {
    Ack(request);
  }
  if (state.pushes - state.told >= kPushesAheadMax && part.rounds > state.told) {
    TellComplete(part, rank, out);
  }
}

void ServerMachine::AddContribution(Part& part, std::int32_t rank, Contribution&& contribution) {
  const auto fail = [&](const std::string& why) {
    if (part.sum_begun) values_.DropSum(part.id);
    part.sum_begun = false;
    part.round_error = std::make_unique<ErrorBody>(
        ErrorBody{.code = ErrorBody::Code::kInputFailed,
                  .message = fmt::format("round {} of {} failed: the push of worker {}: {}",
                                         part.rounds + 1, NameOf(part), rank, why)});
  };
  // Of a round that has failed, too: all parts of an array must agree whether it is updated whole.
  const bool first = part.contributions++ == 0;
  if (first || contribution.message.version > part.by.version) {
    part.by = {.version = contribution.message.version, .rates = contribution.rates};
  }
  if (part.round_error) return;
  if (contribution.error) return fail(contribution.error->message);
  // Also while the part is poisoned: a reset may come before the round is complete.
  const std::exception_ptr error =
      ErrorOf([&] { values_.Add(part.id, contribution.message, !part.sum_begun); });
  part.sum_begun = true;
  if (error) fail(ToErrorBody(error).message);
}

// False: the rank has said of no push to the round that it does not come.
bool ServerMachine::AddMissing(Part& part, std::int32_t rank) {
  RankState& state = part.Of(rank);
  if (!WorkerOf(rank).left || !state.extra) return false;
  std::vector<std::uint64_t>& versions = state.extra->missing;
  const std::uint64_t place = part.rounds - state.pushes;
  if (place >= versions.size()) return false;
  Contribution missing{.message = {.kind = Kind::kPush, .rank = rank, .version = versions[place]}};
  if (place + 1 == versions.size()) versions = {};  // none is wanted any more
  missing.error = std::make_unique<ErrorBody>(
      ErrorBody{.code = ErrorBody::Code::kTimeout,
                .message = "its deadline passed before it could be sent, and the worker has left "
                           "the job"});
  AddContribution(part, rank, std::move(missing));
  return true;
}

// Adds what has come in the order of ranks, and ends rounds as long as they are complete.
void ServerMachine::Advance(Time now, Part& part, Outputs& out) {
  const auto num_ranks = static_cast<std::int32_t>(part.ranks.size());
  while (!part.updating) {
    for (; part.next_rank < num_ranks; ++part.next_rank) {
      RankState& state = part.Of(part.next_rank);
      if (state.pushes > part.rounds) {
        auto& held = state.held[(part.rounds + 1) % kPushesAheadMax];
        if (held) AddContribution(part, part.next_rank, std::move(*held));
        held.reset();
      } else if (!AddMissing(part, part.next_rank) && !IsGone(part, part.next_rank)) {
        break;
      }
    }
    if (part.next_rank < num_ranks) {  // S6
      const RankState& missing = part.Of(part.next_rank);
      if (missing.extra && missing.extra->ask) Grant(part, part.next_rank, out);
      return;
    }
    if (part.contributions == 0) return DropIfUnwanted(part);  // nobody is left
    if (!StartUpdate(now, part, out)) return;
    FinishRound(now, part, out);
  }
}

// For pushes of workers that have no optimizer: those that the first of the others has sent.
std::optional<UpdateRates> ServerMachine::RatesOf(const Part& part, std::uint64_t version) {
  for (const RankState& state : part.ranks) {
    if (const auto rates = state.RatesFor(GenerationOf(version))) return rates;
  }
  return std::nullopt;
}

bool ServerMachine::Update(Part& part, const UpdateBy& by, std::exception_ptr* error) {
  bool done = true;
  const std::exception_ptr thrown = ErrorOf([&] { done = values_.Update(part.id, by, error); });
  if (thrown) *error = thrown;
  return done;
}

// False: the update goes on elsewhere, or the round has ended already.
bool ServerMachine::StartUpdate(Time now, Part& part, Outputs& out) {
  const std::uint64_t version = std::max(part.by.version, part.version);
  const bool whole =
      part.info.num_parts > 1 && version > 0 && values_.UpdatesWhole(part.id, version);
  const std::exception_ptr misplaced = whole ? LearnWhole(part.id) : nullptr;
  part.input_error = std::move(part.round_error);
  if (misplaced) part.update_error = std::make_unique<ErrorBody>(ToErrorBody(misplaced));
  // Of a round that has failed, too: the rank that has set the optimizer may have no other one.
  if (FindStore(part.id.store)->CanUse(version)) part.version = version;
  if (part.input_error || part.update_error) {
    if (part.sum_begun) values_.DropSum(part.id);
    if (whole) SkipWhole(now, part, out);
    return true;
  }
  part.by.version = version;
  if (!part.by.rates) part.by.rates = RatesOf(part, version);
  if (whole) {
    part.updating = true;
    JoinWhole(now, part, out);
    return false;
  }
  std::exception_ptr error;
  part.updating = !Update(part, part.by, &error);
  if (error) part.update_error = std::make_unique<ErrorBody>(ToErrorBody(error));
  return !part.updating;
}

void ServerMachine::OnUpdated(Time now, const PartId& id, const std::exception_ptr& error,
                              Outputs& out) {
  const auto found = parts_.find(id);
  CHECK(found != parts_.end() && found->second->updating, "the end of an update that never began");
  Part& part = *found->second;
  part.updating = false;
  if (FindStore(id.store)->async) {
    FinishAsync(now, part, error, out);
    DrainBlocked(now, part, out);
    DropIfUnwanted(part);
    return;
  }
  if (error) part.update_error = std::make_unique<ErrorBody>(ToErrorBody(error));
  FinishRound(now, part, out);
  Advance(now, part, out);
}

void ServerMachine::FinishRound(Time now, Part& part, Outputs& out) {
  ++part.rounds;
  ++state_.rounds;
  part.next_rank = 0;
  part.contributions = 0;
  part.sum_begun = false;
  part.by = {};
  NoteSlow(now, part, out);
  part.round_ended = now;
  AnswerWaiting(part, out);
  ReleaseBytes(part, out);
  part.arrived = 0;
  for (std::int32_t rank = 0; rank < std::ssize(part.ranks); ++rank) {
    const RankState& state = part.Of(rank);
    if (state.pushes > part.rounds) ++part.arrived;
    if (state.told == part.rounds || IsGone(part, rank)) continue;
    const bool at_limit = state.pushes - state.told >= kPushesAheadMax;  // S4
    if (at_limit || WorkerOf(rank).asks) TellComplete(part, rank, out);
  }
  part.waits_since.reset();
  NoteWaiting(now, part);
}

void ServerMachine::PushAsync(Time now, Part& part, Message&& message, Outputs& out) {
  std::optional<UpdateRates> rates;
  const std::unique_ptr<ErrorBody> wrong = TakePush(part, message, &rates);
  if (wrong) {
    part.input_error = std::make_unique<ErrorBody>(
        ErrorBody{.code = ErrorBody::Code::kInputFailed,
                  .message = fmt::format("the last push to {}, of worker {}, failed: {}",
                                         NameOf(part), message.rank, wrong->message)});
    if ((message.flags & kFlagFailed) == 0) {
      SendError(part, message, *wrong, out);
    } else if (message.kind == Kind::kPush) {
      Ack(message);
    } else {
      AnswerRead(part, message, out);
    }
    return;
  }
  part.version = std::max(part.version, message.version);
  // A worker that has set no optimizer goes by what the others have set.
  const Store& store = *FindStore(part.id.store);
  if (!store.set_by.contains(message.rank)) {
    part.version = std::max(part.version, store.LastVersion());
  }
  // The first worker's schedule, if it is here and has one for this optimizer.
  const std::uint64_t generation = GenerationOf(part.version);
  if (GenerationOf(message.version) != generation) rates.reset();
  const std::optional<UpdateRates> first = part.Of(0).RatesFor(generation);
  if (first && !IsGone(part, 0)) rates = first;
  if (!rates) rates = RatesOf(part, part.version);
  std::exception_ptr error =
      part.update_error ? nullptr : ErrorOf([&] { values_.Add(part.id, message, /*first=*/true); });
  part.applying = std::make_unique<Message>(std::move(message));
  if (!error && !part.update_error) {
    part.updating = !Update(part, {.version = part.version, .rates = rates}, &error);
    if (part.updating) {
      NoteWaiting(now, part);
      return;
    }
  }
  FinishAsync(now, part, error, out);
}

void ServerMachine::FinishAsync(Time now, Part& part, const std::exception_ptr& error,
                                Outputs& out) {
  const std::unique_ptr<Message> message = std::move(part.applying);
  ++part.rounds;
  ++state_.rounds;
  part.round_ended = now;
  part.input_error.reset();
  if (error) part.update_error = std::make_unique<ErrorBody>(ToErrorBody(error));
  if (message->kind == Kind::kPush) {
    Ack(*message);
  } else {
    AnswerRead(part, *message, out);
  }
}

// Keeps waits_since.
void ServerMachine::NoteWaiting(Time now, Part& part) {
  if (!part.Waits()) part.waits_since.reset();
  if (!part.Waits() || part.waits_since) return;
  part.waits_since = now;
  part.warn_at = now + options_.warn_after;
}

// Credit.

void ServerMachine::TellComplete(Part& part, std::int32_t rank, Outputs& out) {
  part.Of(rank).told = part.rounds;
  out.Send(TheWorker(rank), {.kind = Kind::kCredit,
                             .rank = rank,
                             .incarnation = WorkerOf(rank).incarnation,
                             .part = part.id,
                             .version = part.rounds});
}

void ServerMachine::OnAsk(const Message& message, Outputs& out) {
  const std::int32_t rank = message.rank;
  Worker& worker = WorkerOf(rank);
  AskBody body;
  if (!Decode(message.meta, &body)) return;
  if (body.bytes == 0) {  // it has lost messages, and only wants to hear of complete rounds
    TellComplete(PartOf(message.part), rank, out);
    return;
  }
  if (!worker.asks) {
    worker.asks = true;
    for (const auto& [id, other] : parts_) {
      if (other->Of(rank).told < other->rounds) TellComplete(*other, rank, out);
    }
  }
  Part& part = PartOf(message.part);
  RankState& state = part.Of(rank);
  TellComplete(part, rank, out);
  if (message.sequence < state.next) return;
  RankExtra& extra = state.Extra();
  if (extra.ask && *extra.ask > message.sequence) return;  // overtaken by a later one
  extra.ask_bytes = body.bytes;
  if (!extra.ask) worker.asking.push_back(&part);
  extra.ask = message.sequence;
  const bool missing = part.next_rank == rank && state.pushes == part.rounds && !part.updating;
  if (!part.created || missing || extra.reserved > 0) {
    Grant(part, rank, out);
  } else {
    GrantUnderCap(rank, out);
  }
}

// The rank's next request has come. What was asked or granted for it is over: also if it is not the
// push that asked, which has timed out at the worker and given up its place. True: bytes are free.
bool ServerMachine::EndAsks(Part& part, std::int32_t rank) {
  RankState& state = part.Of(rank);
  if (!state.extra) return false;
  RankExtra& extra = *state.extra;
  if (extra.ask && *extra.ask < state.next) {
    extra.ask.reset();
    std::erase(WorkerOf(rank).asking, &part);
  }
  if (extra.reserved == 0 || extra.reserved_for >= state.next) return false;
  WorkerOf(rank).unfinished_bytes -= std::exchange(extra.reserved, 0);
  return true;
}

void ServerMachine::Grant(Part& part, std::int32_t rank, Outputs& out) {
  Worker& worker = WorkerOf(rank);
  RankExtra& extra = part.Of(rank).Extra();
  std::erase(worker.asking, &part);
  worker.unfinished_bytes += extra.ask_bytes - std::exchange(extra.reserved, extra.ask_bytes);
  extra.reserved_for = *extra.ask;
  out.Send(TheWorker(rank), {.kind = Kind::kGrant,
                             .rank = rank,
                             .incarnation = worker.incarnation,
                             .part = part.id,
                             .sequence = *extra.ask});
  extra.ask.reset();
}

void ServerMachine::GrantUnderCap(std::int32_t rank, Outputs& out) {
  Worker& worker = WorkerOf(rank);
  while (!worker.asking.empty()) {
    Part& part = *worker.asking.front();
    const std::uint64_t bytes = part.Of(rank).extra->ask_bytes;
    if (worker.unfinished_bytes != 0 &&
        worker.unfinished_bytes + bytes > options_.unfinished_bytes_max) {
      return;
    }
    Grant(part, rank, out);
  }
}

// The bytes of the round that has just ended.
void ServerMachine::ReleaseBytes(Part& part, Outputs& out) {
  const std::size_t slot = part.rounds % kPushesAheadMax;
  for (std::int32_t rank = 0; rank < std::ssize(part.ranks); ++rank) {
    RankState& state = part.Of(rank);
    if (state.pushes < part.rounds) continue;
    WorkerOf(rank).unfinished_bytes -= std::exchange(state.bytes[slot], 0);
    if (!WorkerOf(rank).asking.empty()) GrantUnderCap(rank, out);
  }
}

}  // namespace heddle::kvstore::dist
