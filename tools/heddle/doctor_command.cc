// `heddle doctor`: what this build has, what the machine offers, what the environment says.
#include <heddle/dist.h>
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/memory.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/build_info.h"
#include "base/cpu_count.h"
#include "base/env.h"
#include "base/gpus.h"
#include "base/job_file.h"
#include "base/log.h"
#include "kvstore/dist/config.h"
#include "kvstore/gpu_sums.h"
#include "kvstore/nccl/device_group.h"
#include "kvstore/nccl/nccl_api.h"
#include "kvstore/nccl/nccl_meeting.h"
#include "tools/heddle/commands.h"
#include "tools/heddle/doctor_job.h"
#include "tools/heddle/program_path.h"

namespace heddle::tools {
namespace {

// What the library reads (docs: EngineOptions and MemoryOptions), besides the settings of
// distributed jobs, and HEDDLE_LIBRARY, by which examples/perl finds it.
constexpr std::array<std::string_view, 26> kVariables = {"HEDDLE_AGEING",
                                                         "HEDDLE_CHECK_ACCESS",
                                                         "HEDDLE_CPU_ALLOCATOR",
                                                         "HEDDLE_CPU_MEMORY_MAX",
                                                         "HEDDLE_ENGINE",
                                                         "HEDDLE_GPU_ALLOCATOR",
                                                         "HEDDLE_GPU_ISSUED_AHEAD",
                                                         "HEDDLE_GPU_MEMORY_MAX",
                                                         "HEDDLE_GPU_SUMS",
                                                         "HEDDLE_LIBRARY",
                                                         "HEDDLE_LOG_LEVEL",
                                                         "HEDDLE_MAX_PENDING_BYTES",
                                                         "HEDDLE_MAX_PENDING_OPS",
                                                         "HEDDLE_NCCL_DEADLINE_MS",
                                                         "HEDDLE_NCCL_ID",
                                                         "HEDDLE_NCCL_PROCESSES",
                                                         "HEDDLE_NCCL_RANK",
                                                         "HEDDLE_NUM_WORKERS",
                                                         "HEDDLE_PINNED_ALLOCATOR",
                                                         "HEDDLE_PINNED_MEMORY_MAX",
                                                         "HEDDLE_SEED",
                                                         "HEDDLE_TRACE",
                                                         "HEDDLE_TRACE_BYTES_MAX",
                                                         "HEDDLE_WATCHDOG_MS",
                                                         "HEDDLE_WIRE_CAPTURE",
                                                         "HEDDLE_WORKER_HOST"};

void Line(std::string_view label, std::string_view value) {
  fmt::print("  {:<22}{}\n", label, value);
}

void PrintBuild() {
  fmt::print("heddle {}\n", kVersion);
  Line("compiler", kCompiler);
  Line("build type", kBuildType);
  if (!kSanitizers.empty()) Line("sanitizers", kSanitizers);
  fmt::print("Libraries\n");
  for (const BuildPart& part : kRequiredParts) Line(part.name, part.version);
  fmt::print("Optional parts\n");
  for (const BuildPart& part : kOptionalParts) {
    Line(part.name, part.version.empty() ? "not found" : part.version);
  }
  Line("gnuplot", FindProgram("gnuplot").value_or("not found (for heddle bench --plot; Debian "
                                                  "package gnuplot-nox)"));
}

void PrintCpus() {
  fmt::print("CPUs\n");
  Line("of the machine", std::to_string(sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    Line("by affinity", std::to_string(CPU_COUNT(&set)));
  }
  Line("with the cgroup quota", std::to_string(AvailableCpus()));
}

void PrintGpus() {
  const GpuList list = ListGpus();
  fmt::print("GPUs\n");
  if (list.gpus.empty()) Line("none", list.why_none);
  for (std::size_t id = 0; id < list.gpus.size(); ++id) {
    const GpuInfo& gpu = list.gpus[id];
    Line(fmt::format("gpu({})", id), fmt::format("{}, {} MiB, compute capability {}.{}", gpu.name,
                                                 gpu.memory_bytes >> 20, gpu.major, gpu.minor));
  }
}

// Runs `check`; its error is a problem, or several, a line each.
template <class Check>
void Checked(int& problems, const Check& check) {
  try {
    check();
  } catch (const Error& error) {
    std::istringstream lines(error.what());
    for (std::string line; std::getline(lines, line); ++problems) Line("PROBLEM", line);
  }
}

void CheckNccl(int& problems) {
  try {
    Line("NCCL", kvstore::LoadNccl()->Describe());
  } catch (const NcclError& error) {
    Line("no NCCL", error.what());
  }
  Checked(problems, [] { kvstore::DeviceGroupOptions::FromEnvironment(); });
  Checked(problems, [] {
    if (const auto process = kvstore::NcclProcess::FromEnvironment()) {
      Line("stores of type nccl",
           fmt::format("are those of {} processes, this is {}", process->processes, process->rank));
    }
  });
}

bool IsKnown(std::string_view name) {
  if (std::find(kVariables.begin(), kVariables.end(), name) != kVariables.end()) return true;
  for (const kvstore::dist::Setting& setting : kvstore::dist::Settings()) {
    const auto& names = setting.variables;
    if (std::find(names.begin(), names.end(), name) != names.end()) return true;
  }
  return false;
}

void PrintVariables(int& problems) {
  fmt::print("Environment\n");
  bool any = false;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (!name.starts_with("HEDDLE_")) continue;
    any = true;
    const bool known = IsKnown(name);
    if (!known) ++problems;
    // A secret stays one.
    Line(name == "HEDDLE_TOKEN" ? "HEDDLE_TOKEN=..." : text,
         known ? "" : "PROBLEM: heddle knows no such variable");
  }
  if (!any) Line("no HEDDLE_ variable is set", "");
  Checked(problems, [] { internal::LogLevelFromEnvironment(); });
}

void PrintSettings(const EngineOptions& engine) {
  Line("type", engine.type);
  Line("workers", engine.num_workers > 0 ? std::to_string(engine.num_workers)
                                         : fmt::format("{}, one a CPU", AvailableCpus()));
  Line("worker host", engine.worker_host == WorkerHost::kTbb ? "tbb" : "threads");
  Line("pending ops at most", std::to_string(engine.max_pending_ops));
  Line("pending bytes at most", std::to_string(engine.max_pending_bytes));
  Line("ageing", std::to_string(engine.ageing));
  Line("watchdog", fmt::format("{} ms", engine.watchdog.count()));
  Line("trace", engine.trace_file.empty() ? "off" : engine.trace_file);
}

// Not the file itself, which the next run replaces.
void CheckFolderOf(const char* what, const std::string& file) {
  if (file.empty()) return;
  std::filesystem::path folder = std::filesystem::path(file).parent_path();
  if (folder.empty()) folder = ".";
  if (access(folder.c_str(), W_OK | X_OK) == 0) return;
  throw IoError(fmt::format("{} {}: no file can be made in {}: {}", what, file, folder.string(),
                            std::strerror(errno)));
}

// A file that is there is written anew in its place.
void CheckTraceFile(const std::string& file) {
  struct stat found = {};
  if (file.empty() || stat(file.c_str(), &found) != 0) return CheckFolderOf("trace file", file);
  if (!S_ISREG(found.st_mode)) {
    throw IoError(fmt::format("trace file {}: expected a file, or none yet", file));
  }
  if (access(file.c_str(), W_OK) == 0) return;
  throw IoError(fmt::format("trace file {}: {}", file, std::strerror(errno)));
}

// Runs a chain of ops on an engine with these options.
void TestEngine(EngineOptions options) {
  constexpr int kOps = 1000;
  options.trace_file.clear();  // not to overwrite a trace that the user wants to keep
  Engine engine(options);
  const Var var = engine.NewVar("doctor");
  int ran = 0;
  const auto started = std::chrono::steady_clock::now();
  for (int i = 0; i < kOps; ++i) {
    engine.Push({.name = "doctor", .reads = {var}, .writes = {var}}, [&ran] { ++ran; });
  }
  engine.WaitForVar(var);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - started;
  Line("self-test", fmt::format("a chain of {} ops ran in {:.0f} us", ran, took.count()));
}

void CheckEngine(int& problems) {
  fmt::print("Engine\n");
  Checked(problems, [&] {
    const EngineOptions options = EngineOptions::FromEnvironment();
    PrintSettings(options);
    Checked(problems, [&] { CheckTraceFile(options.trace_file); });
    TestEngine(options);
  });
}

void CheckMemory(int& problems) {
  fmt::print("Memory\n");
  const std::pair<const char*, DeviceType> types[] = {{"of CPUs", DeviceType::kCpu},
                                                      {"pinned", DeviceType::kCpuPinned},
                                                      {"of GPUs", DeviceType::kGpu}};
  for (const auto& [label, type] : types) {
    Checked(problems, [&, label = label, type = type] {
      const MemoryOptions options = MemoryOptions::FromEnvironment(type);
      const bool capped = options.bytes_max < MemoryOptions().bytes_max;
      Line(label,
           fmt::format("allocator {}, {}", options.allocator,
                       capped ? fmt::format("at most {} bytes", options.bytes_max) : "no cap"));
    });
  }
}

void CheckStores(int& problems) {
  Checked(problems, [] { kvstore::GpuSumsOf({}); });
}

void CheckDist(int& problems) {
  fmt::print("Distributed jobs\n");
  Checked(problems, [&] {
    const DistOptions options = DistOptions::FromEnvironment();
    for (const auto& [field, source] : options.sources) Line(options.Describe(field), "");
    if (options.sources.empty()) Line("no setting of a job is there", "");
    // Who has a role is to join a job, for which some settings have to be there.
    if (options.sources.contains("role")) Checked(problems, [&] { options.Validate(); });
    Checked(problems,
            [] { CheckFolderOf("capture", JobFileName(EnvString("HEDDLE_WIRE_CAPTURE", ""))); });
    problems += CheckJobSetUp(options, Line);
  });
}

void Conclude(int problems) {
  if (problems > 0) throw InvalidState(fmt::format("doctor found {} problem(s)", problems));
  fmt::print("No problems found.\n");
}

void Run() {
  PrintBuild();
  PrintCpus();
  PrintGpus();
  int problems = 0;
  CheckNccl(problems);
  PrintVariables(problems);
  CheckEngine(problems);
  CheckMemory(problems);
  CheckStores(problems);
  CheckDist(problems);
  Conclude(problems);
}

// As a worker of a job whose launching, network and clocks are to be looked at.
void RunInJob() {
  // Line by line: one process that finds a problem ends the job, which then waits for nobody.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  fmt::print("heddle {}\n", kVersion);
  Conclude(CheckInJob(Line));
}

}  // namespace

void AddDoctorCommand(CLI::App& app) {
  CLI::App* const doctor =
      app.add_subcommand("doctor", "Show versions, CPUs and settings, and what is wrong with them");
  auto in_job = std::make_shared<bool>(false);
  doctor->add_flag(
      "--in-job", *in_job,
      "As the program of a job: whether all processes reach one another, and how their "
      "clocks differ (heddle launch ... -- heddle doctor --in-job)");
  doctor->callback([in_job] { *in_job ? RunInJob() : Run(); });
}

}  // namespace heddle::tools
