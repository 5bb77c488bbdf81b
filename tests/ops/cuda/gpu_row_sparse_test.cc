// Row ids and rows on a GPU against the CPU's kernels.
#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "ops/cuda/row_sparse.h"
#include "ops/row_ids.h"
#include "ops/row_merge.h"
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
    GatherRows(value, value.list(), row_bytes, device_gathered.data(), nullptr);
    device_gathered.ExpectSameAs(gathered, "gather");
  }
}

TEST_F(GpuRowSparse, SumsRowsOfSeveralValuesLikeTheCpu) {
  constexpr std::size_t kRowElements = 37;
  constexpr std::size_t kRowBytes = kRowElements * sizeof(float);
  for (const std::size_t inputs : {std::size_t{1}, std::size_t{3}, std::size_t{200}}) {
    std::vector<std::vector<std::int64_t>> ids(inputs);
    std::vector<std::unique_ptr<Array<float>>> rows;
    std::vector<std::unique_ptr<DeviceArray<std::int64_t>>> device_ids;
    std::vector<std::unique_ptr<DeviceArray<float>>> device_rows;
    std::vector<SparseRows> values;
    std::vector<GpuRows> gpu_values;
    std::size_t total = 0;
    for (std::vector<std::int64_t>& of_input : ids) {
      for (std::int64_t id = 0; id < 2000; ++id) {
        if (id == 0 || Below(20) == 0) of_input.push_back(id);
      }
      Ids listed(of_input.size());
      std::copy(of_input.begin(), of_input.end(), listed.data());
      rows.push_back(std::make_unique<Array<float>>(of_input.size() * kRowElements));
      Randomize(*rows.back(), random_);
      device_ids.push_back(std::make_unique<DeviceArray<std::int64_t>>(listed));
      device_rows.push_back(std::make_unique<DeviceArray<float>>(*rows.back()));
      values.push_back({of_input, rows.back()->data()});
      gpu_values.push_back(
          {device_ids.back()->data(), of_input.size(), device_rows.back()->data()});
      total += of_input.size();
    }
    std::vector<RowEntry> entries(2 * total);
    const auto merged = ops::MergeRows(values, kRowBytes, entries.data(), entries.data() + total);
    const std::size_t count = ops::CountIds(merged);
    std::vector<std::int64_t> expected_ids(count);
    Array<float> expected(count * kRowElements);
    ops::SumRows(DType::kFloat32, kRowElements, merged, expected_ids.data(), expected.data());

    Ids no_ids(total);
    Ids no_count(1);
    Array<float> no_rows(total * kRowElements);
    Array<std::uint8_t> no_scratch(SumRowsScratchBytes(total));
    DeviceArray<std::int64_t> out_ids(no_ids);
    DeviceArray<std::int64_t> out_count(no_count);
    DeviceArray<float> out(no_rows);
    DeviceArray<std::uint8_t> scratch(no_scratch);
    SumRows(DType::kFloat32, kRowElements, gpu_values, out_ids.data(), out.data(), out_count.data(),
            scratch.data(), nullptr);
    EXPECT_EQ(Read(out_ids, out_count), expected_ids);
    out.CopyTo(no_rows);
    Array<float> sums(count * kRowElements);
    std::copy_n(no_rows.data(), sums.size(), sums.data());
    ExpectSame(sums, expected, "sum");
  }
}

TEST_F(GpuRowSparse, InsertsTheRowsThatAreMissing) {
  constexpr std::size_t kRowElements = 70;
  constexpr std::size_t kRowBytes = kRowElements * sizeof(float);
  const auto random_ids = [&](std::size_t one_of) {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < 5000; ++id) {
      if (id == 3 || Below(one_of) == 0) ids.push_back(id);
    }
    return ids;
  };
  const auto to_array = [](const std::vector<std::int64_t>& ids) {
    auto array = std::make_unique<Ids>(ids.size());
    std::ranges::copy(ids, array->data());
    return array;
  };
  const std::vector<std::int64_t> ids = random_ids(3);
  const std::vector<std::int64_t> wanted = random_ids(10);
  std::vector<std::int64_t> all;
  std::ranges::set_union(ids, wanted, std::back_inserter(all));
  Array<float> rows(ids.size() * kRowElements);
  Array<float> expected(all.size() * kRowElements);
  Randomize(rows, random_);
  ops::GatherRows({ids, rows.data()}, all, kRowBytes, expected.data());

  DeviceArray<std::int64_t> device_ids(*to_array(ids));
  DeviceArray<float> device_rows(rows);
  DeviceArray<std::int64_t> device_wanted(*to_array(wanted));
  Ids counted(wanted.size() + 1);
  Ids found(wanted.size());
  Ids no_ids(all.size());
  Array<float> no_rows(expected.size());
  Array<std::uint8_t> no_scratch(CountMissingScratchBytes(wanted.size()));
  DeviceArray<std::int64_t> before(counted);
  DeviceArray<std::uint8_t> scratch(no_scratch);
  DeviceArray<std::int64_t> out_ids(no_ids);
  DeviceArray<float> out(no_rows);
  DeviceArray<std::int64_t> places(found);
  const GpuRows value = {device_ids.data(), ids.size(), device_rows.data()};
  const GpuIds list = {device_wanted.data(), wanted.size()};
  CountMissing(value.list(), list, before.data(), scratch.data(), nullptr);
  InsertRows(value, list, before.data(), kRowBytes, out_ids.data(), out.data(), nullptr);
  FindRows({out_ids.data(), all.size()}, list, places.data(), nullptr);

  before.CopyTo(counted);
  EXPECT_EQ(counted[wanted.size()], static_cast<std::int64_t>(all.size() - ids.size()));
  out_ids.ExpectSameAs(*to_array(all), "ids");
  out.ExpectSameAs(expected, "rows");
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    found[i] = std::ranges::find(all, wanted[i]) - all.begin();
  }
  places.ExpectSameAs(found, "places");
}

// Needs no GPU: nothing is launched.
TEST(GpuRowIds, BoolIsAnError) {
  EXPECT_THROW(ReadRowIds(DType::kBool, nullptr, 1, 1, nullptr, nullptr, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace heddle::ops::cuda
