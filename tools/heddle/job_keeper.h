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
//   - A process dies with the keeper in any case (PR_SET_PDEATHSIG), should both be killed at once.
//
// Where a job has other hosts, each of them has such a pair too (`heddle keep`), for its part of
// the job, and what this one starts are the *carriers* that bring it there: ssh, mpirun, srun. The
// stdin of a carrier tells a part's keeper what to run (JobPart), then is its pipe: more signals,
// and its end tells that the other side has died. What the processes there write comes back with
// their names in front already. A line that begins with kFailureMark is the part's keeper's own,
// which no program can write: it says at once what has failed, while the part still ends.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "tools/heddle/file_descriptor.h"
#include "tools/heddle/line_relay.h"
#include "tools/heddle/process_tree.h"

namespace heddle::tools {

// What a line of a part's keeper begins with that tells of a failure: the mark, the status, "] ".
inline constexpr std::string_view kFailureMark = "[failed ";

// Something that a keeper runs.
struct Task {
  std::string name;  // "worker 1", "workers on node7"
  Command command;
  bool works = true;        // the job ends when all that work have
  bool is_carrier = false;  // what it writes has names in front
  std::string input = {};   // of a carrier that signals reach by its stdin: what comes before them
  int stop_signal = 0;      // of others: in place of the signal that asks to stop; 0: that one
};

struct KeeperOptions {
  std::chrono::milliseconds grace, linger;  // as Job's
  bool is_part = false;                     // tells of failures to the keeper of the whole
};

// Runs tasks to their end, in a keeper of their own that this process watches, and returns the
// exit status (see Launcher::Run). `signals`: a descriptor whose bytes are signals that ask to
// stop, as does its end, or for the state (SIGUSR1); -1: none. Throws IoError if nothing was
// started.
int KeepTasks(std::vector<Task> tasks, const KeeperOptions& options, int signals = -1);

// Threads: the process has one.
class JobKeeper {
 public:
  // `signals`: each byte is the number of a signal that asks to stop, or for the state (SIGUSR1);
  // their end asks to stop too.
  JobKeeper(std::vector<Task> tasks, const KeeperOptions& options,
            std::vector<FileDescriptor> signals);

  // Runs the job to its end and returns its exit status.
  int Run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Process {
    std::string name;
    bool works;
    int stop_signal;
    pid_t pid;  // -1: has ended
    FileDescriptor in_fd;
    std::unique_ptr<LineSink> in;  // null: it gets signals by kill
    LineSource out, err;
  };

  // How far the job is. A phase ends by itself when no process is left.
  enum class Phase {
    kRunning,    // something works
    kLingering,  // all that works has ended well; the others may end by themselves until deadline_
    kFailed,     // by failure_, unless it is told of its cause until deadline_
    kStopping,   // all were asked to end; killed at deadline_
    kKilled,     // carriers have until deadline_ to bring that to the other hosts
  };

  void StartAll();
  void Start(Task task);
  LineSource Source(const Task& task, FileDescriptor fd, LineSink& sink);
  void ShowCarried(const std::string& carrier, bool works, std::string_view line, LineSink& sink);

  void Step();  // waits for something to happen, and handles it
  int PollTimeoutMs() const;
  void ReadOutput();
  void WriteOutput();
  std::vector<LineSink*> Sinks();
  void ReadSignals();
  void OnSignal(int signal);
  void ReapAll();
  void OnEnd(Process& process, int wait_status);
  void OnDeadline();
  void OnFailure(bool works, int status, std::string_view what);
  void FailWithoutCause();
  void Stop(int signal);
  void Kill();
  void Fail(int status, std::string_view what);
  void SignalAll(int signal);
  void AskForState();
  bool AnyLeft() const;
  bool AnyWorks() const;
  void DrainOutput();
  void Say(std::string_view text);

  std::vector<Task> tasks_;  // until they are started
  const KeeperOptions options_;
  std::vector<FileDescriptor> signals_;  // closed: who would send them has died
  FileDescriptor child_ended_;           // a signalfd for SIGCHLD
  LineSink out_, err_;
  LineSink* err_sink_;  // &out_ if both are one file, so that lines of the two do not mix
  std::vector<Process> processes_;
  bool has_children_ = false;  // processes or orphans, when last looked
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_ = Clock::time_point::max();
  int status_ = 0;            // of the first failure
  std::string failure_;       // in kFailed: a server's or the scheduler's end, as said to the user
  bool interrupted_ = false;  // by a signal, or the other side's death
};

}  // namespace heddle::tools
