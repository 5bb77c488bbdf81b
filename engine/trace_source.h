// Where those above the engine, who record what the engine does not know of, find its trace.
#pragma once

#include <heddle/engine.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "engine/trace.h"

namespace heddle::engine {

// The trace that runs now, null while none does. What it points to stays valid as long as a copy of
// the source lives, also when the engine has gone.
using TraceSource = std::shared_ptr<const std::atomic<TraceWriter*>>;

TraceSource TraceOf(Engine& engine);
// A trace of its own, for a process without an engine.
TraceSource NewTrace(const std::string& path, std::int64_t bytes_max);

// The ticket of the op whose body the calling thread runs, plus 1; 0 outside of ops, and while the
// op's engine records no trace.
std::uint64_t TracedOpOfThread() noexcept;

}  // namespace heddle::engine
