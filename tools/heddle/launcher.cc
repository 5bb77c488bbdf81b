#include "tools/heddle/launcher.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/env.h"

namespace heddle::tools {

std::unique_ptr<Launcher> MakeKubernetesLauncher();  // manifest_launcher.cc
std::unique_ptr<Launcher> MakeLocalLauncher();       // local_launcher.cc
std::unique_ptr<Launcher> MakeMpiLauncher();         // parallel_launcher.cc
std::unique_ptr<Launcher> MakeSgeLauncher();         // remote_shell_launcher.cc
std::unique_ptr<Launcher> MakeSlurmLauncher();       // parallel_launcher.cc
std::unique_ptr<Launcher> MakeSshLauncher();         // remote_shell_launcher.cc
std::unique_ptr<Launcher> MakeYarnLauncher();        // manifest_launcher.cc

namespace {

struct LauncherEntry {
  std::string_view name;
  std::unique_ptr<Launcher> (*make)();
};

// Sorted by name.
constexpr LauncherEntry kLaunchers[] = {{"kubernetes", &MakeKubernetesLauncher},
                                        {"local", &MakeLocalLauncher},
                                        {"mpi", &MakeMpiLauncher},
                                        {"sge", &MakeSgeLauncher},
                                        {"slurm", &MakeSlurmLauncher},
                                        {"ssh", &MakeSshLauncher},
                                        {"yarn", &MakeYarnLauncher}};

// What a launcher decides for each process. Those that it does not set in a process are removed
// from what the process inherits.
constexpr std::array<std::string_view, 18> kVariablesOfLaunchers = {
    "DMLC_NUM_SERVER",    "DMLC_NUM_WORKER",   "DMLC_PS_ROOT_PORT", "DMLC_PS_ROOT_URI",
    "DMLC_ROLE",          "HEDDLE_FAILURE_FD", "HEDDLE_JOB_ID",     "HEDDLE_JOB_SERVERS",
    "HEDDLE_JOB_WORKERS", "HEDDLE_LISTEN_FD",  "HEDDLE_LOCAL_RANK", "HEDDLE_LOCAL_SIZE",
    "HEDDLE_RANK",        "HEDDLE_ROLE",       "HEDDLE_ROOT_HOST",  "HEDDLE_ROOT_PORT",
    "HEDDLE_TOKEN",       "HEDDLE_TOKEN_FILE"};

// True of one machine, and of one process of a job without a scheduler. The user may give them to a
// job; what is inherited may be of another one.
constexpr std::array<std::string_view, 3> kVariablesOfMachines = {
    "DMLC_NODE_HOST", "HEDDLE_BIND_ADDRESS", "HEDDLE_NODE_HOST"};
constexpr std::array<std::string_view, 3> kVariablesOfProcesses = {
    "HEDDLE_NCCL_ID", "HEDDLE_NCCL_PROCESSES", "HEDDLE_NCCL_RANK"};

template <class Names>
bool Contains(const Names& names, std::string_view variable) {
  return std::find(names.begin(), names.end(), variable) != names.end();
}

}  // namespace

std::string PlaceName(const Place& place) {
  if (place.role == DistRole::kScheduler) return "scheduler";
  return fmt::format("{} {}", DistRoleName(place.role), place.rank);
}

const std::vector<std::string>& CommandOf(const Job& job, DistRole role) {
  switch (role) {
    case DistRole::kScheduler:
      return job.scheduler;
    case DistRole::kServer:
      return job.server;
    case DistRole::kWorker:
      break;
  }
  return job.worker;
}

std::vector<Variable> EnvironmentOf(const Job& job, const Place& place,
                                    const std::string& root_host, int root_port) {
  const std::string role(DistRoleName(place.role)), port = std::to_string(root_port);
  const std::string workers = std::to_string(job.num_workers);
  const std::string servers = std::to_string(job.num_servers);
  std::vector<Variable> variables;
  for (const std::string_view name : kVariablesOfLaunchers) variables.emplace_back(name, "");
  for (Variable& variable : std::vector<Variable>{{"HEDDLE_ROLE", role},
                                                  {"HEDDLE_ROOT_HOST", root_host},
                                                  {"HEDDLE_ROOT_PORT", port},
                                                  {"HEDDLE_JOB_WORKERS", workers},
                                                  {"HEDDLE_JOB_SERVERS", servers},
                                                  {"HEDDLE_JOB_ID", job.id},
                                                  {"HEDDLE_TOKEN", job.token},
                                                  {"DMLC_ROLE", role},
                                                  {"DMLC_PS_ROOT_URI", root_host},
                                                  {"DMLC_PS_ROOT_PORT", port},
                                                  {"DMLC_NUM_WORKER", workers},
                                                  {"DMLC_NUM_SERVER", servers}}) {
    variables.push_back(std::move(variable));
  }
  if (place.role != DistRole::kScheduler) {
    variables.emplace_back("HEDDLE_RANK", std::to_string(place.rank));
  }
  if (place.role == DistRole::kWorker) {
    variables.emplace_back("HEDDLE_LOCAL_RANK", std::to_string(place.local_rank));
    variables.emplace_back("HEDDLE_LOCAL_SIZE", std::to_string(place.local_size));
  }
  variables.insert(variables.end(), job.environment.begin(), job.environment.end());
  return variables;
}

std::vector<std::string> InheritedEnvironment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (!IsOfOnePlace(text.substr(0, text.find('=')))) entries.emplace_back(text);
  }
  return entries;
}

std::vector<Variable> VariablesOfThisMachine() {
  std::vector<Variable> variables;
  for (const std::string_view name : kVariablesOfMachines) {
    if (auto value = EnvString(name.data())) variables.emplace_back(name, *std::move(value));
  }
  return variables;
}

std::vector<std::string> FullEnvironment(const Job& job, const Place& place,
                                         const std::string& root_host, int root_port) {
  std::map<std::string, std::string, std::less<>> variables;
  for (const std::string& text : InheritedEnvironment()) {
    const std::size_t end = text.find('=');
    if (end != std::string::npos) variables.emplace(text.substr(0, end), text.substr(end + 1));
  }
  for (const auto& [name, value] : EnvironmentOf(job, place, root_host, root_port)) {
    variables.insert_or_assign(name, value);
  }
  std::vector<std::string> environment;
  for (const auto& [name, value] : variables) {
    if (value.empty() && IsOfLauncher(name)) continue;
    environment.push_back(fmt::format("{}={}", name, value));
  }
  return environment;
}

bool IsOfLauncher(std::string_view variable) { return Contains(kVariablesOfLaunchers, variable); }

bool IsOfOnePlace(std::string_view variable) {
  return Contains(kVariablesOfMachines, variable) || Contains(kVariablesOfProcesses, variable);
}

std::string ThisProgram() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

void EnterFolder(const Job& job) {
  if (chdir(job.folder.c_str()) == 0) return;
  throw IoError(
      fmt::format("cannot change to folder '{}' on this host: {}; choose another one "
                  "with --folder",
                  job.folder, std::strerror(errno)));
}

std::string Launcher::HeddleThere() const { return ThisProgram(); }

std::vector<std::string_view> Launcher::UselessOptions() const {
  return {"--cpus", "--image", "--memory", "--name", "--token-file"};
}

std::unique_ptr<Launcher> MakeLauncher(std::string_view name) {
  for (const LauncherEntry& entry : kLaunchers) {
    if (entry.name == name) return entry.make();
  }
  throw InvalidArgument(fmt::format("unknown launcher '{}': expected one of {}", name,
                                    fmt::join(LauncherNames(), ", ")));
}

std::vector<std::string_view> LauncherNames() {
  std::vector<std::string_view> names;
  for (const LauncherEntry& entry : kLaunchers) names.push_back(entry.name);
  return names;
}

std::string QuotedForShell(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted.push_back(c);
    }
  }
  return quoted + "'";
}

std::string RandomName(int bytes) {
  std::vector<unsigned char> random(static_cast<std::size_t>(bytes));
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    throw IoError(fmt::format("no random bytes from the system: {}", std::strerror(errno)));
  }
  return fmt::format("{:02x}", fmt::join(random, ""));
}

}  // namespace heddle::tools
