// The WaitCheckScopes of the calling thread, as its waits use them.
#pragma once

#include <heddle/engine.h>

#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "engine/thread_context.h"

namespace heddle::internal {

class WaitChecks {
 public:
  // Whether waits have something to call.
  static bool Any() {
    const WaitCheckScope* const scope = engine::tls_context.wait_check;
    return scope != nullptr && scope->check_ != nullptr;
  }

  // When Call is due, for a thread that begins to wait, or has just called it; none: never.
  static std::optional<Deadline> Next() {
    if (!Any()) return std::nullopt;
    return HasKept() ? std::chrono::milliseconds(0) : engine::tls_context.wait_check->interval_;
  }

  // What was kept, or else what the innermost check throws; null: nothing. Only if there is Any.
  static std::exception_ptr Call() {
    for (WaitCheckScope* scope = engine::tls_context.wait_check; scope != nullptr;
         scope = scope->outer_) {
      if (scope->error_ != nullptr) return scope->TakeError();
    }
    // What it pushes is none of the push that waits here for room.
    const Deadline* const room = std::exchange(engine::tls_context.room_deadline, nullptr);
    std::exception_ptr error;
    try {
      engine::tls_context.wait_check->check_();
    } catch (...) {
      error = std::current_exception();
    }
    engine::tls_context.room_deadline = room;
    return error;
  }

  // For what waits outside the engine, as often as it can: throws what Call returns.
  static void Look() {
    if (!Any()) return;
    if (const std::exception_ptr error = Call()) std::rethrow_exception(error);
  }

  // Whether a push has kept an exception that nobody has seen.
  static bool HasKept() {
    const WaitCheckScope* scope = engine::tls_context.wait_check;
    while (scope != nullptr && scope->error_ == nullptr) scope = scope->outer_;
    return scope != nullptr;
  }

  static void Keep(std::exception_ptr error) {
    engine::tls_context.wait_check->error_ = std::move(error);
  }
};

}  // namespace heddle::internal
