// A job of real processes on loopback: `heddle scheduler`, `heddle server`s, and workers that run a
// program. Each has a file for what it says.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/tools/child_process.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kForever{120};  // what happens at all happens sooner

struct JobSpec {
  int num_workers = 1;
  int num_servers = 1;
  std::vector<std::string> program = {};      // what workers run
  std::vector<std::string> environment = {};  // "NAME=value", of all processes
  // What stands before the command of "scheduler", "server" or "worker"; empty: nothing.
  std::function<std::vector<std::string>(const std::string& role, int rank)> prefix = {};
};

class JobProcesses {
 public:
  struct Process {
    std::string name;  // "scheduler", "server 0", "worker 3"
    std::string file;  // of its output
    std::unique_ptr<RunningProgram> program;
    std::optional<int> status = {};  // once it has ended: 0, ..., or -signal
    Clock::time_point ended = {};    // when that was seen

    std::string Output() const;
    // What the system says of it, by the name of the line; empty if it has ended.
    std::string StatusLine(const std::string& name) const;
    long ResidentKiB() const;  // 0 if it has ended
  };

  // Starts all of them, in an order that `random` picks.
  JobProcesses(const JobSpec& spec, std::mt19937_64& random);

  std::vector<Process>& processes() { return processes_; }
  Process& Find(const std::string& name);
  int port() const { return port_; }  // the scheduler's
  // Of this test's processes, in all environments of the job: "NAME=value".
  const std::string& mark() const { return mark_; }

  // Notes who has ended.
  void Look();
  // Until `done()` holds, looked at after each Look, or `until` comes: then false.
  template <class Done>
  bool WaitUntil(Clock::time_point until, const Done& done) {
    for (;;) {
      Look();
      if (done()) return true;
      if (Clock::now() >= until) return false;
      Pause();
    }
  }
  // Until all have ended but `spared`.
  bool WaitForEnd(Clock::time_point until, const Process* spared = nullptr);
  bool WaitForOutput(const Process& process, const std::string& text, Clock::time_point until);

  // What all have said, for people, each role's state included if it still runs.
  std::string Describe();

 private:
  static void Pause();
  void Start(const std::string& role, int rank, const std::vector<std::string>& command,
             const std::vector<std::string>& environment);

  const TempFolder folder_;
  std::string mark_;
  int port_ = 0;
  std::vector<Process> processes_;
};

}  // namespace heddle::tools
