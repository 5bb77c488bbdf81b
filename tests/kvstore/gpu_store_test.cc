// Stores and arrays of simulated GPUs: what the tests of all stores, which run on them too
// (gpu_setups.h), do not see.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/memory.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/gpu_work.h"
#include "kvstore/optimizer/foreign.h"
#include "kvstore/optimizer/optimizer_type.h"
#include "storage/device_copy.h"
#include "storage/gpus.h"
#include "tests/kvstore/gpu_optimizers.h"
#include "tests/kvstore/gpu_store_fixture.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore {
const OptimizerType& HeavyBallType();  // heavy_ball.cc
}

namespace heddle::kvstore_test {
namespace {

// On both types of store.
class GpuStoreTypesTest : public GpuStoreTest, public testing::WithParamInterface<const char*> {
 protected:
  std::unique_ptr<KVStore> store_ = KVStore::Create(GetParam(), *engine_);
};
INSTANTIATE_TEST_SUITE_P(All, GpuStoreTypesTest, testing::Values("local", "device"));

// Every kind of memory in one push and in one pull, with casts, large enough for several slices
// where an array goes through pinned ones.
TEST_P(GpuStoreTypesTest, ArraysOfAllDevicesGoTogether) {
  const Shape shape{2 * storage::kStagingBytes / 4 + 77};
  store_->Init("w", Full(shape, 100, Gpu(1)));
  store_->Push("w", {Full(shape, 1, Cpu()), Full(shape, 2, Gpu(0)), Full(shape, 4, CpuPinned(1)),
                     Full(shape, 8, Gpu(1)), Full(shape, 16, Gpu(0))});
  std::vector<NDArray> out;
  for (const Device device : {Gpu(0), Cpu(1), CpuPinned(0), Gpu(1)}) {
    for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
      out.push_back(Full(shape, 0, device, dtype));
    }
  }
  store_->Pull("w", out);
  for (const NDArray& array : out) {
    EXPECT_EQ(array.ToVector<float>(),
              std::vector<float>(static_cast<std::size_t>(shape.size()), 31));
  }
}

TEST_P(GpuStoreTypesTest, PullsIntoPartsOfArrays) {
  store_->Init("w", Full({3}, 5, Gpu(0)));
  const NDArray whole = Full({9}, 1, Gpu(1));
  store_->Pull("w", {whole.Slice(0, 3), whole.Slice(6, 9)});
  EXPECT_EQ(whole.ToVector<float>(), (std::vector<float>{5, 5, 5, 1, 1, 1, 5, 5, 5}));
}

// From the second step on memory comes from the pools. How many arrays live at once depends on how
// the copies of a step overlap: one step may need a few more than another, not more with each.
TEST_P(GpuStoreTypesTest, StepsTakeNoFreshMemory) {
  storage::Gpus& gpus = storage::Gpus::Of(*engine_);
  const auto taken = [&] {
    std::int64_t bytes = gpu_->bytes_used(CpuPinned());
    for (int i = 0; i < kGpus; ++i) bytes += gpu_->bytes_used(Gpu(i));
    return bytes;
  };
  const std::vector<NDArray> gradients = {Full({1000}, 1, Gpu(0)), Full({1000}, 2, Gpu(1))};
  const std::vector<NDArray> weights = {Full({1000}, 0, Gpu(0)), Full({1000}, 0, Gpu(1))};
  store_->Init("w", weights[0]);
  store_->SetOptimizer(Sgd({.learning_rate = 1}));
  const auto step = [&] {
    store_->Push("w", gradients);
    store_->Pull("w", weights);
    engine_->WaitForAll();
  };
  step();
  const std::int64_t after_one = taken();
  constexpr int kSteps = 99;
  for (int i = 0; i < kSteps; ++i) step();
  EXPECT_LE(taken(), 2 * after_one) << "of one step " << after_one;
  EXPECT_EQ(gpus.Stats(DeviceType::kCpuPinned).used, 0);
  EXPECT_EQ(weights[1].ToVector<float>(), std::vector<float>(1000, -3 * (1 + kSteps)));
}

// Row-sparse gradients, outputs and row ids on all devices, against "local" with everything on
// CPUs.
TEST_P(GpuStoreTypesTest, RowSparseValuesHaveTheBitsOfTheCpus) {
  constexpr std::int64_t kRows = 500;
  const Shape shape{kRows, 3};
  std::mt19937 random(static_cast<unsigned>(TestSeed()));
  const auto rows_of = [&](unsigned one_in, DType dtype, Device device) {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (random() % one_in == 0) ids.push_back(id);
    }
    std::vector<float> values(3 * ids.size());
    for (float& value : values) value = std::uniform_real_distribution<float>(-1, 1)(random);
    return RowSparseNDArray::FromVectors<float>(ids, values, shape, dtype, device, *engine_);
  };
  const std::vector<Device> senders = {Gpu(1), Cpu(), Gpu(0), CpuPinned(1), Gpu(1)};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool optimizer : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", Name(dtype), optimizer));
      const auto on_gpus = KVStore::Create(GetParam(), *engine_);
      const auto on_cpus = KVStore::Create("local", *engine_);
      const RowSparseNDArray start = rows_of(2, dtype, Gpu(1));
      on_gpus->Init("w", start);
      on_cpus->Init("w", start.Copy(Cpu()));
      if (optimizer) {
        on_gpus->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.9}));
        on_cpus->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.9}));
      }
      for (int step = 0; step < 3; ++step) {
        std::vector<RowSparseNDArray> gpu_side, cpu_side;
        for (const Device sender : senders) {
          gpu_side.push_back(rows_of(1 + random() % 20, dtype, sender));
          cpu_side.push_back(gpu_side.back().Copy(Cpu()));
        }
        on_gpus->Push("w", gpu_side);
        on_cpus->Push("w", cpu_side);
        for (const RowSparseNDArray& array : gpu_side) array.Clear();  // the store has it
        const RowSparseNDArray expected(shape, dtype, Cpu(), *engine_);
        const std::vector<std::int64_t> ids = {7, 499, 3, 7, 250};
        for (const bool some : {true, false}) {
          const auto out = [&](Device device, DType type) {
            return RowSparseNDArray(shape, type, device, *engine_);
          };
          const std::vector<RowSparseNDArray> found = {out(Gpu(0), dtype), out(Cpu(), dtype),
                                                       out(Gpu(1), DType::kFloat64),
                                                       out(CpuPinned(0), dtype)};
          if (some) {
            const auto wanted = [&](Device device) {
              return NDArray::FromVector(ids, {5}, DType::kInt64, device, *engine_);
            };
            on_gpus->RowSparsePull("w", found, wanted(Gpu(1)));
            on_cpus->RowSparsePull("w", expected, wanted(Cpu()));
          } else {
            on_gpus->Pull("w", found, 0, /*ignore_sparse=*/false);
            on_cpus->Pull("w", expected, 0, /*ignore_sparse=*/false);
          }
          const RowVectors<float> all = expected.ToVectors<float>();
          for (const RowSparseNDArray& array : found) {
            const RowVectors<float> rows = array.ToVectors<float>();
            ASSERT_EQ(rows.row_ids, all.row_ids);
            ASSERT_EQ(rows.rows, all.rows);
          }
        }
        const NDArray dense(shape, dtype, Gpu(0), *engine_);
        on_gpus->Pull("w", dense);
        ASSERT_EQ(dense.ToVector<float>(), expected.ToVector<float>());
      }
    }
  }
}

// The device that a value of "device" lies on is seen by its updater.
TEST_F(GpuStoreTest, ValuesGoToTheGpusThatPushThemSpreadBySize) {
  const auto store = KVStore::Create("device", *engine_);
  std::vector<Device> devices(5, Cpu());
  store->SetUpdater([&](KeyRef key, const NDArray& input, const NDArray& stored) {
    EXPECT_EQ(input.device(), stored.device());
    devices[static_cast<std::size_t>(key.number())] = stored.device();
    stored += input;
  });
  const std::vector<std::int64_t> sizes = {10, 40, 30, 20};
  std::vector<std::vector<NDArray>> arrays;
  for (int key = 0; key < 4; ++key) {
    const Shape shape{sizes[static_cast<std::size_t>(key)]};
    store->Init(key, Full(shape, 1, Cpu()));  // as front ends do
    arrays.push_back({Full(shape, 1, Gpu(0)), Full(shape, 1, Gpu(1))});
  }
  const NDArray before = Full({40}, 0, Gpu(1));
  store->Pull(1, before);
  store->Push({0, 1, 2, 3}, arrays);
  EXPECT_THAT(devices, testing::ElementsAre(Gpu(0), Gpu(0), Gpu(1), Gpu(1), Cpu()));
  store->Pull({0, 1, 2, 3}, arrays);
  for (const auto& of_key : arrays) {
    for (const NDArray& array : of_key) {
      EXPECT_THAT(array.ToVector<float>(), testing::Each(3.0F));
    }
  }
  EXPECT_THAT(before.ToVector<float>(), testing::Each(1.0F));
  // One GPU alone.
  store->Init(4, Full({5}, 1, Cpu()));
  store->Push(4, Full({5}, 2, Gpu(1)));
  EXPECT_EQ(devices[4], Gpu(1));
}

// A key whose value lies on the GPU that cannot reach the others.
TEST_F(GpuStoreTest, UnlinkedGpusWorkTogether) {
  gpu_->Unlink();
  const auto store = KVStore::Create("device", *engine_);
  store->Init("w", Full({1000}, 1, Gpu(1)));
  store->Push("w", {Full({1000}, 2, Gpu(0)), Full({1000}, 3, Gpu(0))});
  const std::vector<NDArray> out = {Full({1000}, 0, Gpu(0)), Full({1000}, 0, Gpu(1))};
  store->Pull("w", out);
  for (const NDArray& array : out) EXPECT_THAT(array.ToVector<float>(), testing::Each(5.0F));
}

// What has no kernels for GPUs is refused, and nothing of the call happens.
TEST_F(GpuStoreTest, OptimizersWithoutKernelsAreRefused) {
  for (const OptimizerPtr& optimizer : {kvstore::MakeForeignOptimizer("theirs", {}),
                                        kvstore::MakeOptimizerOf(kvstore::HeavyBallType())}) {
    const std::string name(optimizer->name());
    const auto store = KVStore::Create("device", *engine_);
    const NDArray ones = Full({4, 2}, 1, Gpu(1));
    store->Init({1, 2}, {ones, Full({4, 2}, 1, Cpu())});
    store->SetOptimizer(optimizer);
    ExpectInvalid([&] { store->Push(1, ones * 2); }, {"Push", "key 1", "GPU", name});
    ExpectInvalid([&] { store->Push(2, ones * 2); }, {"Push", "key 2", "GPU", name});
    EXPECT_THAT(Pulled(*store, 1), testing::Each(1.0F));
    EXPECT_THAT(Pulled(*store, 2), testing::Each(1.0F));
  }
}

// "local" updates on CPUs whatever devices push, so it has no need of kernels.
TEST_F(GpuStoreTest, OptimizersWithoutKernelsUpdateOnCpus) {
  const auto store = KVStore::Create("local", *engine_);
  store->Init(1, Full({4, 2}, 1, Gpu(1)));
  store->SetOptimizer(kvstore::MakeOptimizerOf(kvstore::HeavyBallType(),
                                               {{"learning_rate", 0.5}, {"momentum", 0.5}}));
  for (int push = 0; push < 2; ++push) {  // m = 2, w = 0; m = 3, w = -1.5
    store->Push(1, {Full({4, 2}, 1, Gpu(0)), Full({4, 2}, 1, Gpu(1))});
  }
  EXPECT_THAT(Pulled(*store, 1), testing::Each(-1.5F));
}

// More values of a key than a launch adds: those of 16 bits are rounded once all the same, codes
// too, and the value itself may be one of them.
TEST_F(GpuStoreTest, AListMayBeLongerThanALaunchTakes) {
  std::mt19937 random(static_cast<unsigned>(TestSeed()));
  constexpr std::size_t kInputs = 2 * kvstore::kGpuInputsMax + 7;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    for (const bool compressed : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", Name(dtype), compressed));
      const auto on_gpus = KVStore::Create("device", *engine_);
      const auto on_cpus = KVStore::Create("local", *engine_);
      std::vector<NDArray> gpu_side, cpu_side;
      for (std::size_t i = 0; i < kInputs; ++i) {
        std::vector<float> values(50);
        for (float& value : values) {
          value = std::uniform_real_distribution<float>(-1, 1)(random);
        }
        cpu_side.push_back(NDArray::FromVector(values, {50}, dtype, Cpu(), *engine_));
        gpu_side.push_back(cpu_side.back().Copy(Gpu(i % 9 == 0 ? 1 : 0)));
      }
      for (KVStore* const store : {on_gpus.get(), on_cpus.get()}) {
        if (compressed) store->SetGradientCompression({.type = "2bit", .threshold = 0.25});
        store->Init("w", Full({50}, 0, Cpu(), dtype));
      }
      on_gpus->Push("w", gpu_side);
      on_cpus->Push("w", cpu_side);
      const NDArray found = Full({50}, 0, Gpu(0));
      const NDArray expected = Full({50}, 0, Cpu());
      on_gpus->Pull("w", found);
      on_cpus->Pull("w", expected);
      ASSERT_EQ(found.ToVector<float>(), expected.ToVector<float>());
    }
  }
}

// Senders on both GPUs and on CPUs, two of them on one device: the bits of "local" on the CPUs, and
// between the GPUs nothing goes but codes.
TEST_F(GpuStoreTest, GradientsAreCompressedWhereTheyLie) {
  std::mt19937 random(static_cast<unsigned>(TestSeed()));
  std::normal_distribution<float> normal(0, 0.5F);
  constexpr std::int64_t kCount = 10'001;
  const std::vector<Device> senders = {Gpu(1), Cpu(), Gpu(0), Gpu(1), Cpu(1)};
  for (const std::string type : {"1bit", "2bit"}) {
    for (const bool optimizer : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", type, optimizer));
      const auto on_gpus = KVStore::Create("device", *engine_);
      const auto on_cpus = KVStore::Create("local", *engine_);
      for (KVStore* const store : {on_gpus.get(), on_cpus.get()}) {
        store->SetGradientCompression({.type = type});
        store->Init("w", Full({kCount}, 0, Cpu()));
        if (optimizer) store->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.9}));
      }
      for (int step = 0; step < 4; ++step) {
        std::vector<NDArray> gpu_side, cpu_side;
        for (std::size_t i = 0; i < senders.size(); ++i) {
          std::vector<float> values(kCount);
          for (float& value : values) value = normal(random);
          const auto array = [&](Device device) {
            return NDArray::FromVector(values, {kCount}, DType::kFloat32, device, *engine_);
          };
          gpu_side.push_back(array(senders[i]));
          // On the CPUs each GPU is a device of its own, too.
          cpu_side.push_back(
              array(senders[i].type == DeviceType::kGpu ? Cpu(10 + senders[i].id) : senders[i]));
        }
        engine_->WaitForAll();
        const std::int64_t before = gpu_->peer_bytes();
        on_gpus->Push("w", gpu_side);
        on_cpus->Push("w", cpu_side);
        engine_->WaitForAll();
        const std::int64_t code_bytes = on_gpus->transfers().pushed_bytes / (step + 1) / 5;
        EXPECT_LE(gpu_->peer_bytes() - before, 2 * code_bytes);
        const NDArray found = Full({kCount}, 0, Gpu(0));
        const NDArray expected = Full({kCount}, 0, Cpu());
        on_gpus->Pull("w", found);
        on_cpus->Pull("w", expected);
        ASSERT_EQ(found.ToVector<float>(), expected.ToVector<float>()) << "step " << step;
      }
    }
  }
}

// A list call with many keys is a handful of ops, and of launches, and changes each key as a call
// of its own would.
TEST_F(GpuStoreTest, ListsOfKeysTakeFewOpsAndLaunches) {
  constexpr int kKeys = 161;
  std::mt19937 random(static_cast<unsigned>(TestSeed()));
  const auto on_gpu = KVStore::Create("device", *engine_);
  const auto on_cpus = KVStore::Create("local", *engine_);
  std::vector<Key> keys;
  std::vector<NDArray> gpu_arrays, cpu_arrays, gpu_out, cpu_out;
  for (int key = 0; key < kKeys; ++key) {
    const auto dtype = key % 5 == 0 ? DType::kFloat16 : DType::kFloat32;
    const Shape shape{static_cast<std::int64_t>(1 + random() % 300)};
    const float value = static_cast<float>(random() % 100) / 16;
    keys.emplace_back(key);
    gpu_arrays.push_back(Full(shape, value, Gpu(1), dtype));
    cpu_arrays.push_back(Full(shape, value, Cpu(), dtype));
    gpu_out.push_back(Full(shape, 0, Gpu(1), key % 7 == 0 ? DType::kFloat64 : dtype));
    cpu_out.push_back(Full(shape, 0, Cpu(), gpu_out.back().dtype()));
  }
  on_gpu->Init(keys, gpu_arrays);
  on_cpus->Init(keys, cpu_arrays);
  for (KVStore* const store : {on_gpu.get(), on_cpus.get()}) {
    store->SetOptimizer(Sgd({.learning_rate = 0.25, .momentum = 0.5}));
  }
  for (int step = 0; step < 3; ++step) {
    engine_->WaitForAll();
    const std::uint64_t ops = engine_->stats().pushed;
    const int launches = gpu_->launches();
    on_gpu->Push(keys, gpu_arrays);
    on_gpu->Pull(keys, gpu_out);
    EXPECT_EQ(engine_->stats().pushed - ops, 2U);
    engine_->WaitForAll();
    // Updates; copies; casts from two dtypes. At first the states, each made by its own.
    if (step > 0) {
      EXPECT_EQ(gpu_->launches() - launches, 4);
    }
    on_cpus->Push(keys, cpu_arrays);
    on_cpus->Pull(keys, cpu_out);
    for (int key = 0; key < kKeys; ++key) {
      const auto i = static_cast<std::size_t>(key);
      ASSERT_EQ(gpu_out[i].ToVector<double>(), cpu_out[i].ToVector<double>()) << "key " << key;
    }
  }
}

// Of a list, each key has its own errors: an input that failed, a value that an update has spoilt,
// and one that is not there.
TEST_F(GpuStoreTest, KeysOfAListFailAlone) {
  const auto store = KVStore::Create("device", *engine_);
  const auto ones = [&] { return Full({4, 2}, 1, Gpu(0)); };
  const auto failed = [&] {
    NDArray bad = ones();
    engine_->Push({.name = "fail", .writes = {bad.var()}}, [] { throw std::runtime_error("bad"); });
    return bad;
  };
  const std::vector<Key> keys = {Key(1), Key(2), Key(3), Key(4)};
  store->Push(std::vector<Key>{Key(1), Key(2), Key(3)}, {ones(), ones(), ones()});
  store->Push(keys, {ones() * 2, failed(), ones() * 2, failed()});  // the last makes no value
  std::vector<NDArray> out = {ones(), ones(), ones(), ones()};
  store->Pull(keys, out);
  EXPECT_THAT(out[0].ToVector<float>(), testing::Each(2.0F));
  EXPECT_THAT([&] { out[1].WaitToRead(); }, testing::ThrowsMessage<std::runtime_error>("bad"));
  EXPECT_THAT(out[2].ToVector<float>(), testing::Each(2.0F));
  EXPECT_THAT([&] { out[3].WaitToRead(); }, testing::ThrowsMessage<std::runtime_error>("bad"));
  store->Push(keys, {ones() * 3, ones() * 4, ones() * 5, ones() * 6});  // cures them
  store->Pull(keys, out);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_THAT(out[i].ToVector<float>(), testing::Each(3.0F + static_cast<float>(i)));
  }
  // An update that finds no memory for its state spoils its key, until Reset.
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Push(std::vector<Key>{Key(1), Key(3), Key(4)}, {ones(), ones(), ones()});
  const std::vector<NDArray> gradients = {ones(), ones(), ones(), ones()};
  for (const NDArray& gradient : gradients) gradient.WaitToRead();
  store->Pull(keys, out);
  for (const NDArray& array : out) array.WaitToRead();
  storage::Gpus::Of(*engine_).Trim(DeviceType::kGpu);
  gpu_->set_device_bytes(0);
  store->Push(keys, gradients);
  store->Pull(keys, out);
  EXPECT_THAT(out[0].ToVector<float>(), testing::Each(0.5F));
  EXPECT_THROW(out[1].WaitToRead(), OutOfMemory);
  EXPECT_THAT(out[2].ToVector<float>(), testing::Each(2.5F));
  EXPECT_THAT(out[3].ToVector<float>(), testing::Each(3.5F));
  gpu_->set_device_bytes(std::int64_t{1} << 40);
  store->Reset(2, ones());
  store->Pull(keys, out);
  EXPECT_THAT(out[1].ToVector<float>(), testing::Each(1.0F));
}

// A program that completes one key's input only when it has read another key's output. That the
// keys stand in one list must not lock it out, whatever of the second key is still in use.
TEST_F(GpuStoreTest, KeysOfAListDoNotWaitForEachOther) {
  constexpr std::chrono::seconds kSoon{20};
  const std::vector<Key> keys = {Key(1), Key(2), Key(3)};
  enum Busy { kGradient, kFarGradient, kOutput, kValue };
  for (const Busy busy : {kGradient, kFarGradient, kOutput, kValue}) {
    SCOPED_TRACE(busy);
    const auto store = KVStore::Create("device", *engine_);
    std::vector<NDArray> start, out, early;
    std::vector<std::vector<NDArray>> gradients;
    for (int key = 1; key <= 3; ++key) {
      start.push_back(Full({4, 2}, 0, Gpu(0)));
      gradients.push_back({Full({4, 2}, key, Gpu(0)), Full({4, 2}, key, Gpu(1))});
      out.push_back(Full({4, 2}, 0, Gpu(0)));
      early.push_back(Full({4, 2}, 0, Gpu(0)));
    }
    store->Push(keys, start);  // all values lie on gpu(0)
    engine_->WaitForAll();
    std::unique_ptr<Hold> hold;
    switch (busy) {
      case kGradient:
        hold = std::make_unique<Hold>(*engine_, VarList(), VarList{gradients[1][0].var()});
        break;
      case kFarGradient:
        hold = std::make_unique<Hold>(*engine_, VarList(), VarList{gradients[1][1].var()});
        break;
      case kOutput:
        hold = std::make_unique<Hold>(*engine_, VarList{out[1].var()}, VarList());
        break;
      case kValue:  // by a pull that still waits for its output
        hold = std::make_unique<Hold>(*engine_, VarList{early[1].var()}, VarList());
        store->Pull(keys, early);
        break;
    }
    store->Push(keys, gradients);
    store->Pull(keys, out);
    out[0].WaitToRead(kSoon);
    out[2].WaitToRead(kSoon);
    if (busy != kOutput) {
      EXPECT_THROW(out[1].WaitToRead(std::chrono::milliseconds(0)), TimeoutError);
    }
    hold->Release();
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_THAT(out[i].ToVector<float>(), testing::Each(2.0F * static_cast<float>(i + 1)));
    }
  }
}

// They wait for no copies, nor those that do for them.
TEST_F(GpuStoreTest, KeysThatNeedNoCopiesHaveAnOpOfTheirOwn) {
  const auto store = KVStore::Create("device", *engine_);
  const std::vector<Key> keys = {Key(1), Key(2), Key(3), Key(4)};
  std::vector<NDArray> start, gradients;
  for (int key = 1; key <= 4; ++key) {
    start.push_back(Full({4, 2}, 0, Gpu(0)));
    gradients.push_back(Full({4, 2}, key, Gpu(key % 2)));
  }
  store->Push(keys, start);
  engine_->WaitForAll();
  const std::uint64_t ops = engine_->stats().pushed;
  store->Push(keys, gradients);
  EXPECT_EQ(engine_->stats().pushed - ops, 2U + 2U) << "copies, and ops for two keys each";
  for (int key = 1; key <= 4; ++key) {
    EXPECT_THAT(Pulled(*store, key), testing::Each(static_cast<float>(key)));
  }
}

// Another thread's push has given a key a value of another kind, and waits for room before it is
// queued. Whoever finds the value first queues it, and it waits for a gradient: the other keys of a
// list must not.
TEST_F(GpuStoreTest, KeysOfAListDoNotWaitForAnotherThreadsChangeOfKind) {
  constexpr std::chrono::seconds kSoon{20};
  EngineOptions options = engine_->options();
  options.max_pending_ops = 4;
  Engine engine(options);
  const auto full = [&](Scalar value) {
    return NDArray::Full({4, 2}, value, DType::kFloat32, Gpu(0), engine);
  };
  const auto store = KVStore::Create("device", engine);
  store->Init({1, 2}, {full(0), RowSparseNDArray({4, 2}, DType::kFloat32, Gpu(0), engine)});
  const NDArray late = full(7);
  const std::vector<NDArray> values = {full(1), full(2)}, out = {full(0), full(0)};
  engine.WaitForAll();
  Hold held(engine, VarList(), VarList{late.var()});
  for (int i = 0; i < 8; ++i) {  // more than there is room for
    const NoWaitScope no_wait;
    engine.Push({.name = "reads", .reads = {late.var()}}, [] {});
  }
  const std::int64_t before = store->transfers().pushed_bytes;
  std::thread other([&] { store->Push(2, late); });
  while (store->transfers().pushed_bytes == before) std::this_thread::yield();
  {
    const NoWaitScope no_wait;
    store->Push({1, 2}, values);
    store->Pull({1, 2}, out);
  }
  EXPECT_NO_THROW(out[0].WaitToRead(kSoon));
  EXPECT_THROW(out[1].WaitToRead(std::chrono::milliseconds(0)), TimeoutError);
  held.Release();
  other.join();
  EXPECT_THAT(out[0].ToVector<float>(), testing::Each(1.0F));
  EXPECT_THAT(out[1].ToVector<float>(), testing::Each(2.0F));
}

// A program that runs ahead of its GPU: each step waits for those before it, in which all keys went
// together.
TEST_F(GpuStoreTest, StepsThatRunAheadTakeTwoOpsEach) {
  constexpr int kKeys = 30, kSteps = 40;
  const auto store = KVStore::Create("device", *engine_);
  std::vector<Key> keys;
  std::vector<NDArray> values, gradients, out;
  std::vector<VarRef> gradient_vars;
  for (int key = 0; key < kKeys; ++key) {
    keys.emplace_back(key);
    values.push_back(Full({4, 2}, 0, Gpu(0)));
    gradients.push_back(Full({4, 2}, key, Gpu(0)));
    out.push_back(Full({4, 2}, 0, Gpu(0)));
    gradient_vars.emplace_back(gradients.back().var());
  }
  store->Init(keys, values);
  store->SetOptimizer(Sgd({.learning_rate = 1}));
  engine_->WaitForAll();
  Hold backward(*engine_, {}, gradient_vars);
  const std::uint64_t ops = engine_->stats().pushed;
  for (int step = 0; step < kSteps; ++step) {
    store->Push(keys, gradients);
    store->Pull(keys, out);
  }
  EXPECT_EQ(engine_->stats().pushed - ops, 2U * kSteps);
  backward.Release();
  for (int key = 0; key < kKeys; ++key) {
    EXPECT_THAT(out[static_cast<std::size_t>(key)].ToVector<float>(),
                testing::Each(static_cast<float>(-kSteps * key)));
  }
}

// Keys that wait for one op share theirs: it holds up all of them alike.
TEST_F(GpuStoreTest, KeysThatWaitForTheSameGoTogether) {
  const auto store = KVStore::Create("device", *engine_);
  const std::vector<Key> keys = {Key(1), Key(2), Key(3)};
  std::vector<NDArray> arrays;
  for (int key = 1; key <= 3; ++key) arrays.push_back(Full({4, 2}, key, Gpu(0)));
  store->Init(keys, arrays);
  engine_->WaitForAll();
  Hold backward(*engine_, {}, {arrays[0].var(), arrays[1].var(), arrays[2].var()});
  const std::uint64_t ops = engine_->stats().pushed;
  store->Push(keys, arrays);
  store->Pull(keys, arrays);
  EXPECT_EQ(engine_->stats().pushed - ops, 2U);
  backward.Release();
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_THAT(arrays[i].ToVector<float>(), testing::Each(static_cast<float>(i + 1)));
  }
}

// Of an array that several keys of a list are pulled to, the last one wins.
TEST_F(GpuStoreTest, OutputsOfSeveralKeysKeepTheirOrder) {
  const auto store = KVStore::Create("device", *engine_);
  std::vector<Key> keys;
  std::vector<NDArray> values;
  for (int key = 0; key < 9; ++key) {
    keys.emplace_back(key);
    values.push_back(Full({3}, key, Gpu(key % kGpus)));
  }
  store->Init(keys, values);
  const NDArray out = Full({3}, 77, Gpu(0));
  store->Pull(keys, std::vector<NDArray>(keys.size(), out));
  EXPECT_THAT(out.ToVector<float>(), testing::Each(8.0F));
}

// Each optimizer on "device" with values on GPUs, against "local" with values on CPUs: the same
// bits, with and without float32 copies, through the end of the states' file.
TEST_F(GpuStoreTest, OptimizersGiveTheBitsOfTheCpus) {
  std::mt19937 random(static_cast<unsigned>(TestSeed()));
  const Shape shape{2, 5000};  // several blocks of norms, and a rest, also of a row
  const auto values = [&] {
    std::uniform_real_distribution<float> value(-1, 1);
    std::vector<float> all(10000);
    for (float& v : all) v = value(random);
    return all;
  };
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  for (const std::string_view name : GpuOptimizerNames()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(fmt::format("{}, {}", name, Name(dtype)));
      const auto make = [&] {
        std::vector<std::pair<std::string_view, double>> wanted;
        for (const auto& [parameter, value] : MakeOptimizer(name)->Parameters()) {
          if (parameter == "momentum") wanted.emplace_back(parameter, 0.9);
          if (parameter == "multi_precision") wanted.emplace_back(parameter, 1);
        }
        return MakeOptimizer(name, wanted);
      };
      const auto array = [&](const std::vector<float>& of, Device device) {
        return NDArray::FromVector(of, shape, dtype, device, *engine_);
      };
      const auto on_gpus = KVStore::Create("device", *engine_);
      const auto on_cpus = KVStore::Create("local", *engine_);
      const std::vector<float> start = values();
      on_gpus->Init("w", array(start, Gpu(1)));
      on_cpus->Init("w", array(start, Cpu()));
      on_gpus->SetOptimizer(make());
      on_cpus->SetOptimizer(make());
      for (int step = 0; step < 3; ++step) {
        const std::vector<float> a = values(), b = values();
        on_gpus->Push("w", {array(a, Gpu(0)), array(b, Gpu(1))});
        on_cpus->Push("w", {array(a, Cpu()), array(b, Cpu())});
        if (step != 1) continue;
        on_gpus->SaveOptimizerStates(file);
        on_gpus->LoadOptimizerStates(file);
      }
      const NDArray expected(shape, dtype, Cpu(), *engine_);
      const NDArray found(shape, dtype, Gpu(0), *engine_);
      on_cpus->Pull("w", expected);
      on_gpus->Pull("w", found);
      ASSERT_EQ(found.ToVector<float>(), expected.ToVector<float>());
    }
  }
}

}  // namespace
}  // namespace heddle::kvstore_test
