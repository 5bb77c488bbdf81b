// One thread that sleeps between runs and is woken by one system call.
//
// oneTBB wakes several of its threads for one task and takes locks to do so: several times the cost
// to the caller. A doorman comes for the first worker that an engine asks for. It has nothing to do
// with oneTBB, so that a process may be forked at any moment of its life: what ends a child waits
// for oneTBB's locks.
//
// What wakes it is a timer. A thread that wakes another one is often interrupted by it before the
// call returns, for all of its run; who sets a timer goes on for as long as the timer takes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "base/unique_fd.h"

namespace heddle::engine {

class Doorman {
 public:
  // run() is called on the doorman's thread, once for each Wake that returned true. It sleeps by
  // `timer`; without one, as where the process has no descriptor left, each Wake wakes it at once.
  explicit Doorman(std::function<void()> run, UniqueFd timer = NewTimer());
  ~Doorman() { End(); }
  Doorman(const Doorman&) = delete;
  Doorman& operator=(const Doorman&) = delete;

  // Ends the thread, after the runs that were asked for. Nobody may ask for more. Repeatable.
  void End() noexcept;

  static UniqueFd NewTimer() noexcept;

  // The run begins when `delay` has passed, or sooner. False: the doorman is at work, or coming.
  // Threads: any. The run may end, and End() begin, before the call has returned.
  bool Wake(std::chrono::nanoseconds delay) noexcept;

  // A run is about to begin. seq_cst, as the run's beginning. Threads: any.
  bool IsComing() const noexcept {
    return state_.load(std::memory_order_seq_cst) == State::kCalled;
  }

  // Called by a run: from now on Wake succeeds, and another run follows this one without a sleep in
  // between. Without this a waker that comes while a run ends is told that the doorman is at work.
  // Does nothing on other threads.
  void AboutToLeave() noexcept;
  // Takes that back. True: Wake has succeeded since, and the run that was asked for does not come:
  // the caller has to see to one.
  [[nodiscard]] bool Stay() noexcept;

 private:
  // kParked: sleeps, or will look at the state once more before that. kCalled: a run is to begin.
  enum class State : std::uint32_t { kBusy, kParked, kCalled, kStopping };

  void Loop();
  void Sleep() noexcept;
  void EndSleep(std::chrono::nanoseconds delay) noexcept;

  const std::function<void()> run_;
  const UniqueFd timer_;
  std::atomic<State> state_{State::kParked};
  std::atomic<int> wakers_{0};  // threads inside Wake
  // By the run, which is about to leave: state_ is others' to change. The doorman's thread's own.
  bool parked_early_ = false;
  std::thread thread_;  // the last to be made
};

}  // namespace heddle::engine
