// More than that an op has failed: of single variables, and for how long.
#pragma once

#include <heddle/var.h>

#include <exception>

namespace heddle::engine {

// From the body of a GPU op, which goes on: of the variables that the op writes `var` becomes
// poisoned by `error`, as if an op had failed that writes it alone. The first call for a variable
// counts.
//
// Errors: InvalidState elsewhere; InvalidArgument for a null error, or a variable that the op does
//         not write.
void FailWrite(const Var& var, const std::exception_ptr& error);

// From the body of an op that is about to fail. Its failure stays, in the variables that the op
// writes, whatever overwrites them: an op that does, and would cure them, is skipped as one that
// needs their values. Until an op that runs when poisoned writes them, or ClearError.
void KeepFailure();

}  // namespace heddle::engine
