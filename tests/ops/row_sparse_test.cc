// Kernels over row-sparse values against plain loops over dense arrays, for every dtype and, where
// they add, on every SIMD target.
#include "ops/row_sparse.h"

#include <algorithm>
#include <map>
#include <memory>

#include "ops/row_merge.h"
#include "tests/ops/ops_testing.h"

namespace heddle::ops {
namespace {

using Ids = std::vector<std::int64_t>;

// Random rows of a value, with guards around them.
template <typename T>
struct Value {
  Ids ids;
  std::unique_ptr<Array<T>> rows;

  SparseRows sparse() const { return {ids, rows->data()}; }
};

// The merged rows of some values.
class Merged {
 public:
  Merged(const std::vector<SparseRows>& inputs, std::size_t row_bytes) {
    std::size_t total = 0;
    for (const SparseRows& input : inputs) total += input.ids.size();
    memory_.resize(2 * total);
    entries_ = MergeRows(inputs, row_bytes, memory_.data(), memory_.data() + total);
  }
  std::span<const RowEntry> entries() const { return entries_; }

 private:
  std::vector<RowEntry> memory_;
  std::span<const RowEntry> entries_;
};

class RowSparseTest : public KernelTest {
 protected:
  static constexpr std::int64_t kRows = 40;

  Ids RandomIds() {
    Ids ids;
    const std::size_t one_in = 1 + Below(6);
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (Below(one_in) == 0) ids.push_back(id);
    }
    return Below(8) == 0 ? Ids{} : ids;
  }
  std::size_t RandomRowElements() { return Below(5) == 0 ? Below(2) : Below(70); }

  template <typename T>
  Value<T> RandomValues(std::size_t row_elements) {
    Value<T> value{RandomIds(), nullptr};
    value.rows = std::make_unique<Array<T>>(value.ids.size() * row_elements, Below(16));
    Randomize(*value.rows, random_);
    if constexpr (std::is_same_v<T, bool>) {
      for (std::size_t i = 0; i < value.rows->size(); ++i) (*value.rows)[i] &= 1;
    }
    return value;
  }
  template <typename T>
  std::unique_ptr<Array<T>> RandomDense(std::size_t row_elements) {
    auto dense = std::make_unique<Array<T>>(kRows * row_elements, Below(16));
    Randomize(*dense, random_);
    return dense;
  }
};

// a + b as ops/sum.h defines a step of it, in the type that sums are computed in.
template <typename T>
auto Lift(StorageType<T> value) {
  if constexpr (std::is_same_v<T, bool>) {
    return static_cast<std::uint8_t>(value != 0);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<std::uint64_t>(value);
  } else {
    return static_cast<ComputeType<T>>(value);
  }
}
template <typename T, typename C>
C Plus(C sum, StorageType<T> value) {
  if constexpr (std::is_same_v<T, bool>) {
    return static_cast<std::uint8_t>(sum != 0 || value != 0);
  } else {
    return sum + Lift<T>(value);
  }
}

TEST_F(RowSparseTest, SumEqualsThePlainLoopInListOrder) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    using C = decltype(Lift<T>(StorageType<T>{}));
    for (int round = 0; round < 40; ++round) {
      const std::size_t elements = RandomRowElements();
      std::vector<Value<T>> values;
      for (std::size_t k = 0, n = 1 + Below(round % 8 == 0 ? 20 : 5); k < n; ++k) {
        values.push_back(RandomValues<T>(elements));
      }
      std::map<std::int64_t, std::vector<C>> sums;
      std::vector<SparseRows> inputs;
      for (const Value<T>& value : values) {
        inputs.push_back(value.sparse());
        for (std::size_t i = 0; i < value.ids.size(); ++i) {
          std::vector<C>& sum = sums[value.ids[i]];
          const bool first = sum.empty();
          sum.resize(elements);
          for (std::size_t j = 0; j < elements; ++j) {
            const StorageType<T> element = (*value.rows)[i * elements + j];
            sum[j] = first ? Lift<T>(element) : Plus<T>(sum[j], element);
          }
        }
      }
      Ids expected_ids;
      Array<T> expected(sums.size() * elements);
      for (const auto& [id, sum] : sums) {
        for (std::size_t j = 0; j < elements; ++j) {
          expected[expected_ids.size() * elements + j] = static_cast<StorageType<T>>(sum[j]);
        }
        expected_ids.push_back(id);
      }
      const Merged merged(inputs, elements * sizeof(T));
      EXPECT_EQ(CountIds(merged.entries()), expected_ids.size());
      OnEveryTarget([&] {
        Ids ids(expected_ids.size(), -1);
        Array<T> rows(expected.size(), Below(16));
        SumRows(kDTypeOf<T>, elements, merged.entries(), ids.data(), rows.data());
        EXPECT_EQ(ids, expected_ids);
        ExpectSame(rows, expected);
      });
    }
  });
}

TEST_F(RowSparseTest, SumIsTheSameForEveryCutOfTheIds) {
  using T = BFloat16;
  constexpr std::size_t kElements = 9;
  for (int round = 0; round < 30; ++round) {
    std::vector<Value<T>> values;
    std::vector<SparseRows> inputs;
    for (int k = 0; k < 3; ++k) values.push_back(RandomValues<T>(kElements));
    for (const Value<T>& value : values) inputs.push_back(value.sparse());
    const Merged merged(inputs, kElements * sizeof(T));
    const std::size_t count = CountIds(merged.entries());
    Ids whole_ids(count);
    Array<T> whole(count * kElements);
    SumRows(DType::kBFloat16, kElements, merged.entries(), whole_ids.data(), whole.data());

    Ids ids(count);
    Array<T> rows(count * kElements);
    const std::int64_t cut = static_cast<std::int64_t>(Below(kRows + 1));
    std::size_t written = 0;
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, cut}, std::pair{cut, kRows}}) {
      std::vector<SparseRows> part;
      for (const SparseRows& input : inputs) {
        part.push_back(RowsBetween(input, kElements * sizeof(T), begin, end));
      }
      const Merged part_merged(part, kElements * sizeof(T));
      SumRows(DType::kBFloat16, kElements, part_merged.entries(), ids.data() + written,
              rows.data() + written * kElements);
      written += CountIds(part_merged.entries());
    }
    EXPECT_EQ(written, count);
    EXPECT_EQ(ids, whole_ids);
    ExpectSame(rows, whole);
  }
}

TEST_F(RowSparseTest, GatherGivesTheRowsAskedForAndZerosForThoseThatAreNotThere) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < 40; ++round) {
      const std::size_t elements = RandomRowElements();
      Value<T> value = RandomValues<T>(elements);
      Ids wanted;
      for (std::size_t i = Below(200); i > 0; --i) wanted.push_back(Below(kRows));
      std::sort(wanted.begin(), wanted.end());
      Array<T> expected(wanted.size() * elements);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto found = std::find(value.ids.begin(), value.ids.end(), wanted[i]);
        const auto place = static_cast<std::size_t>(found - value.ids.begin());
        for (std::size_t j = 0; j < elements; ++j) {
          expected[i * elements + j] =
              found == value.ids.end() ? StorageType<T>{} : (*value.rows)[place * elements + j];
        }
      }
      Array<T> out(wanted.size() * elements, Below(16));
      GatherRows(value.sparse(), wanted, elements * sizeof(T), out.data());
      ExpectSame(out, expected);
    }
  });
}

TEST_F(RowSparseTest, ScatterAndAddTouchTheRowsThatAreThereAndNoOther) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < 20; ++round) {
      const std::size_t elements = RandomRowElements();
      Value<T> value = RandomValues<T>(elements);
      const auto before = RandomDense<T>(elements);
      Array<T> scattered(before->size());
      Array<T> added(before->size());
      scattered.CopyFrom(*before);
      added.CopyFrom(*before);
      for (std::size_t i = 0; i < value.ids.size(); ++i) {
        for (std::size_t j = 0; j < elements; ++j) {
          const std::size_t at = static_cast<std::size_t>(value.ids[i]) * elements + j;
          const StorageType<T> element = (*value.rows)[i * elements + j];
          scattered[at] = element;
          added[at] = static_cast<StorageType<T>>(Plus<T>(Lift<T>((*before)[at]), element));
        }
      }
      OnEveryTarget([&] {
        // In two cuts, the second of which sees only the rows from `cut` on.
        const std::int64_t cut = static_cast<std::int64_t>(Below(kRows + 1));
        const std::size_t skipped = static_cast<std::size_t>(cut) * elements;
        const std::size_t row_bytes = elements * sizeof(T);
        const SparseRows low = RowsBetween(value.sparse(), row_bytes, 0, cut);
        const SparseRows high = RowsBetween(value.sparse(), row_bytes, cut, kRows);
        Array<T> out(before->size(), Below(16));
        out.CopyFrom(*before);
        ScatterRows(low, row_bytes, out.data(), 0);
        ScatterRows(high, row_bytes, out.data() + skipped, cut);
        ExpectSame(out, scattered);
        out.CopyFrom(*before);
        AddRows(kDTypeOf<T>, elements, low, out.data(), 0);
        AddRows(kDTypeOf<T>, elements, high, out.data() + skipped, cut);
        ExpectSame(out, added);
      });
    }
  });
}

TEST_F(RowSparseTest, CompactKeepsTheRowsThatAreNotZero) {
  ForEveryDType([&](auto type) {
    using T = typename decltype(type)::type;
    for (int round = 0; round < 20; ++round) {
      const std::size_t elements = RandomRowElements();
      auto dense = RandomDense<T>(elements);
      Ids expected_ids;
      std::vector<StorageType<T>> expected;
      for (std::int64_t id = 0; id < kRows; ++id) {
        StorageType<T>* const row = dense->data() + static_cast<std::size_t>(id) * elements;
        switch (Below(3)) {
          case 0:
            std::fill_n(row, elements, StorageType<T>{});
            break;
          case 1:  // one element is not zero, or a NaN
            std::fill_n(row, elements, StorageType<T>{});
            if (elements > 0) row[Below(elements)] = RandomValue<T>(random_);
            break;
          default:
            break;
        }
        const bool zero = std::all_of(row, row + elements, [](StorageType<T> element) {
          return ToDouble(element) == 0;  // also -0.0
        });
        if (zero) continue;
        expected_ids.push_back(id);
        expected.insert(expected.end(), row, row + elements);
      }
      std::vector<std::uint8_t> flags(kRows, 9);
      ASSERT_EQ(FlagNonZeroRows(kDTypeOf<T>, elements, dense->data(), flags), expected_ids.size());
      Ids ids(expected_ids.size(), -1);
      Array<T> rows(expected.size(), Below(16));
      CompactRows(flags, 0, elements * sizeof(T), dense->data(), ids.data(), rows.data());
      EXPECT_EQ(ids, expected_ids);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(SameBits(rows[i], expected[i])) << i;
      }
    }
  });
}

}  // namespace
}  // namespace heddle::ops
