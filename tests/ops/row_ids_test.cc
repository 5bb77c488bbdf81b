// Row ids against std::set: read from every dtype, sorted, made unique, merged and found.
#include "ops/row_ids.h"

#include <heddle/error.h>

#include <set>
#include <string>

#include "ops/convert.h"
#include "tests/message_of.h"
#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

using Ids = std::vector<std::int64_t>;

class RowIdsTest : public KernelTest {
 protected:
  Ids RandomIds(std::size_t count, std::uint64_t end) {
    Ids ids(count);
    for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random_() % end);
    return ids;
  }
  Ids SortedUniqueIds(std::size_t count, std::uint64_t end) {
    const Ids ids = RandomIds(count, end);
    const std::set<std::int64_t> set(ids.begin(), ids.end());
    return {set.begin(), set.end()};
  }
};

TEST_F(RowIdsTest, AreReadFromEveryNumericDType) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!std::is_same_v<T, bool>) {
      const Ids expected = {3, 0, 100, 7, 7, 127};
      std::vector<T> given;
      for (const std::int64_t id : expected) given.push_back(Convert<T>(id));
      Ids out(expected.size(), -1);
      ReadRowIds(kDTypeOf<T>, given.data(), 128, out);
      EXPECT_EQ(out, expected);
      EXPECT_THROW(ReadRowIds(kDTypeOf<T>, given.data(), 127, out), InvalidArgument);
    }
  });
}

TEST_F(RowIdsTest, OutOfRangeOrFractionalIdsAreNamedBesideTheRange) {
  Ids out(1);
  const auto read = [&](auto id, std::int64_t num_rows) {
    return MessageOf([&] { ReadRowIds(kDTypeOf<decltype(id)>, &id, num_rows, out); });
  };
  EXPECT_EQ(read(std::int64_t{5}, 5), "row id 5: expected one in [0, 5)");
  EXPECT_EQ(read(std::int32_t{-1}, 5), "row id -1: expected one in [0, 5)");
  EXPECT_EQ(read(1.5F, 5), "row id 1.5: expected a whole number in [0, 5)");
  EXPECT_EQ(read(-1.0, 5), "row id -1: expected a whole number in [0, 5)");
  EXPECT_EQ(read(5.0, 5), "row id 5: expected a whole number in [0, 5)");
  EXPECT_EQ(read(Float16(0.5F), 5), "row id 0.5: expected a whole number in [0, 5)");
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_NE(read(0x1p63, kMost), "");
  EXPECT_NE(read(std::numeric_limits<double>::infinity(), kMost), "");
  EXPECT_NE(read(std::numeric_limits<float>::quiet_NaN(), kMost), "");
  constexpr double kLarge = 0x1p62;
  EXPECT_NO_THROW(ReadRowIds(DType::kFloat64, &kLarge, kMost, out));
  EXPECT_EQ(out, (Ids{std::int64_t{1} << 62}));
  EXPECT_EQ(read(true, 5), "row ids: expected a numeric dtype, got bool");
}

TEST_F(RowIdsTest, SortUniqueEqualsASet) {
  for (int round = 0; round < 200; ++round) {
    const std::size_t count = round % 4 == 0 ? Below(20000) : RandomCount();
    const std::uint64_t end = std::uint64_t{1} << Below(64);
    Ids ids = RandomIds(count, end > 1 ? end : 1);
    if (Below(4) == 0) std::sort(ids.begin(), ids.end());
    const std::set<std::int64_t> expected(ids.begin(), ids.end());
    Ids scratch(count);
    ids.resize(SortUnique(ids, scratch));
    EXPECT_EQ(ids, Ids(expected.begin(), expected.end()));
    EXPECT_TRUE(IsSortedUnique(ids));
  }
}

TEST_F(RowIdsTest, RepeatedOrDecreasingIdsAreNotSortedUnique) {
  EXPECT_TRUE(IsSortedUnique({}));
  EXPECT_TRUE(IsSortedUnique(Ids{4}));
  EXPECT_TRUE(IsSortedUnique(Ids{4, 5, 9}));
  EXPECT_FALSE(IsSortedUnique(Ids{4, 4}));
  EXPECT_FALSE(IsSortedUnique(Ids{4, 5, 3}));
}

TEST_F(RowIdsTest, MergeUniqueEqualsASet) {
  for (int round = 0; round < 100; ++round) {
    const Ids a = SortedUniqueIds(RandomCount(), 1000);
    const Ids b = SortedUniqueIds(RandomCount(), 1000);
    std::set<std::int64_t> expected(a.begin(), a.end());
    expected.insert(b.begin(), b.end());
    Ids out(a.size() + b.size());
    out.resize(MergeUnique(a, b, out.data()));
    EXPECT_EQ(out, Ids(expected.begin(), expected.end()));
  }
}

TEST_F(RowIdsTest, FinderAndLowerBoundEqualAPlainSearch) {
  for (int round = 0; round < 300; ++round) {
    Ids ids = SortedUniqueIds(RandomCount(), 1 + Below(3000));
    if (Below(3) == 0) {  // without gaps, not always from 0
      const std::int64_t first = static_cast<std::int64_t>(Below(5));
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = first + static_cast<std::int64_t>(i);
    }
    Ids wanted = RandomIds(Below(200), 3100);
    std::sort(wanted.begin(), wanted.end());
    RowFinder finder(ids);
    for (const std::int64_t id : wanted) {
      const auto lower = std::lower_bound(ids.begin(), ids.end(), id);
      const bool found = lower != ids.end() && *lower == id;
      ASSERT_EQ(finder.Find(id), found ? lower - ids.begin() : -1);
      const std::size_t place = static_cast<std::size_t>(lower - ids.begin());
      ASSERT_EQ(LowerBoundFrom(ids, Below(place + 1), id), place);
    }
  }
}

}  // namespace
}  // namespace heddle::ops
