// `heddle bench`: push and pull by array size and number of devices.
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/build_info.h"
#include "base/cpu_count.h"
#include "base/file_size_signal.h"
#include "tools/heddle/bench.h"
#include "tools/heddle/bench_plot.h"
#include "tools/heddle/commands.h"

namespace heddle::tools {
namespace {

constexpr const char* kAboutP99 =
    "p99: of the push+pull of 100 rounds 99 take no longer; of fewer rounds than that, the longest";
constexpr std::uint64_t kSizeMin = sizeof(float), kSizeMax = std::uint64_t{1} << 40;

struct BenchCommand {
  std::vector<std::string> stores = {"local", "device"};
  std::vector<int> devices = {1, 2, 4};
  std::vector<std::uint64_t> sizes = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
  std::int64_t time_ms = 200;
  std::optional<int> workers;
  std::string json, plot;
};

std::ofstream OpenForWriting(const std::string& path, std::ios::openmode mode) {
  std::ofstream file(path, mode);
  if (!file) {
    throw IoError(fmt::format("{}: cannot be opened for writing: {}", path,
                              std::generic_category().message(errno)));
  }
  return file;
}

// Throws if `path` cannot be written, before time is spent on measuring. Leaves it as it was.
void CheckWritable(const std::string& path) {
  std::error_code unknown;
  const bool was_there = std::filesystem::exists(path, unknown);
  OpenForWriting(path, std::ios::app).close();
  if (!was_there) std::filesystem::remove(path, unknown);
}

void WriteJson(const std::vector<BenchResult>& results, const EngineOptions& engine,
               const std::string& path) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const BenchResult& result : results) {
    rows.push_back({{"store", result.store},
                    {"devices", result.devices},
                    {"bytes", result.bytes},
                    {"rounds", result.rounds},
                    {"push_call_us", result.push_call_us},
                    {"pull_call_us", result.pull_call_us},
                    {"latency_us", result.latency_us},
                    {"latency_p99_us", result.latency_p99_us},
                    {"bandwidth_gb_s", result.bandwidth_gb_s}});
  }
  const nlohmann::ordered_json json = {
      {"heddle", kVersion},    {"build", kBuildType},           {"cpus", AvailableCpus()},
      {"engine", engine.type}, {"workers", engine.num_workers}, {"results", rows}};
  const NoFileSizeSignal no_signal;
  std::ofstream file = OpenForWriting(path, std::ios::out);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) throw IoError(fmt::format("{}: could not be written completely", path));
}

void PrintHeader(const EngineOptions& engine) {
  fmt::print(
      "Push to one key, then pull, until readable: {} engine, {} workers, times in us\n"
      "{}\n"
      "GB/s pushed and pulled: with several keys in flight\n",
      engine.type, engine.num_workers, kAboutP99);
  fmt::print("{:<8}{:>8}{:>11}{:>13}{:>13}{:>13}{:>12}{:>10}\n", "store", "devices", "array",
             "push call", "pull call", "push+pull", "p99", "GB/s");
}

void PrintRow(const BenchResult& result) {
  fmt::print("{:<8}{:>8}{:>11}{:>13.2f}{:>13.2f}{:>13.1f}{:>12.1f}{:>10.2f}\n", result.store,
             result.devices, BytesText(result.bytes), result.push_call_us, result.pull_call_us,
             result.latency_us, result.latency_p99_us, result.bandwidth_gb_s);
  std::fflush(stdout);
}

void Run(const BenchCommand& options) {
  if (!options.json.empty() && options.json == options.plot) {
    throw InvalidArgument(
        fmt::format("{}: expected another file for the plot than for the results", options.json));
  }
  if (!options.json.empty()) CheckWritable(options.json);
  if (!options.plot.empty()) {
    CheckPlot(options.plot);
    CheckWritable(options.plot);
  }
  BenchOptions bench{.engine = EngineOptions::FromEnvironment(),
                     .stores = options.stores,
                     .devices = options.devices,
                     .bytes = {options.sizes.begin(), options.sizes.end()},
                     .time = std::chrono::milliseconds(options.time_ms)};
  if (options.workers) bench.engine.num_workers = *options.workers;
  if (bench.engine.num_workers == 0) bench.engine.num_workers = AvailableCpus();

  // Not before the first row: until then options may be refused.
  bool begun = false;
  const std::vector<BenchResult> results = RunBench(bench, [&](const BenchResult& result) {
    if (!std::exchange(begun, true)) PrintHeader(bench.engine);
    PrintRow(result);
  });
  if (!options.json.empty()) WriteJson(results, bench.engine, options.json);
  if (!options.plot.empty()) PlotBench(results, options.plot);
}

}  // namespace

void AddBenchCommand(CLI::App& app) {
  auto options = std::make_shared<BenchCommand>();
  CLI::App* const command =
      app.add_subcommand("bench", "Measure push and pull by array size and number of devices");
  command->footer(kAboutP99);
  command->add_option("--store", options->stores, "Types of store, of one process")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--devices", options->devices, "Numbers of logical devices")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--sizes", options->sizes, "Bytes of an array: 4096, 4KiB, 16MiB")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(kSizeMin, kSizeMax))
      ->capture_default_str();
  command->add_option("--time-ms", options->time_ms, "Milliseconds for each measurement")
      ->check(CLI::Range(1, 600'000))
      ->capture_default_str();
  command
      ->add_option("--workers", options->workers,
                   "Worker threads (HEDDLE_NUM_WORKERS, or one a CPU)")
      ->check(CLI::Range(1, 1024));
  command->add_option("--json", options->json, "Write the results to this file");
  command->add_option("--plot", options->plot, "Draw the curves into this .png or .svg (gnuplot)");
  command->callback([options] { Run(*options); });
}

}  // namespace heddle::tools
