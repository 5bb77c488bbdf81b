// Row-sparse arrays on simulated GPUs, which end the process as gpu_arrays_test.cc says.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/files.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/gpus.h"
#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"
#include "tests/storage/gpu_arrays.h"
#include "tools/testing/temp_folder.h"

namespace heddle::storage_test {
namespace {

using engine_test::BaseSeed;
using storage::Gpus;
using ::testing::AllOf;
using ::testing::HasSubstr;

class GpuRowSparse : public GpuArrays {
 protected:
  // `count` rows of random ids, in random order; values that all dtypes of the tests hold.
  RowSparseNDArray Rows(std::int64_t count, Device device, DType dtype = DType::kFloat32) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(kShape[0]));
    std::iota(ids.begin(), ids.end(), std::int64_t{0});
    std::ranges::shuffle(ids, random_);
    ids.resize(static_cast<std::size_t>(count));
    std::vector<float> values(ids.size() * static_cast<std::size_t>(kShape[1]));
    for (float& value : values) value = static_cast<float>(random_() % 100);
    return RowSparseNDArray::FromVectors<float>(ids, values, kShape, dtype, device, *engine_);
  }
  static void ExpectEqual(const RowSparseNDArray& found, const RowSparseNDArray& expected) {
    const RowVectors<float> a = found.ToVectors<float>();
    const RowVectors<float> b = expected.ToVectors<float>();
    EXPECT_EQ(a.row_ids, b.row_ids);
    EXPECT_EQ(a.rows, b.rows);
  }

  const Shape kShape{3000, 3};
  std::mt19937_64 random_{BaseSeed()};
};
INSTANTIATE_TEST_SUITE_P(All, GpuRowSparse, testing::ValuesIn(engine_test::OneConfigOfEachKind()),
                         engine_test::ConfigLabel);

// Between any two devices, with and without a cast, onto arrays that hold more rows and fewer.
TEST_P(GpuRowSparse, CopiesGoBetweenAllDevices) {
  const std::vector<Device> devices = {Cpu(1), CpuPinned(1), Gpu(0), Gpu(1)};
  if (BaseSeed() % 2 == 0) gpu_->Unlink();
  for (const Device from : devices) {
    for (const Device to : devices) {
      for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
        SCOPED_TRACE(fmt::format("{} to {} as {}", ToString(from), ToString(to), Name(dtype)));
        const RowSparseNDArray out = Rows(20, to, dtype);
        for (const std::int64_t count : {7, 2500, 0, 30}) {
          const RowSparseNDArray value = Rows(count, Cpu());
          const RowSparseNDArray there = value.Copy(from);
          there.CopyTo(out);
          there.Clear();  // after the copy
          ExpectEqual(out, value);
          ExpectEqual(there, Rows(0, Cpu()));
        }
      }
    }
  }
}

// Ops on all streams still use what a later one replaces by larger or smaller memory. The devices
// see it if that is freed too early: blocks are given back at once.
TEST_P(GpuRowSparse, ReplacedMemoryLivesUntilItsLastOp) {
  const MemoryOptions memory{.allocator = "system"};
  Gpus::Of(*engine_).Configure(DeviceType::kGpu, memory);
  Gpus::Of(*engine_).Configure(DeviceType::kCpuPinned, memory);
  const std::vector<Device> devices = {CpuPinned(0), Gpu(0), Gpu(1)};
  {
    std::vector<RowSparseNDArray> found, expected;
    for (const Device device : devices) {
      found.push_back(Rows(5, device));
      expected.push_back(found.back().Copy(Cpu()));
    }
    for (int i = 0; i < Scaled(200); ++i) {
      const std::size_t to = random_() % devices.size();
      const std::size_t from = random_() % devices.size();
      if (random_() % 3 == 0) {
        const RowSparseNDArray fresh =
            Rows(static_cast<std::int64_t>(random_() % 2 == 0 ? random_() % 9 : 2000), Cpu());
        fresh.CopyTo(found[to]);
        fresh.CopyTo(expected[to]);
      } else {
        found[from].CopyTo(found[to]);
        expected[from].CopyTo(expected[to]);
      }
    }
    for (std::size_t i = 0; i < devices.size(); ++i) ExpectEqual(found[i], expected[i]);
  }
  engine_->WaitForAll();
  for (const Device device : {Gpu(0), Gpu(1), CpuPinned()}) {
    EXPECT_EQ(gpu_->bytes_used(device), 0) << ToString(device);
  }
}

TEST_P(GpuRowSparse, BecomeDenseAndComeFromDense) {
  const RowSparseNDArray value = Rows(40, Cpu());
  const std::vector<float> all = value.ToVector<float>();
  const NDArray dense = value.Copy(Gpu(0)).ToDense();
  EXPECT_EQ(dense.device(), Gpu(0));
  EXPECT_EQ(dense.ToVector<float>(), all);
  const NDArray other({kShape[0], kShape[1]}, DType::kInt32, Gpu(1), *engine_);
  value.CopyTo(other);
  EXPECT_EQ(other.ToVector<float>(), all);
  value.Copy(Gpu(0)).CopyTo(other);
  EXPECT_EQ(other.ToVector<float>(), all);
  const RowSparseNDArray back = RowSparseNDArray::FromDense(dense);
  EXPECT_EQ(back.device(), Gpu(0));
  EXPECT_EQ(back.ToVector<float>(), all);
}

// No row, one, most and all of them, with rows that are there and zero; what is read is overwritten
// at once, and so is the rest of what the dense array is a part of.
TEST_P(GpuRowSparse, ConversionsSeeWhatWasThereWhenTheyWereCalled) {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kInt64, DType::kBool}) {
    for (const std::int64_t count : {0, 1, 2999, 3000}) {
      SCOPED_TRACE(fmt::format("{} rows of {}", count, Name(dtype)));
      const RowSparseNDArray value = Rows(count, Cpu(), dtype);
      const std::vector<float> all = value.ToVector<float>();
      const RowSparseNDArray there = value.Copy(Gpu(0));
      const NDArray two = NDArray::Ones({2 * kShape[0], kShape[1]}, dtype, Gpu(0), *engine_);
      const NDArray dense = two.Slice(kShape[0], 2 * kShape[0]);
      there.CopyTo(dense);
      there.Clear();
      const RowSparseNDArray back = RowSparseNDArray::FromDense(dense);
      const std::vector<float> first(all.size(), 1);
      EXPECT_EQ(two.Slice(0, kShape[0]).ToVector<float>(), first);
      EXPECT_EQ(dense.ToVector<float>(), all);
      NDArray::Ones(kShape, dtype, Gpu(0), *engine_).CopyTo(dense);
      ExpectEqual(back, RowSparseNDArray::FromDense(value.ToDense()));
      EXPECT_EQ(dense.ToVector<float>(), first);
    }
  }
}

// Every operation in any order, on arrays of all devices, each beside one on the CPUs.
TEST_P(GpuRowSparse, RandomProgramsGiveTheBitsOfTheCpu) {
  SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}", BaseSeed()));
  if (BaseSeed() % 2 == 0) gpu_->Unlink();
  // Blocks of "system" are given back at once: the devices see it if one is freed too early.
  const MemoryOptions memory{.allocator = BaseSeed() % 3 == 0 ? "pool" : "system"};
  Gpus::Of(*engine_).Configure(DeviceType::kGpu, memory);
  Gpus::Of(*engine_).Configure(DeviceType::kCpuPinned, memory);
  const std::vector<Device> devices = {Cpu(1), CpuPinned(0), Gpu(0), Gpu(1)};
  struct Place {
    RowSparseNDArray rows, rows_expected;
    NDArray dense, dense_expected;
  };
  std::vector<Place> places;
  const auto some = [&] {
    constexpr std::int64_t kCounts[] = {0, 1, 40, 3000};
    return Rows(kCounts[random_() % std::size(kCounts)], Cpu());
  };
  for (const Device device : devices) {
    const RowSparseNDArray value = some();
    const NDArray dense = value.ToDense();
    places.push_back({value.Copy(device), value, dense.Copy(device), dense});
  }
  for (int step = 0; step < Scaled(60); ++step) {
    const std::size_t i = random_() % devices.size();
    Place& at = places[i];
    Place& other = places[random_() % devices.size()];
    const RowSparseNDArray fresh = some();
    const RowSparseNDArray fresh_there = fresh.Copy(devices[i]);
    switch (random_() % 9) {
      case 0:
        at.rows.CopyTo(other.rows);
        at.rows_expected.CopyTo(other.rows_expected);
        break;
      case 1:
        at.rows.CopyTo(other.dense);
        at.rows_expected.CopyTo(other.dense_expected);
        break;
      case 2:
        at.rows = RowSparseNDArray::FromDense(at.dense);
        at.rows_expected = RowSparseNDArray::FromDense(at.dense_expected);
        break;
      case 3: {
        const NDArray ids = NDArray::Arange(static_cast<std::int64_t>(random_() % 3000),
                                            DType::kInt32, devices[random_() % 4], *engine_);
        at.rows = at.rows.Retain(ids);
        at.rows_expected = at.rows_expected.Retain(ids);
        break;
      }
      case 4:
        at.rows += fresh_there;
        at.rows_expected += fresh;
        break;
      case 5:
        Sum({fresh_there, at.rows, fresh_there}, at.rows);
        Sum({fresh, at.rows_expected, fresh}, at.rows_expected);
        break;
      case 6:
        at.dense += at.rows;
        at.dense_expected += at.rows_expected;
        break;
      case 7:
        at.rows *= -1;
        at.rows_expected *= -1;
        break;
      default:
        fresh.CopyTo(at.rows);
        fresh.CopyTo(at.rows_expected);
    }
  }
  for (const Place& at : places) {
    ExpectEqual(at.rows, at.rows_expected);
    EXPECT_EQ(at.dense.ToVector<float>(), at.dense_expected.ToVector<float>());
  }
}

// The ids and the counts do, elements do not.
TEST_P(GpuRowSparse, ConversionsDoNotLeaveTheGpu) {
  const Shape wide{50, 10'000};
  const NDArray dense = NDArray::Ones(wide, DType::kFloat32, Gpu(1), *engine_);
  engine_->WaitForAll();
  Gpus::Of(*engine_).Configure(DeviceType::kCpuPinned, {.bytes_max = 10'000});
  const RowSparseNDArray rows = RowSparseNDArray::FromDense(dense);
  const std::vector<std::int64_t> ids = {49, 3, 3};
  const RowSparseNDArray retained =
      rows.Retain(NDArray::FromVector(ids, {3}, DType::kInt64, Cpu(), *engine_));
  const NDArray back = retained.ToDense();
  const NDArray cast({wide[0], wide[1]}, DType::kInt32, Gpu(1), *engine_);
  retained.CopyTo(cast);
  engine_->WaitForAll();
  Gpus::Of(*engine_).Configure(DeviceType::kCpuPinned, {});
  EXPECT_EQ(rows.ToVector<float>(), std::vector<float>(500'000, 1));
  const RowVectors<float> found = retained.ToVectors<float>();
  EXPECT_EQ(found.row_ids, (std::vector<std::int64_t>{3, 49}));
  EXPECT_EQ(found.rows, std::vector<float>(20'000, 1));
  EXPECT_EQ(back.ToVector<float>(), retained.ToVector<float>());
  EXPECT_EQ(cast.ToVector<float>(), retained.ToVector<float>());
}

TEST_P(GpuRowSparse, ConversionsThatFailFailOnce) {
  const RowSparseNDArray value = Rows(1500, Gpu(1));
  const NDArray ids = NDArray::Arange(1000, DType::kInt64, Cpu(), *engine_);
  const NDArray dense = value.ToDense();
  const NDArray wanted =
      NDArray::FromVector<std::int64_t>({7, 3000}, {2}, DType::kInt64, Cpu(), *engine_);
  const RowSparseNDArray none = value.Retain(wanted);
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { none.WaitToRead(); }), HasSubstr("3000"));
  EXPECT_THROW(engine_->WaitForAll(), InvalidArgument);
  engine_->WaitForAll();

  // In the first step, and in the second one, which takes memory for the rows.
  const NDArray wide = NDArray::Ones({50, 10'000}, DType::kFloat32, Gpu(1), *engine_);
  wide.WaitToRead();
  for (const std::int64_t bytes : {0, 1 << 17}) {
    Gpus::Of(*engine_).Trim(DeviceType::kGpu);
    gpu_->set_device_bytes(gpu_->bytes_used(Gpu(1)) + bytes);
    const int launches = gpu_->launches();
    const RowSparseNDArray from = RowSparseNDArray::FromDense(wide);
    EXPECT_THROW(from.WaitToRead(), OutOfMemory);
    EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
    EXPECT_EQ(gpu_->launches() > launches, bytes > 0);
    const RowSparseNDArray retained = value.Retain(ids);
    if (bytes == 0) {
      EXPECT_THROW(retained.WaitToRead(), OutOfMemory);
      EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
    }
    engine_->WaitForAll();
    gpu_->set_device_bytes(std::int64_t{1} << 40);
  }
  ExpectEqual(RowSparseNDArray::FromDense(dense), RowSparseNDArray::FromDense(dense.Copy(Cpu())));
  ExpectEqual(value.Retain(ids), value.Copy(Cpu()).Retain(ids));
}

// A GPU that issues so many copies, and then none.
class RefusingGpu final : public engine_test::SimGpu {
 public:
  RefusingGpu() : SimGpu(1, BaseSeed()) {}
  static constexpr int kAll = 1 << 30;
  std::atomic<int> issues = kAll;
  void Copy(Stream stream, void* to, const void* from, std::int64_t bytes) override {
    if (issues.fetch_sub(1) <= 0) throw CudaError("cudaErrorInvalidValue", 1);
    SimGpu::Copy(stream, to, from, bytes);
  }
};

TEST_P(GpuRowSparse, ConversionsThatAreNotIssuedLeaveNoRows) {
  const auto gpu = std::make_shared<RefusingGpu>();
  EngineOptions options = GetParam().options;
  options.gpu_driver = gpu;
  Engine engine(options);
  const NDArray dense = NDArray::Ones({5, 2}, DType::kFloat32, Gpu(0), engine);
  const RowSparseNDArray rows = RowSparseNDArray::FromDense(dense);
  const NDArray ids = NDArray::Arange(3, DType::kInt64, Cpu(), engine);
  const auto leaves_none = [&](int issues, auto&& convert) {
    engine.WaitForAll();
    gpu->issues = issues;
    const RowSparseNDArray none = convert();
    EXPECT_THROW(none.WaitToRead(), CudaError);
    EXPECT_THROW(engine.WaitForAll(), CudaError);
    gpu->issues = RefusingGpu::kAll;
    engine.ClearError(none.var());
    EXPECT_TRUE(none.ToVectors<float>().row_ids.empty());
  };
  leaves_none(0, [&] { return rows.Retain(ids); });
  leaves_none(0, [&] { return RowSparseNDArray::FromDense(dense); });
  leaves_none(1, [&] { return RowSparseNDArray::FromDense(dense); });
  EXPECT_EQ(rows.Retain(ids).ToVectors<float>().row_ids, (std::vector<std::int64_t>{0, 1, 2}));
}

// No ids, no rows in the shape, and rows without elements.
TEST_P(GpuRowSparse, ConversionsTakeShapesWithoutElements) {
  for (const Shape& shape : {Shape{0, 3}, Shape{4, 0}, Shape{4, 3}}) {
    SCOPED_TRACE(ToString(shape));
    const RowSparseNDArray rows =
        RowSparseNDArray::FromDense(NDArray::Ones(shape, DType::kFloat32, Gpu(0), *engine_));
    EXPECT_EQ(rows.ToDense().ToVector<float>(),
              std::vector<float>(static_cast<std::size_t>(shape.size()), 1));
    EXPECT_EQ(rows.ToVectors<float>().row_ids.size(), shape.size() == 0 ? 0U : 4U);
    const NDArray no_ids({0}, DType::kInt64, Cpu(), *engine_);
    EXPECT_TRUE(rows.Retain(no_ids).ToVectors<float>().row_ids.empty());
  }
  const RowSparseNDArray ids_only =
      RowSparseNDArray::FromVectors<float>({3, 1}, {}, {4, 0}, DType::kFloat32, Gpu(0), *engine_);
  const std::vector<std::int64_t> wanted = {2, 1};
  const RowSparseNDArray retained =
      ids_only.Retain(NDArray::FromVector(wanted, {2}, DType::kInt64, Cpu(), *engine_));
  EXPECT_EQ(retained.ToVectors<float>().row_ids, (std::vector<std::int64_t>{1, 2}));
}

TEST_P(GpuRowSparse, AreMultipliedAndAddedToDenseArrays) {
  for (const std::int64_t count : {0, 30}) {
    const RowSparseNDArray value = Rows(count, Cpu());
    const NDArray dense = Rows(50, Cpu()).ToDense();
    const RowSparseNDArray there = value.Copy(Gpu(1));
    const NDArray sum = dense.Copy(Gpu(1));
    const RowSparseNDArray scaled = there * 3;
    sum += scaled;
    there *= 0.5F;  // what was added has been read
    sum += there;
    dense += value * 3;
    dense += value * 0.5F;
    ExpectEqual(scaled, value * 3);
    EXPECT_EQ(sum.ToVector<float>(), dense.ToVector<float>());
  }
}

TEST_P(GpuRowSparse, RowsAreRetainedByIdsOnAnyDevice) {
  const RowSparseNDArray value = Rows(1500, Cpu());
  const std::vector<std::int64_t> wanted = {5, 2999, 5, 0, 77};
  const RowSparseNDArray expected =
      value.Retain(NDArray::FromVector(wanted, {5}, DType::kInt64, Cpu(), *engine_));
  for (const Device rows : {Cpu(), Gpu(0)}) {
    for (const Device ids : {Cpu(), Gpu(1)}) {
      const RowSparseNDArray found =
          value.Copy(rows).Retain(NDArray::FromVector(wanted, {5}, DType::kInt64, ids, *engine_));
      EXPECT_EQ(found.device(), rows);
      ExpectEqual(found, expected);
    }
  }
}

TEST_P(GpuRowSparse, AreScaledAndAdded) {
  for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
    for (const std::int64_t count : {0, 40, 2000}) {
      const RowSparseNDArray a = Rows(count, Cpu(), dtype);
      const RowSparseNDArray b = Rows(30, Cpu(), dtype);
      const RowSparseNDArray there = a.Copy(Gpu(1));
      const RowSparseNDArray sum = there + b.Copy(Gpu(1));
      const RowSparseNDArray twice = 2 * there;
      there *= 3;  // after both
      EXPECT_EQ(sum.device(), Gpu(1));
      ExpectEqual(sum, a + b);
      ExpectEqual(twice, a * 2);
      ExpectEqual(there, a * 3);
    }
  }
  const RowSparseNDArray a = Rows(3, Gpu(1));
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { a + Rows(3, Gpu(0)); }), HasSubstr("gpu(0)"));
  EXPECT_THROW(Rows(3, Gpu(1), DType::kInt32) *= 0.5, InvalidArgument);
}

// Onto arrays with no rows, some, and all; with themselves; what was added is overwritten at once,
// and the sum is read in between.
TEST_P(GpuRowSparse, AreAddedInPlaceAndSummed) {
  for (const DType dtype : {DType::kFloat16, DType::kInt32, DType::kBool}) {
    for (const std::int64_t start : {0, 30}) {
      const RowSparseNDArray sum = Rows(start, Cpu(), dtype);
      const RowSparseNDArray there = sum.Copy(Gpu(1));
      for (const std::int64_t count : {0, 700, 3000}) {
        const RowSparseNDArray b = Rows(count, Cpu(), dtype);
        const RowSparseNDArray added = b.Copy(Gpu(1));
        const RowSparseNDArray total = Rows(9, Gpu(1), dtype);
        const RowSparseNDArray expected = Rows(0, Cpu(), dtype);
        Sum({there, added, there}, total);
        Sum({sum, b, sum}, expected);
        there += added;
        added.Clear();
        const RowSparseNDArray now = there.Copy();
        there += there;
        Sum({there, total}, total);
        sum += b;
        ExpectEqual(now, sum);
        sum += sum;
        Sum({sum, expected}, expected);
        ExpectEqual(total, expected);
      }
      ExpectEqual(there, sum);
    }
  }
}

// An input that failed, and memory that is short in either step.
TEST_P(GpuRowSparse, AdditionsThatFailFailOnce) {
  const RowSparseNDArray to = Rows(500, Gpu(1));
  const RowSparseNDArray bad = Rows(5, Gpu(1));
  engine_->Push({.name = "fail", .writes = {bad.var()}}, [] { throw std::runtime_error("bad"); });
  to += bad;
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { to.WaitToRead(); }), "bad");
  EXPECT_THROW(engine_->WaitForAll(), std::runtime_error);
  engine_->WaitForAll();
  engine_->ClearError(to.var());

  const RowSparseNDArray before = to.Copy(Cpu());
  const RowSparseNDArray more = Rows(600, Gpu(1));
  before.WaitToRead();
  more.WaitToRead();
  for (const std::int64_t bytes : {0, 1 << 14}) {
    Gpus::Of(*engine_).Trim(DeviceType::kGpu);
    gpu_->set_device_bytes(gpu_->bytes_used(Gpu(1)) + bytes);
    to += more;
    EXPECT_THROW(to.WaitToRead(), OutOfMemory);
    EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
    engine_->WaitForAll();
    engine_->ClearError(to.var());
    gpu_->set_device_bytes(std::int64_t{1} << 40);
    ExpectEqual(to, before);
  }
  to += more;
  before += more.Copy(Cpu());
  ExpectEqual(to, before);
}

TEST_P(GpuRowSparse, AreSavedAndLoaded) {
  const RowSparseNDArray value = Rows(12, Gpu(0));
  const tools::TempFolder folder;
  const std::string file = folder / "arrays.safetensors";
  SaveArrays(file, {}, {{"x", value}}, {});
  const RowSparseNDArray loaded = LoadArrays(file, Gpu(1), *engine_).FindRowSparse("x");
  EXPECT_EQ(loaded.device(), Gpu(1));
  ExpectEqual(loaded, value);
}

// What fails passes through the copies; memory that is short fails the copy, and nothing else.
TEST_P(GpuRowSparse, FailuresPassThroughCopies) {
  const RowSparseNDArray bad = Rows(5, Gpu(0));
  engine_->Push({.name = "fail", .writes = {bad.var()}}, [] { throw std::runtime_error("bad"); });
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { bad.Copy(Gpu(1)).ToVectors<float>(); }), "bad");
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { bad.Copy(Cpu()).WaitToRead(); }), "bad");
  EXPECT_THROW(engine_->WaitForAll(), std::runtime_error);

  const RowSparseNDArray value = Rows(2000, Gpu(0));
  const RowSparseNDArray out = Rows(3, Gpu(1));
  value.WaitToRead();
  out.WaitToRead();
  Gpus::Of(*engine_).Trim(DeviceType::kGpu);
  gpu_->set_device_bytes(0);
  value.CopyTo(out);
  EXPECT_THROW(out.WaitToRead(), OutOfMemory);
  EXPECT_THROW(engine_->WaitForAll(), OutOfMemory);
  gpu_->set_device_bytes(std::int64_t{1} << 40);
  engine_->ClearError(out.var());
  ExpectEqual(out, Rows(0, Cpu()));
  value.CopyTo(out);
  ExpectEqual(out, value);
}

TEST_P(GpuRowSparse, TheBodyOfACpuOpDoesNotGetTheirAddresses) {
  const RowSparseNDArray rows = Rows(5, Gpu(1));
  engine_->Push({.name = "peek", .reads = {rows.var()}}, [rows] { rows.row_ids(); });
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { engine_->WaitForAll(); }),
              AllOf(HasSubstr("'peek'"), HasSubstr("gpu(1)")));
}

}  // namespace
}  // namespace heddle::storage_test
