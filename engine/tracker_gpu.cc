// What the tracker remembers of GPU ops between their issue and their end.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/gpu/gpu_queues.h"
#include "engine/held_up.h"
#include "engine/tracker.h"

namespace heddle::engine {

void Tracker::CollectMarks(Op* op, const GpuQueue* queue, std::vector<GpuMark>* marks) {
  const auto add = [&](const GpuMark& mark) {
    // What lies on the same stream comes before anyway.
    if (mark.queue == nullptr || mark.queue == queue || mark.queue->HasFinished(mark.number))
      return;
    for (GpuMark& other : *marks) {
      if (other.queue != mark.queue) continue;
      other.number = std::max(other.number, mark.number);
      return;
    }
    marks->push_back(mark);
  };
  for (std::uint32_t i = 0; i < op->access_count; ++i) {
    const Access& access = op->access(i);
    const GpuVar* gpu = access.var()->gpu.get();
    if (gpu == nullptr) continue;
    add(gpu->last_write);
    if (!access.is_write()) continue;
    for (const GpuMark& read : gpu->reads) add(read);
  }
}

namespace {

// Neither kNoOp nor kUnknownOps.
std::uint64_t NumberOf(const Op* op) { return op->ticket + 1; }

bool IsUnissued(const Op* writer) { return writer != nullptr && !writer->issued; }

// Of an access behind others in the queue of `var`.
std::uint64_t LastInQueue(const VarState* var, bool write) {
  // Those of waits have no number of their own.
  if (var->wait_fences > 0) return kUnknownOps;
  Op* const last = var->tail.op();
  const Access& tail = last->access(var->tail.index());
  // A write waits for all that is before it: for a write, which has waited for what comes before
  // itself, or for the reads since the last one.
  if (tail.is_write() || (write && tail.follows_write())) return NumberOf(last);
  if (write) return kUnknownOps;
  // Where none is queued, it is the one that holds the variable.
  if (var->writes_registered - var->writes_finished == 1 && IsUnissued(var->writer)) {
    return NumberOf(var->writer);
  }
  // A read waits for the last write.
  constexpr int kLooks = 16;
  const Op* writer = var->writer;
  AccessRef next = var->head;
  for (int looks = 0; next; ++looks) {
    if (looks == kLooks) return kUnknownOps;
    Op* const op = next.op();
    const Access& access = op->access(next.index());
    if (access.is_write()) writer = op;
    next = access.next;
  }
  return writer != nullptr ? NumberOf(writer) : kUnknownOps;
}

}  // namespace

std::uint64_t Tracker::HeldUpBy(const VarState* var, bool write) {
  if (var->granting) return kUnknownOps;
  if (var->head) return LastInQueue(var, write);
  if (IsUnissued(var->writer)) return NumberOf(var->writer);  // what was before it is issued, V4
  const std::int64_t unissued = write ? UnissuedHolders(var) : 0;
  if (unissued == 0) return kNoOp;
  const Op* const reader = var->reader_hint;
  const bool is_it = unissued == 1 && reader != nullptr && !reader->issued;
  return is_it ? NumberOf(reader) : kUnknownOps;
}

void Tracker::Keep(KeptFailures* kept, const Op* op, const Access& access, FailureRecord* failure) {
  kept->push_back({op, access.var(), failure});
  ++failure->refs;
}

FailureRecord* Tracker::Find(const KeptFailures& kept, const Op* op, const Access& access) {
  return std::ranges::find_if(
             kept,
             [&](const KeptFailure& known) { return known.op == op && known.var == access.var(); })
      ->failure;
}

void Tracker::DropKept(const Op* op) {
  for (KeptFailures* kept : {&own_failures_, &known_poison_}) {
    std::erase_if(*kept, [this, op](const KeptFailure& known) {
      if (known.op != op) return false;
      Unref(known.failure);
      return true;
    });
  }
}

void Tracker::FailAlone(const Op* op, Access& access, FailureRecord* failure) {
  DCHECK(!access.fails_alone());
  Keep(&own_failures_, op, access, failure);
  access.set_fails_alone();
}

FailureRecord* Tracker::FailureFor(const Op* op, const Access& access,
                                   FailureRecord* failure) const {
  if (failure != nullptr || !access.fails_alone()) return failure;
  return Find(own_failures_, op, access);
}

void Tracker::MarkIssued(const Access& access, const GpuMark& mark, FailureRecord* failure,
                         bool skipped, bool keeps) {
  VarState* var = access.var();
  if (var->gpu == nullptr) var->gpu = std::make_unique<GpuVar>();
  GpuVar* gpu = var->gpu.get();
  ++gpu->issued;
  var->gpu_holds = true;
  if (access.is_write()) {
    // As Finish and SetFailure have it.
    if (skipped && KeepsFailureAtIssue(var)) failure = FailureAtIssue(var);
    gpu->frontier_keeps = failure != nullptr &&
                          (keeps || (failure == FailureAtIssue(var) && KeepsFailureAtIssue(var)));
    ++gpu->issued_writes;
    SetFrontier(gpu, failure);
    gpu->last_write = mark;
    gpu->reads.clear();
    return;
  }
  for (GpuMark& read : gpu->reads) {
    if (read.queue != mark.queue) continue;
    read.number = std::max(read.number, mark.number);
    return;
  }
  gpu->reads.push_back(mark);
}

void Tracker::UnmarkIssued(const Access& access) {
  VarState* var = access.var();
  GpuVar* gpu = var->gpu.get();
  var->gpu_holds = --gpu->issued > 0;
  if (access.is_write() && --gpu->issued_writes == 0) SetFrontier(gpu, nullptr);
}

void Tracker::SetFrontier(GpuVar* gpu, FailureRecord* failure) {
  if (failure != nullptr) ++failure->refs;
  if (gpu->frontier != nullptr) Unref(gpu->frontier);
  frontiers_ += static_cast<std::size_t>(failure != nullptr);
  frontiers_ -= static_cast<std::size_t>(gpu->frontier != nullptr);
  gpu->frontier = failure;
}

}  // namespace heddle::engine
