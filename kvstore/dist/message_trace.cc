#include "kvstore/dist/message_trace.h"

#include <algorithm>
#include <memory>

#include "base/clock.h"
#include "kvstore/dist/protocol/bodies.h"
#include "kvstore/dist/protocol/placement.h"

namespace heddle::kvstore::dist {

namespace {

std::uint32_t JobNumber(std::string_view id) {
  if (id.empty()) return 0;
  return std::max<std::uint32_t>(1, static_cast<std::uint32_t>(KeyId(KeyRef(id))));
}

}  // namespace

void MessageTrace::Use(const engine::TraceSource& source) {
  MutexLock lock(mutex_);
  if (source_ != nullptr) return;
  source_ = source;
  running_.store(source_.get(), std::memory_order_release);
}

void MessageTrace::SetPlace(NodeId self, Incarnation incarnation, std::string_view job_id) {
  {
    MutexLock lock(mutex_);
    place_.role = static_cast<std::uint8_t>(self.role);
    place_.rank = self.rank;
    place_.incarnation = incarnation;
    place_.job = JobNumber(job_id);
  }
  placed_.store(nullptr, std::memory_order_relaxed);
}

void MessageTrace::WritePlace(engine::TraceWriter& writer) {
  MutexLock lock(mutex_);
  if (place_.role == 0 || placed_.exchange(&writer, std::memory_order_relaxed) == &writer) return;
  writer.OnRecord(place_);
}

void MessageSlice::Begin(TraceDirection direction, NodeId peer, const Message& message) {
  std::construct_at(&record_);
  record_.rank = message.rank;
  record_.key = message.part.key;
  record_.part = message.part.part;
  record_.store = message.part.store;
  record_.sequence = message.sequence;
  record_.version = message.version;
  record_.payload_bytes = message.payload.bytes();
  record_.op = message.op;
  record_.kind = static_cast<std::uint8_t>(message.kind);
  record_.flags = message.flags;
  record_.direction = direction;
  record_.peer_role = static_cast<std::uint8_t>(peer.role);
  record_.peer_rank = peer.rank;
  if (message.kind == Kind::kInit) {
    InitBody body;
    if (Decode(message.meta, &body)) {
      writer_->OnText(engine::TraceKind::kKey, message.part.key, ToString(KeyRef(body.info.key)));
    }
  }
  record_.started_ns = static_cast<std::uint64_t>(SteadyNowNs());
}

void MessageSlice::End() {
  record_.ended_ns = static_cast<std::uint64_t>(SteadyNowNs());
  writer_->OnRecord(record_);
}

}  // namespace heddle::kvstore::dist
