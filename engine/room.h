// For calls that push several ops under a NoWaitScope, because they hold what bodies may wait for.
#pragma once

#include <heddle/engine.h>
#include <heddle/var.h>

namespace heddle::engine {

// Before the scope: waits for room as a push would, and pushes nothing. `var`: of the engine.
void AwaitRoom(const Var& var, OpName name);
// After it: the serial engine runs what has been pushed, as the push would have done.
void RunPending(const Var& var);

}  // namespace heddle::engine
