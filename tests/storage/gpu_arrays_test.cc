// Arrays on simulated GPUs: their memory, their copies, what is refused. A simulated device ends
// the process if a block is freed or given out again before its last op, or if the host touches it.
#include "tests/storage/gpu_arrays.h"

#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/files.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/device_copy.h"
#include "storage/dlpack.h"
#include "storage/gpus.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/storage/gpu_program.h"
#include "tools/testing/temp_folder.h"

namespace heddle::storage_test {
namespace {

using engine_test::BaseSeed;
using engine_test::kSoon;
using engine_test::SimGpu;
using storage::Gpus;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kLarge = storage::kStagingBytes + 12345;  // bytes, in two slices
INSTANTIATE_TEST_SUITE_P(All, GpuArrays, testing::ValuesIn(engine_test::OneConfigOfEachKind()),
                         engine_test::ConfigLabel);

TEST_P(GpuArrays, RandomProgramsGiveTheBitsOfTheCpu) {
  std::mt19937_64 random(BaseSeed());
  for (int round = 0; round < engine_test::Rounds(4); ++round) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, round {}", BaseSeed(), round));
    const auto gpu = std::make_shared<SimGpu>(kDevices, random());
    if (round % 2 == 1) gpu->Unlink();
    EngineOptions options = GetParam().options;
    options.gpu_driver = gpu;
    options.check_access = round % 3 == 0;
    Engine engine(options);
    Gpus& gpus = Gpus::Of(engine);
    // "system" gives blocks back at once: the device sees it if one is freed too early.
    const MemoryOptions memory{.allocator = round % 4 < 2 ? "system" : "pool"};
    gpus.Configure(DeviceType::kGpu, memory);
    gpus.Configure(DeviceType::kCpuPinned, memory);
    RunGpuProgram(engine, kDevices, 40, random());
    engine.WaitForAll();
    for (const DeviceType type : {DeviceType::kGpu, DeviceType::kCpuPinned}) {
      EXPECT_EQ(gpus.Stats(type).used, 0);
      gpus.Trim(type);
      EXPECT_EQ(gpus.Stats(type).cached, 0);
    }
    for (const Device device : {Gpu(0), Gpu(1), CpuPinned()}) {
      EXPECT_EQ(gpu->bytes_used(device), 0) << ToString(device);
    }
  }
}

// --- other libraries' memory ---------------------------------------------------------------------

TEST_P(GpuArrays, ATensorOfAnotherLibraryIsUsedWhereItLiesUntilItsLastOpIsDone) {
  void* const block = gpu_->AllocateDevice(1, kMiB);
  std::int64_t shape = kMiB / 4 - 3;
  const storage::DLTensor tensor{.data = block,
                                 .device = {storage::kDLCuda, 1},
                                 .ndim = 1,
                                 .dtype = {storage::kDLFloat, 32, 1},
                                 .shape = &shape,
                                 .strides = nullptr,
                                 .byte_offset = 12};
  std::atomic<bool> released = false;
  NDArray array = storage::ImportTensor(
      tensor, std::nullopt,
      [&] {
        gpu_->FreeDevice(1, block);  // ends the process if something issued still uses it
        released = true;
      },
      *engine_);
  EXPECT_EQ(array.device(), Gpu(1));
  EXPECT_EQ(array.data(), static_cast<std::byte*>(block) + 12);
  storage::DLManagedTensor* const exported = storage::ExportTensor<storage::DLManagedTensor>(array);
  EXPECT_EQ(exported->tensor.data, array.data());
  EXPECT_EQ(exported->tensor.device.type, storage::kDLCuda);
  EXPECT_EQ(exported->tensor.device.id, 1);
  array.Fill(3);
  array *= 2;
  const NDArray near = array.Copy(Gpu(0));
  const NDArray host = array.Copy(Cpu());
  array = NDArray();
  EXPECT_FALSE(released) << "another library has it";
  exported->deleter(exported);
  EXPECT_EQ(host.ToVector<float>(), std::vector<float>(static_cast<std::size_t>(shape), 6));
  EXPECT_EQ(near.ToVector<float>(), host.ToVector<float>());
  engine_->WaitForAll();
  EXPECT_TRUE(released);
  EXPECT_EQ(Stats(Gpu(1)).used, 0);
}

TEST_P(GpuArrays, AGivenTensorsMemoryWaitsForWhatItsUserHasIssued) {
  NDArray array = NDArray::Full({1000}, 1, DType::kFloat32, Gpu(1), *engine_);
  array.WaitToWrite();
  storage::DLManagedTensor* const exported = storage::ExportTensor<storage::DLManagedTensor>(array);
  const internal::GpuDriver::Context outer = gpu_->Enter(1);
  const internal::GpuDriver::Stream stream = gpu_->NewStream(/*urgent=*/false, 0);
  std::atomic<bool> may_end = false;
  gpu_->LaunchOn({1, stream}, {exported->tensor.data}, {4000}, [&](const auto&) {
    while (!may_end) std::this_thread::yield();
  });
  gpu_->Leave(outer);
  array = NDArray();
  std::atomic<bool> released = false;
  std::thread user([&] {
    exported->deleter(exported);
    released = true;
  });
  while (gpu_->awaited() == 0 && !released) std::this_thread::yield();
  EXPECT_FALSE(released);
  EXPECT_GT(Stats(Gpu(1)).used, 0);
  may_end = true;
  user.join();
  engine_->WaitForAll();
  EXPECT_EQ(Stats(Gpu(1)).used, 0);
  gpu_->Free(1, stream);
}

TEST_P(GpuArrays, TensorsElsewhereAreRefusedAndNotReleased) {
  float value = 0;
  std::int64_t shape = 1;
  const auto error_of = [&](storage::DLDevice from, std::optional<Device> to) {
    const storage::DLTensor tensor{.data = &value,
                                   .device = from,
                                   .ndim = 1,
                                   .dtype = {storage::kDLFloat, 32, 1},
                                   .shape = &shape,
                                   .strides = nullptr,
                                   .byte_offset = 0};
    return MessageOf<InvalidArgument>([&] {
      storage::ImportTensor(
          tensor, to, [] { FAIL() << "released"; }, *engine_);
    });
  };
  EXPECT_THAT(error_of({storage::kDLCuda, 2}, std::nullopt), HasSubstr("gpu(2): there are 2"));
  EXPECT_THAT(error_of({storage::kDLCuda, 0}, Gpu(1)),
              AllOf(HasSubstr("expected gpu(0)"), HasSubstr("got gpu(1)")));
  EXPECT_THAT(error_of({storage::kDLCuda, 0}, Cpu()), HasSubstr("expected gpu(0)"));
  EXPECT_THAT(error_of({storage::kDLCpu, 0}, Gpu(0)), HasSubstr("got gpu(0)"));
  EXPECT_THAT(error_of({10, 0}, std::nullopt), HasSubstr("got DLPack device (10, 0)"));  // ROCm
}

// --- memory --------------------------------------------------------------------------------------

TEST_P(GpuArrays, MemoryIsCountedKeptAndTrimmedByDevice) {
  for (const Device device : {Gpu(1), CpuPinned(1)}) {
    NDArray array = Bytes(kMiB, device);
    EXPECT_EQ(Stats(device).used, 0) << "taken before the first op";
    array.Fill(1);
    array.WaitToWrite();
    EXPECT_EQ(Stats(device).used, kMiB);
    EXPECT_EQ(gpu_->bytes_used(device), kMiB);
    const void* const address = array.data();
    array = NDArray();
    engine_->WaitForAll();
    EXPECT_EQ(Stats(device).used, 0);
    EXPECT_EQ(Stats(device).cached, kMiB);
    EXPECT_EQ(Stats(device).peak, kMiB);
    array = Filled(kMiB - 5, 2, device);
    array.WaitToWrite();
    EXPECT_EQ(array.data(), address) << "a cached block of the size is taken again";
    array = NDArray();
    engine_->WaitForAll();
    EXPECT_EQ(Pool(device).Trim(), kMiB);
    EXPECT_EQ(Stats(device).cached, 0);
    EXPECT_EQ(gpu_->bytes_used(device), 0);
  }
  EXPECT_EQ(Stats(Gpu(0)).peak, 0);
}

TEST_P(GpuArrays, ADroppedArrayKeepsItsMemoryUntilItsLastOpIsDone) {
  NDArray array = Filled(kMiB, 7, Gpu(0));
  array.WaitToWrite();
  const void* const address = array.data();
  const Var gate = engine_->NewVar("gate");
  engine_test::Hold hold(*engine_, {.name = "hold", .writes = {gate}});
  engine_->PushGpu({.name = "last", .reads = {gate, array.var()}, .device = Gpu(0)},
                   [array](GpuStream) {});
  array = NDArray();
  const NDArray other = Filled(kMiB, 8, Gpu(0));
  other.WaitToWrite();
  EXPECT_NE(other.data(), address);
  EXPECT_EQ(Stats(Gpu(0)).used, 2 * kMiB);
  hold.Release();
  engine_->WaitForAll();
  EXPECT_EQ(Stats(Gpu(0)).used, kMiB);
  const NDArray third = Filled(kMiB, 9, Gpu(0));
  third.WaitToWrite();
  EXPECT_EQ(third.data(), address);
}

TEST_P(GpuArrays, TheCapOfADeviceIsItsOwnAndNamed) {
  Pool(Gpu(1)).set_bytes_max(4 * kMiB);
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { Bytes(5 * kMiB, Gpu(1)); }),
              AllOf(HasSubstr("gpu(1)"), HasSubstr(std::to_string(5 * kMiB)),
                    HasSubstr(std::to_string(4 * kMiB))));
  NDArray first = Filled(3 * kMiB, 1, Gpu(1));
  first.WaitToWrite();
  const NDArray second = Filled(2 * kMiB, 2, Gpu(1));
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { second.WaitToRead(); }),
              AllOf(HasSubstr("gpu(1) memory"), HasSubstr(std::to_string(2 * kMiB)),
                    HasSubstr(std::to_string(3 * kMiB)), HasSubstr(std::to_string(4 * kMiB))));
  EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
  EXPECT_EQ(Filled(5 * kMiB, 3, Gpu(0)).ToVector<int>()[0], 3);
  first = NDArray();
  second.Fill(2);  // the block of `first`, of another size, makes room
  EXPECT_EQ(second.ToVector<int>().back(), 2);
  EXPECT_EQ(Stats(Gpu(1)).used, 2 * kMiB);
}

TEST_P(GpuArrays, AnArrayWhoseBlockCanNeverFitIsRefusedAtOnce) {
  Pool(Gpu(1)).set_bytes_max(4 * kMiB + kMiB / 4);
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { Bytes(4 * kMiB + 1, Gpu(1)); }),
              AllOf(HasSubstr("4194305"), HasSubstr("4718592"), HasSubstr("4456448")));
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { (void)Pool(Gpu(1)).Allocate(4 * kMiB + 1); }),
              AllOf(HasSubstr("4194305"), HasSubstr("4718592"), HasSubstr("4456448")));
  EXPECT_EQ(Filled(4 * kMiB, 3, Gpu(1)).ToVector<std::uint8_t>().back(), 3);
}

TEST_P(GpuArrays, ADeviceWithoutMoreMemorySaysSoOnceNothingIsCached) {
  gpu_->set_device_bytes(4 * kMiB);
  NDArray first = Filled(3 * kMiB, 1, Gpu(0));
  first.WaitToWrite();
  const NDArray second = Filled(2 * kMiB, 2, Gpu(0));
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { second.WaitToRead(); }),
              AllOf(HasSubstr("gpu(0) memory"), HasSubstr("no more")));
  EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
  EXPECT_EQ(Stats(Gpu(0)).used, 3 * kMiB);
  first = NDArray();
  second.Fill(2);
  EXPECT_EQ(second.ToVector<int>().back(), 2);
}

TEST_P(GpuArrays, TheAllocatorIsChosenBeforeTheFirstArray) {
  Gpus& gpus = Gpus::Of(*engine_);
  EXPECT_THROW(gpus.Configure(DeviceType::kGpu, {.allocator = "slab"}), InvalidArgument);
  EXPECT_THROW(gpus.Configure(DeviceType::kGpu, {.bytes_max = 0}), InvalidArgument);
  gpus.Configure(DeviceType::kGpu, {.allocator = "system"});
  Filled(kMiB, 1, Gpu(1)).WaitToWrite();
  engine_->WaitForAll();
  EXPECT_EQ(Stats(Gpu(1)).cached, 0);
  EXPECT_EQ(Stats(Gpu(1)).peak, kMiB);
  EXPECT_EQ(gpu_->bytes_used(Gpu(1)), 0);
  EXPECT_THROW(gpus.Configure(DeviceType::kGpu, {.allocator = "pool"}), InvalidState);
  gpus.Configure(DeviceType::kGpu, {.allocator = "system", .bytes_max = kMiB});
  EXPECT_EQ(gpus.Stats(DeviceType::kGpu).bytes_max, kMiB);
  EXPECT_EQ(Stats(Gpu(0)).bytes_max, kMiB);
}

TEST_P(GpuArrays, OutliveTheirEngineAndItsDevices) {
  NDArray array = Filled(100, 1, Gpu(0));
  array.WaitToWrite();
  engine_.reset();
  const std::weak_ptr<SimGpu> watch = gpu_;
  gpu_.reset();
  EXPECT_FALSE(watch.expired());
  array = NDArray();
  EXPECT_TRUE(watch.expired());
}

TEST(DevicePools, CountRightWhenManyThreadsUseThem) {
  const auto gpu = std::make_shared<SimGpu>(1, BaseSeed());
  Gpus gpus(*gpu);
  storage::Allocator& pool = gpus.Pool(Gpu(0));
  pool.set_bytes_max(40'000);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937 random(static_cast<unsigned>(BaseSeed()) + t);
      for (int i = 0; i < 300; ++i) {
        const std::int64_t bytes = 1 + random() % 9'000;  // four of the largest fit
        void* const block = pool.Allocate(bytes);
        if (random() % 50 == 0) pool.Trim();
        pool.Free(block, bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.stats().used, 0);
  EXPECT_EQ(pool.stats().cached, gpu->bytes_used(Gpu(0)));
  EXPECT_LE(pool.stats().peak, 40'000);
  pool.Trim();
  EXPECT_EQ(gpu->bytes_used(Gpu(0)), 0);
}

// --- copies --------------------------------------------------------------------------------------

TEST(StagingPlans, CoverEveryElementOnceInFewEvenSlices) {
  std::mt19937_64 random(BaseSeed());
  for (int i = 0; i < 2000; ++i) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, {}", BaseSeed(), i));
    const std::int64_t element = std::int64_t{1} << random() % 4;
    const auto count = static_cast<std::int64_t>(random() >> (random() % 40 + 22));
    const storage::StagingPlan plan = storage::PlanStaging(count, element);
    std::int64_t covered = 0;
    for (std::int64_t k = 0; k < std::min<std::int64_t>(plan.slices, 100); ++k) {
      ASSERT_EQ(plan.begin(k), covered);
      ASSERT_GT(plan.size(k), 0);
      ASSERT_LE(plan.size(k) * element, storage::kStagingBytes);
      ASSERT_EQ(plan.begin(k) * element % 256, 0);
      covered += plan.size(k);
    }
    if (plan.slices <= 100) {
      ASSERT_EQ(covered, count);
    }
    ASSERT_LE(plan.slices, (count * element - 1) / storage::kStagingBytes + 2);
  }
  EXPECT_EQ(storage::PlanStaging(0, 4).slices, 0);
  EXPECT_EQ(storage::PlanStaging(storage::kStagingBytes / 4, 4).slices, 1);
  EXPECT_EQ(storage::PlanStaging(storage::kStagingBytes / 4 + 1, 4).slices, 2);
}

TEST_P(GpuArrays, ACopyOfAnySizeIsOneReadAndOneWrite) {
  for (const bool linked : {true, false}) {
    if (!linked) gpu_->Unlink();
    for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{100}, kLarge}) {
      for (const Device from : {Cpu(0), CpuPinned(0), Gpu(linked ? 0 : 1)}) {
        for (const Device to : {Cpu(0), CpuPinned(1), Gpu(linked ? 1 : 0)}) {
          SCOPED_TRACE(fmt::format("{} bytes from {} to {}", bytes, ToString(from), ToString(to)));
          const NDArray src = Filled(bytes, 5, from);
          const NDArray dst = Filled(bytes, 6, to);
          src.CopyTo(dst);
          dst.Slice(0, bytes / 2).Fill(1);
          std::vector<std::uint8_t> expected(static_cast<std::size_t>(bytes), 5);
          std::fill_n(expected.begin(), bytes / 2, 1);
          EXPECT_EQ(dst.ToVector<std::uint8_t>(), expected);
          EXPECT_EQ(engine_->version(dst.var()), 3u);
          EXPECT_EQ(engine_->version(src.var()), 1u);
        }
      }
    }
  }
}

TEST_P(GpuArrays, StagingUsesBoundedPinnedMemory) {
  const NDArray host = Filled(10 * storage::kStagingBytes, 5, Cpu());
  EXPECT_EQ(host.Copy(Gpu(0)).ToVector<std::uint8_t>(), host.ToVector<std::uint8_t>());
  EXPECT_LE(Gpus::Of(*engine_).Stats(DeviceType::kCpuPinned).peak,
            2 * storage::kStagingSlots * storage::kStagingBytes);
}

TEST_P(GpuArrays, AnErrorOfTheSourceGoesOnThroughEveryKindOfCopy) {
  for (const std::int64_t bytes : {std::int64_t{100}, kLarge}) {
    for (const Device from : {Cpu(), Gpu(0)}) {
      const NDArray src = Bytes(bytes, from);
      if (from.type == DeviceType::kGpu) {
        engine_->PushGpu({.name = "bad", .writes = {src.var()}, .device = from},
                         [](GpuStream) { throw std::runtime_error("bad"); });
      } else {
        engine_->Push({.name = "bad", .writes = {src.var()}},
                      [] { throw std::runtime_error("bad"); });
      }
      const NDArray dst = src.Copy(Gpu(1)).Copy(Cpu());
      EXPECT_THROW(dst.WaitToRead(), std::runtime_error);
      EXPECT_EQ(engine_->FailureOf(dst.var())->op, "bad");
      EXPECT_THROW(engine_->WaitForAll(), std::runtime_error);
      engine_->WaitForAll();  // once
    }
  }
}

TEST_P(GpuArrays, ACopyWithoutPinnedMemoryFailsAndLeavesTheRestAlone) {
  const NDArray src = Filled(kLarge, 5, Cpu());
  Pool(CpuPinned(0)).set_bytes_max(storage::kStagingBytes + 1);  // two slots of four
  const NDArray dst = Filled(kLarge, 6, Gpu(0));
  src.CopyTo(dst);
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { dst.WaitToRead(); }), HasSubstr("cpu_pinned(0) memory"));
  EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
  engine_->WaitForAll();  // one copy, one error
  Pool(CpuPinned(0)).set_bytes_max(std::numeric_limits<std::int64_t>::max());
  src.CopyTo(dst);
  EXPECT_EQ(dst.ToVector<std::uint8_t>(), std::vector<std::uint8_t>(kLarge, 5));
}

TEST_P(GpuArrays, ACopyToADeviceThatFailsEnds) {
  const NDArray src = Filled(kLarge, 5, Cpu());
  const NDArray dst = Filled(kLarge, 6, Gpu(0));
  const Var x = engine_->NewVar("x");
  engine_->PushGpu({.name = "bad kernel", .writes = {x}, .device = Gpu(0)},
                   [](GpuStream stream) { SimGpu::Launch(stream, [] { throw 1; }); });
  EXPECT_THROW(engine_->WaitForVar(x, kSoon), CudaError);
  src.CopyTo(dst);
  EXPECT_THROW(dst.WaitToRead(kSoon), CudaError);
  EXPECT_EQ(src.Copy(Gpu(1)).ToVector<std::uint8_t>(), std::vector<std::uint8_t>(kLarge, 5));
}

TEST_P(GpuArrays, AreSavedAndLoaded) {
  const tools::TempFolder folder;
  const std::string file = folder / "arrays.safetensors";
  const NDArray array = NDArray::Arange(5000, DType::kInt32, Gpu(1), *engine_);
  SaveArrays(file, {{"a", array}});
  const NDArray loaded = LoadArrays(file, Gpu(0), *engine_).Find("a");
  EXPECT_EQ(loaded.device(), Gpu(0));
  EXPECT_EQ(loaded.ToVector<int>(), array.ToVector<int>());
}

// --- what is refused -----------------------------------------------------------------------------

TEST_P(GpuArrays, WhatGpusDoNotHaveIsRefusedByNameAndPushesNothing) {
  const NDArray a = NDArray::Ones({4, 4}, DType::kFloat32, Gpu(1), *engine_);
  const NDArray on_cpu = NDArray::Ones({4, 4}, DType::kFloat32, Cpu(), *engine_);
  engine_->WaitForAll();
  const std::uint64_t pushed = engine_->stats().pushed;
  const auto refused = [&](const char* name, auto&& call) {
    EXPECT_THAT(MessageOf<InvalidArgument>(call), AllOf(HasSubstr(name), HasSubstr("gpu(1)")));
  };
  refused("Add", [&] { a += on_cpu; });
  refused("Sum", [&] { Sum({a, on_cpu}, a); });
  const RowSparseNDArray rows({4, 4}, DType::kFloat32, Gpu(1), *engine_);
  const std::vector<std::int64_t> ids = {1};
  const RowSparseNDArray cpu_rows({4, 4}, DType::kFloat32, Cpu(), *engine_);
  refused("Add", [&] { rows += cpu_rows; });
  refused("Add", [&] { cpu_rows += rows; });
  refused("Sum", [&] { Sum({rows, cpu_rows}, rows); });
  refused("Sum", [&] { Sum({rows}, cpu_rows); });
  refused("SetRowIds", [&] { rows.SetRowIds(ids); });
  EXPECT_EQ(engine_->stats().pushed, pushed);
}

TEST_P(GpuArrays, TheBodyOfACpuOpDoesNotGetAddressesOfAGpu) {
  const NDArray a = Filled(10, 1, Gpu(1));
  engine_->Push({.name = "peek", .reads = {a.var()}}, [a] { a.const_data(); });
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { engine_->WaitForAll(); }),
              AllOf(HasSubstr("'peek'"), HasSubstr("gpu(1)")));
}

TEST_P(GpuArrays, DevicesThatAreNotThereAreNamed) {
  for (const Device device : {Gpu(kDevices), Gpu(-1), CpuPinned(kDevices)}) {
    EXPECT_THAT(MessageOf<InvalidArgument>([&] { Bytes(1, device); }),
                AllOf(HasSubstr(std::to_string(device.id)), HasSubstr("there are 2")));
  }
}

}  // namespace
}  // namespace heddle::storage_test
