// The store tests on simulated GPUs.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "tests/kvstore/sim_store_gpu.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {

// Stores of one process with arrays on four GPUs.
inline std::vector<StoreSetup> GpuSetups() {
  std::vector<StoreSetup> setups;
  for (const char* const store : {"local", "device"}) {
    for (StoreSetup setup : {StoreSetup{store, "threaded", 2}, StoreSetup{store, "seeded", 1}}) {
      setup.gpus = []() -> std::shared_ptr<internal::GpuDriver> {
        auto gpus = std::make_shared<SimStoreGpu>(4, std::random_device()());
        gpus->set_turns_max(1);  // many small ops, one after another
        return gpus;
      };
      setups.push_back(setup);
    }
  }
  return setups;
}

}  // namespace heddle::kvstore_test
