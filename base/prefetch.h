// Asks for a cache line that this thread is about to change.
#pragma once

namespace heddle {

// Takes the line from the core that changed it last, so that the change itself does not wait for
// it. Any address: nothing is read. Not __builtin_prefetch(address, 1), which without the compiler
// flag for the instruction asks for the line as a reader, and the first write asks again.
inline void PrefetchForWrite(const void* address) {
#if defined(__x86_64__)
  // Processors without it take it for a no-op.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

}  // namespace heddle
