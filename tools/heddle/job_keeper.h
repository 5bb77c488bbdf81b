// Runs the processes of a job that are on this machine: starts them, shows what they write, and
// sees to it that none of them, nor what they start themselves, outlives the job.
//
// DESIGN. Two processes watch over a job. The *launcher*, which the user sees, only passes on
// signals and waits. The *keeper*, its child in a session of its own, is the parent of the roles
// and does everything. Whichever of the two is killed, the other one cleans up:
//   - A pipe leads from launcher to keeper. The launcher writes the signals that it gets; the end
//     of the pipe tells that it has died, whenever and however.
//   - Both adopt orphans: what the roles leave behind becomes the keeper's child, and the
//     launcher's when the keeper is killed, to be killed too. So grandchildren that leave their
//     process group or session are found as well.
//   - A role dies with the keeper in any case (PR_SET_PDEATHSIG), should both be killed at once.
#pragma once

#include <chrono>
#include <csignal>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "tools/heddle/file_descriptor.h"
#include "tools/heddle/launcher.h"
#include "tools/heddle/line_relay.h"
#include "tools/heddle/process_tree.h"

namespace heddle::tools {

// Threads: the process has one.
class JobKeeper {
 public:
  // `signals`: the pipe's end; each byte is the number of a signal that asks to stop. `listener`:
  // the socket on which the scheduler is to listen at `root_port`; it becomes the scheduler's.
  JobKeeper(Job job, FileDescriptor signals, FileDescriptor listener, std::string root_host,
            int root_port);

  // Runs the job to its end and returns its exit status (see Launcher::Run).
  int Run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Role {
    Place place;
    pid_t pid;  // -1: has ended
    LineSource out, err;
  };

  // How far the job is. A phase ends by itself when no role is left.
  enum class Phase {
    kRunning,    // some worker runs
    kLingering,  // all workers have ended well; the others may end by themselves until deadline_
    kStopping,   // all were asked to end; killed at deadline_
    kKilled,
  };

  void StartAll();
  void Start(const Place& place, int inherited_fd);
  std::vector<std::string> FullEnvironment(const Place& place) const;

  void Step();  // waits for something to happen, and handles it
  int PollTimeoutMs() const;
  void ReadOutput();
  void WriteOutput();
  void ReadSignals();
  void OnSignal(int signal);
  void ReapAll();
  void OnEnd(Role& role, int wait_status);
  void OnDeadline();
  void Stop(int signal);
  void Fail(int status);
  void SignalRoles(int signal);
  bool AnyLeft(std::optional<DistRole> role = std::nullopt) const;
  void DrainOutput();
  void Say(std::string_view text);

  const Job job_;
  const std::string root_host_;
  const int root_port_;
  FileDescriptor signals_;      // closed: the launcher has died
  FileDescriptor listener_;     // closed once the scheduler has it
  FileDescriptor child_ended_;  // a signalfd for SIGCHLD
  LineSink out_, err_;
  LineSink* err_sink_;  // &out_ if both are one file, so that lines of the two do not mix
  std::vector<Role> roles_;
  bool has_children_ = false;  // roles or orphans, when last looked
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_ = Clock::time_point::max();
  int status_ = 0;            // of the first failure
  bool interrupted_ = false;  // by a signal, or the launcher's death
};

}  // namespace heddle::tools
