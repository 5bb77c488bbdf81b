// Launchers: each starts the processes of a job somewhere (on this machine, by ssh, by a batch
// system) and owns them. launcher.cc has the list.
#pragma once

#include <heddle/dist.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle::tools {

using Variable = std::pair<std::string, std::string>;  // name, value

// A machine on which processes of a job run, as its launcher calls it.
struct Host {
  std::string name;
  int slots = 1;  // of these are given to it before the next host gets any; then all get as many

  bool operator==(const Host&) const = default;
};

// A job as the user wants it.
struct Job {
  int num_workers = 1;
  int num_servers = 1;
  // What the processes run, program and arguments.
  std::vector<std::string> scheduler, server, worker;
  std::vector<Variable> environment;  // for all of them, on top of their launcher's
  std::string root_host;              // where the scheduler listens; "": as the launcher finds best
  int root_port = 0;                  // 0: any free one
  std::string id, token;
  std::string folder;  // where the processes run
  // For launchers that start processes elsewhere.
  std::vector<Host> hosts;  // in the order of ranks; none: as the launcher finds
  std::vector<std::string> launcher_arguments;  // for the program that it starts them with
  std::string heddle;                           // this command's path there
  // For those that print what a cluster is to start.
  std::string name = "heddle";  // of the job there
  std::string image;            // of the container that it runs in
  std::string token_file;       // where the cluster finds the token
  int cpus = 1;                 // of each process, and its memory
  int memory_mib = 1024;
  // Between the signal that asks processes to end and the one that ends them.
  std::chrono::milliseconds grace{2'000};
  // How long servers and scheduler may take to end once all workers have.
  std::chrono::milliseconds linger{10'000};
};

// One process of a job. Workers know their rank among all and among those of their machine.
struct Place {
  DistRole role = DistRole::kWorker;
  int rank = 0;  // 0 for the scheduler
  int local_rank = 0;
  int local_size = 1;
};

std::string PlaceName(const Place& place);  // "worker 1", "scheduler"

const std::vector<std::string>& CommandOf(const Job& job, DistRole role);

// What the process must have in its environment: HEDDLE_*, the DMLC_* that old programs read, and
// the job's own variables. An empty value stands for unset.
std::vector<Variable> EnvironmentOf(const Job& job, const Place& place,
                                    const std::string& root_host, int root_port);

// What the processes of a job inherit from this one, "NAME=value": all but the variables that are
// true of one place only (IsOfOnePlace), which may be those of another job.
std::vector<std::string> InheritedEnvironment();

// Variables of this process that name its machine: on a host of a job, what the host itself has
// set.
std::vector<Variable> VariablesOfThisMachine();

// All of a process that is started on this machine: what it inherits and the above, "NAME=value".
std::vector<std::string> FullEnvironment(const Job& job, const Place& place,
                                         const std::string& root_host, int root_port);

// The names above that a launcher sets and a user may therefore not.
bool IsOfLauncher(std::string_view variable);

// Names of variables that are true of one process or machine, and that no launcher sets.
bool IsOfOnePlace(std::string_view variable);

std::string ThisProgram();  // the path of the heddle command that runs

// Goes to where the processes run. Throws IoError.
void EnterFolder(const Job& job);

class Launcher {
 public:
  virtual ~Launcher() = default;
  // Runs the job to its end; when it returns, no process of the job is left. Returns 0, or the
  // status of the process that failed first (128 + signal if a signal ended it, 127 if its program
  // could not be run), or 128 + signal if this process was told to stop. Throws an Error if nothing
  // was started.
  virtual int Run(const Job& job) = 0;
  // The heddle command where processes run, if the user does not say: this program's path.
  virtual std::string HeddleThere() const;
  virtual bool SchedulerIsHere() const { return true; }
  // Options of `heddle launch` that would change nothing: those of manifests, if it prints none.
  virtual std::vector<std::string_view> UselessOptions() const;
};

// Throws InvalidArgument, listing the known names.
std::unique_ptr<Launcher> MakeLauncher(std::string_view name);
std::vector<std::string_view> LauncherNames();  // sorted

// As one word of a shell's command line.
std::string QuotedForShell(std::string_view text);

// `bytes` random bytes in hexadecimal, nobody can guess them.
std::string RandomName(int bytes);

}  // namespace heddle::tools
