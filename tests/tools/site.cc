#include "tests/tools/site.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace heddle::tools {
namespace {

using Strings = std::vector<std::string>;

std::string FindDaemon(const std::string& name) {
  std::string path = std::getenv("PATH");
  std::istringstream folders(path + ":/usr/sbin:/sbin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::string file = folder + "/" + name;
    if (access(file.c_str(), X_OK) == 0) return file;
  }
  return "";
}

bool Accepts(const std::string& port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<in_port_t>(std::stoi(port)));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool accepts = connect(probe, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(probe);
  return accepts;
}

// Until `ready()` holds; daemons do not say when they are there.
template <class Ready>
void WaitFor(const std::string& what, const Ready& ready) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!ready()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error(what + " is not up");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

class SshSite final : public Site {
 public:
  Strings LaunchOptions() const override {
    Strings options = {"--launcher", "ssh", "--hosts", "127.0.0.1,127.0.0.2"};
    for (const std::string& argument : server_.ClientArguments()) {
      options.push_back("--launcher-arg=" + argument);
    }
    return options;
  }

 private:
  const SshServer server_;
};

// Open MPI takes 127.0.0.1 for this machine, and reaches the other one by ssh.
class MpiSite final : public Site {
 public:
  Strings LaunchOptions() const override {
    std::string ssh = "ssh";
    for (const std::string& argument : server_.ClientArguments()) ssh += " " + argument;
    return {"--launcher",
            "mpi",
            "--hosts",
            "127.0.0.1,127.0.0.2",
            "--launcher-arg=--mca",
            "--launcher-arg=plm_rsh_agent",
            "--launcher-arg=" + ssh};
  }
  Strings Environment() const override {
    // Open MPI refuses to run as root, as containers often do, unless told twice.
    return {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
  }

 private:
  const SshServer server_;
};

// A cluster of this machine alone: munged, slurmctld and slurmd.
class SlurmSite final : public Site {
 public:
  SlurmSite() {
    WriteKey();
    Start("munged", {"--foreground", "--socket=" + folder_ / "munge.socket",
                     "--key-file=" + folder_ / "key", "--log-file=" + folder_ / "munged.log",
                     "--pid-file=" + folder_ / "munged.pid", "--seed-file=" + folder_ / "seed"});
    WaitFor("munged", [this] { return std::filesystem::exists(folder_ / "munge.socket"); });
    WriteConfiguration();
    Start("slurmctld", {"-D", "-i", "-f", folder_ / "slurm.conf"});
    Start("slurmd", {"-D", "-N", "localhost", "-f", folder_ / "slurm.conf"});
    WaitFor("slurmd", [this] {
      const ProgramResult nodes = RunProgram({"sinfo", "--noheader", "--format=%T"}, Environment());
      return nodes.output == "idle\n";
    });
  }

  Strings LaunchOptions() const override { return {"--launcher", "slurm"}; }
  int num_hosts() const override { return 1; }
  Strings Around(Strings command) const override {
    command.insert(command.begin(), {"salloc", "--quiet", "--nodes=1"});
    return command;
  }
  Strings Environment() const override { return {"SLURM_CONF=" + folder_ / "slurm.conf"}; }

 private:
  void Start(const std::string& daemon, const Strings& arguments) {
    Strings command = {FindDaemon(daemon)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    daemons_.push_back(
        std::make_unique<RunningProgram>(command, Strings(), folder_ / (daemon + ".out")));
  }

  void WriteKey() const {
    constexpr int kBytes = 128;
    std::random_device random;
    std::ofstream key(folder_ / "key", std::ios::binary);
    for (int i = 0; i < kBytes; ++i) key.put(static_cast<char>(random()));
    key.close();
    std::filesystem::permissions(folder_ / "key", std::filesystem::perms::owner_read);
    // munged is wary of folders that others may not look into.
    std::filesystem::permissions(folder_ / "", static_cast<std::filesystem::perms>(0755));
  }

  void WriteConfiguration() const {
    std::filesystem::create_directory(folder_ / "state");
    std::filesystem::create_directory(folder_ / "spool");
    std::ofstream(folder_ / "slurm.conf")
        << "ClusterName=heddle\nSlurmctldHost=localhost(127.0.0.1)\nSlurmUser=root\n"
        << "AuthType=auth/munge\nAuthInfo=socket=" << folder_ / "munge.socket"
        << "\nSlurmctldPort=" << FreePort() << "\nSlurmdPort=" << FreePort()
        << "\nStateSaveLocation=" << folder_ / "state"
        << "\nSlurmdSpoolDir=" << folder_ / "spool"
        << "\nSlurmctldPidFile=" << folder_ / "slurmctld.pid"
        << "\nSlurmdPidFile=" << folder_ / "slurmd.pid"
        << "\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
           "SelectType=select/cons_tres\nMpiDefault=none\nSwitchType=switch/none\n"
           "NodeName=localhost NodeHostname=localhost NodeAddr=127.0.0.1 CPUs=1\n"
           "PartitionName=all Nodes=localhost Default=YES State=UP\n";
  }

  const TempFolder folder_;
  std::vector<std::unique_ptr<RunningProgram>> daemons_;
};

template <class T>
std::unique_ptr<Site> Make() {
  return std::make_unique<T>();
}

}  // namespace

const std::vector<SiteEntry>& Sites() {
  static const std::vector<SiteEntry> sites = {
      {"mpi", {"mpirun", "sshd", "ssh"}, "checks", &Make<MpiSite>},
      {"slurm", {"slurmctld", "slurmd", "munged", "salloc", "srun"}, "batch", &Make<SlurmSite>},
      {"ssh", {"sshd", "ssh"}, "checks", &Make<SshSite>},
  };
  return sites;
}

std::string MissingProgram(const Strings& programs) {
  for (const std::string& program : programs) {
    if (FindDaemon(program).empty()) return program;
  }
  return "";
}

SshServer::SshServer() : port_(FreePort()) {
  // Where sshd shuts itself in when it is root's; its own start script makes it.
  if (geteuid() == 0) std::filesystem::create_directories("/run/sshd");
  for (const char* const key : {"host", "user"}) {
    RunProgram({"ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder_ / key});
  }
  std::ofstream(folder_ / "config") << "ListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nPort "
                                    << port_ << "\nHostKey " << folder_ / "host"
                                    << "\nAuthorizedKeysFile " << folder_ / "user.pub"
                                    << "\nPidFile none\nStrictModes no\nUsePAM no\n"
                                       "MaxStartups 100\n";
  program_ = std::make_unique<RunningProgram>(
      Strings{FindDaemon("sshd"), "-D", "-e", "-f", folder_ / "config"}, Strings(),
      folder_ / "log");
  WaitFor("sshd", [this] { return Accepts(port_); });
}

Strings SshServer::ClientArguments() const {
  return {"-p",
          port_,
          "-i",
          folder_ / "user",
          "-oStrictHostKeyChecking=no",
          "-oUserKnownHostsFile=/dev/null",
          "-oLogLevel=ERROR"};
}

}  // namespace heddle::tools
