// Decides when ops may run: the queues of all variables of one engine.
//
// Plain state, plain loads and stores: whoever holds the engine's lock works on it. Ops are
// registered in the order of their tickets, which makes that order the single order of all pushes:
// an op joins all its variables at once, so no two ops can wait for each other, whatever the order
// of their lists.
//
// A fence takes its place among the accesses of its variable as a write does, but has nothing to
// run: it passes, under the lock, as soon as all before it have finished, and holds nothing then.
// on_fence(op) gets each that clears errors, once it has; that of a wait lies on its thread's
// stack. on_write(var) tells of both.
//
// The invariants (V1) to (V3) of VarState hold after each method.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/op.h"

namespace heddle::engine {

class Tracker {
 public:
  // Enters `op` into the queues of its variables. True: it may run now. False: a later Finish or
  // GrantMore hands it to `on_ready`.
  [[nodiscard]] bool Register(Op* op) {
    const std::uint32_t count = op->access_count;
    std::uint32_t blocked = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (!Append(op, i)) ++blocked;
    }
    op->blocked = static_cast<std::uint16_t>(blocked);
    return blocked == 0;
  }

  // Register for a fence. True: it has passed, and on_fence is not told.
  bool RegisterFence(Op* op) {
    Access& access = op->access(0);
    VarState* var = access.var();
    (op->clears_error() ? var->writes_registered : var->wait_fences) += 1;
    if (var->writer == nullptr && var->readers == 0 && !var->head) {
      Pass(op);
      return true;
    }
    if (var->head && !op->clears_error()) WaitFence::Before(op) = var->tail;
    op->blocked = 1;
    Enqueue(op, 0);
    return false;
  }

  // Why `op`, all of whose accesses are granted, must not run; null: it may.
  FailureRecord* PoisonOf(Op* op) const {
    if (poisoned_vars_ == 0 || op->run_when_poisoned) return nullptr;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      const Access& access = op->access(i);
      const VarState* const var = access.var();
      if (var->failure == nullptr) continue;
      if (NeedsValue(access) || (Overwrites(access) && var->keeps_failure)) return var->failure;
    }
    return nullptr;
  }

  // Register for an op of a GPU.
  template <class OnReady>
  [[nodiscard]] bool RegisterGpu(Op* op, OnReady&& on_ready) {
    const std::uint32_t count = op->access_count;
    op->blocked = static_cast<std::uint16_t>(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      if (Append(op, i)) --op->blocked;
    }
    const bool ready = op->blocked == 0;
    for (std::uint32_t i = 0; i < count && !ready; ++i) {
      if (!op->access(i).granted()) GrantEarly(op->access(i).var(), on_ready);
    }
    return ready;
  }

  // PoisonOf for a GPU op that is about to be issued: as if all issued before it had finished.
  FailureRecord* PoisonAtIssue(Op* op) const {
    if ((poisoned_vars_ == 0 && frontiers_ == 0) || op->run_when_poisoned) return nullptr;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      const Access& access = op->access(i);
      if (!NeedsValue(access) && !(Overwrites(access) && KeepsFailureAtIssue(access.var())))
        continue;
      if (FailureRecord* poison = FailureAtIssue(access.var())) return poison;
    }
    return nullptr;
  }
  // Of a GPU op that is about to be issued and runs when poisoned: what poisons its inputs now its
  // body can see, and answer for.
  void NotePoison(Op* op) {
    if (!op->run_when_poisoned || (poisoned_vars_ == 0 && frontiers_ == 0)) return;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      Access& access = op->access(i);
      if (!NeedsValue(access)) continue;
      FailureRecord* const poison = FailureAtIssue(access.var());
      if (poison == nullptr) continue;
      access.set_poison_known();
      Keep(&known_poison_, op, access, poison);
    }
  }
  // What a GPU op that has been issued fails by, whatever became of it: an input of it has failed
  // since, or by something else than its body could see. Null: none has.
  FailureRecord* PoisonSinceIssue(Op* op) const {
    if (poisoned_vars_ == 0) return nullptr;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      const Access& access = op->access(i);
      FailureRecord* const poison = access.var()->failure;
      if (!NeedsValue(access) || poison == nullptr) continue;
      if (access.poison_known() && Find(known_poison_, op, access) == poison) continue;
      return poison;
    }
    return nullptr;
  }
  // What poisons `var` once all ops that are issued have finished, as far as is known.
  static FailureRecord* FailureAtIssue(const VarState* var) {
    const GpuVar* gpu = var->gpu.get();
    return gpu != nullptr && gpu->issued_writes > 0 ? gpu->frontier : var->failure;
  }

  static bool KeepsFailureAtIssue(const VarState* var) {
    const GpuVar* gpu = var->gpu.get();
    return gpu != nullptr && gpu->issued_writes > 0 ? gpu->frontier_keeps : var->keeps_failure;
  }

  // Adds what `op`, about to be issued on `queue`, has to wait for on the device.
  static void CollectMarks(Op* op, const GpuQueue* queue, std::vector<GpuMark>* marks);

  // The op that an access by a GPU op would wait for, were it registered now; see held_up.h.
  static std::uint64_t HeldUpBy(const VarState* var, bool write);

  // `op` has been issued, and ends at `mark`; `failure` says why its launch failed, null if it did
  // not, and `skipped` that it did not run, since it was poisoned. on_ready(op) gets each GPU op
  // that may be issued now.
  template <class OnReady>
  void Issued(Op* op, const GpuMark& mark, FailureRecord* failure, bool skipped,
              OnReady&& on_ready) {
    op->issued = true;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      const Access& access = op->access(i);
      MarkIssued(access, mark, FailureFor(op, access, failure), skipped, op->keeps_failure());
    }
    for (std::uint32_t i = 0; i < op->access_count; ++i) GrantEarly(op->access(i).var(), on_ready);
  }

  // Finish for an issued GPU op.
  template <class OnReady, class OnWrite, class OnFence, class OnIdle>
  void FinishGpu(Op* op, FailureRecord* failure, bool skipped, OnReady&& on_ready,
                 OnWrite&& on_write, OnFence&& on_fence, OnIdle&& on_idle) {
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      const Access& access = op->access(i);
      VarState* var = access.var();
      if (access.mode() == AccessMode::kRead) {
        DCHECK(var->readers > 0);
        --var->readers;
        if (var->reader_hint == op) var->reader_hint = nullptr;
      } else {
        if (var->writer == op) {
          var->writer = nullptr;
        } else {
          --var->gpu->stacked;  // a later GPU op writes it too
        }
        ++var->writes_finished;
        // release; pairs with the acquire in Engine::version
        var->version.store(var->version.load(std::memory_order_relaxed) + 1,
                           std::memory_order_release);
        FailureRecord* const own = FailureFor(op, access, failure);
        if (own != nullptr || var->failure != nullptr) {
          SetWritten(var, own, skipped, op->keeps_failure());
        }
      }
      UnmarkIssued(access);
      if (var->writer == nullptr && var->head && !var->granting) {
        Grant(var, on_ready, on_write, on_fence);
      }
      if (access.is_write() && var->waiters > 0) on_write(var);
      if (var->dropped && var->Idle()) on_idle(var);
    }
    if (!own_failures_.empty() || !known_poison_.empty()) [[unlikely]]
      DropKept(op);
  }
  // Of a GPU op whose body runs: `failure` will poison one variable that it writes. Once for each.
  void FailAlone(const Op* op, Access& access, FailureRecord* failure);

  // Leaves the queues. What it wrote becomes poisoned by `failure`, or cured if that is null. If it
  // was `skipped`, it did not run since it was poisoned, and leaves a failure that is kept as it
  // is: that of another input, which nobody keeps, must not take its place. on_ready(op) gets each
  // op that may run now, on_write(var) each variable with waiters that had a write finished,
  // on_idle(var) each dropped variable whose last access this was.
  template <class OnReady, class OnWrite, class OnFence, class OnIdle>
  void Finish(Op* op, FailureRecord* failure, bool skipped, OnReady&& on_ready, OnWrite&& on_write,
              OnFence&& on_fence, OnIdle&& on_idle) {
    const std::uint32_t count = op->access_count;
    for (std::uint32_t i = 0; i < count; ++i) {
      Access& access = op->access(i);
      VarState* var = access.var();
      if (access.mode() == AccessMode::kRead) {
        DCHECK(var->readers > 0 && var->writer == nullptr);  // V1
        --var->readers;
        if (var->reader_hint == op) var->reader_hint = nullptr;
        if (var->readers == 0) {
          if (var->head && !var->granting) Grant(var, on_ready, on_write, on_fence);
        } else if (var->gpu_holds) [[unlikely]] {
          GrantEarly(var, on_ready);
        }
      } else {
        DCHECK(var->writer == op && var->readers == 0);  // V1
        var->writer = nullptr;
        ++var->writes_finished;
        // release; pairs with the acquire in Engine::version
        var->version.store(var->version.load(std::memory_order_relaxed) + 1,
                           std::memory_order_release);
        if (failure != nullptr || var->failure != nullptr) {
          SetWritten(var, failure, skipped, op->keeps_failure());
        }
        if (var->head && !var->granting) Grant(var, on_ready, on_write, on_fence);
        if (var->waiters > 0) on_write(var);
      }
      if (var->dropped && var->Idle()) on_idle(var);
    }
  }

  // The fence of a wait, registered, that waits no longer: it leaves the queue, unless it has
  // passed. Takes the same time however long the queue is: who polls does it often.
  template <class OnReady, class OnWrite, class OnFence>
  void Withdraw(WaitFence& wait, OnReady&& on_ready, OnWrite&& on_write, OnFence&& on_fence) {
    if (wait.passed()) return;
    const Access& fence = wait.op()->access(0);
    VarState* var = fence.var();
    AccessRef before;
    if (var->head.op() != wait.op()) before = WaitFence::Before(wait.op());
    Access* const previous = before ? &before.op()->access(before.index()) : nullptr;
    DCHECK(previous == nullptr || previous->next.op() == wait.op());
    (previous != nullptr ? previous->next : var->head) = fence.next;
    --var->wait_fences;
    if (!fence.next) {
      var->tail = before;
    } else {
      Op* const next = fence.next.op();
      Access& behind = next->access(fence.next.index());
      if (behind.mode() == AccessMode::kFence) {
        if (!next->clears_error()) WaitFence::Before(next) = before;
      } else if (!behind.is_write()) {
        behind.set_follows_write(previous != nullptr && previous->is_write());
      }
    }
    if (var->granting) return;
    if (var->writer == nullptr) Grant(var, on_ready, on_write, on_fence);
    GrantEarly(var, on_ready);
  }

  // True: a run of waiting reads or fences was too long for one hold of the lock; call GrantMore.
  bool has_more_to_grant() const { return !granting_.empty(); }
  template <class OnReady, class OnWrite, class OnFence, class OnIdle>
  void GrantMore(OnReady&& on_ready, OnWrite&& on_write, OnFence&& on_fence, OnIdle&& on_idle) {
    VarState* var = granting_.back();
    granting_.pop_back();
    var->granting = false;
    // A writer: a withdrawal has emptied the queue, and the next access was granted at once.
    if (var->writer == nullptr) Grant(var, on_ready, on_write, on_fence);
    if (var->dropped && var->Idle()) on_idle(var);
  }

  // `keeps`: of an op that has called KeepFailure. What only passes a failure on leaves that as it
  // is.
  void SetFailure(VarState* var, FailureRecord* failure, bool keeps = false) {
    var->keeps_failure =
        failure != nullptr && (keeps || (failure == var->failure && var->keeps_failure));
    if (failure != nullptr) ++failure->refs;
    if (var->failure != nullptr) Unref(var->failure);
    poisoned_vars_ += (failure != nullptr) - (var->failure != nullptr);
    var->failure = failure;
  }

  void Unref(FailureRecord* failure) {
    if (--failure->refs == 0) Discard(failure);
  }
  // Nobody refers to `failure`.
  void Discard(FailureRecord* failure) { failure->next = std::exchange(unused_, failure); }
  // Those that nobody refers to any more, the latest first; null: there are none. To be freed
  // without the lock.
  [[nodiscard]] FailureRecord* TakeUnused() { return std::exchange(unused_, nullptr); }

 private:
  // A writer with 100 000 readers behind it would hold the lock for milliseconds.
  static constexpr int kGrantsAtOnce = 256;

  static bool NeedsValue(const Access& access) {
    return access.mode() == AccessMode::kRead || access.mode() == AccessMode::kReadWrite;
  }
  static bool Overwrites(const Access& access) { return access.mode() == AccessMode::kWrite; }

  // By an op: see Finish and SetFailure.
  void SetWritten(VarState* var, FailureRecord* failure, bool skipped, bool keeps) {
    if (!skipped || !var->keeps_failure) SetFailure(var, failure, keeps);
  }

  // How many that were granted access to `var` have not been issued? Ops of CPUs never are.
  static std::int64_t UnissuedHolders(const VarState* var) {
    const GpuVar* const gpu = var->gpu.get();
    const std::int64_t holders = std::int64_t{var->readers} + (var->writer != nullptr ? 1 : 0) +
                                 (gpu != nullptr ? gpu->stacked : 0);
    return holders - (gpu != nullptr ? gpu->issued : 0);
  }

  static bool ReadersAreIssued(const VarState* var) {
    return UnissuedHolders(var) == (var->writer != nullptr && !var->writer->issued ? 1 : 0);
  }

  // True: granted at once.
  static bool Append(Op* op, std::uint32_t index) {
    Access& access = op->access(index);
    VarState* var = access.var();
    if (access.is_write()) {
      ++var->writes_registered;
      if (var->writer == nullptr && var->readers == 0 && !var->head) {
        var->writer = op;
        access.set_granted();
        return true;
      }
    } else if (var->writer == nullptr && !var->head) {
      ++var->readers;
      var->reader_hint = op;
      access.set_granted();
      return true;
    }
    Enqueue(op, index);
    return false;
  }

  static void Enqueue(Op* op, std::uint32_t index) {
    Access& access = op->access(index);
    VarState* var = access.var();
    const AccessRef ref(op, index);
    bool behind_write = false;
    if (var->head) {
      Access& before = var->tail.op()->access(var->tail.index());
      before.next = ref;
      behind_write = before.is_write();
    } else {
      // For the writer, unless it is there for reads, too, that have still to be issued. GpuVar
      // lies on a line that ops of CPUs do not need.
      behind_write = var->readers == 0 || (var->gpu_holds && ReadersAreIssued(var));
      var->head = ref;
    }
    if (behind_write && !access.is_write()) access.set_follows_write();
    var->tail = ref;
  }

  // Nothing before the fence `op` is left.
  void Pass(Op* op) {
    Access& access = op->access(0);
    VarState* var = access.var();
    access.set_granted();
    if (!op->clears_error()) {
      --var->wait_fences;
      return;
    }
    ++var->writes_finished;
    SetFailure(var, nullptr);
  }

  // Restores V3 after the last granted access of `var` has left.
  template <class OnReady, class OnWrite, class OnFence>
  void Grant(VarState* var, OnReady&& on_ready, OnWrite&& on_write, OnFence&& on_fence) {
    int granted = 0;
    while (var->head) {
      const AccessRef ref = var->head;
      Op* op = ref.op();
      Access& access = op->access(ref.index());
      const bool is_fence = access.mode() == AccessMode::kFence;
      if (access.is_write() && var->readers > 0) return;
      if (access.is_write() && !is_fence) {
        var->writer = op;
      } else if (granted == kGrantsAtOnce) {
        var->granting = true;
        granting_.push_back(var);
        return;
      } else if (!is_fence) {
        ++var->readers;
        var->reader_hint = op;
      }
      var->head = access.next;
      if (var->head) __builtin_prefetch(var->head.op());
      ++granted;
      if (is_fence) [[unlikely]] {
        Pass(op);
        if (op->clears_error()) on_fence(op);
        if (var->waiters > 0) on_write(var);
        continue;
      }
      access.set_granted();
      if (--op->blocked == 0) on_ready(op);
      if (var->writer != nullptr) return;
    }
  }

  // Grants waiting GPU ops whose predecessors on `var` are all issued GPU ops (V4).
  template <class OnReady>
  void GrantEarly(VarState* var, OnReady&& on_ready) {
    while (var->head && var->head.op()->on_gpu() && !var->granting) {
      const AccessRef ref = var->head;
      Op* op = ref.op();
      Access& access = op->access(ref.index());
      GpuVar* gpu = var->gpu.get();
      if (gpu == nullptr) return;
      if (access.is_write()) {
        const auto holders = static_cast<std::int64_t>(var->readers) + gpu->stacked +
                             static_cast<std::int64_t>(var->writer != nullptr);
        if (gpu->issued != holders) return;
        gpu->stacked += static_cast<int>(var->writer != nullptr);
        var->writer = op;
      } else {
        if (var->writer != nullptr && !var->writer->issued) return;
        ++var->readers;
        var->reader_hint = op;
      }
      var->head = access.next;
      access.set_granted();
      if (--op->blocked == 0) on_ready(op);
    }
  }

  // What `access` of a GPU op poisons; `failure`: what all do if the op as a whole has failed.
  FailureRecord* FailureFor(const Op* op, const Access& access, FailureRecord* failure) const;
  void MarkIssued(const Access& access, const GpuMark& mark, FailureRecord* failure, bool skipped,
                  bool keeps);
  void UnmarkIssued(const Access& access);
  void SetFrontier(GpuVar* gpu, FailureRecord* failure);

  std::size_t poisoned_vars_ = 0;
  std::size_t frontiers_ = 0;        // GpuVar::frontier that are not null
  FailureRecord* unused_ = nullptr;  // see Discard
  std::vector<VarState*> granting_;
  // Of a GPU op that has not finished, and one of its variables; rare.
  struct KeptFailure {
    const Op* op;
    const VarState* var;
    FailureRecord* failure;
  };
  using KeptFailures = std::vector<KeptFailure>;
  static void Keep(KeptFailures* kept, const Op* op, const Access& access, FailureRecord* failure);
  static FailureRecord* Find(const KeptFailures& kept, const Op* op, const Access& access);
  void DropKept(const Op* op);
  KeptFailures own_failures_;  // see FailAlone
  KeptFailures known_poison_;  // see NotePoison
};

}  // namespace heddle::engine
