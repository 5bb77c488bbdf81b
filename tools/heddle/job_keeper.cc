#include "tools/heddle/job_keeper.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace heddle::tools {
namespace {

// For the last output of a job that was interrupted to be taken by a reader who may be gone.
constexpr std::chrono::seconds kLastOutputTime{1};

bool SameFile(int a, int b) {
  struct stat of_a, of_b;
  return fstat(a, &of_a) == 0 && fstat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev &&
         of_a.st_ino == of_b.st_ino;
}

FileDescriptor ChildSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  return FileDescriptor(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

}  // namespace

JobKeeper::JobKeeper(Job job, FileDescriptor signals, FileDescriptor listener,
                     std::string root_host, int root_port)
    : job_(std::move(job)),
      root_host_(std::move(root_host)),
      root_port_(root_port),
      signals_(std::move(signals)),
      listener_(std::move(listener)),
      child_ended_(ChildSignals()),
      out_(STDOUT_FILENO),
      err_(STDERR_FILENO),
      err_sink_(SameFile(STDOUT_FILENO, STDERR_FILENO) ? &out_ : &err_) {
  std::signal(SIGPIPE, SIG_IGN);
  AdoptOrphans();
}

int JobKeeper::Run() {
  StartAll();
  // What is asked to stop has its time, also what outlives the role's first process.
  while (AnyLeft() || (phase_ == Phase::kStopping && has_children_)) Step();
  // What the roles have left behind.
  if (!KillDescendants()) Say("some processes of the job cannot be killed");
  DrainOutput();
  return status_;
}

void JobKeeper::StartAll() {
  Start({.role = DistRole::kScheduler}, listener_.get());
  listener_.Close();
  for (int rank = 0; rank < job_.num_servers; ++rank) {
    Start({.role = DistRole::kServer, .rank = rank}, -1);
  }
  for (int rank = 0; rank < job_.num_workers; ++rank) {
    Start({.role = DistRole::kWorker,
           .rank = rank,
           .local_rank = rank,
           .local_size = job_.num_workers},
          -1);
  }
}

void JobKeeper::Start(const Place& place, int inherited_fd) {
  if (phase_ != Phase::kRunning) return;  // an earlier one could not be started
  const std::string name = PlaceName(place), prefix = fmt::format("[{}] ", name);
  Command command = {.arguments = CommandOf(job_, place.role),
                     .environment = FullEnvironment(place),
                     .inherited_fd = inherited_fd};
  if (inherited_fd >= 0) {
    command.environment.push_back(fmt::format("HEDDLE_LISTEN_FD={}", inherited_fd));
  }
  StartedProcess started;
  try {
    started = StartProcess(command);
  } catch (const Error& error) {
    Say(fmt::format("{}: {}", name, error.what()));
    return Fail(1);
  }
  if (started.pid < 0) {
    constexpr int kNotFound = 127, kCannotRun = 126;  // as shells have it
    Say(fmt::format("{}: cannot run '{}': {}", name, command.arguments[0],
                    std::strerror(started.error)));
    return Fail(started.error == ENOENT ? kNotFound : kCannotRun);
  }
  roles_.push_back({.place = place,
                    .pid = started.pid,
                    .out = LineSource(std::move(started.out), prefix, out_),
                    .err = LineSource(std::move(started.err), prefix, *err_sink_)});
}

std::vector<std::string> JobKeeper::FullEnvironment(const Place& place) const {
  std::map<std::string, std::string, std::less<>> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t end = text.find('=');
    if (end != std::string_view::npos) variables.emplace(text.substr(0, end), text.substr(end + 1));
  }
  for (const auto& [name, value] : EnvironmentOf(job_, place, root_host_, root_port_)) {
    variables.insert_or_assign(name, value);
  }
  std::vector<std::string> environment;
  for (const auto& [name, value] : variables) {
    if (value.empty() && IsOfLauncher(name)) continue;
    environment.push_back(fmt::format("{}={}", name, value));
  }
  return environment;
}

void JobKeeper::Step() {
  std::vector<pollfd> waits = {{.fd = child_ended_.get(), .events = POLLIN, .revents = 0},
                               {.fd = signals_.get(), .events = POLLIN, .revents = 0}};
  for (const LineSink* const sink : {&out_, &err_}) {
    if (!sink->empty()) waits.push_back({.fd = sink->fd(), .events = POLLOUT, .revents = 0});
  }
  for (const Role& role : roles_) {
    for (const LineSource* const source : {&role.out, &role.err}) {
      if (!source->open() || source->sink().full()) continue;
      waits.push_back({.fd = source->fd(), .events = POLLIN, .revents = 0});
    }
  }
  poll(waits.data(), waits.size(), PollTimeoutMs());
  // Ends before signals, so that a failure is known by its cause and not by what its reader did.
  ReapAll();
  ReadSignals();
  if (Clock::now() >= deadline_) OnDeadline();
  ReadOutput();
  WriteOutput();
}

int JobKeeper::PollTimeoutMs() const {
  if (deadline_ == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX));
}

void JobKeeper::ReadOutput() {
  for (Role& role : roles_) {
    if (!role.out.sink().full()) role.out.ReadSome();
    if (!role.err.sink().full()) role.err.ReadSome();
  }
}

void JobKeeper::WriteOutput() {
  out_.WriteSome();
  err_.WriteSome();
}

void JobKeeper::ReadSignals() {
  pollfd ready = {.fd = signals_.get(), .events = POLLIN, .revents = 0};
  if (!signals_ || poll(&ready, 1, 0) <= 0) return;
  unsigned char signal = 0;
  if (read(signals_.get(), &signal, 1) == 1) return OnSignal(signal);
  signals_.Close();
  interrupted_ = true;
  if (phase_ == Phase::kRunning || phase_ == Phase::kLingering) Stop(SIGTERM);
}

void JobKeeper::OnSignal(int signal) {
  interrupted_ = true;
  if (status_ == 0) status_ = 128 + signal;
  if (phase_ == Phase::kStopping) return OnDeadline();  // the user is in a hurry
  if (phase_ != Phase::kKilled) Stop(signal == SIGINT ? SIGINT : SIGTERM);
}

void JobKeeper::ReapAll() {
  signalfd_siginfo told;
  while (read(child_ended_.get(), &told, sizeof(told)) > 0) continue;
  int wait_status = 0;
  pid_t pid = 0;
  while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
    const auto role =
        std::find_if(roles_.begin(), roles_.end(), [pid](const Role& r) { return r.pid == pid; });
    if (role != roles_.end()) OnEnd(*role, wait_status);  // else an orphan that we adopted
  }
  has_children_ = pid == 0;
}

void JobKeeper::OnEnd(Role& role, int wait_status) {
  const pid_t pid = std::exchange(role.pid, -1);
  if (phase_ == Phase::kStopping || phase_ == Phase::kKilled) return;
  if (ExitStatus(wait_status) != 0) {
    Say(fmt::format("{} (process {}) {}; stopping the job", PlaceName(role.place), pid,
                    DescribeStatus(wait_status)));
    return Fail(ExitStatus(wait_status));
  }
  if (phase_ == Phase::kRunning && !AnyLeft(DistRole::kWorker)) {
    phase_ = Phase::kLingering;
    deadline_ = Clock::now() + job_.linger;
  }
}

void JobKeeper::OnDeadline() {
  if (phase_ == Phase::kLingering) {
    Say(
        fmt::format("all workers have ended, but not all of the other processes within {} ms; "
                    "stopping them",
                    job_.linger.count()));
    return Stop(SIGTERM);
  }
  phase_ = Phase::kKilled;
  deadline_ = Clock::time_point::max();
  SignalRoles(SIGKILL);
}

void JobKeeper::Stop(int signal) {
  phase_ = Phase::kStopping;
  deadline_ = Clock::now() + job_.grace;
  SignalRoles(signal);
}

void JobKeeper::Fail(int status) {
  if (status_ == 0) status_ = status;
  Stop(SIGTERM);
}

// To the whole groups: a role may be a script that waits for the program. A group whose first
// process has ended is left alone, for its number may be another group's by now; what is left of it
// is killed in the end.
void JobKeeper::SignalRoles(int signal) {
  for (const Role& role : roles_) {
    if (role.pid < 0) continue;
    kill(-role.pid, signal);
    kill(-role.pid, SIGCONT);  // one that was stopped must run to end
  }
}

bool JobKeeper::AnyLeft(std::optional<DistRole> role) const {
  return std::any_of(roles_.begin(), roles_.end(), [role](const Role& r) {
    return r.pid >= 0 && (!role || r.place.role == *role);
  });
}

void JobKeeper::DrainOutput() {
  // Nobody writes any more, so what is there is all.
  for (Role& role : roles_) {
    for (LineSource* const source : {&role.out, &role.err}) {
      while (source->ReadSome()) continue;
      source->Finish();
    }
  }
  const Clock::time_point deadline = Clock::now() + kLastOutputTime;
  for (WriteOutput(); !out_.empty() || !err_.empty(); WriteOutput()) {
    if (interrupted_ && Clock::now() >= deadline) return;
    if (!interrupted_) ReadSignals();
    std::vector<pollfd> waits;
    for (const LineSink* const sink : {&out_, &err_}) {
      if (!sink->empty()) waits.push_back({.fd = sink->fd(), .events = POLLOUT, .revents = 0});
    }
    constexpr int kLookAtSignalsMs = 100;
    poll(waits.data(), waits.size(), kLookAtSignalsMs);
  }
}

void JobKeeper::Say(std::string_view text) {
  err_sink_->Append("[launch] ", text);
  err_sink_->WriteSome();
}

}  // namespace heddle::tools
