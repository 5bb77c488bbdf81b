// Who looks at the inbox: workers, helping waiters, the lookout, and how they hand over.
#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <sched.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/core.h"
#include "engine/scheduling.h"

namespace heddle::internal {

namespace {

// A worker that was woken for a few ops returns the CPU soon: it is often that of the thread that
// woke it.
constexpr int kShortLingerPolls = 3;
// A guest returns to its host after so long, so that others get their turn. No worker on a thread
// of its own does: while it is away others ask for a worker in its place, who comes for nothing.
constexpr std::int64_t kTurnNs = 5'000'000;
// A helper that found fewer ops came for nothing.
constexpr std::uint64_t kWorthComing = 8;
constexpr int kBackoffMax = 1024;
// Ops in a row without a push, after which nobody is thought to push.
constexpr int kCalmOps = 16;
// What calls for help may skip, in time: the ops skipped are of any length.
constexpr std::int64_t kBackoffNs = 1'000'000;
// Of short ops, every so many looks at how many lie in the inbox: a look fetches a line that every
// push writes.
constexpr int kTailLookEvery = 8;
// Ops between two wake-ups of waits that could help.
constexpr int kWakesApart = 16;
// Looks in vain after which an executor lets others have its CPU, if async ops are in flight: the
// thread that is to complete them may be waiting for it.
constexpr int kLooksBeforeYield = 12;
// A yield that took longer went to a thread that has nothing to do with the engine, most likely.
// Such ones may take one part in so many of the time.
constexpr std::int64_t kLongYieldNs = 200'000;
constexpr std::int64_t kLongYieldShare = 32;

constexpr std::chrono::microseconds kNap{50};  // nobody executes: a pusher relies on it
// Somebody does: twice as long after each look that finds progress. A look costs the machine some
// 10 us, and where it takes an executor's CPU several times that.
constexpr std::chrono::microseconds kWatchNap{1000};
constexpr std::chrono::microseconds kWatchNapMost{2000};
// On behalf of the watchdog alone. An idle engine is to use no CPU, whatever that is set to.
constexpr std::chrono::milliseconds kDeepNapMin{5};
constexpr std::int64_t kDeepAfterNs = 1'500'000;  // without a push

}  // namespace

// --- executors -----------------------------------------------------------------------------------

// See worker_host.h.
bool EngineCore::RunWorker(engine::WorkerThread thread) {
  bool again = false;
  {
    const engine::TrackerGuard guard(lock_);
    const bool admitted = std::exchange(admit_, false) || !jobs_.empty();
    const bool pays = executors_ < options_.num_workers && ParallelPaysLocked(executors_ + 1);
    if (executors_ == 0 || admitted || pays) {
      Executor executor;
      executor.keeps_candidate = true;
      executor.in_bursts = true;
      executor.burst_end = LookAtTailLocked();
      const ExecutorLink link(*this, executor);
      JoinExecutorsLocked();
      guests_ += thread == engine::WorkerThread::kGuest;
      again = WorkLocked(executor, thread);
      guests_ -= thread == engine::WorkerThread::kGuest;
    } else {
      WakeLookout();  // a pusher counts on this worker: A2
    }
    if (!again) host_->AboutToLeave();
  }
  // release; pairs with the acquire in Stop; nothing is touched after
  if (!again) workers_.fetch_sub(1, std::memory_order_release);
  return again;
}

// Runs ops until there are none, or until a guest's turn is over (true).
bool EngineCore::WorkLocked(Executor& executor, engine::WorkerThread thread) {
  const bool helper = executors_ > 1;
  const bool guest = thread == engine::WorkerThread::kGuest;
  bool again = false;
  const std::int64_t turn_ends_ns = SteadyNowNs() + kTurnNs;
  int until_clock = 0;
  int polls = kShortLingerPolls;
  std::uint64_t others_ran = executor_ran_;
  while (true) {
    if (Job* job = JoinableJobLocked()) {
      if (executor.candidate != nullptr) {
        PushReadyLocked(std::exchange(executor.candidate, nullptr));
      }
      LeaveGpuLocked(executor);
      HelpLocked(*job);
      // Split ops come by the pair, push and pull, and last longer than waking somebody for each. A
      // single executor only: beside the thread that waits, more would spin on that one's CPU.
      if (executors_ == 1) polls = kLingerPolls;
      continue;
    }
    const bool too_many = executors_ > options_.num_workers && (guest || guests_ == 0);
    if (!HasPlaceLocked() || too_many) {
      // Waits that help have taken every place; they hand over when they leave. A thread in
      // WaitForAll goes before a worker: it has a CPU, where a worker that was just woken may
      // share one with another. Of workers a guest goes first.
      if (--executors_ == 0) LowerModeLocked(/*after_work=*/false);
      break;
    }
    if (Op* op = PickLocked(executor)) {
      ExecuteLocked(executor, op);
      const bool soon = executor.ran < kWorthComing && in_flight_.empty();
      polls = soon ? kShortLingerPolls : kLingerPolls;
      const bool is_time = --until_clock < 0;
      // Let in because the others seemed stuck: they no longer are, and one executor is faster. Or
      // a thread in WaitForAll has come to take over, see WaitTakesOverLocked.
      const std::uint64_t others = executor_ran_ - executor.ran - others_ran;
      const bool may_leave =
          is_time ? !ParallelPaysLocked(executors_) : waits_joined_ > 0 && AloneIsFasterLocked();
      if (may_leave && executors_ > 1 && others > kWorthComing && (guest || guests_ == 0)) {
        --executors_;
        break;
      }
      if (is_time) {
        until_clock = body_ns_ > kLongBodyNs ? 0 : 64;
        others_ran = executor_ran_ - executor.ran;
        if (guest && SteadyNowNs() > turn_ends_ns) {
          again = true;
          if (--executors_ > 0) break;
          // Its next turn may be long in coming.
          if (executor.candidate != nullptr) {
            PushReadyLocked(std::exchange(executor.candidate, nullptr));
          }
          LowerModeLocked(/*after_work=*/true);
          EnsureWorkerLocked();
          break;
        }
      }
      continue;
    }
    if (polls > 0 && LingerLocked(executor, &polls)) continue;
    if (LeaveExecutorsLocked(executor)) break;
    executor.burst_end = LookAtTailLocked();
    polls = kLingerPolls;
  }
  if (helper) NoteHelpLocked(executor.ran);
  return again;
}

// A further executor leaves that has run so many ops: in vain the next one is called later.
void EngineCore::NoteHelpLocked(std::uint64_t ran) {
  help_backoff_ = ran < kWorthComing ? std::min(help_backoff_ * 2 + 1, kBackoffMax) : 0;
  const std::int64_t most = kBackoffNs / std::max<std::int64_t>(body_ns_, 1) + 1;
  help_skips_ = static_cast<int>(std::min<std::int64_t>(help_backoff_, most));
}

void EngineCore::JoinExecutorsLocked() {
  ++executors_;
  if (alone_) WakeLookout();  // A2
  mode_.store(Mode::kAwake, std::memory_order_relaxed);
}

// False: this is the last executor and there is work: it must stay.
bool EngineCore::LeaveExecutorsLocked(const Executor& executor) {
  if (--executors_ > 0) return true;
  host_->AboutToLeave();  // before a pusher can see the lower mode
  LowerModeLocked(executor.ran >= kWorthComing);
  if (!WorkIsVisibleLocked()) return true;
  JoinExecutorsLocked();
  host_->Stay();
  return false;
}

// Nobody executes any more: who is to look at the inbox next? The caller looks at it once more
// after this. `after_work`: of a worker, which pushes would find at work but for a pause. Not so of
// a thread in a wait, or a worker that came for little: who pushes and waits by turns runs its ops
// itself, and would pay for a worker each time.
void EngineCore::LowerModeLocked(bool after_work) {
  const bool deep =
      (after_work && lookout_watches_) || lookout_deep_.load(std::memory_order_relaxed);
  mode_.store(deep ? Mode::kDeep : Mode::kNap, std::memory_order_seq_cst);  // see DESIGN
}

// By tail, not by slot: a pusher may have its ticket and not yet have written the slot.
bool EngineCore::WorkIsVisibleLocked() {
  return inbox_.tail() != inbox_head_ || CompletionsAreVisibleLocked() || !ready_.empty() ||
         tracker_.has_more_to_grant();
}

// Looks away for a while: polling the inbox at once would fetch the lines that the pusher writes,
// and taking ops one by one as they come is slower than coming late and finding several. Looks back
// at most *polls times and counts them down; true: there may be work.
bool EngineCore::LingerLocked(Executor& executor, int* polls) {
  LeaveGpuLocked(executor);
  inbox_.PublishHead(inbox_head_);
  released_published_.store(released_, std::memory_order_relaxed);
  const std::uint64_t head = inbox_head_;
  const std::uint64_t completions_head = completions_head_;
  const std::uint32_t calls = calls_.load(std::memory_order_relaxed);
  ++idlers_;
  const bool may_yield = !in_flight_.empty();
  std::int64_t no_yield_until_ns = no_yield_until_ns_;
  lock_.unlock();
  const int pauses = engine::PausesPerMicrosecond();
  bool work = false;
  for (int looks = executor.vain_looks; *polls > 0 && !work; --*polls, ++looks) {
    if (may_yield && looks >= kLooksBeforeYield) YieldCpu(&no_yield_until_ns);
    const auto called = [&] { return calls_.load(std::memory_order_relaxed) != calls; };
    for (int i = 0; i < pauses && !called(); ++i) Pause();
    work = called() || inbox_.LooseTail() != head || completions_.LooksFilled(completions_head) ||
           completed_.load(std::memory_order_relaxed) != nullptr;
  }
  lock_.lock();
  --idlers_;
  no_yield_until_ns_ = std::max(no_yield_until_ns_, no_yield_until_ns);
  executor.burst_end = LookAtTailLocked();
  return work;
}

// Lets others have this CPU, from *not_before_ns on, which it sets.
void EngineCore::YieldCpu(std::int64_t* not_before_ns) {
  const std::int64_t started_ns = SteadyNowNs();
  if (started_ns < *not_before_ns) return;
  std::this_thread::yield();
  const std::int64_t ended_ns = SteadyNowNs();
  const std::int64_t took_ns = ended_ns - started_ns;
  if (took_ns > kLongYieldNs) *not_before_ns = ended_ns + kLongYieldShare * took_ns;
}

// Would a WaitForAll for `epoch` run what is taken next, from the ready queue or from the inbox?
// See StreamLocked and PopReadyLocked.
bool EngineCore::FindsWorkLocked(std::uint32_t epoch) const {
  const auto is_later = [epoch](std::uint32_t of) {
    return static_cast<std::int32_t>(of - epoch) > 0;
  };
  if (!ready_.empty() && !is_later(ready_.top()->epoch)) return true;
  return inbox_head_ != seen_tail_ && !is_later(current_epoch_);
}

// About to run a body that is probably long: may pushers still count on somebody to look at the
// inbox? If not, lowers the mode, so that the next pusher requests a worker; true: raise it
// afterwards. If work is visible already, *request_worker says to request one now.
bool EngineCore::LowerGuardLocked(bool* request_worker) {
  if (NeedsHelpLocked()) {
    // A passive WaitForAll is nearer than a new worker, if there is anything that it may run.
    for (Waiter* waiter = waiters_; waiter != nullptr; waiter = waiter->next) {
      if (!waiter->may_help || waiter == leader_ || waiter->woken()) continue;
      if (!FindsWorkLocked(waiter->target)) continue;
      WakeLocked(*waiter);
      help_skips_ = kWakesApart;
      return false;
    }
    *request_worker = ReserveWorker();
    return false;
  }
  if (body_ns_ < kLongBodyNs || idlers_ > 0 || executors_ != 1 || executing_ > 1 ||
      workers_.load(std::memory_order_relaxed) >= options_.num_workers) {
    return false;
  }
  mode_.store(Mode::kDeep, std::memory_order_seq_cst);  // see DESIGN: store, then recheck
  if (inbox_.tail() == inbox_head_ && !CompletionsAreVisibleLocked()) return true;
  mode_.store(Mode::kAwake, std::memory_order_relaxed);
  *request_worker = ReserveWorker();
  return false;
}

// About to run a body while the lookout sleeps. An executor that has found a single op runs it
// alone (true). Else wakes the lookout.
bool EngineCore::GoAloneLocked(const Executor& executor) {
  if (executor.ran == 1 && executors_ == 1 && executing_ == 1) {
    mode_.store(Mode::kAlone, std::memory_order_seq_cst);  // see DESIGN: store, then recheck
    if (!WorkIsVisibleLocked()) {
      alone_ = true;
      return true;
    }
    mode_.store(Mode::kAwake, std::memory_order_relaxed);
  }
  WakeLookout();
  return false;
}

// Is there so much work beside the op about to run (executing_ counts it) that a further executor
// pays?
bool EngineCore::NeedsHelpLocked() {
  const int busy = std::max(executors_, executing_ + idlers_);
  if (busy >= options_.num_workers || !ParallelPaysLocked(busy + 1)) return false;
  // Registered ops that are blocked count only beside a ready one: that they may run soon is a
  // guess, which help_backoff_ corrects.
  const std::uint64_t registered = ready_.empty() ? 0 : pushed_ - done_;
  // Who pushes short ops without a pause has a CPU as well, and often waits for them next. Not if
  // it is a body.
  const bool short_ops = body_ns_ < kShortBodyNs;
  ++calm_ops_;
  if (!short_ops || --until_tail_look_ <= 0) {
    until_tail_look_ = kTailLookEvery;
    const std::uint64_t pushed = LookAtTailLocked() - pushed_by_bodies_;
    if (pushed != std::exchange(pushed_at_look_, pushed)) calm_ops_ = 0;
  }
  if (calm_ops_ < kCalmOps && short_ops && busy + 1 >= cpus_) return false;
  const std::uint64_t in_inbox = seen_tail_ - std::min(inbox_head_, seen_tail_);
  const auto visible = static_cast<std::int64_t>(registered + in_inbox);
  if (visible == 0 || visible * std::min(body_ns_, kWorthHelpNs) < kWorthHelpNs) return false;
  if (help_skips_ > 0) {
    --help_skips_;
    return false;
  }
  return true;
}

bool EngineCore::ReserveWorker() noexcept {
  int workers = workers_.load(std::memory_order_relaxed);
  while (workers < options_.num_workers) {
    if (workers_.compare_exchange_weak(workers, workers + 1, std::memory_order_relaxed))
      return true;
  }
  return false;
}

// A thread is about to sleep or to leave: somebody else must do the work that there is.
void EngineCore::EnsureWorkerLocked() {
  if (mode_.load(std::memory_order_relaxed) == Mode::kStopped) [[unlikely]] {
    if (engine::tls_context.op == nullptr) RunLateLocked();  // there are no workers any more
    return;
  }
  if (kind_ != Kind::kThreaded || executors_ > 0) return;
  TakeCompletionsLocked();  // costs less than waking anybody for them
  if (!WorkIsVisibleLocked() || host_->IsComing()) return;
  if (!ReserveWorker()) {
    // All workers that count may have looked for the last time.
    lookout_watches_ ? HurryLookout() : WakeLookout();
    return;
  }
  mode_.store(Mode::kAwake, std::memory_order_relaxed);
  lock_.unlock();
  host_->RequestWorker(When::kNow);
  lock_.lock();
}

// --- ParallelFor ---------------------------------------------------------------------------------

// Nothing more urgent than the blocks of `job` is ready.
bool EngineCore::GoesFirstLocked(const Job& job) {
  DrainIfUrgentLocked();
  return ready_.empty() || job.priority >= ready_.top_priority();
}

EngineCore::Job* EngineCore::JoinableJobLocked() {
  while (!jobs_.empty()) {
    Job* job = jobs_.back();
    if (!job->blocks.AnyLeft()) {
      jobs_.pop_back();
      continue;
    }
    return GoesFirstLocked(*job) && HasPlaceLocked() ? job : nullptr;
  }
  return nullptr;
}

bool EngineCore::HoldsUp(const Op* op, const Waiter& waiter) {
  if (waiter.kind == WaitKind::kVar) return HolderOf(waiter.var) == op;
  return waiter.kind == WaitKind::kAll && static_cast<std::int32_t>(op->epoch - waiter.target) <= 0;
}

// Wakes threads in waits that `op` holds up, at most so many, to help with its ParallelFor:
// those that look for their signal anyway, or those that sleep. Returns how many.
std::int64_t EngineCore::CallWaitsLocked(const Op* op, std::int64_t most, bool spinning) {
  std::int64_t called = 0;
  for (Waiter* waiter = waiters_; waiter != nullptr && called < most; waiter = waiter->next) {
    if (waiter == leader_ || waiter->woken() || !waiter->may_run) continue;
    if (waiter->spins.load(std::memory_order_relaxed) != spinning) continue;
    if (!HoldsUp(op, *waiter)) continue;
    WakeLocked(*waiter);
    ++called;
  }
  return called;
}

void EngineCore::HelpLocked(Job& job, std::optional<Deadline> until) {
  WakeLookout();
  job.helpers.fetch_add(1, std::memory_order_relaxed);
  ++executing_;
  ++helping_;
  lock_.unlock();
  engine::ThreadContext& context = engine::tls_context;
  const engine::ThreadContext outer = context;
  context = job.context;
  context.children = 0;
  // This thread takes one of the workers' places, which those may need that are to make room.
  ++context.no_wait_depth;
  RunBlocks(job, until);
  if (context.children > 0) job.children.fetch_add(context.children, std::memory_order_relaxed);
  context = outer;
  lock_.lock();
  --executing_;
  --helping_;
  // release; pairs with the acquire in ParallelFor: the blocks' effects. The job may be gone after
  // this.
  job.helpers.fetch_sub(1, std::memory_order_release);
}

void EngineCore::RunBlocks(Job& job, std::optional<Deadline> until) noexcept {
  const int cpu = sched_getcpu();
  const auto run = [&job, until](std::int64_t block) {
    const std::int64_t begin = block * job.grain;
    try {
      (*job.body)(begin, begin + std::min(job.grain, job.count - begin));
    } catch (...) {
      if (!job.failed.exchange(true)) job.error = std::current_exception();
      job.blocks.Drop();
    }
    return !HasPassed(until);
  };
  job.blocks.TakeAll(static_cast<std::uint32_t>(std::max(cpu, 0)), run);
}

void EngineCore::ParallelFor(std::int64_t count, std::int64_t grain,
                             const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count < 0 || grain < 1 || !body) {
    throw InvalidArgument(
        fmt::format("ParallelFor: count {}, grain {}{}; expected count >= 0, grain >= 1 and a body",
                    count, grain, body ? "" : ", null body"));
  }
  if (engine::tls_context.core != this) CheckOpen("ParallelFor");
  const bool in_own_op = engine::tls_context.core == this;
  const int job_priority = in_own_op ? engine::tls_context.op->priority : 0;
  const std::int64_t blocks = count / grain + (count % grain != 0 ? 1 : 0);
  const bool alone = kind_ != Kind::kThreaded || options_.num_workers == 1 || blocks < 2;
  Job job{.count = count,
          .grain = grain,
          .blocks = {blocks, alone ? 1 : std::min<std::int64_t>(options_.num_workers, blocks)},
          .body = &body,
          .context = engine::tls_context,
          .priority = job_priority};
  if (alone) {
    RunBlocks(job);
    if (job.failed) std::rethrow_exception(job.error);
    return;
  }
  std::int64_t requests = 0;
  {
    const engine::TrackerGuard guard(lock_);
    jobs_.push_back(&job);
    const std::int64_t places = options_.num_workers - executing_ + (in_own_op ? 0 : -1);
    requests = std::min<std::int64_t>(blocks - 1, places);
    // Who waits for this op has a CPU, and is awake when the op ends.
    const Op* const op = in_own_op ? engine::tls_context.op : nullptr;
    if (op != nullptr) requests -= CallWaitsLocked(op, requests, /*spinning=*/true);
    if (idlers_ > 0 && requests > 0) {
      CallIdlersLocked();
      requests -= std::min<std::int64_t>(requests, idlers_);
    }
    if (op != nullptr) requests -= CallWaitsLocked(op, requests, /*spinning=*/false);
    while (requests > 0 && !ReserveWorker()) requests = 0;
  }
  for (std::int64_t i = 0; i < requests; ++i) {
    if (i == 0 || ReserveWorker()) host_->RequestWorker(When::kNow);
  }
  RunBlocks(job);
  {
    const engine::TrackerGuard guard(lock_);
    std::erase(jobs_, &job);
  }
  // Helpers are in their last blocks; nobody joins any more.
  for (int spins = 0; job.helpers.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < 1000) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  engine::tls_context.children += job.children;
  if (job.failed) std::rethrow_exception(job.error);
}

// --- the lookout ---------------------------------------------------------------------------------

// Comes after what the lookout is to find. Threads: any.
void EngineCore::WakeLookout() noexcept {
  if (lookout_deep_.load(std::memory_order_relaxed)) HurryLookout();
}

// The same from whatever nap.
void EngineCore::HurryLookout() noexcept {
  lookout_deep_.store(false, std::memory_order_relaxed);
  {
    const MutexLock lock(lookout_mutex_);
    lookout_signal_ = true;
  }
  lookout_wake_.NotifyOne();
}

void EngineCore::Lookout() {
  engine::PreferExactTimers();
  engine::PreferPromptWakeups();
  std::int64_t quiet_since_ns = SteadyNowNs();
  std::chrono::microseconds watch_nap = kWatchNap;
  bool woken = false;
  while (true) {
    bool deep = false;
    bool request_worker = false;
    std::string alarm;
    std::chrono::nanoseconds nap = kNap;
    {
      const engine::TrackerGuard guard(lock_);
      const std::int64_t now_ns = SteadyNowNs();
      alarm = WatchdogLocked(now_ns);
      const bool watched = std::exchange(lookout_watches_, false);
      if (watched && executors_ == 0) RaiseModeLocked();
      const std::uint64_t ran = last_ran_;
      deep = LookOutLocked(now_ns, &quiet_since_ns, &request_worker);
      // What lies there has to wait for the bodies of threads that help, which run as any executor.
      const bool no_place = !deep && !HasPlaceLocked() && WorkIsVisibleLocked();
      // Whoever woke it may count on it while the executors are in bodies.
      if ((executors_ > 0 || no_place) && !woken) {
        const bool worker_works = executors_ > waits_joined_ && watched && last_ran_ != ran;
        watch_nap = worker_works ? std::min(2 * watch_nap, kWatchNapMost) : kWatchNap;
        lookout_watches_ = true;
        nap = watch_nap;
      }
      woken = false;
      if (deep) {
        constexpr std::chrono::milliseconds kLongest = std::chrono::hours(96);
        const std::chrono::nanoseconds longest =
            options_.watchdog.count() > 0 ? std::min(options_.watchdog, kLongest) : kLongest;
        nap = std::max<std::chrono::nanoseconds>(longest / 4, kDeepNapMin);
      }
    }
    if (!alarm.empty()) Log(LogLevel::kWarning, "{}", alarm);
    if (request_worker) host_->RequestWorker(When::kNow);
    const MutexLock lock(lookout_mutex_);
    if (lookout_stop_) return;
    if (!lookout_signal_) lookout_wake_.WaitUntil(lookout_mutex_, Clock::now() + nap);
    if (lookout_stop_) return;
    woken = std::exchange(lookout_signal_, false);
    if (woken) quiet_since_ns = SteadyNowNs();
  }
}

// The lookout is back from a nap too long for pushers to rely on, and looks now.
void EngineCore::RaiseModeLocked() {
  Mode deep = Mode::kDeep;
  // seq_cst: before the look; a pusher that has found kDeep took its ticket before this
  mode_.compare_exchange_strong(deep, Mode::kNap, std::memory_order_seq_cst);
}

// One look at the engine. True: nothing needs a lookout until a worker wakes it.
bool EngineCore::LookOutLocked(std::int64_t now_ns, std::int64_t* quiet_since_ns,
                               bool* request_worker) {
  if (kind_ != Kind::kThreaded) {
    lookout_deep_.store(false, std::memory_order_relaxed);
    return true;
  }
  // What a pusher runs itself, and leaves nothing behind, is none of the lookout's business.
  const std::uint64_t tail = inbox_.tail() - unwatched_;
  // What waits for variables run for themselves is no progress for the others.
  const bool progress = executor_ran_ != last_ran_;
  const bool moved = tail != last_tail_ || progress;
  last_tail_ = tail;
  last_ran_ = executor_ran_;
  if (moved || executors_ > 0 || workers_.load(std::memory_order_relaxed) > 0) {
    *quiet_since_ns = now_ns;
  }
  if (WorkIsVisibleLocked()) {
    // Nobody executes, or whoever does is stuck in a body that the average did not foresee.
    const bool stuck = executors_ > 0 && !progress && idlers_ == 0;
    // Work that a wait is about to take on its own thread is gone by the next nap.
    const bool left_lying = executors_ == 0 &&
                            std::exchange(last_head_, inbox_head_) == inbox_head_ &&
                            !host_->IsComing();
    if (left_lying || stuck) {
      // Takes no worker: who waits for it need not wait for bodies that go on.
      TakeCompletionsLocked();
      if (!WorkIsVisibleLocked()) return false;
    }
    // Where helping threads have all places, a worker would come for nothing. Whoever leaves one
    // looks for work under the lock before it sleeps, or requests a worker (EnsureWorkerLocked).
    if ((left_lying || stuck) && HasPlaceLocked() && ReserveWorker()) {
      admit_ = stuck;
      if (executors_ == 0) mode_.store(Mode::kAwake, std::memory_order_relaxed);
      *request_worker = true;
    }
    return false;
  }
  if (now_ns - *quiet_since_ns < kDeepAfterNs) return false;
  lookout_deep_.store(true, std::memory_order_relaxed);
  mode_.store(Mode::kDeep, std::memory_order_seq_cst);  // see DESIGN: store, then recheck
  if (!WorkIsVisibleLocked()) return true;
  lookout_deep_.store(false, std::memory_order_relaxed);
  mode_.store(Mode::kNap, std::memory_order_relaxed);
  return false;
}

// Ops carry no time; what the lookout has seen tells their age, to a nap.
void EngineCore::SightTail(std::int64_t now_ns) {
  constexpr std::size_t kSightingsMax = 256;
  sightings_.reserve(kSightingsMax);  // all at once: a steady state allocates nothing
  const std::uint64_t tail = inbox_.tail();
  if (!sightings_.empty() && sightings_.back().tail == tail) return;
  if (sightings_.size() == kSightingsMax) {
    for (std::size_t i = 1; 2 * i < kSightingsMax; ++i) sightings_[i] = sightings_[2 * i];
    sightings_.resize(kSightingsMax / 2);
  }
  sightings_.push_back({now_ns, tail});
}

std::string EngineCore::AgeOf(const Op* op, std::int64_t now_ns) const {
  const auto seen = std::find_if(sightings_.begin(), sightings_.end(),
                                 [op](const Sighting& s) { return s.tail > op->ticket; });
  if (now_ns == 0 || seen == sightings_.end()) return {};
  return fmt::format(", pending for {:.1f} s", static_cast<double>(now_ns - seen->time_ns) * 1e-9);
}

// What to log if nothing has finished for too long; empty: all is well.
std::string EngineCore::WatchdogLocked(std::int64_t now_ns) {
  if (options_.watchdog.count() == 0) return {};
  // Not while a body runs: what it pushes is registered after it, whatever the time.
  if (kind_ != Kind::kThreaded && !inline_busy_) DrainLocked();
  SightTail(now_ns);
  const bool was_idle = std::exchange(progress_idle_, done_ == pushed_);
  if (was_idle || progress_idle_ || done_ != progress_done_) {
    progress_done_ = done_;
    progress_ns_ = now_ns;
    return {};
  }
  const std::int64_t quiet_ns = now_ns - progress_ns_;
  // In milliseconds: the option may be more than nanoseconds can count.
  if (quiet_ns / 1'000'000 < options_.watchdog.count()) return {};
  progress_ns_ = now_ns;
  Op* oldest = OldestBlockedLocked();
  if (oldest == nullptr) oldest = OldestPendingLocked();
  return fmt::format("watchdog: nothing has finished for {:.1f} s while {} ops are pending; {}",
                     static_cast<double>(quiet_ns) * 1e-9, pushed_ - done_,
                     oldest == nullptr ? "none is registered" : ChainLocked(oldest, now_ns));
}

}  // namespace heddle::internal
