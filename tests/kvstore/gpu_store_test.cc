// Stores and arrays of simulated GPUs: what the tests of all stores, which run on them too
// (gpu_setups.h), do not see.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/memory.h>
#include <heddle/ndarray.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "storage/device_copy.h"
#include "storage/gpus.h"
#include "tests/engine/sim_gpu.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

class GpuStoreTest : public testing::Test {
 protected:
  static constexpr int kGpus = 2;

  NDArray Full(const Shape& shape, Scalar value, Device device,
               DType dtype = DType::kFloat32) const {
    return NDArray::Full(shape, value, dtype, device, *engine_);
  }

  std::shared_ptr<engine_test::SimGpu> gpu_ =
      std::make_shared<engine_test::SimGpu>(kGpus, TestSeed());
  std::unique_ptr<Engine> engine_ = std::make_unique<Engine>([this] {
    EngineOptions options = EngineOptions::FromEnvironment();
    options.gpu_driver = gpu_;
    options.check_access = true;
    return options;
  }());
};

TEST_F(GpuStoreTest, DeviceRefusesArraysOfGpusBeforeAnythingHappens) {
  const NDArray a = Full({4}, 1, Gpu(1));
  const NDArray on_cpu = Full({4}, 1, CpuPinned(1));
  const auto store = KVStore::Create("device", *engine_);
  ExpectInvalid([&] { store->Init(3, a); }, {"key 3", "gpu(1)"});
  store->Init(3, on_cpu);
  ExpectInvalid([&] { store->Push(3, a); }, {"key 3", "gpu(1)"});
  ExpectInvalid([&] { store->Pull(3, a); }, {"key 3", "gpu(1)"});
  store->Push(3, {on_cpu * 2, on_cpu});
  store->Pull(3, on_cpu);
  EXPECT_EQ(on_cpu.ToVector<float>(), std::vector<float>(4, 3));
}

// Every kind of memory in one push and in one pull, with casts, large enough for several slices
// where an array goes through pinned ones.
TEST_F(GpuStoreTest, ArraysOfAllDevicesGoTogether) {
  const Shape shape{2 * storage::kStagingBytes / 4 + 77};
  const auto store = KVStore::Create("local", *engine_);
  store->Init("w", Full(shape, 100, Gpu(1)));
  store->Push("w", {Full(shape, 1, Cpu()), Full(shape, 2, Gpu(0)), Full(shape, 4, CpuPinned(1)),
                    Full(shape, 8, Gpu(1)), Full(shape, 16, Gpu(0))});
  std::vector<NDArray> out;
  for (const Device device : {Gpu(0), Cpu(1), CpuPinned(0), Gpu(1)}) {
    for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
      out.push_back(Full(shape, 0, device, dtype));
    }
  }
  store->Pull("w", out);
  for (const NDArray& array : out) {
    EXPECT_EQ(array.ToVector<float>(),
              std::vector<float>(static_cast<std::size_t>(shape.size()), 31));
  }
}

TEST_F(GpuStoreTest, PullsIntoPartsOfArrays) {
  const auto store = KVStore::Create("local", *engine_);
  store->Init("w", Full({3}, 5, Gpu(0)));
  const NDArray whole = Full({9}, 1, Gpu(1));
  store->Pull("w", {whole.Slice(0, 3), whole.Slice(6, 9)});
  EXPECT_EQ(whole.ToVector<float>(), (std::vector<float>{5, 5, 5, 1, 1, 1, 5, 5, 5}));
}

// From the second step on all memory comes from the pools.
TEST_F(GpuStoreTest, StepsTakeNoFreshMemory) {
  const auto store = KVStore::Create("local", *engine_);
  storage::Gpus& gpus = storage::Gpus::Of(*engine_);
  const auto taken = [&] {
    std::int64_t bytes = gpu_->bytes_used(CpuPinned());
    for (int i = 0; i < kGpus; ++i) bytes += gpu_->bytes_used(Gpu(i));
    return bytes;
  };
  const std::vector<NDArray> gradients = {Full({1000}, 1, Gpu(0)), Full({1000}, 2, Gpu(1))};
  const std::vector<NDArray> weights = {Full({1000}, 0, Gpu(0)), Full({1000}, 0, Gpu(1))};
  store->Init("w", weights[0]);
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  const auto step = [&] {
    store->Push("w", gradients);
    store->Pull("w", weights);
    engine_->WaitForAll();
  };
  step();
  const std::int64_t after_one = taken();
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(taken(), after_one);
  EXPECT_EQ(gpus.Stats(DeviceType::kCpuPinned).used, 0);
  EXPECT_EQ(weights[1].ToVector<float>(), std::vector<float>(1000, -18));
}

}  // namespace
}  // namespace heddle::kvstore_test
