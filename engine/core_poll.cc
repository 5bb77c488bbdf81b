// Waiting threads that run an I/O loop. The invariants P1 to P3 are in heddle/wait_poller.h.
//
// leader_ is the token. It changes hands under the engine's lock: together with the list of waiters
// and of what is in flight, so no hand-over can be lost. SleepLocked takes it for its own thread;
// AppointLeaderLocked gives it to a sleeping one, when the leader leaves and when the first op gets
// in flight that a sleeping thread may wait for. A leader that is done hands on before it
// returns, whatever the reason: it was woken, its deadline has passed, its poller was removed.
//
// Between two calls of RunOne the leader takes the completions that were called in it: those wake
// nobody, and if the leader's own was among them, it returns without a system call.
#include <algorithm>

#include "base/clock.h"
#include "engine/core.h"
#include "engine/fork.h"

namespace heddle::internal {

using engine::tls_context;

namespace {

// A leader that finds another thread in the loop sleeps for so long before it looks again.
constexpr std::chrono::milliseconds kLookAgain{1};

}  // namespace

// While a thread runs what belongs to a poller.
class EngineCore::PollingScope {
 public:
  explicit PollingScope(EngineCore* core) : outer_(std::exchange(tls_context.polling, core)) {}
  ~PollingScope() { tls_context.polling = outer_; }
  PollingScope(const PollingScope&) = delete;
  PollingScope& operator=(const PollingScope&) = delete;

 private:
  const NoWaitScope no_wait_;
  EngineCore* const outer_;
};

bool EngineCore::AddPoller(WaitPoller& poller) {
  CheckOpen("AddPoller");
  const engine::TrackerGuard guard(lock_);
  if (poller_ != nullptr || poller_users_ > 0) return false;
  poller_ = &poller;
  AppointLeaderLocked();  // P1
  return true;
}

void EngineCore::RemovePoller(WaitPoller& poller) {
  engine::CheckNotForked("RemovePoller");
  if (tls_context.polling == this) {
    throw InvalidState("RemovePoller inside RunOne or OnWait of a WaitPoller");
  }
  const engine::TrackerGuard guard(lock_);
  if (poller_ != &poller) return;
  poller_ = nullptr;
  poller.Interrupt();
  while (poller_users_ > 0) {
    Waiter waiter{.kind = WaitKind::kPoller};
    SleepLocked(waiter, std::nullopt, /*timer=*/nullptr);
  }
}

// Makes a sleeping thread the leader if none is and one should be.
void EngineCore::AppointLeaderLocked() {
  if (!LeaderIsWantedLocked()) return;
  Waiter* longest = nullptr;  // the list has the latest first
  for (Waiter* waiter = waiters_; waiter != nullptr; waiter = waiter->next) {
    if (waiter->may_lead && !waiter->woken()) longest = waiter;
  }
  if (longest == nullptr) return;
  leader_ = longest;
  WakeLocked(*longest, Signal::kLead);
}

// Calls call(poller) without the lock for the thread of `self`, then takes the completions that
// were called in it. True: that thread should look for something to run.
template <class Call>
bool EngineCore::CallPollerLocked(const Waiter& self, Call&& call) {
  WaitPoller& poller = *poller_;
  ++poller_users_;
  lock_.unlock();
  {
    const PollingScope scope(this);
    call(poller);
  }
  lock_.lock();
  if (--poller_users_ == 0 && poller_ == nullptr) {
    WakeWaitersLocked([](const Waiter& waiter) { return waiter.kind == WaitKind::kPoller; });
  }
  if (kind_ != Kind::kThreaded) {
    const bool work = InlineWorkLocked();
    // Others too: this thread's wait may be over already, and then it runs nothing more.
    if (work) WakeWaitersLocked([&self](const Waiter& waiter) { return &waiter != &self; });
    return work;
  }
  const std::size_t ready = ready_.size();
  TakeCompletionsLocked();
  // Another thread may have taken them first, one that runs no ops: stats(), for example.
  const bool left_lying = executors_ == 0 && !ready_.empty() && HasPlaceLocked();
  return left_lying || ready_.size() > ready || tracker_.has_more_to_grant();
}

// `waiter` is about to sleep. True: its thread should first look for something to run.
bool EngineCore::AnnounceWaitLocked(const Waiter& waiter) {
  if (poller_ == nullptr || in_flight_.empty()) return false;
  return CallPollerLocked(waiter, [](WaitPoller& poller) { poller.OnWait(); });
}

// Runs the poller on the leader's thread until `waiter` is woken, the deadline has passed, or there
// may be something else to do than to poll.
void EngineCore::LeadLocked(Waiter& waiter, std::optional<Deadline> deadline) {
  const Clock::time_point until = deadline ? deadline->time() : Clock::time_point::max();
  bool spin = !waiter.for_completion;
  bool look = false;
  do {
    if (waiter.woken() || poller_ == nullptr || in_flight_.empty()) return;
    look = CallPollerLocked(waiter, [&](WaitPoller& poller) {
      if (std::exchange(spin, false)) SpinForSignal(waiter);
      PollOnce(poller, waiter, until);
    });
    if (look && !waiter.may_run) EnsureWorkerLocked();
  } while (!(look && waiter.may_run) && !HasPassed(deadline));
}

void EngineCore::PollOnce(WaitPoller& poller, Waiter& waiter, Clock::time_point until) {
  Signal signal = waiter.signal.load(std::memory_order_acquire);
  do {
    if (signal == Signal::kWoken) return;
    // acq_rel; pairs with the exchange in WakeLocked: either this thread sees that it was woken, or
    // the other one sees that it must interrupt
  } while (!waiter.signal.compare_exchange_weak(signal, Signal::kPolling, std::memory_order_acq_rel,
                                                std::memory_order_acquire));
  const bool led = poller.RunOne(until);
  signal = Signal::kPolling;
  waiter.signal.compare_exchange_strong(signal, Signal::kNone, std::memory_order_acq_rel);
  if (!led) AwaitSignal(waiter, std::min(until, Clock::now() + kLookAgain));
}

}  // namespace heddle::internal
