// What the tracker remembers of GPU ops between their issue and their end.
#include <algorithm>
#include <vector>

#include "engine/gpu/gpu_queues.h"
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

void Tracker::FailAlone(const Op* op, Access& access, FailureRecord* failure) {
  DCHECK(!access.fails_alone());
  own_failures_.push_back({op, access.var(), failure});
  ++failure->refs;
  access.set_fails_alone();
}

FailureRecord* Tracker::FailureFor(const Op* op, const Access& access,
                                   FailureRecord* failure) const {
  if (failure != nullptr || !access.fails_alone()) return failure;
  const auto own = std::ranges::find_if(own_failures_, [&](const OwnFailure& known) {
    return known.op == op && known.var == access.var();
  });
  return own->failure;
}

void Tracker::DropOwnFailures(const Op* op) {
  std::erase_if(own_failures_, [op](const OwnFailure& known) {
    if (known.op != op) return false;
    Unref(known.failure);
    return true;
  });
}

void Tracker::MarkIssued(const Access& access, const GpuMark& mark, FailureRecord* failure) {
  VarState* var = access.var();
  if (var->gpu == nullptr) var->gpu = std::make_unique<GpuVar>();
  GpuVar* gpu = var->gpu.get();
  ++gpu->issued;
  var->gpu_holds = true;
  if (access.is_write()) {
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
