// What the optimizer knows of a key, at the worker and at the servers, is a local store's.
#include <heddle/error.h>
#include <heddle/files.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>
#include <heddle/row_sparse.h>
#include <heddle/schedule.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/dist/job.h"
#include "tests/message_of.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore::dist {
namespace {

// Plays with a store, and returns what it has pulled.
using Play = std::function<std::vector<float>(KVStore& store, Engine& engine)>;

void ExpectAsLocal(const Play& play) {
  std::vector<float> expected;
  {
    Engine engine(EngineOptions::FromEnvironment());
    const auto store = KVStore::Create("local", engine);
    expected = play(*store, engine);
  }
  for (const char* const type : {"dist_sync", "dist_async"}) {
    Job job({.num_workers = 1, .num_servers = 2});
    job.RunWorkers(type, [&](int, KVStore& store, Engine& engine) {
      EXPECT_EQ(play(store, engine), expected) << type;
    });
  }
}

NDArray Array(Engine& engine, const Shape& shape, float value) {
  return NDArray::Full(shape, value, DType::kFloat32, Cpu(), engine);
}

void PullTo(std::vector<float>* values, KVStore& store, Engine& engine, const Key& key,
            const Shape& shape) {
  NDArray out(shape, DType::kFloat32, Cpu(), engine);
  store.Pull(key, out);
  const std::vector<float> pulled = out.ToVector<float>();
  values->insert(values->end(), pulled.begin(), pulled.end());
}

TEST(DistStates, AResetForgetsWhatCompressionHasNotSentYet) {
  ExpectAsLocal([](KVStore& store, Engine& engine) {
    std::vector<float> pulled;
    store.SetGradientCompression({.type = "2bit", .threshold = 0.5});
    store.Init("w", Array(engine, {3}, 0));
    for (int i = 0; i < 2; ++i) {
      store.Push("w", Array(engine, {3}, 0.3F));
      store.Reset("w", Array(engine, {3}, 1));
      store.Push("w", Array(engine, {3}, 0.3F));
      PullTo(&pulled, store, engine, "w", {3});
    }
    return pulled;
  });
}

TEST(DistStates, SchedulesBeginAgainWithADifferentOptimizerAndAReset) {
  ExpectAsLocal([](KVStore& store, Engine& engine) {
    std::vector<float> pulled;
    const auto set = [&](double momentum) {
      const auto optimizer = MakeOptimizer("sgd", {{"learning_rate", 1}, {"momentum", momentum}});
      optimizer->SetSchedule(FactorSchedule{.step = 2, .factor = 0.5, .base_rate = 1});
      store.SetOptimizer(optimizer);
    };
    set(0);
    store.Init("w", Array(engine, {3}, 0));
    const auto train = [&] {
      for (int i = 0; i < 5; ++i) {
        store.Push("w", Array(engine, {3}, 1));
        PullTo(&pulled, store, engine, "w", {3});
      }
    };
    train();
    set(0.5);
    train();
    store.Reset("w", Array(engine, {3}, 1));
    train();
    return pulled;
  });
}

TEST(DistStates, AnEqualOptimizerGoesOnWhereTheOtherOneWas) {
  Job job({.num_workers = 1, .num_servers = 2});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    const auto set = [&] {
      const auto optimizer = MakeOptimizer("sgd", {{"learning_rate", 1}});
      optimizer->SetSchedule(FactorSchedule{.step = 1, .factor = 0.5, .base_rate = 1});
      store.SetOptimizer(optimizer);
    };
    set();
    store.Init("w", Array(engine, {1}, 0));
    std::vector<float> pulled;
    for (int i = 0; i < 3; ++i) {
      store.Push("w", Array(engine, {1}, 1));
      PullTo(&pulled, store, engine, "w", {1});
      set();
    }
    EXPECT_THAT(pulled, ::testing::ElementsAre(-1, -1.5, -1.75));
  });
}

TEST(DistStates, AFileReplacesAllStates) {
  const tools::TempFolder folder;
  ExpectAsLocal([&](KVStore& store, Engine& engine) {
    std::vector<float> pulled;
    const std::string file = folder / "states.safetensors";
    store.SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1}, {"momentum", 0.5}}));
    for (const char* const key : {"a", "b"}) store.Init(key, Array(engine, {3}, 0));
    store.Push("a", Array(engine, {3}, 1));
    store.SaveOptimizerStates(file, /*with_optimizer=*/false);
    store.Push("b", Array(engine, {3}, 1));
    store.LoadOptimizerStates(file);
    for (const char* const key : {"a", "b"}) {
      store.Push(key, Array(engine, {3}, 1));
      PullTo(&pulled, store, engine, key, {3});
    }
    return pulled;
  });
}

// Also those of a key that the worker that loads has never used; not of one that it has removed.
TEST(DistStates, AFileReplacesTheStatesOfKeysThatOnlyOthersHaveUsed) {
  const tools::TempFolder folder;
  Job job({.num_workers = 2, .num_servers = 2});
  job.RunWorkers("dist_async", [&](int rank, KVStore& store, Engine& engine) {
    const std::string file = folder / "states.safetensors";
    store.SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1}, {"momentum", 0.5}}));
    store.Init("removed", Array(engine, {3}, 0));
    if (rank == 0) {
      store.Init("a", Array(engine, {3}, 0));
      store.SaveOptimizerStates(file, /*with_optimizer=*/false);
      for (const char* const key : {"a", "removed"}) store.Push(key, Array(engine, {3}, 1));
    } else {
      store.Remove("removed");
    }
    store.Barrier();
    if (rank == 1) store.LoadOptimizerStates(file);
    store.Barrier();
    if (rank != 0) return;
    std::vector<float> pulled;
    for (const char* const key : {"a", "removed"}) {
      store.Push(key, Array(engine, {3}, 1));
      PullTo(&pulled, store, engine, key, {3});
    }
    EXPECT_THAT(pulled, ::testing::ElementsAre(-2, -2, -2, -2.5, -2.5, -2.5));
  });
}

TEST(DistStates, AFileThatHasAKeyTwiceIsRefused) {
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  Job job({.num_servers = 2});
  job.RunWorkers("dist_sync", [&](int, KVStore& store, Engine& engine) {
    store.SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1}}));
    store.Init("w", Array(engine, {3}, 0));
    store.Push("w", Array(engine, {3}, 1));
    store.SaveOptimizerStates(file);
    // Without momentum there are no arrays, only what the text says.
    std::string text = LoadArrays(file, Cpu(), engine).metadata.at("heddle.optimizer_states");
    const std::size_t begin = text.find("\"keys\":[") + 8;
    const std::string entry = text.substr(begin, text.find("}]", begin) + 1 - begin);
    text.insert(begin, entry + ",");
    SaveArrays(file, std::vector<NamedArray>(), {{"heddle.optimizer_states", text}});
    EXPECT_THAT(MessageOf<InvalidArgument>([&] { store.LoadOptimizerStates(file); }),
                ::testing::HasSubstr(file + ": expected each key once, got 'w' twice"));
  });
}

TEST(DistStates, OneNumberARowIsSavedForEveryWidthOfRows) {
  const tools::TempFolder folder;
  for (const std::int64_t width : {0, 1, 2, 5000}) {
    SCOPED_TRACE(width);
    const Shape shape = {4, width};
    ExpectAsLocal([&](KVStore& store, Engine& engine) {
      std::vector<float> pulled;
      const std::string file = folder / "states.safetensors";
      store.SetOptimizer(MakeOptimizer("groupadagrad", {{"learning_rate", 1}}));
      store.Init("w", Array(engine, shape, 0));
      store.Push("w", Array(engine, shape, 2));
      store.SaveOptimizerStates(file, /*with_optimizer=*/false);
      store.Push("w", Array(engine, shape, 3));
      store.LoadOptimizerStates(file);
      store.Push("w", Array(engine, shape, 1));
      PullTo(&pulled, store, engine, "w", shape);
      return pulled;
    });
  }
}

TEST(DistStates, IntegersThatAnotherRanksOptimizerCannotTakeAreRefused) {
  Job job({.num_workers = 2, .num_servers = 1});
  job.RunWorkers("dist_async", [](int rank, KVStore& store, Engine& engine) {
    const NDArray counts = NDArray::Full({100}, 1, DType::kInt8, Cpu(), engine);
    store.Init("counts", counts);
    if (rank == 0) store.SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1}}));
    store.Barrier();
    if (rank == 0) return;
    NDArray out({100}, DType::kInt8, Cpu(), engine);
    EXPECT_THAT(MessageOf<Error>([&] {
                  store.Push("counts", counts);
                  store.Pull("counts", out);
                  out.WaitToRead();
                }),
                ::testing::HasSubstr("expected a floating dtype"));
  });
}

// A gradient that has failed leaves the states as they were.
TEST(DistStates, AFailedInputKeepsNobodyFromSavingAndLoading) {
  const tools::TempFolder folder;
  ExpectAsLocal([&](KVStore& store, Engine& engine) {
    const std::string file = folder / "states.safetensors";
    std::vector<float> pulled;
    store.SetOptimizer(MakeOptimizer("sgd", {{"learning_rate", 1}, {"momentum", 0.5}}));
    store.Init("w", Array(engine, {3}, 0));
    store.Push("w", Array(engine, {3}, 1));
    const NDArray failed = Array(engine, {3}, 0);
    engine.Push({.name = "backward", .writes = {failed.var()}},
                [] { throw std::runtime_error("no gradient"); });
    store.Push("w", failed);
    store.SaveOptimizerStates(file, /*with_optimizer=*/false);
    store.LoadOptimizerStates(file);
    EXPECT_THROW(failed.WaitToRead(), std::runtime_error);
    store.Push("w", Array(engine, {3}, 1));
    PullTo(&pulled, store, engine, "w", {3});
    return pulled;
  });
}

// Rank 1 has not used the key, and so does not hear of its update.
TEST(DistStates, WhatAnUpdateThatHasFailedHasLeftIsNeitherSavedNorLoaded) {
  const tools::TempFolder folder;
  const std::string none = folder / "none.safetensors";
  const Shape shape = {40'000, 1};  // cut over both servers
  Job job({.num_workers = 2, .num_servers = 2});
  job.RunWorkers("dist_async", [&](int rank, KVStore& store, Engine& engine) {
    const std::string file = folder / ("states" + std::to_string(rank) + ".safetensors");
    const auto save = [&] { store.SaveOptimizerStates(file, /*with_optimizer=*/false); };
    const auto load = [&] { store.LoadOptimizerStates(none); };
    const auto optimizer = MakeOptimizer("groupadagrad", {});  // works on whole rows
    if (rank == 0) store.Init("w", Array(engine, shape, 0));
    if (rank == 1) {
      store.SetOptimizer(optimizer);
      store.SaveOptimizerStates(none, /*with_optimizer=*/false);
    }
    store.Barrier();
    if (rank == 0) store.Push("w", Array(engine, shape, 1));
    store.Barrier();
    if (rank == 0) store.SetOptimizer(optimizer);
    const auto is_refused =
        ::testing::AllOf(::testing::HasSubstr("an update of key 'w'"),
                         ::testing::HasSubstr("failed, which only a reset cures"));
    EXPECT_THAT(MessageOf<OpError>(save), is_refused);
    if (rank == 0) {
      EXPECT_THAT(MessageOf<OpError>(load), is_refused);
    }
    store.Barrier();
    if (rank == 0) store.Reset("w", Array(engine, shape, 0));
    store.Barrier();
    save();
    load();
  });
}

TEST(DistStates, ADensePushOntoCompressedRowsIsToldOfTheValue) {
  Job job({});
  job.RunWorkers("dist_sync", [](int, KVStore& store, Engine& engine) {
    store.SetGradientCompression({.type = "2bit", .threshold = 0.5});
    store.Init("w", RowSparseNDArray({3, 1}, DType::kFloat32, Cpu(), engine));
    EXPECT_THAT(MessageOf<InvalidArgument>([&] {
                  store.Push("w", Array(engine, {3, 1}, 1));
                }),
                ::testing::HasSubstr("expected a dense value, since gradient compression 2bit is "
                                     "set, got a row-sparse one"));
  });
}

TEST(DistStates, ThoseOfAnEarlierOptimizerAreNotSaved) {
  const tools::TempFolder folder;
  const std::vector<std::function<OptimizerPtr()>> later = {
      [] { return MakeOptimizer("sgd", {}); },  // has no arrays
      [] {
        return MakeOptimizer("sgd", {{"momentum", 0.5}});
      },  // one
      [] {
        return MakeOptimizer("adam", {{"beta1", 0.5}});
      },  // the same
  };
  for (const auto& make : later) {
    ExpectAsLocal([&](KVStore& store, Engine& engine) {
      std::vector<float> pulled;
      const std::string file = folder / "states.safetensors";
      store.SetOptimizer(MakeOptimizer("adam", {}));
      store.Init("w", Array(engine, {3}, 0));
      store.Push("w", Array(engine, {3}, 2));
      store.SetOptimizer(make());
      store.SaveOptimizerStates(file, /*with_optimizer=*/false);
      store.LoadOptimizerStates(file);
      for (int i = 0; i < 2; ++i) {
        store.Push("w", Array(engine, {3}, 1));
        PullTo(&pulled, store, engine, "w", {3});
      }
      return pulled;
    });
  }
}

}  // namespace
}  // namespace heddle::kvstore::dist
