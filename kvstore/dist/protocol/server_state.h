// What a server's machine keeps, and what the files of ServerMachine share: server.cc takes
// requests in order and answers them, server_rounds.cc sums and updates, server_stores.cc has what
// is about a whole store, server_describe.cc what people are told.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <boost/container/flat_map.hpp>

#include "kvstore/dist/protocol/server.h"

namespace heddle::kvstore::dist {

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

// A push that waits for its place in the sum.
struct ServerMachine::Contribution {
  Message message;
  std::optional<UpdateRates> rates = {};
  std::unique_ptr<ErrorBody> error = nullptr;
};

// What few ranks of few parts need.
struct ServerMachine::RankExtra {
  std::map<std::uint64_t, Message> early;  // by sequence; the first may be the next, blocked
  std::optional<UpdateRates> rates;        // that the rank sent last,
  std::uint64_t rates_generation = 0;      // for that optimizer
  std::vector<Message> answers;            // for requests that come again
  std::optional<std::uint64_t> ask;        // a push that waits for kGrant
  std::uint64_t ask_bytes = 0;
  // Bytes of a push that is granted, among Worker::unfinished_bytes, and its sequence number.
  std::uint64_t reserved = 0;
  std::uint64_t reserved_for = 0;
  std::optional<Kind> running;  // the kind of the control request under way
  // Versions of the pushes after RankState::pushes that do not come: the rank has left.
  std::vector<std::uint64_t> missing;
  // As the rank has said when it closed the store, and which time it was.
  std::uint64_t requests_in_all = 0;
  std::uint32_t said_by_close = 0;
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
  bool blocked = false;       // is among Part::blocked
  bool removed = false;       // kRemove has come: the last request
  std::uint8_t slow = 0;      // rounds in a row, up to what counts
  std::uint32_t slow_ms = 0;  // that they took, likewise

  RankExtra& Extra() {
    if (!extra) extra = std::make_unique<RankExtra>();
    return *extra;
  }
  // That the rank sent last, if it was for that optimizer.
  std::optional<UpdateRates> RatesFor(std::uint64_t generation) const {
    return extra && extra->rates_generation == generation ? extra->rates : std::nullopt;
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
  std::set<std::int32_t> set_by = {};             // ranks; without an error
};

struct ServerMachine::Store {
  struct Compression {
    CompressionBody body;
    std::int32_t rank;              // that came first
    std::set<std::int32_t> set_by;  // ranks
  };

  std::string type;
  bool async = false;
  std::int32_t opened_by = 0;
  std::vector<Generation> generations;
  std::set<std::int32_t> set_by;  // ranks that have set one of them
  std::optional<Compression> compression;

  bool Knows(std::uint64_t version) const {
    const std::uint64_t generation = GenerationOf(version);
    return generation == 0 ||
           (generation <= generations.size() && version <= generations[generation - 1].version);
  }
  bool CanUse(std::uint64_t version) const {  // which it knows
    const std::uint64_t generation = GenerationOf(version);
    return generation == 0 || !generations[generation - 1].error;
  }
  // Of the optimizer that was set last, with its first parameters: later ones of them come with a
  // push. 0: there is none.
  std::uint64_t LastVersion() const {
    std::uint64_t generation = generations.size();
    while (generation > 0 && generations[generation - 1].error) --generation;
    return generation << 32;
  }
};

struct ServerMachine::Worker {
  Incarnation incarnation = 0;
  std::string address;
  bool left = false;
  std::uint64_t missing = 0;  // pushes that it has named when it left
  boost::container::flat_map<std::uint32_t, std::uint32_t> closed{};  // stores, and how often
  bool asks = false;  // has reached the byte cap: wants to hear of each complete round
  std::optional<Time> heard;
  std::optional<Time> slow_named;
  std::uint64_t unfinished_bytes = 0;  // recorded or granted, of rounds that are not complete
  std::vector<Part*> asking;
  std::vector<AcksBody::Ack> acks;
};

// Another server.
struct ServerMachine::Peer {
  Incarnation incarnation = 0;
  bool linked = false;
  std::vector<Message> unsent{};  // until it is
};

// An array whose parts are updated together.
struct ServerMachine::Whole {
  // One that has begun here or on another server, and has not ended here.
  struct Round {
    std::vector<Part*> parts{};  // have their sums, and wait for the end of the update
    std::size_t come = 0;        // those, and those whose round has failed
    UpdateBy by{};
    std::uint64_t pass = 0;
    bool running = false;
    std::map<std::uint64_t, OthersSums> received{};  // by pass
    std::unique_ptr<ErrorBody> error = nullptr;
    bool told = false;  // the others know of the error from here
  };

  PartId id;
  std::optional<WholeArray> array{};  // once a part of it is here
  std::map<std::uint64_t, Round> rounds{};
  std::uint64_t ended = 0;  // the last one
};

inline ServerMachine::Worker& ServerMachine::WorkerOf(std::int32_t rank) {
  return workers_[static_cast<std::size_t>(rank)];
}

inline const ServerMachine::Worker& ServerMachine::WorkerOf(std::int32_t rank) const {
  return workers_[static_cast<std::size_t>(rank)];
}

inline bool ServerMachine::HasLeftPart(const Part& part, std::int32_t rank) const {
  return WorkerOf(rank).left || part.Of(rank).removed;
}

// Nothing: it has not closed the store.
inline std::optional<std::uint64_t> ServerMachine::RequestsInAll(const Part& part,
                                                                 std::int32_t rank) const {
  const Worker& worker = WorkerOf(rank);
  const auto closed = worker.closed.find(part.id.store);
  if (closed == worker.closed.end()) return std::nullopt;
  const RankState& state = part.Of(rank);
  // What an earlier close said of the part the last one has taken back.
  const bool said = state.extra && state.extra->said_by_close >= closed->second;
  return said ? std::max(state.extra->requests_in_all, state.next) : state.next;
}

inline bool ServerMachine::IsGone(const Part& part, std::int32_t rank) const {
  if (HasLeftPart(part, rank)) return true;
  const std::optional<std::uint64_t> requests = RequestsInAll(part, rank);
  return requests && part.Of(rank).next == *requests;
}

inline const ServerMachine::Store* ServerMachine::FindStore(std::uint32_t store) const {
  const auto found = stores_.find(store);
  return found == stores_.end() ? nullptr : found->second.get();
}

}  // namespace heddle::kvstore::dist
