// DumpState, and the sentences about what blocks what in errors and alarms.
#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/clock.h"
#include "engine/core.h"
#include "engine/fork.h"

namespace heddle::internal {

using engine::Access;
using engine::AccessMode;
using engine::AccessRef;

// Visits every registered op whose accesses are all granted, perhaps several times.
template <class Visit, class VisitReady>
void EngineCore::ForEachGrantedLocked(Visit&& visit, VisitReady&& visit_ready) {
  for (const Executor* executor = executor_list_; executor != nullptr; executor = executor->next) {
    if (executor->current != nullptr) visit(executor->current);
  }
  for (Op* op : in_flight_) visit(op);
  for (Op* op : gpu_in_flight_) visit(op);
  gpu_->ForEach([&](engine::GpuQueue& queue) { visit_ready(queue.held); });
  for (Op* op : seeded_completions_) visit(op);
  for (const SeededEpoch& epoch : seeded_ready_)
    std::for_each(epoch.ops.begin(), epoch.ops.end(), visit);
  visit_ready(ready_);
}

// Visits every registered op, those that wait for several variables as often.
template <class Visit>
void EngineCore::ForEachOpLocked(Visit&& visit) {
  ForEachGrantedLocked(visit, [&](const engine::ReadyQueue& queue) { queue.ForEach(visit); });
  for (VarState* var = vars_; var != nullptr; var = var->next) {
    for (AccessRef ref = var->head; ref; ref = ref.op()->access(ref.index()).next) visit(ref.op());
  }
}

// Who holds or precedes the accesses that `op` waits for; empty if it waits for none.
std::string EngineCore::BlockersLocked(Op* op) {
  std::string text;
  for (std::uint32_t i = 0; i < op->access_count; ++i) {
    const Access& access = op->access(i);
    if (access.granted()) continue;
    VarState* var = access.var();
    text += fmt::format("{}'{}'", text.empty() ? "waits for " : ", ", VarName(*var));
    if (var->writer != nullptr) {
      text += fmt::format(" (written by #{} '{}')", var->writer->ticket, var->writer->name);
    } else if (var->readers > 0) {
      Op* reader = var->reader_hint;
      if (reader == nullptr) reader = AnyReaderLocked(var);
      text += reader == nullptr ? fmt::format(" (read by {} ops)", var->readers)
                                : fmt::format(" (read by {} ops, #{} '{}' among them)",
                                              var->readers, reader->ticket, reader->name);
    }
  }
  return text;
}

Op* EngineCore::AnyReaderLocked(VarState* var) {
  Op* found = nullptr;
  ForEachOpLocked([&](Op* op) {
    for (std::uint32_t i = 0; i < op->access_count && found == nullptr; ++i) {
      const Access& access = op->access(i);
      if (access.var() == var && access.granted() && !access.is_write()) found = op;
    }
  });
  return found;
}

std::string EngineCore::DescribeLocked(Op* op) {
  const auto list = [op](const char* title, auto&& matches) {
    std::string names;
    for (std::uint32_t i = 0; i < op->access_count; ++i) {
      const Access& access = op->access(i);
      if (!matches(access.mode())) continue;
      names += fmt::format("{}{}", names.empty() ? "" : ", ", VarName(*access.var()));
    }
    return names.empty() ? std::string() : fmt::format(" {} [{}]", title, names);
  };
  const char* state = op->blocked > 0 ? "blocked"
                      : IsHeld(op)    ? "ready, held back: its stream is full, or another is issued"
                      : !op->started  ? "ready"
                      : op->issued    ? "issued"
                      : op->in_flight() ? "waiting for its completion"
                                        : "running";
  return fmt::format("#{} '{}' {} priority {}, {}{}{}{}", op->ticket, op->name,
                     ToString(op->device()), op->priority, state,
                     list("reads",
                          [](AccessMode mode) {
                            return mode == AccessMode::kRead || mode == AccessMode::kReadWrite;
                          }),
                     list("writes", [](AccessMode mode) { return mode != AccessMode::kRead; }),
                     op->blocked > 0 ? " " + BlockersLocked(op) : "");
}

std::string EngineCore::DumpState() {
  engine::CheckNotForked("DumpState");
  const engine::TrackerGuard guard(lock_);
  DrainLocked();
  std::vector<Op*> ops;
  ForEachOpLocked([&](Op* op) { ops.push_back(op); });
  // The fence of a wait has the ticket of what comes behind it.
  std::ranges::sort(ops, {}, [](const Op* op) { return std::pair(op->ticket, op); });
  ops.erase(std::unique(ops.begin(), ops.end()), ops.end());
  std::string text =
      fmt::format("{} engine, {} workers: {} pushed, {} done, {} pending\n", options_.type,
                  options_.num_workers, pushed_, done_, pushed_ - done_);
  for (Op* op : ops) text += "  " + DescribeLocked(op) + "\n";
  return text;
}

// Waits that are late ask for it, perhaps often, while very many ops are pending. A blocked one
// waits behind an older one (V2), unless a long run of reads is being granted (V3); and of the
// ready ones the queues know the oldest of each priority.
Op* EngineCore::OldestPendingLocked() {
  Op* oldest = nullptr;
  const auto look = [&oldest](Op* op) {
    if (oldest == nullptr || op->ticket < oldest->ticket) oldest = op;
  };
  ForEachGrantedLocked(look, [&](const engine::ReadyQueue& queue) { queue.ForEachOldest(look); });
  if (!tracker_.has_more_to_grant()) return oldest;
  Op* const blocked = OldestBlockedLocked();
  if (blocked != nullptr) look(blocked);
  return oldest;
}

// Those before it in a variable's queue are older, and blocked as well.
Op* EngineCore::OldestBlockedLocked() {
  Op* oldest = nullptr;
  for (VarState* var = vars_; var != nullptr; var = var->next) {
    if (!var->head) continue;
    Op* const op = var->head.op();
    if (oldest == nullptr || op->ticket < oldest->ticket) oldest = op;
  }
  return oldest;
}

// From an op down to the one that holds it up; the middle of a long chain is left out.
std::string EngineCore::ChainLocked(Op* op, std::int64_t now_ns) {
  constexpr int kShown = 10;
  constexpr int kStepsMax = 1'000'000;
  std::string text = DescribeLocked(op) + AgeOf(op, now_ns);
  int left_out = 0;
  for (int depth = 1; op->blocked > 0 && depth < kStepsMax; ++depth) {
    Op* blocker = nullptr;
    for (std::uint32_t i = 0; i < op->access_count && blocker == nullptr; ++i) {
      if (op->access(i).granted()) continue;
      VarState* var = op->access(i).var();
      blocker = var->writer != nullptr ? var->writer : var->reader_hint;
      // Looking for a reader visits every op.
      if (blocker == nullptr && depth <= kShown) blocker = AnyReaderLocked(var);
    }
    if (blocker == nullptr) break;
    op = blocker;
    if (depth <= kShown) {
      text += " <- " + DescribeLocked(op) + AgeOf(op, now_ns);
    } else {
      ++left_out;
    }
  }
  if (left_out > 0) text += fmt::format(" <- ({} more) <- {}", left_out - 1, DescribeLocked(op));
  return text;
}

std::string EngineCore::WhatBlocksLocked(VarState* var) {
  Op* op = var->writer != nullptr ? var->writer : var->reader_hint;
  if (op == nullptr) op = AnyReaderLocked(var);
  return (op == nullptr ? "no op holds it" : "held up by " + ChainLocked(op)) + WhatRunsLocked();
}

// On an engine without workers, which runs one body at a time, the one that another thread is in.
std::string EngineCore::WhatRunsLocked() {
  if (kind_ == Kind::kThreaded) return {};
  for (const Executor* executor = executor_list_; executor != nullptr; executor = executor->next) {
    if (executor->current == nullptr) continue;
    return "; another thread runs " + DescribeLocked(executor->current);
  }
  return {};
}

std::string EngineCore::WhatIsPendingLocked() {
  DrainLocked();
  Op* oldest = OldestPendingLocked();
  return oldest == nullptr ? fmt::format("{} ops are pending", pushed_ - done_)
                           : fmt::format("{} ops are pending, held up by {}", pushed_ - done_,
                                         ChainLocked(oldest));
}

}  // namespace heddle::internal
