// NCCL itself: its library anywhere, collectives where GPUs are, the store where several are.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/gpus.h"
#include "kvstore/nccl/device_group.h"
#include "kvstore/nccl/nccl_api.h"
#include "storage/gpus.h"

namespace heddle::kvstore_test {
namespace {

using kvstore::DeviceGroup;

class RealNccl : public testing::Test {
 protected:
  // Skips unless there are so many.
  void NeedGpus(int count) {
    if (GpuCount() < count) GTEST_SKIP() << "needs " << count << " GPUs: " << WhyNoGpu(count - 1);
    devices.resize(static_cast<std::size_t>(GpuCount()));
    std::iota(devices.begin(), devices.end(), 0);
  }
  // 1, 2, ... on the devices.
  std::vector<NDArray> OnDevices(DType dtype = DType::kFloat32, std::int64_t size = 1000) {
    std::vector<NDArray> arrays;
    for (const int device : devices) {
      arrays.push_back(NDArray::Full({size}, device + 1, dtype, Gpu(device), engine));
    }
    return arrays;
  }
  // As the store does before NCCL may let a device write into another one's arrays.
  void LinkDevices() {
    for (const int device : devices) {
      for (const int peer : devices) {
        if (device != peer) storage::Gpus::Of(engine).Linked(device, peer);
      }
    }
  }
  double sum() const {
    const auto count = static_cast<double>(devices.size());
    return count * (count + 1) / 2;
  }

  Engine engine{EngineOptions::FromEnvironment()};
  std::vector<int> devices;
};

TEST_F(RealNccl, SaysItsVersionAndFile) {
  EXPECT_THAT(kvstore::LoadNccl()->Describe(),
              testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+, .*libnccl.*"));
}

TEST_F(RealNccl, SumsAndCopiesBetweenAllDevices) {
  NeedGpus(1);
  if (IsSkipped()) return;
  LinkDevices();
  const auto group = DeviceGroup::Make(kvstore::LoadNccl(), internal::DefaultGpuDriver(), devices,
                                       kvstore::NcclOrderOf(engine), kvstore::DeviceGroupOptions{});
  // Large ones go from array to array, small ones through NCCL's own memory.
  for (const std::int64_t size : {1000, 1 << 22}) {
    for (const DType dtype : kAllDTypes) {
      if (!kvstore::Nccl::Sums(dtype)) continue;
      for (std::size_t root = 0; root < devices.size(); ++root) {
        SCOPED_TRACE(Name(dtype));
        std::vector<NDArray> arrays = OnDevices(dtype, size);
        const NDArray total(arrays[0].shape(), dtype, Gpu(devices[root]), engine);
        DeviceGroup::Queue(group, "sum", {{.arrays = arrays, .root = root, .sum = total}}, 0);
        arrays[root] = total;
        DeviceGroup::Queue(group, "copy", {{.arrays = arrays, .root = root}}, 0);
        for (const NDArray& array : arrays) {
          EXPECT_EQ(array.AsType(DType::kFloat64).ToVector<double>(),
                    std::vector<double>(static_cast<std::size_t>(size), sum()));
        }
      }
    }
  }
}

TEST_F(RealNccl, TheStoreSumsAndBringsTheValueToAllDevices) {
  NeedGpus(2);
  if (IsSkipped()) return;
  const auto store = KVStore::Create("nccl", engine);
  for (int step = 0; step < 20; ++step) {
    store->Push({"a", "b"}, {OnDevices(), OnDevices()});
    const std::vector<NDArray> a = OnDevices(), b = OnDevices();
    store->Pull({"a", "b"}, {a, b});
    for (const NDArray& array : a) {
      EXPECT_EQ(array.ToVector<float>(), std::vector<float>(1000, static_cast<float>(sum())));
    }
    EXPECT_EQ(b.back().ToVector<float>(), a.back().ToVector<float>());
  }
}

}  // namespace
}  // namespace heddle::kvstore_test
