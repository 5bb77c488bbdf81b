// The engines without workers: `serial` and `seeded`.
//
// Both run ops on threads that call the engine, one body at a time: whoever holds inline_busy_
// runs. `serial` runs in the outermost Push, so an op runs on the thread that pushed it; pushes
// from inside ops queue behind. `seeded` runs only inside waits and picks among the ready ops, and
// among the completions that have come in from other threads, with a random generator: the same
// seed and the same calls give the same order.
//
// An async op whose completion comes later leaves its dependents pending; they run in the next push
// or wait.
#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "engine/core.h"
#include "engine/wait_checks.h"

namespace heddle::internal {

using engine::MessageKind;
using engine::tls_context;

// True: this thread runs ops now. False: look again, somebody else has run some, or the deadline
// has passed (*late). Throws what the check of a WaitCheckScope throws.
bool EngineCore::AcquireInlineLocked(std::optional<Deadline> deadline, bool* late,
                                     CheckTimer* timer) {
  if (!inline_busy_) {
    inline_busy_ = true;
    return true;
  }
  Waiter waiter{.kind = WaitKind::kInline};
  *late = SleepLocked(waiter, deadline, timer);
  return false;
}

// For a push, which no exception may leave: what the check throws is kept, and the thread that runs
// ops now is to run those that are pushed, too (false).
bool EngineCore::AcquireForPushLocked(CheckTimer* timer) {
  bool late = false;
  try {
    while (!AcquireInlineLocked(std::nullopt, &late, timer)) {
    }
    return true;
  } catch (...) {
    WaitChecks::Keep(std::current_exception());
  }
  return !std::exchange(inline_busy_, true);
}

bool EngineCore::InlineWorkLocked() {
  return WorkIsVisibleLocked() || seeded_count_ > 0 || !seeded_completions_.empty();
}

void EngineCore::ReleaseInlineLocked() {
  inline_busy_ = false;
  // Those whose wait is over have been woken; others only if there is something to run, or threads
  // that have nothing to run would wake each other for ever.
  const bool work_left = InlineWorkLocked();
  WakeWaitersLocked(
      [work_left](const Waiter& waiter) { return work_left || waiter.kind == WaitKind::kInline; });
}

// True: some thread has taken a ticket and not published its op yet. Nobody will wake us for that
// one, so look again rather than sleep.
bool EngineCore::AwaitPublishedLocked() {
  if (inbox_head_ == inbox_.tail()) return false;
  lock_.unlock();
  std::this_thread::yield();
  lock_.lock();
  return true;
}

void EngineCore::RunReadyInlineLocked(Executor& executor, const std::function<bool()>& done) {
  while (!done()) {
    DrainLocked();  // completions too, however far behind what is waited for
    Op* op = kind_ == Kind::kSeeded ? PickSeededLocked(executor) : PickLocked(executor);
    if (op == nullptr) break;
    ExecuteLocked(executor, op);
  }
  LeaveGpuLocked(executor);
}

// Of a thread that has acquired its turn: runs what is ready until it is `done`, or the check of a
// WaitCheckScope is due, gives the turn back, and calls the check then (true), which may push.
// *error: what that has thrown.
bool EngineCore::TakeTurnLocked(Executor& executor, CheckTimer* timer,
                                const std::function<bool()>& done, std::exception_ptr* error) {
  const std::uint64_t ran = executor.ran;
  bool due = false;
  RunReadyInlineLocked(executor, [&] {
    lock_.AssertHeld();
    if (done()) return true;
    due =
        executor.ran > ran && CheckIsDueLocked(timer);  // each turn gets on, whatever the interval
    return due;
  });
  ReleaseInlineLocked();
  if (due) *error = CallCheckLocked(executor, timer);
  return due;
}

// The same for a push, to the end. False: what the check has thrown is kept, and the rest is left
// to the next push or wait.
bool EngineCore::RanForPushLocked(Executor& executor, CheckTimer* timer) {
  std::exception_ptr error;
  while (TakeTurnLocked(
      executor, timer, [] { return false; }, &error)) {
    if (error != nullptr) WaitChecks::Keep(std::move(error));
    if (WaitChecks::HasKept() || !AcquireForPushLocked(timer)) return false;
  }
  return true;
}

std::vector<Op*>& EngineCore::SeededReadyLocked(std::uint32_t epoch) {
  for (SeededEpoch& ready : seeded_ready_) {
    if (ready.epoch == epoch) return ready.ops;
  }
  std::erase_if(seeded_ready_, [](const SeededEpoch& ready) { return ready.ops.empty(); });
  seeded_ready_.push_back({epoch, {}});
  return seeded_ready_.back().ops;
}

// Finishes picked completions on the way.
Op* EngineCore::PickSeededLocked(Executor& executor) {
  const auto take = [](std::vector<Op*>& ops, std::uint64_t index) {
    Op* op = ops[index];
    ops[index] = ops.back();
    ops.pop_back();
    return op;
  };
  const auto needed = [&executor](const SeededEpoch& ready) {
    return !executor.last_epoch ||
           static_cast<std::int32_t>(ready.epoch - *executor.last_epoch) <= 0;
  };
  while (true) {
    DrainLocked();
    while (tracker_.has_more_to_grant()) {
      GrantMoreLocked();
    }
    std::uint64_t choices = seeded_completions_.size();
    for (const SeededEpoch& ready : seeded_ready_) {
      if (needed(ready)) choices += ready.ops.size();
    }
    // What is needed may wait for something that was pushed later.
    const bool any = choices == 0;
    if (any) choices = seeded_count_;
    if (choices == 0) return nullptr;
    std::uint64_t pick = random_() % choices;
    if (pick < seeded_completions_.size()) {
      FinishInFlightLocked(take(seeded_completions_, pick));
      continue;
    }
    pick -= seeded_completions_.size();
    for (SeededEpoch& ready : seeded_ready_) {
      if (!any && !needed(ready)) continue;
      if (pick < ready.ops.size()) {
        --seeded_count_;
        return take(ready.ops, pick);
      }
      pick -= ready.ops.size();
    }
  }
}

std::uint64_t EngineCore::CommitWithoutWorkers(Op* op, MessageKind kind) noexcept {
  if (kind_ == Kind::kSerial) {
    const std::uint64_t ticket = CommitSerial(op, kind);
    AfterPublish();  // inside a body of another engine it does not run
    return ticket;
  }
  const std::uint64_t ticket = PublishOp(op, kind);
  AfterPublish();
  const engine::TrackerGuard guard(lock_);
  WakeForPushLocked();
  return ticket;
}

// This thread has pushed an op that it does not run. Nor does anybody else, unless it is for one of
// the threads that sleep in a wait: what they wait for may need it.
void EngineCore::WakeForPushLocked() {
  if (inline_busy_) return;  // whoever runs ops finds this one, and wakes the others when it leaves
  WakeWaitersLocked([](const Waiter&) { return true; });
}

std::uint64_t EngineCore::CommitSerial(Op* op, MessageKind kind) noexcept {
  const bool nested = tls_context.op != nullptr;
  if (tls_context.core == this) {
    op->child = true;
    op->epoch = tls_context.op->epoch;
    ++tls_context.children;
  }
  bool runs = !nested && tls_context.no_wait_depth == 0;
  const engine::TrackerGuard guard(lock_);
  // It has no body that would have to wait for its turn.
  if (runs && inline_busy_ && kind == MessageKind::kFence) runs = false;
  CheckTimer timer;
  if (runs) runs = AcquireForPushLocked(&timer);
  const std::uint64_t ticket = inbox_.TakeTicket(op->priority);
  op->ticket = ticket;
  while (!inbox_.HasSlot(ticket)) {
    DrainLocked();
    inbox_.PublishHead(inbox_head_);
  }
  if (kTracing) {
    if (engine::TraceWriter* trace = trace_.load(std::memory_order_acquire)) TracePush(*trace, op);
  }
  if (op->priority > 0) urgent_.store(true, std::memory_order_relaxed);
  inbox_.Publish(ticket, op, kind, op->priority);
  if (!runs) {
    if (kind == MessageKind::kFence) DrainLocked();
    WakeForPushLocked();
    return ticket;
  }
  if (WaitChecks::HasKept()) timer.due.reset();
  Executor executor;
  const ExecutorLink link(*this, executor);
  while (RanForPushLocked(executor, &timer) && inbox_head_ <= ticket && AwaitPublishedLocked()) {
    if (!AcquireForPushLocked(&timer)) break;
  }
  return ticket;
}

// What was pushed under a NoWaitScope, which is over.
void EngineCore::RunPending() {
  if (kind_ != Kind::kSerial || tls_context.op != nullptr || tls_context.no_wait_depth > 0) return;
  const engine::TrackerGuard guard(lock_);
  CheckTimer timer;
  if (!AcquireForPushLocked(&timer)) return;
  if (WaitChecks::HasKept()) timer.due.reset();
  Executor executor;
  const ExecutorLink link(*this, executor);
  RanForPushLocked(executor, &timer);
}

// A push or a drop that raced with Stop, or a drop after it: its message must not be lost. Inside a
// body it is only registered, since no op runs on top of another one's body. If that is of this
// engine, whoever runs it looks for more when it has ended: RunLateLocked, a worker, or a wait that
// leaves (EnsureWorkerLocked). If it is of another one, an op of that does.
void EngineCore::EmptyInboxAfterStop() noexcept {
  Ref();  // the last variable may go
  bool left = false;
  {
    const engine::TrackerGuard guard(lock_);
    if (tls_context.op == nullptr) {
      RunLateLocked();
    } else {
      DrainLocked();
      left = tls_context.core != this && InlineWorkLocked();
    }
  }
  if (left) tls_context.core->RunLateAfterBody(*this);
  Unref();
}

// Of an engine that has been stopped, by a thread that is in no body of an op.
void EngineCore::RunLateLocked() {
  Executor executor;
  const ExecutorLink link(*this, executor);
  RunReadyInlineLocked(executor, [] { return false; });
}

// Pushes an op for what is left of `stopped`, in the body of an op of this engine.
void EngineCore::RunLateAfterBody(EngineCore& stopped) {
  struct Body {
    EngineCore* core;
  };
  OpOptions options;
  options.name = "late_ops_of_a_stopped_engine";
  const auto run = [](void* body, BodyAction /*action*/, AsyncState* /*async*/) {
    EngineCore& core = *static_cast<Body*>(body)->core;
    {
      const engine::TrackerGuard guard(core.lock_);
      core.RunLateLocked();
    }
    core.Unref();
  };
  stopped.Ref();
  const NewOp fresh = NewOpBlock(options, sizeof(Body), run, /*async=*/false);
  new (fresh.storage) Body{&stopped};
  CommitPush(fresh.op);
}

}  // namespace heddle::internal
