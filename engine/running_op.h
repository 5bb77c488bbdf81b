// What a body may ask about the op that runs it.
#pragma once

#include <cstdint>

namespace heddle::engine {

// The ticket of the op whose body the calling thread runs: what the push of it returns, perhaps
// later. Only in the body of an op.
std::uint64_t TicketOfRunningOp() noexcept;

}  // namespace heddle::engine
