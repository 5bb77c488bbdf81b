#include "kvstore/dist/protocol/server.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <map>

#include <fmt/format.h>

#include "base/check.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {

namespace {

constexpr NodeId kTheScheduler{.role = Role::kScheduler, .rank = 0};
constexpr std::size_t kBeforeRosterMax = 1 << 16;  // messages
constexpr std::size_t kAcksMax = 4096;             // in one message
constexpr std::size_t kShownMax = 16;              // ranks or parts in a text for people

constexpr NodeId WorkerNode(std::int32_t rank) { return {.role = Role::kWorker, .rank = rank}; }

constexpr bool IsPush(Kind kind) { return kind == Kind::kPush || kind == Kind::kPushPull; }

constexpr bool IsPartRequest(Kind kind) { return kind >= Kind::kInit && kind <= Kind::kDescribe; }

constexpr bool IsControlRequest(Kind kind) {
  return kind >= Kind::kOpenStore && kind <= Kind::kLeave;
}

std::string Seconds(Time time) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(time).count());
}

// What a call of PartStore or ServerControl threw, if anything.
template <class Function>
std::exception_ptr ErrorOf(Function function) {
  try {
    function();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

std::string TextOf(const PartInfo& info) {
  return fmt::format("{} {}{}, part of {} over [{}, {})", Name(info.dtype), ToString(info.shape),
                     info.row_sparse ? " row-sparse" : "", info.num_parts, info.begin, info.end);
}

std::string TextOf(const OptimizerBody& optimizer) {
  std::string text = optimizer.name + "(";
  for (const auto& [name, value] : optimizer.parameters) {
    if (text.back() != '(') text += ", ";
    text += fmt::format("{}={}", name, value);
  }
  return text + ")";
}

// Equal but for the learning rate, which travels with each push.
bool SameOptimizer(const OptimizerBody& a, const OptimizerBody& b) {
  const auto sorted = [](const OptimizerBody& body) {
    auto parameters = body.parameters;
    std::erase_if(parameters, [](const auto& entry) { return entry.first == "learning_rate"; });
    std::sort(parameters.begin(), parameters.end());
    return parameters;
  };
  return a.name == b.name && sorted(a) == sorted(b);
}

constexpr std::uint64_t GenerationOf(std::uint64_t version) { return version >> 32; }

}  // namespace

// A push that waits for its place in the sum.
struct ServerMachine::Contribution {
  Message message;
  UpdateRates rates = {};
  std::unique_ptr<ErrorBody> error = nullptr;
};

// What few ranks of few parts need.
struct ServerMachine::RankExtra {
  std::map<std::uint64_t, Message> early;  // by sequence; the first may be the next, blocked
  std::optional<UpdateRates> rates;        // that the rank sent last
  std::vector<Message> answers;            // for requests that come again
  std::optional<std::uint64_t> ask;        // a push that waits for kGrant
  std::uint64_t ask_bytes = 0;
  std::uint64_t reserved = 0;  // bytes of a granted push, among Worker::unfinished_bytes
  bool running = false;        // a control request
};

// One rank at one part. A server has (ranks x parts) of these, so it is small.
struct ServerMachine::RankState {
  std::uint64_t next = 0;    // sequence number
  std::uint64_t pushes = 0;  // recorded
  std::uint64_t told = 0;    // complete rounds that the rank knows of
  // Of the pushes after the last complete round, by their number modulo 2.
  std::array<std::unique_ptr<Contribution>, kPushesAheadMax> held;
  std::array<std::uint64_t, kPushesAheadMax> bytes{};
  std::array<Time, kPushesAheadMax> arrived{};
  std::unique_ptr<RankExtra> extra;
  bool blocked = false;   // is among Part::blocked
  std::uint8_t slow = 0;  // rounds in a row

  RankExtra& Extra() {
    if (!extra) extra = std::make_unique<RankExtra>();
    return *extra;
  }
};

// A read or a reset until its round is complete.
struct ServerMachine::Waiting {
  Message message;
  std::uint64_t round;
};

struct ServerMachine::Part {
  explicit Part(const PartId& part_id, std::size_t num_ranks) : id(part_id), ranks(num_ranks) {}

  RankState& Of(std::int32_t rank) { return ranks[static_cast<std::size_t>(rank)]; }
  const RankState& Of(std::int32_t rank) const { return ranks[static_cast<std::size_t>(rank)]; }
  bool control() const { return id.part == kControlPart; }
  bool Waits() const { return arrived > 0 || !waiting.empty() || !blocked.empty() || updating; }

  PartId id;
  PartInfo info;
  bool created = false;
  bool updating = false;     // between Update and OnUpdated
  bool sum_begun = false;    // Add has been called
  std::uint64_t rounds = 0;  // complete; in dist_async: updates
  // The round in progress: ranks below next_rank are in the sum or do not take part.
  std::int32_t next_rank = 0;
  std::int32_t contributions = 0;          // in the sum
  std::int32_t arrived = 0;                // ranks that have pushed to it
  UpdateBy by;                             // the highest version so far, and its first rank's rates
  std::uint64_t version = 0;               // of the last update
  std::unique_ptr<ErrorBody> round_error;  // of the round in progress
  std::unique_ptr<ErrorBody> input_error;  // of the last round
  std::unique_ptr<ErrorBody> update_error;  // until kReset
  std::unique_ptr<Message> applying;        // dist_async: the push of the update under way
  std::vector<RankState> ranks;
  std::vector<Waiting> waiting;       // in the order of arrival
  std::vector<std::int32_t> blocked;  // ranks whose next request is here, but cannot be taken yet
  std::optional<Time> waits_since;
  Time warn_at{0};
  std::optional<Time> round_ended;
  bool any_slow = false;  // some RankState::slow is not 0
};

struct ServerMachine::Generation {
  OptimizerBody optimizer;
  std::int32_t rank;  // that came first
  std::uint64_t version;
  std::optional<ErrorBody> error = std::nullopt;  // why it cannot be used
};

struct ServerMachine::Store {
  std::string type;
  bool async = false;
  std::int32_t opened_by = 0;
  std::vector<Generation> generations;

  bool Knows(std::uint64_t version) const {
    const std::uint64_t generation = GenerationOf(version);
    return generation == 0 ||
           (generation <= generations.size() && version <= generations[generation - 1].version);
  }
};

struct ServerMachine::Worker {
  Incarnation incarnation = 0;
  std::string address;
  bool left = false;
  bool asks = false;  // has reached the byte cap: wants to hear of each complete round
  std::optional<Time> heard;
  std::optional<Time> slow_named;
  std::uint64_t unfinished_bytes = 0;  // recorded or granted, of rounds that are not complete
  std::vector<Part*> asking;
  std::vector<AcksBody::Ack> acks;
};

ServerMachine::Worker& ServerMachine::WorkerOf(std::int32_t rank) {
  return workers_[static_cast<std::size_t>(rank)];
}

const ServerMachine::Worker& ServerMachine::WorkerOf(std::int32_t rank) const {
  return workers_[static_cast<std::size_t>(rank)];
}

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
  for (const NodeEntry& entry : roster.nodes) {
    if (entry.node.role != Role::kWorker || entry.node.rank < 0 ||
        entry.node.rank >= roster.num_workers) {
      continue;
    }
    WorkerOf(entry.node.rank).incarnation = entry.incarnation;
    WorkerOf(entry.node.rank).address = entry.address;
  }
  next_check_ = now + options_.warn_after;
  for (auto& [from, message] : before_roster_) {
    OnWorkerMessage(now, from, std::move(message), out);
  }
  before_roster_ = {};
}

void ServerMachine::OnMessage(Time now, NodeId from, Message message, Outputs& out) {
  if (from.role == Role::kWorker) {
    if (!workers_.empty()) {
      OnWorkerMessage(now, from, std::move(message), out);
    } else if (before_roster_.size() < kBeforeRosterMax) {
      before_roster_.emplace_back(from, std::move(message));
    }
  } else if (message.kind == Kind::kRoster) {
    RosterBody roster;
    if (Decode(message.meta, &roster)) OnRoster(now, roster, out);
  } else if (message.kind == Kind::kJobFailed && !failure_) {
    failure_.emplace();
    if (!Decode(message.meta, &*failure_)) failure_->why = "the reason cannot be read";
  }
}

// Requests.

void ServerMachine::OnWorkerMessage(Time now, NodeId from, Message message, Outputs& out) {
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
    worker.heard = now;
    if (message.kind == Kind::kAsk) {
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
  OnRequest(now, std::move(message), out);
}

// S1.
void ServerMachine::OnRequest(Time now, Message message, Outputs& out) {
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
      out.Send(WorkerNode(rank), std::move(answer));
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
    return true;
  }
  if (IsPush(message.kind) && !store->Knows(message.version)) return true;
  return store->async && part.updating;
}

void ServerMachine::Hold(Time now, Part& part, Message message, bool blocked) {
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

void ServerMachine::Apply(Time now, Part& part, Message message, Outputs& out) {
  part.Of(message.rank).next = message.sequence + 1;
  if (part.control()) {
    ApplyControl(now, part, message, out);
    return;
  }
  if (message.kind == Kind::kInit) {
    ApplyInit(now, part, message, out);
    return;
  }
  if (!part.created) {
    SendError(part, message,
              {.code = ErrorBody::Code::kUnknownKey,
               .message = fmt::format("{} was never initialised", NameOf(part))},
              out);
    return;
  }
  switch (message.kind) {
    case Kind::kDescribe:
      Describe(part, message, out);
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
void ServerMachine::ApplyRead(Time now, Part& part, Message message, Outputs& out) {
  if (const std::exception_ptr error = values_.Check(part.id, message)) {
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
        out.Send(WorkerNode(message.rank), answer);
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
  } else if (part.control() || message.kind == Kind::kInit || message.kind == Kind::kReset) {
    if (!waits) SendDone(part, message, out);
  } else if (message.kind == Kind::kPush || waits) {
    if (IsPush(message.kind) && !applying) Ack(message);
  } else if (!applying && part.created) {
    AnswerRead(part, message, out);
  }
}

void ServerMachine::OnStatus(Time now, NodeId from, const Message& message, Outputs& out) {
  Message answer = AnswerTo(message, Kind::kStatusReply);
  const auto found = parts_.find(message.part);
  std::string text = "it knows nothing of this part";
  if (found != parts_.end()) text = DescribePart(now, *found->second);
  answer.meta = Encode(TextBody{.text = std::move(text)});
  out.Send(from, std::move(answer));
}

// Pushes.

// What is wrong with a push, if anything; and its rates, or those that its rank sent before.
std::unique_ptr<ErrorBody> ServerMachine::TakePush(Part& part, Message& message,
                                                   UpdateRates* rates) {
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
  }
  if (state.extra && state.extra->rates) *rates = *state.extra->rates;
  if (const std::uint64_t generation = GenerationOf(message.version); generation > 0) {
    const auto& known = FindStore(part.id.store)->generations[generation - 1];
    if (known.error) return std::make_unique<ErrorBody>(*known.error);
  }
  if (const std::exception_ptr wrong = values_.Check(part.id, message)) {
    return std::make_unique<ErrorBody>(ToErrorBody(wrong));
  }
  return nullptr;
}

// S2, S4, S5.
void ServerMachine::RecordPush(Time now, Part& part, Message message, Outputs& out) {
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
  if (state.extra) {
    worker.unfinished_bytes -= std::exchange(state.extra->reserved, 0);
    if (state.extra->ask && *state.extra->ask < state.next) {  // it has come without
      state.extra->ask.reset();
      std::erase(worker.asking, &part);
    }
  }
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

void ServerMachine::AddContribution(Part& part, std::int32_t rank, Contribution contribution) {
  const auto fail = [&](const std::string& why) {
    if (part.sum_begun) values_.DropSum(part.id);
    part.sum_begun = false;
    part.round_error = std::make_unique<ErrorBody>(
        ErrorBody{.code = ErrorBody::Code::kInputFailed,
                  .message = fmt::format("round {} of {} failed: the push of worker {}: {}",
                                         part.rounds + 1, NameOf(part), rank, why)});
  };
  const bool first = part.contributions++ == 0;
  if (part.round_error) return;
  if (contribution.error) {
    fail(contribution.error->message);
    return;
  }
  if (first || contribution.message.version > part.by.version) {
    part.by = {.version = contribution.message.version, .rates = contribution.rates};
  }
  if (part.update_error) return;
  const std::exception_ptr error =
      ErrorOf([&] { values_.Add(part.id, contribution.message, !part.sum_begun); });
  part.sum_begun = true;
  if (error) fail(ToErrorBody(error).message);
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
      } else if (!WorkerOf(part.next_rank).left) {
        break;
      }
    }
    if (part.next_rank < num_ranks) {  // S6
      const RankState& missing = part.Of(part.next_rank);
      if (missing.extra && missing.extra->ask) Grant(part, part.next_rank, out);
      return;
    }
    if (part.contributions == 0) return;  // all have left
    if (!StartUpdate(part)) return;
    FinishRound(now, part, out);
  }
}

bool ServerMachine::Update(Part& part, const UpdateBy& by, std::exception_ptr* error) {
  bool done = true;
  const std::exception_ptr thrown = ErrorOf([&] { done = values_.Update(part.id, by, error); });
  if (thrown) *error = thrown;
  return done;
}

// False: the update goes on elsewhere.
bool ServerMachine::StartUpdate(Part& part) {
  part.input_error = std::move(part.round_error);
  if (part.input_error || part.update_error) {
    if (part.sum_begun) values_.DropSum(part.id);
    return true;
  }
  part.by.version = part.version = std::max(part.by.version, part.version);
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
    return;
  }
  if (error) part.update_error = std::make_unique<ErrorBody>(ToErrorBody(error));
  FinishRound(now, part, out);
  Advance(now, part, out);
}

void ServerMachine::FinishRound(Time now, Part& part, Outputs& out) {
  ++part.rounds;
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
    if (state.told == part.rounds || WorkerOf(rank).left) continue;
    const bool at_limit = state.pushes - state.told >= kPushesAheadMax;  // S4
    if (at_limit || WorkerOf(rank).asks) TellComplete(part, rank, out);
  }
  part.waits_since.reset();
  NoteWaiting(now, part);
}

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
    ErrorBody error = part.update_error ? *part.update_error : *part.input_error;
    if (part.update_error) {
      error.code = ErrorBody::Code::kUpdateFailed;
      error.message = fmt::format("an update of {} failed, which only a reset cures: {}",
                                  NameOf(part), error.message);
    }
    SendError(part, message, error, out);
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

void ServerMachine::PushAsync(Time now, Part& part, Message message, Outputs& out) {
  UpdateRates rates;
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
  // The first worker's schedule, if it has one.
  if (const RankState& first = part.Of(0); first.extra && first.extra->rates) {
    rates = *first.extra->rates;
  }
  part.version = std::max(part.version, message.version);
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

// Who took how long from the end of the last round to its push of this one.
void ServerMachine::NoteSlow(Time now, Part& part, Outputs& out) {
  if (!part.round_ended || (now - *part.round_ended < options_.slow_min && !part.any_slow)) return;
  const std::size_t slot = part.rounds % kPushesAheadMax;
  durations_.clear();
  const auto duration = [&](const RankState& state) {
    return std::max(Time{0}, state.arrived[slot] - *part.round_ended);
  };
  for (const RankState& state : part.ranks) {
    if (state.pushes >= part.rounds) durations_.push_back(duration(state));
  }
  const auto median = durations_.begin() + static_cast<std::ptrdiff_t>((durations_.size() - 1) / 2);
  std::nth_element(durations_.begin(), median, durations_.end());
  const Time limit = std::max(*median + options_.slow_min,
                              std::chrono::duration_cast<Time>(*median * options_.slow_factor));
  part.any_slow = false;
  for (std::int32_t rank = 0; rank < std::ssize(part.ranks); ++rank) {
    RankState& state = part.Of(rank);
    if (state.pushes < part.rounds || duration(state) < limit) {
      state.slow = 0;
      continue;
    }
    part.any_slow = true;
    if (state.slow < options_.slow_rounds && ++state.slow < options_.slow_rounds) continue;
    Worker& worker = WorkerOf(rank);
    if (worker.slow_named && now - *worker.slow_named < std::chrono::minutes(1)) continue;
    worker.slow_named = now;
    out.log.emplace_back(
        LogLevel::kWarning,
        fmt::format("worker {} ({}) is slow: in the last {} rounds of {} it took {:.3f} s and more "
                    "from round to push, at least {} times the median of all workers",
                    rank, worker.address, options_.slow_rounds, NameOf(part),
                    std::chrono::duration<double>(duration(state)).count(), options_.slow_factor));
  }
}

// Credit.

void ServerMachine::TellComplete(Part& part, std::int32_t rank, Outputs& out) {
  part.Of(rank).told = part.rounds;
  out.Send(WorkerNode(rank), {.kind = Kind::kCredit,
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
      if (other->created && other->Of(rank).told < other->rounds) TellComplete(*other, rank, out);
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

void ServerMachine::Grant(Part& part, std::int32_t rank, Outputs& out) {
  Worker& worker = WorkerOf(rank);
  RankExtra& extra = part.Of(rank).Extra();
  std::erase(worker.asking, &part);
  worker.unfinished_bytes += extra.ask_bytes - std::exchange(extra.reserved, extra.ask_bytes);
  out.Send(WorkerNode(rank), {.kind = Kind::kGrant,
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

// Control.

void ServerMachine::ApplyControl(Time now, Part& part, const Message& message, Outputs& out) {
  std::exception_ptr error;
  switch (message.kind) {
    case Kind::kOpenStore:
      error = ErrorOf([&] { OpenStore(message); });
      break;
    case Kind::kSetOptimizer:
      error = ErrorOf([&] { SetOptimizer(message); });
      break;
    case Kind::kSetParameters:
      error = ErrorOf([&] { SetParameters(message); });
      break;
    case Kind::kSetCompression:
      error = ErrorOf([&] { SetCompression(message); });
      break;
    case Kind::kKeys: {
      Message answer = AnswerTo(message, Kind::kDone);
      answer.meta = KeysOf(message.part.store);
      SendAnswer(part, std::move(answer), out);
      return;
    }
    case Kind::kLeave:
      Left(now, message.rank, out);
      break;
    default:
      StartControl(part, message, out);
      return;
  }
  if (error) {
    SendError(part, message, ToErrorBody(error), out);
  } else {
    SendDone(part, message, out);
  }
  DrainStore(now, message.part.store, out);
}

const ServerMachine::Store* ServerMachine::FindStore(std::uint32_t store) const {
  const auto found = stores_.find(store);
  return found == stores_.end() ? nullptr : found->second.get();
}

ServerMachine::Store& ServerMachine::OpenedStore(std::uint32_t store) {
  const auto found = stores_.find(store);
  if (found == stores_.end()) {
    throw InvalidState(fmt::format("store {} is not open: kOpenStore comes first", store));
  }
  return *found->second;
}

void ServerMachine::OpenStore(const Message& message) {
  OpenStoreBody body;
  if (!Decode(message.meta, &body)) throw InvalidArgument("the type of a store cannot be read");
  auto& store = stores_[message.part.store];
  if (store) {
    if (store->type == body.type) return;
    throw InvalidArgument(fmt::format(
        "store {} is of type '{}', as worker {} has opened it; worker {} opens it with type '{}'",
        message.part.store, store->type, store->opened_by, message.rank, body.type));
  }
  const std::exception_ptr error =
      ErrorOf([&] { control_.OpenStore(message.part.store, body.type); });
  if (error) {
    stores_.erase(message.part.store);
    std::rethrow_exception(error);
  }
  store = std::make_unique<Store>();
  store->async = body.type.find("async") != std::string::npos;
  store->type = std::move(body.type);
  store->opened_by = message.rank;
}

void ServerMachine::SetOptimizer(const Message& message) {
  Store& store = OpenedStore(message.part.store);
  OptimizerBody body;
  const std::uint64_t generation = GenerationOf(message.version);
  if (!Decode(message.meta, &body)) throw InvalidArgument("the optimizer cannot be read");
  if (generation == 0 || generation > store.generations.size() + 1) {
    throw InvalidArgument(fmt::format("worker {} sets optimizer {} of a store that has had {}",
                                      message.rank, generation, store.generations.size()));
  }
  if (generation <= store.generations.size()) {
    const Generation& known = store.generations[generation - 1];
    if (!SameOptimizer(known.optimizer, body)) {
      throw InvalidArgument(
          fmt::format("optimizer {} of the store is {}, as worker {} has set it; worker {} sets {}",
                      generation, TextOf(known.optimizer), known.rank, message.rank, TextOf(body)));
    }
    if (known.error) std::rethrow_exception(ToException(*known.error));
    return;
  }
  const std::exception_ptr error =
      ErrorOf([&] { control_.SetOptimizer(message.part.store, message.version, body); });
  store.generations.push_back(
      {.optimizer = std::move(body), .rank = message.rank, .version = message.version});
  if (!error) return;
  // Pushes that count on it fail, rather than wait for ever.
  store.generations.back().error = ToErrorBody(error);
  std::rethrow_exception(error);
}

void ServerMachine::SetParameters(const Message& message) {
  Store& store = OpenedStore(message.part.store);
  OptimizerBody body;
  const std::uint64_t generation = GenerationOf(message.version);
  if (!Decode(message.meta, &body)) throw InvalidArgument("the parameters cannot be read");
  if (generation == 0 || generation > store.generations.size()) {
    throw InvalidArgument(
        fmt::format("worker {} sets parameters of optimizer {} of a store that has had {}",
                    message.rank, generation, store.generations.size()));
  }
  Generation& known = store.generations[generation - 1];
  if (known.error) std::rethrow_exception(ToException(*known.error));
  // Pushes of this version go on, with the parameters before if these cannot be set.
  known.version = std::max(known.version, message.version);
  control_.SetParameters(message.part.store, message.version, body);
}

void ServerMachine::SetCompression(const Message& message) {
  OpenedStore(message.part.store);
  CompressionBody body;
  if (!Decode(message.meta, &body)) throw InvalidArgument("the compression cannot be read");
  control_.SetCompression(message.part.store, body.options);
}

void ServerMachine::StartControl(Part& part, const Message& message, Outputs& out) {
  const ControlId id{
      .store = message.part.store, .rank = message.rank, .sequence = message.sequence};
  ControlResult result;
  bool done = true;
  part.Of(message.rank).Extra().running = true;
  const std::exception_ptr error = ErrorOf([&] { done = control_.Start(id, message, &result); });
  if (error) result.error = error;
  if (done || error) EndControl(part, id, std::move(result), out);
}

void ServerMachine::OnControlDone(Time /*now*/, const ControlId& id, ControlResult result,
                                  Outputs& out) {
  EndControl(PartOf(ControlPart(id.store)), id, std::move(result), out);
}

void ServerMachine::EndControl(Part& part, const ControlId& id, ControlResult result,
                               Outputs& out) {
  part.Of(id.rank).Extra().running = false;
  const Message request{.rank = id.rank,
                        .incarnation = WorkerOf(id.rank).incarnation,
                        .part = part.id,
                        .sequence = id.sequence};
  if (result.error) {
    SendError(part, request, ToErrorBody(result.error), out);
    return;
  }
  Message answer = AnswerTo(request, Kind::kDone);
  answer.meta = std::move(result.meta);
  answer.payload = std::move(result.payload);
  SendAnswer(part, std::move(answer), out);
}

std::string ServerMachine::KeysOf(std::uint32_t store) const {
  KeysBody body;
  for (const auto& [id, part] : parts_) {
    if (id.store == store && part->created) body.keys.push_back(part->info.key);
  }
  std::sort(body.keys.begin(), body.keys.end());
  body.keys.erase(std::unique(body.keys.begin(), body.keys.end()), body.keys.end());
  return Encode(body);
}

// S2: rounds that wait for this rank go on without it.
void ServerMachine::Left(Time now, std::int32_t rank, Outputs& out) {
  WorkerOf(rank).left = true;
  WorkerOf(rank).asking.clear();
  for (const auto& [id, part] : parts_) {
    part->Of(rank).slow = 0;
    if (part->created && !FindStore(id.store)->async) Advance(now, *part, out);
  }
}

// Answers.

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
      out.Send(WorkerNode(rank), {.kind = Kind::kAcks,
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

void ServerMachine::SendAnswer(Part& part, Message answer, Outputs& out) {
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
  const NodeId to = WorkerNode(answer.rank);
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

// Peers and time.

void ServerMachine::OnLost(Time /*now*/, NodeId peer, const std::string& address,
                           const std::string& why, Outputs& out) {
  if (failure_ || peer.role == Role::kScheduler) return;
  if (peer.role == Role::kWorker && peer.rank < std::ssize(workers_) && WorkerOf(peer.rank).left) {
    return;
  }
  out.log.emplace_back(LogLevel::kWarning,
                       fmt::format("lost {} ({}): {}", ToString(peer), address, why));
  out.Send(kTheScheduler,
           {.kind = Kind::kPeerDown,
            .meta = Encode(FailureBody{.node = peer, .address = address, .why = why})});
}

std::optional<Time> ServerMachine::next_time() const {
  if (workers_.empty()) return std::nullopt;
  return next_check_;
}

void ServerMachine::OnTime(Time now, Outputs& out) {
  if (workers_.empty() || now < next_check_) return;
  next_check_ = now + options_.warn_after / 2;
  std::size_t waiting = 0;
  for (const auto& [id, part] : parts_) {
    if (!part->waits_since || now < part->warn_at) continue;
    part->warn_at = now + options_.warn_after;
    if (++waiting <= kShownMax) out.log.emplace_back(LogLevel::kWarning, DescribePart(now, *part));
  }
  if (waiting > kShownMax) {
    out.log.emplace_back(LogLevel::kWarning,
                         fmt::format("and {} other parts wait", waiting - kShownMax));
  }
}

// For people.

ServerMachine::Part& ServerMachine::PartOf(const PartId& id) {
  auto& part = parts_[id];
  if (!part) part = std::make_unique<Part>(id, workers_.size());
  return *part;
}

std::string ServerMachine::NameOf(const Part& part) const {
  if (part.control()) return fmt::format("store {}", part.id.store);
  if (!part.created) return fmt::format("key {:016x}, part {}", part.id.key, part.id.part);
  std::string name = fmt::format("key {}", ToString(KeyRef(part.info.key)));
  if (part.info.num_parts > 1) {
    name += fmt::format(", part {} of {}", part.id.part, part.info.num_parts);
  }
  return name;
}

// The ranks that have contributed to the round in progress, or those that have not.
std::string ServerMachine::DescribeRanks(Time now, const Part& part, bool arrived) const {
  std::string text;
  std::size_t count = 0;
  for (std::int32_t rank = 0; rank < std::ssize(part.ranks); ++rank) {
    const Worker& worker = WorkerOf(rank);
    const bool here = part.Of(rank).pushes > part.rounds;
    if (here != arrived || (!here && worker.left)) continue;
    if (++count > kShownMax) continue;
    text += fmt::format("{}{}", count == 1 ? "" : ", ", rank);
    if (here) continue;
    text += worker.heard ? fmt::format(" ({}, last request {} ago)", worker.address,
                                       Seconds(now - *worker.heard))
                         : fmt::format(" ({}, never heard)", worker.address);
  }
  if (count > kShownMax) text += fmt::format(" and {} more", count - kShownMax);
  return text.empty() ? "none" : text;
}

std::string ServerMachine::DescribePart(Time now, const Part& part) const {
  std::string text = NameOf(part);
  if (!part.created) {
    return text + (part.control() ? ": requests in order" : ": not initialised by worker 0");
  }
  const Store* store = FindStore(part.id.store);
  const std::string since =
      part.waits_since ? fmt::format(" for {}", Seconds(now - *part.waits_since)) : "";
  if (store->async) {
    text += fmt::format(": {} updates done{}", part.rounds,
                        part.updating ? ", one is under way" + since : "");
  } else if (part.updating) {
    text += fmt::format(": the update of round {} has been under way{}", part.rounds + 1, since);
  } else {
    text += fmt::format(": round {} has waited{}; arrived: workers {}; missing: workers {}",
                        part.rounds + 1, since, DescribeRanks(now, part, /*arrived=*/true),
                        DescribeRanks(now, part, /*arrived=*/false));
  }
  for (const std::int32_t rank : part.blocked) {
    const Message& first = part.Of(rank).extra->early.begin()->second;
    if (IsPush(first.kind) && !store->Knows(first.version)) {
      text += fmt::format("; a push of worker {} waits for optimizer {}.{}", rank,
                          GenerationOf(first.version), first.version & 0xffffffff);
    }
  }
  if (part.update_error) text += "; its update failed: " + part.update_error->message;
  if (part.input_error) text += "; " + part.input_error->message;
  return text;
}

std::string ServerMachine::DescribeState(Time now) const {
  std::size_t created = 0;
  std::vector<const Part*> waiting;
  for (const auto& [id, part] : parts_) {
    created += part->created ? 1 : 0;
    if (part->waits_since) waiting.push_back(part.get());
  }
  std::string text = fmt::format("server: {} workers, {} stores, {} parts, {} of them wait",
                                 workers_.size(), stores_.size(), created, waiting.size());
  if (workers_.empty())
    text += fmt::format("; {} messages before the roster", before_roster_.size());
  if (failure_) {
    text += fmt::format("\n  failed: lost {} ({}): {}", ToString(failure_->node), failure_->address,
                        failure_->why);
  }
  for (std::int32_t rank = 0; rank < std::ssize(workers_); ++rank) {
    const Worker& worker = WorkerOf(rank);
    text +=
        fmt::format("\n  worker {} ({}): {}, {} bytes of unfinished rounds{}", rank, worker.address,
                    worker.heard ? fmt::format("last request {} ago", Seconds(now - *worker.heard))
                                 : "never heard",
                    worker.unfinished_bytes, worker.left ? ", has left" : "");
  }
  std::sort(waiting.begin(), waiting.end(), [](const Part* a, const Part* b) {
    return std::pair(*a->waits_since, a->id) < std::pair(*b->waits_since, b->id);
  });
  for (std::size_t i = 0; i < std::min(waiting.size(), kShownMax); ++i) {
    text += "\n  " + DescribePart(now, *waiting[i]);
  }
  if (waiting.size() > kShownMax) {
    text += fmt::format("\n  and {} more", waiting.size() - kShownMax);
  }
  return text;
}

}  // namespace heddle::kvstore::dist
