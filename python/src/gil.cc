#include "python/src/gil.h"

#include <heddle/error.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include <pthread.h>

#include "engine/wait_checks.h"
#include "python/src/bindings.h"

namespace heddle::python {

namespace {

// seq_cst, all: a thread counts itself before it looks whether the interpreter is ending, or is
// over, and what ends it says so before it looks at the count; one of them sees the other.
std::atomic<bool> is_ending = false;
std::atomic<int> entering = 0;
std::atomic<int> updaters = 0;  // Locked of all threads
std::atomic<int> running = 0;   // RunningOp of all threads, but those of Locked

thread_local bool ends_the_interpreter = false;
thread_local int running_ops = 0;

// A child of fork() has none of the threads that were counted at that moment.
[[maybe_unused]] const int forgets_threads = pthread_atfork(nullptr, nullptr, [] {
  entering = 0;
  updaters = 0;
  running = 0;
});

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

// Asks for the GIL; where Python ends the thread for that, it stays, for as long as the process
// lasts.
void Restore(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {  // the unwinding, whose handler must not be left
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Not for ever: what it waits for may need what a thread that stays holds, such as a lock of the
// program's.
void AwaitNone(const std::atomic<int>& count) {
  constexpr int kNapsPerLook = 5;
  constexpr int kNapsMax = 3000;  // half a minute
  for (int naps = 1; count > 0 && naps <= kNapsMax; ++naps) {
    std::this_thread::sleep_for(kNap);
    if (naps % kNapsPerLook == 0) internal::WaitChecks::Look();
  }
}

}  // namespace

void EndThreads() {
  ends_the_interpreter = true;
  is_ending = true;
  const Unlocked unlocked;
  while (entering > 0) std::this_thread::yield();
}

void AwaitUpdaters() { AwaitNone(updaters); }
void AwaitRunningOps() { AwaitNone(running); }

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
      Restore(state_);
      return;
    }
  }
  Stay();
  Restore(state_);
}

Locked::Locked() {
  const Entrance entrance;
  if (!entrance) throw InvalidState("the call runs Python code, and the interpreter is ending");
  running_.emplace(RunningOp::Of::kUpdater);  // before EndThreads goes on
  held_.emplace();
}

Locked::~Locked() {
  held_.reset();
  running_.reset();
}

RunningOp::RunningOp(Of of) : count_(of == Of::kUpdater ? updaters : running) {
  ++running_ops;
  ++count_;
}
RunningOp::~RunningOp() {
  --count_;
  --running_ops;
}

}  // namespace heddle::python
