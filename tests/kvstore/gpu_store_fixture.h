// Stores with arrays on two simulated GPUs.
#pragma once

#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/sim_store_gpu.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {

class GpuStoreTest : public testing::Test {
 protected:
  GpuStoreTest() { gpu_->set_turns_max(1); }

  static constexpr int kGpus = 2;

  NDArray Full(const Shape& shape, Scalar value, Device device,
               DType dtype = DType::kFloat32) const {
    return NDArray::Full(shape, value, dtype, device, *engine_);
  }

  std::vector<float> Pulled(KVStore& from, int key) const {
    const NDArray out({4, 2}, DType::kFloat32, Gpu(0), *engine_);
    from.Pull(key, out);
    return out.ToVector<float>();
  }

  std::shared_ptr<SimStoreGpu> gpu_ = std::make_shared<SimStoreGpu>(kGpus, TestSeed());
  std::unique_ptr<Engine> engine_ = std::make_unique<Engine>([this] {
    EngineOptions options = EngineOptions::FromEnvironment();
    options.gpu_driver = gpu_;
    options.check_access = true;
    return options;
  }());
};

}  // namespace heddle::kvstore_test
