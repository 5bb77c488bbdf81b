// Arrays on the GPUs of this machine. gpu_arrays_test.cc has what simulated ones can show.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/memory.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/gpus.h"
#include "storage/device_copy.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/storage/gpu_program.h"

namespace heddle::storage_test {
namespace {

using engine_test::BaseSeed;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CudaArrays : public testing::Test {
 protected:
  void SetUp() override {
    if (GpuCount() == 0) GTEST_SKIP() << WhyNoGpu(0);
  }
};

TEST_F(CudaArrays, RandomProgramsGiveTheBitsOfTheCpu) {
  std::mt19937_64 random(BaseSeed());
  for (int round = 0; round < engine_test::Rounds(4); ++round) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, round {}", BaseSeed(), round));
    Engine engine;
    RunGpuProgram(engine, GpuCount(), 200, random());
    engine.WaitForAll();
  }
  EXPECT_EQ(GetMemoryStats(DeviceType::kGpu).used, 0);
  EXPECT_EQ(GetMemoryStats(DeviceType::kCpuPinned).used, 0);
}

TEST_F(CudaArrays, MemoryIsCountedKeptAndTrimmed) {
  TrimMemory(DeviceType::kGpu);
  constexpr std::int64_t kBytes = 64 << 20;
  Engine engine;
  for (int i = 0; i < 3; ++i) {
    NDArray::Full({kBytes}, i, DType::kUInt8, Gpu(0), engine).WaitToRead();
    engine.WaitForAll();
    EXPECT_EQ(GetMemoryStats(Gpu(0)).used, 0);
    EXPECT_EQ(GetMemoryStats(Gpu(0)).cached, kBytes);
  }
  EXPECT_EQ(TrimMemory(DeviceType::kGpu), kBytes);
  EXPECT_EQ(GetMemoryStats(Gpu(0)).cached, 0);
}

TEST_F(CudaArrays, MoreThanTheDeviceHasIsAnErrorThatNamesIt) {
  Engine engine;
  const std::int64_t bytes = 2 * ListGpus().gpus[0].memory_bytes;
  const NDArray huge({bytes}, DType::kUInt8, Gpu(0), engine);
  huge.Fill(1);
  EXPECT_THAT(MessageOf<OutOfMemory>([&] { huge.WaitToRead(); }),
              AllOf(HasSubstr("gpu(0) memory"), HasSubstr(std::to_string(bytes))));
  EXPECT_THROW(engine.WaitForAll(), OutOfMemory);
  EXPECT_EQ(NDArray::Ones({10}, DType::kInt32, Gpu(0), engine).ToVector<int>(),
            std::vector<int>(10, 1));
}

TEST_F(CudaArrays, CopiesInManySlicesArriveWhole) {
  Engine engine;
  std::vector<std::int32_t> values(5 * storage::kStagingBytes);  // twenty slices
  std::mt19937 random(static_cast<unsigned>(BaseSeed()));
  for (std::int32_t& value : values) value = static_cast<std::int32_t>(random());
  const NDArray host = NDArray::FromVector(values, {static_cast<std::int64_t>(values.size())},
                                           DType::kInt32, Cpu(), engine);
  for (int id = 0; id < GpuCount(); ++id) {
    const NDArray there = host.Copy(Gpu(id)).Copy(Gpu((id + 1) % GpuCount()));
    EXPECT_EQ(there.ToVector<std::int32_t>(), values);
  }
}

TEST_F(CudaArrays, RowSparseArraysGoBetweenAllDevices) {
  Engine engine;
  std::vector<Device> devices = {Cpu(), CpuPinned(0)};
  for (int id = 0; id < GpuCount(); ++id) devices.push_back(Gpu(id));
  const Shape shape{100'000, 16};
  for (const std::int64_t rows : {10, 20'000, 0}) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < rows; ++i) ids.push_back(i * 5);
    std::vector<float> values(ids.size() * 16);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000);
    for (const Device from : devices) {
      for (const Device to : devices) {
        SCOPED_TRACE(fmt::format("{} rows, {} to {}", rows, ToString(from), ToString(to)));
        const auto there =
            RowSparseNDArray::FromVectors<float>(ids, values, shape, DType::kFloat32, from, engine);
        const RowVectors<float> found = there.Copy(to).ToVectors<float>();
        EXPECT_EQ(found.row_ids, ids);
        EXPECT_EQ(found.rows, values);
      }
    }
  }
}

}  // namespace
}  // namespace heddle::storage_test
