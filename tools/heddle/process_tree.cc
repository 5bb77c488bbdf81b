#include "tools/heddle/process_tree.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/parse.h"

namespace heddle::tools {
namespace {

// A killed process ends when the system lets it run, however busy it is; what is left after this
// time cannot be killed.
constexpr std::chrono::seconds kKillTime{60};

[[noreturn]] void ThrowErrno(std::string_view what) {
  throw IoError(fmt::format("{}: {}", what, std::strerror(errno)));
}

std::vector<char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

void ResetSignals() {
  for (int signal = 1; signal < NSIG; ++signal) std::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

// The new process between fork and exec; returns only if it cannot go on, with errno set.
void BecomeProgram(const Command& command, pid_t parent, int in, int out, int err) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the line above.
  if (getppid() != parent) _exit(EXIT_FAILURE);
  ResetSignals();
  if (dup2(in, STDIN_FILENO) < 0 || dup2(out, STDOUT_FILENO) < 0 || dup2(err, STDERR_FILENO) < 0) {
    return;
  }
  for (const FileDescriptor& fd : command.inherited) {
    if (fcntl(fd.get(), F_SETFD, 0) != 0) return;
  }
  std::vector<char*> environment = Pointers(command.environment);
  environ = environment.data();  // execvp looks for the program in its PATH
  execvp(command.arguments[0].c_str(), Pointers(command.arguments).data());
}

// The parent of a process; nothing if it has gone.
std::optional<pid_t> ParentOf(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  // "pid (name) state ppid ...", where the name may hold anything.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream rest(text.substr(name_end + 1));
  std::string state;
  pid_t parent = 0;
  if (!(rest >> state >> parent)) return std::nullopt;
  return parent;
}

// Those of the system; some may be missed while others start or end.
std::vector<pid_t> AllProcesses() {
  std::vector<pid_t> processes;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    if (const auto pid = ParseWhole<pid_t>(entry->path().filename().string())) {
      processes.push_back(*pid);
    }
  }
  return processes;
}

bool Handles(pid_t pid, int signal) {
  std::ifstream file(fmt::format("/proc/{}/status", pid));
  constexpr std::string_view kCaught = "SigCgt:";
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kCaught)) continue;
    const auto caught = std::stoull(line.substr(kCaught.size()), nullptr, 16);
    return ((caught >> (signal - 1)) & 1) != 0;
  }
  return false;  // it has gone
}

// Of this process, whose only thread calls. Some may be missed while others end.
std::vector<pid_t> Children() {
  std::vector<pid_t> children;
  std::ifstream list(fmt::format("/proc/self/task/{}/children", getpid()));
  if (list) {
    for (pid_t pid = 0; list >> pid;) children.push_back(pid);
    return children;
  }
  // A kernel without that file.
  for (const pid_t pid : AllProcesses()) {
    if (ParentOf(pid) == getpid()) children.push_back(pid);
  }
  return children;
}

}  // namespace

Pipe::Pipe() {
  std::array<int, 2> ends;
  if (pipe2(ends.data(), O_CLOEXEC) != 0) ThrowErrno("cannot make a pipe");
  read = FileDescriptor(ends[0]);
  write = FileDescriptor(ends[1]);
}

StartedProcess StartProcess(const Command& command) {
  FileDescriptor in, to_in;
  if (command.has_input) {
    Pipe pipe;
    in = std::move(pipe.read);
    to_in = std::move(pipe.write);
  } else {
    in = FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!in) ThrowErrno("/dev/null");
  }
  Pipe out, err, failure;  // `failure` closes when the program runs, or tells why it does not
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) ThrowErrno(fmt::format("cannot start '{}'", command.arguments[0]));
  if (pid == 0) {
    BecomeProgram(command, parent, in.get(), out.write.get(), err.write.get());
    const int error = errno;
    if (write(failure.write.get(), &error, sizeof(error)) < 0) _exit(EXIT_FAILURE);
    _exit(EXIT_FAILURE);
  }
  setpgid(pid, pid);  // here too, so that the group is there whoever comes first
  failure.write.Close();
  StartedProcess started;
  if (read(failure.read.get(), &started.error, sizeof(started.error)) == sizeof(started.error)) {
    waitpid(pid, nullptr, 0);
    return started;
  }
  started.error = 0;
  started.pid = pid;
  started.in = std::move(to_in);
  started.out = std::move(out.read);
  started.err = std::move(err.read);
  if (started.in) fcntl(started.in.get(), F_SETFL, O_NONBLOCK);
  fcntl(started.out.get(), F_SETFL, O_NONBLOCK);
  fcntl(started.err.get(), F_SETFL, O_NONBLOCK);
  return started;
}

void AdoptOrphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

bool KillDescendants() {
  constexpr std::chrono::milliseconds kPause{1};
  const auto deadline = std::chrono::steady_clock::now() + kKillTime;
  for (;;) {
    // Children only: their ids are theirs until they are waited for, while an id of a grandchild
    // might be somebody else's by the time the signal is sent.
    for (const pid_t child : Children()) kill(child, SIGKILL);
    pid_t gone = 0;
    while ((gone = waitpid(-1, nullptr, WNOHANG)) > 0) continue;
    if (gone < 0 && errno == ECHILD) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
}

void SignalHandlers(const std::vector<pid_t>& groups, int signal) {
  for (const pid_t pid : AllProcesses()) {
    if (std::find(groups.begin(), groups.end(), getpgid(pid)) != groups.end() &&
        Handles(pid, signal)) {
      kill(pid, signal);
    }
  }
}

std::string DescribeStatus(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int signal = WTERMSIG(wait_status);
    return fmt::format("was ended by signal {} ({})", signal, strsignal(signal));
  }
  return fmt::format("exited with status {}", WEXITSTATUS(wait_status));
}

int ExitStatus(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

}  // namespace heddle::tools
