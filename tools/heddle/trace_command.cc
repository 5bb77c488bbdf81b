// `heddle trace`: binary records to Chrome/Perfetto JSON.
#include <heddle/error.h>

#include <cerrno>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "tools/heddle/commands.h"
#include "tools/heddle/trace_file.h"
#include "tools/heddle/trace_json.h"

namespace heddle::tools {
namespace {

struct Options {
  std::string input, output;
  bool no_arrows = false;
};

void Run(const Options& options) {
  const TraceFile trace = ReadTraceFile(options.input);
  std::ofstream out(options.output, std::ios::binary);
  if (!out) {
    throw IoError(fmt::format("{}: cannot be opened for writing: {}", options.output,
                              std::generic_category().message(errno)));
  }
  const TraceJsonCounts counts = WriteTraceJson(trace, {.arrows = !options.no_arrows}, out);
  out.close();
  if (!out) throw IoError(fmt::format("{}: could not be written completely", options.output));

  fmt::print("{}: {} ops, {} arrows, {} waits on {} threads in {:.3f} s\n", options.output,
             counts.ops, counts.arrows, counts.waits, trace.threads.size(),
             static_cast<double>(trace.last_ns - trace.started_ns) / 1e9);
  if (!trace.closed) {
    fmt::print("the process was killed or still runs: {} ops had not finished\n",
               counts.unfinished);
  }
  if (trace.dropped > 0) {
    fmt::print(
        "incomplete: {} records did not fit into the {} bytes that were allowed; "
        "HEDDLE_TRACE_BYTES_MAX allows more\n",
        trace.dropped, trace.bytes_max);
  }
  if (trace.damaged_bytes > 0) {
    fmt::print("damaged: {} bytes held no whole records and were skipped\n", trace.damaged_bytes);
  }
}

}  // namespace

void AddTraceCommand(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* const command =
      app.add_subcommand("trace", "Turn a trace file into JSON for Perfetto or chrome://tracing");
  command->add_option("file", options->input, "What HEDDLE_TRACE or Engine::StartTrace wrote")
      ->required();
  command->add_option("-o,--output", options->output, "The JSON file to write")->required();
  command->add_flag("--no-arrows", options->no_arrows, "Leave the dependency arrows out");
  command->callback([options] { Run(*options); });
}

}  // namespace heddle::tools
