// Processes on other machines, through a program that runs a command on one of them and joins its
// input and output with our own: the scheduler here, and on each host a keeper for its servers and
// one for its workers, each through a connection of its own.
#include <heddle/error.h>

#include <utility>

#include <fmt/format.h>

#include "base/env.h"
#include "tools/heddle/hosts.h"
#include "tools/heddle/job_keeper.h"
#include "tools/heddle/job_part.h"
#include "tools/heddle/launcher.h"
#include "tools/heddle/root_listener.h"

namespace heddle::tools {
namespace {

// The command up to the host. Nobody is there to type a password, and nothing needs a terminal.
const std::vector<std::string> kSsh = {"ssh", "-T", "-o", "BatchMode=yes"};

// Part of the job that this process belongs to, so that its limits and its end count there too.
const std::vector<std::string> kQrsh = {"qrsh", "-inherit"};

class RemoteShellLauncher final : public Launcher {
 public:
  explicit RemoteShellLauncher(std::vector<std::string> shell) : shell_(std::move(shell)) {}

  int Run(const Job& job) override {
    const std::vector<Host> hosts = HostsOf(job);
    RootListener root = ListenFor(job, hosts);
    std::vector<Task> tasks;
    tasks.push_back(SchedulerTask(job, root));
    for (const DistRole role : {DistRole::kServer, DistRole::kWorker}) {
      const JobPart part = MakeJobPart(job, role, hosts, root.host, root.port);
      for (std::size_t host = 0; host < hosts.size(); ++host) {
        if (part.places[host].empty()) continue;
        tasks.push_back({.name = fmt::format("{}s on {}", DistRoleName(role), hosts[host].name),
                         .command = {.arguments = CommandFor(job, hosts[host].name, host),
                                     .environment = InheritedEnvironment()},
                         .works = role == DistRole::kWorker,
                         .is_carrier = true,
                         .input = Framed(ToText(part))});
      }
    }
    return KeepTasks(std::move(tasks), {.grace = job.grace, .linger = job.linger});
  }

 private:
  std::vector<std::string> CommandFor(const Job& job, const std::string& host,
                                      std::size_t index) const {
    std::vector<std::string> command = shell_;
    command.insert(command.end(), job.launcher_arguments.begin(), job.launcher_arguments.end());
    command.push_back(host);
    command.push_back(fmt::format("exec {} keep --host {}", QuotedForShell(job.heddle), index));
    return command;
  }

  const std::vector<std::string> shell_;
};

}  // namespace

std::unique_ptr<Launcher> MakeSshLauncher() { return std::make_unique<RemoteShellLauncher>(kSsh); }

std::unique_ptr<Launcher> MakeSgeLauncher() {
  if (!EnvString("PE_HOSTFILE")) {
    throw InvalidArgument(
        "launcher sge starts processes on the hosts of a parallel job of Grid Engine: expected to "
        "be inside one (PE_HOSTFILE is not set): qsub -pe NAME SLOTS -b y heddle launch ...");
  }
  return std::make_unique<RemoteShellLauncher>(kQrsh);
}

}  // namespace heddle::tools
