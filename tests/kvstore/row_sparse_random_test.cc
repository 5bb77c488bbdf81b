// Random calls on keys of both kinds, against a model of dense values.
//
// Goal: whatever is dense or row-sparse, and however it is pushed, a store holds the values that
// plain arrays would, and a row-sparse value the rows that it should. Method: one thread makes
// random calls on some keys; the model applies them to maps from row ids to rows of small integers.
// Outputs are read only at the end, so that the engine has everything to put in order. Once with
// the default updater, which changes the kinds of keys, and once with updaters that add.
#include <heddle/kvstore.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

using Ids = std::vector<std::int64_t>;
using Rows = std::map<std::int64_t, std::int64_t>;  // a row holds one number, several times

constexpr std::int64_t kRows = 12;
constexpr std::int64_t kRowSize = 3;

class Calls {
 public:
  // `on`: where what is meant for a cpu(i) lies.
  Calls(Engine& engine, KVStore& store, bool adds, std::uint64_t seed, Device (*on)(Device))
      : engine_(engine), store_(store), random_(seed), adds_(adds), on_(on) {
    for (int key = 0; key < kKeys; ++key) {
      const bool row_sparse = key % 2 == 0;
      const Rows rows = NewRows(row_sparse);
      Init(key, row_sparse, rows);
    }
  }

  void Run(int calls) {
    for (int i = 0; i < calls; ++i) Step();
    for (const auto& check : checks_) check();
  }

 private:
  static constexpr int kKeys = 4;
  static constexpr std::int64_t kAbsent = -77;

  struct Model {
    bool row_sparse = false;
    Rows rows;  // of a dense value all
    std::string error;
  };

  std::int64_t Below(std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random_);
  }
  Device AnyDevice() { return on_(Cpu(static_cast<int>(Below(3)))); }

  // Some rows; all for a dense array.
  Rows NewRows(bool row_sparse) {
    Rows rows;
    const std::int64_t one_in = row_sparse ? 1 + Below(5) : 1;
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (Below(one_in) == 0) rows[id] = Below(100) - 30;
    }
    return row_sparse && Below(6) == 0 ? Rows{} : rows;
  }
  RowSparseNDArray ToRowSparse(const Rows& rows) {
    Ids ids;
    std::vector<std::int64_t> values;
    for (const auto& [id, value] : rows) {
      ids.push_back(id);
      values.insert(values.end(), kRowSize, value);
    }
    return RowSparseNDArray::FromVectors<std::int64_t>(ids, values, {kRows, kRowSize},
                                                       DType::kInt64, AnyDevice(), engine_);
  }
  NDArray ToDense(const Rows& rows) {
    return NDArray::FromVector(Dense(rows), {kRows, kRowSize}, DType::kInt64, AnyDevice(), engine_);
  }
  static std::vector<std::int64_t> Dense(const Rows& rows) {
    std::vector<std::int64_t> values(kRows * kRowSize);
    for (const auto& [id, value] : rows) {
      std::fill_n(values.begin() + id * kRowSize, kRowSize, value);
    }
    return values;
  }
  template <class Array>
  std::string MayPoison(const Array& array) {
    if (Below(20) != 0) return "";
    const std::string error = "error " + std::to_string(++errors_);
    engine_.Push({.name = "fail", .writes = {array.var()}},
                 [error] { throw std::runtime_error(error); });
    return error;
  }

  void Init(int key, bool row_sparse, const Rows& rows) {
    if (row_sparse) {
      store_.Init(key, ToRowSparse(rows));
    } else {
      store_.Init(key, ToDense(rows));
    }
    models_[key] = {row_sparse, rows, ""};
  }

  // What a push of `sum` makes of a value.
  void Apply(Model& model, bool row_sparse, const Rows& sum, const std::string& error) {
    if (!error.empty()) {
      model.error = error;
      if (!adds_ && model.row_sparse != row_sparse) ChangeKind(model, row_sparse);
      return;
    }
    model.error.clear();
    if (adds_) {
      for (const auto& [id, value] : sum) model.rows[id] += value;
    } else {
      model = {row_sparse, sum, ""};
    }
  }
  static void ChangeKind(Model& model, bool row_sparse) {
    model.row_sparse = row_sparse;
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (!row_sparse) {
        model.rows.emplace(id, 0);
      } else if (model.rows[id] == 0) {
        model.rows.erase(id);
      }
    }
  }

  template <class Array, class Make>
  void Push(int key, bool row_sparse, const Make& make) {
    std::vector<Array> arrays;
    Rows sum;
    std::string error;
    for (std::int64_t k = 1 + Below(3); k > 0; --k) {
      const Rows rows = NewRows(row_sparse);
      arrays.push_back(make(rows));
      const std::string failed = MayPoison(arrays.back());
      if (error.empty()) error = failed;
      for (const auto& [id, value] : rows) sum[id] += value;
    }
    store_.Push(key, arrays, static_cast<int>(Below(5)));
    // The caller overwrites what it pushed.
    for (const Array& array : arrays) make(Rows{{0, 12345}}).CopyTo(array);
    Apply(models_[key], row_sparse, sum, error);
  }

  // Looks at `out` at the end.
  template <class Array, class Check>
  void Later(const Array& out, const std::string& error, const Check& check) {
    checks_.emplace_back([out, error, check] {
      if (error.empty()) {
        check();
      } else {
        EXPECT_EQ(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), error);
      }
    });
  }

  void Step() {
    const int key = static_cast<int>(Below(kKeys));
    const Model model = models_[key];
    switch (Below(7)) {
      case 0:
      case 1: {
        // With updaters a dense array goes onto a dense value only.
        const bool row_sparse = adds_ && model.row_sparse ? true : Below(2) == 0;
        if (row_sparse) {
          Push<RowSparseNDArray>(key, true, [&](const Rows& rows) { return ToRowSparse(rows); });
        } else {
          Push<NDArray>(key, false, [&](const Rows& rows) { return ToDense(rows); });
        }
        return;
      }
      case 2: {
        const NDArray out =
            NDArray::Full({kRows, kRowSize}, kAbsent, DType::kInt64, AnyDevice(), engine_);
        store_.Pull(key, {out, out}, static_cast<int>(Below(5)));
        Later(out, model.error, [out, expected = Dense(model.rows)] {
          EXPECT_EQ(out.ToVector<std::int64_t>(), expected);
        });
        return;
      }
      case 3: {
        const RowSparseNDArray out = ToRowSparse(NewRows(true));
        store_.Pull(key, out, 0, /*ignore_sparse=*/false);
        Rows expected = model.rows;
        if (!model.row_sparse)
          std::erase_if(expected, [](const auto& row) { return row.second == 0; });
        Later(out, model.error, [out, expected] { ExpectRows(out, expected); });
        return;
      }
      case 4:
      case 5: {
        const RowSparseNDArray out = ToRowSparse(NewRows(true));
        std::vector<float> ids;
        Rows expected;
        for (std::int64_t i = Below(8); i > 0; --i) {
          const std::int64_t id = Below(kRows);
          ids.push_back(static_cast<float>(id));
          if (model.rows.empty()) continue;
          const auto found = model.rows.find(id);
          expected[id] = found == model.rows.end() ? 0 : found->second;
        }
        const NDArray wanted = NDArray::FromVector(ids, {static_cast<std::int64_t>(ids.size())},
                                                   DType::kFloat32, AnyDevice(), engine_);
        if (!model.row_sparse) {
          EXPECT_THROW(store_.RowSparsePull(key, out, wanted), InvalidArgument);
          return;
        }
        store_.RowSparsePull(key, out, wanted, static_cast<int>(Below(5)));
        wanted.Fill(-1);  // the caller overwrites its ids
        Later(out, model.error, [out, expected] { ExpectRows(out, expected); });
        return;
      }
      default: {
        if (Below(3) != 0) return;
        const bool row_sparse = Below(2) == 0;
        const Rows rows = NewRows(row_sparse);
        store_.Remove(key);
        Init(key, row_sparse, rows);
      }
    }
  }

  static void ExpectRows(const RowSparseNDArray& array, const Rows& expected) {
    Ids ids;
    std::vector<std::int64_t> values;
    for (const auto& [id, value] : expected) {
      ids.push_back(id);
      values.insert(values.end(), kRowSize, value);
    }
    const RowVectors<std::int64_t> given = array.ToVectors<std::int64_t>();
    EXPECT_EQ(given.row_ids, ids);
    EXPECT_EQ(given.rows, values);
  }

  Engine& engine_;
  KVStore& store_;
  std::mt19937_64 random_;
  const bool adds_;
  Device (*const on_)(Device);
  std::map<int, Model> models_;
  std::vector<std::function<void()>> checks_;
  int errors_ = 0;
};

class RowSparseRandomStoreTest : public StoreTest {
 protected:
  const std::uint64_t seed = TestSeed();
};

TEST_P(RowSparseRandomStoreTest, DefaultUpdater) {
  Calls(engine, *store, /*adds=*/false, seed, &On).Run(Times(800));
}

TEST_P(RowSparseRandomStoreTest, AddingUpdaters) {
  const auto add = [](KeyRef, const auto& input, const auto& stored) { stored += input; };
  store->SetUpdaters({.dense = add, .row_sparse = add, .row_sparse_on_dense = add});
  Calls(engine, *store, /*adds=*/true, seed, &On).Run(Times(800));
}

INSTANTIATE_TEST_SUITE_P(All, RowSparseRandomStoreTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, RowSparseRandomStoreTest, testing::ValuesIn(GpuSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
