#include "python/src/gil.h"

#include <heddle/error.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include <unistd.h>

#include "python/src/bindings.h"

namespace heddle::python {

namespace {

// seq_cst, both: a thread counts itself before it looks whether the interpreter is ending, and
// EndThreads says so before it looks at the count; one of them sees the other.
std::atomic<bool> is_ending = false;
std::atomic<int> entering = 0;

thread_local bool ends_the_interpreter = false;
thread_local int running_ops = 0;

const pid_t importer = getpid();

// An exit handler that runs after heddle's may wait for a thread that stays here, so each stays
// once and for a while; most processes are gone long before. In naps, so that a process that is
// stopped meanwhile has them left.
constexpr int kNaps = 300;
constexpr std::chrono::milliseconds kNap(10);
thread_local bool has_stayed = false;

void Stay() {
  if (std::exchange(has_stayed, true)) return;
  while (!python_is_over) std::this_thread::sleep_for(kNap);  // work that is pending may take long
  for (int i = 0; i < kNaps; ++i) std::this_thread::sleep_for(kNap);
}

}  // namespace

void EndThreads() {
  ends_the_interpreter = true;
  is_ending = true;
  // A child of fork() has no thread but this one, whatever was counted at that moment.
  if (getpid() != importer) return;
  const Unlocked unlocked;
  while (entering > 0) std::this_thread::yield();
}

Entrance::Entrance() {
  ++entering;
  is_open_ = !is_ending || ends_the_interpreter || running_ops > 0;
  if (!is_open_) --entering;
}

Entrance::~Entrance() {
  if (is_open_) --entering;
}

Unlocked::~Unlocked() {
  {
    const Entrance entrance;
    if (entrance) {
      PyEval_RestoreThread(state_);
      return;
    }
  }
  Stay();
  PyEval_RestoreThread(state_);
}

Locked::Locked() {
  const Entrance entrance;
  if (!entrance) throw InvalidState("the call runs Python code, and the interpreter is ending");
  held_.emplace();
}

RunningOp::RunningOp() { ++running_ops; }
RunningOp::~RunningOp() { --running_ops; }

}  // namespace heddle::python
