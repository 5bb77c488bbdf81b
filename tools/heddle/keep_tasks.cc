// The process that watches a keeper. What happens in which process: job_keeper.h.
#include <heddle/error.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/heddle/job_keeper.h"

namespace heddle::tools {
namespace {

// The signals that the launcher handles; blocked as long as the object lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&set_);
    for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGCHLD}) sigaddset(&set_, signal);
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
int WatchKeeper(pid_t keeper, const BlockedSignals& signals, const FileDescriptor& to_keeper,
                bool is_part) {
  for (;;) {
    int signal = signals.Wait();
    if (signal == SIGUSR1 && is_part) signal = SIGTERM;  // by mpirun: see its launcher
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

}  // namespace

void HoldBackUserSignal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigprocmask(SIG_BLOCK, &set, nullptr);
}

int KeepTasks(std::vector<Task> tasks, const KeeperOptions& options, int signals) {
  Pipe pipe;
  const BlockedSignals blocked;
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);  // if it is ignored, statuses are lost
  AdoptOrphans();
  std::fflush(nullptr);
  const pid_t keeper = fork();
  if (keeper < 0) throw IoError(fmt::format("cannot start a process: {}", std::strerror(errno)));
  if (keeper == 0) {
    setsid();
    pipe.write.Close();
    std::vector<FileDescriptor> sources;
    sources.push_back(std::move(pipe.read));
    if (signals >= 0) sources.emplace_back(signals);
    JobKeeper job_keeper(std::move(tasks), options, std::move(sources));
    _exit(job_keeper.Run());
  }
  pipe.read.Close();
  tasks.clear();  // with the sockets that they hand on
  const int status = WatchKeeper(keeper, blocked, pipe.write, options.is_part);
  if (WIFSIGNALED(status)) {
    fmt::print(stderr, "[launch] process {}, which ran the job, {}; stopping the job\n", keeper,
               DescribeStatus(status));
  }
  KillDescendants();  // nothing, if the keeper could do its work
  return ExitStatus(status);
}

}  // namespace heddle::tools
