// The sessions of the published documentation, value for value, in their order.
#include <heddle/kvstore.h>

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

class PublishedTest : public StoreTest {};

TEST_P(PublishedTest, TutorialSession) {
  store->Init(3, Full(1) * 2);
  NDArray a = Full(0);
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(2));

  store->Push(3, Full(1) * 8);
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(8));

  store->Push(3, OnFour(1));
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(4));

  std::vector<Key> updated;
  store->SetUpdater([&updated](KeyRef key, const NDArray& input, const NDArray& stored) {
    updated.push_back(key.ToKey());
    stored += input * 2;
  });
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(4));
  store->Push(3, Full(1));
  EXPECT_EQ(updated, (std::vector<Key>{3}));
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(6));

  std::vector<NDArray> b = OnFour(1);
  store->Pull(3, b);
  EXPECT_EQ(b[1].ToVector<float>(), All(6));

  // One device; one output for all keys.
  const std::vector<int> keys = {5, 7, 9};
  store->Init(keys, std::vector<NDArray>(3, Full(1)));
  updated.clear();
  store->Push(keys, std::vector<NDArray>(3, Full(1)));
  EXPECT_EQ(updated, (std::vector<Key>{5, 7, 9}));
  b = std::vector<NDArray>(3, Full(0));
  store->Pull(keys, b);
  EXPECT_EQ(b[1].ToVector<float>(), All(3));

  // Four devices; one list of arrays for all keys.
  const std::vector<std::vector<NDArray>> lists(3, OnFour(1));
  store->Push(keys, lists);
  EXPECT_EQ(updated, (std::vector<Key>{5, 7, 9, 5, 7, 9}));
  store->Pull(keys, lists);
  EXPECT_EQ(lists[1][1].ToVector<float>(), All(11));
}

TEST_P(PublishedTest, SessionWithStringKeys) {
  store->Init("3", Full(1) * 2);
  EXPECT_EQ(Pulled(*store, "3"), All(2));
  store->Push("3", Full(1) * 8);
  EXPECT_EQ(Pulled(*store, "3"), All(8));
  store->Push("3", OnFour(1));
  EXPECT_EQ(Pulled(*store, "3"), All(4));

  store->Init({"5", "7", "9"}, std::vector<NDArray>(3, Full(1)));
  store->Init({"4", "6", "8", "10"}, std::vector<NDArray>(4, Full(0)));
  std::vector<NDArray> b(3, Full(0));
  store->Push({"4", "5", "6"}, std::vector<NDArray>(3, Full(1)));
  store->Pull({"4", "5", "6"}, b);
  EXPECT_EQ(b[1].ToVector<float>(), All(1));

  const std::vector<std::vector<NDArray>> lists(3, OnFour(1));
  store->Push({"7", "8", "9"}, lists);
  store->Pull({"7", "8", "9"}, lists);
  EXPECT_EQ(lists[1][1].ToVector<float>(), All(4));
}

TEST_P(PublishedTest, EarlyNotesPushWithoutInitAndUpdateThreefold) {
  store->Push(3, Full(1));
  NDArray a =
      NDArray::FromVector<float>({1, 2, 3, 2, 3, 4}, shape, DType::kFloat32, On(Cpu()), engine);
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(1));

  store->Push(2, Full(1) * 3);
  store->Pull(2, a);
  EXPECT_EQ(a.ToVector<float>(), All(3));

  store->Push(3, OnFour(1));
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(4));
  store->SetUpdater(
      [](KeyRef, const NDArray& input, const NDArray& stored) { stored += input * 3; });
  store->Push(3, Full(1) * 2);
  store->Pull(3, a);
  EXPECT_EQ(a.ToVector<float>(), All(10));
}

TEST_P(PublishedTest, PushPull) {
  store->Init("3", Full(2));
  NDArray a = Full(0);
  store->PushPull("3", Full(1) * 8, a);
  EXPECT_EQ(a.ToVector<float>(), All(8));
  store->PushPull("3", OnFour(1), a);
  EXPECT_EQ(a.ToVector<float>(), All(4));

  store->Init({"4", "5", "6"}, std::vector<NDArray>(3, Full(0)));
  const std::vector<NDArray> b(3, Full(0));
  store->PushPull({"4", "5", "6"}, std::vector<NDArray>(3, Full(1)), b);
  EXPECT_EQ(b[1].ToVector<float>(), All(1));

  // One list of arrays is input and output of all keys: 4, not 16 or 64.
  store->Init({"7", "8", "9"}, std::vector<NDArray>(3, Full(0)));
  const std::vector<std::vector<NDArray>> lists(3, OnFour(1));
  store->PushPull({"7", "8", "9"}, lists);
  EXPECT_EQ(lists[1][1].ToVector<float>(), All(4));
}

TEST_P(PublishedTest, Broadcast) {
  NDArray a = Full(0);
  store->Broadcast("3", Full(1) * 2, a);
  EXPECT_EQ(a.ToVector<float>(), All(2));
  std::vector<NDArray> b = OnFour(0);
  store->Broadcast("4", Full(5), b);
  for (const NDArray& array : b) EXPECT_EQ(array.ToVector<float>(), All(5));
}

TEST_P(PublishedTest, DefaultSgdLeavesMinusOneHundredth) {
  NDArray weight = Full(0);
  store->Init(3, weight);
  store->SetOptimizer(Sgd());
  store->Push(3, Full(1));
  store->Pull(3, weight);
  EXPECT_EQ(weight.ToVector<float>(), All(-0.01f));
}

TEST_P(PublishedTest, TypeIsTheNameGiven) { EXPECT_EQ(store->type(), GetParam().store); }

INSTANTIATE_TEST_SUITE_P(All, PublishedTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, PublishedTest, testing::ValuesIn(GpuSetups()), SetupName);

}  // namespace
}  // namespace heddle::kvstore_test
