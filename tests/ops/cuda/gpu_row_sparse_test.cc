// Row ids and rows on a GPU against the CPU's kernels.
#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/cuda/row_sparse.h"
#include "ops/row_ids.h"
#include "ops/row_sparse.h"
#include "tests/ops/cuda/device_array.h"

namespace heddle::ops::cuda {
namespace {

using Ids = Array<std::int64_t>;

class GpuRowSparse : public GpuKernelTest {
 protected:
  // The first *count of `values`.
  static std::vector<std::int64_t> Read(DeviceArray<std::int64_t>& values,
                                        DeviceArray<std::int64_t>& count) {
    Ids host_values(values.size());
    Ids host_count(1);
    values.CopyTo(host_values);
    count.CopyTo(host_count);
    return {host_values.data(), host_values.data() + host_count[0]};
  }
};

TEST_F(GpuRowSparse, SortsIdsAndRemovesRepeats) {
  for (const std::size_t count : {std::size_t{1}, 1 + Below(100), 1 + Below(300000)}) {
    Ids ids(count);
    for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::int64_t>(Below(100000));
    DeviceArray<std::int64_t> device_ids(ids);
    DeviceArray<std::int64_t> out(ids);
    Ids zero(1);
    zero[0] = 0;
    DeviceArray<std::int64_t> out_count(zero);
    Array<std::uint8_t> scratch(SortUniqueScratchBytes(count));
    DeviceArray<std::uint8_t> device_scratch(scratch);
    SortUnique(device_ids.data(), count, out.data(), out_count.data(), device_scratch.data(),
               nullptr);
    std::vector<std::int64_t> expected(ids.data(), ids.data() + count);
    std::vector<std::int64_t> more(count);
    expected.resize(ops::SortUnique(expected, more));
    EXPECT_EQ(Read(out, out_count), expected);
  }
}

TEST_F(GpuRowSparse, SelectsWhatIsFlagged) {
  const std::size_t count = 1 + Below(10000);
  Array<std::uint8_t> flags(count);
  Ids ids(count);
  std::vector<std::int64_t> expected;
  std::vector<std::int64_t> expected_counted;
  for (std::size_t i = 0; i < count; ++i) {
    flags[i] = Below(3) == 0 ? 1 : 0;
    ids[i] = static_cast<std::int64_t>(3 * i);
    if (flags[i] == 0) continue;
    expected.push_back(ids[i]);
    expected_counted.push_back(static_cast<std::int64_t>(7 + i));
  }
  DeviceArray<std::uint8_t> device_flags(flags);
  DeviceArray<std::int64_t> device_ids(ids);
  DeviceArray<std::int64_t> out(ids);
  Ids zero(1);
  zero[0] = 0;
  DeviceArray<std::int64_t> out_count(zero);
  Array<std::uint8_t> scratch(SelectFlaggedScratchBytes(count));
  DeviceArray<std::uint8_t> device_scratch(scratch);
  SelectFlagged(device_ids.data(), 0, device_flags.data(), count, out.data(), out_count.data(),
                device_scratch.data(), nullptr);
  EXPECT_EQ(Read(out, out_count), expected);
  SelectFlagged(nullptr, 7, device_flags.data(), count, out.data(), out_count.data(),
                device_scratch.data(), nullptr);
  EXPECT_EQ(Read(out, out_count), expected_counted);
}

TEST_F(GpuRowSparse, MovesAndAddsRowsLikeTheCpu) {
  constexpr std::size_t kRows = 1000;
  for (const std::size_t row_elements : {1 + Below(5), 1 + Below(600), std::size_t{256}}) {
    std::vector<std::int64_t> some;
    for (std::size_t id = 0; id < kRows; ++id) {
      if (id == 0 || Below(3) == 0) some.push_back(static_cast<std::int64_t>(id));
    }
    Ids ids(some.size());
    std::copy(some.begin(), some.end(), ids.data());
    Array<float> rows(some.size() * row_elements);
    Array<float> dense(kRows * row_elements);
    Array<float> gathered(rows.size());
    Randomize(rows, random_);
    Randomize(dense, random_);
    DeviceArray<std::int64_t> device_ids(ids);
    DeviceArray<float> device_rows(rows);
    DeviceArray<float> device_dense(dense);
    DeviceArray<float> device_gathered(rows);
    const std::size_t row_bytes = row_elements * sizeof(float);
    const GpuRows value = {device_ids.data(), some.size(), device_rows.data()};

    ops::ScatterRows({some, rows.data()}, row_bytes, dense.data(), 0);
    ScatterRows(value, row_bytes, device_dense.data(), 0, nullptr);
    device_dense.ExpectSameAs(dense, "scatter");
    ops::AddRows(DType::kFloat32, row_elements, {some, rows.data()}, dense.data(), 0);
    AddRows(DType::kFloat32, row_elements, value, device_dense.data(), 0, nullptr);
    device_dense.ExpectSameAs(dense, "add");
    ops::GatherRows({some, rows.data()}, some, row_bytes, gathered.data());
    GatherRows(value, device_ids.data(), some.size(), row_bytes, device_gathered.data(), nullptr);
    device_gathered.ExpectSameAs(gathered, "gather");
  }
}

// Needs no GPU: nothing is launched.
TEST(GpuRowIds, BoolIsAnError) {
  EXPECT_THROW(ReadRowIds(DType::kBool, nullptr, 1, 1, nullptr, nullptr, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace heddle::ops::cuda
