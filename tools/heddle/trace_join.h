// The traces of the processes of one job on one clock, and how requests went between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/heddle/trace_file.h"

namespace heddle::tools {

// A moment on a thread of one of the files, by that file's clock.
struct TraceMoment {
  std::size_t file = 0;
  std::uint32_t thread = 0;
  std::uint64_t ns = 0;
};

// What a request goes through, from slice to slice.
struct RequestArrow {
  enum class Kind : std::uint8_t {
    kMessage,  // from where it was sent to where it was received, or what it led to there
    kRound,    // from a push's merge to the update of its round, and from that to reads
    kCall,     // from an op to a message of it that was sent later
  };
  Kind kind{};
  TraceMoment from, to;
};

// How a file's clock relates to the first file's.
struct TraceClock {
  // To be added to times of the file.
  std::int64_t offset_ns = 0;
  enum class From : std::uint8_t {
    kSame,      // the same machine's
    kMessages,  // from messages between the two machines, both ways
    kWall,      // no such messages to the first: by the wall clocks
  };
  From from = From::kSame;
  std::optional<std::int64_t> error_ns = 0;  // at most; nothing: nobody knows
};

struct JoinedTrace {
  std::vector<TraceFile> files;
  std::vector<TraceClock> clocks;  // of each file
  std::vector<RequestArrow> arrows;

  std::int64_t At(std::size_t file, std::uint64_t ns) const {
    return static_cast<std::int64_t>(ns) + clocks[file].offset_ns;
  }
};

// InvalidArgument if two files are of the same trace, of different processes of one place, or of
// different jobs.
JoinedTrace JoinTraces(std::vector<TraceFile> files);

// "w1 s0 'weight' p2 #7": worker 1, store 0, key, part 2, request 7 about that part; empty for
// messages that belong to no request.
std::string RequestId(const TraceFile& names, const kvstore::dist::TraceMessageRecord& message);
std::string RequestId(const TraceFile& names, const kvstore::dist::TracePartRecord& part);
// "worker 1 (train, process 4711)".
std::string ProcessName(const TraceFile& file);

}  // namespace heddle::tools
