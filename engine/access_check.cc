#include "engine/access_check.h"

#include <fmt/format.h>

#include "engine/core.h"

namespace heddle::engine {

std::atomic<int> checking_engines{0};

Violation FindViolation(const Var& var, Touch touch) {
  const ThreadContext& context = tls_context;
  if (context.op == nullptr || context.unchecked_depth > 0) return {};
  if (!context.core->options().check_access) return {};
  const internal::VarState* const state = var.state();
  Op& op = *context.op;
  if (state->core == context.core && state->made_by == op.ticket) return {};
  const char* declared = "which it does not declare";
  for (std::uint32_t i = 0; i < op.access_count; ++i) {
    const Access& access = op.access(i);
    if (access.var() != state) continue;
    if (touch == Touch::kRead || access.is_write()) return {};
    declared = "which it declares as read";
  }
  return {fmt::format("op '{}'", op.name), declared};
}

std::string RunningCpuOp() {
  const internal::Op* const op = tls_context.op;
  if (op == nullptr || op->on_gpu()) return {};
  return fmt::format("op '{}' on {}", op->name, ToString(op->device()));
}

UncheckedScope::UncheckedScope() { ++tls_context.unchecked_depth; }
UncheckedScope::~UncheckedScope() { --tls_context.unchecked_depth; }

}  // namespace heddle::engine
