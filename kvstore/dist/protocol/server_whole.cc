// Updates that need sums over a whole array, whose parts lie on several servers: the parts that are
// here go through each pass together, and what a pass has summed goes to the other servers, each of
// which adds all sums in the order of the array. Nothing here depends on what comes first: sums and
// failures name the round and the pass that they are of.
//
// The first pass changes the optimizer's states, so it waits until all servers have said that their
// parts have the sum of the round: pass 0 of what they tell one another, without sums. A round that
// fails before that is one of a failed input, in all parts, and leaves no trace.
#include <heddle/error.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/protocol/server_state.h"

namespace heddle::kvstore::dist {

namespace {

// Of an array, that others may be ahead: rounds that fail wait for nobody. More than any worker
// keeps in flight.
constexpr std::size_t kRoundsMax = 1 << 16;

// Of an input: no pass of the round has begun anywhere.
bool IsOfInput(const ErrorBody& error) { return error.code == ErrorBody::Code::kInputFailed; }

}  // namespace

ServerMachine::Whole& ServerMachine::WholeOf(const PartId& id) {
  const PartId array{.store = id.store, .part = 0, .key = id.key};
  return wholes_.try_emplace({id.store, id.key}, Whole{.id = array}).first->second;
}

// Where the parts of the array are. An error if it is cut otherwise here than this part says.
std::exception_ptr ServerMachine::LearnWhole(const PartId& id) {
  Whole& whole = WholeOf(id);
  if (whole.array) return nullptr;
  return ErrorOf([&] { whole.array = values_.WholeOf(id); });
}

void ServerMachine::JoinWhole(Time now, Part& part, Outputs& out) {
  Whole& whole = WholeOf(part.id);
  Whole::Round& round = whole.rounds[part.rounds + 1];
  ++round.come;
  round.parts.push_back(&part);
  round.by = part.by;
  if (round.error) FailWhole(whole, part.rounds + 1, *round.error, out);
  ContinueWhole(now, whole, part.rounds + 1, out);
}

// The part's round has failed: those of the other parts cannot end well. The other servers hear of
// it from the first part that knows where they are.
void ServerMachine::SkipWhole(Time now, Part& part, Outputs& out) {
  Whole& whole = WholeOf(part.id);
  Whole::Round& round = whole.rounds[part.rounds + 1];
  ++round.come;
  ErrorBody error = part.input_error ? *part.input_error : *part.update_error;
  if (!part.input_error) error.code = ErrorBody::Code::kUpdateFailed;
  if (!whole.array) {
    if (!round.error) round.error = std::make_unique<ErrorBody>(error);
    return;
  }
  FailWhole(whole, part.rounds + 1, error, out);
  ContinueWhole(now, whole, part.rounds + 1, out);
}

// Runs passes until one waits, or the round has ended.
void ServerMachine::ContinueWhole(Time now, Whole& whole, std::uint64_t number, Outputs& out) {
  while (true) {
    Whole::Round& round = whole.rounds.at(number);
    if (round.running || !whole.array) return;
    if (round.error) return EndWhole(now, whole, number, out);
    if (round.parts.size() < whole.array->parts_here) return;
    if (round.pass > 0) {
      const OthersSums& sums = round.received[round.pass - 1];
      const auto is_here = [&](std::int32_t server) { return sums.contains(server); };
      if (!std::ranges::all_of(whole.array->others, is_here)) return;
    }
    PassResult result;
    if (round.pass > 0 && !RunWholePass(whole, number, &result)) return;
    if (!TakeWholePass(now, whole, number, std::move(result), out)) return;
  }
}

// False: it goes on elsewhere.
bool ServerMachine::RunWholePass(Whole& whole, std::uint64_t number, PassResult* result) {
  Whole::Round& round = whole.rounds.at(number);
  std::vector<PartId> ids;
  for (const Part* part : round.parts) ids.push_back(part->id);
  OthersSums sums = std::move(round.received.extract(round.pass - 1).mapped());
  if (round.pass == 1) sums.clear();            // none have been summed
  std::erase_if(sums, [&](const auto& entry) {  // that came before it was known who has parts
    return !std::ranges::binary_search(whole.array->others, entry.first);
  });
  round.running = true;
  bool done = true;
  const std::exception_ptr thrown = ErrorOf([&] {
    done =
        values_.RunPass(ids, round.by, static_cast<int>(round.pass) - 1, std::move(sums), result);
  });
  if (thrown) result->error = thrown;
  return done || thrown;
}

void ServerMachine::OnPassed(Time now, const PartId& part, PassResult result, Outputs& out) {
  Whole& whole = WholeOf(part);
  const std::uint64_t round = PartOf(part).rounds + 1;
  if (TakeWholePass(now, whole, round, std::move(result), out)) {
    ContinueWhole(now, whole, round, out);
  }
}

// False: the round has ended.
bool ServerMachine::TakeWholePass(Time now, Whole& whole, std::uint64_t number, PassResult result,
                                  Outputs& out) {
  Whole::Round& round = whole.rounds.at(number);
  round.running = false;
  if (result.error) {
    ErrorBody error = ToErrorBody(result.error);
    error.code = ErrorBody::Code::kUpdateFailed;
    FailWhole(whole, number, error, out);
    return true;
  }
  if (result.last) {
    EndWhole(now, whole, number, out);
    return false;
  }
  TellOthers(whole,
             {.kind = Kind::kBlockSums,
              .dtype = DType::kFloat64,
              .part = whole.id,
              .sequence = number,
              .version = round.pass,
              .payload = std::move(result.sums)},
             out);
  ++round.pass;
  return true;
}

// The update of the parts that have come, well or with the round's error; of those that have not,
// when they come.
void ServerMachine::EndWhole(Time now, Whole& whole, std::uint64_t number, Outputs& out) {
  Whole::Round& round = whole.rounds.at(number);
  const std::vector<Part*> parts = std::exchange(round.parts, {});
  std::optional<ErrorBody> error;
  if (round.error) error = *round.error;
  if (error && parts.size() == whole.array->parts_here) values_.DropPasses(whole.id);
  if (round.come == whole.array->parts_here) {
    whole.ended = number;
    whole.rounds.erase(whole.rounds.begin(), whole.rounds.upper_bound(number));
  }
  const bool of_input = error && IsOfInput(*error);
  for (Part* part : parts) {
    if (error) values_.DropSum(part->id);
    if (of_input) part->input_error = std::make_unique<ErrorBody>(*error);
    OnUpdated(now, part->id, error && !of_input ? ToException(*error) : nullptr, out);
  }
  StartStates(out);
}

bool ServerMachine::PassesAreUnderWay(std::uint32_t store) const {
  return std::ranges::any_of(wholes_, [store](const auto& entry) {
    return entry.first.first == store &&
           std::ranges::any_of(entry.second.rounds, [](const auto& numbered) {
             return numbered.second.running || (numbered.second.pass > 0 && !numbered.second.error);
           });
  });
}

void ServerMachine::FailWhole(Whole& whole, std::uint64_t number, const ErrorBody& error,
                              Outputs& out) {
  Whole::Round& round = whole.rounds.at(number);
  if (!round.error) round.error = std::make_unique<ErrorBody>(error);
  if (std::exchange(round.told, true)) return;
  TellOthers(whole,
             {.kind = Kind::kBlockSums,
              .flags = kFlagFailed,
              .part = whole.id,
              .sequence = number,
              .version = round.pass,
              .meta = Encode(error)},
             out);
}

void ServerMachine::TellOthers(const Whole& whole, const Message& message, Outputs& out) {
  for (const std::int32_t server : whole.array->others) {
    Message copy = message;
    copy.rank = self_;
    copy.incarnation = peers_[self_].incarnation;
    Peer& peer = peers_[server];
    if (peer.linked) {
      out.Send({.role = Role::kServer, .rank = server}, std::move(copy));
    } else {
      peer.unsent.push_back(std::move(copy));
    }
  }
}

void ServerMachine::OnLinked(std::int32_t server, Outputs& out) {
  Peer& peer = peers_[server];
  peer.linked = true;
  for (Message& message : std::exchange(peer.unsent, {})) {
    out.Send({.role = Role::kServer, .rank = server}, std::move(message));
  }
}

void ServerMachine::OnBlockSums(Time now, std::int32_t from, const Message& message, Outputs& out) {
  const auto peer = peers_.find(from);
  if (message.kind != Kind::kBlockSums || peer == peers_.end() ||
      message.incarnation != peer->second.incarnation) {
    return;
  }
  Whole& whole = WholeOf(message.part);
  const RoundPass at = PassOf(message);
  if (at.round <= whole.ended) return;  // came twice
  if (whole.rounds.size() >= kRoundsMax && !whole.rounds.contains(at.round)) {
    out.log.emplace_back(LogLevel::kWarning,
                         fmt::format("server {} sends sums of round {} of key {:016x}, of which "
                                     "round {} has ended here",
                                     from, at.round, message.part.key, whole.ended));
    return;
  }
  if (whole.array && !std::ranges::binary_search(whole.array->others, from)) {
    out.log.emplace_back(
        LogLevel::kWarning,
        fmt::format("server {} sends sums of key {:016x}, of which it has no parts", from,
                    message.part.key));
    return;
  }
  Whole::Round& round = whole.rounds[at.round];
  if ((message.flags & kFlagFailed) != 0) {
    ErrorBody error;
    if (!Decode(message.meta, &error)) error.message = "an error that cannot be read";
    error.message = fmt::format("server {}: {}", from, error.message);
    if (!round.error) round.error = std::make_unique<ErrorBody>(std::move(error));
  } else if (at.pass + 1 >= round.pass) {
    round.received[at.pass].emplace(from, message.payload);
  }
  ContinueWhole(now, whole, at.round, out);
}

// Whom the update under way waits for; empty: nobody else.
std::string ServerMachine::DescribeWhole(const Part& part) const {
  const auto found = wholes_.find({part.id.store, part.id.key});
  if (found == wholes_.end() || !found->second.array) return {};
  const Whole& whole = found->second;
  const auto round = whole.rounds.find(part.rounds + 1);
  if (round == whole.rounds.end() || round->second.running) return {};
  if (round->second.come < whole.array->parts_here) {
    return fmt::format("; it needs all {} parts of the array that are here, and has {}",
                       whole.array->parts_here, round->second.come);
  }
  if (round->second.pass == 0) return {};
  const auto sums = round->second.received.find(round->second.pass - 1);
  std::string text;
  for (const std::int32_t server : whole.array->others) {
    if (sums != round->second.received.end() && sums->second.contains(server)) continue;
    text += fmt::format("{} {}", text.empty() ? "; it needs sums of server" : ",", server);
  }
  return text;
}

}  // namespace heddle::kvstore::dist
