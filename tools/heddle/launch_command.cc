// `heddle launch`: starts the processes of a distributed job, and owns them.
#include <heddle/error.h>

#include <chrono>
#include <climits>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/heddle/commands.h"
#include "tools/heddle/launcher.h"

namespace heddle::tools {
namespace {

struct LaunchArguments {
  int num_workers = 0;
  int num_servers = 0;  // 0: as many as workers
  std::string launcher = "local";
  int root_port = 0;
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
    if (end == std::string::npos || end == 0) {
      throw InvalidArgument(fmt::format("--env: expected NAME=VALUE, given '{}'", text));
    }
    if (IsOfLauncher(text.substr(0, end))) {
      throw InvalidArgument(
          fmt::format("--env {}: launch sets this variable itself, for each process", text));
    }
    variables.emplace_back(text.substr(0, end), text.substr(end + 1));
  }
  return variables;
}

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::round<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

// What a role runs that is no worker.
std::vector<std::string> RoleCommand(const LaunchArguments& arguments, const std::string& given,
                                     const char* subcommand) {
  if (!given.empty()) return {"/bin/sh", "-c", given};
  if (arguments.all_roles) return arguments.program;
  return {std::filesystem::read_symlink("/proc/self/exe").string(), subcommand};
}

Job MakeJob(const LaunchArguments& arguments) {
  Job job;
  job.num_workers = arguments.num_workers;
  job.num_servers = arguments.num_servers > 0 ? arguments.num_servers : arguments.num_workers;
  job.scheduler = RoleCommand(arguments, arguments.scheduler_command, "scheduler");
  job.server = RoleCommand(arguments, arguments.server_command, "server");
  job.worker = arguments.program;
  job.environment = ParseVariables(arguments.environment);
  job.root_port = arguments.root_port;
  constexpr int kIdBytes = 8, kTokenBytes = 32;
  job.id = RandomName(kIdBytes);
  job.token = RandomName(kTokenBytes);
  job.grace = Milliseconds(arguments.grace_s);
  job.linger = Milliseconds(arguments.linger_s);
  return job;
}

}  // namespace

void AddLaunchCommand(CLI::App& app) {
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
  launch->add_option("--root-port", arguments->root_port, "Port of the scheduler (a free one)")
      ->check(CLI::Range(1, 65535));
  launch
      ->add_option("--env", arguments->environment,
                   "NAME=VALUE for the environment of all processes; may be repeated")
      ->allow_extra_args(false);
  launch->add_flag("--all-roles", arguments->all_roles,
                   "Run the program as scheduler and servers too");
  launch->add_option("--scheduler-command", arguments->scheduler_command,
                     "What the shell runs as scheduler, in place of heddle scheduler");
  launch->add_option("--server-command", arguments->server_command,
                     "What the shell runs as servers, in place of heddle server");
  launch
      ->add_option("--grace", arguments->grace_s,
                   "Seconds from asking processes to end to killing them")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  launch
      ->add_option("--linger", arguments->linger_s,
                   "Seconds that servers and scheduler may run on when all workers have ended")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  launch->add_option("program", arguments->program, "What workers run, with its arguments")
      ->required();
  launch->positionals_at_end();
  launch->callback([arguments] {
    const std::unique_ptr<Launcher> launcher = MakeLauncher(arguments->launcher);
    throw CLI::RuntimeError(launcher->Run(MakeJob(*arguments)));  // how CLI11 hands on a status
  });
}

}  // namespace heddle::tools
