// What the processes of a job add to the traces of their engines (engine/trace_format.h): who they
// are, the messages that they send and receive, and what servers do with the parts of keys.
//
// One id goes through all of them, that of a request: worker, store, key, part and sequence
// number. The numbers are those of docs/wire.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/trace_format.h"

namespace heddle::kvstore::dist {

enum class TraceDirection : std::uint8_t { kSent = 0, kReceived = 1 };
enum class TraceAction : std::uint8_t {
  kCreate = 0,  // the first value of a part
  kMerge = 1,   // a push is added to the sum of its round
  kUpdate = 2,  // the sum goes to the updater
  kDrop = 3,    // the sum is forgotten: the round fails
  kRead = 4,    // a value is taken for an answer
  kReset = 5,
};

// Who the process is in its job.
struct TracePlaceRecord {
  std::uint32_t head = engine::TraceRecordHead(engine::TraceKind::kPlace, 24);
  std::int32_t rank = 0;
  std::uint64_t incarnation = 0;
  std::uint8_t role = 0;
  std::uint8_t reserved[3] = {};
  std::uint32_t job = 0;  // of the job's id: two jobs with ids have different ones; 0: it has none
};

// A message, on the thread that gave it to the transport, or took it from there and did what
// followed.
struct TraceMessageRecord {
  std::uint32_t head = engine::TraceRecordHead(engine::TraceKind::kMessage, 80);
  std::int32_t rank = 0;
  std::uint64_t started_ns = 0;
  std::uint64_t ended_ns = 0;
  std::uint64_t key = 0;
  std::uint32_t part = 0;
  std::uint32_t store = 0;
  std::uint64_t sequence = 0;
  std::uint64_t version = 0;
  std::uint64_t payload_bytes = 0;
  std::uint64_t op = 0;  // of sent requests: the ticket of the op that they are of, plus 1; 0: none
  std::uint8_t kind = 0;
  std::uint8_t flags = 0;
  TraceDirection direction{};
  std::uint8_t peer_role = 0;
  std::int32_t peer_rank = 0;
};

// `rank` and `sequence` are those of the request, where it is for one; else rank is -1.
struct TracePartRecord {
  std::uint32_t head = engine::TraceRecordHead(engine::TraceKind::kPart, 56);
  std::int32_t rank = -1;
  std::uint64_t started_ns = 0;
  std::uint64_t ended_ns = 0;
  std::uint64_t key = 0;
  std::uint32_t part = 0;
  std::uint32_t store = 0;
  std::uint64_t sequence = 0;
  TraceAction action{};
  std::uint8_t reserved[7] = {};
};

static_assert(sizeof(TracePlaceRecord) == 24 && sizeof(TraceMessageRecord) == 80);
static_assert(sizeof(TracePartRecord) == 56);

}  // namespace heddle::kvstore::dist
