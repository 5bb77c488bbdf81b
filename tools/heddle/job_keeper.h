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
// their names in front already. Two lines are the part's keeper's own, which no program can
// write: kStartedMark, once it runs; and one that begins with kFailureMark, which says at once what
// has failed, while the part still ends.
//
// Whose failure was the first? The order in which ends are seen does not say: the system closes the
// connections of a process before its parent can see its end, and a script or a driver may need
// long between the two, while others that have noticed are gone already. The scheduler knows. It
// writes the name of who failed first ("worker 1") into a socket that it inherits, before it tells
// any other process. What can happen, where C is the cause and E an end that follows from it:
//   - E is seen first, and ended because the scheduler told it: the name is in the socket already.
//     C is waited for, and nobody is asked to end meanwhile, since C would end of that.
//   - E is seen first, and ended because it lost a server by itself: the name comes once the
//     scheduler has seen that too, at once as a rule, half a second later if it asks around.
//   - C is seen first: the name is there, or is waited for, and is C's.
//   - The scheduler is C: the socket ends without a name, which is as good as its own. If its
//     status is 0 or kJobFailedStatus, it has not said who was the cause.
//   - Nobody names C, since it had not joined, or had left, or another program is the scheduler:
//     the first end counts that is no server's or the scheduler's kJobFailedStatus.
//   - C is named, but does not end, or ends with status 0: likewise.
// Each wait is bounded. In a job with parts nobody asks the scheduler, so nobody names C there.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "tools/heddle/file_descriptor.h"
#include "tools/heddle/line_relay.h"
#include "tools/heddle/process_tree.h"

namespace heddle::tools {

// The line of a part's keeper that says that it has come.
inline constexpr std::string_view kStartedMark = "[started]";
// What a line of a part's keeper begins with that tells of a failure: the mark, the status, "] ".
inline constexpr std::string_view kFailureMark = "[failed ";

// Something that a keeper runs.
struct Task {
  std::string name;  // "worker 1", "workers on node7"
  Command command;
  bool works = true;        // the job ends when all that work have
  bool is_carrier = false;  // what it writes has names in front
  int parts_first = 0;      // of a carrier: how many of its parts start before the next task does
  std::string input = {};   // of a carrier that signals reach by its stdin: what comes before them
  int stop_signal = 0;      // of others: in place of the signal that asks to stop; 0: that one
  FileDescriptor cause = {};  // of the scheduler: where it says who has failed first, in one line
};

struct KeeperOptions {
  std::chrono::milliseconds grace, linger;  // as Job's
  bool is_part = false;                     // tells of failures to the keeper of the whole
};

// Until this process ends, SIGUSR1 waits for KeepTasks, and does not end what cannot take it: a job
// that is about to start, or whose processes have just ended.
void HoldBackUserSignal();

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
    int parts_first;                // that have not said yet that they have come
    Clock::time_point parts_until;  // and are waited for until then
    pid_t pid;                      // -1: has ended
    FileDescriptor in_fd;
    std::unique_ptr<LineSink> in;  // null: it gets signals by kill
    LineSource out, err;
  };

  // The bad end of a process.
  struct Failure {
    std::string name;
    bool works;
    int status;
    std::string what;  // as said to the user

    // It may follow from any other one.
    bool IsEffect() const;
  };

  // How far the job is. A phase ends by itself when no process is left.
  enum class Phase {
    kRunning,    // something works
    kLingering,  // all that works has ended well; the others may end by themselves until deadline_
    kFailed,     // by one of failures_: the cause, if that is known before deadline_
    kStopping,   // all were asked to end, or at deadline_ are (spares_others_); killed at deadline_
    kKilled,     // carriers have until deadline_ to bring that to the other hosts
  };

  void StartSome();
  void Start(Task task);
  LineSource Source(const Task& task, FileDescriptor fd, LineSink& sink);
  void ShowCarried(const std::string& carrier, bool works, std::string_view line, LineSink& sink);

  void Step();  // waits for something to happen, and handles it
  int PollTimeoutMs() const;
  void ReadOutput();
  void WriteOutput();
  std::vector<LineSink*> Sinks();
  void SayWhatIsLost();
  void ReadSignals();
  void OnSignal(int signal);
  void ReapAll();
  void OnEnd(Process& process, int wait_status);
  void OnDeadline();
  void OnFailure(Failure failure);
  void Decide();
  void ReadCause();
  const Failure* Cause() const;
  const Failure* FirstCause() const;
  void FailWithoutCause();
  void Stop(int signal);
  void Kill();
  void Fail(int status, std::string_view what);
  enum class Which { kAll, kWorking, kOthers };
  void SignalAll(int signal, Which which);
  void AskForState();
  bool Runs(std::string_view name) const;
  bool AnyLeft() const;
  bool AnyWorks() const;
  bool WaitsForParts() const;
  void DrainOutput();
  void Say(std::string_view text);

  std::deque<Task> tasks_;  // until they are started
  const KeeperOptions options_;
  std::vector<FileDescriptor> signals_;  // closed: who would send them has died
  FileDescriptor child_ended_;           // a signalfd for SIGCHLD
  LineSink out_, err_;
  LineSink* err_sink_;  // &out_ if both are one file, so that lines of the two do not mix
  std::vector<Process> processes_;
  bool has_children_ = false;  // processes or orphans, when last looked
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_ = Clock::time_point::max();
  bool spares_others_ = false;     // of kStopping: only what works was asked to end
  int status_ = 0;                 // of the first failure
  std::vector<Failure> failures_;  // in the order in which they were seen, until one is taken
  FileDescriptor cause_fd_;        // closed: nobody says who was first, or it has been said
  std::string teller_;             // the task that does
  std::string cause_told_;         // what has come of the line
  std::string cause_;              // who failed first; empty: not known
  bool cause_is_told_ = false;     // else cause_ is teller_, which is gone
  bool interrupted_ = false;       // by a signal, or the other side's death
};

}  // namespace heddle::tools
