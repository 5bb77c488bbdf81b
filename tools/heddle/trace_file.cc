#include "tools/heddle/trace_file.h"

#include <heddle/error.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <system_error>
#include <tuple>

#include <fmt/format.h>

namespace heddle::tools {
namespace {

using namespace engine;  // NOLINT: the record types
using kvstore::dist::TraceMessageRecord;
using kvstore::dist::TracePartRecord;
using kvstore::dist::TracePlaceRecord;

std::vector<std::byte> ReadBytes(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    throw IoError(fmt::format("trace file {}: is a directory", path));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw IoError(fmt::format("trace file {}: cannot be opened: {}", path,
                              std::generic_category().message(errno)));
  }
  constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
  std::vector<std::byte> bytes;
  // A pipe does not say how much will come.
  if (const std::uintmax_t size = std::filesystem::file_size(path, error); !error) {
    bytes.reserve(size + kPieceBytes);
  }
  while (file) {
    const std::size_t before = bytes.size();
    bytes.resize(before + kPieceBytes);
    file.read(reinterpret_cast<char*>(bytes.data() + before), kPieceBytes);
    bytes.resize(before + static_cast<std::size_t>(file.gcount()));
  }
  if (!file.eof()) throw IoError(fmt::format("trace file {}: cannot be read", path));
  return bytes;
}

// The text of a fixed field that should end with a zero.
template <std::size_t kSize>
std::string Text(const char (&field)[kSize]) {
  return {field, strnlen(field, kSize)};
}

// Walks the chunks and collects their records. All offsets come from the file and are checked
// first.
class Reader {
 public:
  Reader(const std::string& path, std::vector<std::byte> bytes)
      : path_(path), bytes_(std::move(bytes)) {}

  TraceFile Read() {
    ReadHeader();
    std::size_t offset = kTraceHeaderBytes;
    while (offset < bytes_.size()) offset += ReadChunk(offset);
    trace_.last_ns = std::max(trace_.last_ns, trace_.started_ns);
    SortOps();
    std::ranges::sort(trace_.works, {}, [](const TracedWork& work) {
      return std::tuple(work.stream, work.started_ns, work.ended_ns);
    });
    return std::move(trace_);
  }

 private:
  template <class Record>
  Record At(std::size_t offset) const {
    Record record;
    std::memcpy(&record, bytes_.data() + offset, sizeof(record));
    return record;
  }

  void ReadHeader() {
    if (bytes_.size() < kTraceHeaderBytes) {
      throw InvalidArgument(
          fmt::format("trace file {}: expected a heddle trace of at least {} bytes, found {} bytes",
                      path_, kTraceHeaderBytes, bytes_.size()));
    }
    const auto header = At<TraceFileHeader>(0);
    if (std::memcmp(header.magic, kTraceMagic, sizeof(kTraceMagic)) != 0) {
      throw InvalidArgument(
          fmt::format("trace file {}: expected a heddle trace, found another format", path_));
    }
    if (header.version < kTraceVersionLeast || header.version > kTraceVersion) {
      throw InvalidArgument(fmt::format("trace file {}: expected format version {} to {}, found {}",
                                        path_, kTraceVersionLeast, kTraceVersion, header.version));
    }
    trace_.path = path_;
    trace_.process = Text(header.process);
    trace_.machine = Text(header.machine);
    trace_.pid = header.pid;
    trace_.started_ns = header.started_ns;
    trace_.started_unix_ns = header.started_unix_ns;
    trace_.bytes = bytes_.size();
    trace_.bytes_max = header.bytes_max;
    trace_.dropped = header.dropped;
    trace_.closed = header.closed == 1;
    if (header.file_bytes > bytes_.size()) trace_.missing_bytes = header.file_bytes - bytes_.size();
  }

  // Returns the size of the chunk at `offset`.
  std::size_t ReadChunk(std::size_t offset) {
    const std::size_t rest = bytes_.size() - offset;
    const std::size_t unit = std::min(rest, kTraceChunkBytes);
    if (rest < sizeof(TraceChunkHeader)) {
      trace_.damaged_bytes += rest;
      return unit;
    }
    const auto chunk = At<TraceChunkHeader>(offset);
    if (chunk.magic == 0 && chunk.used == 0)
      return unit;  // claimed, but killed before its first use
    if (chunk.magic != kTraceChunkMagic || chunk.bytes == 0 ||
        chunk.bytes % kTraceChunkBytes != 0) {
      trace_.damaged_bytes += unit;
      return unit;
    }
    const std::size_t present = std::min<std::size_t>(rest, chunk.bytes);
    trace_.threads[chunk.thread_id] = Text(chunk.thread_name);
    std::size_t at = offset + sizeof(TraceChunkHeader);
    const std::size_t used_end =
        at + std::min<std::size_t>(chunk.used, chunk.bytes - sizeof(TraceChunkHeader));
    const std::size_t end = std::min(used_end, offset + present);
    while (end - at >= sizeof(std::uint64_t)) {
      const std::uint32_t head = At<std::uint32_t>(at);
      const std::size_t bytes = std::size_t{head >> 8} * 8;
      if (bytes == 0 || bytes > end - at || !ReadRecord(chunk.thread_id, at, head & 0xff, bytes)) {
        break;
      }
      at += bytes;
    }
    trace_.damaged_bytes += used_end - at;
    return present;
  }

  // False: not a record of this version.
  bool ReadRecord(std::uint32_t thread, std::size_t at, std::uint32_t kind, std::size_t bytes) {
    switch (static_cast<TraceKind>(kind)) {
      case TraceKind::kName:
        return ReadText<TraceNameRecord>(at, bytes, trace_.names);
      case TraceKind::kVar:
        return ReadText<TraceNameRecord>(at, bytes, trace_.vars);
      case TraceKind::kPush:
        return ReadPush(at, bytes);
      case TraceKind::kRun: {
        if (bytes != sizeof(TraceRunRecord)) return false;
        const auto record = At<TraceRunRecord>(at);
        runs_.emplace_back(record.ticket, TracedRun{thread, record.started_ns, record.ended_ns,
                                                    static_cast<TraceOutcome>(record.outcome)});
        See(record.ended_ns);
        return true;
      }
      case TraceKind::kComplete: {
        if (bytes != sizeof(TraceCompleteRecord)) return false;
        const auto record = At<TraceCompleteRecord>(at);
        completions_.emplace_back(
            record.ticket,
            TracedCompletion{record.completed_ns, static_cast<TraceOutcome>(record.outcome)});
        See(record.completed_ns);
        return true;
      }
      case TraceKind::kWait: {
        if (bytes != sizeof(TraceWaitRecord)) return false;
        const auto record = At<TraceWaitRecord>(at);
        trace_.waits.push_back({thread, static_cast<TraceWait>(record.kind), record.var,
                                record.started_ns, record.ended_ns});
        See(record.ended_ns);
        return true;
      }
      case TraceKind::kPlace: {
        if (bytes != sizeof(TracePlaceRecord)) return false;
        trace_.place = At<TracePlaceRecord>(at);
        return true;
      }
      case TraceKind::kKey:
        return ReadText<TraceNameRecord>(at, bytes, trace_.keys);
      case TraceKind::kMessage: {
        if (bytes != sizeof(TraceMessageRecord)) return false;
        trace_.messages.push_back({At<TraceMessageRecord>(at), thread});
        See(trace_.messages.back().ended_ns);
        return true;
      }
      case TraceKind::kPart: {
        if (bytes != sizeof(TracePartRecord)) return false;
        trace_.parts.push_back({At<TracePartRecord>(at), thread});
        See(trace_.parts.back().ended_ns);
        return true;
      }
      case TraceKind::kWork: {
        if (bytes != sizeof(TraceWorkRecord)) return false;
        const auto record = At<TraceWorkRecord>(at);
        if (record.device < 0 || record.device > std::numeric_limits<std::int16_t>::max()) {
          return false;
        }
        trace_.works.push_back({{record.device, record.stream},
                                record.ticket,
                                record.started_ns,
                                record.ended_ns,
                                static_cast<internal::DeviceWork::Kind>(record.kind),
                                record.name,
                                record.bytes});
        See(record.ended_ns);
        return true;
      }
    }
    return false;
  }

  // Name and variable records have the same layout.
  template <class Record>
  bool ReadText(std::size_t at, std::size_t bytes,
                std::unordered_map<std::uint64_t, std::string>& texts) {
    if (bytes < sizeof(Record)) return false;
    const auto record = At<Record>(at);
    if (record.text_bytes > bytes - sizeof(Record)) return false;
    texts[record.name].assign(reinterpret_cast<const char*>(bytes_.data()) + at + sizeof(Record),
                              record.text_bytes);
    return true;
  }

  bool ReadPush(std::size_t at, std::size_t bytes) {
    if (bytes < sizeof(TracePushRecord)) return false;
    const auto record = At<TracePushRecord>(at);
    if (bytes - sizeof(record) != std::size_t{record.accesses} * sizeof(std::uint64_t))
      return false;
    if (record.device_type > static_cast<std::uint8_t>(DeviceType::kGpu)) return false;
    TracedOp op;
    op.ticket = record.ticket;
    op.pushed = true;
    op.pushed_ns = record.pushed_ns;
    op.name = record.name;
    op.device = {static_cast<DeviceType>(record.device_type), record.device_id};
    op.lane = static_cast<Lane>(record.lane);
    op.priority = record.priority;
    op.accesses_begin = trace_.accesses.size();
    for (std::size_t i = 0; i < record.accesses; ++i) {
      const auto word = At<std::uint64_t>(at + sizeof(record) + i * sizeof(std::uint64_t));
      trace_.accesses.push_back({word >> 2, static_cast<TraceAccess>(word & 3)});
    }
    op.accesses_end = trace_.accesses.size();
    trace_.ops.push_back(op);
    See(record.pushed_ns);
    return true;
  }

  void See(std::uint64_t ns) { trace_.last_ns = std::max(trace_.last_ns, ns); }

  // Orders the ops by ticket and gives each its run and completion.
  void SortOps() {
    const auto by_ticket = [](const auto& a, const auto& b) { return a.first < b.first; };
    std::sort(trace_.ops.begin(), trace_.ops.end(),
              [](const TracedOp& a, const TracedOp& b) { return a.ticket < b.ticket; });
    std::stable_sort(runs_.begin(), runs_.end(), by_ticket);
    std::stable_sort(completions_.begin(), completions_.end(), by_ticket);
    AddMissingOps(runs_);
    AddMissingOps(completions_);
    Join(runs_, &TracedOp::run);
    Join(completions_, &TracedOp::completion);
  }

  template <class Event>
  void AddMissingOps(const std::vector<std::pair<std::uint64_t, Event>>& events) {
    const std::size_t known = trace_.ops.size();
    std::size_t at = 0;
    for (const auto& event : events) {
      while (at < known && trace_.ops[at].ticket < event.first) ++at;
      if (at < known && trace_.ops[at].ticket == event.first) continue;
      if (trace_.ops.size() > known && trace_.ops.back().ticket == event.first) continue;
      TracedOp op;
      op.ticket = event.first;
      trace_.ops.push_back(op);
    }
    std::inplace_merge(trace_.ops.begin(), trace_.ops.begin() + static_cast<std::ptrdiff_t>(known),
                       trace_.ops.end(),
                       [](const TracedOp& a, const TracedOp& b) { return a.ticket < b.ticket; });
  }

  template <class Event>
  void Join(const std::vector<std::pair<std::uint64_t, Event>>& events,
            std::optional<Event> TracedOp::*field) {
    std::size_t at = 0;
    for (TracedOp& op : trace_.ops) {
      while (at < events.size() && events[at].first < op.ticket) ++at;
      if (at < events.size() && events[at].first == op.ticket) op.*field = events[at].second;
    }
  }

  const std::string& path_;
  const std::vector<std::byte> bytes_;
  TraceFile trace_;
  std::vector<std::pair<std::uint64_t, TracedRun>> runs_;
  std::vector<std::pair<std::uint64_t, TracedCompletion>> completions_;
};

}  // namespace

std::string TraceFile::NameOf(const TracedOp& op) const {
  const auto found = names.find(op.name);
  return op.pushed && found != names.end() ? found->second : fmt::format("op {}", op.ticket);
}

const TracedOp* TraceFile::Find(std::uint64_t ticket) const {
  const auto found = std::ranges::lower_bound(ops, ticket, {}, &TracedOp::ticket);
  return found != ops.end() && found->ticket == ticket ? &*found : nullptr;
}

std::string TraceFile::VarName(std::uint64_t var) const {
  const auto found = vars.find(var);
  return found != vars.end() ? found->second : fmt::format("var{}", var);
}

std::string TraceFile::KeyName(std::uint64_t key) const {
  const auto found = keys.find(key);
  return found != keys.end() ? found->second : fmt::format("key {:016x}", key);
}

TraceFile ReadTraceFile(const std::string& path) { return Reader(path, ReadBytes(path)).Read(); }

std::vector<TraceArrow> Dependencies(const TraceFile& trace) {
  struct Queue {
    std::optional<std::size_t> last_write;
    std::vector<std::size_t> reads;  // since last_write
  };
  std::unordered_map<std::uint64_t, Queue> queues;
  std::vector<TraceArrow> arrows;
  std::vector<std::size_t> waits_for;
  for (std::size_t to = 0; to < trace.ops.size(); ++to) {
    waits_for.clear();
    for (const TraceAccessTo& access : trace.AccessesOf(trace.ops[to])) {
      Queue& queue = queues[access.var];
      const bool reads_only = access.access == engine::TraceAccess::kRead;
      if (!reads_only && !queue.reads.empty()) {
        waits_for.insert(waits_for.end(), queue.reads.begin(), queue.reads.end());
      } else if (queue.last_write) {
        waits_for.push_back(*queue.last_write);
      }
      if (reads_only) {
        queue.reads.push_back(to);
      } else {
        queue.last_write = to;
        queue.reads.clear();
      }
    }
    std::sort(waits_for.begin(), waits_for.end());
    waits_for.erase(std::unique(waits_for.begin(), waits_for.end()), waits_for.end());
    for (const std::size_t from : waits_for) {
      if (from != to) arrows.push_back({from, to});
    }
  }
  return arrows;
}

}  // namespace heddle::tools
