// The access checker: catches op bodies that touch what their op did not declare.
//
// The engine knows variables only, so those who own what a variable guards ask here, where the
// elements of an array are obtained. Only the thread of a running body is asked (and those that
// help it in a ParallelFor): before and after ops, waits give the right to touch.
#pragma once

#include <heddle/var.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace heddle::engine {

enum class Touch : std::uint8_t { kRead, kWrite };

// Engines of this process with EngineOptions::check_access.
extern std::atomic<int> checking_engines;

// Whether any body may have to be checked: one load, for the hot path.
inline bool ChecksAccess() { return checking_engines.load(std::memory_order_relaxed) != 0; }

// What the op, whose body this thread runs, has declared against `touch` of what `var` guards: "op
// 'add'", "which it declares as read". Empty if all is well: the op declared it, its body made
// `var`, its engine does not check, or no body is running.
struct Violation {
  std::string op;
  std::string declared;
};
Violation FindViolation(const Var& var, Touch touch);

// "op 'add' on cpu(0)", if this thread runs the body of an op of the CPUs; else empty.
std::string RunningCpuOp();

// While one lives, what this thread touches is not checked: for what nobody writes any more, which
// needs no order. Scopes nest.
class UncheckedScope {
 public:
  UncheckedScope();
  ~UncheckedScope();
  UncheckedScope(const UncheckedScope&) = delete;
  UncheckedScope& operator=(const UncheckedScope&) = delete;
};

}  // namespace heddle::engine
