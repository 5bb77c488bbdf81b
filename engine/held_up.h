// What ops that are pushed now would wait for, for those who do the work of several ops in one.
#pragma once

#include <heddle/engine.h>

#include <cstdint>
#include <span>
#include <vector>

namespace heddle::engine {

// The variables of an op, as in OpOptions.
struct OpVars {
  VarList reads;
  VarList writes;
};

// No op: it would be issued at once. Unknown: it would take a long look to tell.
inline constexpr std::uint64_t kNoOp = 0;
inline constexpr std::uint64_t kUnknownOps = ~std::uint64_t{0};

// For each of these what holds it up, were it pushed now as a GPU op: kNoOp, kUnknownOps, or a
// number that stands for one set of pending ops, in this answer alone if there are several. An op
// of a GPU that has been issued holds up none: the device waits for it, and it will be done
// whatever the program does. So ops with the same number, kUnknownOps apart, wait for the same:
// for the ends of those ops, or for their issue where all between are ops of GPUs.
//
// One look at all of them, after everything that this thread has pushed. What other threads push
// meanwhile may or may not be among it. All variables are of one engine that has not been stopped.
// Threads: any, inside op bodies too.
// Cost: one hold of the engine's lock; a few loads for each variable.
std::vector<std::uint64_t> HeldUpBy(std::span<const OpVars> ops);

}  // namespace heddle::engine
