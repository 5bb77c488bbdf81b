// What tests of arrays on simulated GPUs start with.
#pragma once

#include <heddle/engine.h>
#include <heddle/ndarray.h>

#include <cstdint>
#include <memory>

#include "storage/gpus.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"

namespace heddle::storage_test {

constexpr int kDevices = 2;

// An engine on two fresh simulated devices.
class GpuArrays : public engine_test::EveryEngine {
 protected:
  GpuArrays() {
    EngineOptions options = GetParam().options;
    options.gpu_driver = gpu_;
    engine_ = std::make_unique<Engine>(options);
  }

  NDArray Bytes(std::int64_t bytes, Device device) const {
    return NDArray({bytes}, DType::kUInt8, device, *engine_);
  }
  NDArray Filled(std::int64_t bytes, int value, Device device) const {
    return NDArray::Full({bytes}, value, DType::kUInt8, device, *engine_);
  }
  storage::Allocator& Pool(Device device) const { return storage::Gpus::Of(*engine_).Pool(device); }
  MemoryStats Stats(Device device) const { return Pool(device).stats(); }

  std::shared_ptr<engine_test::SimGpu> gpu_ =
      std::make_shared<engine_test::SimGpu>(kDevices, engine_test::BaseSeed());
  std::unique_ptr<Engine> engine_;
};

}  // namespace heddle::storage_test
