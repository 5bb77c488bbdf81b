// Processes on other machines, through a program that starts one on each of them: the scheduler
// here, then all keepers of the servers by one run of that program, and all of the workers by
// another one.
#include <heddle/error.h>

#include <csignal>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "base/env.h"
#include "tools/heddle/hosts.h"
#include "tools/heddle/job_keeper.h"
#include "tools/heddle/job_part.h"
#include "tools/heddle/launcher.h"
#include "tools/heddle/root_listener.h"

namespace heddle::tools {
namespace {

class ParallelLauncher : public Launcher {
 public:
  int Run(const Job& job) final {
    const std::vector<Host> hosts = Hosts(job);
    RootListener root = ListenFor(job, hosts);
    std::vector<Task> tasks;
    tasks.push_back(SchedulerTask(job, root));
    for (const DistRole role : {DistRole::kServer, DistRole::kWorker}) {
      Task task = PartTask(job, hosts, MakeJobPart(job, role, hosts, root.host, root.port));
      task.name = fmt::format("{}s by {}", DistRoleName(role), task.command.arguments[0]);
      task.works = role == DistRole::kWorker;
      task.is_carrier = true;
      tasks.push_back(std::move(task));
    }
    return KeepTasks(std::move(tasks), {.grace = job.grace, .linger = job.linger});
  }

 private:
  virtual std::vector<Host> Hosts(const Job& job) const = 0;
  // The command, and how the part reaches it.
  virtual Task PartTask(const Job& job, const std::vector<Host>& hosts,
                        const JobPart& part) const = 0;
};

// Open MPI. Its processes but the first have no input, so the part travels in a variable, which
// mpirun sends them itself; and mpirun passes on this signal, while one that ends it would leave
// the processes a second. On each host mpirun clears away the empty folder of sessions that another
// one of this user has just made and wants to fill, so the second starts when the first is up.
class MpiLauncher final : public ParallelLauncher {
  static constexpr const char* kVariable = "HEDDLE_JOB_PART";

  std::vector<Host> Hosts(const Job& job) const override {
    std::vector<Host> hosts = job.hosts;
    if (hosts.empty()) {
      hosts = HostsFromEnvironment([](const std::string& name) { return EnvString(name.c_str()); });
    }
    if (hosts.empty()) hosts.push_back({"localhost"});
    return hosts;
  }

  // No program can be run with a longer one.
  static std::string PartVariable(const JobPart& part) {
    std::string variable = fmt::format("{}={}", kVariable, ToText(part));
    constexpr long kPagesMax = 32;  // of a string, its end included: MAX_ARG_STRLEN of the kernel
    const auto bytes_max = static_cast<std::size_t>(kPagesMax * sysconf(_SC_PAGESIZE));
    if (variable.size() < bytes_max) return variable;
    throw InvalidArgument(fmt::format(
        "launcher mpi hands the job to mpirun in one variable of the environment, which "
        "the system bounds to {} bytes, and it would have {}: expected shorter "
        "arguments of the program, --env, HEDDLE_* and the like, or PATH, or fewer "
        "hosts and processes; launcher ssh has no such bound",
        bytes_max, variable.size() + 1));
  }

  Task PartTask(const Job& job, const std::vector<Host>& hosts,
                const JobPart& part) const override {
    // Processes use all CPUs of their host.
    std::vector<std::string> command = {"mpirun", "--quiet", "--bind-to", "none"};
    command.insert(command.end(), job.launcher_arguments.begin(), job.launcher_arguments.end());
    int num_parts = 0;
    for (std::size_t host = 0; host < hosts.size(); ++host) {
      if (part.places[host].empty()) continue;
      if (num_parts++ > 0) command.emplace_back(":");
      for (const std::string& word :
           {std::string("--host"), hosts[host].name, std::string("-np"), std::string("1"),
            std::string("-x"), std::string(kVariable), job.heddle, std::string("keep"),
            std::string("--job-variable"), std::string(kVariable), std::string("--host"),
            std::to_string(host)}) {
        command.push_back(word);
      }
    }
    std::vector<std::string> environment = InheritedEnvironment();
    environment.push_back(PartVariable(part));
    return {.name = {},
            .command = {.arguments = std::move(command), .environment = std::move(environment)},
            .parts_first = num_parts,
            .stop_signal = SIGUSR1};
  }
};

// Slurm, inside an allocation. srun gives each of its tasks what it reads.
class SlurmLauncher final : public ParallelLauncher {
  std::vector<Host> Hosts(const Job& job) const override { return HostsOf(job); }

  Task PartTask(const Job& job, const std::vector<Host>& hosts,
                const JobPart& part) const override {
    std::vector<std::string> names;
    for (std::size_t host = 0; host < hosts.size(); ++host) {
      if (!part.places[host].empty()) names.push_back(hosts[host].name);
    }
    const std::string count = std::to_string(names.size());
    // The two steps, servers and workers, share all that the job has on each node.
    std::vector<std::string> command = {"srun",
                                        "--nodes=" + count,
                                        "--ntasks=" + count,
                                        "--ntasks-per-node=1",
                                        fmt::format("--nodelist={}", fmt::join(names, ",")),
                                        "--overlap",
                                        "--whole",
                                        "--cpu-bind=none",
                                        "--mem=0",
                                        "--input=all",
                                        "--kill-on-bad-exit=0",
                                        "--quiet"};
    command.insert(command.end(), job.launcher_arguments.begin(), job.launcher_arguments.end());
    for (const std::string& word : {job.heddle, std::string("keep"), std::string("--host-variable"),
                                    std::string("SLURMD_NODENAME")}) {
      command.push_back(word);
    }
    return {.name = {},
            .command = {.arguments = std::move(command), .environment = InheritedEnvironment()},
            .input = Framed(ToText(part))};
  }
};

}  // namespace

std::unique_ptr<Launcher> MakeMpiLauncher() { return std::make_unique<MpiLauncher>(); }

std::unique_ptr<Launcher> MakeSlurmLauncher() {
  if (!EnvString("SLURM_JOB_ID")) {
    throw InvalidArgument(
        "launcher slurm starts processes on the nodes of an allocation of Slurm: expected to be "
        "inside one (SLURM_JOB_ID is not set): salloc --nodes=2 heddle launch ..., or by sbatch");
  }
  return std::make_unique<SlurmLauncher>();
}

}  // namespace heddle::tools
