// Saved optimizer states: training that was stopped, saved, loaded and continued against training
// that went on, for every optimizer; and files that do not fit.
#include <heddle/error.h>
#include <heddle/files.h>
#include <heddle/kvstore.h>
#include <heddle/memory.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"
#include "tests/sanitized.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore_test {
namespace {

constexpr int kSteps = kSanitized ? 1 : 3;  // before and after the states are saved

class OptimizerStatesTest : public StoreTest {
 protected:
  NDArray Random(DType dtype, Device device = Cpu()) {
    std::uniform_real_distribution<float> value(-1, 1);
    std::vector<float> values(static_cast<std::size_t>(shape.size()));
    for (float& v : values) v = value(random_);
    return NDArray::FromVector(values, shape, dtype, On(device), engine);
  }
  // With momenta and the like where there are any.
  OptimizerPtr Make(std::string_view name, bool multi_precision = false) {
    std::vector<std::pair<std::string_view, double>> parameters;
    for (const auto& [parameter, value] : MakeOptimizer(name)->Parameters()) {
      if (parameter == "momentum") parameters.emplace_back(parameter, 0.9);
      if (parameter == "centered") parameters.emplace_back(parameter, 1);
      if (parameter == "batch_scale") parameters.emplace_back(parameter, 2);
      if (parameter == "multi_precision") parameters.emplace_back(parameter, multi_precision);
    }
    return MakeOptimizer(name, parameters);
  }
  static const std::vector<std::pair<DType, bool>>& Precisions() {
    static const std::vector<std::pair<DType, bool>> all = {
        {DType::kFloat32, false},  {DType::kFloat64, false}, {DType::kFloat16, false},
        {DType::kBFloat16, false}, {DType::kFloat16, true},  {DType::kBFloat16, true}};
    // The paths through memory, which is what sanitizers look at; and on simulated GPUs, which run
    // the CPUs' updates.
    static const std::vector<std::pair<DType, bool>> few = {{DType::kFloat32, false},
                                                            {DType::kBFloat16, true}};
    return kSanitized || GetParam().gpus != nullptr ? few : all;
  }
  // The keys a and b.
  void Init(KVStore& to, DType dtype) { to.Init({"a", "b"}, {Random(dtype), Random(dtype)}); }
  static void Push(KVStore& to, const std::vector<NDArray>& gradients) {
    to.Push("a", {gradients[0], gradients[1]});
    to.Push("b", gradients[2]);
  }
  std::vector<NDArray> Gradients(DType dtype) {
    return {Random(dtype, Cpu(0)), Random(dtype, Cpu(1)), Random(dtype)};
  }
  NDArray Value(KVStore& from, std::string_view key, DType dtype) {
    const NDArray out = Full(0, Cpu(), dtype);
    from.Pull(key, out);
    return out;
  }
  // Another store with the values of `store`.
  std::unique_ptr<KVStore> Copy(DType dtype) {
    auto copy = NewStore();
    copy->Init({"a", "b"}, {Value(*store, "a", dtype), Value(*store, "b", dtype)});
    return copy;
  }
  void ExpectSameTraining(KVStore& a, KVStore& b, DType dtype, int steps = 3) {
    for (int step = 0; step < steps; ++step) {
      const std::vector<NDArray> gradients = Gradients(dtype);
      Push(a, gradients);
      Push(b, gradients);
      for (std::string_view key : {"a", "b"}) {
        EXPECT_EQ(Value(a, key, dtype).ToVector<double>(), Value(b, key, dtype).ToVector<double>())
            << "key " << key << " after step " << step;
      }
    }
  }
  void ExpectError(const std::vector<std::string>& parts, KVStore& to, bool is_io_error) {
    std::string message;
    if (is_io_error) {
      message = MessageOf<IoError>([&] { to.LoadOptimizerStates(file_); });
    } else {
      message = MessageOf<InvalidArgument>([&] { to.LoadOptimizerStates(file_); });
    }
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
    }
  }
  const tools::TempFolder folder_;
  const std::string file_ = folder_ / "states.safetensors";
  std::mt19937_64 random_{TestSeed()};
};

TEST_P(OptimizerStatesTest, TrainingGoesOnWithTheSameBits) {
  for (std::string_view name : Optimizers()) {
    for (const auto& [dtype, multi_precision] : Precisions()) {
      SCOPED_TRACE(std::string(name) + " " + std::string(Name(dtype)) +
                   (multi_precision ? " with a master copy" : ""));
      store = NewStore();
      Init(*store, dtype);
      store->SetOptimizer(Make(name, multi_precision));
      for (int step = 0; step < kSteps; ++step) Push(*store, Gradients(dtype));
      store->SaveOptimizerStates(file_);
      const auto loaded = Copy(dtype);
      loaded->SetOptimizer(Make(name, multi_precision));
      loaded->LoadOptimizerStates(file_);
      ExpectSameTraining(*store, *loaded, dtype, kSteps);
    }
  }
}

// Row-sparse gradients of dense and of row-sparse values: lazy updates, and those of all rows.
TEST_P(OptimizerStatesTest, TrainingByRowSparseGradientsGoesOnWithTheSameBits) {
  const Shape rows_shape{9, 2};
  const auto random_rows = [&](DType dtype, std::int64_t one_in) {
    std::vector<std::int64_t> ids;
    std::vector<float> rows;
    for (std::int64_t id = 0; id < rows_shape[0]; ++id) {
      if (static_cast<std::int64_t>(random_() % 64) % one_in != 0) continue;
      ids.push_back(id);
      for (int k = 0; k < 2; ++k) {
        rows.push_back(std::uniform_real_distribution<float>(-1, 1)(random_));
      }
    }
    const Device device = Cpu(static_cast<int>(random_() % 3));
    return RowSparseNDArray::FromVectors<float>(ids, rows, rows_shape, dtype, On(device), engine);
  };
  const auto value = [&](KVStore& from, DType dtype) {
    const RowSparseNDArray out(rows_shape, dtype, On(Cpu()), engine);
    from.Pull("k", out, 0, /*ignore_sparse=*/false);
    return out;
  };
  for (std::string_view name : Optimizers()) {
    for (const auto& precision : Precisions()) {
      const DType dtype = precision.first;
      const bool multi_precision = precision.second;
      for (const bool row_sparse_value : {false, true}) {
        for (const bool lazy : {false, true}) {
          SCOPED_TRACE(std::string(name) + " " + std::string(Name(dtype)) +
                       (multi_precision ? " with a master copy" : "") +
                       (row_sparse_value ? ", row-sparse value" : "") + (lazy ? ", lazy" : ""));
          const auto parameters = Make(name, multi_precision)->Parameters();
          const auto set = [&](KVStore& to) {
            const OptimizerPtr optimizer = Make(name, multi_precision);
            for (const auto& [parameter, given] : parameters) {
              if (parameter == "lazy_update") optimizer->Set(parameter, lazy);
            }
            to.SetOptimizer(optimizer);
          };
          const auto init = [&](KVStore& to, const RowSparseNDArray& start) {
            if (row_sparse_value) {
              to.Init("k", start);
            } else {
              to.Init("k", start.ToDense());
            }
          };
          const auto whole = NewStore();
          init(*whole, random_rows(dtype, row_sparse_value ? 2 : 1));
          set(*whole);
          for (int step = 0; step < kSteps; ++step) {
            whole->Push("k", {random_rows(dtype, 2), random_rows(dtype, 3)});
          }
          whole->SaveOptimizerStates(file_);
          const auto loaded = NewStore();
          init(*loaded, value(*whole, dtype));
          set(*loaded);
          loaded->LoadOptimizerStates(file_);
          for (int step = 0; step < kSteps; ++step) {
            const std::vector<RowSparseNDArray> gradients = {random_rows(dtype, 2),
                                                             random_rows(dtype, 3)};
            whole->Push("k", gradients);
            loaded->Push("k", gradients);
            const auto expected = value(*whole, dtype).ToVectors<double>();
            const auto actual = value(*loaded, dtype).ToVectors<double>();
            ASSERT_EQ(actual.row_ids, expected.row_ids) << "after step " << step;
            ASSERT_EQ(actual.rows, expected.rows) << "after step " << step;
          }
        }
      }
    }
  }
}

TEST_P(OptimizerStatesTest, SavedTwiceWithoutAnUpdateBetween) {
  for (const bool multi_precision : {false, true}) {
    const DType dtype = multi_precision ? DType::kFloat16 : DType::kFloat32;
    store = NewStore();
    Init(*store, dtype);
    store->SetOptimizer(Make("adam", multi_precision));
    Push(*store, Gradients(dtype));
    store->SaveOptimizerStates(file_);
    const auto loaded = Copy(dtype);
    loaded->SetOptimizer(Make("adam", multi_precision));
    loaded->LoadOptimizerStates(file_);
    loaded->SaveOptimizerStates(file_);  // of states that no update has used yet
    const auto again = Copy(dtype);
    again->SetOptimizer(Make("adam", multi_precision));
    again->LoadOptimizerStates(file_);
    ExpectSameTraining(*store, *again, dtype);
  }
}

TEST_P(OptimizerStatesTest, WithTheOptimizer) {
  Init(*store, DType::kFloat32);
  const OptimizerPtr adam =
      MakeOptimizer("adam", {{"learning_rate", 8}, {"beta1", 0.5}, {"weight_decay", 0.1}});
  adam->SetSchedule(CosineSchedule{.max_update = 10, .base_rate = 0.5, .warm_up = {.steps = 2}});
  adam->SetLearningRateMultiplier("a", 0.5);
  adam->SetWeightDecayMultiplier("b", 3);
  store->SetOptimizer(adam);
  for (int step = 0; step < 3; ++step) Push(*store, Gradients(DType::kFloat32));
  store->SaveOptimizerStates(file_, /*with_optimizer=*/true);

  const auto loaded = Copy(DType::kFloat32);
  const OptimizerPtr other = MakeOptimizer("adam");
  other->SetLearningRateMultiplier("b", 1e38);  // more than the rate of the file could take
  loaded->SetOptimizer(other);
  loaded->LoadOptimizerStates(file_);
  EXPECT_EQ(other->Parameters(), adam->Parameters());
  EXPECT_EQ(other->schedule(), adam->schedule());
  ExpectSameTraining(*store, *loaded, DType::kFloat32, 5);

  // Without it, parameters are those of the new optimizer, states and counts those of the file.
  store->SaveOptimizerStates(file_);
  const OptimizerPtr third = MakeOptimizer("adam");
  const auto states_alone = Copy(DType::kFloat32);
  states_alone->SetOptimizer(third);
  states_alone->LoadOptimizerStates(file_);
  EXPECT_EQ(third->Parameters(), MakeOptimizer("adam")->Parameters());
  EXPECT_EQ(third->schedule(), std::nullopt);
}

TEST_P(OptimizerStatesTest, EverySchedule) {
  for (const LearningRateSchedule& schedule :
       {LearningRateSchedule(FactorSchedule{.step = 2, .factor = 0.5, .stop_rate = 0.1}),
        LearningRateSchedule(MultiFactorSchedule{.steps = {1, 4}, .factor = 0.5}),
        LearningRateSchedule(PolySchedule{.max_update = 9,
        .power = 3,
        .final_rate = 0.001,
        .warm_up = {.steps = 2, .begin_rate = 0.005, .is_constant = true}}),
        LearningRateSchedule(CosineSchedule{.max_update = 9, .final_rate = 0.002})}) {
    store = NewStore();
    Init(*store, DType::kFloat32);
    const OptimizerPtr sgd = Sgd();
    sgd->SetSchedule(schedule);
    store->SetOptimizer(sgd);
    store->SaveOptimizerStates(file_, /*with_optimizer=*/true);
    const OptimizerPtr other = Sgd();
    store->SetOptimizer(other);
    store->LoadOptimizerStates(file_);
    EXPECT_EQ(other->schedule(), schedule);
  }
}

TEST_P(OptimizerStatesTest, IntegerKeysAndKeysWithoutUpdates) {
  store->Init({7, -1}, {Full(1), Full(1)});
  const auto loaded = NewStore();
  loaded->Init({-1, 7}, {Full(1), Full(0.5)});
  store->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.5}));
  loaded->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.5}));
  store->Push(7, Full(1));  // m = -0.5, w = 0.5
  store->SaveOptimizerStates(file_);
  loaded->LoadOptimizerStates(file_);
  for (KVStore* both : {store.get(), loaded.get()}) {
    both->Push({7, -1}, {Full(1), Full(1)});  // m = -0.75 and -0.5
    EXPECT_EQ(Pulled(*both, 7), All(-0.25f));
    EXPECT_EQ(Pulled(*both, -1), All(0.5f));
  }
}

TEST_P(OptimizerStatesTest, ResetForgetsWhatWasLoaded) {
  Init(*store, DType::kFloat32);
  store->SetOptimizer(Make("adam", false));
  Push(*store, Gradients(DType::kFloat32));
  store->SaveOptimizerStates(file_);
  const auto loaded = Copy(DType::kFloat32);
  loaded->SetOptimizer(Make("adam", false));
  loaded->LoadOptimizerStates(file_);
  const auto fresh = Copy(DType::kFloat32);
  fresh->SetOptimizer(Make("adam", false));
  for (std::string_view key : {"a", "b"}) {
    loaded->Reset(key, Value(*store, key, DType::kFloat32));
  }
  ExpectSameTraining(*loaded, *fresh, DType::kFloat32);
}

TEST_P(OptimizerStatesTest, NeedsAnOptimizer) {
  store->Init("a", Full(1));
  for (const auto& call :
       std::vector<std::function<void()>>{[&] { store->SaveOptimizerStates(file_); },
                                          [&] { store->LoadOptimizerStates(file_); }}) {
    EXPECT_NE(MessageOf<InvalidState>(call).find("expected a store with an optimizer"),
              std::string::npos);
    store->SetUpdater([](KeyRef, const NDArray&, const NDArray&) {});
    EXPECT_NE(MessageOf<InvalidState>(call).find("with an updater"), std::string::npos);
  }
  EXPECT_FALSE(std::filesystem::exists(file_));
}

// A push whose input failed leaves value and states as they were.
TEST_P(OptimizerStatesTest, AFailedInputDoesNotCount) {
  store->Init("a", Full(1));
  store->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.5}));
  store->Push("a", Full(1));  // m = -0.5
  store->Push("a", Poisoned("bad gradient"));
  store->SaveOptimizerStates(file_);
  const NDArray momentum = LoadArrays(file_, Cpu(), engine).Find("0.momentum");
  EXPECT_EQ(momentum.ToVector<float>(), All(-0.5f));
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

// What is wrong in the store that loads; each leaves its training as it was, which is that of a
// store that never loads.
TEST_P(OptimizerStatesTest, StatesThatDoNotFitAreErrors) {
  Init(*store, DType::kFloat32);
  store->SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 0.5}, {"momentum", 0.5}}));
  for (int step = 0; step < 3; ++step) Push(*store, Gradients(DType::kFloat32));
  store->SaveOptimizerStates(file_, /*with_optimizer=*/true);

  const auto other = NewStore(), untouched = NewStore();
  std::map<std::string, NDArray> values;  // of both, as they began
  const auto init = [&](const std::string& key, const NDArray& value) {
    values[key] = value;
    for (const auto& each : {other.get(), untouched.get()}) each->Init(key, value);
  };
  const auto remove = [&](const std::string& key) {
    values.erase(key);
    for (const auto& each : {other.get(), untouched.get()}) each->Remove(key);
  };
  const auto push_all = [&] {
    for (const auto& [key, value] : values) {
      for (const auto& each : {other.get(), untouched.get()}) each->Push(key, value);
    }
  };
  const auto value_of = [&](KVStore& from, const std::string& key) {
    const NDArray& like = values.at(key);
    const NDArray out(like.shape(), like.dtype(), On(Cpu()), engine);
    from.Pull(key, out);
    return out.ToVector<double>();
  };
  const FactorSchedule schedule{.step = 1, .factor = 0.5, .base_rate = 0.1};
  const auto expect = [&](std::string_view name, bool multi_precision,
                          const std::vector<std::string>& parts) {
    const OptimizerPtr optimizer = Make(name, multi_precision);
    for (const OptimizerPtr& both : {optimizer, Make(name, multi_precision)}) {
      both->SetSchedule(schedule);
      (both == optimizer ? other : untouched)->SetOptimizer(both);
    }
    push_all();
    ExpectError(parts, *other, /*is_io_error=*/false);
    EXPECT_EQ(optimizer->Parameters(), Make(name, multi_precision)->Parameters());
    EXPECT_EQ(optimizer->schedule(), LearningRateSchedule(schedule));
    push_all();
    for (const auto& [key, value] : values) {
      EXPECT_EQ(value_of(*other, key), value_of(*untouched, key)) << key;
    }
  };
  init("a", Full(1));
  expect("adam", false, {file_, "adam", "sgd"});
  expect("sgd", false, {file_, "'b'", "does not have"});
  init("b", Full(1));
  init("c", Full(1));
  expect("sgd", false, {file_, "'c'", "got none"});
  remove("c");
  expect("sgd", /*multi_precision=*/true, {"multi_precision true", "false"});
  remove("b");
  init("b", NDArray::Ones({3, 2}, DType::kFloat32, On(Cpu()), engine));
  expect("sgd", false, {"'b'", "(3, 2)", "(2, 3)"});
  remove("b");
  init("b", Full(1, Cpu(), DType::kFloat64));
  expect("sgd", false, {"'b'", "float64", "float32"});
}

TEST_P(OptimizerStatesTest, NothingChangesOnAnError) {
  Init(*store, DType::kFloat32);
  const OptimizerPtr sgd = Make("sgd");
  store->SetOptimizer(sgd);
  Push(*store, Gradients(DType::kFloat32));
  store->SaveOptimizerStates(file_);
  const auto same = Copy(DType::kFloat32);
  same->SetOptimizer(Make("sgd"));
  same->LoadOptimizerStates(file_);

  const auto strange = NewStore();  // a key less
  strange->Init("a", Full(1));
  const OptimizerPtr changed = MakeOptimizer("sgd", {{"learning_rate", 5}, {"momentum", 0.1}});
  strange->SetOptimizer(changed);
  strange->Push("a", Full(1));
  strange->SaveOptimizerStates(file_, /*with_optimizer=*/true);
  ExpectError({"'b'"}, *store, /*is_io_error=*/false);
  EXPECT_EQ(sgd->Parameters(), Make("sgd")->Parameters());
  ExpectSameTraining(*store, *same, DType::kFloat32);

  // Settings that the optimizer refuses: it is another in what is fixed.
  const auto wide = NewStore();
  wide->Init({"a", "b"}, {Full(1), Full(1)});
  wide->SetOptimizer(MakeOptimizer("rmsprop", {{"centered", 1}}));
  wide->SaveOptimizerStates(file_, /*with_optimizer=*/true);
  const OptimizerPtr plain = MakeOptimizer("rmsprop", {{"learning_rate", 0.5}});
  wide->SetOptimizer(plain);
  ExpectError({"centered", "0, got 1"}, *wide, /*is_io_error=*/false);
  EXPECT_EQ(plain->Get("learning_rate"), 0.5);
  // The states alone tell of it, too.
  wide->SaveOptimizerStates(file_);
  wide->SetOptimizer(MakeOptimizer("rmsprop", {{"centered", 1}}));
  ExpectError({"centered", "1, got 0"}, *wide, /*is_io_error=*/false);
}

TEST_P(OptimizerStatesTest, DamagedFilesAreErrors) {
  Init(*store, DType::kFloat32);
  store->SetOptimizer(Make("sgd"));
  const std::vector<NDArray> gradients = Gradients(DType::kFloat32);
  Push(*store, gradients);
  store->SaveOptimizerStates(file_);
  const auto same = Copy(DType::kFloat32);
  same->SetOptimizer(Make("sgd"));
  same->LoadOptimizerStates(file_);

  const ArrayFile saved = LoadArrays(file_, Cpu(), engine);
  const std::string text = saved.metadata.at("heddle.optimizer_states");
  const auto expect = [&](const std::string& from, const std::string& to, const std::string& part) {
    std::string edited = text;
    ASSERT_NE(edited.find(from), std::string::npos) << from << " is not in " << text;
    edited.replace(edited.find(from), from.size(), to);
    SaveArrays(file_, saved.arrays, {{"heddle.optimizer_states", edited}});
    ExpectError({file_, part}, *store, /*is_io_error=*/true);
  };
  expect("\"version\":2", "\"version\":1",
         "expected version 2 of optimizer states, found version 1");
  expect("\"version\":2", "\"version\":\"2\"", "expected");
  expect("\"num_update\":1", "\"num_update\":-1", "-1");
  expect("\"keys\":", "\"kays\":", "keys");
  expect("float32", "float33", "float33");
  expect("[2,3]", "[2,-3]", "-3");
  expect("{", "", "expected optimizer states");
  const std::string deep = std::string(300'000, '[') + std::string(300'000, ']');
  expect("\"version\":2", "\"version\":" + deep, "from 0 to 2^62, found array");
  expect("\"step\":1", "\"step\":9223372036854775807", "found 9223372036854775807");
  expect("\"step\":1", "\"step\":18446744073709551615", "found 18446744073709551615");
  expect("\"key\":\"a\"", "\"key\":9223372036854775808", "integer of 64 bits");
  expect("[2,3]", "[4611686018427387904,4611686018427387904]", "expected a shape");

  std::vector<NamedArray> arrays = saved.arrays;
  const auto expect_arrays = [&](const std::string& part) {
    SaveArrays(file_, arrays, {{"heddle.optimizer_states", text}});
    ExpectError({file_, part}, *store, /*is_io_error=*/true);
    arrays = saved.arrays;
  };
  arrays.pop_back();
  expect_arrays("momentum");
  arrays.push_back({"more", Full(1)});
  expect_arrays("expected 2 arrays, found 3");
  arrays[0].array = NDArray::Zeros({4}, DType::kFloat32, On(Cpu()), engine);
  expect_arrays("(4,)");
  arrays[0].array = Full(1, Cpu(), DType::kFloat64);
  expect_arrays("float64");

  SaveArrays(file_, saved.arrays);
  ExpectError({file_, "expected optimizer states"}, *store, /*is_io_error=*/true);
  SaveArrays(file_, saved.arrays, {{"heddle.optimizer_states", text}});
  const auto size = std::filesystem::file_size(file_);
  for (const std::uintmax_t kept : {size - 1, size / 2, std::uintmax_t{7}, std::uintmax_t{0}}) {
    std::filesystem::resize_file(file_, kept);
    ExpectError({file_}, *store, /*is_io_error=*/true);
  }
  std::filesystem::remove(file_);
  ExpectError({file_}, *store, /*is_io_error=*/true);
  ExpectSameTraining(*store, *same, DType::kFloat32);
}

// Those that no update has needed so far are not in the file, which is whole all the same.
TEST_P(OptimizerStatesTest, StatesThatNoUpdateHasNeededAreNotMissed) {
  for (const bool with_optimizer : {false, true}) {
    const auto from = NewStore(), to = NewStore();
    from->Init("a", Full(1));
    const OptimizerPtr sgd = MakeOptimizer("sgd");
    from->SetOptimizer(sgd);
    from->Push("a", Full(1));
    if (!with_optimizer) sgd->Set("momentum", 0.5);
    from->SaveOptimizerStates(file_, with_optimizer);
    to->Init("a", Value(*from, "a", DType::kFloat32));
    to->SetOptimizer(Make("sgd"));
    to->LoadOptimizerStates(file_);
    from->LoadOptimizerStates(file_);
    if (!with_optimizer) sgd->Set("momentum", 0.9);
    for (int step = 0; step < 3; ++step) {
      from->Push("a", Full(2));
      to->Push("a", Full(2));
    }
    EXPECT_EQ(Value(*from, "a", DType::kFloat32).ToVector<float>(),
              Value(*to, "a", DType::kFloat32).ToVector<float>());
  }
}

// There is room for what trains, not for copies of it.
TEST_P(OptimizerStatesTest, ASaveThatRunsOutOfMemoryChangesNothing) {
  if (GetParam().gpus != nullptr) GTEST_SKIP() << "memory of the CPUs is what is short";
  const NDArray gradient = NDArray::Ones({100'000}, DType::kFloat32, Cpu(), engine);
  store->Init("w", gradient);
  store->SetOptimizer(Make("sgd"));
  store->Push("w", gradient);
  engine.WaitForAll();
  TrimMemory(DeviceType::kCpu);
  ConfigureMemory(DeviceType::kCpu, {.bytes_max = GetMemoryStats(DeviceType::kCpu).used});
  EXPECT_THROW(store->SaveOptimizerStates(file_), OutOfMemory);
  ConfigureMemory(DeviceType::kCpu, MemoryOptions::FromEnvironment(DeviceType::kCpu));
  store->Push("w", gradient);
  const NDArray out = NDArray::Zeros({100'000}, DType::kFloat32, Cpu(), engine);
  store->Pull("w", out);
  EXPECT_NO_THROW(out.WaitToRead());
  EXPECT_NO_THROW(engine.WaitForAll());
  store->SaveOptimizerStates(file_);
}

// Without it training would go on from the rounded value, with other bits.
TEST_P(OptimizerStatesTest, AFileWithoutTheMasterCopyIsDamaged) {
  Init(*store, DType::kFloat16);
  store->SetOptimizer(Sgd({.multi_precision = true}));
  Push(*store, Gradients(DType::kFloat16));
  store->SaveOptimizerStates(file_);
  const ArrayFile saved = LoadArrays(file_, Cpu(), engine);
  ASSERT_EQ(saved.arrays.size(), 2U);
  SaveArrays(file_, {saved.arrays[0]}, saved.metadata);
  ExpectError({file_, "expected an array '1.master'"}, *store, /*is_io_error=*/true);
  // Nor may the file say that there is none.
  auto metadata = saved.metadata;
  std::string& text = metadata.at("heddle.optimizer_states");
  const std::string with = "\"arrays\":[\"master\"]";
  ASSERT_NE(text.rfind(with), std::string::npos) << text;
  text.replace(text.rfind(with), with.size(), "\"arrays\":[]");
  SaveArrays(file_, {saved.arrays[0]}, metadata);
  ExpectError({file_, "expected an array '1.master'"}, *store, /*is_io_error=*/true);
}

TEST_P(OptimizerStatesTest, DamagedSettingsAreErrors) {
  Init(*store, DType::kFloat32);
  const OptimizerPtr sgd = Make("sgd");
  sgd->SetSchedule(FactorSchedule{.step = 2});
  sgd->SetLearningRateMultiplier("a", 0.5);
  store->SetOptimizer(sgd);
  Push(*store, Gradients(DType::kFloat32));
  store->SaveOptimizerStates(file_, /*with_optimizer=*/true);
  const ArrayFile saved = LoadArrays(file_, Cpu(), engine);
  const std::string text = saved.metadata.at("heddle.optimizer_states");
  for (const auto& [from, to, part] : std::vector<std::array<std::string, 3>>{
           {"\"momentum\":0.9", "\"momentum\":5.0", "momentum: expected a number in [0, 1), got 5"},
           {"\"momentum\":", "\"momentun\":", "did you mean 'momentum'"},
           {"\"step\":2", "\"step\":0", "step: expected at least 1, got 0"},
           {"\"learning_rate\":0.5", "\"learning_rate\":-1", "key 'a'"}}) {
    std::string edited = text;
    ASSERT_NE(edited.find(from), std::string::npos) << from << " is not in " << text;
    edited.replace(edited.find(from), from.size(), to);
    SaveArrays(file_, saved.arrays, {{"heddle.optimizer_states", edited}});
    ExpectError({file_, part}, *store, /*is_io_error=*/false);
    EXPECT_EQ(sgd->Get("momentum"), 0.9);
    EXPECT_EQ(sgd->schedule(), LearningRateSchedule(FactorSchedule{.step = 2}));
  }
}

TEST_P(OptimizerStatesTest, ErrorsOfSavingLeaveTheFile) {
  store->Init("\xFF", Full(1));
  store->SetOptimizer(Sgd());
  ExpectInvalid([&] { store->SaveOptimizerStates(file_); }, {"UTF-8"});
  EXPECT_FALSE(std::filesystem::exists(file_));
  const auto teststore = KVStore::Create("teststore", engine);
  EXPECT_THROW(teststore->SaveOptimizerStates(file_), InvalidState);
  EXPECT_THROW(teststore->LoadOptimizerStates(file_), InvalidState);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerStatesTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, OptimizerStatesTest, testing::ValuesIn(GpuSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
