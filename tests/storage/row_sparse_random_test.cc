// Random programs of row-sparse operations against a map from row ids to rows.
//
// Goal: row-sparse arrays behave as if every operation ran when it was called, with the bits of
// plain loops in float. Method: a few slots hold arrays; each step picks an operation and does it
// to the arrays and, by a plain loop, to the model. Values are compared at random moments and at
// the end, on every engine, over many seeds. Then once with arrays that are large enough to be
// shared with workers, against sums of dense arrays.
#include <heddle/engine.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/support.h"

namespace heddle {
namespace {

using Ids = std::vector<std::int64_t>;
using Rows = std::map<std::int64_t, std::vector<float>>;

struct RowsSlot {
  RowSparseNDArray array;
  Rows model;
};

class RowsProgram {
 public:
  RowsProgram(Engine& engine, std::uint64_t seed)
      : engine_(engine), random_(seed), shape_{Below(30) + 1, Below(4)} {
    for (int i = 0; i < 4; ++i) slots_.push_back(Fresh());
  }

  void Run(int steps) {
    for (int i = 0; i < steps; ++i) Step();
    for (const RowsSlot& slot : slots_) Check(slot);
  }

 private:
  std::int64_t Below(std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random_);
  }
  RowsSlot& Any() { return slots_[static_cast<std::size_t>(Below(4))]; }
  float Number() {
    if (Below(4) == 0) return 0;
    return std::uniform_real_distribution<float>(-2, 2)(random_);
  }
  std::size_t row_size() const { return static_cast<std::size_t>(shape_[1]); }

  RowsSlot Fresh() {
    RowsSlot slot;
    Ids ids;
    std::vector<float> rows;
    const std::int64_t one_in = 1 + Below(4);
    for (std::int64_t id = 0; id < shape_[0]; ++id) {
      if (Below(one_in) == 0) ids.push_back(id);
    }
    std::shuffle(ids.begin(), ids.end(), random_);
    for (const std::int64_t id : ids) {
      std::vector<float>& row = slot.model[id];
      for (std::size_t j = 0; j < row_size(); ++j) row.push_back(Number());
      rows.insert(rows.end(), row.begin(), row.end());
    }
    slot.array =
        RowSparseNDArray::FromVectors<float>(ids, rows, shape_, DType::kFloat32, Cpu(), engine_);
    return slot;
  }

  static void Add(Rows& to, const Rows& from) {
    for (const auto& [id, row] : from) {
      const auto [place, is_new] = to.emplace(id, row);
      if (is_new) continue;
      for (std::size_t j = 0; j < row.size(); ++j) place->second[j] += row[j];
    }
  }

  void Step() {
    RowsSlot& a = Any();
    const RowsSlot b = Any();
    switch (Below(10)) {
      case 0:
        a = Fresh();
        break;
      case 1:
        a.array += b.array;
        // Missing rows come as zeros, to which rows are added.
        for (const auto& [id, row] : b.model) a.model.emplace(id, std::vector<float>(row_size()));
        Add(a.model, b.model);
        break;
      case 2: {
        const float factor = Number();
        a.array *= factor;
        for (auto& [id, row] : a.model) {
          for (float& value : row) value *= factor;
        }
        break;
      }
      case 3: {
        const RowsSlot c = Any();
        const RowsSlot old = a;
        Sum({b.array, c.array, old.array}, a.array);
        a.model = b.model;
        Add(a.model, c.model);
        Add(a.model, old.model);
        break;
      }
      case 4:
        b.array.CopyTo(a.array);
        a.model = b.model;
        break;
      case 5: {
        std::vector<std::int32_t> ids;
        for (std::int64_t i = Below(20); i > 0; --i) {
          ids.push_back(static_cast<std::int32_t>(Below(shape_[0])));
        }
        const NDArray wanted = NDArray::FromVector<std::int32_t>(
            ids, {static_cast<std::int64_t>(ids.size())}, DType::kInt32, Cpu(), engine_);
        a.array = b.array.Retain(wanted);
        a.model.clear();
        if (b.model.empty()) break;
        for (const std::int32_t id : ids) {
          const auto found = b.model.find(id);
          a.model[id] = found == b.model.end() ? std::vector<float>(row_size()) : found->second;
        }
        break;
      }
      case 6: {
        a.array = RowSparseNDArray::FromDense(b.array.ToDense());
        a.model.clear();
        for (const auto& [id, row] : b.model) {
          if (std::any_of(row.begin(), row.end(), [](float x) { return x != 0; })) {
            a.model[id] = row;
          }
        }
        break;
      }
      case 7: {
        // Into the dense form, to which a third is added.
        const RowsSlot c = Any();
        const NDArray dense = b.array.ToDense();
        dense += c.array;
        std::vector<float> expected = Dense(b.model);
        for (const auto& [id, row] : c.model) {
          for (std::size_t j = 0; j < row.size(); ++j) {
            expected[static_cast<std::size_t>(id) * row_size() + j] += row[j];
          }
        }
        EXPECT_EQ(dense.ToVector<float>(), expected);
        break;
      }
      case 8:
        a.array = b.array.Copy(Cpu(static_cast<int>(Below(3)))).Copy(Cpu());
        a.model = b.model;
        break;
      default:
        Check(a);
    }
  }

  std::vector<float> Dense(const Rows& rows) const {
    std::vector<float> dense(static_cast<std::size_t>(shape_.size()));
    for (const auto& [id, row] : rows) {
      std::copy(row.begin(), row.end(), dense.begin() + id * shape_[1]);
    }
    return dense;
  }

  void Check(const RowsSlot& slot) {
    const RowVectors<float> there = slot.array.ToVectors<float>();
    Ids ids;
    std::vector<float> rows;
    for (const auto& [id, row] : slot.model) {
      ids.push_back(id);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    ASSERT_EQ(there.row_ids, ids);
    ASSERT_EQ(there.rows, rows);
    ASSERT_EQ(slot.array.ToVector<float>(), Dense(slot.model));
  }

  Engine& engine_;
  std::mt19937_64 random_;
  const Shape shape_;
  std::vector<RowsSlot> slots_;
};

class RowSparseRandom : public engine_test::EveryEngine {};

TEST_P(RowSparseRandom, ProgramsEqualTheModel) {
  Engine engine(GetParam().options);
  const std::uint64_t seed = engine_test::BaseSeed();
  for (int round = 0; round < engine_test::Rounds(30); ++round) {
    SCOPED_TRACE("seed " + std::to_string(seed + static_cast<std::uint64_t>(round)));
    RowsProgram(engine, seed + static_cast<std::uint64_t>(round)).Run(80);
    if (HasFatalFailure()) return;
  }
}

// Values of some hundred KiB: cut into ranges of ids, which workers share.
TEST_P(RowSparseRandom, LargeValuesHaveTheBitsOfDenseSumsForEveryNumberOfWorkers) {
  Engine engine(GetParam().options);
  std::mt19937_64 random(engine_test::BaseSeed());
  const Shape shape{20000, 24};
  std::vector<RowSparseNDArray> inputs;
  std::vector<NDArray> dense;
  std::set<std::int64_t> all_ids;
  for (int k = 0; k < 5; ++k) {
    Ids ids;
    std::vector<float> rows;
    // Dense regions at different places, so that ranges of ids hold very different numbers of rows.
    const std::int64_t crowded = k * 4000;
    for (std::int64_t id = 0; id < shape[0]; ++id) {
      const bool in_crowd = id >= crowded && id < crowded + 3000;
      if (k == 4 ? id % 2 == 0 : in_crowd || random() % 8 == 0) ids.push_back(id);
    }
    for (std::size_t i = 0; i < ids.size() * 24; ++i) {
      rows.push_back(std::uniform_real_distribution<float>(-1, 1)(random));
    }
    all_ids.insert(ids.begin(), ids.end());
    const DType dtype = DType::kBFloat16;
    inputs.push_back(RowSparseNDArray::FromVectors<float>(ids, rows, shape, dtype, Cpu(), engine));
    dense.push_back(inputs.back().ToDense());
  }
  const RowSparseNDArray sum(shape, DType::kBFloat16, Cpu(), engine);
  NDArray expected(shape, DType::kBFloat16, Cpu(), engine);
  Sum(inputs, sum);
  Sum(dense, expected);
  EXPECT_EQ(sum.ToVectors<float>().row_ids, Ids(all_ids.begin(), all_ids.end()));
  EXPECT_EQ(sum.ToVector<float>(), expected.ToVector<float>());

  const NDArray added = dense[0].Copy();
  added += inputs[1];
  dense[0] += dense[1];
  EXPECT_EQ(added.ToVector<float>(), dense[0].ToVector<float>());
  inputs[0] += inputs[1];
  EXPECT_EQ(inputs[0].ToVector<float>(), dense[0].ToVector<float>());
  EXPECT_EQ(RowSparseNDArray::FromDense(expected).ToVector<float>(), expected.ToVector<float>());
  EXPECT_EQ(RowSparseNDArray::FromDense(expected.AsType(DType::kFloat32)).ToVector<float>(),
            expected.ToVector<float>());

  // 200 000 ids in runs that are sorted apart and merged.
  std::vector<std::int32_t> wanted(200000);
  for (std::int32_t& id : wanted) id = static_cast<std::int32_t>(random() % 15000);
  const std::set<std::int64_t> kept(wanted.begin(), wanted.end());
  const NDArray ids =
      NDArray::FromVector<std::int32_t>(wanted, {200000}, DType::kInt32, Cpu(), engine);
  const RowVectors<float> rows = sum.Retain(ids).ToVectors<float>();
  EXPECT_EQ(rows.row_ids, Ids(kept.begin(), kept.end()));
  const std::vector<float> values = expected.ToVector<float>();
  for (std::size_t i = 0; i < rows.row_ids.size(); ++i) {
    for (std::size_t j = 0; j < 24; ++j) {
      ASSERT_EQ(rows.rows[i * 24 + j], values[static_cast<std::size_t>(rows.row_ids[i]) * 24 + j]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RowSparseRandom, testing::ValuesIn(engine_test::AllConfigs()),
                         engine_test::ConfigLabel);

}  // namespace
}  // namespace heddle
