// Dense values of "device" on simulated GPUs, and row-sparse arrays.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <cstdint>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/gpu_store_fixture.h"

namespace heddle::kvstore_test {
namespace {

// Row-sparse outputs of a dense value get the rows that are not zero, on any device, in any dtype.
TEST_F(GpuStoreTest, DenseValuesArePulledIntoRowSparseArrays) {
  const auto store = KVStore::Create("device", *engine_);
  std::vector<float> values(600 * 3, 0);
  std::vector<std::int64_t> ids;
  std::vector<float> rows;
  for (std::int64_t id = 0; id < 600; id += 1 + id % 7) {
    ids.push_back(id);
    for (std::int64_t i = 0; i < 3; ++i) {
      const float value = i == id % 3 ? static_cast<float>(id + 1) : 0;
      values[static_cast<std::size_t>(id * 3 + i)] = value;
      rows.push_back(value);
    }
  }
  const Shape shape{600, 3};
  store->Init("w", NDArray::FromVector(values, shape, DType::kFloat32, Gpu(1), *engine_));
  store->Init("zero", Full(shape, 0, Gpu(1)));
  std::vector<RowSparseNDArray> out;
  for (const Device device : {Gpu(0), Cpu(1), CpuPinned(0), Gpu(1)}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      out.emplace_back(shape, dtype, device, *engine_);
    }
  }
  store->Pull("w", out, 0, /*ignore_sparse=*/false);
  for (const RowSparseNDArray& array : out) {
    const RowVectors<float> found = array.ToVectors<float>();
    EXPECT_EQ(found.row_ids, ids);
    EXPECT_EQ(found.rows, rows);
  }
  store->Pull("zero", out, 0, /*ignore_sparse=*/false);
  for (const RowSparseNDArray& array : out) {
    EXPECT_TRUE(array.ToVectors<float>().row_ids.empty());
  }
  // With the error of the value.
  NDArray bad = Full(shape, 0, Gpu(1));
  engine_->Push({.name = "fail", .writes = {bad.var()}}, [] { throw std::runtime_error("bad"); });
  store->Push("w", bad);
  store->Pull("w", out, 0, /*ignore_sparse=*/false);
  for (const RowSparseNDArray& array : out) {
    EXPECT_THAT([&] { array.WaitToRead(); }, testing::ThrowsMessage<std::runtime_error>("bad"));
  }
}

// A value of the other kind, by Reset.
TEST_F(GpuStoreTest, ResetChangesTheKindOfAValue) {
  const auto store = KVStore::Create("device", *engine_);
  store->Init(1, Full({4, 2}, 1, Gpu(1)));
  store->Reset(1, RowSparseNDArray::FromVectors<float>({1}, {5, 6}, Shape{4, 2}, DType::kFloat32,
                                                       Cpu(), *engine_));
  EXPECT_EQ(Pulled(*store, 1), (std::vector<float>{0, 0, 5, 6, 0, 0, 0, 0}));
}

// Every optimizer, lazy and not, with and without float32 copies: row-sparse gradients of all
// devices onto a dense value on a GPU, against "local" with everything on CPUs.
TEST_F(GpuStoreTest, RowSparseGradientsOfDenseValuesGiveTheBitsOfTheCpus) {
  constexpr std::int64_t kRows = 40;
  constexpr std::int64_t kRowSize = 230;  // some blocks of norms, and a rest
  const Shape shape{kRows, kRowSize};
  std::mt19937 random(static_cast<unsigned>(TestSeed()));
  const auto values = [&](std::size_t count) {
    std::vector<float> all(count);
    for (float& v : all) v = std::uniform_real_distribution<float>(-1, 1)(random);
    return all;
  };
  const auto rows_of = [&](unsigned one_in, DType dtype, Device device) {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < kRows && one_in > 0; ++id) {
      if (random() % one_in == 0) ids.push_back(id);
    }
    return RowSparseNDArray::FromVectors<float>(ids, values(ids.size() * kRowSize), shape, dtype,
                                                device, *engine_);
  };
  const std::vector<std::vector<std::pair<Device, unsigned>>> steps = {
      {{Gpu(0), 3}, {Cpu(), 2}, {Gpu(1), 4}},  // on which device, and how many rows: one in so many
      {{Gpu(0), 2}},
      {{Gpu(1), 1}},
      {{Gpu(0), 0}},
      {{Gpu(1), 0}, {Gpu(0), 0}, {Gpu(1), 5}},
      {{Gpu(1), 1}, {Gpu(1), 1}}};
  for (const std::string_view name : OptimizerNames()) {
    for (const bool lazy : {true, false}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        SCOPED_TRACE(fmt::format("{}, lazy {}, {}", name, lazy, Name(dtype)));
        const auto make = [&] {
          std::vector<std::pair<std::string_view, double>> wanted;
          for (const auto& [parameter, value] : MakeOptimizer(name)->Parameters()) {
            if (parameter == "momentum") wanted.emplace_back(parameter, 0.9);
            if (parameter == "lazy_update") wanted.emplace_back(parameter, lazy);
            if (parameter == "multi_precision") {
              wanted.emplace_back(parameter, dtype == DType::kBFloat16);
            }
          }
          return MakeOptimizer(name, wanted);
        };
        const auto on_gpus = KVStore::Create("device", *engine_);
        const auto on_cpus = KVStore::Create("local", *engine_);
        const NDArray start =
            NDArray::FromVector(values(kRows * kRowSize), shape, dtype, Cpu(), *engine_);
        on_gpus->Init("w", start.Copy(Gpu(1)));
        on_cpus->Init("w", start);
        on_gpus->SetOptimizer(make());
        on_cpus->SetOptimizer(make());
        for (const auto& step : steps) {
          std::vector<RowSparseNDArray> gpu_side, cpu_side;
          for (const auto& [device, one_in] : step) {
            gpu_side.push_back(rows_of(one_in, dtype, device));
            cpu_side.push_back(gpu_side.back().Copy(Cpu()));
          }
          on_gpus->Push("w", gpu_side);
          on_cpus->Push("w", cpu_side);
          for (const RowSparseNDArray& array : gpu_side) array.Clear();  // the store has it
        }
        const NDArray expected(shape, dtype, Cpu(), *engine_);
        const NDArray found(shape, dtype, Gpu(0), *engine_);
        on_cpus->Pull("w", expected);
        on_gpus->Pull("w", found);
        ASSERT_EQ(found.ToVector<float>(), expected.ToVector<float>());
      }
    }
  }
}

// A value that no push has placed yet goes to the GPUs that push row-sparse gradients, as to those
// that push dense ones. One op for each push: the host waits for no count.
TEST_F(GpuStoreTest, ValuesGoToTheGpusThatPushRowSparseGradients) {
  const auto store = KVStore::Create("device", *engine_);
  const auto rows = [&](Device device) {
    return RowSparseNDArray::FromVectors<float>({1, 3}, {1, 1, 1, 1}, Shape{4, 2}, DType::kFloat32,
                                                device, *engine_);
  };
  store->Init({1, 2, 3}, {Full({4, 2}, 1, Cpu()), Full({4, 2}, 1, Cpu()), Full({4, 2}, 1, Cpu())});
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  store->Push(1, rows(Gpu(1)));
  store->Push(2, {rows(Gpu(0)), rows(Gpu(0))});
  store->Push(3, {rows(Gpu(0)), rows(Gpu(0))});
  const std::vector<RowSparseNDArray> near = {rows(Gpu(1)), rows(Gpu(1))};
  const std::vector<RowSparseNDArray> near_others = {rows(Gpu(0)), rows(Gpu(0))};
  engine_->WaitForAll();
  const std::uint64_t ops = engine_->stats().pushed;
  store->Push(1, near);
  EXPECT_EQ(engine_->stats().pushed - ops, 1U);
  store->Push(2, near_others);
  store->Push(3, near_others);
  EXPECT_EQ(engine_->stats().pushed - ops, 3U);
  EXPECT_EQ(Pulled(*store, 1), (std::vector<float>{1, 1, -2, -2, 1, 1, -2, -2}));
  EXPECT_EQ(Pulled(*store, 2), (std::vector<float>{1, 1, -3, -3, 1, 1, -3, -3}));
}

}  // namespace
}  // namespace heddle::kvstore_test
