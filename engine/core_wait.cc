// Waits: helping where a wait can show that it needs the op, sleeping otherwise. A wait with a
// deadline leaves bodies of ops to the workers: nobody knows how long they take.
#include <algorithm>

#include <fmt/format.h>

#include "base/clock.h"
#include "engine/core.h"
#include "engine/fork.h"
#include "engine/may_wait.h"
#include "engine/scheduling.h"
#include "engine/wait_checks.h"

namespace heddle::internal {

using engine::tls_context;

namespace {

// A waiter looks on for so long before it sleeps: waking a thread costs more.
constexpr int kSpinMicroseconds = 10;
constexpr int kHelpDepthMax = 64;
// Of short ops, so many are run between two looks at the clock for a check.
constexpr int kOpsPerLook = 16;

}  // namespace

void EngineCore::CheckNotInOp(const char* wait, const VarState* var) const {
  if (tls_context.op == nullptr && tls_context.polling == nullptr) return;
  engine::CheckMayWait(var != nullptr ? fmt::format("{}('{}')", wait, VarName(*var)) : wait);
}

void EngineCore::CheckOpen(const char* call) const {
  engine::CheckNotForked(call);
  if (!closed_.load(std::memory_order_relaxed)) return;
  throw InvalidState(fmt::format("{}: the engine has been stopped", call));
}

void EngineCore::CheckOwn(const VarState* var, const char* call) const {
  if (var == nullptr) {
    throw InvalidArgument(fmt::format("{}: empty Var, expected one made by NewVar", call));
  }
  if (var->core != this) {
    throw InvalidArgument(
        fmt::format("{}: variable '{}' belongs to another engine", call, VarName(*var)));
  }
}

void EngineCore::WakeLocked(Waiter& waiter, Signal signal) {
  if (waiter.woken()) return;
  Signal before;
  {
    const MutexLock lock(waiter.mutex);
    // release; pairs with the acquire in SpinForSignal and AwaitSignal
    before = waiter.signal.exchange(signal, std::memory_order_acq_rel);
  }
  if (before == Signal::kPolling) {
    // None: RemovePoller has interrupted it.
    if (poller_ != nullptr) poller_->Interrupt();
  } else {
    // Still under the engine's lock, which the waiter takes before its frame goes.
    waiter.cond.NotifyOne();
  }
}

void EngineCore::SpinForSignal(Waiter& waiter) {
  const int spins = kSpinMicroseconds * engine::PausesPerMicrosecond();
  waiter.spins.store(true, std::memory_order_relaxed);
  for (int i = 0; i < spins; ++i) {
    if (waiter.signal.load(std::memory_order_acquire) != Signal::kNone) return;
    Pause();
  }
  waiter.spins.store(false, std::memory_order_relaxed);
}

// Returns at the deadline, too.
void EngineCore::AwaitSignal(Waiter& waiter, std::optional<Deadline> deadline) {
  const MutexLock lock(waiter.mutex);
  while (waiter.signal.load(std::memory_order_acquire) == Signal::kNone) {
    if (!deadline) {
      waiter.cond.Wait(waiter.mutex);
    } else if (!waiter.cond.WaitUntil(waiter.mutex, deadline->time())) {
      return;
    }
  }
}

// Releases the lock until `waiter` is woken or the deadline has passed (true). With a poller it may
// return early: there may be something to run. Throws what the check of a WaitCheckScope throws, in
// the middle of a push for the caller to keep. Without a `timer` there are no checks.
bool EngineCore::SleepLocked(Waiter& waiter, std::optional<Deadline> deadline, CheckTimer* timer) {
  const bool checks = timer != nullptr && WaitChecks::Any();
  const bool in_wait = waiter.kind == WaitKind::kVar || waiter.kind == WaitKind::kAll;
  waiter.may_lead = in_wait && tls_context.no_wait_depth == 0;
  waiter.next = waiters_;
  if (waiters_ != nullptr) waiters_->previous = &waiter;
  waiters_ = &waiter;
  // Whatever there is to run, kInline has to wait for its turn.
  bool look = AnnounceWaitLocked(waiter) && waiter.kind != WaitKind::kInline && waiter.may_run;
  EnsureWorkerLocked();
  std::exception_ptr error;
  while (!look && error == nullptr && !waiter.woken()) {
    std::optional<Deadline> until = deadline;
    if (checks) {
      const std::optional<Deadline> due = WaitChecks::HasKept() ? WaitChecks::Next() : timer->due;
      if (due && (!until || due->time() < until->time())) until = due;
    }
    if (waiter.may_lead && LeaderIsWantedLocked()) leader_ = &waiter;
    if (leader_ == &waiter) {
      LeadLocked(waiter, until);
      look = !HasPassed(until);
    } else {
      lock_.unlock();
      SpinForSignal(waiter);
      AwaitSignal(waiter, until);
      lock_.lock();
    }
    if (waiter.woken() || HasPassed(deadline)) break;
    if (checks && HasPassed(until)) error = CallCheckLocked(timer);
  }
  (waiter.previous != nullptr ? waiter.previous->next : waiters_) = waiter.next;
  if (waiter.next != nullptr) waiter.next->previous = waiter.previous;
  if (leader_ == &waiter) {
    leader_ = nullptr;
    AppointLeaderLocked();  // P1, P3
  }
  // It may have been woken, or sent to look, each time before it came to that.
  if (checks && error == nullptr && HasPassed(timer->due)) error = CallCheckLocked(timer);
  if (error != nullptr) {
    EnsureWorkerLocked();  // as in ThrowLateLocked
    std::rethrow_exception(error);
  }
  return !waiter.woken() && HasPassed(deadline);
}

// After an op that the thread has run itself.
bool EngineCore::CheckIsDueLocked(CheckTimer* timer) const {
  if (!timer->due || --timer->ops_to_look > 0) return false;
  timer->ops_to_look = body_ns_ > kLongBodyNs ? 0 : kOpsPerLook;
  return HasPassed(timer->due);
}

// Returns what it throws. The caller is no executor that others count on, nor is it its turn on an
// engine without workers: the check may take long, and push.
std::exception_ptr EngineCore::CallCheckLocked(Executor& executor, CheckTimer* timer) {
  LeaveGpuLocked(executor);
  EnsureWorkerLocked();
  std::exception_ptr error = CallCheckLocked(timer);
  if (error != nullptr) EnsureWorkerLocked();  // as in ThrowLateLocked
  return error;
}

std::exception_ptr EngineCore::CallCheckLocked(CheckTimer* timer) {
  lock_.unlock();
  std::exception_ptr error = WaitChecks::Call();
  lock_.lock();
  *timer = CheckTimer();
  return error;
}

void EngineCore::TraceWaitFor(engine::TraceWait kind, std::uint64_t var_id,
                              std::int64_t started_ns) {
  if (!kTracing) return;
  if (engine::TraceWriter* trace = trace_.load(std::memory_order_acquire)) {
    trace->OnWait(kind, var_id, static_cast<std::uint64_t>(started_ns),
                  static_cast<std::uint64_t>(SteadyNowNs()));
  }
}

// --- one variable --------------------------------------------------------------------------------

void EngineCore::WaitForVar(const Var& var, std::optional<Deadline> deadline) {
  CheckOwn(var.state(), "WaitForVar");
  CheckNotInOp("WaitForVar", var.state());
  CheckOpen("WaitForVar");
  WaitForWrites(var.state(), deadline, engine::TraceWait::kVar);
}

void EngineCore::WaitForReadsAndWrites(const Var& var, std::optional<Deadline> deadline) {
  CheckOwn(var.state(), "WaitForReadsAndWrites");
  CheckNotInOp("WaitForReadsAndWrites", var.state());
  CheckOpen("WaitForReadsAndWrites");
  WaitForWrites(var.state(), deadline, engine::TraceWait::kVarReads);
}

void EngineCore::WaitForWrites(VarState* var, std::optional<Deadline> deadline,
                               engine::TraceWait kind) {
  const bool traced = kTracing && trace_.load(std::memory_order_relaxed) != nullptr;
  const std::int64_t started_ns = traced ? SteadyNowNs() : 0;
  std::exception_ptr error;
  FailureRecord* unused = nullptr;
  {
    const engine::TrackerGuard guard(lock_);
    if (kind == engine::TraceWait::kVarReads) {
      WaitForReadsLocked(var, deadline);
    } else {
      WaitForVarLocked(var, deadline);
    }
    if (var->failure != nullptr) {
      unreported_.See(var->failure);
      error = var->failure->error;
    }
    if (any_failed_.load(std::memory_order_relaxed)) unused = TakeUnusedFailuresLocked();
  }
  FreeFailures(unused);
  if (traced) TraceWaitFor(kind, var->id, started_ns);
  if (error != nullptr) std::rethrow_exception(error);
}

// A fence is ordered as a write, so it comes after all accesses so far and before all later ones. A
// wait that ends by an exception takes its fence back, which holds up nobody then.
void EngineCore::WaitForReadsLocked(VarState* var, std::optional<Deadline> deadline) {
  engine::WaitFence fence(var);
  try {
    WaitForVarLocked(var, deadline, &fence);
  } catch (...) {
    WithdrawLocked(fence);
    throw;
  }
}

void EngineCore::WithdrawLocked(engine::WaitFence& fence) {
  tracker_.Withdraw(
      fence,
      [this](Op* op) {
        lock_.AssertHeld();
        PushGrantedLocked(op);
      },
      [this](VarState* written) {
        lock_.AssertHeld();
        WakeForWritesLocked(written);
      },
      [this](Op* passed) {
        lock_.AssertHeld();
        FinishFenceLocked(passed);
      });
  if (kind_ != Kind::kThreaded) WakeForPushLocked();
  EnsureWorkerLocked();
}

// Registers what lies in the inbox. If its very last op is ready, returns that instead of queueing
// it.
Op* EngineCore::DrainButLastLocked() {
  for (Dequeued next = DequeueLocked(); next.any; next = DequeueLocked()) {
    if (next.ready == nullptr) continue;
    if (inbox_head_ == inbox_.tail()) return next.ready;
    PushReadyLocked(next.ready);
  }
  return nullptr;
}

// For the writes of `var` pushed so far; if there is a `fence`, for that, which enters here.
void EngineCore::WaitForVarLocked(VarState* var, std::optional<Deadline> deadline,
                                  engine::WaitFence* fence) {
  Op* last = kind_ == Kind::kThreaded ? DrainButLastLocked() : nullptr;
  if (last == nullptr) DrainToTailLocked();
  const std::uint32_t target = var->writes_registered;
  const auto reached = [var, target, fence] {
    return fence != nullptr ? fence->passed()
                            : static_cast<std::int32_t>(var->writes_finished - target) >= 0;
  };
  if (fence != nullptr) {
    fence->op()->ticket = inbox_head_;  // of what comes behind it
    tracker_.RegisterFence(fence->op());
  }
  std::optional<Deadline::Clock::time_point> ask_until;  // of a GPU, by itself
  CheckTimer timer;
  Executor executor;
  const ExecutorLink link(*this, executor);
  if (last != nullptr) {
    // A wait right after its push: the op need not go through the ready queue.
    const bool needed = !deadline && HasPlaceLocked() && !reached() && HolderOf(var) == last;
    if (needed) {
      ExecuteLocked(executor, last);
    } else {
      PushReadyLocked(last);
    }
  }
  while (!reached()) {
    if (kind_ != Kind::kThreaded) {
      bool late = false;
      if (!AcquireInlineLocked(deadline, &late, &timer)) {
        if (late && !reached()) ThrowLateLocked(var);
        continue;
      }
      std::exception_ptr error;
      const bool again = TakeTurnLocked(
          executor, &timer, [&] { return reached() || (executor.ran > 0 && HasPassed(deadline)); },
          &error);
      if (error != nullptr) std::rethrow_exception(error);
      if (reached()) break;
      // Once it is late it takes nothing more from the inbox, where there may be something for
      // ever.
      if (again || (!HasPassed(deadline) && AwaitPublishedLocked())) continue;
    } else if (HasPlaceLocked()) {
      Op* op = HolderOf(var);
      // Of a GPU op that is held back: the one whose turn it is on its stream.
      if (op != nullptr && IsHeld(op)) {
        Op* const before = op->async_state()->gpu_queue->next;
        if (before != nullptr) op = before;
      }
      if (op != nullptr && !op->started && !IsHeld(op) && !deadline) {
        ready_.Remove(op);
        ExecuteLocked(executor, op);
        if (reached() || !CheckIsDueLocked(&timer)) continue;
        if (const auto error = CallCheckLocked(executor, &timer)) std::rethrow_exception(error);
        continue;
      }
      if (op != nullptr) {
        const auto is_it = [op](const Op* of) { return of == op; };
        const bool helped = !deadline && HelpedLocked(executor, &timer, is_it);
        if (helped && CheckIsDueLocked(&timer)) {
          if (const auto error = CallCheckLocked(executor, &timer)) std::rethrow_exception(error);
        }
        // After help, which may have let go of the lock, the op may be gone.
        if (helped || (op->issued && AsksGpuLocked(op, &ask_until))) {
          if (!HasPassed(deadline)) continue;
        }
      }
    }
    if (reached()) break;
    Op* holder = HolderOf(var);
    Waiter waiter{.kind = WaitKind::kVar,
                  .var = var,
                  .target = target,
                  .fence = fence,
                  .may_run = kind_ != Kind::kThreaded || !deadline,
                  .for_completion = holder != nullptr && holder->in_flight()};
    ++var->waiters;
    bool late = false;
    LeaveGpuLocked(executor);
    try {
      late = SleepLocked(waiter, deadline, &timer);
    } catch (...) {
      --var->waiters;
      throw;
    }
    --var->waiters;
    if (late && !reached()) ThrowLateLocked(var);
  }
  EnsureWorkerLocked();
}

// Looks after `op`, which a GPU does, in the reaper's place: being told costs as much time as a
// short op takes. False: it has done so for long enough.
bool EngineCore::AsksGpuLocked(Op* op, std::optional<Deadline::Clock::time_point>* until) {
  constexpr std::chrono::microseconds kAskFor{50};
  const Deadline::Clock::time_point now = Deadline::Clock::now();
  if (!*until) *until = now + kAskFor;
  if (now >= **until) return false;
  engine::GpuQueue& queue = *op->async_state()->gpu_queue;
  ++gpu_askers_;
  lock_.unlock();
  if (!gpu_->Look(queue)) {
    for (int i = engine::PausesPerMicrosecond(); i > 0; --i) Pause();
  }
  lock_.lock();
  --gpu_askers_;
  TakeCompletionsLocked();
  return true;
}

void EngineCore::ThrowLateLocked(VarState* var) {
  const std::string message = fmt::format("waiting for variable '{}': the deadline has passed; {}",
                                          VarName(*var), WhatBlocksLocked(var));
  // This thread may have led, and have completed at the last moment what others wait for.
  EnsureWorkerLocked();
  throw TimeoutError(message);
}

// The op, ready or started, that the oldest pending write of `var` waits for, followed down; null:
// none is to be seen from here, because one of many readers is to blame.
Op* EngineCore::HolderOf(VarState* var) {
  // Each op that the wait runs starts the walk afresh: a long way down is left to the workers.
  for (int depth = 0; depth < kHelpDepthMax; ++depth) {
    Op* op = var->writer != nullptr ? var->writer : var->reader_hint;
    if (op == nullptr || op->blocked == 0) return op;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      if (op->access(i).granted()) continue;
      var = op->access(i).var();
      break;
    }
  }
  return nullptr;
}

// Runs blocks of a ParallelFor of an op that the wait `needs`, until a check is due; false: there
// are none to be had.
template <class Needs>
bool EngineCore::HelpedLocked(Executor& executor, CheckTimer* timer, Needs&& needs) {
  if (jobs_.empty() || !HasPlaceLocked()) return false;
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job* job) {
    return job->context.core == this && job->blocks.AnyLeft() && needs(job->context.op);
  });
  if (found == jobs_.end() || !GoesFirstLocked(**found)) return false;
  LeaveGpuLocked(executor);
  HelpLocked(**found, timer->due);
  timer->ops_to_look = 0;
  return true;
}

// --- everything ----------------------------------------------------------------------------------

void EngineCore::WaitForAll(std::optional<Deadline> deadline) {
  CheckNotInOp("WaitForAll", nullptr);
  CheckOpen("WaitForAll");
  const bool traced = kTracing && trace_.load(std::memory_order_relaxed) != nullptr;
  const std::int64_t started_ns = traced ? SteadyNowNs() : 0;
  std::exception_ptr error;
  FailureRecord* unused = nullptr;
  {
    const engine::TrackerGuard guard(lock_);
    if (!WaitForEpochLocked(CloseEpochLocked(), deadline)) {
      throw TimeoutError(
          fmt::format("waiting for all ops: the deadline has passed; {}", WhatIsPendingLocked()));
    }
    if (FailureRecord* record = unreported_.TakeEarliest()) {
      record->seen = true;
      error = record->error;
      tracker_.Unref(record);
    }
    unused = TakeUnusedFailuresLocked();
  }
  FreeFailures(unused);
  if (traced) TraceWaitFor(engine::TraceWait::kAll, 0, started_ns);
  if (error != nullptr) std::rethrow_exception(error);
}

// Ends the open epoch at the inbox' tail. Returns the epoch that holds everything pushed before.
std::uint32_t EngineCore::CloseEpochLocked() {
  const std::uint64_t tail = inbox_.tail();
  if (tail != last_boundary_) {
    last_boundary_ = tail;
    boundaries_.push_back(tail);
    AdvanceEpochsLocked();
  }
  return current_epoch_ + static_cast<std::uint32_t>(boundaries_.size()) - 1;
}

// False: the deadline has passed.
bool EngineCore::WaitForEpochLocked(std::uint32_t epoch, std::optional<Deadline> deadline) {
  Executor executor;
  executor.keeps_candidate = kind_ == Kind::kThreaded;
  // An op of this epoch may wait for one of a later epoch: it was pushed late by an op of this
  // epoch. Workers run that one; `serial` has none, so it runs whatever is ready.
  if (kind_ != Kind::kSerial) executor.last_epoch = epoch;
  const ExecutorLink link(*this, executor);
  bool joined = false;
  bool helper = false;
  std::uint64_t ran_before = 0;
  const auto leave = [this] {
    lock_.AssertHeld();
    --waits_joined_;
    if (--executors_ == 0) LowerModeLocked(/*after_work=*/false);
  };
  // Before something else than an op, or a short look for one.
  const auto step_aside = [&] {
    lock_.AssertHeld();
    if (!std::exchange(joined, false)) return;
    leave();
    if (helper) NoteHelpLocked(executor.ran - ran_before);
  };
  CheckTimer timer;
  const auto is_of_epoch = [&executor](const Op* op) { return !IsLater(executor, op); };
  bool late = false;
  std::exception_ptr error;  // of the check of a WaitCheckScope
  const auto check_if_due = [&] {
    lock_.AssertHeld();
    if (!CheckIsDueLocked(&timer) || EpochEndedLocked(epoch)) return;
    if (executor.candidate != nullptr) PushReadyLocked(std::exchange(executor.candidate, nullptr));
    step_aside();
    error = CallCheckLocked(executor, &timer);
  };
  int polls = kLingerPolls;
  while (!EpochEndedLocked(epoch) && !late && error == nullptr) {
    if (executor.candidate != nullptr && !jobs_.empty()) {  // before it helps without the lock
      PushReadyLocked(std::exchange(executor.candidate, nullptr));
    }
    if (kind_ != Kind::kThreaded) {
      if (!AcquireInlineLocked(deadline, &late, &timer)) continue;
      const bool again = TakeTurnLocked(
          executor, &timer,
          [&] {
            lock_.AssertHeld();
            return EpochEndedLocked(epoch) || (executor.ran > 0 && HasPassed(deadline));
          },
          &error);
      if (EpochEndedLocked(epoch)) break;
      if (again || (!HasPassed(deadline) && AwaitPublishedLocked())) continue;  // as above
    } else if (!deadline && HelpedLocked(executor, &timer, is_of_epoch)) {
      check_if_due();
      continue;
    } else if (!deadline && (joined || executors_ == 0 || ParallelPaysLocked(executors_ + 1) ||
                             WaitTakesOverLocked())) {
      if (!joined) {
        helper = executors_ > 0;
        ran_before = executor.ran;
        JoinExecutorsLocked();
        ++waits_joined_;
      }
      joined = true;
      Op* op = HasPlaceLocked() ? PickLocked(executor) : nullptr;
      if (op != nullptr) {
        ExecuteLocked(executor, op);
        polls = kLingerPolls;
        check_if_due();
        continue;
      }
      if (executor.candidate != nullptr)
        PushReadyLocked(std::exchange(executor.candidate, nullptr));
      if (EpochEndedLocked(epoch)) break;
      // What runs now may make several ops ready at once: being there costs less than being woken.
      // Except that nothing comes while nobody runs the poller.
      if ((executing_ > 0 || !in_flight_.empty()) && polls > 0 && !LeaderIsWantedLocked()) {
        const bool work = LingerLocked(executor, &polls);
        if (work || EpochEndedLocked(epoch)) continue;
      }
    }
    // Only a worker may run what was pushed later; EnsureWorkerLocked counts on executors_.
    step_aside();
    Waiter waiter{.kind = WaitKind::kAll,
                  .target = epoch,
                  .may_help = !deadline,
                  .may_run = kind_ != Kind::kThreaded || !deadline,
                  .for_completion = executing_ == 0};
    LeaveGpuLocked(executor);
    late = SleepLocked(waiter, deadline, &timer);
  }
  const bool ended = EpochEndedLocked(epoch);
  // Before the lock is released, and so that EnsureWorkerLocked sees it.
  if (executor.candidate != nullptr) PushReadyLocked(std::exchange(executor.candidate, nullptr));
  if (joined) leave();
  EnsureWorkerLocked();
  if (error != nullptr) std::rethrow_exception(error);
  return ended;
}

}  // namespace heddle::internal
