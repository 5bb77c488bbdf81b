#include "tools/heddle/job_keeper.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/parse.h"

namespace heddle::tools {
namespace {

// For the last output of a job that was interrupted to be taken by a reader who may be gone.
constexpr std::chrono::seconds kLastOutputTime{1};
// What servers and the scheduler exit with when their job has failed, whoever was the cause; and
// for how long an end gives way to one that was the cause.
constexpr int kJobFailedStatus = 1;
constexpr std::chrono::seconds kCauseTime{1};
constexpr std::chrono::seconds kNamedCauseTime{2};  // for one that is known to be on its way
// The scheduler tells the workers who has failed meanwhile.
constexpr std::chrono::milliseconds kTellTime{200};
constexpr std::size_t kNameBytesMax = 64;  // more than "worker 65535"
// For parts to say that they have come. They may never: the user may have told mpirun to write what
// comes from them to files, or with something in front.
constexpr std::chrono::seconds kPartsTime{5};
// For what runs on other hosts to be killed by its keepers there.
constexpr std::chrono::seconds kPartKillTime{5};

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

std::string HostName() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

// With the system's error, which says that a script is missing when its interpreter is.
std::string WhyNotRun(const std::string& program, int error) {
  const std::string why = std::strerror(error);
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(program, unknown)) return why;
  if (program.find('/') == std::string::npos) {
    return fmt::format("{} in PATH; the one in this folder is './{}'", why, program);
  }
  if (error == EACCES && access(program.c_str(), X_OK) != 0) {
    return why +
           ": it is not executable; chmod +x makes it so, or name what runs it, 'python FILE'";
  }
  std::string line;
  const bool has_line = error == ENOENT && std::getline(std::ifstream(program), line);
  if (!has_line || !line.starts_with("#!")) return why;
  return fmt::format("{}: what runs it by its first line, '{}'", why, line);
}

}  // namespace

bool JobKeeper::Failure::IsEffect() const { return !works && status == kJobFailedStatus; }

JobKeeper::JobKeeper(std::vector<Task> tasks, const KeeperOptions& options,
                     std::vector<FileDescriptor> signals)
    : tasks_(std::make_move_iterator(tasks.begin()), std::make_move_iterator(tasks.end())),
      options_(options),
      signals_(std::move(signals)),
      child_ended_(ChildSignals()),
      out_(STDOUT_FILENO),
      err_(STDERR_FILENO),
      err_sink_(SameFile(STDOUT_FILENO, STDERR_FILENO) ? &out_ : &err_) {
  std::signal(SIGPIPE, SIG_IGN);
  AdoptOrphans();
}

int JobKeeper::Run() {
  if (options_.is_part) err_sink_->Append("", kStartedMark);
  StartSome();
  // What is asked to stop has its time, also what outlives the first process of its task.
  while (AnyLeft() || (phase_ == Phase::kStopping && has_children_)) Step();
  // What the tasks have left behind.
  if (!KillDescendants()) Say("some processes of the job cannot be killed");
  DrainOutput();
  SayWhatIsLost();
  return status_;
}

// On the other stream; in vain if both are one.
void JobKeeper::SayWhatIsLost() {
  for (const LineSink* const sink : {&out_, &err_}) {
    if (sink->error() == 0) continue;
    const bool is_out = sink == &out_;
    LineSink& other = is_out ? err_ : out_;
    other.Append("[launch] ", fmt::format("{} cannot be written: {}", is_out ? "stdout" : "stderr",
                                          std::generic_category().message(sink->error())));
    DrainOutput();
    if (status_ == 0) status_ = 1;
  }
}

void JobKeeper::StartSome() {
  while (phase_ == Phase::kRunning && !tasks_.empty() && !WaitsForParts()) {
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    Start(std::move(task));
  }
}

void JobKeeper::Start(Task task) {
  constexpr int kNotFound = 127, kCannotRun = 126;  // as shells have it
  task.command.has_input = !task.input.empty();
  StartedProcess started;
  try {
    started = StartProcess(task.command);
  } catch (const Error& error) {
    return Fail(1, fmt::format("{}: {}", task.name, error.what()));
  }
  if (started.pid < 0) {
    return Fail(started.error == ENOENT ? kNotFound : kCannotRun,
                fmt::format("{}: cannot run '{}': {}", task.name, task.command.arguments[0],
                            WhyNotRun(task.command.arguments[0], started.error)));
  }
  std::unique_ptr<LineSink> in;
  if (started.in) {
    in = std::make_unique<LineSink>(started.in.get());
    in->AppendBytes(task.input);
  }
  if (task.cause) {
    cause_fd_ = std::move(task.cause);
    teller_ = task.name;
  }
  processes_.push_back({.name = task.name,
                        .works = task.works,
                        .stop_signal = task.stop_signal,
                        .parts_first = task.parts_first,
                        .parts_until = Clock::now() + kPartsTime,
                        .pid = started.pid,
                        .in_fd = std::move(started.in),
                        .in = std::move(in),
                        .out = Source(task, std::move(started.out), out_),
                        .err = Source(task, std::move(started.err), *err_sink_)});
}

LineSource JobKeeper::Source(const Task& task, FileDescriptor fd, LineSink& sink) {
  if (!task.is_carrier) return {std::move(fd), fmt::format("[{}] ", task.name), sink};
  return {std::move(fd),
          [this, name = task.name, works = task.works](std::string_view line, LineSink& to) {
            ShowCarried(name, works, line, to);
          },
          sink, LineSource::kShownLineBytesMax};
}

void JobKeeper::ShowCarried(const std::string& carrier, bool works, std::string_view line,
                            LineSink& sink) {
  if (line == kStartedMark) {
    for (Process& process : processes_) {
      if (process.name == carrier) --process.parts_first;
    }
    return;
  }
  if (line.starts_with(kFailureMark)) {
    const std::size_t end = line.find("] ");
    const std::optional<int> status =
        end == std::string_view::npos
            ? std::nullopt
            : ParseWhole<int>(line.substr(kFailureMark.size(), end - kFailureMark.size()));
    if (status) return OnFailure({carrier, works, *status, std::string(line.substr(end + 2))});
  }
  // What has no name in front is the carrier's own.
  sink.Append(line.starts_with("[") ? "" : fmt::format("[{}] ", carrier), line);
}

void JobKeeper::Step() {
  std::vector<pollfd> waits = {{.fd = child_ended_.get(), .events = POLLIN, .revents = 0}};
  for (const FileDescriptor& fd : signals_) {
    waits.push_back({.fd = fd.get(), .events = POLLIN, .revents = 0});
  }
  if (cause_fd_) waits.push_back({.fd = cause_fd_.get(), .events = POLLIN, .revents = 0});
  for (const LineSink* const sink : Sinks()) {
    if (!sink->empty()) waits.push_back({.fd = sink->fd(), .events = POLLOUT, .revents = 0});
  }
  for (const Process& process : processes_) {
    for (const LineSource* const source : {&process.out, &process.err}) {
      if (!source->open() || source->sink().full()) continue;
      waits.push_back({.fd = source->fd(), .events = POLLIN, .revents = 0});
    }
  }
  poll(waits.data(), waits.size(), PollTimeoutMs());
  // Ends before signals, so that a failure is known by its cause and not by what its reader did.
  ReapAll();
  Decide();
  ReadSignals();
  if (Clock::now() >= deadline_) OnDeadline();
  ReadOutput();
  StartSome();
  WriteOutput();
}

int JobKeeper::PollTimeoutMs() const {
  Clock::time_point until = deadline_;
  if (phase_ == Phase::kRunning && !tasks_.empty() && WaitsForParts()) {
    for (const Process& process : processes_) {
      if (process.parts_first > 0) until = std::min(until, process.parts_until);
    }
  }
  if (until == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX));
}

void JobKeeper::ReadOutput() {
  for (Process& process : processes_) {
    if (!process.out.sink().full()) process.out.ReadSome();
    if (!process.err.sink().full()) process.err.ReadSome();
  }
}

void JobKeeper::WriteOutput() {
  for (LineSink* const sink : Sinks()) sink->WriteSome();
}

std::vector<LineSink*> JobKeeper::Sinks() {
  std::vector<LineSink*> sinks = {&out_, &err_};
  for (const Process& process : processes_) {
    if (process.in != nullptr) sinks.push_back(process.in.get());
  }
  return sinks;
}

void JobKeeper::ReadSignals() {
  for (FileDescriptor& fd : signals_) {
    pollfd ready = {.fd = fd.get(), .events = POLLIN, .revents = 0};
    if (!fd || poll(&ready, 1, 0) <= 0) continue;
    unsigned char signal = 0;
    if (read(fd.get(), &signal, 1) == 1) {
      OnSignal(signal);
      continue;
    }
    fd.Close();
    interrupted_ = true;
    if (phase_ == Phase::kFailed) FailWithoutCause();
    if (phase_ == Phase::kRunning || phase_ == Phase::kLingering) Stop(SIGTERM);
  }
}

void JobKeeper::OnSignal(int signal) {
  if (signal == SIGUSR1) return AskForState();
  interrupted_ = true;
  if (phase_ == Phase::kFailed) return FailWithoutCause();
  if (status_ == 0) status_ = 128 + signal;
  if (phase_ == Phase::kStopping) return Kill();  // the user is in a hurry
  if (phase_ != Phase::kKilled) Stop(signal == SIGINT ? SIGINT : SIGTERM);
}

void JobKeeper::ReapAll() {
  signalfd_siginfo told;
  while (read(child_ended_.get(), &told, sizeof(told)) > 0) continue;
  int wait_status = 0;
  pid_t pid = 0;
  while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
    const auto process = std::find_if(processes_.begin(), processes_.end(),
                                      [pid](const Process& p) { return p.pid == pid; });
    if (process != processes_.end()) OnEnd(*process, wait_status);  // else an adopted orphan
  }
  has_children_ = pid == 0;
}

void JobKeeper::OnEnd(Process& process, int wait_status) {
  const pid_t pid = std::exchange(process.pid, -1);
  process.in.reset();
  process.in_fd.Close();
  // A part that has failed has said more than its carrier's status. What the process has started
  // may write on.
  process.err.ReadPresent();
  if (phase_ == Phase::kStopping || phase_ == Phase::kKilled) return;
  if (ExitStatus(wait_status) != 0) {
    return OnFailure(
        {process.name, process.works, ExitStatus(wait_status),
         fmt::format("{} (process {}{}) {}; stopping the job", process.name, pid,
                     options_.is_part ? " on " + HostName() : "", DescribeStatus(wait_status))});
  }
  if (phase_ == Phase::kRunning && !AnyWorks()) {
    phase_ = Phase::kLingering;
    deadline_ = Clock::now() + options_.linger;
  }
}

void JobKeeper::OnDeadline() {
  if (phase_ == Phase::kLingering) {
    Say(
        fmt::format("all workers have ended, but not all of the other processes within {} ms; "
                    "stopping them",
                    options_.linger.count()));
    return Stop(SIGTERM);
  }
  if (phase_ == Phase::kFailed) return FailWithoutCause();
  if (phase_ == Phase::kStopping && std::exchange(spares_others_, false)) {
    deadline_ = Clock::now() + options_.grace;
    return SignalAll(SIGTERM, Which::kOthers);
  }
  Kill();
}

// While the cause is not known, or not seen, nobody is asked to end: the cause would have died of
// that.
void JobKeeper::OnFailure(Failure failure) {
  if (phase_ == Phase::kStopping || phase_ == Phase::kKilled) return;
  failures_.push_back(std::move(failure));
  if (std::exchange(phase_, Phase::kFailed) != Phase::kFailed) {
    deadline_ = Clock::now() + (cause_.empty() ? kCauseTime : kNamedCauseTime);
  }
  Decide();
}

// The name is looked for after the end: it was written before what it may have caused.
void JobKeeper::Decide() {
  ReadCause();
  if (phase_ != Phase::kFailed) return;
  if (const Failure* const cause = Cause()) return Fail(cause->status, cause->what);
  if (!AnyLeft()) FailWithoutCause();
}

void JobKeeper::ReadCause() {
  while (cause_fd_) {
    std::array<char, kNameBytesMax> bytes;
    const ssize_t got = recv(cause_fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0) cause_told_.append(bytes.data(), static_cast<std::size_t>(got));
    const std::size_t end = cause_told_.find('\n');
    if (got > 0 && end == std::string::npos && cause_told_.size() < kNameBytesMax) continue;
    cause_fd_.Close();
    cause_is_told_ = end != std::string::npos;
    cause_ = cause_is_told_ ? cause_told_.substr(0, end) : teller_;
    if (phase_ == Phase::kFailed) deadline_ = Clock::now() + kNamedCauseTime;
  }
}

// Null: it may become known, or seen.
const JobKeeper::Failure* JobKeeper::Cause() const {
  const auto named = std::find_if(failures_.begin(), failures_.end(),
                                  [this](const Failure& f) { return f.name == cause_; });
  if (named != failures_.end() && (cause_is_told_ || !named->IsEffect())) return &*named;
  if (cause_fd_ || (named == failures_.end() && Runs(cause_))) return nullptr;
  return FirstCause();
}

const JobKeeper::Failure* JobKeeper::FirstCause() const {
  const auto first =
      std::find_if_not(failures_.begin(), failures_.end(), std::mem_fn(&Failure::IsEffect));
  return first == failures_.end() ? nullptr : &*first;
}

void JobKeeper::FailWithoutCause() {
  const Failure* const first = FirstCause();
  const Failure& failure = first == nullptr ? failures_.front() : *first;
  Fail(failure.status, failure.what);
}

bool JobKeeper::Runs(std::string_view name) const {
  return std::any_of(processes_.begin(), processes_.end(), [name](const Process& process) {
    return process.pid >= 0 && process.name == name;
  });
}

void JobKeeper::Stop(int signal) {
  phase_ = Phase::kStopping;
  deadline_ = Clock::now() + options_.grace;
  SignalAll(signal, Which::kAll);
}

// The keeper of a part kills at the second signal that it gets; its carrier is left the time for
// that.
void JobKeeper::Kill() {
  const bool again = std::exchange(phase_, Phase::kKilled) == Phase::kKilled;
  deadline_ = again ? Clock::time_point::max() : Clock::now() + kPartKillTime;
  for (Process& process : processes_) {
    if (process.pid < 0) continue;
    if (process.in != nullptr && !again) {
      process.in->AppendBytes(std::string(1, static_cast<char>(SIGTERM)));
    } else {
      kill(-process.pid, SIGKILL);
    }
  }
  WriteOutput();
}

void JobKeeper::Fail(int status, std::string_view what) {
  if (phase_ == Phase::kStopping || phase_ == Phase::kKilled) return;
  if (options_.is_part) {
    err_sink_->Append(fmt::format("{}{}] ", kFailureMark, status), what);
    err_sink_->WriteSome();
  } else {
    Say(what);
  }
  if (status_ == 0) status_ = status;
  // A worker that goes on after SIGTERM shall hear who has failed, and not lose the servers first.
  phase_ = Phase::kStopping;
  spares_others_ = true;
  deadline_ = Clock::now() + kTellTime;
  SignalAll(SIGTERM, Which::kWorking);
}

// To the whole groups: a task may be a script that waits for the program. A group whose first
// process has ended is left alone, for its number may be another group's by now; what is left of it
// is killed in the end.
void JobKeeper::SignalAll(int signal, Which which) {
  for (Process& process : processes_) {
    if (process.pid < 0) continue;
    if (which != Which::kAll && process.works != (which == Which::kWorking)) continue;
    if (process.in != nullptr) {
      process.in->AppendBytes(std::string(1, static_cast<char>(signal)));
      process.in->WriteSome();
      continue;
    }
    kill(-process.pid, process.stop_signal != 0 ? process.stop_signal : signal);
    kill(-process.pid, SIGCONT);  // one that was stopped must run to end
  }
}

// Those that do not handle it, such as shells and programs that have no store yet, would die of it.
// mpirun would end its processes.
void JobKeeper::AskForState() {
  std::vector<pid_t> groups;
  for (Process& process : processes_) {
    if (process.pid < 0 || process.stop_signal == SIGUSR1) continue;
    if (process.in == nullptr) {
      groups.push_back(process.pid);
      continue;
    }
    process.in->AppendBytes(std::string(1, static_cast<char>(SIGUSR1)));
    process.in->WriteSome();
  }
  SignalHandlers(groups, SIGUSR1);
}

bool JobKeeper::AnyLeft() const {
  return std::any_of(processes_.begin(), processes_.end(),
                     [](const Process& process) { return process.pid >= 0; });
}

bool JobKeeper::AnyWorks() const {
  return std::any_of(processes_.begin(), processes_.end(),
                     [](const Process& process) { return process.pid >= 0 && process.works; }) ||
         std::any_of(tasks_.begin(), tasks_.end(), std::mem_fn(&Task::works));
}

bool JobKeeper::WaitsForParts() const {
  return std::any_of(processes_.begin(), processes_.end(), [](const Process& process) {
    return process.pid >= 0 && process.parts_first > 0 && Clock::now() < process.parts_until;
  });
}

void JobKeeper::DrainOutput() {
  // Nobody of the job writes any more, so what is there is all.
  for (Process& process : processes_) {
    for (LineSource* const source : {&process.out, &process.err}) {
      source->ReadPresent();
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
