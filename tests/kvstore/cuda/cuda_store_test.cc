// Stores with arrays on the GPUs of this machine, against the same stores with arrays on CPUs.
// gpu_store_test.cc has what simulated GPUs can show.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "base/gpus.h"

namespace heddle::kvstore_test {
namespace {

class CudaStores : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GpuCount() == 0) GTEST_SKIP() << WhyNoGpu(0);
  }

  std::vector<float> Random() {
    std::uniform_real_distribution<float> value(-1, 1);
    std::vector<float> all(kSize);
    for (float& v : all) v = value(random_);
    return all;
  }
  NDArray Array(const std::vector<float>& values, Device device) {
    return NDArray::FromVector(values, {kSize}, DType::kFloat32, device, engine_);
  }

  static constexpr std::int64_t kSize = 300'007;
  std::mt19937 random_{std::random_device()()};
  Engine engine_;
};
INSTANTIATE_TEST_SUITE_P(All, CudaStores, testing::Values("local", "device"));

TEST_P(CudaStores, TrainingGivesTheBitsOfTheCpus) {
  for (const std::string_view name : {"sgd", "adam", "lamb"}) {
    const auto on_gpus = KVStore::Create(GetParam(), engine_);
    const auto on_cpus = KVStore::Create(GetParam(), engine_);
    const std::vector<float> start = Random();
    on_gpus->Init("w", Array(start, Cpu()));
    on_cpus->Init("w", Array(start, Cpu()));
    on_gpus->SetOptimizer(MakeOptimizer(name));
    on_cpus->SetOptimizer(MakeOptimizer(name));
    const Device last = Gpu(GpuCount() - 1);
    const NDArray found = Array(start, last);
    const NDArray expected = Array(start, Cpu());
    for (int step = 0; step < 5; ++step) {
      const std::vector<float> a = Random(), b = Random();
      on_gpus->Push("w", {Array(a, Gpu(0)), Array(b, last)});
      on_cpus->Push("w", {Array(a, Cpu()), Array(b, Cpu())});
      on_gpus->Pull("w", found);
      on_cpus->Pull("w", expected);
      ASSERT_EQ(found.ToVector<float>(), expected.ToVector<float>()) << name << ", step " << step;
    }
  }
}

// Lists of keys, whose updates and copies go together, and compressed gradients.
TEST_P(CudaStores, ListsOfKeysGiveTheBitsOfTheCpus) {
  const Device last = Gpu(GpuCount() - 1);
  for (const char* const compression : {"", "1bit", "2bit"}) {
    const auto on_gpus = KVStore::Create(GetParam(), engine_);
    const auto on_cpus = KVStore::Create(GetParam(), engine_);
    std::vector<Key> keys;
    std::vector<NDArray> start, found, expected;
    for (int key = 0; key < 3; ++key) {
      keys.emplace_back(key);
      start.push_back(Array(Random(), Cpu()));
      found.push_back(Array(Random(), last));
      expected.push_back(Array(Random(), Cpu()));
    }
    for (KVStore* const store : {on_gpus.get(), on_cpus.get()}) {
      if (*compression != '\0') store->SetGradientCompression({.type = compression});
      store->Init(keys, start);
      store->SetOptimizer(Sgd({.learning_rate = 0.1, .momentum = 0.9}));
    }
    for (int step = 0; step < 5; ++step) {
      std::vector<std::vector<NDArray>> gpu_gradients, cpu_gradients;
      for (std::size_t key = 0; key < keys.size(); ++key) {
        const std::vector<float> a = Random(), b = Random();
        gpu_gradients.push_back({Array(a, Gpu(0)), Array(b, last)});
        cpu_gradients.push_back({Array(a, Cpu()), Array(b, Cpu())});
      }
      on_gpus->Push(keys, gpu_gradients);
      on_cpus->Push(keys, cpu_gradients);
      on_gpus->Pull(keys, found);
      on_cpus->Pull(keys, expected);
      for (std::size_t key = 0; key < keys.size(); ++key) {
        ASSERT_EQ(found[key].ToVector<float>(), expected[key].ToVector<float>())
            << compression << ", key " << key << ", step " << step;
      }
    }
  }
}

// Lazy updates and others, one with norms and one by rows, of values of both kinds by the rows of
// several gradients, and the rows that are pulled.
TEST_P(CudaStores, RowSparseGradientsGiveTheBitsOfTheCpus) {
  const Shape shape{1000, 77};
  const Device last = Gpu(GpuCount() - 1);
  const auto rows_of = [&](unsigned one_in, Device device) {
    std::vector<std::int64_t> ids;
    std::vector<float> rows;
    for (std::int64_t id = 0; id < shape[0]; ++id) {
      if (random_() % one_in != 0) continue;
      ids.push_back(id);
      for (std::int64_t i = 0; i < shape[1]; ++i) {
        rows.push_back(std::uniform_real_distribution<float>(-1, 1)(random_));
      }
    }
    return RowSparseNDArray::FromVectors<float>(ids, rows, shape, DType::kFloat32, device, engine_);
  };
  const auto run = [&](std::string_view name, const auto& start) {
    const auto on_gpus = KVStore::Create(GetParam(), engine_);
    const auto on_cpus = KVStore::Create(GetParam(), engine_);
    on_gpus->Init("w", start.Copy(last));
    on_cpus->Init("w", start);
    on_gpus->SetOptimizer(MakeOptimizer(name));
    on_cpus->SetOptimizer(MakeOptimizer(name));
    for (int step = 0; step < 4; ++step) {
      const std::vector<RowSparseNDArray> gpu_side = {rows_of(30, Gpu(0)), rows_of(9, last),
                                                      rows_of(step == 2 ? 1 : 40, Cpu())};
      std::vector<RowSparseNDArray> cpu_side;
      for (const RowSparseNDArray& array : gpu_side) cpu_side.push_back(array.Copy(Cpu()));
      on_gpus->Push("w", gpu_side);
      on_cpus->Push("w", cpu_side);
      on_gpus->Push("w", gpu_side[0]);
      on_cpus->Push("w", cpu_side[0]);
      const RowSparseNDArray found(shape, DType::kFloat32, last, engine_);
      const RowSparseNDArray expected(shape, DType::kFloat32, Cpu(), engine_);
      on_gpus->Pull("w", found, 0, /*ignore_sparse=*/false);
      on_cpus->Pull("w", expected, 0, /*ignore_sparse=*/false);
      ASSERT_EQ(found.ToVectors<float>().row_ids, expected.ToVectors<float>().row_ids) << step;
      ASSERT_EQ(found.ToVectors<float>().rows, expected.ToVectors<float>().rows) << step;
    }
  };
  for (const std::string_view name : {"sgd", "adam", "adagrad", "lars", "lamb", "groupadagrad"}) {
    SCOPED_TRACE(name);
    run(name, NDArray::Full(shape, 0.5, DType::kFloat32, Cpu(), engine_));
    run(name, rows_of(5, Cpu()));
  }
}

}  // namespace
}  // namespace heddle::kvstore_test
