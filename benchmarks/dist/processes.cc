#include "benchmarks/dist/processes.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>

#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"

namespace heddle::bench_dist {
namespace {

constexpr std::int64_t kEnd = -1;

const cpu_set_t& CpusOfProgram() {
  static const cpu_set_t set = [] {
    cpu_set_t mine;
    CHECK(sched_getaffinity(0, sizeof mine, &mine) == 0);
    return mine;
  }();
  return set;
}

cpu_set_t SetOf(int cpu) {
  const cpu_set_t& all = CpusOfProgram();
  if (cpu == kAnywhere) return all;
  cpu_set_t one;
  CPU_ZERO(&one);
  int left = cpu % CPU_COUNT(&all);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &all) && left-- == 0) CPU_SET(i, &one);
  }
  return one;
}

void PinThreads(const std::string& process, int cpu) {
  const cpu_set_t set = SetOf(cpu);
  const std::string folder = "/proc/" + process + "/task";
  DIR* const tasks = opendir(folder.c_str());
  CHECK(tasks != nullptr);
  while (const dirent* task = readdir(tasks)) {
    if (task->d_name[0] == '.') continue;
    // A thread may have ended in between.
    CHECK(sched_setaffinity(std::atoi(task->d_name), sizeof set, &set) == 0 || errno == ESRCH);
  }
  closedir(tasks);
}

// The two ends of a pipe.
struct Pipe {
  Pipe() {
    int ends[2];
    CHECK(pipe(ends) == 0);
    out = ends[0];
    in = ends[1];
  }
  int out;
  int in;
};

template <class Value>
void WriteTo(int pipe, const Value& value) {
  CHECK(write(pipe, &value, sizeof value) == sizeof value);
}

template <class Value>
Value ReadFrom(int pipe) {
  Value value;
  CHECK(read(pipe, &value, sizeof value) == sizeof value, "a process of the benchmark has ended");
  return value;
}

}  // namespace

Process::Process(const std::function<void()>& body) {
  CpusOfProgram();
  std::fflush(stdout);
  pid_ = fork();
  CHECK(pid_ >= 0);
  if (pid_ != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  body();
  std::fflush(stdout);
  _exit(0);
}

Process::~Process() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

int Process::Join() {
  int status = 0;
  CHECK(waitpid(std::exchange(pid_, -1), &status, 0) > 0);
  return status;
}

double Process::CpuSeconds() const {
  clockid_t clock;
  timespec time{};
  CHECK(clock_getcpuclockid(pid_, &clock) == 0 && clock_gettime(clock, &time) == 0);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void Process::Pin(int cpu) const { PinThreads(std::to_string(pid_), cpu); }

ServerProcess::ServerProcess(const Serve& serve) {
  const Pipe pipe;
  process_ = std::make_unique<Process>([&] {
    serve([&](const std::string& address) {
      CHECK(write(pipe.in, address.data(), address.size()) == static_cast<ssize_t>(address.size()));
    });
  });
  close(pipe.in);
  std::array<char, 256> text;
  const ssize_t bytes = read(pipe.out, text.data(), text.size());
  CHECK(bytes > 0, "a server has not come up");
  address_.assign(text.data(), static_cast<std::size_t>(bytes));
  close(pipe.out);
}

Partner::Partner(const std::function<Tasks()>& make) {
  const Pipe commands;
  const Pipe answers;
  process_ = std::make_unique<Process>([&] {
    const Tasks tasks = make();
    for (;;) {
      const auto task = ReadFrom<std::int64_t>(commands.out);
      if (task == kEnd) break;
      tasks[static_cast<std::size_t>(task)]();
      WriteTo(answers.in, 'd');
    }
  });
  close(commands.out);
  close(answers.in);
  commands_ = commands.in;
  answers_ = answers.out;
}

Partner::~Partner() {
  WriteTo(commands_, kEnd);
  process_->Join();
  close(commands_);
  close(answers_);
}

void Partner::Start(std::size_t task) const { WriteTo(commands_, static_cast<std::int64_t>(task)); }
void Partner::Finish() const { ReadFrom<char>(answers_); }

int NumCpus() { return CPU_COUNT(&CpusOfProgram()); }

void PinThisThread(int cpu) {
  const cpu_set_t set = SetOf(cpu);
  CHECK(sched_setaffinity(0, sizeof set, &set) == 0);
}

void PinThisProcess(int cpu) { PinThreads("self", cpu); }

double OwnCpuSeconds() {
  rusage usage{};
  CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace heddle::bench_dist
