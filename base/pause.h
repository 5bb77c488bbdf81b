// What a loop that waits for another CPU does between two looks.
#pragma once

#include <atomic>

namespace heddle {

// Tells the processor that this is a spin loop; 40 to 140 cycles.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace heddle
