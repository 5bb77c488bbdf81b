// Requests about a whole store: its type, optimizer, compression, commands and states.
#include <heddle/error.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "kvstore/dist/protocol/server_state.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {

namespace {

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

bool SameCompression(const CompressionOptions& a, const CompressionOptions& b) {
  return a.type == b.type && a.threshold == b.threshold;
}

std::string TextOf(const CompressionOptions& options) {
  return fmt::format("type {}, threshold {}", options.type, options.threshold);
}

}  // namespace

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
      error = ErrorOf([&] { answer.meta = KeysOf(message); });
      if (error) break;
      SendAnswer(part, std::move(answer), out);
      return;
    }
    case Kind::kCloseStore:
      error = ErrorOf([&] { CloseStore(message); });
      GoOnAfterClose(now, message, out);
      break;
    case Kind::kLeave:
      error = ErrorOf([&] { Leave(now, message, out); });
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
  if ((message.flags & kFlagFailed) != 0) return TakeBackOptimizer(message);
  Store& store = OpenedStore(message.part.store);
  OptimizerBody body;
  const std::uint64_t generation = GenerationOf(message.version);
  if (!Decode(message.meta, &body)) throw InvalidArgument("the optimizer cannot be read");
  if (generation == 0 || generation > store.generations.size() + 1) {
    throw InvalidArgument(fmt::format("worker {} sets optimizer {} of a store that has had {}",
                                      message.rank, generation, store.generations.size()));
  }
  // One that could not be set is nobody's: its worker, which has been told, may set another.
  const bool is_last = generation == store.generations.size();
  if (is_last && store.generations.back().error) store.generations.pop_back();
  if (generation <= store.generations.size()) {
    Generation& known = store.generations[generation - 1];
    if (!SameOptimizer(known.optimizer, body)) {
      throw InvalidArgument(
          fmt::format("optimizer {} of the store is {}, as worker {} has set it; worker {} sets {}",
                      generation, TextOf(known.optimizer), known.rank, message.rank, TextOf(body)));
    }
    if (known.error) std::rethrow_exception(ToException(*known.error));
    known.set_by.insert(message.rank);
    store.set_by.insert(message.rank);
    return;
  }
  const std::exception_ptr error =
      ErrorOf([&] { control_.SetOptimizer(message.part.store, message.version, body); });
  store.generations.push_back(
      {.optimizer = std::move(body), .rank = message.rank, .version = message.version});
  if (!error) {
    store.generations.back().set_by.insert(message.rank);
    store.set_by.insert(message.rank);
    return;
  }
  // Pushes that count on it fail, rather than wait for ever.
  store.generations.back().error = ToErrorBody(error);
  std::rethrow_exception(error);
}

// The rank's call has failed, on another server perhaps. Those whose calls have not keep what they
// have set; else it is nobody's, as one that could not be set here.
void ServerMachine::TakeBackOptimizer(const Message& message) {
  Store& store = OpenedStore(message.part.store);
  OptimizerBody body;
  const std::uint64_t generation = GenerationOf(message.version);
  if (!Decode(message.meta, &body)) throw InvalidArgument("the optimizer cannot be read");
  if (generation == 0 || generation > store.generations.size()) return;
  Generation& known = store.generations[generation - 1];
  if (!SameOptimizer(known.optimizer, body) || known.set_by.erase(message.rank) == 0) return;
  if (std::ranges::none_of(store.generations, [&](const Generation& other) {
        return other.set_by.contains(message.rank);
      })) {
    store.set_by.erase(message.rank);
  }
  if (!known.set_by.empty()) {
    if (known.rank == message.rank) known.rank = *known.set_by.begin();
    return;
  }
  if (generation < store.generations.size()) return;  // on which the later one counts
  known.error = ErrorBody{
      .code = ErrorBody::Code::kInvalidState,
      .message = fmt::format("worker {} has taken back {}, which could not be set on all servers",
                             message.rank, TextOf(known.optimizer))};
  control_.DropOptimizer(message.part.store, message.version);
  // In dist_async those that have set no optimizer may have been updated by it.
  const std::uint64_t before = generation == 1 ? 0 : store.generations[generation - 2].version;
  for (const auto& [id, part] : parts_) {
    if (id.store == message.part.store) part->version = std::min(part->version, before);
  }
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
  if (body.name != known.optimizer.name) {
    throw InvalidArgument(fmt::format("worker {} sets parameters of optimizer {}, expected {}",
                                      message.rank, body.name, known.optimizer.name));
  }
  control_.SetParameters(message.part.store, message.version, body);
}

// Codes that are held for a round must still be what they were when they came.
void ServerMachine::SetCompression(const Message& message) {
  if ((message.flags & kFlagFailed) != 0) return TakeBackCompression(message);
  Store& store = OpenedStore(message.part.store);
  CompressionBody body;
  if (!Decode(message.meta, &body)) throw InvalidArgument("the compression cannot be read");
  if (store.compression) {
    const CompressionOptions& known = store.compression->body.options;
    if (SameCompression(known, body.options)) {
      store.compression->set_by.insert(message.rank);
      return;
    }
    throw InvalidArgument(
        fmt::format("gradient compression of the store is {}, as worker {} has set it; worker {} "
                    "sets {}",
                    TextOf(known), store.compression->rank, message.rank, TextOf(body.options)));
  }
  control_.SetCompression(message.part.store, body.options);
  store.compression =
      Store::Compression{.body = std::move(body), .rank = message.rank, .set_by = {message.rank}};
}

// As TakeBackOptimizer. A rank whose call has failed sends no codes, so none are held.
void ServerMachine::TakeBackCompression(const Message& message) {
  Store& store = OpenedStore(message.part.store);
  CompressionBody body;
  if (!Decode(message.meta, &body)) throw InvalidArgument("the compression cannot be read");
  std::optional<Store::Compression>& known = store.compression;
  if (!known || !SameCompression(known->body.options, body.options) ||
      known->set_by.erase(message.rank) == 0) {
    return;
  }
  if (!known->set_by.empty()) {
    if (known->rank == message.rank) known->rank = *known->set_by.begin();
    return;
  }
  control_.DropCompression(message.part.store);
  known.reset();
}

void ServerMachine::StartControl(Part& part, const Message& message, Outputs& out) {
  const bool is_of_states = message.kind == Kind::kSaveStates || message.kind == Kind::kLoadStates;
  if (is_of_states && PassesAreUnderWay(message.part.store)) {  // S7
    part.Of(message.rank).Extra().running = message.kind;
    states_requests_.push_back(message);
    return;
  }
  const ControlId id{
      .store = message.part.store, .rank = message.rank, .sequence = message.sequence};
  ControlResult result;
  bool done = true;
  part.Of(message.rank).Extra().running = message.kind;
  std::exception_ptr error;
  if (message.kind == Kind::kLoadStates) error = WhyNoStates(id.store, id.rank);
  if (!error) error = ErrorOf([&] { done = control_.Start(id, message, &result); });
  if (error) result.error = error;
  if (done || error) EndControl(part, id, std::move(result), out);
}

// An update that has failed midway may have left some of the part's states, and of its value, a
// step ahead of the others. A reset forgets them, and those that were loaded before it as well.
std::exception_ptr ServerMachine::WhyNoStates(std::uint32_t store, std::int32_t rank) const {
  for (const auto& [id, part] : parts_) {
    if (id.store != store || !part->created || !part->update_error) continue;
    if (!part->Of(rank).removed) return ToException(UpdateFailure(*part));
  }
  return nullptr;
}

void ServerMachine::StartStates(Outputs& out) {
  for (const Message& request : std::exchange(states_requests_, {})) {
    StartControl(PartOf(request.part), request, out);  // or it goes on waiting
  }
}

void ServerMachine::OnControlDone(Time /*now*/, const ControlId& id, ControlResult result,
                                  Outputs& out) {
  EndControl(PartOf(ControlPart(id.store)), id, std::move(result), out);
}

void ServerMachine::EndControl(Part& part, const ControlId& id, ControlResult result,
                               Outputs& out) {
  const std::optional<Kind> kind = std::exchange(part.Of(id.rank).Extra().running, std::nullopt);
  // By now: what was saved came behind the updates that were under way when it was asked for.
  if (kind == Kind::kSaveStates && !result.error) result.error = WhyNoStates(id.store, id.rank);
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

std::string ServerMachine::KeysOf(const Message& message) const {
  KeysBody before;
  if (!message.meta.empty() && (!Decode(message.meta, &before) || before.keys.empty())) {
    throw InvalidArgument("keys: those before cannot be read");
  }
  const auto bytes_of = [none = Encode(KeysBody{}).size()](const Key& key) {
    return Encode(KeysBody{{key}}).size() - none;
  };
  std::set<Key> keys;
  std::size_t bytes = Encode(KeysBody{}).size();
  bool is_full = false;
  for (const auto& [id, part] : parts_) {
    if (id.store != message.part.store || !part->created || part->Of(message.rank).removed) {
      continue;
    }
    const Key& key = part->info.key;
    if (!before.keys.empty() && !(before.keys.back() < key)) continue;
    if (is_full && !keys.empty() && *keys.rbegin() < key) continue;
    if (!keys.insert(key).second) continue;
    for (bytes += bytes_of(key); bytes > kMetaBytesMax; is_full = true) {
      bytes -= bytes_of(*keys.rbegin());
      keys.erase(std::prev(keys.end()));
    }
  }
  return Encode(KeysBody{{keys.begin(), keys.end()}});
}

void ServerMachine::Leave(Time now, const Message& message, Outputs& out) {
  LeaveBody body;
  if (!message.meta.empty() && !Decode(message.meta, &body)) {
    throw InvalidArgument("the pushes that do not come cannot be read");
  }
  Worker& worker = WorkerOf(message.rank);
  if (worker.missing + body.missing.size() > kMissingPushesMax) {
    throw InvalidArgument(fmt::format("worker {} names {} pushes as missing: expected at most {}",
                                      message.rank, worker.missing + body.missing.size(),
                                      kMissingPushesMax));
  }
  for (const LeaveBody::Push& push : body.missing) {
    const Store& store = OpenedStore(push.part.store);
    const auto part = parts_.find(push.part);
    const bool has_rounds = part != parts_.end() && part->second->created && !store.async;
    if (!has_rounds || part->second->Of(message.rank).removed) {
      throw InvalidArgument(fmt::format("worker {} names pushes of store {}, part {}, as missing",
                                        message.rank, push.part.store, push.part.part));
    }
    if (GenerationOf(push.version) > store.generations.size()) {
      throw InvalidArgument(
          fmt::format("worker {} names a push of optimizer {} of a store that "
                      "has had {}",
                      message.rank, GenerationOf(push.version), store.generations.size()));
    }
  }
  for (const LeaveBody::Push& push : body.missing) {
    PartOf(push.part).Of(message.rank).Extra().missing.push_back(push.version);
  }
  worker.missing += body.missing.size();
  if (!body.more) Left(now, message.rank, out);
}

// S2: rounds that wait for this rank go on without it, and inits that wait for its value fail.
void ServerMachine::Left(Time now, std::int32_t rank, Outputs& out) {
  WorkerOf(rank).left = true;
  WorkerOf(rank).asking.clear();
  for (const auto& [id, part] : parts_) {
    RankState& state = part->Of(rank);
    if (state.extra) WorkerOf(rank).unfinished_bytes -= std::exchange(state.extra->reserved, 0);
    GoOnWithout(now, *part, rank, out);
  }
}

// S9.
void ServerMachine::CloseStore(const Message& message) {
  const std::uint32_t store = message.part.store;
  const std::int32_t rank = message.rank;
  CloseStoreBody body;
  if (!Decode(message.meta, &body)) throw InvalidArgument("the requests to come cannot be read");
  for (const CloseStoreBody::Requests& requests : body.parts) {
    if (requests.part.store != store || requests.part.part == kControlPart) {
      throw InvalidArgument(fmt::format("the close of store {} names part {} of store {}", store,
                                        requests.part.part, requests.part.store));
    }
    // The others' rounds may have gone on without them.
    const std::optional<std::uint64_t> before = RequestsInAll(PartOf(requests.part), rank);
    if (before && *before < requests.count) {
      throw InvalidState(
          fmt::format("worker {} has closed the store, and announces more requests", rank));
    }
  }
  Worker& worker = WorkerOf(rank);
  const auto before = worker.closed.find(store);
  const std::uint32_t close = before == worker.closed.end() ? 1 : before->second + 1;
  for (const CloseStoreBody::Requests& requests : body.parts) {
    RankExtra& extra = PartOf(requests.part).Of(rank).Extra();
    extra.requests_in_all = requests.count;
    extra.said_by_close = close;
  }
  if (!body.more) worker.closed[store] = close;
}

// What a rank has closed is looked at: it may be gone from some of its parts.
void ServerMachine::GoOnAfterClose(Time now, const Message& message, Outputs& out) {
  if (!WorkerOf(message.rank).closed.contains(message.part.store)) return;
  for (const auto& [id, part] : parts_) {
    if (id.store == message.part.store) GoOnWithout(now, *part, message.rank, out);
  }
}

// The rank may be gone from the part.
void ServerMachine::GoOnWithout(Time now, Part& part, std::int32_t rank, Outputs& out) {
  part.Of(rank).slow = 0;
  if (part.control()) return;
  if (!part.created) {
    DrainBlocked(now, part, out);
  } else if (FindStore(part.id.store)->async) {
    DropIfUnwanted(part);
  } else {
    Advance(now, part, out);
  }
}

}  // namespace heddle::kvstore::dist
