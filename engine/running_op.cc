#include "engine/running_op.h"

#include "base/check.h"
#include "engine/thread_context.h"

namespace heddle::engine {

std::uint64_t TicketOfRunningOp() noexcept {
  DCHECK(tls_context.op != nullptr);
  return tls_context.op->ticket;
}

}  // namespace heddle::engine
