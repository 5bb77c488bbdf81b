// Making, stopping and taking apart an engine; variables, completions and traces.
#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <string>
#include <thread>
#include <unordered_map>

#include <fmt/format.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/cpu_count.h"
#include "base/env.h"
#include "base/job_file.h"
#include "base/log.h"
#include "base/sanitizers.h"
#include "engine/access_check.h"
#include "engine/completion_batch.h"
#include "engine/core.h"
#include "engine/failure.h"
#include "engine/fork.h"

namespace heddle::internal {

using engine::Access;
using engine::AccessMode;
using engine::MessageKind;
using engine::tls_context;

namespace {

constexpr int kWorkersMax = 1024;
constexpr int kIssuedAheadMax = 1 << 16;
constexpr int kStreamsMax = 64;
constexpr int kNoMoreWorkers = 1 << 20;             // more than any engine may have
constexpr std::chrono::microseconds kLateLook{20};  // of Stop, for who is just about to go

std::atomic<std::uint64_t> last_id{0};  // of the engines of this process

EngineOptions Resolve(EngineOptions options) {
  engine::CheckNotForked("making an engine");
  engine::WatchForks();
  const auto check = [](bool good, const char* name, auto value, const char* expected) {
    if (good) return;
    throw InvalidArgument(
        fmt::format("engine option {} is {}, expected {}", name, value, expected));
  };
  check(options.num_workers >= 0 && options.num_workers <= kWorkersMax, "num_workers",
        options.num_workers, "0 to 1024");
  check(options.max_pending_ops >= 1, "max_pending_ops", options.max_pending_ops, "at least 1");
  check(options.max_pending_bytes >= 1, "max_pending_bytes", options.max_pending_bytes,
        "at least 1");
  check(options.ageing >= 0, "ageing", options.ageing, "at least 0");
  check(options.gpu.issued_ahead >= 1 && options.gpu.issued_ahead <= kIssuedAheadMax,
        "gpu.issued_ahead", options.gpu.issued_ahead, "1 to 65536");
  for (const GpuLaneOptions& lane : options.gpu.lanes) {
    check(lane.streams >= 1 && lane.streams <= kStreamsMax, "gpu.lanes[].streams", lane.streams,
          "1 to 64");
    check(lane.urgent_streams >= 0 && lane.urgent_streams <= kStreamsMax,
          "gpu.lanes[].urgent_streams", lane.urgent_streams, "0 to 64");
  }
  check(options.watchdog.count() >= 0, "watchdog", options.watchdog.count(), "at least 0 ms");
  check(options.trace_bytes_max >= 1, "trace_bytes_max", options.trace_bytes_max, "at least 1");
  if (options.num_workers == 0) options.num_workers = std::min(AvailableCpus(), kWorkersMax);
  return options;
}

// The environment names one file for all engines that read it: those after the first get others.
std::string TraceFileOf(const std::string& name) {
  if (name != JobFileName(EnvString("HEDDLE_TRACE", ""))) return name;
  static std::atomic<int> engines{0};
  const int number = engines.fetch_add(1, std::memory_order_relaxed) + 1;
  return number == 1 ? name : BeforeEnding(name, std::to_string(number));
}

}  // namespace

EngineCore::Kind EngineCore::ParseKind(const std::string& type) {
  const auto* const found = std::find(kTypes.begin(), kTypes.end(), type);
  if (found != kTypes.end()) return static_cast<Kind>(found - kTypes.begin());
  throw InvalidArgument(
      fmt::format("unknown engine type '{}', expected one of {}", type, fmt::join(kTypes, ", ")));
}

std::string EngineCore::TypeFromEnvironment() {
  return std::string(kTypes[EnvChoice("HEDDLE_ENGINE", {kTypes[0], kTypes[1], kTypes[2]}, 0)]);
}

EngineCore::EngineCore(EngineOptions options)
    : id_(last_id.fetch_add(1, std::memory_order_relaxed) + 1),
      options_(Resolve(std::move(options))),
      kind_(ParseKind(options_.type)),
      mode_(Mode::kNap),
      ready_(options_.ageing),
      random_(options_.seed),
      gpu_(std::make_unique<engine::GpuQueues>(options_)),
      device_recorder_(gpu_->driver()) {
  if (!options_.trace_file.empty()) StartTrace(TraceFileOf(options_.trace_file));
  Enlist();
  try {
    StartThreads();
  } catch (...) {  // the system has no more of them
    Delist();
    throw;
  }
  if (options_.check_access) engine::checking_engines.fetch_add(1, std::memory_order_relaxed);
}

void EngineCore::StartThreads() {
  if (kind_ == Kind::kThreaded) {
    const auto run_worker = [this](engine::WorkerThread thread) { return RunWorker(thread); };
    // The thread sanitizer cannot see how the prebuilt oneTBB synchronises and reports races that
    // are not there.
    host_ = options_.worker_host == WorkerHost::kTbb && !kThreadSanitizer
                ? engine::MakeTbbHost(options_.num_workers, run_worker)
                : engine::MakeThreadHost(options_.num_workers, run_worker);
  }
  if (kind_ == Kind::kThreaded || options_.watchdog.count() > 0) {
    lookout_ = std::thread([this] { Lookout(); });
  }
}

EngineCore::~EngineCore() {
  if (options_.check_access) engine::checking_engines.fetch_sub(1, std::memory_order_relaxed);
  Delist();
  lock_.AssertHeld();      // the last reference: nobody else is here
  LogUnseenLaterLocked();  // of pushes that raced with Stop
  while (FailureRecord* record = unreported_.TakeEarliest()) tracker_.Unref(record);
  FreeFailures(TakeUnusedFailuresLocked());
}

void EngineCore::Unref() noexcept {
  // acq_rel: the last one sees what all others did
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

void EngineCore::Stop(std::optional<Deadline> deadline, bool destroying) {
  if (engine::InForkedChild()) return;
  // An op of another engine may let go of the last handle of this one, and then there is no other
  // way than to wait.
  if (!destroying || tls_context.core == this) CheckNotInOp("Stop", nullptr);
  {
    const MutexLock lock(stop_mutex_);
    while (stopping_) {
      if (!deadline) {
        stop_ended_.Wait(stop_mutex_);
      } else if (!stop_ended_.WaitUntil(stop_mutex_, deadline->time()) && stopping_) {
        throw TimeoutError(
            "stopping the engine: the deadline has passed; another thread is stopping it");
      }
    }
    if (stopped_) return;
    stopping_ = true;
  }
  try {
    StopOnce(deadline);
  } catch (...) {
    EndStop(/*stopped=*/false);
    throw;
  }
  EndStop(/*stopped=*/true);
}

void EngineCore::EndStop(bool stopped) {
  {
    const MutexLock lock(stop_mutex_);
    stopping_ = false;
    stopped_ = stopped;
  }
  stop_ended_.NotifyAll();
}

void EngineCore::StopOnce(std::optional<Deadline> deadline) {
  closed_.store(true, std::memory_order_seq_cst);
  {
    const engine::TrackerGuard guard(lock_);
    // Those who wait for room must find out.
    WakeWaitersLocked([](const Waiter& waiter) { return waiter.kind == WaitKind::kRoom; });
  }
  // seq_cst: see BeginGpuPush
  while (gpu_pushers_.load(std::memory_order_seq_cst) != 0) {
    if (deadline && Deadline::Clock::now() >= deadline->time()) {
      throw TimeoutError("stopping the engine: the deadline has passed; a GPU op is being pushed");
    }
    std::this_thread::sleep_for(kLateLook);
  }
  {
    const engine::TrackerGuard guard(lock_);
    while (true) {
      if (!WaitForEpochLocked(CloseEpochLocked(), deadline)) {
        throw TimeoutError(
            fmt::format("stopping the engine: the deadline has passed; {}", WhatIsPendingLocked()));
      }
      if (inbox_.tail() != inbox_head_ || done_ != pushed_) continue;
      mode_.store(Mode::kStopped, std::memory_order_seq_cst);  // store, then recheck
      if (inbox_.tail() == inbox_head_) break;
      mode_.store(Mode::kNap, std::memory_order_relaxed);
    }
    // All ops are done, so no body runs, and one that runs later takes the lock before: an op of a
    // CPU whose push had looked before closed_ was set. See docs/thread_model.md, Stopping.
    drained_.store(true, std::memory_order_relaxed);
    // They may still ask for ops that are done, whose streams go below. No more come.
    while (gpu_askers_ > 0) {
      lock_.unlock();
      std::this_thread::yield();
      lock_.lock();
    }
  }
  {
    const MutexLock lock(lookout_mutex_);
    lookout_stop_ = true;
  }
  lookout_wake_.NotifyAll();
  if (lookout_.joinable()) lookout_.join();
  // Workers that were requested and found nothing to do; kNoMoreWorkers keeps others from being
  // requested. acquire; pairs with the release in RunWorker
  int none = 0;
  while (!workers_.compare_exchange_strong(none, kNoMoreWorkers, std::memory_order_acquire)) {
    none = 0;
    const int revoked = host_->Revoke();
    workers_.fetch_sub(revoked, std::memory_order_relaxed);
    if (revoked > 0) continue;
    if (HasPassed(deadline)) {
      throw TimeoutError(
          "stopping the engine: the deadline has passed; workers help with a ParallelFor, or have "
          "yet to look for the last time");
    }
    std::this_thread::sleep_for(kLateLook);
  }
  // Both go with the engine: a late pusher may look at them.
  if (host_ != nullptr) host_->End();
  gpu_->End();
  // The last workers and the lookout may have changed the mode, and pushers relied on them.
  mode_.store(Mode::kStopped, std::memory_order_seq_cst);
  EmptyInboxAfterStop();
  {
    const engine::TrackerGuard guard(lock_);
    LogUnseenLaterLocked();
  }
  FreeUnusedFailures();
  StopTrace();
}

// What nobody has seen by now is logged with the failures that are freed next.
void EngineCore::LogUnseenLaterLocked() {
  while (FailureRecord* failure = unreported_.EarliestUnseen()) {
    LogLaterLocked(failure);
    unreported_.See(failure);
  }
}

// --- variables -----------------------------------------------------------------------------------

std::string VarName(const VarState& var) {
  return var.name != nullptr ? *var.name : fmt::format("var{}", var.id);
}

Var EngineCore::NewVar(std::string_view name) {
  engine::CheckNotForked("NewVar");
  if (tls_context.core != this) CheckOpen("NewVar");
  auto text = name.empty() ? nullptr : std::make_unique<std::string>(name);
  auto* var = new VarState;
  var->core = this;
  var->id = next_var_id_.fetch_add(1, std::memory_order_relaxed);
  var->name = text.release();
  if (tls_context.core == this) var->made_by = tls_context.op->ticket;
  Ref();
  Var made = Var::Adopt(var);
  engine::TraceWriter* trace = nullptr;
  {
    const engine::TrackerGuard guard(lock_);
    var->next = vars_;
    if (vars_ != nullptr) vars_->previous = var;
    vars_ = var;
    // Under one hold, as in StartTrace: either that finds the variable, or this the trace.
    trace = trace_.load(std::memory_order_acquire);
  }
  if (var->name != nullptr && trace != nullptr) trace->OnVar(var->id, *var->name);
  return made;
}

void RetainVar(VarState* var) noexcept { var->refs.fetch_add(1, std::memory_order_relaxed); }

void ReleaseVar(VarState* var) noexcept {
  // acq_rel: pushes that used other handles come before the drop
  if (var->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) var->core->DropVar(var);
}

// In ticket order like a push: all ops that name the variable come before.
void EngineCore::DropVar(VarState* var) noexcept {
  if (engine::InForkedChild()) return;
  Ref();  // once the drop is published, others may free the variable and let the engine go
  const std::uint64_t ticket = inbox_.TakeTicket();
  if (!inbox_.HasSlot(ticket)) AwaitSlot(ticket);
  inbox_.PublishDrop(ticket, var);
  if (!TookDrop(ticket)) AfterPublish();
  Unref();
}

// A drop that lies alone in the inbox, while nobody looks at it, is no reason to wake a worker. Not
// a wait for the lock: this thread may have it.
bool EngineCore::TookDrop(std::uint64_t ticket) noexcept {
  const Mode mode = mode_.load(std::memory_order_relaxed);
  if (kind_ != Kind::kThreaded || mode < Mode::kNap || mode == Mode::kStopped) return false;
  if (!lock_.try_lock()) return false;
  bool alone = inbox_head_ == ticket;
  if (alone) {
    DequeueLocked();
    alone = !WorkIsVisibleLocked();
    if (alone) ++unwatched_;
  }
  lock_.unlock();
  return alone;
}

void EngineCore::FreeVarLocked(VarState* var) {
  tracker_.SetFailure(var, nullptr);
  (var->previous != nullptr ? var->previous->next : vars_) = var->next;
  if (var->next != nullptr) var->next->previous = var->previous;
  delete var->name;
  delete var;
  // Never the last: the facade holds one while the engine runs, EmptyInboxAfterStop after.
  Unref();
}

std::uint64_t EngineCore::version(const Var& var) const {
  CheckOwn(var.state(), "version");
  return var.state()->version.load(std::memory_order_acquire);
}

// To the body of a GPU op, all issued before it has happened.
const engine::FailureRecord* EngineCore::FailureRecordOfLocked(const VarState* var) {
  const bool in_body = tls_context.core == this && !tls_context.after_body;
  const Op* const op = in_body ? tls_context.op : nullptr;
  return op != nullptr && op->on_gpu() ? engine::Tracker::FailureAtIssue(var) : var->failure;
}

std::optional<Failure> EngineCore::FailureOf(const Var& var) {
  CheckOwn(var.state(), "FailureOf");
  engine::CheckNotForked("FailureOf");
  const engine::TrackerGuard guard(lock_);
  const FailureRecord* record = FailureRecordOfLocked(var.state());
  return record != nullptr ? std::optional(record->failure) : std::nullopt;
}

std::exception_ptr EngineCore::ErrorOf(const Var& var) {
  CheckOwn(var.state(), "ErrorOf");
  engine::CheckNotForked("ErrorOf");
  // relaxed: a body, or who waited, comes after all failures that it may ask for
  if (!any_failed_.load(std::memory_order_relaxed)) return nullptr;
  const engine::TrackerGuard guard(lock_);
  const FailureRecord* record = FailureRecordOfLocked(var.state());
  return record != nullptr ? record->error : nullptr;
}

void EngineCore::ClearError(const Var& var) {
  CheckOwn(var.state(), "ClearError");
  engine::CheckNotForked("ClearError");
  if (tls_context.core != this) CheckOpen("ClearError");
  OpOptions options;
  options.name = "clear_error";
  options.writes = {var};
  Op* const fence = NewOpBlock(options, 0, /*function=*/nullptr, /*async=*/false).op;
  fence->marked = true;
  new (&fence->access(0)) Access(var.state(), AccessMode::kFence);
  if (kind_ != Kind::kThreaded) {
    CommitWithoutWorkers(fence, MessageKind::kFence);
    return;
  }
  PublishOp(fence, MessageKind::kFence);
  AfterPublish();
}

EngineStats EngineCore::stats() {
  engine::CheckNotForked("stats");
  const engine::TrackerGuard guard(lock_);
  DrainLocked();
  return {
      .pushed = pushed_,
      .done = done_,
      .failed = failed_,
      .running = static_cast<std::uint64_t>(executing_ - helping_) + in_flight_.size() +
                 gpu_in_flight_.size(),
      .pending_bytes = static_cast<std::uint64_t>(pending_bytes_.load(std::memory_order_relaxed)),
      .late_completions = late_completions_.load(std::memory_order_relaxed)};
}

// --- completions ---------------------------------------------------------------------------------

namespace {

// Late calls may come when their engine is gone: live engines by number.
Mutex live_mutex;
std::unordered_map<std::uint64_t, EngineCore*>& LiveEngines() REQUIRES(live_mutex) {
  static auto* engines = new std::unordered_map<std::uint64_t, EngineCore*>;
  return *engines;
}

void ReportLateCompletion(std::uint64_t core_id, const std::exception_ptr& error) {
  if (error == nullptr) {
    Log(LogLevel::kWarning, "a completion was called again; only its first call counts");
  } else {
    Log(LogLevel::kWarning, "an op that was completed before has failed, which counts no more: {}",
        engine::Thrown(error).message);
  }
  const MutexLock lock(live_mutex);
  const auto found = LiveEngines().find(core_id);
  if (found != LiveEngines().end()) found->second->CountLateCompletion();
}

}  // namespace

void EngineCore::Enlist() {
  const MutexLock lock(live_mutex);
  LiveEngines().emplace(id_, this);
}

void EngineCore::Delist() noexcept {
  const MutexLock lock(live_mutex);
  LiveEngines().erase(id_);
}

void EngineCore::CountLateCompletion() noexcept {
  late_completions_.fetch_add(1, std::memory_order_relaxed);
}

AsyncState* NewAsyncState(EngineCore* core, Op* op) {
  void* block = engine::AllocateBlock(engine::BlockClassOf(sizeof(AsyncState)), sizeof(AsyncState));
  auto* state = new (block) AsyncState;
  state->core = core;
  state->core_id = core->id();
  state->op = op;
  state->of_gpu = op->on_gpu();
  return state;
}

void RetainAsync(AsyncState* state) noexcept {
  state->refs.fetch_add(1, std::memory_order_relaxed);
}

namespace {

constexpr int kPausesForLock = 200;

// The claimed call, which fails: hands `error` over, and the op to the engine if its body has
// returned.
void FinishCall(AsyncState* state, std::exception_ptr error) noexcept {
  state->thrown = std::make_unique<engine::Thrown>(std::move(error));
  // acq_rel: releases `thrown`; acquires the body's effects
  if ((state->flags.fetch_or(AsyncState::kCalled, std::memory_order_acq_rel) &
       AsyncState::kBodyDone) != 0) {
    state->core->PublishCompletion(state);
  }
}

}  // namespace

void ReleaseAsync(AsyncState* state) noexcept {
  if (engine::InForkedChild()) return;
  std::uint32_t refs = state->refs.load(std::memory_order_acquire);
  while (refs > 2) {
    if (state->refs.compare_exchange_weak(refs, refs - 1, std::memory_order_acq_rel)) return;
  }
  // Unclaimed, the other reference is the engine's: this is the last handle, and no call can come
  // any more.
  if (refs == 2 && (state->flags.load(std::memory_order_acquire) & AsyncState::kClaimed) == 0) {
    state->flags.fetch_or(AsyncState::kClaimed, std::memory_order_relaxed);
    FinishCall(state, std::make_exception_ptr(OpError(fmt::format(
                          "op '{}': its completion was dropped without a call", state->op->name))));
  }
  if (refs > 1 && state->refs.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  state->~AsyncState();
  engine::FreeBlock(state, engine::BlockClassOf(sizeof(AsyncState)));
}

void CompleteAsync(AsyncState* state, std::exception_ptr error) noexcept {
  if (state == nullptr || engine::InForkedChild()) return;  // moved from
  // A success has nothing to write, so it is final with its claim.
  const std::uint32_t marks =
      error == nullptr ? AsyncState::kClaimed | AsyncState::kCalled : AsyncState::kClaimed;
  std::uint32_t flags = state->flags.load(std::memory_order_relaxed);
  do {
    if ((flags & AsyncState::kClaimed) != 0) {
      ReportLateCompletion(state->core_id, error);
      return;
    }
    // acq_rel: acquires the body's effects, releases what the caller did
  } while (!state->flags.compare_exchange_weak(flags, flags | marks, std::memory_order_acq_rel,
                                               std::memory_order_relaxed));
  if (error != nullptr) {
    FinishCall(state, std::move(error));
  } else if ((flags & AsyncState::kBodyDone) != 0) {
    state->core->PublishCompletion(state);
  }
}

// The order of the steps lets the usual case touch nothing of the engine's but two lines of the
// ring. Between the ticket and the slot the op cannot finish, so the engine is there; whoever
// lowers the mode looks at the tail after that, as for the inbox.
void EngineCore::PublishCompletion(AsyncState* async) noexcept {
  std::uint64_t ticket = 0;
  const bool in_ring =
      async->thrown == nullptr && !async->of_gpu && completions_.TryTakeTicket(&ticket);
  if (in_ring && IsLookedAfter()) {
    Op* const op = async->op;
    async->refs.fetch_sub(1, std::memory_order_acq_rel);  // the engine's; the caller has another
    completions_.Publish(ticket, op);
    return;
  }
  Ref();  // once the op is published, others may finish it, stop the engine and let it go
  if (in_ring) {
    Op* const op = async->op;
    async->refs.fetch_sub(1, std::memory_order_acq_rel);
    completions_.Publish(ticket, op);
  } else {
    AsyncState* latest = completed_.load(std::memory_order_relaxed);
    do {
      async->next_completed = latest;
      // seq_cst: released to TakeCompletionsLocked, and before the look at the mode
    } while (!completed_.compare_exchange_weak(latest, async, std::memory_order_seq_cst,
                                               std::memory_order_relaxed));
  }
  if (in_ring || !IsLookedAfter()) LookAfterCompleted();
  Unref();
}

// True: somebody takes what has a ticket of the ring, or is in the list, without being told.
bool EngineCore::IsLookedAfter() noexcept {
  if (tls_context.polling == this) return true;  // this thread, when it leaves the poller
  if (kind_ != Kind::kThreaded) return false;
  if (tls_context.batch != nullptr && tls_context.batch->Takes(this)) return true;
  return mode_.load(std::memory_order_seq_cst) == Mode::kAwake;  // see DESIGN
}

// Waking a worker costs more than the bookkeeping of an op does. Not a wait for the lock: the
// thread may have it, if the last handle of a completion went with something that is freed under
// it.
bool EngineCore::TookCompletions() noexcept {
  if (!lock_.try_lock_for(kPausesForLock)) return false;
  TakeCompletionsLocked();
  // Visible still: behind a slot that another thread has not yet written.
  const bool work =
      !ready_.empty() || tracker_.has_more_to_grant() || CompletionsAreVisibleLocked();
  lock_.unlock();
  return !work;
}

void EngineCore::LookAfterCompleted() noexcept {
  // A pusher often waits next, and runs its ops itself; whoever completes does not.
  const Mode mode = mode_.load(std::memory_order_seq_cst);
  if (kind_ == Kind::kThreaded && mode >= Mode::kNap && !TookCompletions()) WakeFromPublish(mode);
  if (kind_ == Kind::kThreaded) return;
  if (mode == Mode::kStopped) return EmptyInboxAfterStop();
  const engine::TrackerGuard guard(lock_);
  WakeWaitersLocked([](const Waiter&) { return true; });
}

// --- traces --------------------------------------------------------------------------------------

void TracePush(engine::TraceWriter& trace, Op* op) noexcept {
  trace.OnPush(op->ticket, static_cast<std::uint64_t>(SteadyNowNs()), op->name, op->device(),
               op->lane, op->priority, op->access_count, [op](std::size_t i) {
                 const engine::Access& access = op->access(static_cast<std::uint32_t>(i));
                 constexpr engine::TraceAccess kModes[] = {
                     engine::TraceAccess::kRead, engine::TraceAccess::kWrite,
                     engine::TraceAccess::kReadWrite, engine::TraceAccess::kReadWrite};
                 return engine::TraceWriter::TraceVar{access.var()->id,
                                                      kModes[static_cast<int>(access.mode())]};
               });
}

void EngineCore::StartTrace(const std::string& file) {
  engine::CheckNotForked("StartTrace");
  const MutexLock lock(trace_mutex_);
  if (tls_context.core != this) CheckOpen("StartTrace");
  if (engine::TraceWriter* running = trace_.load(std::memory_order_relaxed)) {
    throw InvalidState(
        fmt::format("StartTrace('{}'): a trace to '{}' is running", file, running->path()));
  }
  traces_.push_back(std::make_unique<engine::TraceWriter>(file, options_.trace_bytes_max));
  engine::TraceWriter* trace = traces_.back().get();
  {
    const engine::TrackerGuard guard(lock_);
    for (const VarState* var = vars_; var != nullptr; var = var->next) {
      if (var->name != nullptr) trace->OnVar(var->id, *var->name);
    }
    trace_.store(trace, std::memory_order_release);
  }
}

// The writer itself, without its file, stays until the engine goes: other threads may be in the
// midst of a record.
void EngineCore::StopTrace() {
  engine::CheckNotForked("StopTrace");
  const MutexLock lock(trace_mutex_);
  engine::TraceWriter* trace = trace_.exchange(nullptr, std::memory_order_acq_rel);
  if (trace == nullptr) return;
  device_recorder_.Stop(*trace);
  trace->Finish();
}

}  // namespace heddle::internal
