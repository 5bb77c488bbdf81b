// What the engine knows of the calling thread.
#pragma once

#include <cstdint>

#include "engine/op.h"
#include "engine/tls.h"

namespace heddle {
class Deadline;
class WaitCheckScope;
}  // namespace heddle

namespace heddle::engine {

class CompletionBatch;

struct ThreadContext {
  // The op whose body this thread is running, and its engine; null outside of ops.
  EngineCore* core = nullptr;
  Op* op = nullptr;
  std::int64_t children = 0;      // ops that body has pushed into its own engine
  bool after_body = false;        // its body has returned: this is what takes it down, of a GPU op
  int no_wait_depth = 0;          // > 0: see NoWaitScope
  int unchecked_depth = 0;        // > 0: what this thread touches is not checked
  EngineCore* polling = nullptr;  // whose poller this thread is running
  CompletionBatch* batch = nullptr;
  WaitCheckScope* wait_check = nullptr;     // the innermost of this thread
  const Deadline* room_deadline = nullptr;  // of a push that waits for room; null: none
};

extern HEDDLE_TLS ThreadContext tls_context;

}  // namespace heddle::engine
