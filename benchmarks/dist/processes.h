// Processes that take part in a benchmark, and on which CPUs they run.
//
// All are forked before the process that forks them has a second thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

namespace heddle::bench_dist {

// Where a process runs: anywhere, or on the one CPU of this number, counted among those that the
// program was given.
inline constexpr int kAnywhere = -1;

// Killed with this object.
class Process {
 public:
  explicit Process(const std::function<void()>& body);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Seconds of CPU that it has used.
  double CpuSeconds() const;
  // All its threads, and those that they start.
  void Pin(int cpu) const;
  // Until it has ended; its status as waitpid has it.
  int Join();

 private:
  pid_t pid_ = -1;
};

// A process that serves.
class ServerProcess {
 public:
  // `serve` runs in it: it gives the address where it listens to `ready` and serves for ever.
  using Serve = std::function<void(const std::function<void(const std::string& address)>& ready)>;
  explicit ServerProcess(const Serve& serve);

  const std::string& address() const { return address_; }
  const Process& process() const { return *process_; }

 private:
  std::unique_ptr<Process> process_;
  std::string address_;
};

// A process that does its share of tasks which take two: Start, one's own share, Finish.
class Partner {
 public:
  using Tasks = std::vector<std::function<void()>>;
  // `make` runs in the process; the tasks are destroyed at the end.
  explicit Partner(const std::function<Tasks()>& make);
  ~Partner();

  void Start(std::size_t task) const;
  void Finish() const;
  const Process& process() const { return *process_; }

 private:
  int commands_ = -1;
  int answers_ = -1;
  std::unique_ptr<Process> process_;
};

// How many CPUs the program was given.
int NumCpus();

// This process: all its threads, and those that they start.
void PinThisProcess(int cpu);
void PinThisThread(int cpu);
double OwnCpuSeconds();

}  // namespace heddle::bench_dist
