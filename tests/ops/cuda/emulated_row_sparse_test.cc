// Rows as a GPU's threads move them, against the CPU's kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "ops/convert.h"
#include "ops/cuda/row_insert_plan.h"
#include "ops/cuda/row_sparse_plan.h"
#include "ops/cuda/row_sum_plan.h"
#include "ops/cuda/table.h"
#include "ops/row_ids.h"
#include "ops/row_merge.h"
#include "ops/row_sparse.h"
#include "tests/ops/cuda/emulated_launch.h"
#include "tests/ops/ops_testing.h"
#include "tests/sanitized.h"

namespace heddle::ops::cuda {
namespace {

template <class Body>
void EmulateRows(const Body& body, std::size_t rows) {
  const std::size_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  for (std::size_t block = 0; block < blocks; ++block) {
    for (unsigned thread = 0; thread < kBlockThreads; ++thread) {
      RunRowThread(body, rows, block, thread);
    }
  }
}

using Ids = std::vector<std::int64_t>;

class EmulatedRowSparse : public KernelTest {
 protected:
  static constexpr std::int64_t kRows = 100;  // of the dense array

  std::vector<std::int64_t> RandomIds(std::size_t one_of) {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (Below(one_of) == 0) ids.push_back(id);
    }
    return ids;
  }
};

TEST_F(EmulatedRowSparse, GathersAndScattersRowsOfAnyLength) {
  for (int round = 0; round < Scaled(40); ++round) {
    const std::size_t row_bytes = Below(3) == 0 ? Below(40) : 4 * Below(400);
    const std::vector<std::int64_t> ids = RandomIds(1 + Below(4));
    Array<std::uint8_t> rows(ids.size() * row_bytes, Below(3) * Below(16));
    Randomize(rows, random_);
    const SparseRows value = {ids, rows.data()};
    const GpuRows gpu_value = {ids.data(), ids.size(), rows.data()};
    const std::vector<std::int64_t> wanted = RandomIds(2);

    Array<std::uint8_t> out(wanted.size() * row_bytes, Below(3) * Below(16));
    Array<std::uint8_t> expected(out.size());
    ops::GatherRows(value, wanted, row_bytes, expected.data());
    const GpuIds gpu_wanted = {wanted.data(), wanted.size()};
    EmulateRows(GatherRowsBody{gpu_value, gpu_wanted, reinterpret_cast<std::byte*>(out.data()),
                               RowCopy(row_bytes, rows.data(), out.data())},
                wanted.size());
    ExpectSame(out, expected, "gather");

    Array<std::uint8_t> dense(kRows * row_bytes);
    Array<std::uint8_t> expected_dense(dense.size());
    Randomize(dense, random_);
    expected_dense.CopyFrom(dense);
    ops::ScatterRows(value, row_bytes, expected_dense.data(), 0);
    EmulateRows(ScatterRowsBody{gpu_value, reinterpret_cast<std::byte*>(dense.data()), 0,
                                RowCopy(row_bytes, rows.data(), dense.data())},
                ids.size());
    ExpectSame(dense, expected_dense, "scatter");

    Array<std::uint8_t> back(rows.size());
    EmulateRows(GatherDenseRowsBody{reinterpret_cast<const std::byte*>(dense.data()), 0,
                                    GpuIds{ids.data(), ids.size()},
                                    reinterpret_cast<std::byte*>(back.data()),
                                    RowCopy(row_bytes, dense.data(), back.data())},
                ids.size());
    ExpectSame(back, rows, "gather of dense rows");

    std::vector<std::uint8_t> flags(wanted.size(), 9);
    EmulateRows(FlagPresentBody{gpu_value, wanted.data(), flags.data()}, wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(flags[i], std::count(ids.begin(), ids.end(), wanted[i]));
    }
  }
}

TEST_F(EmulatedRowSparse, AddsAndFlagsRowsLikeTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using W = WrappingType<T>;
    const std::size_t row_elements = Below(100);
    const std::vector<std::int64_t> ids = RandomIds(3);
    Array<T> rows(ids.size() * row_elements);
    Array<T> dense(kRows * row_elements);
    Array<T> expected(dense.size());
    Randomize(rows, random_);
    Randomize(dense, random_);
    for (std::size_t row = 0; row < kRows; row += 2) {
      std::fill_n(dense.data() + row * row_elements, row_elements, StorageType<T>{});
    }
    expected.CopyFrom(dense);

    std::vector<std::uint8_t> flags(kRows, 0);
    std::vector<std::uint8_t> expected_flags(kRows);
    ops::FlagNonZeroRows(kDTypeOf<T>, row_elements, dense.data(), expected_flags);
    EmulateRows(FlagNonZeroRowsBody<W>{reinterpret_cast<const StorageType<W>*>(dense.data()),
                                       row_elements, flags.data()},
                kRows);
    EXPECT_EQ(flags, expected_flags);

    ops::AddRows(kDTypeOf<T>, row_elements, {ids, rows.data()}, expected.data(), 0);
    EmulateRows(AddRowsBody<W>{{ids.data(), ids.size(), rows.data()},
                               reinterpret_cast<StorageType<W>*>(dense.data()),
                               0,
                               row_elements},
                ids.size());
    ExpectSame(dense, expected, "add");
  });
}

// The bodies that SumRows launches, with the standard library's sort between them.
TEST_F(EmulatedRowSparse, SumsRowsOfSeveralValuesLikeTheCpu) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using W = WrappingType<T>;
    for (int round = 0; round < 6; ++round) {
      const std::size_t row_elements = Below(70);
      const std::size_t row_bytes = row_elements * sizeof(T);
      std::vector<std::vector<std::int64_t>> ids;
      std::vector<std::unique_ptr<Array<T>>> rows;
      std::vector<SparseRows> values;
      std::size_t total = 0;
      for (std::size_t k = Below(2) == 0 ? 300 : 1 + Below(5); k > 0; --k) {
        ids.push_back(RandomIds(1 + Below(50)));
        rows.push_back(std::make_unique<Array<T>>(ids.back().size() * row_elements));
        Randomize(*rows.back(), random_);
        total += ids.back().size();
      }
      for (std::size_t k = 0; k < ids.size(); ++k) values.push_back({ids[k], rows[k]->data()});
      std::vector<RowEntry> entries(2 * total);
      const auto merged = ops::MergeRows(values, row_bytes, entries.data(), entries.data() + total);
      const std::size_t count = ops::CountIds(merged);
      std::vector<std::int64_t> expected_ids(count);
      Array<T> expected(count * row_elements);
      ops::SumRows(kDTypeOf<T>, row_elements, merged, expected_ids.data(), expected.data());

      std::vector<std::int64_t> listed_ids(total);
      std::vector<const std::byte*> listed_rows(total);
      int launches = 0;
      const EmulatedLaunch launch{&launches};
      Packer<ListRowsBody, EmulatedLaunch> list(launch);
      std::size_t listed = 0;
      for (const SparseRows& value : values) {
        list.Add({value.ids.data(), static_cast<const std::byte*>(value.rows), row_bytes,
                  listed_ids.data() + listed, listed_rows.data() + listed},
                 {.count = value.ids.size(), .head = 0});
        listed += value.ids.size();
      }
      list.Flush();
      std::vector<std::size_t> order(total);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::ranges::stable_sort(order, {}, [&](std::size_t i) { return listed_ids[i]; });
      std::vector<std::int64_t> sorted_ids(total);
      std::vector<const std::byte*> sorted_rows(total);
      for (std::size_t i = 0; i < total; ++i) {
        sorted_ids[i] = listed_ids[order[i]];
        sorted_rows[i] = listed_rows[order[i]];
      }
      std::vector<std::uint8_t> flags(total, 9);
      Packer<FlagFirstBody, EmulatedLaunch> flag(launch);
      flag.Add({sorted_ids.data(), flags.data()}, {.count = total, .head = 0});
      flag.Flush();
      std::vector<std::int64_t> starts;
      for (std::size_t i = 0; i < total; ++i) {
        if (flags[i] == 1) starts.push_back(static_cast<std::int64_t>(i));
      }
      const auto present = static_cast<std::int64_t>(starts.size());
      std::vector<std::int64_t> out_ids(count);
      Array<T> out(count * row_elements);
      EmulateRows(SumListedRowsBody<W>{sorted_ids.data(), sorted_rows.data(), total, starts.data(),
                                       &present, row_elements, out_ids.data(),
                                       reinterpret_cast<StorageType<W>*>(out.data())},
                  total);
      EXPECT_EQ(out_ids, expected_ids);
      ExpectSame(out, expected, "sum");
    }
  });
}

// The bodies that CountMissing, InsertRows and FindRows launch, with the standard library's running
// sum between them: values and wanted ids of any length, some of the latter not there.
TEST_F(EmulatedRowSparse, InsertsTheRowsThatAreMissing) {
  for (int round = 0; round < Scaled(60); ++round) {
    const std::size_t row_bytes = Below(3) == 0 ? Below(40) : 4 * Below(200);
    const std::vector<std::int64_t> ids = round % 7 == 0 ? Ids{} : RandomIds(1 + Below(4));
    const std::vector<std::int64_t> listed = round % 5 == 0 ? Ids{} : RandomIds(1 + Below(4));
    const auto present = static_cast<std::int64_t>(Below(listed.size() + 1));
    const std::span<const std::int64_t> wanted(listed.data(), static_cast<std::size_t>(present));
    Array<std::uint8_t> rows(ids.size() * row_bytes, Below(3) * Below(16));
    Randomize(rows, random_);
    Ids all;
    std::ranges::set_union(ids, wanted, std::back_inserter(all));
    Array<std::uint8_t> expected(all.size() * row_bytes);
    ops::GatherRows({ids, rows.data()}, all, row_bytes, expected.data());

    const GpuRows value = {ids.data(), ids.size(), rows.data()};
    const GpuIds list = {listed.data(), listed.size(), &present};
    int launches = 0;
    const EmulatedLaunch launch{&launches};
    Ids flags(listed.size() + 1, 9);
    Packer<FlagMissingBody, EmulatedLaunch> flag(launch);
    flag.Add({value.list(), list, flags.data()}, {.count = flags.size(), .head = 0});
    flag.Flush();
    Ids before(flags.size());
    std::exclusive_scan(flags.begin(), flags.end(), before.begin(), std::int64_t{0});
    ASSERT_EQ(ids.size() + static_cast<std::size_t>(before.back()), all.size());

    Ids out_ids(all.size(), -1);
    Array<std::uint8_t> out(expected.size(), Below(3) * Below(16));
    auto* const out_rows = reinterpret_cast<std::byte*>(out.data());
    EmulateRows(MoveRowsBody{value, list, before.data(), out_ids.data(), out_rows,
                             RowCopy(row_bytes, rows.data(), out.data())},
                ids.size());
    EmulateRows(AddZeroRowsBody{value.list(), list, before.data(), out_ids.data(), out_rows,
                                RowCopy(row_bytes, out.data(), out.data())},
                listed.size());
    EXPECT_EQ(out_ids, all);
    ExpectSame(out, expected, "inserted");

    Ids places(listed.size(), 77);
    Packer<FindRowsBody, EmulatedLaunch> find(launch);
    find.Add({{all.data(), all.size()}, list, places.data()}, {.count = places.size(), .head = 0});
    find.Flush();
    for (std::size_t i = 0; i < places.size(); ++i) {
      const auto found = std::ranges::find(all, listed[i]) - all.begin();
      EXPECT_EQ(places[i], i < wanted.size() ? found : 77);
    }
  }
}

// What lies behind the rows that are there is left alone.
TEST_F(EmulatedRowSparse, RowsThatAreNotThereAreLeftAlone) {
  const std::vector<std::int64_t> ids = {3, 7, 5, 1};  // of which two are
  const std::int64_t present = 2;
  Array<float> rows(4 * 6);
  Array<float> dense(kRows * 6);
  Randomize(rows, random_);
  Randomize(dense, random_);
  Array<float> scattered(dense.size());
  Array<float> added(dense.size());
  Array<float> gathered(rows.size());
  Array<float> expected(dense.size());
  Array<float> expected_rows(rows.size());
  for (Array<float>* array : {&scattered, &added, &expected}) array->CopyFrom(dense);
  const GpuRows value = {ids.data(), 4, rows.data(), &present};
  const std::span<const std::int64_t> there(ids.data(), 2);
  const std::size_t row_bytes = 6 * sizeof(float);

  EmulateRows(ScatterRowsBody{value, reinterpret_cast<std::byte*>(scattered.data()), 0,
                              RowCopy(row_bytes, rows.data(), scattered.data())},
              4);
  ops::ScatterRows({there, rows.data()}, row_bytes, expected.data(), 0);
  ExpectSame(scattered, expected, "scatter");

  EmulateRows(AddRowsBody<float>{value, added.data(), 0, 6}, 4);
  expected.CopyFrom(dense);
  ops::AddRows(DType::kFloat32, 6, {there, rows.data()}, expected.data(), 0);
  ExpectSame(added, expected, "add");

  gathered.CopyFrom(rows);
  expected_rows.CopyFrom(rows);
  EmulateRows(GatherDenseRowsBody{reinterpret_cast<const std::byte*>(dense.data()), 0, value.list(),
                                  reinterpret_cast<std::byte*>(gathered.data()),
                                  RowCopy(row_bytes, dense.data(), gathered.data())},
              4);
  for (std::size_t i = 0; i < 2; ++i) {
    std::copy_n(dense.data() + static_cast<std::size_t>(ids[i]) * 6, 6,
                expected_rows.data() + i * 6);
  }
  ExpectSame(gathered, expected_rows, "gather");
}

// A list is good if the CPU takes it; if not, the place of the first bad id is known.
TEST_F(EmulatedRowSparse, ReadsRowIdsOfEveryNumericDType) {
  const double kIds[] = {0, 5, 99, 100, -1, 2.5, 1e30, -0.0, std::nan("")};
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!std::is_same_v<T, bool>) {
      const std::size_t count = 1 + Below(50);
      Array<T> ids(count);
      std::uint64_t bad = count;
      for (std::size_t i = count; i-- > 0;) {
        ids[i] =
            Scalar(Below(3) == 0 ? kIds[Below(std::size(kIds))] : double(Below(kRows))).As<T>();
        std::int64_t one = 0;
        try {
          ops::ReadRowIds(kDTypeOf<T>, &ids[i], kRows, {&one, 1});
        } catch (const InvalidArgument&) {
          bad = i;
        }
      }
      std::vector<std::int64_t> out(count, -7);
      std::uint64_t first_bad = count;
      int launches = 0;
      const EmulatedLaunch launch{&launches};
      Packer<ReadRowIdsBody<T>, EmulatedLaunch> packer(launch);
      packer.Add({ids.data(), kRows, out.data(), &first_bad}, {.count = count, .head = 0});
      packer.Flush();
      EXPECT_EQ(first_bad, bad);
      if (bad == count) {
        std::vector<std::int64_t> expected(count);
        ops::ReadRowIds(kDTypeOf<T>, ids.data(), kRows, expected);
        EXPECT_EQ(out, expected);
      }
    }
  });
}

TEST(GpuRowSparse, FindsThePlaceOfAnId) {
  constexpr std::int64_t kIds[] = {2, 3, 7, 100};
  EXPECT_EQ(PlaceOf(2, kIds, 4), 0);
  EXPECT_EQ(PlaceOf(7, kIds, 4), 2);
  EXPECT_EQ(PlaceOf(100, kIds, 4), 3);
  EXPECT_EQ(PlaceOf(1, kIds, 4), -1);
  EXPECT_EQ(PlaceOf(8, kIds, 4), -1);
  EXPECT_EQ(PlaceOf(101, kIds, 4), -1);
  EXPECT_EQ(PlaceOf(2, kIds, 0), -1);
}

}  // namespace
}  // namespace heddle::ops::cuda
