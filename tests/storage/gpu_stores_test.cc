// Stores and arrays of GPUs, simulated ones here.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"

namespace heddle::storage_test {
namespace {

using engine_test::MessageOf;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(GpuStores, RefuseArraysOfGpusBeforeAnythingHappens) {
  EngineOptions options = EngineOptions::FromEnvironment();
  options.gpu_driver = std::make_shared<engine_test::SimGpu>(2, engine_test::BaseSeed());
  Engine engine(options);
  const NDArray a = NDArray::Ones({4}, DType::kFloat32, Gpu(1), engine);
  const NDArray on_cpu = NDArray::Ones({4}, DType::kFloat32, CpuPinned(1), engine);
  for (const char* type : {"local", "device"}) {
    const auto store = KVStore::Create(type, engine);
    const auto names_device = AllOf(HasSubstr("key 3"), HasSubstr("gpu(1)"));
    EXPECT_THAT(MessageOf<InvalidArgument>([&] { store->Init(3, a); }), names_device);
    store->Init(3, on_cpu);
    EXPECT_THAT(MessageOf<InvalidArgument>([&] { store->Push(3, a); }), names_device);
    EXPECT_THAT(MessageOf<InvalidArgument>([&] { store->Pull(3, a); }), names_device);
    // Pinned memory is the CPUs'.
    store->Push(3, {on_cpu * 2, on_cpu});
    store->Pull(3, on_cpu);
    EXPECT_EQ(on_cpu.ToVector<float>(), std::vector<float>(4, type[0] == 'l' ? 3 : 9));
  }
}

}  // namespace
}  // namespace heddle::storage_test
