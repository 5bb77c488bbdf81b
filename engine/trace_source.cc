#include "engine/trace_source.h"

#include "engine/core.h"
#include "engine/thread_context.h"

namespace heddle::engine {

TraceSource TraceOf(Engine& engine) {
  // A variable keeps what is left of its engine.
  const auto var = std::make_shared<const Var>(engine.NewVar());
  return {var, &var->state()->core->trace()};
}

TraceSource NewTrace(const std::string& path, std::int64_t bytes_max) {
  struct Own {
    Own(const std::string& path, std::int64_t bytes_max)
        : writer(path, bytes_max), running(&writer) {}

    TraceWriter writer;
    const std::atomic<TraceWriter*> running;
  };
  const auto own = std::make_shared<Own>(path, bytes_max);
  return {own, &own->running};
}

std::uint64_t TracedOpOfThread() noexcept {
  const ThreadContext& context = tls_context;
  if (context.op == nullptr || context.core->trace().load(std::memory_order_relaxed) == nullptr) {
    return 0;
  }
  return context.op->ticket + 1;
}

}  // namespace heddle::engine
