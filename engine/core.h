// EngineCore: one engine behind the public facade.
//
// DESIGN. A pushing thread writes an op block and one slot of the inbox, and touches no variable.
// All tracking (variables, ready queue, counts) is plain state under one lock, worked on by one
// executor at a time:
//
//     pushers -> inbox (ring, total order) -> tracker (dependency queues) -> ready queue ->
//     executors
//
// An executor is a worker, or a thread in a wait that helps. It holds the lock to finish the op
// that it ran and to pick the next one, and releases it to run the body: one short hold an op. It
// registers ops as late as it can: an op taken from the inbox when its predecessors have finished
// is ready at once and never enters a queue, which costs a fraction of blocking and granting it.
// While async ops are in flight it looks for ready ones behind those that wait for them, but no
// farther than completions leave it time for, see StreamLocked.
// Several executors share the work only where bodies are long enough to pay for it (see
// ParallelPaysLocked), so tiny ops stay on one core.
//
// An async op that is completed from outside comes back through a ring of its own, in which its
// executor finds the op's address: the completing thread touches nothing of the op but its
// AsyncState, and of the engine the ring and, if nobody is awake, what it takes to change that.
//
// Sleeping. mode_ says who looks at the inbox next, hence what a pusher must do:
//   kAwake    an executor will, within microseconds of its CPU's time: nothing.
//   kNap      the lookout thread will, within its nap of 50 us, or of up to 2 ms if that began
//             while somebody executed and no worker has worked since: nothing.
//   kAlone    nobody, until the body ends that the only executor runs while the lookout sleeps: the
//             first pusher requests a worker, or wakes the lookout if it is that body.
//   kDeep     nobody, or the lookout after a longer nap: the first pusher requests a worker.
//   kStopped  nobody ever again: the pusher empties the inbox itself.
// Whoever lowers the guard (an executor that leaves, the lookout that goes to sleep) stores the
// mode, then rechecks the tails of the inbox and of the completions; a pusher, or who completes,
// takes a ticket, then loads the mode. All four are seq_cst, so one of the two sees the other.
//
// The lookout (one thread an engine) naps while the engine is in use, so that pushers seldom wake
// anyone, lets a further worker in when a body turns out to be long, and runs the watchdog.
//
// Waking the lookout takes longer than most ops run, so the first op after a quiet time runs
// without it. Invariants, true whenever lock_ is free and such a body runs (alone_):
//   (A1) mode_ is kAlone, or somebody has found it so and has requested a worker or wakes the
//        lookout.
//   (A2) That worker, if it was turned away, and whoever has joined the executors, which may leave
//        again before the body ends, has woken the lookout.
//   (A3) So has an op that has become ready meanwhile.
//
// The engines `serial` and `seeded` use the same tracker and differ in who executes: see
// inline_engine.cc.
#pragma once

#include <heddle/engine.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/cpu_count.h"
#include "base/mutex.h"
#include "engine/async_state.h"
#include "engine/block_sections.h"
#include "engine/completion_ring.h"
#include "engine/failure.h"
#include "engine/gpu/device_recorder.h"
#include "engine/gpu/gpu_queues.h"
#include "engine/held_up.h"
#include "engine/inbox.h"
#include "engine/op.h"
#include "engine/ready_queue.h"
#include "engine/thread_context.h"
#include "engine/trace.h"
#include "engine/tracker.h"
#include "engine/tracker_lock.h"
#include "engine/wait_checks.h"
#include "engine/worker_host.h"

namespace heddle::internal {

// Off in one build only: the one that shows what the check costs.
#ifdef HEDDLE_NO_TRACING
inline constexpr bool kTracing = false;
#else
inline constexpr bool kTracing = true;
#endif

std::string VarName(const VarState& var);
AsyncState* NewAsyncState(EngineCore* core, Op* op);
void TracePush(engine::TraceWriter& trace, Op* op) noexcept;

class EngineCore {
 public:
  explicit EngineCore(EngineOptions options);
  static std::string TypeFromEnvironment();

  // The facade's calls; contracts in heddle/engine.h.
  Var NewVar(std::string_view name);
  NewOp BeginPush(const OpOptions& options, std::size_t body_bytes, BodyFunction function,
                  bool async, PushMode mode);
  std::uint64_t CommitPush(Op* op) noexcept;
  NewOp BeginGpuPush(const OpOptions& options, std::size_t body_bytes, BodyFunction function,
                     PushMode mode);
  std::uint64_t CommitGpuPush(Op* op) noexcept;
  void AwaitRoom(const OpOptions& options);
  void RunPending();
  void AbandonPush(Op* op) noexcept;
  void WaitForVar(const Var& var, std::optional<Deadline> deadline);
  void WaitForReadsAndWrites(const Var& var, std::optional<Deadline> deadline);
  void WaitForAll(std::optional<Deadline> deadline);
  void Stop(std::optional<Deadline> deadline, bool destroying = false);
  std::uint64_t version(const Var& var) const;
  std::optional<Failure> FailureOf(const Var& var);
  std::exception_ptr ErrorOf(const Var& var);
  // Of `op`, a GPU op whose body this thread runs; see fail_write.h.
  void FailWrite(Op* op, VarState* var, const std::exception_ptr& error);
  void KeepFailure(Op* op);  // of an op whose body this thread runs; see fail_write.h
  // See held_up.h.
  std::vector<std::uint64_t> HeldUpBy(std::span<const engine::OpVars> ops);
  void ClearError(const Var& var);
  bool AddPoller(WaitPoller& poller);
  void RemovePoller(WaitPoller& poller);
  void ParallelFor(std::int64_t count, std::int64_t grain,
                   const std::function<void(std::int64_t, std::int64_t)>& body);
  std::string DumpState();
  EngineStats stats();
  void StartTrace(const std::string& file);
  void StopTrace();
  const std::atomic<engine::TraceWriter*>& trace() const { return trace_; }
  const EngineOptions& options() const { return options_; }

  // Completions and handles.
  void PublishCompletion(AsyncState* async) noexcept;
  // Sees to it that what has been completed is finished soon.
  void LookAfterCompleted() noexcept;
  void DropVar(VarState* var) noexcept;
  void CountLateCompletion() noexcept;
  void Ref() noexcept { refs_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() noexcept;
  std::uint64_t id() const { return id_; }

 private:
  using Clock = Deadline::Clock;
  using FailureRecord = engine::FailureRecord;
  using Thrown = engine::Thrown;
  using When = engine::WorkerHost::When;
  enum class Kind { kThreaded, kSerial, kSeeded };
  static constexpr std::array<std::string_view, 3> kTypes = {"threaded", "serial", "seeded"};
  enum class Mode : int { kAwake, kNap, kAlone, kDeep, kStopped };
  enum class WaitKind { kVar, kAll, kRoom, kInline, kPoller };

  // What has become of a sleeping thread.
  enum class Signal : int {
    kNone,
    kLead,     // it is to run the poller
    kPolling,  // it is running the poller, which Interrupt() ends
    kWoken,    // it is to look at what it waits for
  };

  // A thread in a wait; lies on its stack, linked while it sleeps. Guarded by lock_ but for
  // `signal`: others change it under lock_ and `mutex`, its own thread to and from kPolling.
  struct Waiter {
    WaitKind kind;
    VarState* var = nullptr;   // kVar
    std::uint32_t target = 0;  // kVar: writes_finished to reach; kAll: the epoch to end
    const engine::WaitFence* fence = nullptr;  // kVar: to pass, in place of the target
    bool may_help = false;                     // kAll: would run ops if woken
    bool may_run = true;          // kVar, kAll: would run what holds it up, or blocks of it
    bool may_lead = false;        // may run the poller
    bool for_completion = false;  // what it waits for is, as far as it sees, an op in flight
    Waiter* previous = nullptr;
    Waiter* next = nullptr;
    std::atomic<Signal> signal{Signal::kNone};
    std::atomic<bool> spins{true};  // looks at `signal` now, or is about to
    Mutex mutex{};
    CondVar cond{};

    bool woken() const { return signal.load(std::memory_order_relaxed) == Signal::kWoken; }
  };

  // A ParallelFor in progress; lies on its caller's stack.
  struct Job {
    std::int64_t count;
    std::int64_t grain;
    engine::BlockSections blocks;
    const std::function<void(std::int64_t, std::int64_t)>* body;
    engine::ThreadContext context;  // of the caller: helpers run blocks as it would
    int priority;
    std::atomic<int> helpers{0};            // raised under lock_, while the job is listed
    std::atomic<std::int64_t> children{0};  // ops that helpers have pushed
    std::atomic<bool> failed{false};
    std::exception_ptr error{};  // of whoever set `failed`; read when helpers is 0
  };

  // One thread that runs ops. Lives on its stack, linked for DumpState. Guarded by lock_.
  struct Executor {
    Op* current = nullptr;  // whose body is running
    // Made ready by the op just finished; run next unless something is more urgent. Null whenever
    // the lock is free.
    Op* candidate = nullptr;
    bool keeps_candidate = false;
    bool is_pusher = false;  // runs the one op that it pushes, besides the workers
    // A worker takes short ops in bursts: what the inbox held when it last looked, then it looks
    // away, see LingerLocked.
    bool in_bursts = false;
    std::uint64_t burst_end = 0;
    int streak = 0;  // candidates run in a row
    // Of its searches of the inbox while async ops are in flight, see MayLookFarLocked.
    int vain_looks = 0;
    bool looks_far = false;
    std::uint64_t done_at_look = 0;
    std::int64_t hold_started_ns = 0;         // of the hold of the lock that is timed; 0: it is not
    std::int64_t timed_body_ns = 0;           // the body that ended then
    std::optional<std::uint32_t> last_epoch;  // runs nothing pushed later (WaitForAll)
    std::uint64_t ran = 0;
    engine::EnteredDevice gpu;
    Executor* previous = nullptr;
    Executor* next = nullptr;
  };

  // Lists an executor for its scope. Made and destroyed under lock_.
  class ExecutorLink {
   public:
    ExecutorLink(EngineCore& core, Executor& executor) NO_THREAD_SAFETY_ANALYSIS;
    ~ExecutorLink() NO_THREAD_SAFETY_ANALYSIS;
    ExecutorLink(const ExecutorLink&) = delete;
    ExecutorLink& operator=(const ExecutorLink&) = delete;

   private:
    EngineCore& core_;
    Executor& executor_;
  };

  // When a thread in a wait or a push calls the check of a WaitCheckScope next, however often it
  // sleeps and runs ops until then.
  struct CheckTimer {
    std::optional<Deadline> due = WaitChecks::Next();  // none: never
    int ops_to_look = 0;
  };

  class PollingScope;

  // The ready ops of one epoch, for the seeded engine.
  struct SeededEpoch {
    std::uint32_t epoch;
    std::vector<Op*> ops;
  };

  // What WaitForAll waits for. While `pending` is not 0 an op of the epoch may still push others
  // into it; once it is, `children` says how many of those still lie in the inbox.
  struct Epoch {
    std::int64_t pending = 0;   // registered, not finished
    std::int64_t children = 0;  // pushed by bodies that have returned, less those registered
    bool Ended() const { return pending == 0 && children == 0; }
  };

  struct Dequeued {
    bool any;
    Op* ready;  // an op that may run at once; null: a blocked one, or another kind of message
  };

  ~EngineCore();

  // core_lifecycle.cc
  static Kind ParseKind(const std::string& type);
  void StartThreads();
  void StopOnce(std::optional<Deadline> deadline);
  void EndStop(bool stopped) EXCLUDES(stop_mutex_);
  void LogUnseenLaterLocked() REQUIRES(lock_);
  void Enlist();
  void Delist() noexcept;
  bool IsLookedAfter() noexcept;
  bool TookDrop(std::uint64_t ticket) noexcept;
  // Finishes what has been completed, on this thread. False: a worker is wanted, for that or for
  // what has become ready.
  bool TookCompletions() noexcept;

  // core_push.cc
  void Validate(const OpOptions& options) const;
  bool LooksFull() const {
    return inbox_.LooseTail() - released_published_.load(std::memory_order_relaxed) >=
           static_cast<std::uint64_t>(options_.max_pending_ops);
  }
  NewOp EnterAndMake(const OpOptions& options, std::size_t body_bytes, BodyFunction function,
                     bool async, PushMode mode);
  bool EnterBound(const OpOptions& options, PushMode mode);
  bool HasRoomLocked(std::int64_t bytes) REQUIRES(lock_);
  bool AnyInFlightLocked() const REQUIRES(lock_) {
    return !in_flight_.empty() || !gpu_in_flight_.empty();
  }
  bool OnlyCompletionsHelpLocked() REQUIRES(lock_);
  NewOp NewOpBlock(const OpOptions& options, std::size_t body_bytes, BodyFunction function,
                   bool async);
  void LeaveBound(std::int64_t bytes) noexcept EXCLUDES(lock_);
  std::uint64_t PublishOp(Op* op, engine::MessageKind kind) noexcept;
  std::uint64_t EnterInbox(Op* op) noexcept;
  std::uint64_t CommitInline(Op* op) noexcept;
  bool RegisterThroughLocked(const Op* op, std::uint64_t ticket) REQUIRES(lock_);
  void AwaitSlot(std::uint64_t ticket) noexcept;
  void AfterPublish() noexcept {
    const Mode mode = mode_.load(std::memory_order_seq_cst);  // see DESIGN
    if (mode >= Mode::kAlone) WakeFromPublish(mode);
  }
  void WakeFromPublish(Mode mode) noexcept;
  void AwaitRoomLocked(const OpOptions& options) REQUIRES(lock_);

  // core_execute.cc
  void PrefetchAsyncLocked() REQUIRES(lock_);
  void CountRegisteredLocked(Op* op) REQUIRES(lock_) {
    if (!op->child) op->epoch = current_epoch_;
    Epoch& epoch = EpochLocked(op->epoch);
    ++epoch.pending;
    epoch.children -= op->child;
    ++pushed_;
  }
  Dequeued DequeueLocked() REQUIRES(lock_);
  void DrainLocked() REQUIRES(lock_);
  void DrainToTailLocked() REQUIRES(lock_);
  void PushReadyLocked(Op* op) REQUIRES(lock_);
  Op* PickLocked(Executor& executor) REQUIRES(lock_);
  Op* PickUntimedLocked(Executor& executor) REQUIRES(lock_);
  bool MayLookFarLocked(Executor& executor) REQUIRES(lock_);
  Op* StreamLocked(Executor& executor) REQUIRES(lock_);
  // Registered, and not all of their accesses granted; about. Where nothing is ready.
  std::int64_t BlockedLocked() const REQUIRES(lock_) {
    return static_cast<std::int64_t>(pushed_ - done_ - in_flight_.size() - gpu_in_flight_.size()) -
           (executing_ - helping_);
  }
  Op* PopReadyLocked(Executor& executor) REQUIRES(lock_);
  static bool IsLater(const Executor& executor, const Op* op);
  void DrainIfUrgentLocked() REQUIRES(lock_);
  // May an op of this priority run before all that lies in the inbox? From 0 on: urgent_ announces
  // whatever is above it there.
  bool ComesBeforeInboxLocked(int priority) const REQUIRES(lock_) {
    return priority >= 0 || inbox_.NothingComesBefore(priority, inbox_head_);
  }
  void ExecuteLocked(Executor& executor, Op* op) REQUIRES(lock_);
  void MeasureBodyLocked(std::int64_t sample_ns) REQUIRES(lock_);
  void MeasureHoldLocked(std::int64_t sample_ns, std::int64_t body_sample_ns) REQUIRES(lock_);
  static void EndAsyncBody(Op* op, bool skipped) noexcept;
  bool FinishAsyncLocked(Op* op, std::unique_ptr<Thrown>& thrown) REQUIRES(lock_);
  void TakeCompletionsLocked() REQUIRES(lock_);
  void TakeCompletedLocked(Op* op) REQUIRES(lock_);
  // By tail, not by slot, as WorkIsVisibleLocked.
  bool CompletionsAreVisibleLocked() const REQUIRES(lock_) {
    return completions_.tail() != completions_head_ ||
           completed_.load(std::memory_order_seq_cst) != nullptr;
  }
  void FinishInFlightLocked(Op* op) REQUIRES(lock_);
  void FinishLocked(Executor* executor, Op* op, FailureRecord* failure, bool skipped)
      REQUIRES(lock_);
  void FreeVarLocked(VarState* var) REQUIRES(lock_);
  const FailureRecord* FailureRecordOfLocked(const VarState* var) REQUIRES(lock_);
  FailureRecord* RecordFailureLocked(Op* op, const Thrown& thrown, const VarState* var = nullptr)
      REQUIRES(lock_);
  void LogLaterLocked(const FailureRecord* failure) REQUIRES(lock_);
  FailureRecord* TakeUnusedFailuresLocked() REQUIRES(lock_);
  void FreeUnusedFailures() EXCLUDES(lock_);
  static void FreeFailures(FailureRecord* latest) noexcept;
  void ReleaseFromBoundLocked(std::int64_t bytes) REQUIRES(lock_);
  void FinishFenceLocked(Op* op) REQUIRES(lock_);
  void RetireLocked(Op* op) REQUIRES(lock_);
  void WakeForWritesLocked(VarState* var) REQUIRES(lock_);
  void GrantMoreLocked() REQUIRES(lock_);
  Epoch& EpochLocked(std::uint32_t epoch) REQUIRES(lock_) {
    return epoch == current_epoch_ ? open_epoch_ : closed_epochs_[epoch - base_epoch_];
  }
  void AdvanceEpochsLocked() REQUIRES(lock_);

  // core_gpu.cc
  [[noreturn]] static void ThrowNotACpu(const OpOptions& options);
  void CheckGpu(const OpOptions& options) const;
  void LeaveGpuPush() noexcept;
  void RegisterGpuLocked(Op* op) REQUIRES(lock_);
  void PushReadyGpuLocked(Op* op) REQUIRES(lock_);
  void PushGrantedLocked(Op* op) REQUIRES(lock_) {
    op->on_gpu() ? PushReadyGpuLocked(op) : PushReadyLocked(op);
  }
  void ExecuteGpuLocked(Executor& executor, Op* op) REQUIRES(lock_);
  void FinishGpuLocked(Op* op) REQUIRES(lock_);
  // Before an executor that has issued a GPU op does anything else for the program.
  void LeaveGpuLocked(Executor& executor) REQUIRES(lock_) {
    if (executor.gpu.is) [[unlikely]]
      gpu_->Leave(&executor.gpu);
  }
  static void HoldLocked(engine::GpuQueue& queue, Op* op);
  void MayIssueLocked(engine::GpuQueue& queue, Op* op, bool is_aged) REQUIRES(lock_);
  Op* TakeHeldLocked(engine::GpuQueue& queue) REQUIRES(lock_);
  static bool IsHeld(Op* op);
  bool AsksGpuLocked(Op* op, std::optional<Deadline::Clock::time_point>* until) REQUIRES(lock_);

  // core_workers.cc
  bool RunWorker(engine::WorkerThread thread);
  bool WorkLocked(Executor& executor, engine::WorkerThread thread) REQUIRES(lock_);
  void NoteHelpLocked(std::uint64_t ran) REQUIRES(lock_);
  bool LingerLocked(Executor& executor, int* polls) REQUIRES(lock_);
  void CallIdlersLocked() REQUIRES(lock_) {
    if (idlers_ > 0)
      calls_.store(calls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  static void YieldCpu(std::int64_t* not_before_ns);
  void JoinExecutorsLocked() REQUIRES(lock_);
  bool LeaveExecutorsLocked(const Executor& executor) REQUIRES(lock_);
  void LowerModeLocked(bool after_work) REQUIRES(lock_);
  bool WorkIsVisibleLocked() REQUIRES(lock_);
  // Are `executors` faster than one? Bodies run side by side, holds of the lock do not: ops on many
  // variables hold it for as long as a short body takes, and longer beside others, since each
  // executor finds the variables on another core. Where they would mostly wait for the lock, fewer
  // are faster.
  bool ParallelPaysLocked(int executors) const REQUIRES(lock_) {
    const std::int64_t least_ns = in_flight_.empty() ? kParallelBodyNs : kParallelPastAsyncNs;
    return body_ns_ > least_ns && hold_ns_ * executors * 4 < (body_ns_ + hold_ns_) * 3 &&
           !AloneIsFasterLocked();
  }
  // Of short ops: bodies, too, take longer where each finds what it works on in another core's
  // cache. So several executors have to be faster as measured.
  bool AloneIsFasterLocked() const REQUIRES(lock_) {
    return body_ns_ < kShortBodyNs && solo_ns_ != 0 && solo_ns_ < kShortSoloNs &&
           shared_ns_ * 5 > solo_ns_ * 4;
  }
  // Whether a thread that enters WaitForAll runs such ops in the workers' place: it has just pushed
  // them, has a CPU, and would only be woken late. The tiniest ops are left to whoever is at them.
  bool WaitTakesOverLocked() const REQUIRES(lock_) {
    return waits_joined_ == 0 && in_flight_.empty() && body_ns_ > kParallelBodyNs &&
           AloneIsFasterLocked();
  }
  // May a further body run? num_workers bounds them, those started inline aside.
  bool HasPlaceLocked() const REQUIRES(lock_) {
    return executing_ - pushers_executing_ < options_.num_workers;
  }
  std::uint64_t LookAtTailLocked() REQUIRES(lock_) { return seen_tail_ = inbox_.LooseTail(); }
  bool NeedsHelpLocked() REQUIRES(lock_);
  bool ReserveWorker() noexcept;
  void EnsureWorkerLocked() REQUIRES(lock_);
  bool LowerGuardLocked(bool* request_worker) REQUIRES(lock_);
  bool FindsWorkLocked(std::uint32_t epoch) const REQUIRES(lock_);
  bool GoAloneLocked(const Executor& executor) REQUIRES(lock_);
  bool GoesFirstLocked(const Job& job) REQUIRES(lock_);
  Job* JoinableJobLocked() REQUIRES(lock_);
  static bool HoldsUp(const Op* op, const Waiter& waiter);
  std::int64_t CallWaitsLocked(const Op* op, std::int64_t most, bool spinning) REQUIRES(lock_);
  void HelpLocked(Job& job, std::optional<Deadline> until = std::nullopt) REQUIRES(lock_);
  static void RunBlocks(Job& job, std::optional<Deadline> until = std::nullopt) noexcept;
  void Lookout();
  bool LookOutLocked(std::int64_t now_ns, std::int64_t* quiet_since_ns, bool* request_worker)
      REQUIRES(lock_);
  std::string WatchdogLocked(std::int64_t now_ns) REQUIRES(lock_);
  void SightTail(std::int64_t now_ns);
  void WakeLookout() noexcept EXCLUDES(lookout_mutex_);
  void HurryLookout() noexcept EXCLUDES(lookout_mutex_);
  void RaiseModeLocked() REQUIRES(lock_);

  // inline_engine.cc
  bool AcquireInlineLocked(std::optional<Deadline> deadline, bool* late, CheckTimer* timer)
      REQUIRES(lock_);
  bool AcquireForPushLocked(CheckTimer* timer) REQUIRES(lock_);
  void ReleaseInlineLocked() REQUIRES(lock_);
  bool InlineWorkLocked() REQUIRES(lock_);
  bool AwaitPublishedLocked() REQUIRES(lock_);
  void RunReadyInlineLocked(Executor& executor, const std::function<bool()>& done) REQUIRES(lock_);
  bool TakeTurnLocked(Executor& executor, CheckTimer* timer, const std::function<bool()>& done,
                      std::exception_ptr* error) REQUIRES(lock_);
  bool RanForPushLocked(Executor& executor, CheckTimer* timer) REQUIRES(lock_);
  std::vector<Op*>& SeededReadyLocked(std::uint32_t epoch) REQUIRES(lock_);
  Op* PickSeededLocked(Executor& executor) REQUIRES(lock_);
  std::uint64_t CommitWithoutWorkers(Op* op, engine::MessageKind kind) noexcept;
  std::uint64_t CommitSerial(Op* op, engine::MessageKind kind) noexcept;
  void WakeForPushLocked() REQUIRES(lock_);
  void EmptyInboxAfterStop() noexcept;
  void RunLateLocked() REQUIRES(lock_);
  void RunLateAfterBody(EngineCore& stopped);

  // core_wait.cc
  static bool HasPassed(const std::optional<Deadline>& deadline) {
    return deadline && Clock::now() >= deadline->time();
  }
  void CheckNotInOp(const char* wait, const VarState* var) const;
  void CheckOwn(const VarState* var, const char* call) const;
  void CheckOpen(const char* call) const;
  bool SleepLocked(Waiter& waiter, std::optional<Deadline> deadline, CheckTimer* timer)
      REQUIRES(lock_);
  static void SpinForSignal(Waiter& waiter);
  static void AwaitSignal(Waiter& waiter, std::optional<Deadline> deadline);
  void WakeLocked(Waiter& waiter, Signal signal = Signal::kWoken) REQUIRES(lock_);
  template <class Matches>
  void WakeWaitersLocked(Matches&& matches) REQUIRES(lock_) {
    for (Waiter* waiter = waiters_; waiter != nullptr; waiter = waiter->next) {
      if (matches(*waiter)) WakeLocked(*waiter);
    }
  }
  void WaitForWrites(VarState* var, std::optional<Deadline> deadline, engine::TraceWait kind);
  Op* DrainButLastLocked() REQUIRES(lock_);
  bool CheckIsDueLocked(CheckTimer* timer) const REQUIRES(lock_);
  std::exception_ptr CallCheckLocked(Executor& executor, CheckTimer* timer) REQUIRES(lock_);
  std::exception_ptr CallCheckLocked(CheckTimer* timer) REQUIRES(lock_);
  void WaitForVarLocked(VarState* var, std::optional<Deadline> deadline,
                        engine::WaitFence* fence = nullptr) REQUIRES(lock_);
  void WaitForReadsLocked(VarState* var, std::optional<Deadline> deadline) REQUIRES(lock_);
  void WithdrawLocked(engine::WaitFence& fence) REQUIRES(lock_);
  [[noreturn]] void ThrowLateLocked(VarState* var) REQUIRES(lock_);
  static Op* HolderOf(VarState* var);
  template <class Needs>
  bool HelpedLocked(Executor& executor, CheckTimer* timer, Needs&& needs) REQUIRES(lock_);
  std::uint32_t CloseEpochLocked() REQUIRES(lock_);
  bool EpochEndedLocked(std::uint32_t epoch) const REQUIRES(lock_) {
    return static_cast<std::int32_t>(base_epoch_ - epoch) > 0;
  }
  bool WaitForEpochLocked(std::uint32_t epoch, std::optional<Deadline> deadline) REQUIRES(lock_);
  std::string WhatBlocksLocked(VarState* var) REQUIRES(lock_);
  std::string WhatRunsLocked() REQUIRES(lock_);
  std::string WhatIsPendingLocked() REQUIRES(lock_);

  // core_poll.cc
  bool LeaderIsWantedLocked() const REQUIRES(lock_) {
    return poller_ != nullptr && leader_ == nullptr && !in_flight_.empty();
  }
  void AppointLeaderLocked() REQUIRES(lock_);
  template <class Call>
  bool CallPollerLocked(const Waiter& self, Call&& call) REQUIRES(lock_);
  bool AnnounceWaitLocked(const Waiter& waiter) REQUIRES(lock_);
  void LeadLocked(Waiter& waiter, std::optional<Deadline> deadline) REQUIRES(lock_);
  static void PollOnce(WaitPoller& poller, Waiter& waiter, Clock::time_point until);

  void TraceWaitFor(engine::TraceWait kind, std::uint64_t var_id, std::int64_t started_ns);

  // core_dump.cc
  template <class Visit, class VisitReady>
  void ForEachGrantedLocked(Visit&& visit, VisitReady&& visit_ready) REQUIRES(lock_);
  template <class Visit>
  void ForEachOpLocked(Visit&& visit) REQUIRES(lock_);
  Op* AnyReaderLocked(VarState* var) REQUIRES(lock_);
  std::string DescribeLocked(Op* op) REQUIRES(lock_);
  std::string BlockersLocked(Op* op) REQUIRES(lock_);
  Op* OldestPendingLocked() REQUIRES(lock_);
  std::string ChainLocked(Op* op, std::int64_t now_ns = 0) REQUIRES(lock_);
  Op* OldestBlockedLocked() REQUIRES(lock_);
  std::string AgeOf(const Op* op, std::int64_t now_ns) const;

  // Bodies shorter than this are cheaper on one core than shared between two.
  static constexpr std::int64_t kParallelBodyNs = 150;
  // The same while async ops are in flight. Their bodies look long, since they write lines that
  // another core has just read; and completions make few ops ready at a time. With the bound above
  // helpers came and went for nothing, at twice to four times the cost of an op.
  static constexpr std::int64_t kParallelPastAsyncNs = 500;
  // Longer ops gain from other cores whatever they find there: the body as the average of however
  // many executors, and with the hold that follows, of one alone.
  static constexpr std::int64_t kShortBodyNs = 2'000;
  static constexpr std::int64_t kShortSoloNs = 500;
  // About what reading the clock adds to a measured hold.
  static constexpr std::int64_t kClockNs = 20;
  // Work worth a wake-up.
  static constexpr std::int64_t kWorthHelpNs = 30'000;
  // During longer bodies pushers may not count on this executor to look at the inbox.
  static constexpr std::int64_t kLongBodyNs = 20'000;

  // How long an executor without work stays before it leaves, in looks of about a microsecond.
  static constexpr int kLingerPolls = 100;

  const std::uint64_t id_;
  EngineOptions options_;
  const Kind kind_;
  const int cpus_ = kind_ == Kind::kThreaded ? AvailableCpus() : 1;  // of this process

  // Read by every push, written rarely.
  alignas(engine::kNoSharing) std::atomic<Mode> mode_;
  std::atomic<bool> closed_{false};
  std::atomic<engine::TraceWriter*> trace_{nullptr};

  engine::Inbox inbox_;
  // Async ops called from outside after their bodies had returned. Apart from the inbox: what a
  // completion makes ready must not wait behind all that has been pushed meanwhile.
  engine::CompletionRing completions_;
  // The same, latest first: ops that failed, of GPUs, and what the ring has no room for.
  alignas(engine::kNoSharing) std::atomic<AsyncState*> completed_{nullptr};
  // The facade's, one a variable, one a thread that publishes a completion: beside what that writes
  // anyway, and apart from what every op reads.
  std::atomic<int> refs_{1};

  // How many messages of the inbox no longer count against the bound, a little late; exact under
  // lock_.
  alignas(engine::kNoSharing) std::atomic<std::uint64_t> released_published_{0};
  std::atomic<std::int64_t> pending_bytes_{0};
  std::atomic<bool> urgent_{false};  // an op above priority 0 may lie in the inbox
  // Calls executors that look away back: something became ready, or what they wait for has ended. A
  // count, so that none of several misses a call when another one looks away.
  std::atomic<std::uint32_t> calls_{0};
  std::atomic<int> workers_{0};          // requested or running
  std::atomic<bool> any_failed_{false};  // some op has failed, ever
  std::atomic<std::uint64_t> late_completions_{0};
  std::atomic<std::uint64_t> next_var_id_{1};

  alignas(engine::kNoSharing) mutable engine::TrackerLock lock_;
  // On the lock's own line, what changes with every op: executors that alternate fetch it once.
  int executing_ GUARDED_BY(lock_) = 0;                   // bodies running now, and helping_
  std::uint64_t inbox_head_ GUARDED_BY(lock_) = 0;        // the next ticket to take from the inbox
  std::uint64_t completions_head_ GUARDED_BY(lock_) = 0;  // the same of completions_
  std::uint64_t released_ GUARDED_BY(lock_) = 0;
  std::uint64_t pushed_ GUARDED_BY(lock_) = 0;  // ops taken from the inbox
  std::uint64_t done_ GUARDED_BY(lock_) = 0;
  Epoch open_epoch_ GUARDED_BY(lock_);                // current_epoch_, see there
  std::uint64_t executor_ran_ GUARDED_BY(lock_) = 0;  // ops run by workers and WaitForAll
  int until_sample_ GUARDED_BY(lock_) = 0;            // ops until one is timed
  int executors_ GUARDED_BY(lock_) = 0;     // threads that will look at the inbox before they leave
  int waits_joined_ GUARDED_BY(lock_) = 0;  // of executors_: threads in WaitForAll
  std::int64_t body_ns_ GUARDED_BY(lock_) = 1'000'000;  // moving average; long until measured
  // Of lock_, from the end of a body to the next one, when there were several executors last.
  std::int64_t hold_ns_ GUARDED_BY(lock_) = 0;
  // Of a body with the hold that follows, while one executor was at work, and while several were,
  // divided by their number; 0: not measured.
  std::int64_t solo_ns_ GUARDED_BY(lock_) = 0;
  std::int64_t shared_ns_ GUARDED_BY(lock_) = 0;
  int idlers_ GUARDED_BY(lock_) = 0;  // executors that look away
  bool body_measured_ GUARDED_BY(lock_) = false;
  bool admit_ GUARDED_BY(lock_) =
      false;  // the lookout wants a further worker in, whatever the average
  bool alone_ GUARDED_BY(lock_) = false;  // see DESIGN
  // The lookout is in a nap that pushers may not rely on, since somebody executed when it began.
  bool lookout_watches_ GUARDED_BY(lock_) = false;
  int helping_ GUARDED_BY(lock_) = 0;  // threads that help with a ParallelFor
  int help_skips_ GUARDED_BY(lock_) = 0;
  int help_backoff_ GUARDED_BY(lock_) = 0;
  int pushers_executing_ GUARDED_BY(lock_) = 0;  // of executing_: bodies started inline
  engine::Tracker tracker_ GUARDED_BY(lock_);
  engine::ReadyQueue ready_ GUARDED_BY(lock_);
  std::uint64_t failed_ GUARDED_BY(lock_) = 0;
  std::uint64_t unwatched_ GUARDED_BY(lock_) = 0;  // pushes that left nothing to look out for
  std::int64_t no_yield_until_ns_ GUARDED_BY(lock_) = 0;  // see YieldCpu
  Waiter* waiters_ GUARDED_BY(lock_) = nullptr;           // latest first
  int room_waiters_ GUARDED_BY(lock_) = 0;
  // See NeedsHelpLocked: pushes by bodies that have returned, those by others at its last look, ops
  // since that has changed, and short ops until the next look.
  std::uint64_t pushed_by_bodies_ GUARDED_BY(lock_) = 0;
  std::uint64_t pushed_at_look_ GUARDED_BY(lock_) = 0;
  int calm_ops_ GUARDED_BY(lock_) = 0;
  int until_tail_look_ GUARDED_BY(lock_) = 0;
  std::uint64_t seen_tail_ GUARDED_BY(lock_) = 0;  // of the inbox, when an executor looked last
  int guests_ GUARDED_BY(lock_) = 0;               // of executors_: workers on threads of others

  WaitPoller* poller_ GUARDED_BY(lock_) = nullptr;  // see core_poll.cc
  Waiter* leader_ GUARDED_BY(lock_) = nullptr;      // runs the poller, or has been told to
  int poller_users_ GUARDED_BY(lock_) = 0;          // threads that may be calling a poller
  Executor* executor_list_ GUARDED_BY(lock_) = nullptr;
  std::vector<Job*> jobs_ GUARDED_BY(lock_);
  std::vector<Op*> in_flight_ GUARDED_BY(lock_);      // async, body returned, not completed
  bool late_in_flight_ GUARDED_BY(lock_) = false;     // since Stop: holds a reference
  std::vector<Op*> gpu_in_flight_ GUARDED_BY(lock_);  // the same of GPUs: their events come anyway
  int gpu_askers_ GUARDED_BY(lock_) = 0;              // threads in AsksGpuLocked, without the lock
  VarState* vars_ GUARDED_BY(lock_) = nullptr;
  // The records by their exceptions' addresses; of two that have one exception, the later.
  std::unordered_map<const void*, FailureRecord*> failures_ GUARDED_BY(lock_);
  engine::Unreported unreported_ GUARDED_BY(lock_);

  // Epochs: what WaitForAll waits for. An op belongs to the epoch that is open when it is
  // registered, or to that of the op that pushed it. WaitForAll closes the epoch at the inbox'
  // tail.
  std::vector<std::uint64_t> boundaries_
      GUARDED_BY(lock_);                                // tickets at which the next epochs begin
  std::vector<Epoch> closed_epochs_ GUARDED_BY(lock_);  // base_epoch_ and later
  std::uint32_t base_epoch_ GUARDED_BY(lock_) = 0;
  std::uint32_t current_epoch_ GUARDED_BY(lock_) = 0;
  std::uint64_t last_boundary_ GUARDED_BY(lock_) = 0;

  // serial and seeded
  bool inline_busy_ GUARDED_BY(lock_) = false;  // some thread is running ops
  std::mt19937_64 random_ GUARDED_BY(lock_);
  std::vector<SeededEpoch> seeded_ready_ GUARDED_BY(lock_);  // few: the epochs with ready ops
  std::size_t seeded_count_ GUARDED_BY(lock_) = 0;           // ops in them
  std::vector<Op*> seeded_completions_ GUARDED_BY(lock_);

  const std::unique_ptr<engine::GpuQueues> gpu_;
  // GPU ops on their way into the inbox: nobody could issue them once the streams are gone.
  std::atomic<int> gpu_pushers_{0};
  // Stop has seen all ops done. Those that still run were pushed too late: what they leave in
  // flight keeps the core, and they push none for GPUs, whose streams go. Set under lock_, while no
  // body runs.
  std::atomic<bool> drained_{false};

  Mutex lookout_mutex_;
  CondVar lookout_wake_;
  bool lookout_signal_ GUARDED_BY(lookout_mutex_) = false;
  bool lookout_stop_ GUARDED_BY(lookout_mutex_) = false;
  std::atomic<bool> lookout_deep_{false};
  // The lookout thread's own memory of its last look.
  std::uint64_t last_tail_ = 0;
  std::uint64_t last_head_ = 0;
  std::uint64_t last_ran_ = 0;
  struct Sighting {
    std::int64_t time_ns;
    std::uint64_t tail;  // ops with smaller tickets had been pushed by then
  };
  std::vector<Sighting> sightings_;  // rising; thinned when it grows long
  bool progress_idle_ = true;        // nothing was pending
  std::uint64_t progress_done_ = 0;  // done_ when it last changed, and when that was
  std::int64_t progress_ns_ = 0;

  Mutex stop_mutex_;
  bool stopping_ GUARDED_BY(stop_mutex_) = false;  // a thread is in StopOnce
  bool stopped_ GUARDED_BY(stop_mutex_) = false;
  CondVar stop_ended_;
  Mutex trace_mutex_;
  std::vector<std::unique_ptr<engine::TraceWriter>> traces_ GUARDED_BY(trace_mutex_);
  engine::DeviceRecorder device_recorder_;  // what it records goes to the writers above
  std::unique_ptr<engine::WorkerHost> host_;
  std::thread lookout_;
};

}  // namespace heddle::internal
