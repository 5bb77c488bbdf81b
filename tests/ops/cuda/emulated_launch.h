// Runs what the threads of a launch would do, one after another, on the CPU.
#pragma once

#include <cstdint>

#include "ops/cuda/table.h"

namespace heddle::ops::cuda {

struct EmulatedLaunch {
  template <class AnyTable>
  void operator()(const AnyTable& table) const {
    ++*launches;
    for (std::uint32_t block = 0; block < table.blocks(); ++block) {
      for (unsigned thread = 0; thread < kBlockThreads; ++thread) {
        RunTableThread(table, block, thread);
      }
    }
  }

  int* launches;
};

}  // namespace heddle::ops::cuda
