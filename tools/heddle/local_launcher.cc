// All processes of the job on this machine. What happens in which process: job_keeper.h.
#include <heddle/error.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/heddle/file_descriptor.h"
#include "tools/heddle/job_keeper.h"
#include "tools/heddle/launcher.h"
#include "tools/heddle/process_tree.h"

namespace heddle::tools {
namespace {

constexpr const char* kRootHost = "127.0.0.1";

struct Listener {
  FileDescriptor socket;
  int port;
};

// The scheduler's socket is bound here and handed to it: a port that was only looked for could be
// somebody else's by the time the scheduler binds it, and workers may connect from now on.
Listener Listen(int port) {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<in_port_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (!listener || setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
      bind(listener.get(), generic, bytes) != 0 || listen(listener.get(), SOMAXCONN) != 0 ||
      getsockname(listener.get(), generic, &bytes) != 0) {
    throw IoError(fmt::format("root_port {}: cannot listen on {}:{}: {}", port, kRootHost, port,
                              std::strerror(errno)));
  }
  return {std::move(listener), ntohs(address.sin_port)};
}

// The signals that the launcher handles; blocked as long as the object lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&set_);
    for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGCHLD}) sigaddset(&set_, signal);
    if (!IsIgnored(SIGHUP)) sigaddset(&set_, SIGHUP);  // else run by nohup
    sigprocmask(SIG_BLOCK, &set_, &before_);
  }
  ~BlockedSignals() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  int Wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    return signal;
  }

 private:
  static bool IsIgnored(int signal) {
    struct sigaction action;
    return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
  }

  sigset_t set_, before_;
};

// The launcher's own part: passes signals on until the keeper has ended. Returns its wait status.
int WatchKeeper(pid_t keeper, const BlockedSignals& signals, const FileDescriptor& to_keeper) {
  for (;;) {
    const int signal = signals.Wait();
    if (signal != SIGCHLD) {
      const auto byte = static_cast<unsigned char>(signal);
      // Fails if the keeper has just ended; then SIGCHLD is under way.
      [[maybe_unused]] const ssize_t written = write(to_keeper.get(), &byte, 1);
      continue;
    }
    int status = 0;
    if (waitpid(keeper, &status, WNOHANG) == keeper) return status;
  }
}

class LocalLauncher final : public Launcher {
 public:
  int Run(const Job& job) override {
    Listener listener = Listen(job.root_port);
    Pipe pipe;
    const BlockedSignals signals;
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGCHLD, SIG_DFL);  // if it is ignored, statuses are lost
    AdoptOrphans();
    std::fflush(nullptr);
    const pid_t keeper = fork();
    if (keeper < 0) {
      throw IoError(fmt::format("cannot start a process: {}", std::strerror(errno)));
    }
    if (keeper == 0) {
      setsid();
      pipe.write.Close();
      JobKeeper job_keeper(job, std::move(pipe.read), std::move(listener.socket), kRootHost,
                           listener.port);
      _exit(job_keeper.Run());
    }
    pipe.read.Close();
    listener.socket.Close();
    const int status = WatchKeeper(keeper, signals, pipe.write);
    if (WIFSIGNALED(status)) {
      fmt::print(stderr, "[launch] process {}, which ran the job, {}; stopping the job\n", keeper,
                 DescribeStatus(status));
    }
    KillDescendants();  // nothing, if the keeper could do its work
    return ExitStatus(status);
  }
};

}  // namespace

std::unique_ptr<Launcher> MakeLocalLauncher() { return std::make_unique<LocalLauncher>(); }

}  // namespace heddle::tools
