// Decides when ops may run: the queues of all variables of one engine.
//
// Plain state, plain loads and stores: whoever holds the engine's lock works on it. Ops are
// registered in the order of their tickets, which makes that order the single order of all pushes:
// an op joins all its variables at once, so no two ops can wait for each other, whatever the order
// of their lists.
//
// The invariants (V1) to (V3) of VarState hold after each method.
#pragma once

#include <cstddef>
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

  // Why `op`, all of whose accesses are granted, must not run; null: it may.
  FailureRecord* PoisonOf(Op* op) const {
    if (poisoned_vars_ == 0 || op->run_when_poisoned) return nullptr;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      const Access& access = op->access(i);
      const bool needs_value =
          access.mode() == AccessMode::kRead || access.mode() == AccessMode::kReadWrite;
      if (needs_value && access.var()->failure != nullptr) return access.var()->failure;
    }
    return nullptr;
  }

  // Leaves the queues. What it wrote becomes poisoned by `failure`, or cured if that is null.
  // on_ready(op) gets each op that may run now, on_write(var) each variable with waiters that had a
  // write finished, on_idle(var) each dropped variable whose last access this was.
  template <class OnReady, class OnWrite, class OnIdle>
  void Finish(Op* op, FailureRecord* failure, OnReady&& on_ready, OnWrite&& on_write,
              OnIdle&& on_idle) {
    const std::uint32_t count = op->access_count;
    for (std::uint32_t i = 0; i < count; ++i) {
      Access& access = op->access(i);
      VarState* var = access.var();
      if (access.mode() == AccessMode::kRead) {
        DCHECK(var->readers > 0 && var->writer == nullptr);  // V1
        --var->readers;
        if (var->reader_hint == op) var->reader_hint = nullptr;
        if (var->readers == 0 && var->head && !var->granting) Grant(var, on_ready);
      } else {
        DCHECK(var->writer == op && var->readers == 0);  // V1
        var->writer = nullptr;
        ++var->writes_finished;
        if (access.mode() != AccessMode::kFence) {
          // release; pairs with the acquire in Engine::version
          var->version.store(var->version.load(std::memory_order_relaxed) + 1,
                             std::memory_order_release);
          if (failure != nullptr || var->failure != nullptr) SetFailure(var, failure);
        } else if (op->clears_error) {
          SetFailure(var, nullptr);
        }
        if (var->head) Grant(var, on_ready);
        if (var->waiters > 0) on_write(var);
      }
      if (var->dropped && var->Idle()) on_idle(var);
    }
  }

  // True: a run of waiting reads was too long for one hold of the lock; call GrantMore.
  bool has_more_to_grant() const { return !granting_.empty(); }
  template <class OnReady>
  void GrantMore(OnReady&& on_ready) {
    VarState* var = granting_.back();
    granting_.pop_back();
    var->granting = false;
    Grant(var, on_ready);
  }

  void SetFailure(VarState* var, FailureRecord* failure) {
    if (failure != nullptr) ++failure->refs;
    if (var->failure != nullptr) Unref(var->failure);
    poisoned_vars_ += (failure != nullptr) - (var->failure != nullptr);
    var->failure = failure;
  }

  static void Unref(FailureRecord* failure) {
    if (--failure->refs == 0) delete failure;
  }

 private:
  // A writer with 100 000 readers behind it would hold the lock for milliseconds.
  static constexpr int kGrantsAtOnce = 256;

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
    const AccessRef ref(op, index);
    if (var->head) {
      var->tail.op()->access(var->tail.index()).next = ref;
    } else {
      var->head = ref;
    }
    var->tail = ref;
    return false;
  }

  // Restores V3 after the last granted access of `var` has left.
  template <class OnReady>
  void Grant(VarState* var, OnReady&& on_ready) {
    int granted = 0;
    while (var->head) {
      const AccessRef ref = var->head;
      Op* op = ref.op();
      Access& access = op->access(ref.index());
      if (access.is_write()) {
        if (var->readers > 0) return;
        var->writer = op;
      } else {
        if (granted == kGrantsAtOnce) {
          var->granting = true;
          granting_.push_back(var);
          return;
        }
        ++var->readers;
        var->reader_hint = op;
      }
      var->head = access.next;
      if (var->head) __builtin_prefetch(var->head.op());
      access.set_granted();
      ++granted;
      if (--op->blocked == 0) on_ready(op);
      if (var->writer != nullptr) return;
    }
  }

  std::size_t poisoned_vars_ = 0;
  std::vector<VarState*> granting_;
};

}  // namespace heddle::engine
