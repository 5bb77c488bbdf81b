// Messages: what the nodes of a job tell one another. docs/wire.md has them byte by byte.
//
// The same fixed header stands before every message, so that a transport can route, order and
// receive one without knowing what it is about. `meta` holds what only some kinds have, encoded as
// bodies.h says; `payload` is the bytes of arrays.
#pragma once

#include <heddle/dtype.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/ids.h"

namespace heddle::kvstore::dist {

// The values are those on the wire. bodies.h says what `meta` holds.
enum class Kind : std::uint8_t {
  // Handshake of a connection; known to transports alone.
  kHello = 1,
  kChallenge = 2,
  kProof = 3,
  kWelcome = 4,
  kRefused = 5,  // also answers what cannot be understood; the connection is closed behind it
  // Of a connection; likewise. `sequence` messages have been received on it.
  kReceived = 6,

  // Between a node and the scheduler.
  kJoin = 10,
  kRoster = 11,     // all have joined: who they are
  kHeartbeat = 12,  // both ways
  kPeerDown = 13,   // a node has lost another one
  kJobFailed = 14,  // to all, and from servers to workers: which node failed, and how
  kBarrier = 15,    // sequence: the how many-th of this worker
  kBarrierDone = 16,
  kLeaveJob = 17,  // a worker's orderly end
  kShutdown = 18,  // to the servers: all workers have left
  kShutdownDone = 19,
  kStatus = 20,
  kStatusReply = 21,

  // From a worker to a server, about a part. Each takes the next sequence number of that part.
  kInit = 30,  // with a value: rank 0's; without: waits until the value is there
  kPush = 31,
  kPull = 32,
  kPushPull = 33,
  kRowPull = 34,  // payload: int64 row ids, sorted and unique
  kReset = 35,
  kDescribe = 36,  // what is the key?
  kRemove = 37,    // the worker's last request about the part

  // From a worker to a server, about all of it: part kControlPart.
  kOpenStore = 40,
  kSetOptimizer = 41,
  kSetParameters = 42,
  kSetCompression = 43,
  kCommand = 44,
  kSaveStates = 45,
  kLoadStates = 46,
  kKeys = 47,
  kLeave = 48,       // all that this worker pushed is acknowledged, and nothing more will come
  kCloseStore = 49,  // about the store's parts no more requests will come than it says

  // From a server to a worker.
  kAcks = 60,    // pushes that are recorded
  kValue = 61,   // answers kPull, kPushPull, kRowPull, kDescribe
  kDone = 62,    // answers the others
  kError = 63,   // answers any request
  kCredit = 64,  // round `version` of the part is complete
  kGrant = 65,   // answers kAsk: push number `sequence` may be sent

  // From a worker to a server whose byte cap its unfinished pushes have reached.
  kAsk = 66,  // may push number `sequence` be sent?

  // Between servers.
  kBlockSums = 80,  // of a shard, for optimizers that need norms of the whole array
};

// "push", "set_optimizer", ...; empty for what is none of them.
std::string_view Name(Kind kind);

constexpr bool IsPush(Kind kind) { return kind == Kind::kPush || kind == Kind::kPushPull; }

// Bits of Message::flags.
inline constexpr std::uint8_t kFlagRowSparse = 1;   // payload: int64 row ids, then the rows
inline constexpr std::uint8_t kFlagCompressed = 2;  // payload: codes of the store's compression
inline constexpr std::uint8_t kFlagRates = 4;       // meta begins with the rates of the update
// A push whose input failed; meta: the error. A kSetOptimizer that has failed, to be taken back.
inline constexpr std::uint8_t kFlagFailed = 8;
inline constexpr std::uint8_t kFlagNoValue = 16;  // kInit of other ranks than 0
inline constexpr std::uint8_t kFlagLast = 32;     // kBarrier: the worker calls no more

// Bytes of arrays, as runs in order, and who keeps them alive. The bytes do not change while any
// copy of the payload lives. Cheap to copy.
class Payload {
 public:
  Payload() = default;
  Payload(std::shared_ptr<const void> owner, std::span<const std::byte> run)
      : owner_(std::move(owner)), run_(run), has_run_(true), bytes_(run.size()) {}
  Payload(std::shared_ptr<const void> owner, std::vector<std::span<const std::byte>> runs)
      : owner_(std::move(owner)), runs_(std::move(runs)) {
    for (const auto& run : runs_) bytes_ += run.size();
  }

  std::uint64_t bytes() const { return bytes_; }
  bool empty() const { return bytes_ == 0; }
  std::span<const std::span<const std::byte>> runs() const {
    if (has_run_) return {&run_, 1};
    return runs_;
  }
  const std::shared_ptr<const void>& owner() const { return owner_; }
  // Nobody else will ever read or write the bytes: whoever holds the payload may keep and change
  // them. Transports say so of what they have received into memory of their own.
  bool owned_alone() const { return owned_alone_; }
  void set_owned_alone() { owned_alone_ = true; }

 private:
  std::shared_ptr<const void> owner_;
  std::span<const std::byte> run_;                // the only one, or
  std::vector<std::span<const std::byte>> runs_;  // all
  bool has_run_ = false;
  bool owned_alone_ = false;
  std::uint64_t bytes_ = 0;
};

struct Message {
  Kind kind{};
  std::uint8_t flags = 0;
  DType dtype = DType::kFloat32;  // of the payload's elements; of a pull: what to cast to
  std::int32_t rank = 0;          // of requests and of their answers: the worker's
  std::int32_t priority = 0;      // higher first; answers have their request's
  Incarnation incarnation = 0;    // of requests and of their answers: the worker's
  PartId part = {};
  std::uint64_t sequence = 0;  // of requests and of their answers: which one of that worker, from 0
  // Of pushes: the version of the optimizer that the worker knows. Of answers: the rounds of the
  // part that are complete (in dist_async: its updates).
  std::uint64_t version = 0;
  // On a connection that can be cut: so many more messages have come the other way than was said
  // before. The transport's, set as the message leaves.
  std::uint8_t arrivals = 0;
  std::string meta = {};
  Payload payload = {};
  // Of requests at their worker, for traces: the ticket of the op that they are of, plus 1; 0:
  // none. Does not travel.
  std::uint64_t op = 0;

  std::uint64_t body_bytes() const { return meta.size() + payload.bytes(); }  // behind the header
};

}  // namespace heddle::kvstore::dist
