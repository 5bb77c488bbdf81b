// The executing side: from the inbox through the tracker to a body that has run.
#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/prefetch.h"
#include "engine/access_check.h"
#include "engine/core.h"

namespace heddle::internal {

using engine::MessageKind;
using engine::ThreadContext;
using engine::tls_context;

namespace {

// Candidates that an executor runs in a row although older ops of the same priority are ready.
constexpr int kStreakMax = 32;
// Blocked ops that an executor registers in search of a ready one while others are at work, or only
// async ops are: registering early costs more than waiting, and they will get there.
constexpr int kLookahead = 16;
constexpr int kLookaheadPastAsync = 64;
// While completions come a single executor looks no farther than this many blocked ops: they still
// lie in its cache when they get ready. Beyond, each takes twice as long, and all that is pushed
// meanwhile gets there, too.
constexpr std::int64_t kBlockedPastAsync = 1024;
// But behind them there may be ready ones. So it looks farther when its looks in vain, each of
// about a microsecond, are so many more than the ops that have finished; and on as long as it finds
// some.
constexpr int kVainLooks = 32;
constexpr int kVainLooksAgain = 16;
// One op in so many is timed, unless they are long: reading the clock takes some 30 ns, five times
// an op.
constexpr int kSampleEvery = 32;

}  // namespace

void EngineCore::PushReadyLocked(Op* op) {
  if (kind_ == Kind::kSeeded) {
    SeededReadyLocked(op->epoch).push_back(op);
    ++seeded_count_;
    return;
  }
  ready_.Push(op);
  CallIdlersLocked();
  if (alone_) [[unlikely]]
    WakeLookout();  // A3
}

// Async ops come in rows: fetches the state of one that comes soon, whose block is here already.
void EngineCore::PrefetchAsyncLocked() {
  constexpr std::uint64_t kAhead = 3;
  const engine::Inbox::Message message = inbox_.At(inbox_head_ + kAhead);
  if (message.address == nullptr || message.kind == MessageKind::kDropped) return;
  if (AsyncState* async = static_cast<Op*>(message.address)->async_state()) PrefetchForWrite(async);
}

// Takes the next message from the inbox, if there is one.
EngineCore::Dequeued EngineCore::DequeueLocked() {
  const engine::Inbox::Message message = inbox_.At(inbox_head_);
  if (message.address == nullptr) return {false, nullptr};
  inbox_.Advance(&inbox_head_);
  Op* ready = nullptr;
  switch (message.kind) {
    case MessageKind::kOp: {
      Op* op = static_cast<Op*>(message.address);
      // The inbox has fetched the first two lines ahead.
      for (std::size_t line = 2; line <= op->block_class; ++line) {
        PrefetchForWrite(reinterpret_cast<std::byte*>(op) + line * engine::kBlockAlign);
      }
      if (op->async) PrefetchAsyncLocked();
      CountRegisteredLocked(op);
      if (tracker_.Register(op)) ready = op;
      break;
    }
    case MessageKind::kGpuOp:
      PrefetchAsyncLocked();
      RegisterGpuLocked(static_cast<Op*>(message.address));
      break;
    case MessageKind::kFence: {
      Op* op = static_cast<Op*>(message.address);
      CountRegisteredLocked(op);
      if (tracker_.RegisterFence(op)) FinishFenceLocked(op);
      break;
    }
    case MessageKind::kDropped: {
      ReleaseFromBoundLocked(/*bytes=*/0);
      auto* var = static_cast<VarState*>(message.address);
      var->dropped = true;
      if (var->Idle()) FreeVarLocked(var);
      break;
    }
  }
  // Now, not with the next message: that may be long in coming, and is none of a closed epoch's.
  if (!boundaries_.empty()) AdvanceEpochsLocked();
  return {true, ready};
}

void EngineCore::DrainLocked() {
  TakeCompletionsLocked();
  for (Dequeued next = DequeueLocked(); next.any; next = DequeueLocked()) {
    if (next.ready != nullptr) PushReadyLocked(next.ready);
  }
}

// Registers everything that was pushed before, this thread's own pushes among it. The inbox ends
// for now where another thread has taken a ticket and not published its op yet, so this may have to
// wait for that thread.
void EngineCore::DrainToTailLocked() {
  const std::uint64_t tail = inbox_.tail();
  for (DrainLocked(); inbox_head_ < tail; DrainLocked()) {
    lock_.unlock();
    std::this_thread::yield();
    lock_.lock();
  }
}

// Finishes the async ops whose completions have been called.
void EngineCore::TakeCompletionsLocked() {
  while (Op* op = completions_.Take(&completions_head_)) {
    op->extension()->async = nullptr;  // its caller's, who may be rid of it
    TakeCompletedLocked(op);
  }
  // Not exchange: the usual answer is no, and a load keeps the line shared.
  if (completed_.load(std::memory_order_relaxed) == nullptr) return;
  // acquire; pairs with the release in PublishCompletion
  AsyncState* latest = completed_.exchange(nullptr, std::memory_order_acquire);
  AsyncState* oldest = nullptr;
  while (latest != nullptr) {
    AsyncState* earlier = std::exchange(latest->next_completed, oldest);
    oldest = std::exchange(latest, earlier);
  }
  while (oldest != nullptr) {
    Op* op = std::exchange(oldest, oldest->next_completed)->op;
    if (op->on_gpu()) {
      FinishGpuLocked(op);  // in the order of their events, on the seeded engine too
    } else {
      TakeCompletedLocked(op);
    }
  }
}

void EngineCore::TakeCompletedLocked(Op* op) {
  if (kind_ == Kind::kSeeded) {
    seeded_completions_.push_back(op);
  } else {
    FinishInFlightLocked(op);
  }
}

// Inlined: a call would cost an empty op a twentieth of its time.
[[gnu::always_inline]] inline Op* EngineCore::PickUntimedLocked(Executor& executor) {
  TakeCompletionsLocked();
  while (tracker_.has_more_to_grant()) {
    GrantMoreLocked();
    if (!ready_.empty()) break;
  }
  DrainIfUrgentLocked();
  if (Op* op = std::exchange(executor.candidate, nullptr)) {
    if (ComesBeforeInboxLocked(op->priority) && executor.streak < kStreakMax &&
        !IsLater(executor, op) &&
        (ready_.empty() || (op->priority >= ready_.top_priority() && !ready_.ageing_due()))) {
      ++executor.streak;
      ready_.CountOvertake(op->priority);
      return op;
    }
    ready_.Push(op);
  }
  executor.streak = 0;
  if (!ready_.empty() && ComesBeforeInboxLocked(ready_.top_priority())) {
    return PopReadyLocked(executor);
  }
  return StreamLocked(executor);
}

// The op that `executor` should run next; null: none may run now.
Op* EngineCore::PickLocked(Executor& executor) {
  const std::int64_t hold_started_ns = std::exchange(executor.hold_started_ns, 0);
  Op* op = PickUntimedLocked(executor);
  if (hold_started_ns != 0 && op != nullptr) {
    MeasureHoldLocked(SteadyNowNs() - hold_started_ns - kClockNs, executor.timed_body_ns);
  }
  return op;
}

// About to search the inbox while async ops are in flight: beyond kBlockedPastAsync?
bool EngineCore::MayLookFarLocked(Executor& executor) {
  const std::uint64_t finished = done_ - std::exchange(executor.done_at_look, done_);
  executor.vain_looks -=
      static_cast<int>(std::min(finished, static_cast<std::uint64_t>(executor.vain_looks)));
  executor.looks_far = executor.looks_far || executor.vain_looks >= kVainLooks;
  return executor.looks_far;
}

// Looks for an op in the inbox, where something may come before whatever is ready already.
Op* EngineCore::StreamLocked(Executor& executor) {
  const bool past_async = !in_flight_.empty();
  const bool far = past_async && MayLookFarLocked(executor);
  const bool near = past_async && !far && executors_ == 1;
  int lookahead = std::numeric_limits<int>::max();
  if (executors_ > 1) {
    lookahead = kLookahead;
  } else if (past_async) {
    lookahead = kLookaheadPastAsync;
  }
  for (int blocked = 0; blocked < lookahead || !ready_.empty();) {
    if (executor.last_epoch &&
        static_cast<std::int32_t>(current_epoch_ - *executor.last_epoch) > 0) {
      break;
    }
    const bool burst_over = executor.in_bursts && inbox_head_ >= executor.burst_end;
    if (burst_over && !ParallelPaysLocked(2) && ready_.empty()) break;
    if (near && ready_.empty() && BlockedLocked() >= kBlockedPastAsync) break;
    const Dequeued next = DequeueLocked();
    if (!next.any) break;
    if (next.ready == nullptr) {
      // A GPU op goes to the ready queue by itself: it is issued now, not after the rest of a
      // burst.
      if (!ready_.empty() && ComesBeforeInboxLocked(ready_.top_priority())) break;
      ++blocked;
      continue;
    }
    const int priority = next.ready->priority;
    if (priority <= 0 && ready_.empty() && ComesBeforeInboxLocked(priority)) return next.ready;
    ready_.Push(next.ready);
    if (ComesBeforeInboxLocked(ready_.top_priority())) break;
  }
  if (!ready_.empty()) return PopReadyLocked(executor);
  if (far) {
    executor.looks_far = false;
    executor.vain_looks = kVainLooks - kVainLooksAgain;
  } else if (past_async) {
    ++executor.vain_looks;
  }
  return nullptr;
}

Op* EngineCore::PopReadyLocked(Executor& executor) {
  Op* op = ready_.Pop();
  if (!IsLater(executor, op)) return op;
  ready_.Push(op);
  return nullptr;
}

// Was `op` pushed after the WaitForAll that helps here?
bool EngineCore::IsLater(const Executor& executor, const Op* op) {
  return executor.last_epoch && static_cast<std::int32_t>(op->epoch - *executor.last_epoch) > 0;
}

// If an op above priority 0 may lie in the inbox, brings it into the ready queue.
void EngineCore::DrainIfUrgentLocked() {
  // Not exchange: the usual answer is no, and a load keeps the line shared.
  if (!urgent_.load(std::memory_order_acquire)) return;
  // acq_rel, as in PublishOp: of the two exchanges the later one sees what came before the other,
  // so either the op is found now or the flag stays. Unless the op lies behind a slot that another
  // thread has not written yet.
  urgent_.exchange(false, std::memory_order_acq_rel);
  const std::uint64_t tail = inbox_.tail();
  DrainLocked();
  if (inbox_head_ < tail) [[unlikely]]
    urgent_.store(true, std::memory_order_relaxed);
}

// Runs the body of `op` without the lock, then finishes it.
void EngineCore::ExecuteLocked(Executor& executor, Op* op) {
  if (op->on_gpu()) [[unlikely]] {
    WakeLookout();
    ExecuteGpuLocked(executor, op);
    return;
  }
  LeaveGpuLocked(executor);
  FailureRecord* poison = tracker_.PoisonOf(op);
  if (poison != nullptr) ++poison->refs;
  op->started = true;
  executor.current = op;
  ++executor.ran;
  executor_ran_ += executor.keeps_candidate;
  ++executing_;
  if (executor.is_pusher) [[unlikely]]
    ++pushers_executing_;
  bool request_worker = false;
  // Nobody counts on a pusher to look at the inbox, and how long a transfer takes to start says
  // nothing of other bodies.
  bool lowered = false;
  if (kind_ == Kind::kThreaded && !executor.is_pusher) {
    const bool watched = executors_ == 0 || !lookout_deep_.load(std::memory_order_relaxed);
    lowered = watched ? LowerGuardLocked(&request_worker) : GoAloneLocked(executor);
  }
  const bool timed = !executor.is_pusher && (body_ns_ > kLongBodyNs || --until_sample_ < 0);
  AsyncState* async = op->async_state();
  lock_.unlock();

  if (request_worker) host_->RequestWorker(When::kNow);
  engine::TraceWriter* trace = kTracing ? trace_.load(std::memory_order_acquire) : nullptr;
  const std::int64_t started_ns = timed || trace != nullptr ? SteadyNowNs() : 0;
  bool failed = false;
  std::unique_ptr<Thrown> thrown;  // of a synchronous op: an async one's completion keeps its own
  ThreadContext& context = tls_context;
  const ThreadContext outer = context;
  context.core = this;
  context.op = op;
  context.children = 0;
  context.after_body = false;  // what takes a GPU op down may stop another engine
  // Holds on, so that a body that throws fails with its exception and not with its dropped
  // completion.
  if (async != nullptr) RetainAsync(async);
  try {
    op->function(op->body(), poison != nullptr ? BodyAction::kDrop : BodyAction::kRun, async);
  } catch (...) {
    failed = true;
    if (async != nullptr) {
      CompleteAsync(async, std::current_exception());
    } else {
      thrown = std::make_unique<Thrown>(std::current_exception());
    }
  }
  if (async != nullptr) EndAsyncBody(op, poison != nullptr);
  std::int64_t ended_ns = 0;
  if (started_ns != 0) {
    ended_ns = SteadyNowNs();
    // Now and then is often enough. As a part of this op: what that pushes does not wait for room.
    if (any_failed_.load(std::memory_order_relaxed)) [[unlikely]]
      FreeUnusedFailures();
  }
  const std::int64_t children = context.children;
  context = outer;
  if (trace != nullptr) [[unlikely]] {
    const auto outcome = poison != nullptr ? engine::TraceOutcome::kSkipped
                         : failed          ? engine::TraceOutcome::kFailed
                                           : engine::TraceOutcome::kOk;
    trace->OnRun(op->ticket, static_cast<std::uint64_t>(started_ns),
                 static_cast<std::uint64_t>(poison != nullptr ? started_ns : ended_ns), outcome);
  }

  lock_.lock();
  if (timed) {
    executor.timed_body_ns = ended_ns - started_ns;
    executor.hold_started_ns = SteadyNowNs();
  }
  executor.current = nullptr;
  --executing_;
  if (executor.is_pusher) [[unlikely]]
    --pushers_executing_;
  // Whoever was counted on may have left meanwhile, and lowered the mode for good.
  if (lowered) {
    alone_ = false;
    if (executors_ > 0) mode_.store(Mode::kAwake, std::memory_order_relaxed);
  }
  if (timed) MeasureBodyLocked(ended_ns - started_ns);
  if (children > 0) {
    EpochLocked(op->epoch).children += children;
    pushed_by_bodies_ += static_cast<std::uint64_t>(children);
  }
  ReleaseFromBoundLocked(op->temporary_bytes());
  if (async != nullptr && poison == nullptr && !FinishAsyncLocked(op, thrown)) return;
  FailureRecord* failure = thrown != nullptr ? RecordFailureLocked(op, *thrown) : poison;
  FinishLocked(&executor, op, failure, /*skipped=*/poison != nullptr);
  if (poison != nullptr) tracker_.Unref(poison);
}

// Keeps the moving averages. A single long sample is more often a preempted thread than a long
// body, so it counts little, and the next op is timed too.
void EngineCore::MeasureBodyLocked(std::int64_t sample_ns) {
  const std::int64_t most_ns = 2 * body_ns_ + 100;
  until_sample_ = sample_ns > most_ns ? 0 : kSampleEvery;
  body_ns_ = body_measured_ ? body_ns_ + (std::min(sample_ns, most_ns) - body_ns_) / 4 : sample_ns;
  body_measured_ = true;
}

// `sample_ns` is the hold after the body that took `body_sample_ns`. A single executor's holds are
// short, which says nothing of what they would be beside others: they only wear down what was
// measured then, so that others are let in again after a while.
void EngineCore::MeasureHoldLocked(std::int64_t sample_ns, std::int64_t body_sample_ns) {
  const auto follow = [](std::int64_t& average, std::int64_t sample, int inertia) {
    average += (std::min(sample, 2 * average + 100) - average) / inertia;
  };
  const int at_work = executors_ - idlers_;
  if (at_work > 1) {
    follow(hold_ns_, sample_ns, 8);
    follow(shared_ns_, (body_sample_ns + sample_ns) / at_work, 8);
  } else {
    const std::int64_t solo_ns = body_sample_ns + sample_ns;
    if (solo_ns_ == 0) solo_ns_ = solo_ns;
    follow(solo_ns_, solo_ns, 4);
    if (sample_ns < hold_ns_) --hold_ns_;
    if (shared_ns_ > 0) --shared_ns_;
  }
}

// The body of an async op is gone: it was skipped, has returned, or has thrown.
void EngineCore::EndAsyncBody(Op* op, bool skipped) noexcept {
  AsyncState* async = op->async_state();
  if (skipped) async->flags.fetch_or(AsyncState::kClaimed, std::memory_order_relaxed);
  ReleaseAsync(async);
}

// The body of an async op has returned. True: it has been completed as well, with `thrown`. False:
// its completion will come to TakeCompletionsLocked.
bool EngineCore::FinishAsyncLocked(Op* op, std::unique_ptr<Thrown>& thrown) {
  AsyncState* async = op->async_state();
  // acq_rel: acquires `thrown` from the caller; releases the body's effects to it
  if ((async->flags.fetch_or(AsyncState::kBodyDone, std::memory_order_acq_rel) &
       AsyncState::kCalled) == 0) {
    // From here on `async` is the caller's.
    op->extension()->in_flight_index = in_flight_.size();
    in_flight_.push_back(op);
    AppointLeaderLocked();  // P1
    // The push raced with Stop: the engine may go, its core not.
    const bool late = drained_.load(std::memory_order_relaxed);
    if (late && !std::exchange(late_in_flight_, true)) Ref();
    return false;
  }
  thrown = std::move(async->thrown);
  return true;
}

void EngineCore::FinishInFlightLocked(Op* op) {
  const std::size_t index = op->extension()->in_flight_index;
  in_flight_[index] = in_flight_.back();
  in_flight_[index]->extension()->in_flight_index = index;
  in_flight_.pop_back();
  const AsyncState* async = op->async_state();
  const bool failed = async != nullptr && async->thrown != nullptr;
  FinishLocked(nullptr, op, failed ? RecordFailureLocked(op, *async->thrown) : nullptr,
               /*skipped=*/false);
  // Never the last: who brings a completion to a stopped engine holds one.
  if (in_flight_.empty() && std::exchange(late_in_flight_, false)) Unref();
}

// `op` is done, and in no queue any more.
[[gnu::always_inline]] inline void EngineCore::RetireLocked(Op* op) {
  ++done_;
  const std::uint32_t epoch = op->epoch;
  engine::FreeBlock(op, op->block_class);
  if (--EpochLocked(epoch).pending == 0 && epoch == base_epoch_ && base_epoch_ != current_epoch_) {
    AdvanceEpochsLocked();
  }
}

// Takes `op`, run or skipped, out of all queues, and frees it.
void EngineCore::FinishLocked(Executor* executor, Op* op, FailureRecord* failure, bool skipped) {
  if (failure != nullptr) {
    ++failed_;
    ++failure->refs;
  }
  const auto on_ready = [&](Op* ready) {
    lock_.AssertHeld();
    // The pusher wrote it last.
    if (ready->async) __builtin_prefetch(ready->async_state(), 1);
    if (ready->on_gpu()) {
      PushReadyGpuLocked(ready);
    } else if (executor != nullptr && executor->keeps_candidate && executor->candidate == nullptr) {
      executor->candidate = ready;
    } else {
      PushReadyLocked(ready);
    }
  };
  const auto on_write = [this](VarState* var) {
    lock_.AssertHeld();
    WakeForWritesLocked(var);
  };
  const auto on_fence = [this](Op* fence) {
    lock_.AssertHeld();
    FinishFenceLocked(fence);
  };
  const auto on_idle = [&](VarState* var) {
    lock_.AssertHeld();
    FreeVarLocked(var);
  };
  if (op->on_gpu()) [[unlikely]] {
    tracker_.FinishGpu(op, failure, skipped, on_ready, on_write, on_fence, on_idle);
  } else {
    tracker_.Finish(op, failure, skipped, on_ready, on_write, on_fence, on_idle);
  }
  if (failure != nullptr) tracker_.Unref(failure);
  if (op->async) {
    if (engine::TraceWriter* trace = trace_.load(std::memory_order_acquire)) {
      trace->OnComplete(
          op->ticket, static_cast<std::uint64_t>(SteadyNowNs()),
          failure != nullptr ? engine::TraceOutcome::kFailed : engine::TraceOutcome::kOk);
    }
    if (AsyncState* async = op->async_state()) {
      // No Completion may be made any more from the engine's reference.
      async->flags.fetch_or(AsyncState::kClaimed, std::memory_order_relaxed);
      ReleaseAsync(async);
    }
  }
  RetireLocked(op);
}

// That of a ClearError has passed. Inside calls of the tracker: it uses none itself.
void EngineCore::FinishFenceLocked(Op* op) {
  if (engine::TraceWriter* trace = trace_.load(std::memory_order_acquire)) {
    const auto now_ns = static_cast<std::uint64_t>(SteadyNowNs());
    trace->OnRun(op->ticket, now_ns, now_ns, engine::TraceOutcome::kOk);
  }
  ReleaseFromBoundLocked(/*bytes=*/0);
  RetireLocked(op);
}

// Those whose wait for writes of `var` is over.
void EngineCore::WakeForWritesLocked(VarState* var) {
  WakeWaitersLocked([var](const Waiter& waiter) {
    if (waiter.kind != WaitKind::kVar || waiter.var != var) return false;
    return waiter.fence != nullptr
               ? waiter.fence->passed()
               : static_cast<std::int32_t>(var->writes_finished - waiter.target) >= 0;
  });
}

void EngineCore::GrantMoreLocked() {
  tracker_.GrantMore(
      [this](Op* op) {
        lock_.AssertHeld();
        PushGrantedLocked(op);
      },
      [this](VarState* var) {
        lock_.AssertHeld();
        WakeForWritesLocked(var);
      },
      [this](Op* fence) {
        lock_.AssertHeld();
        FinishFenceLocked(fence);
      },
      [this](VarState* var) {
        lock_.AssertHeld();
        FreeVarLocked(var);
      });
}

void EngineCore::ReleaseFromBoundLocked(std::int64_t bytes) {
  ++released_;
  if (bytes > 0) pending_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  // Not the inbox' tail: reading the line that pushers write, an op at a time, would cost both
  // sides dearly.
  if ((released_ & 31) == 0) {
    released_published_.store(released_, std::memory_order_relaxed);
  }
  if (room_waiters_ > 0) {
    WakeWaitersLocked([](const Waiter& waiter) { return waiter.kind == WaitKind::kRoom; });
  }
}

void EngineCore::AdvanceEpochsLocked() {
  std::ptrdiff_t passed = 0;
  for (const std::uint64_t boundary : boundaries_) {
    if (inbox_head_ < boundary) break;
    ++passed;
    ++current_epoch_;
    closed_epochs_.push_back(std::exchange(open_epoch_, {}));
  }
  boundaries_.erase(boundaries_.begin(), boundaries_.begin() + passed);
  std::ptrdiff_t ended = 0;
  for (const Epoch& epoch : closed_epochs_) {
    if (!epoch.Ended()) break;
    ++ended;
  }
  if (ended == 0) return;
  closed_epochs_.erase(closed_epochs_.begin(), closed_epochs_.begin() + ended);
  base_epoch_ += static_cast<std::uint32_t>(ended);
  CallIdlersLocked();
  WakeWaitersLocked([this](const Waiter& waiter) {
    lock_.AssertHeld();
    return waiter.kind == WaitKind::kAll && EpochEndedLocked(waiter.target);
  });
}

// The record of the failure of `op`: a new one, unless `thrown` is one that the engine knows,
// passed on. `var`: which it is told to concern; null: the first that the op writes.
engine::FailureRecord* EngineCore::RecordFailureLocked(Op* op, const Thrown& thrown,
                                                       const VarState* var) {
  FailureRecord*& known = failures_[engine::AddressOf(thrown.error)];
  if (known != nullptr && known->refs > 0) return known;  // others only wait to be freed
  any_failed_.store(true, std::memory_order_relaxed);
  auto* record = new FailureRecord;
  known = record;
  record->ticket = op->ticket;
  record->error = thrown.error;
  record->failure.op = op->name;
  for (std::uint32_t i = 0; i < op->access_count && var == nullptr; ++i) {
    if (op->access(i).names_failure()) var = op->access(i).var();
  }
  if (var != nullptr) record->failure.var = VarName(*var);
  record->failure.message = thrown.message;
  if (unreported_.full()) {
    FailureRecord* const left_out = unreported_.TakeLeastWanted();
    if (!left_out->seen) LogLaterLocked(left_out);
    left_out->seen = true;
    tracker_.Unref(left_out);
  }
  record->refs = 1;
  unreported_.Add(record);
  return record;
}

// What nobody has seen of `failure` is logged with those that are freed next.
void EngineCore::LogLaterLocked(const FailureRecord* failure) {
  tracker_.Discard(new FailureRecord{.failure = failure->failure, .unheard = true});
}

// Those that nobody refers to, for FreeFailures.
engine::FailureRecord* EngineCore::TakeUnusedFailuresLocked() {
  FailureRecord* const unused = tracker_.TakeUnused();
  for (const FailureRecord* record = unused; record != nullptr; record = record->next) {
    const auto known = failures_.find(engine::AddressOf(record->error));
    // Its exception may have been thrown again since: then it has another record.
    if (known != failures_.end() && known->second == record) failures_.erase(known);
  }
  return unused;
}

void EngineCore::FreeUnusedFailures() {
  FailureRecord* unused = nullptr;
  {
    const engine::TrackerGuard guard(lock_);
    unused = TakeUnusedFailuresLocked();
  }
  FreeFailures(unused);
}

// Without the lock: what their exceptions own may use the engine as it goes.
void EngineCore::FreeFailures(FailureRecord* latest) noexcept {
  if (latest == nullptr) return;
  const engine::UncheckedScope unchecked;  // nor is it what the op has declared, if this is in one
  FailureRecord* oldest = nullptr;
  while (latest != nullptr) {
    FailureRecord* const earlier = std::exchange(latest->next, oldest);
    oldest = std::exchange(latest, earlier);
  }
  while (oldest != nullptr) {
    const std::unique_ptr<FailureRecord> record(std::exchange(oldest, oldest->next));
    if (!record->unheard) continue;
    Log(LogLevel::kError, "op '{}' failed and nobody waited for it: {}", record->failure.op,
        record->failure.message);
  }
}

EngineCore::ExecutorLink::ExecutorLink(EngineCore& core, Executor& executor)
    : core_(core), executor_(executor) {
  executor.next = core.executor_list_;
  if (core.executor_list_ != nullptr) core.executor_list_->previous = &executor;
  core.executor_list_ = &executor;
}

EngineCore::ExecutorLink::~ExecutorLink() {
  core_.LeaveGpuLocked(executor_);
  if (executor_.candidate != nullptr) core_.PushReadyLocked(executor_.candidate);
  (executor_.previous != nullptr ? executor_.previous->next : core_.executor_list_) =
      executor_.next;
  if (executor_.next != nullptr) executor_.next->previous = executor_.previous;
}

}  // namespace heddle::internal
