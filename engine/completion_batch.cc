#include "engine/completion_batch.h"

#include "engine/core.h"

namespace heddle::engine {

bool CompletionBatch::Takes(internal::EngineCore* core) noexcept {
  if (core_ == nullptr) {
    core->Ref();  // its ops may be finished by others, who then stop it and let it go
    core_ = core;
  }
  return core_ == core;
}

CompletionBatch::~CompletionBatch() {
  if (tls_context.batch == this) tls_context.batch = nullptr;
  if (core_ == nullptr) return;
  core_->LookAfterCompleted();
  core_->Unref();
}

}  // namespace heddle::engine
