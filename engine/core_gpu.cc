// Ops of GPUs: registered, issued and finished. gpu/gpu_queues.h has the design.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <fmt/format.h>

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
  if (device.id < gpu_->device_count()) return;
  throw InvalidArgument(
      fmt::format("push of GPU op '{}': {}", options.name.c_str(), gpu_->WhyNoGpu(device.id)));
}

void EngineCore::RegisterGpuLocked(Op* op) {
  if (!op->child) op->epoch = current_epoch_;
  Epoch& epoch = EpochLocked(op->epoch);
  ++epoch.pending;
  epoch.children -= op->child;
  ++pushed_;
  const auto on_ready = [this](Op* ready) {
    lock_.AssertHeld();
    PushReadyGpuLocked(ready);
  };
  if (tracker_.RegisterGpu(op, on_ready)) on_ready(op);
}

// Gives `op` its stream, and a place on it (G3) or holds it back.
void EngineCore::PushReadyGpuLocked(Op* op) {
  AsyncState* async = op->async_state();
  GpuQueue& queue = gpu_->QueueOf(*op);
  async->gpu_queue = &queue;
  if (queue.ahead < options_.gpu.issued_ahead) {
    ++queue.ahead;
    PushReadyLocked(op);
  } else {
    async->flags.fetch_or(AsyncState::kHeld, std::memory_order_relaxed);
    queue.held.Push(op);
  }
}

bool EngineCore::IsHeld(Op* op) {
  return op->on_gpu() &&
         (op->async_state()->flags.load(std::memory_order_relaxed) & AsyncState::kHeld) != 0;
}

// An op has left `queue`: the most urgent one that is held back takes its place.
void EngineCore::ReleasePlaceLocked(GpuQueue& queue) {
  if (queue.held.empty()) {
    --queue.ahead;
    return;
  }
  Op* next = queue.held.Pop();
  next->async_state()->flags.fetch_and(~std::uint32_t{AsyncState::kHeld},
                                       std::memory_order_relaxed);
  PushReadyLocked(next);
}

// Issues `op` without the lock; then the GPU ops behind it may be issued too.
void EngineCore::ExecuteGpuLocked(Executor& executor, Op* op) {
  AsyncState* async = op->async_state();
  GpuQueue& queue = *async->gpu_queue;
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
  const auto [mark, error] =
      gpu_->Issue(queue, waits, async, skipped, [&](std::exception_ptr failed) {
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

  lock_.lock();
  executor.current = nullptr;
  --executing_;
  if (children > 0) EpochLocked(op->epoch).children += children;
  ReleaseFromBoundLocked(op->temporary_bytes());
  FailureRecord* failure = error == nullptr ? nullptr : poison;
  if (thrown != nullptr) failure = RecordFailureLocked(op, *thrown);
  tracker_.Issued(op, mark, failure, [this](Op* ready) {
    lock_.AssertHeld();
    PushReadyGpuLocked(ready);
  });
  if (poison != nullptr) tracker_.Unref(poison);
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
  std::vector<std::uint64_t> held;
  held.reserve(ops.size());
  const engine::TrackerGuard guard(lock_);
  DrainToTailLocked();
  for (const engine::OpVars& op : ops) {
    std::uint64_t by = engine::kNoOp;
    const auto add = [&by](std::uint64_t one) {
      if (one == engine::kNoOp || one == by) return;
      by = by == engine::kNoOp ? one : engine::kSeveralOps;
    };
    for (const VarRef var : op.reads) add(engine::Tracker::HeldUpBy(var.state(), false));
    for (const VarRef var : op.writes) add(engine::Tracker::HeldUpBy(var.state(), true));
    held.push_back(by);
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
  FinishLocked(nullptr, op, failure);
  ReleasePlaceLocked(queue);
}

}  // namespace heddle::internal

namespace heddle::engine {

void KeepFailure() {
  CHECK(tls_context.op != nullptr, "KeepFailure outside of an op");
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
  if (op == nullptr || !op->on_gpu()) {
    throw InvalidState(fmt::format("FailWrite of {}: expected the body of a GPU op",
                                   internal::VarName(*var.state())));
  }
  if (error == nullptr) throw InvalidArgument("FailWrite: expected an error, got null");
  tls_context.core->FailWrite(op, var.state(), error);
}

}  // namespace heddle::engine
