// `heddle keep`: on a host of a job, runs the processes of the job that belong there. Launchers
// start it; nobody types it.
#include <heddle/error.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/env.h"
#include "tools/heddle/commands.h"
#include "tools/heddle/job_keeper.h"
#include "tools/heddle/job_part.h"

namespace heddle::tools {
namespace {

struct KeepArguments {
  int host = 0;
  std::string host_variable, job_variable;
};

std::size_t HostIndex(const KeepArguments& arguments, const std::vector<Host>& hosts) {
  if (arguments.host_variable.empty()) return static_cast<std::size_t>(arguments.host);
  const std::string name = EnvString(arguments.host_variable.c_str()).value_or("");
  const auto host =
      std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == name; });
  if (host == hosts.end()) {
    throw InvalidArgument(fmt::format("{}: expected the name of a host of the job, given '{}'",
                                      arguments.host_variable, name));
  }
  return static_cast<std::size_t>(host - hosts.begin());
}

std::string TakeVariable(const std::string& name) {
  const std::optional<std::string> text = EnvString(name.c_str());
  if (!text) throw InvalidArgument(fmt::format("{}: expected the job, given nothing", name));
  unsetenv(name.c_str());  // it is not for the processes of the job
  return *text;
}

// Returns the exit status.
int Keep(const KeepArguments& arguments) {
  HoldBackUserSignal();
  const bool from_stdin = arguments.job_variable.empty();
  // Without a pipe to say so, the end of what started this process is the end of this part.
  if (!from_stdin) prctl(PR_SET_PDEATHSIG, SIGTERM);
  JobPart part =
      ParseJobPart(from_stdin ? ReadFramed(STDIN_FILENO) : TakeVariable(arguments.job_variable));
  const std::size_t host = HostIndex(arguments, part.job.hosts);
  if (host >= part.places.size()) {
    throw InvalidArgument(fmt::format("host {}: expected an index below {}, the hosts of the job",
                                      host, part.places.size()));
  }
  EnterFolder(part.job);
  // Who set these for all processes of this host knows it; what the job says of them counts more.
  const std::vector<Variable> own = VariablesOfThisMachine();
  part.job.environment.insert(part.job.environment.begin(), own.begin(), own.end());
  std::vector<Task> tasks;
  for (const Place& place : part.places[host]) {
    tasks.push_back({.name = PlaceName(place),
                     .command = {.arguments = CommandOf(part.job, place.role),
                                 .environment = FullEnvironment(part.job, place, part.root_host,
                                                                part.root_port)}});
  }
  return KeepTasks(std::move(tasks),
                   {.grace = part.job.grace, .linger = part.job.linger, .is_part = true},
                   from_stdin ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1) : -1);
}

}  // namespace

void AddKeepCommand(CLI::App& app) {
  auto arguments = std::make_shared<KeepArguments>();
  CLI::App* const keep = app.add_subcommand(
      "keep", "Run the processes of a job that are on this host (started by heddle launch)");
  keep->group("");  // not in the list of commands
  keep->add_option("--host", arguments->host, "Index of this host")->check(CLI::NonNegativeNumber);
  keep->add_option("--host-variable", arguments->host_variable, "Variable that holds its name");
  keep->add_option("--job-variable", arguments->job_variable,
                   "Variable that holds the job, in place of stdin");
  keep->callback([arguments] { throw CLI::RuntimeError(Keep(*arguments)); });
}

}  // namespace heddle::tools
