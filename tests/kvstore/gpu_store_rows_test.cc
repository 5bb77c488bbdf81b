// Row-sparse arrays and "device" on simulated GPUs, as gradients and as values.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/gpus.h"
#include "tests/kvstore/gpu_optimizers.h"
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

// Where the value of a key lies, as an updater sees it. The store keeps the updater.
Device PlaceOf(KVStore& store, int key, const RowSparseNDArray& none) {
  const auto place = std::make_shared<Device>();
  const auto look = [place](KeyRef, const RowSparseNDArray& input, const auto& stored) {
    EXPECT_EQ(input.device(), stored.device());
    *place = stored.device();
  };
  store.SetUpdaters({.dense = {}, .row_sparse = look, .row_sparse_on_dense = look});
  store.Push(key, none);
  return *place;
}

// However a row-sparse value comes into being, it lies on the GPU where it was made.
TEST_F(GpuStoreTest, RowSparseValuesLieOnGpus) {
  const auto store = KVStore::Create("device", *engine_);
  const auto rows = [&](Device device) {
    return RowSparseNDArray::FromVectors<float>({1, 3}, {1, 2, 3, 4}, Shape{4, 2}, DType::kFloat32,
                                                device, *engine_);
  };
  const std::vector<float> expected = {0, 0, 1, 2, 0, 0, 3, 4};
  const RowSparseNDArray none({4, 2}, DType::kFloat32, Cpu(), *engine_);
  store->Init({1, 2}, {rows(Gpu(1)), rows(Cpu(1))});
  store->Push(3, rows(Gpu(0)));  // a new key
  store->Init({4, 5, 6}, {Full({4, 2}, 1, Gpu(1)), Full({4, 2}, 1, Gpu(1)), rows(Gpu(1))});
  store->Push(4, rows(Gpu(1)));  // which changes its kind
  store->Reset(5, rows(Cpu()));
  store->Push(6, Full({4, 2}, 1, Gpu(1)));
  store->Push(6, {rows(Gpu(0)), none});  // to and fro
  for (int key = 1; key <= 6; ++key) {
    SCOPED_TRACE(key);
    EXPECT_EQ(Pulled(*store, key), expected);
    const Device place = key == 2 ? Cpu(1) : key == 3 ? Gpu(0) : Gpu(1);
    EXPECT_EQ(PlaceOf(*store, key, none), place);
    EXPECT_EQ(Pulled(*store, key), expected);
  }
  // Those of "local" do not.
  const auto local = KVStore::Create("local", *engine_);
  local->Init(1, rows(Gpu(1)));
  EXPECT_EQ(PlaceOf(*local, 1, none), Cpu());
}

// Those that were made on CPUs go to the GPUs that push them first, or share a push with them, each
// to the one with the fewest bytes; what was pulled before is what they were.
TEST_F(GpuStoreTest, RowSparseValuesGoToTheGpusThatPushThem) {
  const Shape shape{4, 2};
  const auto rows = [&](std::int64_t count, Device device) {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < count; ++id) ids.push_back(id);
    return RowSparseNDArray::FromVectors<float>(
        ids, std::vector<float>(ids.size() * 2, static_cast<float>(count)), shape, DType::kFloat32,
        device, *engine_);
  };
  const RowSparseNDArray none({4, 2}, DType::kFloat32, Cpu(), *engine_);
  const auto store = KVStore::Create("device", *engine_);
  store->Init({1, 2, 3, 4, 5}, {rows(1, Cpu(1)), rows(2, Cpu(0)), rows(3, Cpu(1)), rows(4, Cpu(0)),
                                rows(2, Cpu(1))});
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  const RowSparseNDArray before({4, 2}, DType::kFloat32, Gpu(0), *engine_);
  store->Pull(1, before, 0, /*ignore_sparse=*/false);
  store->Push(5, {rows(1, Cpu(0)), rows(1, Cpu(1))});  // the CPUs settle their own key alone
  store->Push(1, rows(2, Gpu(1)));                     // 16 bytes on gpu(1)
  store->Push(3, {rows(1, Gpu(0)), none, rows(1, Gpu(1))});
  EXPECT_EQ(before.ToVector<float>(), (std::vector<float>{1, 1, 0, 0, 0, 0, 0, 0}));
  const RowSparseNDArray some({4, 2}, DType::kFloat32, Gpu(0), *engine_);
  store->RowSparsePull(2, some,
                       NDArray::FromVector<int>({1}, {1}, DType::kInt32, Gpu(0), *engine_));
  EXPECT_EQ(some.ToVectors<float>().rows, (std::vector<float>{2, 2}));
  EXPECT_EQ(Pulled(*store, 1), (std::vector<float>{-1, -1, -2, -2, 0, 0, 0, 0}));
  EXPECT_EQ(Pulled(*store, 3), (std::vector<float>{1, 1, 3, 3, 3, 3, 0, 0}));
  EXPECT_EQ(Pulled(*store, 5), (std::vector<float>{0, 0, 2, 2, 0, 0, 0, 0}));
  const std::vector<Device> places = {Gpu(1), Gpu(0), Gpu(1), Gpu(0), Cpu(1)};
  for (int key = 1; key <= 5; ++key) {
    EXPECT_EQ(PlaceOf(*store, key, none), places[static_cast<std::size_t>(key - 1)]) << key;
  }
  EXPECT_EQ(Pulled(*store, 4), std::vector<float>(8, 4));
  // By their default updater, too, and with their kind.
  const auto other = KVStore::Create("device", *engine_);
  other->Init({1, 2}, {rows(1, Cpu()), rows(1, Cpu())});
  other->Push(1, rows(3, Gpu(1)));
  other->Push(2, Full({4, 2}, 5, Gpu(1)));
  EXPECT_EQ(Pulled(*other, 1), (std::vector<float>{3, 3, 3, 3, 3, 3, 0, 0}));
  EXPECT_EQ(Pulled(*other, 2), std::vector<float>(8, 5));
  EXPECT_EQ(PlaceOf(*other, 1, none), Gpu(1));
  EXPECT_EQ(PlaceOf(*other, 2, none), Gpu(1));
}

// A push that would have changed the kind and has failed leaves the value, converted, on its GPU.
TEST_F(GpuStoreTest, AFailedChangeOfKindLeavesTheValueOnItsGpu) {
  const auto store = KVStore::Create("device", *engine_);
  const RowSparseNDArray rows = RowSparseNDArray::FromVectors<float>(
      {1, 3}, {1, 2, 3, 4}, Shape{4, 2}, DType::kFloat32, Gpu(1), *engine_);
  const RowSparseNDArray none({4, 2}, DType::kFloat32, Cpu(), *engine_);
  store->Init({1, 2}, {rows, rows.ToDense()});
  const NDArray bad = Full({4, 2}, 0, Gpu(0));
  const RowSparseNDArray bad_rows = rows.Copy(Gpu(0));
  engine_->Push({.name = "fail", .writes = {bad.var(), bad_rows.var()}},
                [] { throw std::runtime_error("bad"); });
  store->Push(1, bad);
  store->Push(2, {rows, bad_rows});
  for (const int key : {1, 2}) {
    EXPECT_THAT([&] { Pulled(*store, key); }, testing::ThrowsMessage<std::runtime_error>("bad"));
    EXPECT_EQ(PlaceOf(*store, key, none), Gpu(1));
    EXPECT_EQ(Pulled(*store, key), (std::vector<float>{0, 0, 1, 2, 0, 0, 3, 4}));
  }
  EXPECT_THROW(engine_->WaitForAll(), std::runtime_error);
}

// Nor is there anything to convert if the push that made the key has failed, too.
TEST_F(GpuStoreTest, AFailedChangeOfKindOfAKeyWithoutAValueLeavesNone) {
  const auto store = KVStore::Create("device", *engine_);
  const NDArray bad = Full({4, 2}, 0, Gpu(1));
  const RowSparseNDArray bad_rows({4, 2}, DType::kFloat32, Gpu(1), *engine_);
  engine_->Push({.name = "fail", .writes = {bad.var(), bad_rows.var()}},
                [] { throw std::runtime_error("bad"); });
  store->Push(1, bad);
  store->Push(1, bad_rows);
  EXPECT_THAT([&] { Pulled(*store, 1); }, testing::ThrowsMessage<std::runtime_error>("bad"));
  EXPECT_THROW(engine_->WaitForAll(), std::runtime_error);
  store->Push(1, RowSparseNDArray::FromVectors<float>({2}, {5, 6}, Shape{4, 2}, DType::kFloat32,
                                                      Gpu(1), *engine_));
  EXPECT_EQ(Pulled(*store, 1), (std::vector<float>{0, 0, 0, 0, 5, 6, 0, 0}));
}

// Every optimizer, lazy and not, with and without float32 copies: row-sparse gradients of all
// devices onto a value on a GPU, against "local" with everything on CPUs.
class GpuRowUpdates : public GpuStoreTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(RowSparseValue, GpuRowUpdates, testing::Bool());
TEST_P(GpuRowUpdates, RowSparseGradientsGiveTheBitsOfTheCpus) {
  const bool row_sparse_value = GetParam();
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
  for (const std::string_view name : GpuOptimizerNames()) {
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
        const RowSparseNDArray start = rows_of(row_sparse_value ? 4 : 1, dtype, Cpu());
        if (row_sparse_value) {
          on_gpus->Init("w", start.Copy(Gpu(1)));
          on_cpus->Init("w", start);
        } else {
          on_gpus->Init("w", start.ToDense().Copy(Gpu(1)));
          on_cpus->Init("w", start.ToDense());
        }
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
        const RowSparseNDArray expected(shape, dtype, Cpu(), *engine_);
        const RowSparseNDArray found(shape, dtype, Gpu(0), *engine_);
        on_cpus->Pull("w", expected, 0, /*ignore_sparse=*/false);
        on_gpus->Pull("w", found, 0, /*ignore_sparse=*/false);
        ASSERT_EQ(found.ToVectors<float>().row_ids, expected.ToVectors<float>().row_ids);
        ASSERT_EQ(found.ToVectors<float>().rows, expected.ToVectors<float>().rows);
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

// Several threads push rows that the value lacks, while others pull it: each pull sees pushes
// whole, and every row comes to its sum.
TEST_F(GpuStoreTest, PullsSeeLazyUpdatesWhole) {
  constexpr std::int64_t kRows = 64;
  constexpr int kPushes = 12;
  const Shape shape{kRows, 2};
  const auto store = KVStore::Create("device", *engine_);
  store->Init(1, RowSparseNDArray(shape, DType::kFloat32, Gpu(1), *engine_));
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  const auto push = [&](std::int64_t thread) {  // the i-th one: rows `thread`, 2 i and 2 i + 1
    for (std::int64_t i = 0; i < kPushes; ++i) {
      const auto gradient = RowSparseNDArray::FromVectors<float>(
          {thread, 4 + 2 * i, 5 + 2 * i}, {-1, -1, -1, -1, -1, -1}, shape, DType::kFloat32,
          Gpu(static_cast<int>(thread % 2)), *engine_);
      store->Push(1, gradient);
      if (i % 3 == 0) store->Push(1, {gradient, gradient.Copy(Cpu())});
    }
  };
  const auto pull = [&] {
    const RowSparseNDArray all(shape, DType::kFloat32, Gpu(0), *engine_);
    const RowSparseNDArray some(shape, DType::kFloat32, Gpu(1), *engine_);
    const NDArray ids =
        NDArray::FromVector<std::int64_t>({20, 21, 20}, {3}, DType::kInt64, Gpu(0), *engine_);
    for (int i = 0; i < kPushes; ++i) {
      store->Pull(1, all, 0, /*ignore_sparse=*/false);
      store->RowSparsePull(1, some, ids);
      const std::vector<float> dense = all.ToVector<float>();
      for (std::size_t at = 8; at < dense.size(); at += 4) {
        EXPECT_EQ(dense[at], dense[at + 2]);
      }
      const std::vector<float> rows = some.ToVectors<float>().rows;
      if (!rows.empty()) {
        EXPECT_EQ(rows[0], rows[3]);
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    threads.emplace_back(push, 0);
    threads.emplace_back(push, 1);
    threads.emplace_back(pull);
    threads.emplace_back(pull);
  }
  const RowSparseNDArray out(shape, DType::kFloat32, Cpu(), *engine_);
  store->Pull(1, out, 0, /*ignore_sparse=*/false);
  const auto [ids, rows] = out.ToVectors<float>();
  EXPECT_EQ(ids.size(), 2U + 2U * kPushes);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t id = ids[i];
    const float expected = id < 2 ? kPushes + 2 * (kPushes / 3) : (id - 4) / 2 % 3 == 0 ? 6 : 2;
    EXPECT_EQ(rows[2 * i], expected) << "row " << id;
  }
  EXPECT_EQ(PlaceOf(*store, 1, out), Gpu(1));
}

// Memory that is short in the midst of an update poisons the key, until Reset; what is pulled says
// so, and WaitForAll once.
TEST_F(GpuStoreTest, ALazyUpdateThatFailsPoisonsTheKeyUntilReset) {
  const auto store = KVStore::Create("device", *engine_);
  const auto rows = [&](std::int64_t first, std::int64_t count) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < count; ++i) ids.push_back(first + i);
    const std::vector<float> values(ids.size() * 256, 1);
    return RowSparseNDArray::FromVectors<float>(ids, values, Shape{2000, 256}, DType::kFloat32,
                                                Gpu(1), *engine_);
  };
  store->Init(1, rows(0, 100));
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  store->Push(1, rows(50, 10));
  const RowSparseNDArray more = rows(200, 1000);
  const RowSparseNDArray out({2000, 256}, DType::kFloat32, Cpu(), *engine_);
  engine_->WaitForAll();
  storage::Gpus::Of(*engine_).Trim(DeviceType::kGpu);
  gpu_->set_device_bytes(gpu_->bytes_used(Gpu(1)) + (1 << 17));  // enough for the count
  store->Push(1, more);
  store->Push(1, rows(0, 1));
  EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
  engine_->WaitForAll();
  gpu_->set_device_bytes(std::int64_t{1} << 40);
  store->Pull(1, out, 0, /*ignore_sparse=*/false);
  EXPECT_THROW(out.WaitToRead(), OutOfMemory);
  store->Reset(1, rows(7, 1));
  store->Push(1, rows(7, 2));
  store->Pull(1, out, 0, /*ignore_sparse=*/false);
  EXPECT_EQ(out.ToVectors<float>().row_ids, (std::vector<std::int64_t>{7, 8}));
  EXPECT_EQ(out.ToVectors<float>().rows[256], -1);
}

}  // namespace
}  // namespace heddle::kvstore_test
