// Types of stores by name, and the type that only sums.
#include <heddle/kvstore.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

class Registry : public testing::Test {
 protected:
  NDArray Full(Scalar value, Device device = Cpu()) {
    return NDArray::Full({2, 3}, value, DType::kFloat32, device, engine);
  }
  const std::vector<float> all(float value) { return std::vector<float>(6, value); }

  Engine engine;
};

TEST_F(Registry, CaseDoesNotMatter) {
  EXPECT_EQ(KVStore::Create("Local", engine)->type(), "local");
  EXPECT_EQ(KVStore::Create("DEVICE", engine)->type(), "device");
  EXPECT_EQ(KVStore::Create("TestStore", engine)->type(), "teststore");
}

TEST_F(Registry, AnUnknownTypeIsAnErrorThatListsTheKnownOnes) {
  for (const char* type : {"locale", "", "my_device"}) {
    ExpectInvalid([&] { KVStore::Create(type, engine); },
                  {std::string("'") + type + "'", "device", "local", "teststore"});
    ExpectInvalid([&] { KVStore::Create(type); }, {"device", "local", "teststore"});
  }
}

TEST_F(Registry, WithoutAnEngineTheDefaultOneServes) {
  EXPECT_EQ(&KVStore::Create("local")->engine(), &Engine::Default());
}

TEST_F(Registry, TypesAreSorted) {
  const std::vector<std::string> types = KVStore::Types();
  EXPECT_TRUE(std::is_sorted(types.begin(), types.end()));
  for (const char* type : {"device", "local", "teststore"}) {
    EXPECT_NE(std::find(types.begin(), types.end(), type), types.end()) << type;
  }
}

// What a program of one's own might add: adds one to whatever is broadcast.
class PlusOneStore final : public KVStore {
 public:
  using KVStore::KVStore;

 protected:
  void DoBroadcast(std::span<const KeyArrays> values, std::span<const KeyArrays> out,
                   int priority) override {
    for (std::size_t i = 0; i < values.size(); ++i) {
      (values[i].arrays[0] + 1).CopyTo(out[i].arrays[0], priority);
    }
  }
};

TEST_F(Registry, NewTypesRegisterByName) {
  bool strict = false;
  KVStore::Register("PlusOne", [&strict](Engine& engine, const KVStoreOptions& options) {
    strict = options.strict_init;
    return std::make_unique<PlusOneStore>(engine);
  });
  const auto store = KVStore::Create("plusONE", engine, {.strict_init = true});
  EXPECT_EQ(store->type(), "plusone");
  EXPECT_TRUE(strict);
  NDArray out = Full(0);
  store->Broadcast("k", Full(1), out);
  EXPECT_EQ(out.ToVector<float>(), all(2));
  const std::string message = MessageOf<InvalidState>([&] { store->Push("k", out); });
  EXPECT_NE(message.find("Push is not supported by store type 'plusone'"), std::string::npos)
      << message;

  const KVStoreFactory again = [](Engine& engine, const KVStoreOptions&) {
    return std::make_unique<PlusOneStore>(engine);
  };
  ExpectInvalid([&] { KVStore::Register("plusone", again); }, {"'plusone'", "already"});
  ExpectInvalid([&] { KVStore::Register("LOCAL", again); }, {"'local'", "already"});
  ExpectInvalid([&] { KVStore::Register("", again); }, {"empty"});
  ExpectInvalid([&] { KVStore::Register("other", nullptr); }, {"'other'", "null"});
  EXPECT_EQ(KVStore::Create("local", engine)->type(), "local");
}

TEST_F(Registry, AFactoryThatReturnsNothingIsAnError) {
  KVStore::Register("nothing",
                    [](Engine&, const KVStoreOptions&) { return std::unique_ptr<KVStore>(); });
  EXPECT_THROW(KVStore::Create("nothing", engine), InvalidState);
}

class TestStore : public Registry {
 protected:
  std::unique_ptr<KVStore> store = KVStore::Create("teststore", engine);
};

TEST(KeyText, IsALineThatTellsKeysApart) {
  EXPECT_EQ(ToString(KeyRef(-7)), "-7");
  EXPECT_EQ(ToString(KeyRef("w 0")), "'w 0'");
  EXPECT_EQ(ToString(KeyRef("w\n2026\x7F\u00e9")), "'w\\x0a2026\\x7f\u00e9'");
  EXPECT_EQ(ToString(KeyRef("w\\x0a")), "'w\\\\x0a'");
}

TEST_F(TestStore, BroadcastWritesEveryOutput) {
  const std::vector<NDArray> outs = {Full(0), Full(0, Cpu(1))};
  store->Broadcast("k", Full(3), outs);
  store->Broadcast("k", Full(4), outs);  // keeps nothing, so a key may come again
  for (const NDArray& out : outs) EXPECT_EQ(out.ToVector<float>(), all(4));
}

TEST_F(TestStore, PushPullSums) {
  const std::vector<NDArray> values = {Full(1), Full(2, Cpu(1)), Full(3, Cpu(2))};
  NDArray out = Full(0);
  store->PushPull("k", values, out);
  EXPECT_EQ(out.ToVector<float>(), all(6));
  store->PushPull("k", values);
  for (const NDArray& value : values) EXPECT_EQ(value.ToVector<float>(), all(6));
  store->PushPull(3, Full(5), out);
  EXPECT_EQ(out.ToVector<float>(), all(5));
}

TEST_F(TestStore, ListCallsReadAllInputsFirst) {
  NDArray x = Full(1);
  NDArray y = Full(2);
  store->PushPull({"a", "b"}, {x, y}, {y, x});
  EXPECT_EQ(x.ToVector<float>(), all(2));
  EXPECT_EQ(y.ToVector<float>(), all(1));
}

TEST_F(TestStore, HasNoOptimizer) {
  EXPECT_FALSE(store->IsCapable("optimizer"));
  EXPECT_FALSE(store->IsCapable("anything"));
  EXPECT_THROW(store->SetOptimizer(Sgd()), InvalidState);
  EXPECT_THROW(store->SetUpdater([](KeyRef, const NDArray&, const NDArray&) {}), InvalidState);
  EXPECT_THROW(store->Init("k", Full(1)), InvalidState);
  EXPECT_THROW(store->Push("k", Full(1)), InvalidState);
  EXPECT_THROW(store->Pull("k", Full(1)), InvalidState);
  EXPECT_THROW(store->Reset("k", Full(1)), InvalidState);
  EXPECT_THROW(store->Remove("k"), InvalidState);
  EXPECT_THROW(store->Contains("k"), InvalidState);
  EXPECT_THROW(store->Keys(), InvalidState);
  EXPECT_EQ(store->rank(), 0);
  EXPECT_EQ(store->num_workers(), 1);
}

TEST_F(TestStore, BadInput) {
  const NDArray wrong = NDArray::Zeros({4}, DType::kFloat32, Cpu(), engine);
  NDArray out = Full(7);
  ExpectInvalid([&] { store->PushPull("k", {Full(1), wrong}, out); }, {"'k'", "(2, 3)", "(4,)"});
  ExpectInvalid([&] { store->PushPull("k", Full(1), wrong); }, {"'k'", "(2, 3)", "(4,)"});
  ExpectInvalid([&] { store->Broadcast("k", {Full(1), Full(1)}, out); }, {"'k'", "got 2"});
  ExpectInvalid([&] { store->Broadcast("k", NDArray(), out); }, {"'k'", "empty"});
  EXPECT_EQ(out.ToVector<float>(), all(7));
}

}  // namespace
}  // namespace heddle::kvstore_test
