// Failures of single variables, for ops that do the work of many.
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

}  // namespace heddle::engine
