// `heddle run`: for processes that are started all alike by something that numbers them (mpirun,
// srun, an Indexed Job of Kubernetes). The number decides what each becomes: 0 the scheduler, then
// the servers, then the workers, which run the program.
#include <heddle/dist.h>
#include <heddle/error.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <netdb.h>
#include <unistd.h>

#include "base/env.h"
#include "base/parse.h"
#include "kvstore/dist/config.h"
#include "tools/heddle/commands.h"
#include "tools/heddle/hosts.h"
#include "tools/heddle/launcher.h"
#include "tools/heddle/program_words.h"

namespace heddle::tools {
namespace {

using kvstore::dist::LaunchedProcess;

constexpr int kRootPort = 9091;
constexpr int kPortMax = 65535;

struct RunArguments {
  int num_workers = 0;
  int num_servers = 0;  // 0: as many as workers
  std::string root_host;
  std::optional<int> root_port;
  std::vector<std::string> program;
};

std::optional<std::string> Variable(const std::string& name) { return EnvString(name.c_str()); }

// Which of the processes this is. Throws InvalidArgument naming both counts if they are not as many
// as the job has.
LaunchedProcess WhichProcess(int total) {
  const std::vector<LaunchedProcess> told = kvstore::dist::LaunchedProcesses(Variable);
  for (const LaunchedProcess& process : told) {
    if (process.size == total) return process;
  }
  if (!told.empty()) {
    throw InvalidArgument(fmt::format(
        "{} {} is one of {} processes: expected {}, a scheduler, the servers and the workers",
        told[0].rank_variable, told[0].rank, told[0].size.value_or(0), total));
  }
  // Kubernetes does not tell how many there are.
  constexpr const char* kIndex = "JOB_COMPLETION_INDEX";
  const std::optional<std::string> text = Variable(kIndex);
  const std::optional<int> index = text ? ParseWhole<int>(*text) : std::nullopt;
  if (!index || *index < 0 || *index >= total) {
    throw InvalidArgument(
        fmt::format("heddle run is started by mpirun, srun or an Indexed Job, {} times: expected "
                    "OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID or {} from 0 to {}, given {}",
                    total, kIndex, total - 1, text ? "'" + *text + "'" : "none"));
  }
  LaunchedProcess process;
  process.rank_variable = kIndex;
  process.rank = *index;
  return process;
}

Place PlaceOf(const LaunchedProcess& process, const RunArguments& arguments) {
  if (process.rank == 0) return {.role = DistRole::kScheduler};
  if (process.rank <= arguments.num_servers) {
    return {.role = DistRole::kServer, .rank = process.rank - 1};
  }
  const int rank = process.rank - 1 - arguments.num_servers;
  return {.role = DistRole::kWorker,
          .rank = rank,
          .local_rank = rank,
          .local_size = arguments.num_workers};
}

// Where the tasks of its step are, Slurm says also to what a task has started, as mpirun's daemon,
// which numbers its processes itself.
bool IsTaskOfSlurm(const LaunchedProcess& process) {
  const std::vector<LaunchedProcess> told = kvstore::dist::LaunchedProcesses(Variable);
  return std::any_of(told.begin(), told.end(), [&](const LaunchedProcess& task) {
    return task.rank_variable == "SLURM_PROCID" && task.rank == process.rank &&
           task.size == process.size;
  });
}

bool IsOnOneHost(const LaunchedProcess& process) {
  return (process.size && process.local_size == process.size) ||
         (IsTaskOfSlurm(process) && Variable("SLURM_STEP_NUM_NODES") == "1");
}

// Where process 0 is.
std::string RootHost(const RunArguments& arguments, const LaunchedProcess& process) {
  if (!arguments.root_host.empty()) return arguments.root_host;
  for (const char* const name : {"HEDDLE_ROOT_HOST", "DMLC_PS_ROOT_URI"}) {
    if (const auto host = Variable(name)) return *host;
  }
  if (IsOnOneHost(process)) return "127.0.0.1";
  // Slurm starts task 0 on the first node of the step.
  if (const auto nodes = Variable("SLURM_STEP_NODELIST"); nodes && IsTaskOfSlurm(process)) {
    return ExpandNodeList(*nodes).front();
  }
  throw InvalidArgument(
      "root_host is missing: the processes are on several hosts; give the address of the one of "
      "process 0 with --root-host, HEDDLE_ROOT_HOST or DMLC_PS_ROOT_URI");
}

int RootPort(const RunArguments& arguments) {
  if (arguments.root_port) return *arguments.root_port;
  for (const char* const name : {"HEDDLE_ROOT_PORT", "DMLC_PS_ROOT_PORT"}) {
    const auto text = Variable(name);
    if (!text) continue;
    const std::optional<int> port = ParseWhole<int>(*text);
    if (port && *port >= 1 && *port <= kPortMax) return *port;
    throw InvalidArgument(fmt::format(
        "root_port: expected a whole number from 1 to {}, given '{}' ({})", kPortMax, *text, name));
  }
  return kRootPort;
}

// A cluster may give its hosts names only once they run. What is wrong in the end, the process that
// needs the name says.
void WaitForName(const std::string& host) {
  const auto text = Variable("HEDDLE_CONNECT_DEADLINE_MS");
  const std::optional<int> given = text ? ParseWhole<int>(*text) : std::nullopt;
  const std::chrono::milliseconds patience =
      given ? std::chrono::milliseconds(*given) : DistOptions().connect_deadline;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  constexpr std::chrono::milliseconds kPause{200};
  addrinfo* found = nullptr;
  while (getaddrinfo(host.c_str(), nullptr, nullptr, &found) != 0) {
    if (std::chrono::steady_clock::now() + kPause >= deadline) return;
    std::this_thread::sleep_for(kPause);
  }
  freeaddrinfo(found);
}

// Of the job, but not what says who may join: that is as the user has it.
void SetEnvironment(const RunArguments& arguments, const Place& place,
                    const LaunchedProcess& process, const std::string& root_host, int root_port) {
  Job job;
  job.num_workers = arguments.num_workers;
  job.num_servers = arguments.num_servers;
  for (const auto& [name, value] : EnvironmentOf(job, place, root_host, root_port)) {
    if (name == "HEDDLE_TOKEN" || name == "HEDDLE_TOKEN_FILE" || name == "HEDDLE_JOB_ID") continue;
    if (value.empty()) {
      unsetenv(name.c_str());
    } else {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  if (!IsOnOneHost(process)) {  // which other workers are here, nobody has said
    unsetenv("HEDDLE_LOCAL_RANK");
    unsetenv("HEDDLE_LOCAL_SIZE");
  }
}

[[noreturn]] void Become(std::vector<std::string> command) {
  std::vector<char*> pointers;
  for (std::string& word : command) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  throw IoError(fmt::format("cannot run '{}': {}", command[0], std::strerror(errno)));
}

void Run(RunArguments arguments) {
  if (arguments.num_servers == 0) arguments.num_servers = arguments.num_workers;
  const LaunchedProcess process = WhichProcess(1 + arguments.num_servers + arguments.num_workers);
  const Place place = PlaceOf(process, arguments);
  const std::string root_host = RootHost(arguments, process);
  const int root_port = RootPort(arguments);
  WaitForName(root_host);
  SetEnvironment(arguments, place, process, root_host, root_port);
  if (place.role == DistRole::kWorker) Become(arguments.program);
  Become({"/proc/self/exe", std::string(DistRoleName(place.role))});
}

}  // namespace

void AddRunCommand(CLI::App& app, const std::vector<std::string>& taken) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* const run = app.add_subcommand(
      "run",
      "Be one process of a job, by the number that mpirun, srun or Kubernetes gave it: mpirun -n 7 "
      "heddle run -n 4 -s 2 -- train");
  constexpr int kProcessesMax = 1 << 16;
  run->add_option("-n,--num-workers", arguments->num_workers, "Workers")
      ->required()
      ->check(CLI::Range(1, kProcessesMax));
  run->add_option("-s,--num-servers", arguments->num_servers, "Servers (as many as workers)")
      ->check(CLI::Range(1, kProcessesMax));
  run->add_option(
      "--root-host", arguments->root_host,
      "Address of the machine of process 0 (HEDDLE_ROOT_HOST; needed on several hosts)");
  run->add_option("--root-port", arguments->root_port,
                  fmt::format("Port of the scheduler (HEDDLE_ROOT_PORT, or {})", kRootPort))
      ->check(CLI::Range(1, kPortMax));
  run->add_option("program", arguments->program, "What workers run, with its arguments")
      ->required();
  run->positionals_at_end();
  run->callback([arguments, &taken] {
    arguments->program = WholeProgram(arguments->program, taken);
    Run(*arguments);
  });
}

}  // namespace heddle::tools
