// What Message::meta holds, by kind. Encoded little-endian, lengths first; docs/wire.md has the
// bytes.
//
// Decode is for bytes of strangers: it never reads beyond `meta`, never allocates more than a small
// multiple of it, and takes exactly all of it; false for anything else, and `body` is unspecified.
#pragma once

#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/part_store.h"

namespace heddle::kvstore::dist {

// One node of a job as the scheduler knows it.
struct NodeEntry {
  NodeId node;
  Incarnation incarnation = 0;
  std::string address;  // where it listens: "127.0.0.1:9091"; of a worker: where it comes from

  friend bool operator==(const NodeEntry&, const NodeEntry&) = default;
};

struct JoinBody {  // kJoin
  Role role = Role::kWorker;
  std::int32_t rank = -1;  // -1: in the order of joining
  Incarnation incarnation = 0;
  std::string address;
  // What the node was told of the job; all nodes must agree. 0: nothing.
  std::int32_t num_workers = 0;
  std::int32_t num_servers = 0;
};

struct RosterBody {       // kRoster
  std::int32_t rank = 0;  // of the receiver
  std::int32_t num_workers = 0;
  std::int32_t num_servers = 0;
  std::uint64_t epoch = 0;       // counts the rosters of a job; today there is one
  std::int64_t slice_bytes = 0;  // how arrays are cut (Placement); the same on all nodes
  std::int64_t cut_bytes = 0;
  std::vector<NodeEntry> nodes{};  // to workers the servers alone
};

struct FailureBody {  // kPeerDown, kJobFailed
  NodeId node;
  std::string address;
  std::string why;
};

// kHeartbeat of a node that is in the roster: what it has done so far, and what waits.
struct StateBody {
  std::uint64_t requests = 0;  // of a worker: that its program made; of a server: that it took
  std::uint64_t bytes = 0;     // of their arrays
  std::uint64_t rounds =
      0;  // of a server: rounds of parts that are complete, in dist_async updates
  std::uint64_t waiting = 0;  // of a worker: requests without an answer; of a server: bytes of
                              // rounds that are not complete
  std::uint32_t stalled = 0;  // of a server: parts that have waited for the warning time
  std::string stall{};        // the one that has waited longest, in words

  friend bool operator==(const StateBody&, const StateBody&) = default;
};

struct InitBody {  // kInit, kReset; and the kValue that answers kDescribe
  PartInfo info;
};
// Whether the bytes of the array, and those of a row and its id, are at most 2^63 - 1. Parts of
// others are not decoded.
bool HasCountableBytes(const PartInfo& info);

struct RatesBody {  // first in meta with kFlagRates, always kRatesBytes
  UpdateRates rates;
};
inline constexpr std::size_t kRatesBytes = 16;

struct ErrorBody {  // kError, kRefused; a push with kFlagFailed
  // Which exception it becomes at the worker.
  enum class Code : std::uint8_t {
    kOther = 0,
    kInvalidArgument = 1,
    kInvalidState = 2,
    kUnknownKey = 3,
    kInputFailed = 4,  // a push of the round had a failed input
    kUpdateFailed = 5,
    kNetwork = 6,
    kTimeout = 7,
    kOutOfMemory = 8,
    kIo = 9,
    kOp = 10,
  };
  Code code = Code::kOther;
  std::string message;
};

struct AcksBody {  // kAcks: of the receiver's pushes
  struct Ack {
    PartId part;
    std::uint64_t sequence = 0;

    friend bool operator==(const Ack&, const Ack&) = default;
  };
  std::vector<Ack> acks;
};

struct OpenStoreBody {  // kOpenStore
  std::string type;     // "dist_sync"
};

struct OptimizerBody {  // kSetOptimizer, kSetParameters
  std::string name;
  std::vector<std::pair<std::string, double>> parameters{};
};

struct CompressionBody {  // kSetCompression
  CompressionOptions options;
};

// heddle's own command: the body names the file that the server records a trace to; empty: no more.
inline constexpr std::int32_t kTraceCommand = std::numeric_limits<std::int32_t>::min();

struct CommandBody {  // kCommand
  std::int32_t head = 0;
  std::string body;
};

// Answers kKeys, which asks for those behind the last of such a list; without meta: from the first
// on. As many as a message takes, in order; none: there are no more.
struct KeysBody {
  std::vector<Key> keys;
};

// kCloseStore: of these parts, how many requests the worker makes in all, or fewer. Of the store's
// others it has made them, and the server has taken them. Another one takes the place of the last.
struct CloseStoreBody {
  struct Requests {
    PartId part;
    std::uint64_t count = 0;

    friend bool operator==(const Requests&, const Requests&) = default;
  };
  bool more = false;  // parts are named in the next message
  std::vector<Requests> parts{};
};

// kLeave, which has no meta if there are none: pushes of the worker that do not come, of each part
// in order. Their rounds fail.
struct LeaveBody {
  struct Push {
    PartId part;
    std::uint64_t version = 0;  // as Message::version

    friend bool operator==(const Push&, const Push&) = default;
  };
  bool more = false;  // others are named in the next message, which is of the same leave
  std::vector<Push> missing{};
};

struct AskBody {            // kAsk
  std::uint64_t bytes = 0;  // 0: nothing is to be sent, only the complete rounds are asked for
};

struct TextBody {  // kStatusReply (JSON)
  std::string text;
};

// The state of one part for an optimizer, in kSaveStates' answer and kLoadStates; the arrays follow
// one another in the payload.
struct PartStates {
  PartId part;
  PartInfo info;
  std::int64_t updates = 0;
  std::vector<double> numbers;
  struct Array {
    std::string name;  // "momentum", "master"
    DType dtype = DType::kFloat32;
    std::int64_t elements = 0;
  };
  std::vector<Array> arrays;
};
inline constexpr std::size_t kStatesMetaBytesMax = 512 << 10;  // in one message, unless of one part
inline constexpr std::uint64_t kStatesPayloadBytesMax = std::uint64_t{256} << 20;
struct SaveStatesBody {  // kSaveStates: the states of the parts behind that one, in order, as many
  PartId after;          // as a message takes; without meta: from the first part on
};
struct StatesBody {
  OptimizerBody optimizer;
  std::vector<PartStates> parts;
};

std::string Encode(const JoinBody& body);
std::string Encode(const RosterBody& body);
std::string Encode(const FailureBody& body);
std::string Encode(const StateBody& body);
std::string Encode(const InitBody& body);
std::string Encode(const RatesBody& body);
std::string Encode(const ErrorBody& body);
std::string Encode(const AcksBody& body);
std::string Encode(const OpenStoreBody& body);
std::string Encode(const OptimizerBody& body);
std::string Encode(const CompressionBody& body);
std::string Encode(const CommandBody& body);
std::string Encode(const KeysBody& body);
std::string Encode(const CloseStoreBody& body);
std::string Encode(const LeaveBody& body);
std::string Encode(const AskBody& body);
std::string Encode(const TextBody& body);
std::string Encode(const SaveStatesBody& body);
std::string Encode(const StatesBody& body);

bool Decode(std::string_view meta, JoinBody* body);
bool Decode(std::string_view meta, RosterBody* body);
bool Decode(std::string_view meta, FailureBody* body);
bool Decode(std::string_view meta, StateBody* body);
bool Decode(std::string_view meta, InitBody* body);
bool Decode(std::string_view meta, RatesBody* body);
bool Decode(std::string_view meta, ErrorBody* body);
bool Decode(std::string_view meta, AcksBody* body);
bool Decode(std::string_view meta, OpenStoreBody* body);
bool Decode(std::string_view meta, OptimizerBody* body);
bool Decode(std::string_view meta, CompressionBody* body);
bool Decode(std::string_view meta, CommandBody* body);
bool Decode(std::string_view meta, KeysBody* body);
bool Decode(std::string_view meta, CloseStoreBody* body);
bool Decode(std::string_view meta, LeaveBody* body);
bool Decode(std::string_view meta, AskBody* body);
bool Decode(std::string_view meta, TextBody* body);
bool Decode(std::string_view meta, SaveStatesBody* body);
bool Decode(std::string_view meta, StatesBody* body);

// What users know as an OpError, and calls of the store tell from others: nothing was updated.
class InputFailed : public OpError {
 public:
  using OpError::OpError;
};

// The exception that an error becomes, with that message: UnknownKey of kUnknownKey, InputFailed of
// kInputFailed, OpError of kUpdateFailed and kOp, and so on; Error of kOther.
std::exception_ptr ToException(const ErrorBody& error);
// The inverse, as far as types go; a foreign exception becomes kOther with its what().
ErrorBody ToErrorBody(const std::exception_ptr& error);

}  // namespace heddle::kvstore::dist
