// An Asio io_context, and who runs it: at most one thread at a time, the *leader*.
//
// Waking a thread costs more than a small message, so the thread that waits for an answer leads and
// handles the answer itself. A thread of the reactor's own leads while nobody else does:
//   kCallersFirst  it naps, and looks around every 100 to 400 us, for as long as callers lead now
//                  and then (within a millisecond); after that it sleeps in the reactor. A caller
//                  that comes then gets the lead from it. While callers always lead right after
//                  they have sent something, each look costs them time and finds nothing: then it
//                  *dozes* instead, for up to 3.2 ms, until somebody sends and does not lead.
//                  Callers that lead for a moment only, by TryOne, may not come back: what they
//                  have left it finds after its next nap but one.
//   kThread        it always leads; callers never do.
//   kCallersOnly   there is no such thread.
//
// Invariants:
//   (R1) Handlers run on the leader only, so those of one reactor run one after another.
//   (R2) sleeping_ is true only between the leader's last look at the reasons not to sleep
//        (MustNotSleep) and the first handler after its sleep. Whoever brings such a reason sets it
//        first and then looks at sleeping_; the leader sets sleeping_ first and then looks at the
//        reasons (all sequentially consistent): one of them sees the other.
//   (R3) With kCallersFirst, as long as lead_ is kNobody, the own thread looks around within
//        kNapMax if napping_, within kDozeMax in any case.
//   (R4) What is attended is armed before the leader sleeps, and not attended from then on.
// An interrupt that another caller than the one meant has taken is made up for: no sleep of a
// caller is longer than kSleepMax.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include "base/mutex.h"

namespace heddle::kvstore::dist {

enum class Reception { kCallersOnly, kCallersFirst, kThread };

// What no call to the system tells of, as that bytes have come through shared memory. The reactor
// looks itself, for as long as its leader is awake. Methods are called in the reactor.
class Attended {
 public:
  virtual ~Attended() = default;
  enum class Found {
    kNothing,
    kSomething,
    kStream,  // a piece of much, of which more is likely to come soon
  };
  // Handles some of what has come.
  virtual Found Look() = 0;
  // From now on a handler runs, and calls Attend, when something comes. False: something has.
  virtual bool Arm() = 0;
};

class Reactor {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    Reception reception = Reception::kCallersFirst;
    std::chrono::microseconds spin{0};  // to poll, yielding, before sleeping
    const void* owner = nullptr;        // whose flush it is: several reactors may share one
    int cpu = -1;                       // the own thread runs on this CPU alone
    // Called by the leader before it sleeps; must not throw.
    std::function<void()> flush;
  };

  explicit Reactor(Options options);
  ~Reactor();  // Stop
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  boost::asio::io_context& context() { return context_; }

  // See Transport.
  bool RunOne(Clock::time_point until) EXCLUDES(mutex_);
  // Runs a handler that is ready, unless another thread leads. True: it has led.
  bool TryOne() EXCLUDES(mutex_);
  void Interrupt() EXCLUDES(mutex_);

  // Whether what waits for company on this thread's account will be flushed within kNapMax, or at
  // the end of the handler that this thread is in.
  bool FlushesSoon();
  // In the reactor, or after its end. Who is attended stays so until it is armed or forgotten.
  void Attend(std::shared_ptr<Attended> attended);
  void Forget(const Attended* attended);

  // First in each handler: the leader does not sleep any more.
  void Awake() { sleeping_.store(false, std::memory_order_relaxed); }
  // Ends the own thread and lets no caller lead any more; returns when nobody does. Not by the
  // leader.
  void Stop() EXCLUDES(mutex_);
  // After Stop: handles what there is, or waits until `until` for something.
  void RunStopped(Clock::time_point until);

 private:
  static constexpr std::chrono::microseconds kNap{100};
  static constexpr std::chrono::microseconds kNapMax{400};  // while callers lead
  static constexpr std::chrono::microseconds kDozeMax{3200};
  // In a row, by threads that do not lead, before the own thread is woken from dozing.
  static constexpr int kSendsPerDoze = 4;
  static constexpr std::chrono::milliseconds kCallersLinger{1};
  static constexpr std::chrono::milliseconds kSleepMax{10};
  static constexpr int kSpinMisses = 3;
  // In the midst of a stream of attended bytes, whatever `spin` is: being woken costs both sides
  // more than the next piece takes to come. Without yielding, which would hand a busy CPU over for
  // milliseconds; if it is the peer that needs this CPU, the misses end it.
  static constexpr std::chrono::microseconds kStreamSpin{50};
  // Looks in a row that found something, before handlers have their turn.
  static constexpr int kLooksInARow = 16;
  static constexpr int kLooksPerYield = 128;

  enum class Lead { kNobody, kCaller, kOwnThread, kStopped };

  class Leading;

  enum class Taken { kYes, kNotYet, kNo };

  // kNotYet: the own thread has the lead, and gives it up, or was asked to.
  Taken TakeLeadAsCaller(Clock::time_point until) EXCLUDES(mutex_);
  void GiveLeadUp() EXCLUDES(mutex_);
  // Runs what is ready, or sleeps until something is.
  void Turn(Clock::time_point until, bool own_thread);
  bool MustNotSleep(bool own_thread);
  // At all that is attended. True: something had come.
  bool Look();
  // False: something has come, and the leader must not sleep.
  bool ArmAttended();
  void DropForgotten();
  bool Spin(std::chrono::microseconds time);
  void Wake();
  void Run();  // the own thread
  void Nap(std::chrono::microseconds time) EXCLUDES(mutex_);
  // False: it was ended.
  bool Doze(std::chrono::microseconds time) EXCLUDES(mutex_);
  void EndDoze() EXCLUDES(mutex_);

  const Options options_;
  boost::asio::io_context context_{1};
  // Without it the context would stop when there is nothing to wait for.
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{
      context_.get_executor()};

  std::atomic<bool> interrupted_{false};  // callers; the own thread leaves it alone
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> led_{false};    // callers have, since the own thread last looked
  std::atomic<bool> tried_{false};  // likewise, by TryOne
  // The own thread looks around within kNapMax. It takes this back before it sleeps or dozes; who
  // sets it again wakes it, so that it does.
  std::atomic<bool> napping_{false};
  std::atomic<bool> dozing_{false};    // or about to, and then napping_
  std::atomic<int> sends_in_doze_{0};  // since a caller has led

  Mutex mutex_;
  CondVar lead_is_free_;
  CondVar nap_;
  Lead lead_ GUARDED_BY(mutex_) = Lead::kNobody;
  int callers_waiting_ GUARDED_BY(mutex_) = 0;
  bool doze_is_over_ GUARDED_BY(mutex_) = false;
  // Written under mutex_.
  std::atomic<bool> stopping_{false};
  std::atomic<bool> caller_waits_{false};  // callers_waiting_ > 0

  // The leader's.
  int spin_misses_ = 0;
  int looks_in_a_row_ = 0;
  bool in_stream_ = false;                            // the last look that found something did
  std::vector<std::shared_ptr<Attended>> attended_;   // null: forgotten
  std::vector<std::shared_ptr<Attended>> forgotten_;  // perhaps while they look
  std::thread thread_;
};

}  // namespace heddle::kvstore::dist
