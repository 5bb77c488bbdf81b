#include "kvstore/dist/server/traced_parts.h"

#include <utility>

#include "base/clock.h"

namespace heddle::kvstore::dist {

// acquire; pairs with the engine's release of a trace that is ready
std::uint64_t TracedParts::Started() const {
  return trace_->load(std::memory_order_acquire) != nullptr
             ? static_cast<std::uint64_t>(SteadyNowNs())
             : 0;
}

void TracedParts::Record(TraceAction action, const PartId& id, std::uint64_t started_ns,
                         const Message* request) const {
  if (started_ns == 0) return;
  engine::TraceWriter* const writer = trace_->load(std::memory_order_acquire);  // as in Started
  if (writer == nullptr) return;
  TracePartRecord record;
  record.action = action;
  record.started_ns = started_ns;
  record.ended_ns = static_cast<std::uint64_t>(SteadyNowNs());
  record.key = id.key;
  record.part = id.part;
  record.store = id.store;
  if (request != nullptr) {
    record.rank = request->rank;
    record.sequence = request->sequence;
  }
  writer->OnRecord(record);
}

void TracedParts::Create(const PartId& id, const PartInfo& info, const Payload& value) {
  const std::uint64_t started = Started();
  parts_.Create(id, info, value);
  Record(TraceAction::kCreate, id, started);
}

void TracedParts::Reset(const PartId& id, const Payload& value) {
  const std::uint64_t started = Started();
  parts_.Reset(id, value);
  Record(TraceAction::kReset, id, started);
}

void TracedParts::Add(const PartId& id, const Message& push, bool first) {
  const std::uint64_t started = Started();
  parts_.Add(id, push, first);
  Record(TraceAction::kMerge, id, started, &push);
}

void TracedParts::DropSum(const PartId& id) {
  const std::uint64_t started = Started();
  parts_.DropSum(id);
  Record(TraceAction::kDrop, id, started);
}

bool TracedParts::Update(const PartId& id, const UpdateBy& by, std::exception_ptr* error) {
  const std::uint64_t started = Started();
  if (!parts_.Update(id, by, error)) {
    if (started != 0) updating_[id] = started;
    return false;
  }
  Record(TraceAction::kUpdate, id, started);
  return true;
}

bool TracedParts::RunPass(std::span<const PartId> parts, const UpdateBy& by, int pass,
                          OthersSums sums, PassResult* result) {
  const std::uint64_t started = Started();
  if (!parts_.RunPass(parts, by, pass, std::move(sums), result)) {
    if (started != 0) updating_[parts.front()] = started;
    return false;
  }
  Record(TraceAction::kUpdate, parts.front(), started);
  return true;
}

void TracedParts::OnUpdated(const PartId& id) {
  const auto found = updating_.find(id);
  if (found == updating_.end()) return;
  Record(TraceAction::kUpdate, id, found->second);
  updating_.erase(found);
}

Payload TracedParts::Read(const PartId& id, const Message& pull) {
  const std::uint64_t started = Started();
  Payload payload = parts_.Read(id, pull);
  Record(TraceAction::kRead, id, started, &pull);
  return payload;
}

}  // namespace heddle::kvstore::dist
