// The pushing side: from OpOptions to a slot in the inbox.
#include <algorithm>
#include <cstring>
#include <new>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/place_table.h"
#include "engine/core.h"
#include "engine/fork.h"
#include "engine/wait_checks.h"

namespace heddle::internal {

using engine::Access;
using engine::AccessMode;
using engine::AccessRef;
using engine::MessageKind;
using engine::OpExtension;
using engine::tls_context;

namespace {

constexpr std::size_t kPairwiseMax = 16;
// How long a pusher at the bound waits for completions before it enters all the same: while nothing
// else can make room, and while other ops come and go.
constexpr std::chrono::milliseconds kStuckPatience{5};
constexpr std::chrono::milliseconds kBusyPatience{1000};
// Instead of the first, while these are all of GPUs: most end by themselves, but take longer.
constexpr std::chrono::milliseconds kGpuPatience{100};

// Writes the accesses of an op, each variable once, and returns how many: pure reads first, in list
// order, then writes, so that the first failed input in list order is the one passed on.
std::size_t MergeFew(const OpOptions& options, Access* out) {
  std::size_t count = 0;
  for (const VarRef read : options.reads) {
    bool again = false;
    for (std::size_t i = 0; i < count; ++i) again |= out[i].var() == read.state();
    if (!again) new (&out[count++]) Access(read.state(), AccessMode::kRead);
  }
  for (const VarRef& write : options.writes) {
    std::size_t place = 0;
    while (place < count && out[place].var() != write.state()) ++place;
    if (place < count && out[place].is_write()) continue;  // again
    const AccessMode mode = place < count ? AccessMode::kReadWrite : AccessMode::kWrite;
    new (&out[place]) Access(write.state(), mode);
    if (&write == options.writes.begin()) out[place].set_names_failure();
    if (place == count) ++count;
  }
  return count;
}

// The same for long lists, in n.
std::size_t MergeMany(const OpOptions& options, std::vector<Access>* merged) {
  merged->reserve(options.reads.size() + options.writes.size());
  PlaceTable places(merged->capacity());
  const auto find = [&](const VarState* var) {
    return places.Find(reinterpret_cast<std::uintptr_t>(var), merged->size(),
                       [&](std::size_t place) { return (*merged)[place].var() == var; });
  };
  for (const VarRef read : options.reads) {
    if (find(read.state()).second) merged->emplace_back(read.state(), AccessMode::kRead);
  }
  for (const VarRef& write : options.writes) {
    const auto [place, is_new] = find(write.state());
    if (is_new) {
      merged->emplace_back(write.state(), AccessMode::kWrite);
    } else if ((*merged)[place].is_write()) {
      continue;  // again
    } else {
      (*merged)[place] = Access(write.state(), AccessMode::kReadWrite);
    }
    if (&write == options.writes.begin()) (*merged)[place].set_names_failure();
  }
  return merged->size();
}

void CheckAccessCount(std::size_t count, const OpOptions& options) {
  if (count <= AccessRef::kAccessesMax) return;
  throw InvalidArgument(fmt::format("push of op '{}': {} variables, expected at most {}",
                                    options.name.c_str(), count, AccessRef::kAccessesMax));
}

[[noreturn]] void ThrowStopped(const OpOptions& options) {
  throw InvalidState(
      fmt::format("push of op '{}': the engine has been stopped", options.name.c_str()));
}

}  // namespace

void EngineCore::Validate(const OpOptions& options) const {
  engine::CheckNotForked("push");
  // relaxed: a push that races with Stop may come before it
  if (closed_.load(std::memory_order_relaxed) && tls_context.core != this) [[unlikely]] {
    ThrowStopped(options);
  }
  const auto check = [&](const VarList& vars, const char* list) {
    std::size_t index = 0;
    for (const VarRef var : vars) {
      if (var.state() == nullptr) [[unlikely]] {
        throw InvalidArgument(
            fmt::format("push of op '{}': {}[{}] is an empty Var, expected one made by NewVar",
                        options.name.c_str(), list, index));
      }
      if (var.state()->core != this) [[unlikely]] {
        throw InvalidArgument(
            fmt::format("push of op '{}': {}[{}] ('{}') belongs to another engine",
                        options.name.c_str(), list, index, VarName(*var.state())));
      }
      ++index;
    }
  };
  check(options.reads, "reads");
  check(options.writes, "writes");
  if (options.temporary_bytes < 0) [[unlikely]] {
    throw InvalidArgument(fmt::format("push of op '{}': temporary_bytes is {}, expected >= 0",
                                      options.name.c_str(), options.temporary_bytes));
  }
}

// Inlined: a call would cost an empty op a twentieth of its push.
[[gnu::always_inline]] inline NewOp EngineCore::EnterAndMake(const OpOptions& options,
                                                             std::size_t body_bytes,
                                                             BodyFunction function, bool async,
                                                             PushMode mode) {
  if (LooksFull() || options.temporary_bytes > 0) [[unlikely]] {
    if (!EnterBound(options, mode)) return {nullptr, nullptr};
  }
  try {
    return NewOpBlock(options, body_bytes, function, async);
  } catch (...) {
    LeaveBound(options.temporary_bytes);
    throw;
  }
}

NewOp EngineCore::BeginPush(const OpOptions& options, std::size_t body_bytes, BodyFunction function,
                            bool async, PushMode mode) {
  Validate(options);
  if (options.device.type == DeviceType::kGpu || options.device.id < 0) [[unlikely]] {
    ThrowNotACpu(options);
  }
  return EnterAndMake(options, body_bytes, function, async, mode);
}

NewOp EngineCore::BeginGpuPush(const OpOptions& options, std::size_t body_bytes,
                               BodyFunction function, PushMode mode) {
  // seq_cst: either this sees that the engine is closed, or Stop sees this push and waits for it
  gpu_pushers_.fetch_add(1, std::memory_order_seq_cst);
  NewOp fresh{nullptr, nullptr};
  try {
    // Stop waits for the bodies that it finds, too; the lock orders drained_ before the others.
    const bool is_child = tls_context.core == this;
    if (is_child ? drained_.load(std::memory_order_relaxed)
                 : closed_.load(std::memory_order_seq_cst)) {
      ThrowStopped(options);
    }
    Validate(options);
    CheckGpu(options);
    fresh = EnterAndMake(options, body_bytes, function, /*async=*/true, mode);
  } catch (...) {
    LeaveGpuPush();
    throw;
  }
  if (fresh.op == nullptr) LeaveGpuPush();
  return fresh;
}

// release; pairs with the load in Stop: what was pushed comes first
void EngineCore::LeaveGpuPush() noexcept { gpu_pushers_.fetch_sub(1, std::memory_order_release); }

NewOp EngineCore::NewOpBlock(const OpOptions& options, std::size_t body_bytes,
                             BodyFunction function, bool async) {
  const std::size_t named = options.reads.size() + options.writes.size();
  std::vector<Access> merged;
  if (named > kPairwiseMax) CheckAccessCount(MergeMany(options, &merged), options);
  const std::size_t room = merged.empty() ? named : merged.size();
  const bool extended = async || options.temporary_bytes > 0;
  const std::size_t bytes = Op::Bytes(room, extended, body_bytes);
  const int block_class = engine::BlockClassOf(bytes);
  Op* op = static_cast<Op*>(engine::AllocateBlock(block_class, bytes));
  op->function = function;
  op->name = options.name.c_str();
  op->priority = options.priority;
  op->blocked = 0;
  op->device_id = options.device.id;
  op->device_type = options.device.type;
  op->lane = options.lane;
  op->async = async;
  op->started = false;
  op->child = false;
  op->extended = extended;
  op->run_when_poisoned = options.run_when_poisoned;
  op->marked = false;
  op->start_inline = options.start_inline;
  op->issued = false;
  op->block_class = static_cast<std::uint8_t>(block_class);
  if (merged.empty()) {
    op->access_count = static_cast<std::uint16_t>(MergeFew(options, op->accesses()));
  } else {
    op->access_count = static_cast<std::uint16_t>(merged.size());
    std::copy(merged.begin(), merged.end(), op->accesses());
  }
  if (extended) {
    auto* extension = new (op->extension()) OpExtension;
    extension->temporary_bytes = options.temporary_bytes;
    if (async) extension->async = NewAsyncState(this, op);
  }
  return {op, op->body()};
}

// Of an op that is not pushed after all.
void EngineCore::LeaveBound(std::int64_t bytes) noexcept {
  const engine::TrackerGuard guard(lock_);
  if (bytes > 0) {
    pending_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    WakeWaitersLocked([](const Waiter& waiter) { return waiter.kind == WaitKind::kRoom; });
  }
  // While this thread waited for room it may have had the place of a worker, who then left: the
  // push would have looked after what lies there.
  EnsureWorkerLocked();
}

void EngineCore::AbandonPush(Op* op) noexcept {
  LeaveBound(op->temporary_bytes());
  if (op->on_gpu()) LeaveGpuPush();
  if (AsyncState* async = op->async_state()) {
    async->flags.store(AsyncState::kClaimed, std::memory_order_relaxed);
    ReleaseAsync(async);
  }
  engine::FreeBlock(op, op->block_class);
}

std::uint64_t EngineCore::CommitPush(Op* op) noexcept {
  if (kind_ != Kind::kThreaded) [[unlikely]]
    return CommitWithoutWorkers(op, MessageKind::kOp);
  if (op->start_inline && tls_context.op == nullptr && tls_context.no_wait_depth == 0) [[unlikely]]
    return CommitInline(op);
  const std::uint64_t ticket = PublishOp(op, MessageKind::kOp);
  AfterPublish();
  return ticket;
}

std::uint64_t EngineCore::CommitGpuPush(Op* op) noexcept {
  if (kind_ != Kind::kThreaded) {
    const std::uint64_t ticket = CommitWithoutWorkers(op, MessageKind::kGpuOp);
    LeaveGpuPush();
    return ticket;
  }
  const std::uint64_t ticket = PublishOp(op, MessageKind::kGpuOp);
  LeaveGpuPush();  // the engine's object stays: the caller has it
  AfterPublish();
  return ticket;
}

// Gives `op` its ticket, whose slot is free then.
[[gnu::always_inline]] inline std::uint64_t EngineCore::EnterInbox(Op* op) noexcept {
  const std::uint64_t ticket = inbox_.TakeTicket(op->priority);
  op->ticket = ticket;
  if (!inbox_.HasSlot(ticket)) [[unlikely]]
    AwaitSlot(ticket);
  if (kTracing) {
    if (engine::TraceWriter* trace = trace_.load(std::memory_order_acquire)) [[unlikely]] {
      TracePush(*trace, op);
    }
  }
  return ticket;
}

// From here on `op` may have gone.
std::uint64_t EngineCore::PublishOp(Op* op, MessageKind kind) noexcept {
  engine::ThreadContext& context = tls_context;
  if (context.core == this) {
    op->child = true;
    op->epoch = context.op->epoch;
    ++context.children;
  }
  const int priority = op->priority;
  const std::uint64_t ticket = EnterInbox(op);
  inbox_.Publish(ticket, op, kind, priority);
  // After publishing; see DrainIfUrgentLocked.
  if (priority > 0) urgent_.exchange(true, std::memory_order_acq_rel);
  return ticket;
}

// Runs `op` here and now if it is ready. Published and taken from the inbox under one hold of the
// lock, it can be nobody else's meanwhile.
std::uint64_t EngineCore::CommitInline(Op* op) noexcept {
  const int priority = op->priority;
  const std::uint64_t ticket = EnterInbox(op);
  bool work_left = false;
  {
    const engine::TrackerGuard guard(lock_);
    inbox_.Publish(ticket, op, MessageKind::kOp, priority);
    if (RegisterThroughLocked(op, ticket)) {
      Executor executor;
      executor.is_pusher = true;
      const ExecutorLink link(*this, executor);
      ExecuteLocked(executor, op);
    } else if (priority > 0 && inbox_head_ <= ticket) {
      urgent_.exchange(true, std::memory_order_acq_rel);
    }
    TakeCompletionsLocked();  // those that came meanwhile are no reason either
    work_left = WorkIsVisibleLocked();
    if (!work_left) ++unwatched_;
  }
  // An op that was blocked, or has run and left nothing ready, is no reason to wake a worker.
  if (work_left) AfterPublish();
  return ticket;
}

// Registers what was pushed before `op`, and `op` itself. True: it is ready, and the caller's to
// run. False: it is blocked, or still lies in the inbox behind another thread's unwritten slot.
bool EngineCore::RegisterThroughLocked(const Op* op, std::uint64_t ticket) {
  TakeCompletionsLocked();
  while (inbox_head_ <= ticket) {
    const Dequeued next = DequeueLocked();
    if (!next.any) return false;
    if (next.ready == op) return true;
    if (next.ready != nullptr) PushReadyLocked(next.ready);
  }
  return false;
}

// The ring is full: whoever has a ticket empties it. Earlier tickets have slots, so this ends.
// Nothing under DrainLocked may wait for tickets to be published: this thread's own is not.
void EngineCore::AwaitSlot(std::uint64_t ticket) noexcept {
  while (!inbox_.HasSlot(ticket)) {
    if (lock_.try_lock()) {
      DrainLocked();
      inbox_.PublishHead(inbox_head_);
      lock_.unlock();
    }
    if (!inbox_.HasSlot(ticket)) std::this_thread::yield();
  }
}

void EngineCore::WakeFromPublish(Mode mode) noexcept {
  if (mode == Mode::kStopped) {
    EmptyInboxAfterStop();
    return;
  }
  // One pusher wins and wakes; the worker that comes looks at all that was published.
  if (!mode_.compare_exchange_strong(mode, Mode::kAwake, std::memory_order_seq_cst)) return;
  // What the lone body pushes is for the thread that runs it, unless the body takes long.
  const bool by_lone_body =
      mode == Mode::kAlone && tls_context.core == this && !tls_context.after_body;
  if (!by_lone_body && host_->IsComing()) return;  // others have run its ops and left meanwhile
  if (!by_lone_body && ReserveWorker()) {
    host_->RequestWorker(When::kSoon);
  } else if (mode == Mode::kDeep) {
    HurryLookout();  // all workers that count may have looked for the last time
  } else {
    WakeLookout();
  }
}

bool EngineCore::HasRoomLocked(std::int64_t bytes) {
  const auto pending = static_cast<std::int64_t>(inbox_.tail() - released_);
  if (pending >= options_.max_pending_ops) return false;
  if (bytes == 0) return true;
  const std::int64_t pending_bytes = pending_bytes_.load(std::memory_order_relaxed);
  return pending_bytes == 0 || bytes <= options_.max_pending_bytes - pending_bytes;
}

// Takes part in the bound: true when there is room, or when this thread must not wait for it.
// Its temporary bytes are counted.
bool EngineCore::EnterBound(const OpOptions& options, PushMode mode) {
  const std::int64_t bytes = options.temporary_bytes;
  const bool may_wait =
      tls_context.op == nullptr && tls_context.no_wait_depth == 0 && !WaitChecks::HasKept();
  const engine::TrackerGuard guard(lock_);
  DrainLocked();
  released_published_.store(released_, std::memory_order_relaxed);
  if (!HasRoomLocked(bytes) && mode == PushMode::kTry) return false;
  if (!HasRoomLocked(bytes) && may_wait) AwaitRoomLocked(options);
  if (bytes > 0) pending_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return true;
}

// As a push without temporary bytes that may wait.
void EngineCore::AwaitRoom(const OpOptions& options) {
  if (!LooksFull()) return;
  EnterBound(options, PushMode::kWaitForRoom);
  const engine::TrackerGuard guard(lock_);
  EnsureWorkerLocked();  // as in LeaveBound: it may be long until the push comes
}

// Everything pending waits for completions, of GPUs or others: perhaps only a push from outside can
// bring them.
bool EngineCore::OnlyCompletionsHelpLocked() {
  return executing_ == 0 && ready_.empty() && seeded_count_ == 0 && inbox_.tail() == inbox_head_ &&
         !CompletionsAreVisibleLocked() && AnyInFlightLocked();
}

void EngineCore::AwaitRoomLocked(const OpOptions& options) {
  const std::int64_t bytes = options.temporary_bytes;
  const std::int64_t started_ns = SteadyNowNs();
  std::optional<Deadline> deadline;
  if (tls_context.room_deadline != nullptr) deadline = *tls_context.room_deadline;
  CheckTimer timer;
  Executor executor;
  const ExecutorLink link(*this, executor);
  // Since when nothing but completions could make room, and none has.
  auto stuck_since = Clock::now();
  auto in_flight_since = stuck_since;  // something has been waiting for its completion
  std::uint64_t released = released_;
  std::uint64_t done = done_;
  while (!HasRoomLocked(bytes)) {
    if (closed_.load(std::memory_order_relaxed)) {
      EnsureWorkerLocked();  // as after a push that was abandoned: Stop may be asleep
      throw InvalidState(fmt::format(
          "push of op '{}' waiting for room: the engine has been stopped", options.name.c_str()));
    }
    if (HasPassed(deadline)) {
      EnsureWorkerLocked();
      throw TimeoutError(
          fmt::format("push of op '{}' waiting for room: the deadline has passed; {}",
                      options.name.c_str(), WhatIsPendingLocked()));
    }
    if (kind_ != Kind::kThreaded) {
      bool late = false;
      try {
        if (!AcquireInlineLocked(deadline, &late, &timer)) continue;
      } catch (...) {
        WaitChecks::Keep(std::current_exception());
        break;
      }
      std::exception_ptr error;
      const bool again = TakeTurnLocked(
          executor, &timer,
          [&] {
            lock_.AssertHeld();
            return HasRoomLocked(bytes) || HasPassed(deadline);
          },
          &error);
      if (error != nullptr) WaitChecks::Keep(std::move(error));
      if (HasRoomLocked(bytes) || WaitChecks::HasKept()) break;
      if (again || AwaitPublishedLocked()) continue;
    } else if (!deadline && HasPlaceLocked()) {
      if (Op* op = PickLocked(executor)) {
        ExecuteLocked(executor, op);
        if (HasRoomLocked(bytes) || !CheckIsDueLocked(&timer)) continue;
        if (auto error = CallCheckLocked(executor, &timer)) {
          WaitChecks::Keep(std::move(error));
          break;
        }
        continue;
      }
      if (HasRoomLocked(bytes)) break;  // what was picked may have been a completion
    }
    const auto now = Clock::now();
    const bool of_gpus = in_flight_.empty();
    const bool moves = released != released_ || (of_gpus && done != done_);
    if (!OnlyCompletionsHelpLocked() || moves) stuck_since = now;
    released = released_;
    done = done_;
    if (!AnyInFlightLocked()) in_flight_since = now;
    const Clock::duration patience = of_gpus ? kGpuPatience : kStuckPatience;
    // One op past the bound each time: it never deadlocks, and still bounds how fast the pending
    // ops grow.
    if (now - stuck_since >= patience || now - in_flight_since >= kBusyPatience) break;
    // Whatever gives room wakes this thread, but nobody does when the last op that could run has
    // become a blocked one: so it looks again from time to time.
    Waiter waiter{.kind = WaitKind::kRoom};
    ++room_waiters_;
    try {
      const Deadline look_again = now + patience;
      const bool sooner = !deadline || look_again.time() < deadline->time();
      LeaveGpuLocked(executor);
      SleepLocked(waiter,
                  AnyInFlightLocked() && sooner ? std::optional<Deadline>(look_again) : deadline,
                  &timer);
    } catch (...) {
      WaitChecks::Keep(std::current_exception());
    }
    --room_waiters_;
    DrainLocked();
    if (WaitChecks::HasKept()) break;
  }
  TraceWaitFor(engine::TraceWait::kRoom, 0, started_ns);
}

}  // namespace heddle::internal
