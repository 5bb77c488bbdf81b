// Bad and failing input of every store: a typed error, and nothing changed.
#include <heddle/kvstore.h>
#include <heddle/row_sparse.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/conformance.h"
#include "tests/kvstore/gpu_setups.h"
#include "tests/message_of.h"
#include "tools/testing/temp_folder.h"

namespace heddle::kvstore_test {
namespace {

class ConformanceErrorsTest : public ConformanceTest {};

TEST_P(ConformanceErrorsTest, SecondInitIsAnErrorAndKeepsTheValue) {
  store->Init("k", Full(1));
  ExpectInvalid([&] { store->Init("k", Full(2)); }, {"Init", "'k'", "already", "new key"});
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ConformanceErrorsTest, InitOfAListIsAllOrNothing) {
  store->Init("b", Full(1));
  ExpectInvalid([&] { store->Init({"a", "b"}, {Full(2), Full(2)}); }, {"'b'", "already"});
  EXPECT_FALSE(store->Contains("a"));
  ExpectInvalid(
      [&] {
        store->Init({"a", "c", "a"}, {Full(2), Full(2), Full(2)});
      },
      {"'a'", "twice"});
  ExpectInvalid([&] { store->Init({"a", "c"}, {Full(2)}); }, {"2 keys", "got 1"});
  ExpectInvalid([&] { store->Init({"a", "c"}, {Full(2), NDArray()}); }, {"'c'", "empty"});
  ExpectInvalid(
      [&] {
        store->Init({"a", "c"}, {{Full(2)}, {Full(2), Full(3)}});
      },
      {"'c'", "one array", "got 2"});
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"b"}));
}

TEST_P(ConformanceErrorsTest, InitWithAFailedValueThrowsItsErrorAndLeavesTheKeyFree) {
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { store->Init("k", Poisoned("no data")); }),
            "no data");
  EXPECT_FALSE(store->Contains("k"));
  store->Init("k", Full(3));
  EXPECT_EQ(Pulled(*store, "k"), All(3));
}

TEST_P(ConformanceErrorsTest, CallsThatWaitAreRefusedByNameInsideAnOpAndChangeNothing) {
  const tools::TempFolder folder;
  const std::string file = folder / "states.safetensors";
  const NDArray value = Full(9), out = Full(0);
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Init("k", Full(1));
  std::vector<std::pair<const char*, std::function<void()>>> calls = {
      {"Init", [&] { store->Init("new", value); }},
      {"Broadcast", [&] { store->Broadcast("new", value, out); }},
      {"Reset", [&] { store->Reset("k", value); }},
      {"SaveOptimizerStates", [&] { store->SaveOptimizerStates(file); }},
  };
  if (is_dist()) {
    calls.emplace_back("Barrier", [&] { store->Barrier(); });
    calls.emplace_back("command 4", [&] { store->SendCommandToServers(4, ""); });
    calls.emplace_back("keys", [&] { store->Keys(); });
    calls.emplace_back("key 'new'", [&] { store->Push("new", value); });
    calls.emplace_back("LoadOptimizerStates", [&] { store->LoadOptimizerStates(file); });
  }
  for (const auto& [name, call] : calls) {
    std::string message;
    engine.Push({.name = "outer", .writes = {engine.NewVar()}},
                [&, &call = call] { message = MessageOf<InvalidState>(call); });
    engine.WaitForAll();
    EXPECT_NE(message.find(std::string(name) + " inside op 'outer'"), std::string::npos)
        << name << ": " << message;
  }
  EXPECT_EQ(store->Keys(), std::vector<Key>{"k"});
  EXPECT_EQ(Pulled(*store, "k"), All(1));
  EXPECT_EQ(out.ToVector<float>(), All(0));
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST_P(ConformanceErrorsTest, StrictInitRefusesPushesToNewKeys) {
  const auto strict = NewStore({.strict_init = true});
  ExpectInvalid([&] { strict->Push(3, Full(1)); }, {"3", "initialised"});
  EXPECT_FALSE(strict->Contains(3));
  strict->Init(3, Full(1));
  strict->Push(3, Full(2));
  EXPECT_EQ(Pulled(*strict, 3), All(2));
}

TEST_P(ConformanceErrorsTest, PullOfAnUnknownKeyLeavesItFree) {
  NDArray out = Full(7);
  ExpectInvalid([&] { store->Pull("k", out); }, {"Pull", "unknown key", "'k'"});
  EXPECT_EQ(out.ToVector<float>(), All(7));
  EXPECT_FALSE(store->Contains("k"));
  store->Init("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ConformanceErrorsTest, BroadcastOfAKnownKeyIsAnErrorAndWritesNothing) {
  store->Init("b", Full(1));
  const std::vector<NDArray> outs = {Full(7), Full(7)};
  ExpectInvalid(
      [&] {
        store->Broadcast({"a", "b"}, {Full(2), Full(2)}, outs);
      },
      {"'b'", "already"});
  const NDArray wrong = NDArray::Zeros({4}, DType::kFloat32, On(Cpu()), engine);
  ExpectInvalid(
      [&] {
        store->Broadcast({"a", "c"}, {Full(2), Full(2)}, {outs[0], wrong});
      },
      {"'c'", ToString(shape), "(4,)"});
  EXPECT_EQ(outs[0].ToVector<float>(), All(7));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"b"}));
}

TEST_P(ConformanceErrorsTest, KeysAreOfOneKind) {
  ExpectInvalid(
      [&] {
        store->Init(std::vector<Key>{1, "a"}, {Full(1), Full(2)});
      },
      {"1", "'a'", "one kind"});
  store->Init(7, Full(1));
  const std::vector<std::string> parts = {"'a'", "an integer key", "got a string"};
  ExpectInvalid([&] { store->Init("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->Push("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->Pull("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->PushPull("a", Full(1)); }, parts);
  ExpectInvalid([&] { store->Broadcast("a", Full(1), Full(1)); }, parts);
  ExpectInvalid([&] { store->Contains("a"); }, parts);
  ExpectInvalid([&] { store->Reset("a", Full(1)); }, parts);

  const auto strings = NewStore();
  strings->Init("7", Full(1));
  ExpectInvalid([&] { strings->Push(7, Full(1)); }, {"key 7", "a string key", "got an integer"});
}

TEST_P(ConformanceErrorsTest, WrongShapeOrDTypeIsAnErrorOfTheCall) {
  store->Init("k", Full(1));
  const NDArray wrong = NDArray::Zeros({3, 2}, DType::kFloat32, On(Cpu()), engine);
  const NDArray doubles = Full(1, Cpu(), DType::kFloat64);
  const std::vector<std::string> shapes = {"'k'", ToString(shape), "(3, 2)"};
  const std::vector<std::string> dtypes = {"'k'", "float32", "float64"};
  ExpectInvalid([&] { store->Push("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Push("k", {Full(1), wrong}); }, shapes);
  ExpectInvalid([&] { store->Push("k", doubles); }, dtypes);
  ExpectInvalid([&] { store->Push("k", {Full(1), doubles}); }, dtypes);
  ExpectInvalid([&] { store->Pull("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Pull("k", {Full(1), wrong}); }, shapes);
  ExpectInvalid([&] { store->PushPull("k", Full(2), wrong); }, shapes);
  ExpectInvalid([&] { store->PushPull("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Reset("k", wrong); }, shapes);
  ExpectInvalid([&] { store->Reset("k", doubles); }, dtypes);
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ConformanceErrorsTest, EmptyHandlesAndListsAreErrors) {
  store->Init("k", Full(1));
  const NDArray none;
  const std::vector<NDArray> no_arrays;
  ExpectInvalid([&] { store->Init("n", none); }, {"'n'", "empty"});
  ExpectInvalid([&] { store->Init("n", no_arrays); }, {"'n'", "got none"});
  ExpectInvalid([&] { store->Push("k", none); }, {"'k'", "empty"});
  ExpectInvalid([&] { store->Push("k", no_arrays); }, {"'k'", "got none"});
  ExpectInvalid([&] { store->Pull("k", none); }, {"'k'", "empty"});
  ExpectInvalid([&] { store->Pull("k", no_arrays); }, {"'k'", "got none"});
  ExpectInvalid([&] { store->PushPull("k", Full(2), no_arrays); }, {"'k'", "got none"});
  ExpectInvalid([&] { store->Broadcast("n", Full(2), no_arrays); }, {"'n'", "got none"});
  ExpectInvalid([&] { store->Reset("k", none); }, {"'k'", "empty"});
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ConformanceErrorsTest, ArraysOfAnotherEngineAreErrors) {
  Engine other(OptionsOf(GetParam()));
  const NDArray foreign = NDArray::Ones(shape, DType::kFloat32, Cpu(), other);
  store->Init("k", Full(1));
  const std::vector<std::string> parts = {"engine"};
  ExpectInvalid([&] { store->Init("n", foreign); }, parts);
  ExpectInvalid([&] { store->Push("k", {Full(2), foreign}); }, parts);
  ExpectInvalid([&] { store->Pull("k", {Full(2), foreign}); }, parts);
  EXPECT_EQ(Pulled(*store, "k"), All(1));
}

TEST_P(ConformanceErrorsTest, NothingOfAListCallHappensIfOneOfItIsBad) {
  store->Init({"a", "b"}, {Full(1), Full(1)});
  const NDArray wrong = NDArray::Zeros({4}, DType::kFloat32, On(Cpu()), engine);
  NDArray out = Full(7);
  ExpectInvalid([&] { store->Push({"a", "b"}, {Full(2), wrong}); }, {"'b'"});
  ExpectInvalid([&] { store->Push({"a", "b"}, {Full(2), Full(2), Full(2)}); }, {"2 keys", "got 3"});
  ExpectInvalid([&] { store->Pull({"a", "b"}, {out, wrong}); }, {"'b'"});
  ExpectInvalid([&] { store->Pull({"a", "none"}, {out, out}); }, {"'none'"});
  ExpectInvalid([&] { store->Pull({"a", "b"}, {out}); }, {"2 keys", "got 1"});
  ExpectInvalid([&] { store->PushPull({"a", "b"}, {Full(2), Full(2)}, {out, wrong}); }, {"'b'"});
  ExpectInvalid([&] { store->PushPull({"a", "b"}, {Full(2), Full(2)}, {out}); }, {"got 1"});
  engine.WaitForAll();
  EXPECT_EQ(out.ToVector<float>(), All(7));
  EXPECT_EQ(Pulled(*store, "a"), All(1));
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"a", "b"}));
}

TEST_P(ConformanceErrorsTest, UseAfterTheEngineHasStopped) {
  store->Init("k", Full(1));
  const NDArray value = Full(2), out = Full(0);
  engine.Stop();
  const std::vector<std::function<void()>> calls = {
      [&] { store->Init("n", value); },
      [&] { store->Push("k", value); },
      [&] { store->Push("n", value); },  // would make the key
      [&] {
        store->Push({"k", "n"}, {value, value});
      },
      [&] { store->Pull("k", out); },
      [&] { store->PushPull("k", value, out); },
      [&] { store->PushPull("n", value, out); },
      [&] { store->Broadcast("n", value, out); },
      [&] { store->Reset("k", value); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE("call " + std::to_string(i));
    const std::string message = MessageOf<InvalidState>(calls[i]);
    EXPECT_NE(message.find("stopped"), std::string::npos) << message;
  }
  if (is_dist()) return;  // asks the servers, which takes an op
  EXPECT_EQ(store->Keys(), (std::vector<Key>{"k"}));
}

TEST_P(ConformanceErrorsTest, AFailedInputIsReportedByPullsUntilAPushSucceeds) {
  store->Init("k", Full(1));
  NDArray before = Full(0);
  store->Pull("k", before);
  store->Push("k", {Full(2), Poisoned("bad gradient")});
  for (int i = 0; i < 2; ++i) {
    NDArray out = Full(0);
    store->Pull("k", out);
    ExpectFails(out, "bad gradient");
  }
  EXPECT_EQ(before.ToVector<float>(), All(1));
  store->Push("k", Full(3));
  EXPECT_EQ(Pulled(*store, "k"), All(3));
}

TEST_P(ConformanceErrorsTest, AFailedInputLeavesValueAndOptimizerStateAlone) {
  store->Init("k", Full(0));
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Push("k", Full(1));  // m = -1, w = -1
  store->Push("k", Poisoned("bad gradient"));
  store->Push("k", {Poisoned("worse"), Full(1)});
  store->Push("k", Full(1));  // m = -1.5, w = -2.5
  EXPECT_EQ(Pulled(*store, "k"), All(-2.5f));
}

TEST_P(ConformanceErrorsTest, OtherKeysOfAListCallWithAFailedInputGoOn) {
  store->Init({"a", "b"}, {Full(0), Full(0)});
  store->Push({"a", "b"}, {Poisoned("bad gradient"), Full(2)});
  EXPECT_EQ(Pulled(*store, "b"), All(2));
}

TEST_P(ConformanceErrorsTest, ResetForgetsTheOptimizerState) {
  store->Init("k", Full(0));
  store->SetOptimizer(Sgd({.learning_rate = 1, .momentum = 0.5}));
  store->Push("k", Full(1));
  store->Reset("k", Full(0));
  store->Push("k", Full(1));
  EXPECT_EQ(Pulled(*store, "k"), All(-1));
}

TEST_P(ConformanceErrorsTest, ResetOfAnUnknownKeyIsAnError) {
  ExpectInvalid([&] { store->Reset("k", Full(1)); }, {"Reset", "unknown key", "'k'"});
  EXPECT_FALSE(store->Contains("k"));
}

TEST_P(ConformanceErrorsTest, ResetComesAfterEarlierPushesAndPulls) {
  NDArray gradient = Full(1);
  NDArray out = Full(0);
  store->Init("k", Full(0));
  Hold writer(engine, {gradient.var()}, {gradient.var()});
  store->Push("k", gradient);
  store->Pull("k", out);
  ReleaseWhile(writer, [&] { store->Reset("k", Full(9)); });
  EXPECT_EQ(out.ToVector<float>(), All(1));
  EXPECT_EQ(Pulled(*store, "k"), All(9));
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceErrorsTest, testing::ValuesIn(ConformanceSetups()),
                         SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, ConformanceErrorsTest, testing::ValuesIn(GpuSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(DistGpus, ConformanceErrorsTest, testing::ValuesIn(DistGpuSetups()),
                         SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
