// Many completions called in a row, with one look after what they left behind.
#pragma once

#include "engine/thread_context.h"

namespace heddle::engine {

// While it lives, the ops whose completions its thread calls are finished by whoever looks at them
// anyway, or at its end, all under one hold of their engine's lock. Ops of a second engine are
// finished as ever. Nothing waits in it. Inside another batch it does nothing.
class CompletionBatch {
 public:
  CompletionBatch() {
    if (tls_context.batch == nullptr) tls_context.batch = this;
  }
  CompletionBatch(const CompletionBatch&) = delete;
  CompletionBatch& operator=(const CompletionBatch&) = delete;
  ~CompletionBatch();

  // Whether it looks after the completions of `core`.
  bool Takes(internal::EngineCore* core) noexcept;

 private:
  internal::EngineCore* core_ = nullptr;  // holds a reference
};

}  // namespace heddle::engine
