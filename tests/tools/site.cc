#include "tests/tools/site.h"

#include <array>
#include <chrono>
#include <climits>
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

#include "tests/tools/marked_processes.h"
#include "tools/heddle/launcher.h"

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
  Strings Probe() const override {
    std::string ssh = "ssh";
    for (const std::string& argument : server_.ClientArguments()) {
      ssh += " " + QuotedForShell(argument);
    }
    return {"sh", "-c", ssh + " 127.0.0.1 true && " + ssh + " 127.0.0.2 true"};
  }

 private:
  const SshServer server_;
};

// Open MPI takes 127.0.0.1 for this machine, and reaches the other one by ssh.
class MpiSite final : public Site {
 public:
  MpiSite() = default;
  MpiSite(const MpiSite&) = delete;
  MpiSite& operator=(const MpiSite&) = delete;
  // What a killed launcher started may end only now, and writes to its folder until then. These are
  // no children of this process, so it has to look.
  ~MpiSite() override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!MarkedProcesses(folder_.path()).empty() &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  Strings LaunchOptions() const override {
    return {"--launcher",
            "mpi",
            "--hosts",
            "127.0.0.1,127.0.0.2",
            "--launcher-arg=--mca",
            "--launcher-arg=plm_rsh_agent",
            "--launcher-arg=" + Agent()};
  }
  Strings Probe() const override {
    return {"mpirun", "--host", "127.0.0.1,127.0.0.2", "--mca", "plm_rsh_agent", Agent(), "true"};
  }
  Strings Environment() const override {
    // Open MPI refuses to run as root, as containers often do, unless told twice. What is killed
    // leaves the files of its session. A folder for each command: what is left of the last one may
    // clear its folder away while the next one starts.
    return {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
            "OMPI_MCA_orte_tmpdir_base=" + folder_ / std::to_string(++num_commands_)};
  }

 private:
  std::string Agent() const {
    std::string ssh = "ssh";
    for (const std::string& argument : server_.ClientArguments()) ssh += " " + argument;
    return ssh;
  }

  const TempFolder folder_;
  mutable int num_commands_ = 0;
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

// A cell of Grid Engine on this machine alone, with one parallel environment: sge_qmaster and
// sge_execd. All commands find it by SGE_ROOT.
class SgeSite final : public Site {
 public:
  SgeSite() {
    WriteCell();
    Start("sge_qmaster");
    WaitFor("sge_qmaster", [this] { return Qconf("-sh") == 0; });
    Qconf("-as localhost");
    Edit("-sconf", "execd_spool_dir " + folder_ / "execd" + "; min_uid 0; min_gid 0", "-Mconf",
         "global");
    Edit("-ssconf", "schedule_interval 0:0:1; flush_submit_sec 1; flush_finish_sec 1", "-Msconf",
         "scheduler");
    Start("sge_execd");
    std::ofstream(folder_ / "pe")
        << "pe_name heddle\nslots 99\nuser_lists NONE\nxuser_lists NONE\nstart_proc_args NONE\n"
           "stop_proc_args NONE\nallocation_rule $fill_up\ncontrol_slaves TRUE\n"
           "job_is_first_task FALSE\nurgency_slots min\naccounting_summary FALSE\n"
           "qsort_args NONE\n";
    Qconf("-Ap " + folder_ / "pe");
    Edit("-sq",
         "qname all.q; hostlist localhost; slots 16; load_thresholds NONE; pe_list heddle; "
         "shell /bin/sh",
         "-Aq", "queue");
    WaitFor("sge_execd", [this] {
      return RunProgram({"qhost", "-h", "localhost"}, Environment()).output.find("lx-amd64") !=
             std::string::npos;
    });
  }

  Strings LaunchOptions() const override { return {"--launcher", "sge"}; }
  int num_hosts() const override { return 1; }
  Strings Around(Strings command) const override {
    if (command.empty()) return {"qrsh"};
    // qrsh hands the words to a shell.
    std::string line = "exec";
    for (const std::string& word : command) line += " " + QuotedForShell(word);
    return {"qrsh", "-now", "no", "-pe", "heddle", "4", "-cwd", "-V", line};
  }
  Strings Environment() const override {
    return {"SGE_ROOT=" + folder_ / "", "SGE_CELL=default", "SGE_QMASTER_PORT=" + master_port_,
            "SGE_EXECD_PORT=" + execd_port_, "SGE_ND=1"};
  }

 private:
  static constexpr const char* kInstalled = "/var/lib/gridengine";

  void WriteCell() const {
    for (const char* const folder : {"default/common", "spool", "qmaster/job_scripts", "execd"}) {
      std::filesystem::create_directories(folder_ / folder);
    }
    std::filesystem::permissions(folder_ / "", static_cast<std::filesystem::perms>(0755));
    for (const char* const part : {"bin", "lib", "util", "utilbin"}) {
      std::filesystem::create_symlink(std::string(kInstalled) + "/" + part, folder_ / part);
    }
    std::array<char, HOST_NAME_MAX + 1> host{};
    gethostname(host.data(), host.size() - 1);
    // Both names are loopback's, and Grid Engine wants one.
    std::ofstream(folder_ / "default/common/host_aliases") << "localhost " << host.data() << "\n";
    std::ofstream(folder_ / "default/common/act_qmaster") << "localhost\n";
    std::ofstream(folder_ / "default/common/bootstrap")
        << "admin_user root\ndefault_domain none\nignore_fqdn false\n"
           "spooling_method berkeleydb\nspooling_lib libspoolb\nspooling_params "
        << folder_ / "spool"
        << "\nbinary_path /usr/sbin\nqmaster_spool_dir " << folder_ / "qmaster"
        << "\nsecurity_mode none\nlistener_threads 2\nworker_threads 2\nscheduler_threads 1\n";
    RunProgram({"/usr/share/gridengine/scripts/init_cluster", folder_ / "", "default",
                folder_ / "spool", "root"});
  }

  void Start(const std::string& daemon) {
    daemons_.push_back(std::make_unique<RunningProgram>(Strings{FindDaemon(daemon)}, Environment(),
                                                        folder_ / (daemon + ".out")));
  }
  int Qconf(const std::string& arguments) const {
    return RunProgram({"/bin/sh", "-c", "qconf " + arguments}, Environment()).status;
  }
  // Shows something, replaces lines of it ("name value; ..."), and hands it back.
  void Edit(const std::string& show, const std::string& lines, const std::string& change,
            const std::string& file) const {
    std::string script = "qconf " + show + " > " + folder_ / file + "; sed -i";
    std::istringstream stream(lines);
    for (std::string line; std::getline(stream >> std::ws, line, ';');) {
      script += " -e 's|^" + line.substr(0, line.find(' ')) + " .*|" + line + "|'";
    }
    script += " " + folder_ / file + "; qconf " + change + " " + folder_ / file;
    RunProgram({"/bin/sh", "-c", script}, Environment());
  }

  const TempFolder folder_;
  const std::string master_port_ = FreePort(), execd_port_ = FreePort();
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
      {"sge", {"sge_qmaster", "sge_execd", "qrsh", "qconf"}, "batch", &Make<SgeSite>},
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
