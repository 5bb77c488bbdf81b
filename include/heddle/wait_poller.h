// WaitPoller: an I/O loop that threads in a wait may run.
//
// Waking a thread costs more than a small message does. So a thread that waits for what only a
// completion can bring runs the loop that will call it, rather than sleep until another thread has
// done so.
#pragma once

#include <chrono>

namespace heddle {

// What Engine::AddPoller takes: the loop of a network transport, for example. One engine's at a
// time.
//
// An op is in flight when its body has returned and its completion is still to be called. While any
// is, one of the threads in WaitForVar, WaitForReadsAndWrites, WaitForAll and Stop leads: it calls
// RunOne again and again. The engine names the leader, since it knows, under its lock, who waits
// and who is done. Whenever that lock is free:
//   (P1) If an op is in flight and a thread sleeps in a wait, a thread leads. (Those under a
//        NoWaitScope do not count.)
//   (P2) At most one thread leads.
//   (P3) A leader whose wait is over, or who may find an op to run, has returned from RunOne or
//        been interrupted. When it leaves and others wait, the one that has waited longest leads.
// A thread that leads runs no ops meanwhile, and does not spin.
//
// Nobody leads while nobody waits: a poller whose events must not wait for that needs a thread of
// its own as well. It is up to the poller to keep that one and the leader apart.
class WaitPoller {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~WaitPoller() = default;

  // Waits for events and handles what there is. Returns true when it has handled any, when
  // interrupted, or when `until` has passed (Clock::time_point::max(): never); now and then for no
  // reason. Must return once a completion has been called in it, which takes effect only then.
  // False, at once: another thread runs the loop; the caller sleeps for a millisecond at most, and
  // asks again. What it calls may push, as if under a NoWaitScope; waits throw InvalidState.
  virtual bool RunOne(Clock::time_point until) noexcept = 0;

  // Lets the RunOne in progress return soon, or the next one if none is: a write to an eventfd, for
  // example. Threads: any. Called under the engine's lock: must not call heddle, nor take a lock
  // that is held while heddle is called.
  virtual void Interrupt() noexcept = 0;

  // The calling thread is about to sleep in a wait, or to lead, while an op is in flight: what has
  // been held back to go out together must go out now. Threads: any, several at once.
  virtual void OnWait() noexcept {}
};

}  // namespace heddle
