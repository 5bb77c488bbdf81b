// Reads the trace files that an engine writes (docs/trace.md), also those of a killed or running
// process.
#pragma once

#include <heddle/device.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/trace.h"
#include "kvstore/dist/trace_records.h"

namespace heddle::tools {

struct TraceAccessTo {
  std::uint64_t var;
  engine::TraceAccess access;
};

struct TracedRun {
  std::uint32_t thread;  // kernel's thread id
  std::uint64_t started_ns, ended_ns;
  engine::TraceOutcome outcome;
};

struct TracedCompletion {
  std::uint64_t completed_ns;
  engine::TraceOutcome outcome;
};

// One op, as far as the file tells: a killed run has ops that never ran, a capped file may have
// runs whose push was dropped.
struct TracedOp {
  std::uint64_t ticket = 0;
  bool pushed = false;  // the next six are valid
  std::uint64_t pushed_ns = 0;
  std::uint64_t name = 0;
  Device device;
  Lane lane = Lane::kNormal;
  int priority = 0;
  std::size_t accesses_begin = 0, accesses_end = 0;
  std::optional<TracedRun> run;
  std::optional<TracedCompletion> completion;  // async ops only
};

struct TracedWait {
  std::uint32_t thread;
  engine::TraceWait kind;
  std::uint64_t var;
  std::uint64_t started_ns, ended_ns;
};

// What a device did, on one of its streams.
struct TracedStream {
  int device;
  std::uint32_t stream;
  auto operator<=>(const TracedStream&) const = default;
};
struct TracedWork {
  TracedStream stream;
  std::uint64_t ticket;
  std::uint64_t started_ns, ended_ns;
  internal::DeviceWork::Kind kind;
  std::uint64_t name;  // of a kernel, or 0
  std::uint64_t bytes;
};

// What a process of a job sent or received, and what a server did with a part.
struct TracedMessage : kvstore::dist::TraceMessageRecord {
  std::uint32_t thread = 0;
};
struct TracedPart : kvstore::dist::TracePartRecord {
  std::uint32_t thread = 0;
};

struct TraceFile {
  std::string path;  // where it was read
  std::string process;
  std::string machine;  // its boot id; empty: not known
  std::uint32_t pid = 0;
  std::uint64_t started_ns = 0, started_unix_ns = 0;
  std::uint64_t last_ns = 0;  // the latest time in the file
  std::uint64_t bytes = 0, bytes_max = 0, dropped = 0;
  bool closed = false;              // false: the process was killed, or still runs
  std::uint64_t damaged_bytes = 0;  // that were skipped because they hold no whole records
  std::uint64_t missing_bytes = 0;  // behind the end: the writer had more
  std::vector<TracedOp> ops;        // by ticket
  std::vector<TraceAccessTo> accesses;
  std::vector<TracedWait> waits;
  std::vector<TracedWork> works;  // by stream and when they began
  std::map<std::uint32_t, std::string> threads;
  std::unordered_map<std::uint64_t, std::string> names, vars;

  // Of processes of a job.
  std::optional<kvstore::dist::TracePlaceRecord> place;
  std::vector<TracedMessage> messages;
  std::vector<TracedPart> parts;
  std::unordered_map<std::uint64_t, std::string> keys;

  std::span<const TraceAccessTo> AccessesOf(const TracedOp& op) const {
    return std::span(accesses).subspan(op.accesses_begin, op.accesses_end - op.accesses_begin);
  }
  std::string NameOf(const TracedOp& op) const;
  const TracedOp* Find(std::uint64_t ticket) const;  // null: nothing is known of it
  std::string VarName(std::uint64_t var) const;
  std::string KeyName(std::uint64_t key) const;
};

// From a file or a pipe.
// Errors: IoError (cannot be read), InvalidArgument (no trace file, or of an unknown version); both
// name the file. Damage behind the header is skipped and counted.
TraceFile ReadTraceFile(const std::string& path);

// One op must wait for another.
struct TraceArrow {
  std::size_t from, to;  // indices into TraceFile::ops
};

// The direct dependencies, by replaying the pushes in ticket order: a read waits for the last write
// before it, a write for the reads since then, or without any for that write. Ordered by `to`, no
// pair twice.
std::vector<TraceArrow> Dependencies(const TraceFile& trace);

}  // namespace heddle::tools
