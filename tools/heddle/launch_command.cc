// `heddle launch`: starts the processes of a distributed job, and owns them.
#include <heddle/error.h>

#include <chrono>
#include <climits>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/env.h"
#include "tools/heddle/commands.h"
#include "tools/heddle/hosts.h"
#include "tools/heddle/job_keeper.h"
#include "tools/heddle/launcher.h"
#include "tools/heddle/program_words.h"
#include "tools/heddle/seconds_option.h"

namespace heddle::tools {
namespace {

struct LaunchArguments {
  int num_workers = 0;
  int num_servers = 0;  // 0: as many as workers
  std::string launcher = "local";
  std::string root_host;
  int root_port = 0;
  std::string hosts, hosts_file;
  std::vector<std::string> launcher_arguments;
  std::string heddle, folder;
  std::string name = "heddle", image, token_file;
  int cpus = 1, memory_mib = 1024;
  std::vector<std::string> environment;
  bool all_roles = false;
  std::string scheduler_command, server_command;
  double grace_s = 2, linger_s = 10;
  std::vector<std::string> program;
};

std::vector<Variable> ParseVariables(const std::vector<std::string>& texts) {
  std::vector<Variable> variables;
  for (const std::string& text : texts) {
    const std::size_t end = text.find('=');
    const std::optional<std::string> here =
        end == std::string::npos ? EnvString(text.c_str()) : std::nullopt;
    if (end == 0 || (end == std::string::npos && !here)) {
      throw InvalidArgument(
          fmt::format("--env: expected NAME=VALUE, or the NAME of a variable that is set here, "
                      "given '{}'",
                      text));
    }
    if (IsOfLauncher(text.substr(0, end))) {
      throw InvalidArgument(
          fmt::format("--env {}: launch sets this variable itself, for each process", text));
    }
    variables.emplace_back(text.substr(0, end), here ? *here : text.substr(end + 1));
  }
  return variables;
}

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::round<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

void CheckOptions(const CLI::App& launch, const std::string& name, const Launcher& launcher) {
  for (const std::string_view option : launcher.UselessOptions()) {
    if (launch.count(std::string(option)) == 0) continue;
    throw InvalidArgument(fmt::format(
        "launcher {}: expected no {}, given one, which means nothing to it", name, option));
  }
}

// What a role runs that is no worker.
std::vector<std::string> RoleCommand(const LaunchArguments& arguments, const std::string& given,
                                     const std::string& heddle, const char* subcommand) {
  if (!given.empty()) return {"/bin/sh", "-c", given};
  if (arguments.all_roles) return arguments.program;
  return {heddle, subcommand};
}

std::vector<Host> GivenHosts(const LaunchArguments& arguments) {
  if (!arguments.hosts.empty()) return ParseHosts(arguments.hosts);
  if (!arguments.hosts_file.empty()) return ReadHostsFile(arguments.hosts_file);
  return {};
}

Job MakeJob(const LaunchArguments& arguments, const Launcher& launcher) {
  Job job;
  job.num_workers = arguments.num_workers;
  job.num_servers = arguments.num_servers > 0 ? arguments.num_servers : arguments.num_workers;
  job.heddle = arguments.heddle.empty() ? launcher.HeddleThere() : arguments.heddle;
  job.scheduler = RoleCommand(arguments, arguments.scheduler_command,
                              launcher.SchedulerIsHere() ? ThisProgram() : job.heddle, "scheduler");
  job.server = RoleCommand(arguments, arguments.server_command, job.heddle, "server");
  job.worker = arguments.program;
  job.environment = ParseVariables(arguments.environment);
  job.root_host = arguments.root_host;
  job.root_port = arguments.root_port;
  job.hosts = GivenHosts(arguments);
  job.launcher_arguments = arguments.launcher_arguments;
  job.folder =
      arguments.folder.empty() ? std::filesystem::current_path().string() : arguments.folder;
  job.name = arguments.name;
  job.image = arguments.image;
  job.token_file = arguments.token_file;
  job.cpus = arguments.cpus;
  job.memory_mib = arguments.memory_mib;
  constexpr int kIdBytes = 8, kTokenBytes = 32;
  job.id = RandomName(kIdBytes);
  job.token = RandomName(kTokenBytes);
  job.grace = Milliseconds(arguments.grace_s);
  job.linger = Milliseconds(arguments.linger_s);
  return job;
}

// Of launchers that start processes on several machines.
void AddPlaceOptions(CLI::App& launch, LaunchArguments& arguments) {
  CLI::Option* const hosts = launch.add_option("--hosts", arguments.hosts,
                                               "Machines: node1,node2 (a name twice: 2 slots)");
  launch
      .add_option("--hosts-file", arguments.hosts_file,
                  "File with a machine a line: its name, then slots=4 if it has more than one")
      ->excludes(hosts);
  launch.add_option("--root-host", arguments.root_host,
                    "Address of this machine for the scheduler (the one that the hosts reach)");
  launch
      .add_option("--launcher-arg", arguments.launcher_arguments,
                  "Argument for the program that starts processes (ssh, mpirun, ...); may be "
                  "repeated")
      ->allow_extra_args(false);
  launch.add_option("--heddle", arguments.heddle,
                    "The heddle command on those machines (where this one is)");
  launch.add_option("--folder", arguments.folder, "Where the processes run (the folder here)");
}

// Of launchers that print what a cluster is to start.
void AddManifestOptions(CLI::App& launch, LaunchArguments& arguments) {
  launch.add_option("--name", arguments.name, "Name of the job there")->capture_default_str();
  launch.add_option("--image", arguments.image, "Container that processes run in");
  launch.add_option("--token-file", arguments.token_file, "Where YARN finds the token: hdfs://...");
  launch.add_option("--cpus", arguments.cpus, "CPUs of a process, for YARN")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  launch.add_option("--memory", arguments.memory_mib, "MiB of memory of a process, for YARN")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
}

}  // namespace

void AddLaunchCommand(CLI::App& app, const std::vector<std::string>& taken) {
  auto arguments = std::make_shared<LaunchArguments>();
  CLI::App* const launch = app.add_subcommand("launch",
                                              "Start a scheduler, servers and workers that run a "
                                              "program: heddle launch -n 4 -s 2 -- train");
  constexpr int kProcessesMax = 1 << 16;
  launch->add_option("-n,--num-workers", arguments->num_workers, "Workers")
      ->required()
      ->check(CLI::Range(1, kProcessesMax));
  launch->add_option("-s,--num-servers", arguments->num_servers, "Servers (as many as workers)")
      ->check(CLI::Range(1, kProcessesMax));
  launch
      ->add_option("--launcher", arguments->launcher,
                   fmt::format("How: {}", fmt::join(LauncherNames(), ", ")))
      ->capture_default_str();
  launch
      ->add_option("--root-port", arguments->root_port,
                   "Port of the scheduler (a free one; for kubernetes and yarn 9091)")
      ->check(CLI::Range(1, 65535));
  launch
      ->add_option("--env", arguments->environment,
                   "NAME=VALUE for the environment of all processes, or NAME to hand one on; may "
                   "be repeated")
      ->allow_extra_args(false);
  AddPlaceOptions(*launch, *arguments);
  AddManifestOptions(*launch, *arguments);
  launch->add_flag("--all-roles", arguments->all_roles,
                   "Run the program as scheduler and servers too");
  launch->add_option("--scheduler-command", arguments->scheduler_command,
                     "What the shell runs as scheduler, in place of heddle scheduler");
  launch->add_option("--server-command", arguments->server_command,
                     "What the shell runs as servers, in place of heddle server");
  launch
      ->add_option("--grace", arguments->grace_s,
                   "Seconds from asking processes to end to killing them")
      ->check(SecondsFrom(0))
      ->capture_default_str();
  launch
      ->add_option("--linger", arguments->linger_s,
                   "Seconds that servers and scheduler may run on when all workers have ended")
      ->check(SecondsFrom(0))
      ->capture_default_str();
  launch->add_option("program", arguments->program, "What workers run, with its arguments")
      ->required();
  launch->positionals_at_end();
  launch->callback([arguments, launch, &taken] {
    HoldBackUserSignal();
    arguments->program = WholeProgram(arguments->program, taken);
    const std::unique_ptr<Launcher> launcher = MakeLauncher(arguments->launcher);
    CheckOptions(*launch, arguments->launcher, *launcher);
    throw CLI::RuntimeError(
        launcher->Run(MakeJob(*arguments, *launcher)));  // how CLI11 hands on a status
  });
}

}  // namespace heddle::tools
