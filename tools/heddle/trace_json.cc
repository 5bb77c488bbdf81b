#include "tools/heddle/trace_json.h"

#include <algorithm>
#include <iterator>
#include <ostream>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace heddle::tools {
namespace {

using engine::TraceAccess;
using engine::TraceOutcome;
using engine::TraceWait;

constexpr std::size_t kFlushBytes = 1 << 20;

// A JSON string, quotes included. Bytes that are not UTF-8 become the replacement character.
std::string Quoted(std::string_view text) {
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
    case TraceWait::kStop:
      return "Stop";
  }
  return "unknown wait";
}

class Writer {
 public:
  Writer(const TraceFile& trace, std::ostream& out) : trace_(trace), out_(out) {}

  TraceJsonCounts Write(const TraceJsonOptions& options) {
    Append(
        "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"producer\":\"heddle\","
        "\"started_unix_ns\":\"{}\",\"complete\":{},\"dropped_records\":{}}},\n"
        "\"traceEvents\":[\n",
        trace_.started_unix_ns, trace_.closed && trace_.dropped == 0, trace_.dropped);
    WriteNames();
    for (const TracedOp& op : trace_.ops) WriteOp(op);
    for (const TracedWait& wait : trace_.waits) WriteWait(wait);
    if (options.arrows) WriteArrows();
    Append("\n]}}\n");
    Flush();
    return counts_;
  }

 private:
  template <class... Args>
  void Append(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(buffer_), format, std::forward<Args>(args)...);
  }

  // Starts an event; its type, process and thread are common to all.
  void Begin(char type, std::uint32_t thread) {
    if (buffer_.size() > kFlushBytes) Flush();
    Append("{}{{\"ph\":\"{}\",\"pid\":{},\"tid\":{}", first_ ? "" : ",\n", type, trace_.pid,
           thread);
    first_ = false;
  }

  void Flush() {
    out_.write(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
    buffer_.clear();
  }

  // Nanoseconds of the file as microseconds since its start.
  double Us(std::uint64_t ns) const {
    return static_cast<double>(static_cast<std::int64_t>(ns - trace_.started_ns)) / 1e3;
  }
  static double UsBetween(std::uint64_t from_ns, std::uint64_t to_ns) {
    return to_ns > from_ns ? static_cast<double>(to_ns - from_ns) / 1e3 : 0.0;
  }

  void WriteNames() {
    Begin('M', trace_.pid);
    Append(",\"name\":\"process_name\",\"args\":{{\"name\":{}}}}}", Quoted(trace_.process));
    for (const auto& [thread, name] : trace_.threads) {
      Begin('M', thread);
      Append(",\"name\":\"thread_name\",\"args\":{{\"name\":{}}}}}", Quoted(name));
    }
  }

  void WriteOp(const TracedOp& op) {
    ++counts_.ops;
    const std::string name = Quoted(trace_.NameOf(op));
    if (!op.run && !op.completion) {
      ++counts_.unfinished;
      WriteSpan("pending", name, op, trace_.pid, op.pushed_ns, trace_.last_ns, "not finished");
      return;
    }
    if (!op.run) return;  // a completion without its run: nothing is known to draw
    const TracedRun& run = *op.run;
    Begin('X', run.thread);
    Append(",\"cat\":\"op\",\"name\":{},\"ts\":{:.3f},\"dur\":{:.3f},\"args\":", name,
           Us(run.started_ns), UsBetween(run.started_ns, run.ended_ns));
    WriteArgs(op, OutcomeName(run.outcome));
    Append("}}");
    if (op.completion) {
      WriteSpan("async", name, op, run.thread, run.started_ns, op.completion->completed_ns,
                OutcomeName(op.completion->outcome));
    }
  }

  // An asynchronous slice: on a track of its own, outside the threads.
  void WriteSpan(std::string_view category, const std::string& name, const TracedOp& op,
                 std::uint32_t thread, std::uint64_t from_ns, std::uint64_t to_ns,
                 std::string_view outcome) {
    Begin('b', thread);
    Append(",\"cat\":\"{}\",\"name\":{},\"id\":\"{}\",\"ts\":{:.3f},\"args\":", category, name,
           op.ticket, Us(from_ns));
    WriteArgs(op, outcome);
    Append("}}");
    Begin('e', thread);
    Append(",\"cat\":\"{}\",\"name\":{},\"id\":\"{}\",\"ts\":{:.3f}}}", category, name, op.ticket,
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
    for (const TraceAccessTo& to : trace_.AccessesOf(op)) {
      if (to.access != access) continue;
      Append("{}{}", before, Quoted(trace_.VarName(to.var)));
      before = ",";
    }
    Append("{}", *before == '[' ? "[]" : "]");
  }

  void WriteWait(const TracedWait& wait) {
    ++counts_.waits;
    std::string name(WaitName(wait.kind));
    if (wait.var != 0) name += " " + trace_.VarName(wait.var);
    Begin('X', wait.thread);
    Append(",\"cat\":\"wait\",\"name\":{},\"ts\":{:.3f},\"dur\":{:.3f}}}", Quoted(name),
           Us(wait.started_ns), UsBetween(wait.started_ns, wait.ended_ns));
  }

  void WriteArrows() {
    for (const TraceArrow& arrow : Dependencies(trace_)) {
      const TracedOp& from = trace_.ops[arrow.from];
      const TracedOp& to = trace_.ops[arrow.to];
      if (!from.run || !to.run) continue;
      ++counts_.arrows;
      // An arrow starts and ends in the slice around its time: the last moment inside the body, and
      // the start.
      const std::uint64_t leaves_ns =
          std::max(from.run->started_ns, from.run->ended_ns - (from.run->ended_ns > 0 ? 1 : 0));
      Begin('s', from.run->thread);
      Append(",\"cat\":\"dependency\",\"name\":\"before\",\"id\":{},\"ts\":{:.3f}}}",
             counts_.arrows, Us(leaves_ns));
      Begin('f', to.run->thread);
      Append(",\"bp\":\"e\",\"cat\":\"dependency\",\"name\":\"before\",\"id\":{},\"ts\":{:.3f}}}",
             counts_.arrows, Us(to.run->started_ns));
    }
  }

  const TraceFile& trace_;
  std::ostream& out_;
  std::string buffer_;
  bool first_ = true;
  TraceJsonCounts counts_;
};

}  // namespace

TraceJsonCounts WriteTraceJson(const TraceFile& trace, const TraceJsonOptions& options,
                               std::ostream& out) {
  return Writer(trace, out).Write(options);
}

}  // namespace heddle::tools
