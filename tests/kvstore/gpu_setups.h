// The store tests on simulated GPUs.
#pragma once

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "base/sanitizers.h"
#include "tests/kvstore/sim_store_gpu.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {

inline std::shared_ptr<internal::GpuDriver> FourGpus() {
  auto gpus = std::make_shared<SimStoreGpu>(4, std::random_device()());
  gpus->set_turns_max(1);  // many small ops, one after another
  return gpus;
}

// A store of one process with arrays on four GPUs.
inline std::vector<StoreSetup> GpuSetupsOf(const char* store) {
  std::vector<StoreSetup> setups = {{store, "threaded", 2, "", &FourGpus}};
  if (!kThreadSanitizer) setups.push_back({store, "seeded", 1, "", &FourGpus});  // see SetupsOf
  return setups;
}

inline std::vector<StoreSetup> GpuSetups() {
  std::vector<StoreSetup> setups = GpuSetupsOf("local");
  for (StoreSetup& setup : GpuSetupsOf("device")) setups.push_back(std::move(setup));
  return setups;
}

// Dist stores of workers with arrays on four GPUs; the servers' lie on CPUs.
inline std::vector<StoreSetup> DistGpuSetups() {
  std::vector<StoreSetup> setups;
  for (const char* const type :
       {"dist_sync", "dist_async", "dist_device_sync", "dist_device_async"}) {
    setups.push_back({type, "threaded", 2, "sim", &FourGpus});
  }
  // Arrays that are cut into five parts and more.
  constexpr std::int64_t kColumns = 9000;
  setups.push_back({"dist_device_sync", "threaded", 2, "sim", &FourGpus, kColumns});
  setups.push_back({"dist_sync", "threaded", 2, "tcp", &FourGpus, kColumns});
  setups.push_back({"dist_device_async", "threaded", 2, "tcp", &FourGpus, kColumns});
  return setups;
}

}  // namespace heddle::kvstore_test
