// What the engine asks of the operating system's scheduler.
#pragma once

#include <cstdint>

namespace heddle::engine {

// Asks for short time slices for the calling thread (Linux 6.12 and newer; no effect elsewhere),
// once a thread. A woken worker is often placed on its waker's CPU; with the usual slice it then
// waits for milliseconds until the waker sleeps, with a short one it runs at once.
void PreferPromptWakeups() noexcept;

// Lets timed sleeps of the calling thread end within a microsecond of their time instead of fifty.
void PreferExactTimers() noexcept;

// How many Pause() calls last about a microsecond on this machine; measured once.
int PausesPerMicrosecond() noexcept;

}  // namespace heddle::engine
