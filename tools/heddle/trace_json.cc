#include "tools/heddle/trace_json.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <ostream>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <cxxabi.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "kvstore/dist/protocol/message.h"

namespace heddle::tools {
namespace {

using engine::TraceAccess;
using engine::TraceOutcome;
using engine::TraceWait;
using kvstore::dist::kControlPart;
using kvstore::dist::Kind;
using kvstore::dist::Name;
using kvstore::dist::NodeId;
using kvstore::dist::Role;
using kvstore::dist::TraceAction;
using kvstore::dist::TraceDirection;

constexpr std::size_t kFlushBytes = 1 << 20;

// A JSON string, quotes included. Bytes that are not UTF-8 become the replacement character.
std::string JsonString(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string_view LaneName(Lane lane) {
  switch (lane) {
    case Lane::kNormal:
      return "normal";
    case Lane::kCopy:
      return "copy";
    case Lane::kComm:
      return "comm";
    case Lane::kCopyOut:
      return "copy_out";
  }
  return "unknown";
}

std::string_view OutcomeName(TraceOutcome outcome) {
  switch (outcome) {
    case TraceOutcome::kOk:
      return "ok";
    case TraceOutcome::kFailed:
      return "failed";
    case TraceOutcome::kSkipped:
      return "skipped";
  }
  return "unknown";
}

std::string_view WaitName(TraceWait kind) {
  switch (kind) {
    case TraceWait::kVar:
      return "WaitForVar";
    case TraceWait::kVarReads:
      return "WaitForReadsAndWrites";
    case TraceWait::kAll:
      return "WaitForAll";
    case TraceWait::kRoom:
      return "Push waits for room";
  }
  return "unknown wait";
}

std::string_view ActionName(TraceAction action) {
  switch (action) {
    case TraceAction::kCreate:
      return "create";
    case TraceAction::kMerge:
      return "merge";
    case TraceAction::kUpdate:
      return "update";
    case TraceAction::kDrop:
      return "drop the sum of";
    case TraceAction::kRead:
      return "read";
    case TraceAction::kReset:
      return "reset";
  }
  return "unknown";
}

std::string_view ArrowName(RequestArrow::Kind kind) {
  switch (kind) {
    case RequestArrow::Kind::kMessage:
      return "message";
    case RequestArrow::Kind::kRound:
      return "round";
    case RequestArrow::Kind::kCall:
      return "call";
  }
  return "unknown";
}

// What a linker calls a kernel, as its author does, without types and arguments.
std::string ShortKernelName(const std::string& symbol) {
  if (!symbol.starts_with("_Z")) return symbol;  // "f" would be read as a type, float
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
  if (status != 0 || readable == nullptr) return symbol;
  std::string name(readable.get());
  constexpr std::string_view kUnnamed = "(anonymous namespace)::";
  if (const std::size_t at = name.find(kUnnamed); at != std::string::npos) {
    name.erase(at, kUnnamed.size());
  }
  name.resize(std::min(name.find_first_of("<("), name.size()));
  return name.substr(name.rfind(' ') + 1);  // behind the type that a template returns
}

// Writes the events of all files into one list.
class Writer {
 public:
  Writer(const JoinedTrace& joined, std::ostream& out) : joined_(joined), out_(out) {
    std::set<std::uint32_t> taken;
    for (std::size_t f = 0; f < joined.files.size(); ++f) {
      base_ns_ = f == 0 ? joined.At(f, joined.files[f].started_ns)
                        : std::min(base_ns_, joined.At(f, joined.files[f].started_ns));
      // Processes of several machines may have the same number.
      std::uint32_t pid = joined.files[f].pid;
      while (!taken.insert(pid).second) pid += kOtherPids;
      pids_.push_back(pid);
    }
  }

  TraceJsonCounts Write(const TraceJsonOptions& options) {
    WriteHead();
    for (file_ = 0; file_ < joined_.files.size(); ++file_) {
      WriteNames();
      for (const TracedOp& op : file().ops) WriteOp(op);
      for (const TracedWait& wait : file().waits) WriteWait(wait);
      WriteDevices(options.arrows);
      WriteMessages();
      for (const TracedPart& part : file().parts) WritePart(part);
      if (options.arrows) WriteDependencies();
    }
    if (options.arrows) {
      for (const RequestArrow& arrow : joined_.arrows) {
        WriteArrow("request", ArrowName(arrow.kind), arrow.from, arrow.to);
      }
    }
    Append("\n]}}\n");
    Flush();
    return counts_;
  }

 private:
  static constexpr std::uint32_t kOtherPids = 10'000'000;     // above all that Linux gives
  static constexpr std::uint32_t kStreamTracks = kOtherPids;  // as threads

  const TraceFile& file() const { return joined_.files[file_]; }

  template <class... Args>
  void Append(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(buffer_), format, std::forward<Args>(args)...);
  }

  void WriteHead() {
    const bool complete = std::ranges::all_of(joined_.files, [](const TraceFile& each) {
      return each.closed && each.dropped == 0 && each.damaged_bytes == 0 && each.missing_bytes == 0;
    });
    std::uint64_t dropped = 0;
    for (const TraceFile& each : joined_.files) dropped += each.dropped;
    Append(
        "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"producer\":\"heddle\","
        "\"started_unix_ns\":\"{}\",\"complete\":{},\"dropped_records\":{},\"clocks\":[",
        joined_.files[0].started_unix_ns, complete, dropped);
    for (std::size_t f = 0; f < joined_.files.size(); ++f) {
      const TraceClock& clock = joined_.clocks[f];
      Append("{}{{\"process\":{},\"offset_ns\":{},\"error_ns\":{}}}", f == 0 ? "" : ",",
             JsonString(ProcessName(joined_.files[f])), clock.offset_ns,
             clock.error_ns ? fmt::to_string(*clock.error_ns) : "null");
    }
    Append("]}},\n\"traceEvents\":[\n");
  }

  // Starts an event; its type, process and thread are common to all.
  void Begin(char type, std::size_t file, std::uint32_t thread) {
    if (buffer_.size() > kFlushBytes) Flush();
    Append("{}{{\"ph\":\"{}\",\"pid\":{},\"tid\":{}", first_ ? "" : ",\n", type, pids_[file],
           thread);
    first_ = false;
  }
  void Begin(char type, std::uint32_t thread) { Begin(type, file_, thread); }

  void Flush() {
    out_.write(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
    buffer_.clear();
  }

  // Nanoseconds of a file as microseconds since the start.
  double Us(std::size_t file, std::uint64_t ns) const {
    return static_cast<double>(joined_.At(file, ns) - base_ns_) / 1e3;
  }
  double Us(std::uint64_t ns) const { return Us(file_, ns); }
  static double UsBetween(std::uint64_t from_ns, std::uint64_t to_ns) {
    return to_ns > from_ns ? static_cast<double>(to_ns - from_ns) / 1e3 : 0.0;
  }

  void WriteNames() {
    Begin('M', pids_[file_]);
    Append(",\"name\":\"process_name\",\"args\":{{\"name\":{}}}}}",
           JsonString(ProcessName(file())));
    if (file().place) {  // the scheduler, servers, workers; each by rank
      Begin('M', pids_[file_]);
      Append(",\"name\":\"process_sort_index\",\"args\":{{\"sort_index\":{}}}}}",
             file().place->role * kOtherPids + static_cast<std::uint32_t>(file().place->rank));
    }
    for (const auto& [thread, name] : file().threads) {
      Begin('M', thread);
      Append(",\"name\":\"thread_name\",\"args\":{{\"name\":{}}}}}", JsonString(name));
    }
  }

  void WriteOp(const TracedOp& op) {
    ++counts_.ops;
    const std::string name = JsonString(file().NameOf(op));
    if (!op.run && !op.completion) {
      ++counts_.unfinished;
      WriteSpan("pending", name, op, pids_[file_], op.pushed_ns, file().last_ns, "not finished");
      return;
    }
    if (!op.run) return;  // a completion without its run: nothing is known to draw
    const TracedRun& run = *op.run;
    BeginSlice(run.thread, "op", name, run.started_ns, run.ended_ns);
    Append(",\"args\":");
    WriteArgs(op, OutcomeName(run.outcome));
    Append("}}");
    if (op.completion) {
      WriteSpan("async", name, op, run.thread, run.started_ns, op.completion->completed_ns,
                OutcomeName(op.completion->outcome));
    }
  }

  void BeginSlice(std::uint32_t thread, std::string_view category, const std::string& name,
                  std::uint64_t from_ns, std::uint64_t to_ns) {
    Begin('X', thread);
    Append(",\"cat\":\"{}\",\"name\":{},\"ts\":{:.3f},\"dur\":{:.3f}", category, name, Us(from_ns),
           UsBetween(from_ns, to_ns));
  }

  // An asynchronous slice: on a track of its own, outside the threads.
  void WriteSpan(std::string_view category, const std::string& name, const TracedOp& op,
                 std::uint32_t thread, std::uint64_t from_ns, std::uint64_t to_ns,
                 std::string_view outcome) {
    const std::string id = joined_.files.size() == 1
                               ? fmt::to_string(op.ticket)
                               : fmt::format("{}:{}", pids_[file_], op.ticket);
    Begin('b', thread);
    Append(",\"cat\":\"{}\",\"name\":{},\"id\":\"{}\",\"ts\":{:.3f},\"args\":", category, name, id,
           Us(from_ns));
    WriteArgs(op, outcome);
    Append("}}");
    Begin('e', thread);
    Append(",\"cat\":\"{}\",\"name\":{},\"id\":\"{}\",\"ts\":{:.3f}}}", category, name, id,
           Us(std::max(from_ns, to_ns)));
  }

  void WriteArgs(const TracedOp& op, std::string_view outcome) {
    Append("{{\"ticket\":{},\"outcome\":\"{}\"", op.ticket, outcome);
    if (op.pushed) {
      Append(",\"device\":\"{}\",\"lane\":\"{}\",\"priority\":{},\"pushed_us\":{:.3f}",
             ToString(op.device), LaneName(op.lane), op.priority, Us(op.pushed_ns));
      if (op.run) Append(",\"queued_us\":{:.3f}", UsBetween(op.pushed_ns, op.run->started_ns));
      WriteVars(op, "reads", TraceAccess::kRead);
      WriteVars(op, "writes", TraceAccess::kWrite);
      WriteVars(op, "modifies", TraceAccess::kReadWrite);
    }
    Append("}}");
  }

  void WriteVars(const TracedOp& op, std::string_view key, TraceAccess access) {
    const char* before = "[";
    Append(",\"{}\":", key);
    for (const TraceAccessTo& to : file().AccessesOf(op)) {
      if (to.access != access) continue;
      Append("{}{}", before, JsonString(file().VarName(to.var)));
      before = ",";
    }
    Append("{}", *before == '[' ? "[]" : "]");
  }

  void WriteWait(const TracedWait& wait) {
    ++counts_.waits;
    std::string name(WaitName(wait.kind));
    if (wait.var != 0) name += " " + file().VarName(wait.var);
    BeginSlice(wait.thread, "wait", JsonString(name), wait.started_ns, wait.ended_ns);
    Append("}}");
  }

  // Answers name the op of their request, as requests do.
  void WriteMessages() {
    std::unordered_map<std::string, std::uint64_t> ops;
    for (const TracedMessage& message : file().messages) {
      if (message.op != 0) ops[RequestId(file(), message)] = message.op;
    }
    for (const TracedMessage& message : file().messages) {
      const std::string id = RequestId(file(), message);
      const auto op = id.empty() ? ops.end() : ops.find(id);
      WriteMessage(message, id, op != ops.end() ? op->second : 0);
    }
  }

  void WriteMessage(const TracedMessage& message, const std::string& id, std::uint64_t op) {
    ++counts_.messages;
    std::string name =
        fmt::format("{} {}", message.direction == TraceDirection::kSent ? "send" : "receive",
                    Name(static_cast<Kind>(message.kind)));
    if (!id.empty() && message.part != kControlPart) name += " " + file().KeyName(message.key);
    BeginSlice(message.thread, "message", JsonString(name), message.started_ns, message.ended_ns);
    const NodeId peer{static_cast<Role>(message.peer_role), message.peer_rank};
    Append(",\"args\":{{\"peer\":{},\"payload_bytes\":{}", JsonString(ToString(peer)),
           message.payload_bytes);
    if (!id.empty()) Append(",\"id\":{},\"version\":{}", JsonString(id), message.version);
    if (op != 0) Append(",\"ticket\":{}", op - 1);
    Append("}}}}");
  }

  void WritePart(const TracedPart& part) {
    const std::string name =
        fmt::format("{} {}", ActionName(part.action), file().KeyName(part.key));
    BeginSlice(part.thread, "part", JsonString(name), part.started_ns, part.ended_ns);
    Append(",\"args\":{{\"store\":{},\"part\":{}", part.store, part.part);
    if (const std::string id = RequestId(file(), part); !id.empty()) {
      Append(",\"id\":{}", JsonString(id));
    }
    Append("}}}}");
  }

  // The works of a stream in turn; those of one op that follow each other are one slice.
  void WriteDevices(bool arrows) {
    const std::vector<TracedWork>& works = file().works;
    std::uint32_t track = kStreamTracks;
    for (std::size_t begin = 0; begin < works.size();) {
      const std::size_t first = begin;
      while (begin < works.size() && works[begin].stream == works[first].stream) {
        std::size_t end = begin + 1;
        while (end < works.size() && works[end].stream == works[first].stream &&
               works[end].ticket == works[begin].ticket) {
          ++end;
        }
        WriteOpOfDevice(std::span(works).subspan(begin, end - begin), track, arrows);
        begin = end;
      }
      WriteStreamName(works[first], track++);
      ++counts_.streams;
    }
  }

  void WriteStreamName(const TracedWork& work, std::uint32_t track) {
    const TracedOp* const op = file().Find(work.ticket);
    Begin('M', track);
    Append(",\"name\":\"thread_name\",\"args\":{{\"name\":\"{} {}, stream {}\"}}}}",
           ToString(Gpu(work.stream.device)),
           op != nullptr && op->pushed ? LaneName(op->lane) : "unknown lane", work.stream.stream);
    Begin('M', track);
    Append(",\"name\":\"thread_sort_index\",\"args\":{{\"sort_index\":{}}}}}", track);
  }

  void WriteOpOfDevice(std::span<const TracedWork> works, std::uint32_t track, bool arrows) {
    ++counts_.device_ops;
    const std::uint64_t started_ns = works.front().started_ns;
    std::uint64_t ended_ns = started_ns;
    std::uint64_t bytes = 0;
    for (const TracedWork& work : works) {
      ended_ns = std::max(ended_ns, work.ended_ns);
      bytes += work.bytes;
    }
    const TracedOp* const op = file().Find(works.front().ticket);
    BeginSlice(
        track, "device",
        JsonString(op != nullptr ? file().NameOf(*op) : fmt::format("op {}", works.front().ticket)),
        started_ns, ended_ns);
    Append(",\"args\":{{\"ticket\":{},\"works\":{},\"bytes\":{}}}}}", works.front().ticket,
           works.size(), bytes);
    for (const TracedWork& work : works) {
      BeginSlice(track, "work", JsonString(WorkName(work)), work.started_ns, work.ended_ns);
      Append(",\"args\":{{\"bytes\":{}}}}}", work.bytes);
    }
    if (arrows && op != nullptr && op->run) {
      WriteArrow("issue", "issued", {file_, op->run->thread, LastMomentOf(*op->run)},
                 {file_, track, started_ns});
    }
  }

  std::string WorkName(const TracedWork& work) const {
    switch (work.kind) {
      case internal::DeviceWork::Kind::kCopy:
        return "copy";
      case internal::DeviceWork::Kind::kFill:
        return "fill";
      case internal::DeviceWork::Kind::kKernel:
        break;
    }
    const auto found = file().names.find(work.name);
    return work.name != 0 && found != file().names.end() ? ShortKernelName(found->second)
                                                         : "kernel";
  }

  // An arrow starts in the slice around its time: the last moment inside the body.
  static std::uint64_t LastMomentOf(const TracedRun& run) {
    return std::max(run.started_ns, run.ended_ns - (run.ended_ns > 0 ? 1 : 0));
  }

  void WriteDependencies() {
    for (const TraceArrow& arrow : Dependencies(file())) {
      const TracedOp& from = file().ops[arrow.from];
      const TracedOp& to = file().ops[arrow.to];
      if (!from.run || !to.run) continue;
      WriteArrow("dependency", "before", {file_, from.run->thread, LastMomentOf(*from.run)},
                 {file_, to.run->thread, to.run->started_ns});
    }
  }

  void WriteArrow(std::string_view category, std::string_view name, const TraceMoment& from,
                  const TraceMoment& to) {
    ++counts_.arrows;
    Begin('s', from.file, from.thread);
    Append(",\"cat\":\"{}\",\"name\":\"{}\",\"id\":{},\"ts\":{:.3f}}}", category, name,
           counts_.arrows, Us(from.file, from.ns));
    Begin('f', to.file, to.thread);
    Append(",\"bp\":\"e\",\"cat\":\"{}\",\"name\":\"{}\",\"id\":{},\"ts\":{:.3f}}}", category, name,
           counts_.arrows, Us(to.file, to.ns));
  }

  const JoinedTrace& joined_;
  std::ostream& out_;
  std::vector<std::uint32_t> pids_;
  std::int64_t base_ns_ = 0;
  std::size_t file_ = 0;  // that is written
  std::string buffer_;
  bool first_ = true;
  TraceJsonCounts counts_;
};

}  // namespace

TraceJsonCounts WriteTraceJson(const JoinedTrace& trace, const TraceJsonOptions& options,
                               std::ostream& out) {
  return Writer(trace, out).Write(options);
}

}  // namespace heddle::tools
