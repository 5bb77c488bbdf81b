// Ops of GPUs: registered, issued and finished. gpu/gpu_queues.h has the design.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/clock.h"
#include "engine/core.h"
#include "engine/fail_write.h"
#include "engine/held_up.h"

namespace heddle::internal {

using engine::GpuMark;
using engine::GpuQueue;
using engine::ThreadContext;
using engine::tls_context;

namespace {

// One op in so many of an executor frees the failures that nobody refers to: it takes the lock.
constexpr std::uint64_t kFreeFailuresEvery = 64;

}  // namespace

void EngineCore::ThrowNotACpu(const OpOptions& options) {
  throw InvalidArgument(
      fmt::format("push of op '{}': device {}, expected cpu(i) with i >= 0 (PushGpu takes gpu(i))",
                  options.name.c_str(), ToString(options.device)));
}

void EngineCore::CheckGpu(const OpOptions& options) const {
  const Device device = options.device;
  if (device.type != DeviceType::kGpu || device.id < 0) {
    throw InvalidArgument(fmt::format("push of GPU op '{}': device {}, expected gpu(i) with i >= 0",
                                      options.name.c_str(), ToString(device)));
  }
  if (device.id >= gpu_->device_count()) {
    throw InvalidArgument(
        fmt::format("push of GPU op '{}': {}", options.name.c_str(), gpu_->WhyNoGpu(device.id)));
  }
  gpu_->StartReaper(device.id);
}

void EngineCore::RegisterGpuLocked(Op* op) {
  CountRegisteredLocked(op);
  const auto on_ready = [this](Op* ready) {
    lock_.AssertHeld();
    PushReadyGpuLocked(ready);
  };
  if (tracker_.RegisterGpu(op, on_ready)) on_ready(op);
}

// Gives `op` its stream, and lets it be issued there or holds it back (G3, G5).
void EngineCore::PushReadyGpuLocked(Op* op) {
  GpuQueue& queue = gpu_->QueueOf(*op);
  op->async_state()->gpu_queue = &queue;
  ++queue.assigned;
  if (queue.ahead >= options_.gpu.issued_ahead || queue.issuing) return HoldLocked(queue, op);
  if (queue.next != nullptr) {
    if (queue.next_is_aged || op->priority <= queue.next->priority) return HoldLocked(queue, op);
    // What is ready gives its turn to what is more urgent.
    Op* const later = queue.next;
    ready_.Remove(later);
    --queue.ahead;
    HoldLocked(queue, later);
  }
  MayIssueLocked(queue, op, /*is_aged=*/false);
  PushReadyLocked(op);
}

void EngineCore::HoldLocked(GpuQueue& queue, Op* op) {
  op->async_state()->flags.fetch_or(AsyncState::kHeld, std::memory_order_relaxed);
  queue.held.Push(op);
}

void EngineCore::MayIssueLocked(GpuQueue& queue, Op* op, bool is_aged) {
  ++queue.ahead;
  queue.next_is_aged = is_aged;
  // The others' order is none of its priorities.
  if (kind_ == Kind::kThreaded) queue.next = op;
}

bool EngineCore::IsHeld(Op* op) {
  return op->on_gpu() &&
         (op->async_state()->flags.load(std::memory_order_relaxed) & AsyncState::kHeld) != 0;
}

// A place on `queue` or a turn to be issued has become free: for the most urgent op that is held
// back; null: there is none.
Op* EngineCore::TakeHeldLocked(GpuQueue& queue) {
  if (queue.held.empty() || queue.issuing || queue.next != nullptr ||
      queue.ahead >= options_.gpu.issued_ahead) {
    return nullptr;
  }
  const int top_priority = queue.held.top_priority();
  Op* const next = queue.held.Pop();
  next->async_state()->flags.fetch_and(~std::uint32_t{AsyncState::kHeld},
                                       std::memory_order_relaxed);
  MayIssueLocked(queue, next, next->priority < top_priority);
  return next;
}

// Issues `op` without the lock; then the GPU ops behind it may be issued too.
void EngineCore::ExecuteGpuLocked(Executor& executor, Op* op) {
  AsyncState* async = op->async_state();
  GpuQueue& queue = *async->gpu_queue;
  DCHECK(kind_ != Kind::kThreaded || (queue.next == op && !queue.issuing));  // G5
  if (queue.next == op) {
    queue.next = nullptr;
    queue.issuing = true;
  }
  FailureRecord* const poison = tracker_.PoisonAtIssue(op);
  if (poison != nullptr) ++poison->refs;
  const std::exception_ptr skipped = poison != nullptr ? poison->error : nullptr;
  tracker_.NotePoison(op);
  thread_local std::vector<GpuMark> waits;  // keeps its memory; bodies issue nothing themselves
  waits.clear();
  engine::Tracker::CollectMarks(op, &queue, &waits);
  op->started = true;
  executor.current = op;
  const bool frees_failures = executor.ran++ % kFreeFailuresEvery == 0;
  executor_ran_ += executor.keeps_candidate;
  ++executing_;
  lock_.unlock();

  engine::TraceWriter* trace = kTracing ? trace_.load(std::memory_order_acquire) : nullptr;
  DeviceTrace* const device_trace = trace != nullptr ? device_recorder_.For(*trace) : nullptr;
  const std::int64_t started_ns = trace != nullptr ? SteadyNowNs() : 0;
  ThreadContext& context = tls_context;
  const ThreadContext outer = context;
  context.core = this;
  context.op = op;
  context.children = 0;
  context.after_body = false;
  const auto [mark, error] =
      gpu_->Issue(queue, waits, async, skipped, &executor.gpu, [&](std::exception_ptr failed) {
        if (failed != nullptr) return failed;
        if (device_trace != nullptr) device_trace->Begin(op->ticket);
        try {
          op->function(op->body(), BodyAction::kRun, async);
        } catch (...) {
          failed = std::current_exception();
        }
        if (device_trace != nullptr) device_trace->End();
        return failed;
      });
  const bool failed = error != nullptr && error != skipped;
  const auto thrown = failed ? std::make_unique<Thrown>(error) : nullptr;
  if (frees_failures && any_failed_.load(std::memory_order_relaxed)) FreeUnusedFailures();
  const std::int64_t children = context.children;
  context = outer;
  if (trace != nullptr) {
    const auto outcome = skipped != nullptr ? engine::TraceOutcome::kSkipped
                         : error != nullptr ? engine::TraceOutcome::kFailed
                                            : engine::TraceOutcome::kOk;
    const std::int64_t ended_ns = skipped != nullptr ? started_ns : SteadyNowNs();
    trace->OnRun(op->ticket, static_cast<std::uint64_t>(started_ns),
                 static_cast<std::uint64_t>(ended_ns), outcome);
  }
  gpu_->FinishHappened(queue);

  lock_.lock();
  executor.current = nullptr;
  --executing_;
  if (children > 0) EpochLocked(op->epoch).children += children;
  ReleaseFromBoundLocked(op->temporary_bytes());
  FailureRecord* failure = error == nullptr ? nullptr : poison;
  if (thrown != nullptr) failure = RecordFailureLocked(op, *thrown);
  const bool did_not_run = skipped != nullptr && !failed;
  if (did_not_run) async->flags.fetch_or(AsyncState::kSkipped, std::memory_order_relaxed);
  tracker_.Issued(op, mark, failure, did_not_run, [this](Op* ready) {
    lock_.AssertHeld();
    PushReadyGpuLocked(ready);
  });
  if (poison != nullptr) tracker_.Unref(poison);
  // Behind what this op has let be issued.
  queue.issuing = false;
  if (Op* const next = TakeHeldLocked(queue)) {
    // Nobody needs to be called: this thread takes it next.
    executor.keeps_candidate ? ready_.Push(next) : PushReadyLocked(next);
  }
  op->extension()->in_flight_index = gpu_in_flight_.size();
  gpu_in_flight_.push_back(op);
  // acq_rel: acquires the error from the reaper, or releases this issue to it
  if ((async->flags.fetch_or(AsyncState::kBodyDone, std::memory_order_acq_rel) &
       AsyncState::kCalled) != 0) {
    TakeCompletionsLocked();  // what it waited for on the device has been completed before it
    FinishGpuLocked(op);
  }
}

void EngineCore::KeepFailure(Op* op) {
  const engine::TrackerGuard guard(lock_);
  op->marked = true;
}

void EngineCore::FailWrite(Op* op, VarState* var, const std::exception_ptr& error) {
  for (std::uint32_t i = 0; i < op->access_count; ++i) {
    engine::Access& access = op->access(i);
    if (access.var() != var || !access.is_write()) continue;
    const Thrown thrown(error);
    const engine::TrackerGuard guard(lock_);
    if (access.fails_alone()) return;
    tracker_.FailAlone(op, access, RecordFailureLocked(op, thrown, var));
    return;
  }
  throw InvalidArgument(fmt::format("FailWrite of {}: expected a variable that op '{}' writes",
                                    VarName(*var), op->name));
}

std::vector<std::uint64_t> EngineCore::HeldUpBy(std::span<const engine::OpVars> ops) {
  // The top bit is clear in numbers of single ops.
  constexpr std::uint64_t kOfSeveral = std::uint64_t{1} << 63;
  std::map<std::vector<std::uint64_t>, std::uint64_t> sets;
  std::vector<std::uint64_t> held;
  held.reserve(ops.size());
  std::vector<std::uint64_t> by;
  const engine::TrackerGuard guard(lock_);
  DrainToTailLocked();
  for (const engine::OpVars& op : ops) {
    by.clear();
    for (const VarRef var : op.reads) by.push_back(engine::Tracker::HeldUpBy(var.state(), false));
    for (const VarRef var : op.writes) by.push_back(engine::Tracker::HeldUpBy(var.state(), true));
    std::erase(by, engine::kNoOp);
    std::ranges::sort(by);
    by.erase(std::unique(by.begin(), by.end()), by.end());
    if (by.empty()) {
      held.push_back(engine::kNoOp);
    } else if (by.size() == 1 || by.back() == engine::kUnknownOps) {
      held.push_back(by.back());
    } else {
      held.push_back(sets.emplace(by, kOfSeveral | sets.size()).first->second);
    }
  }
  return held;
}

// The event of `op` has happened: it and all that it waited for are done.
void EngineCore::FinishGpuLocked(Op* op) {
  AsyncState* async = op->async_state();
  const std::size_t index = op->extension()->in_flight_index;
  gpu_in_flight_[index] = gpu_in_flight_.back();
  gpu_in_flight_[index]->extension()->in_flight_index = index;
  gpu_in_flight_.pop_back();
  GpuQueue& queue = *async->gpu_queue;
  EpochLocked(op->epoch).children += async->children;
  // What it read may have failed after it was issued. That came first, even if its own launch has
  // failed: those behind it, which know of the launch, must hear of the other.
  FailureRecord* failure = tracker_.PoisonSinceIssue(op);
  if (const Thrown* thrown = async->thrown.get()) {
    if (failure == nullptr) {
      failure = RecordFailureLocked(op, *thrown);
    } else if (!failures_.contains(engine::AddressOf(thrown->error))) {
      // Nobody else has it, and it must not go under the lock.
      tracker_.Discard(new FailureRecord{.error = thrown->error});
    }
  }
  const bool skipped = (async->flags.load(std::memory_order_relaxed) & AsyncState::kSkipped) != 0;
  FinishLocked(nullptr, op, failure, skipped);
  --queue.assigned;
  --queue.ahead;
  if (Op* const next = TakeHeldLocked(queue)) PushReadyLocked(next);
}

}  // namespace heddle::internal

namespace heddle::engine {

void KeepFailure() {
  CHECK(tls_context.op != nullptr && !tls_context.after_body, "KeepFailure outside of a body");
  tls_context.core->KeepFailure(tls_context.op);
}

std::vector<std::uint64_t> HeldUpBy(std::span<const OpVars> ops) {
  for (const OpVars& op : ops) {
    for (const VarList* vars : {&op.reads, &op.writes}) {
      if (!vars->empty()) return vars->begin()->state()->core->HeldUpBy(ops);
    }
  }
  return std::vector<std::uint64_t>(ops.size(), kNoOp);
}

void FailWrite(const Var& var, const std::exception_ptr& error) {
  Op* const op = tls_context.op;
  // What is behind the op has been told of its failures when it was issued.
  if (op == nullptr || tls_context.after_body || !op->on_gpu()) {
    throw InvalidState(fmt::format("FailWrite of {}: expected the body of a GPU op",
                                   internal::VarName(*var.state())));
  }
  if (error == nullptr) throw InvalidArgument("FailWrite: expected an error, got null");
  tls_context.core->FailWrite(op, var.state(), error);
}

}  // namespace heddle::engine
