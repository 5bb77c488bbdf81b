// The store tests on simulated GPUs.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "tests/engine/sim_gpu.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {

// Stores of one process with arrays on four GPUs.
inline std::vector<StoreSetup> GpuSetups() {
  std::vector<StoreSetup> setups;
  for (const char* const store : {"local"}) {
    for (StoreSetup setup : {StoreSetup{store, "threaded", 2}, StoreSetup{store, "seeded", 1}}) {
      setup.gpus = []() -> std::shared_ptr<internal::GpuDriver> {
        return std::make_shared<engine_test::SimGpu>(4, std::random_device()());
      };
      setups.push_back(setup);
    }
  }
  return setups;
}

}  // namespace heddle::kvstore_test
