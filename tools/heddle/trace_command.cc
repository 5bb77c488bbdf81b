// `heddle trace`: binary records to Chrome/Perfetto JSON.
#include <heddle/error.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/file_size_signal.h"
#include "engine/trace_format.h"
#include "tools/heddle/commands.h"
#include "tools/heddle/trace_file.h"
#include "tools/heddle/trace_join.h"
#include "tools/heddle/trace_json.h"

namespace heddle::tools {
namespace {

struct TraceOptions {
  std::vector<std::string> inputs;
  std::string output;
  bool no_arrows = false;
};

// As other programs have it, "-" is what comes by stdin and goes to stdout.
constexpr std::string_view kStandard = "-";

// What a reader of the JSON should know of one of its files.
void Report(std::FILE* to, const JoinedTrace& joined, std::size_t i,
            const TraceJsonCounts& counts) {
  const TraceFile& trace = joined.files[i];
  const std::string of = joined.files.size() == 1 ? "" : ProcessName(trace) + ": ";
  if (!trace.closed) {
    fmt::print(to, "{}the process was killed or still runs", of);
    if (joined.files.size() == 1) fmt::print(to, ": {} ops had not finished", counts.unfinished);
    fmt::print(to, "\n");
  }
  const bool may_grow = trace.bytes + engine::kTraceChunkBytes <= trace.bytes_max;
  if (trace.dropped > 0 && may_grow) {
    fmt::print(to,
               "{}incomplete: {} records found no room on the disk; the file has {} of the {} "
               "bytes that were allowed\n",
               of, trace.dropped, trace.bytes, trace.bytes_max);
  } else if (trace.dropped > 0) {
    fmt::print(to,
               "{}incomplete: {} records did not fit into the {} bytes that were allowed; "
               "HEDDLE_TRACE_BYTES_MAX allows more\n",
               of, trace.dropped, trace.bytes_max);
  }
  if (trace.damaged_bytes > 0) {
    fmt::print(to, "{}damaged: {} bytes held no whole records and were skipped\n", of,
               trace.damaged_bytes);
  }
  if (trace.missing_bytes > 0) {
    fmt::print(to, "{}cut: {} bytes at the end of the file are missing\n", of, trace.missing_bytes);
  }
  const TraceClock& clock = joined.clocks[i];
  if (clock.from == TraceClock::From::kMessages) {
    fmt::print(to, "{}clock moved by {} us, by the messages to within {} us\n", of,
               clock.offset_ns / 1000, clock.error_ns.value_or(0) / 1000);
  } else if (clock.from == TraceClock::From::kWall) {
    fmt::print(to,
               "{}clock moved by {} us by the wall clocks, as no messages tell how they differ: "
               "nobody knows by how much that is wrong\n",
               of, clock.offset_ns / 1000);
  }
}

TraceJsonCounts WriteFile(const JoinedTrace& trace, const TraceJsonOptions& json,
                          const std::string& path) {
  const NoFileSizeSignal no_signal;
  std::ofstream out(path, std::ios::binary);
  if (!out) {
    throw IoError(fmt::format("{}: cannot be opened for writing: {}", path,
                              std::generic_category().message(errno)));
  }
  const TraceJsonCounts counts = WriteTraceJson(trace, json, out);
  out.close();
  if (!out) throw IoError(fmt::format("{}: could not be written completely", path));
  return counts;
}

void Run(const TraceOptions& options) {
  const bool to_stdout = options.output == kStandard;
  std::vector<TraceFile> files;
  for (const std::string& input : options.inputs) {
    std::error_code not_there;
    if (std::filesystem::equivalent(input, options.output, not_there)) {
      throw InvalidArgument(
          fmt::format("{}: expected another file to write than those to read", options.output));
    }
    files.push_back(ReadTraceFile(input == kStandard ? "/dev/stdin" : input));
  }
  const JoinedTrace trace = JoinTraces(std::move(files));
  const TraceJsonOptions json{.arrows = !options.no_arrows};
  const TraceJsonCounts counts =
      to_stdout ? WriteTraceJson(trace, json, std::cout) : WriteFile(trace, json, options.output);
  std::FILE* const to = to_stdout ? stderr : stdout;

  std::size_t threads = 0;
  std::int64_t started = trace.At(0, trace.files[0].started_ns), ended = started;
  for (std::size_t i = 0; i < trace.files.size(); ++i) {
    threads += trace.files[i].threads.size();
    started = std::min(started, trace.At(i, trace.files[i].started_ns));
    ended = std::max(ended, trace.At(i, trace.files[i].last_ns));
  }
  fmt::print(to, "{}: {} ops, {} arrows, {} waits on {} threads in {:.3f} s\n",
             to_stdout ? "stdout" : options.output, counts.ops, counts.arrows, counts.waits,
             threads, static_cast<double>(ended - started) / 1e9);
  if (counts.device_ops > 0) {
    fmt::print(to, "{} ops on {} streams of devices\n", counts.device_ops, counts.streams);
  }
  if (counts.messages > 0) {
    fmt::print(to, "{} messages of {} processes of a job\n", counts.messages, trace.files.size());
  }
  for (std::size_t i = 0; i < trace.files.size(); ++i) Report(to, trace, i, counts);
}

}  // namespace

void AddTraceCommand(CLI::App& app) {
  auto options = std::make_shared<TraceOptions>();
  CLI::App* const command =
      app.add_subcommand("trace", "Turn trace files into JSON for Perfetto or chrome://tracing");
  command
      ->add_option("files", options->inputs,
                   "What HEDDLE_TRACE or Engine::StartTrace wrote (-: stdin); several of processes "
                   "of one job are put on one clock")
      ->required();
  command->add_option("-o,--output", options->output, "The JSON file to write (-: stdout)")
      ->required();
  command->add_flag("--no-arrows", options->no_arrows, "Leave the dependency arrows out");
  command->callback([options] { Run(*options); });
}

}  // namespace heddle::tools
