// Records the messages of a node in the trace of an engine, while one runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "base/mutex.h"
#include "engine/trace_source.h"
#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/protocol/message.h"
#include "kvstore/dist/trace_records.h"

namespace heddle::kvstore::dist {

// Threads: any.
class MessageTrace {
 public:
  // Where messages are recorded from now on; the first call counts.
  void Use(const engine::TraceSource& source) EXCLUDES(mutex_);
  // Who this node is, and in which job ("": that is not told).
  void SetPlace(NodeId self, Incarnation incarnation, std::string_view job_id) EXCLUDES(mutex_);

  // Null: nothing is recorded now.
  engine::TraceWriter* Writer() {
    // acquire; pairs with the release in Use
    const std::atomic<engine::TraceWriter*>* const running =
        running_.load(std::memory_order_acquire);
    if (running == nullptr) return nullptr;
    engine::TraceWriter* const writer = running->load(std::memory_order_acquire);
    if (writer != placed_.load(std::memory_order_relaxed) && writer != nullptr) [[unlikely]]
      WritePlace(*writer);
    return writer;
  }

 private:
  void WritePlace(engine::TraceWriter& writer) EXCLUDES(mutex_);

  std::atomic<const std::atomic<engine::TraceWriter*>*> running_{nullptr};
  std::atomic<engine::TraceWriter*> placed_{nullptr};  // the trace that says who this node is
  Mutex mutex_;
  engine::TraceSource source_ GUARDED_BY(mutex_);
  TracePlaceRecord place_ GUARDED_BY(mutex_);  // role 0: not known yet
};

// While it lives, a message is given to the transport, or is handled.
class MessageSlice {
 public:
  MessageSlice(MessageTrace& trace, TraceDirection direction, NodeId peer, const Message& message)
      : writer_(trace.Writer()) {
    if (writer_ != nullptr) [[unlikely]]
      Begin(direction, peer, message);
  }
  MessageSlice(const MessageSlice&) = delete;
  MessageSlice& operator=(const MessageSlice&) = delete;
  ~MessageSlice() {
    if (writer_ != nullptr) [[unlikely]]
      End();
  }

 private:
  void Begin(TraceDirection direction, NodeId peer, const Message& message);
  void End();

  engine::TraceWriter* const writer_;
  union {
    TraceMessageRecord record_;  // if there is a writer
  };
};

}  // namespace heddle::kvstore::dist
