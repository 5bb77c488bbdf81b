#include "engine/may_wait.h"

#include <heddle/error.h>

#include <fmt/format.h>

#include "engine/thread_context.h"

namespace heddle::engine {

void CheckMayWait(std::string_view call) {
  if (tls_context.op != nullptr) {
    throw InvalidState(
        fmt::format("{} inside op '{}': an op must not wait; name what it needs in its reads, or "
                    "make the call outside of ops",
                    call, tls_context.op->name));
  }
  if (tls_context.polling != nullptr) {
    throw InvalidState(
        fmt::format("{} inside RunOne of a WaitPoller: what a poller calls must not wait", call));
  }
}

}  // namespace heddle::engine
