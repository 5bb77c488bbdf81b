// Gradient compression in the stores of one process, against a scalar loop written from the
// contract: one residual a key and sender, sums of what the codes stand for.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kvstore/gpu_setups.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

using Floats = std::vector<float>;

// What arrives of gradient g, and what stays of residual r.
float PlainReceived(const CompressionOptions& options, float g, float& r) {
  const float t = static_cast<float>(options.threshold);
  r = r + g;
  if (options.type == "1bit") {
    const bool plus = r > t;
    r = plus ? r - 1 : r + 1;
    return plus ? 1.0F : -1.0F;
  }
  if (r >= t) {
    r = r - t;
    return t;
  }
  if (r <= -t) {
    r = r + t;
    return -t;
  }
  return 0;
}

// The residuals of one key, by device and place among the device's arrays.
class PlainSenders {
 public:
  PlainSenders(CompressionOptions options, std::size_t count)
      : options_(std::move(options)), count_(count) {}

  // gradients: a device and its values each. Returns their sum as it reaches the store.
  Floats Sum(const std::vector<std::pair<int, Floats>>& gradients) {
    Floats sum(count_);
    std::map<int, int> seen;
    for (std::size_t k = 0; k < gradients.size(); ++k) {
      const auto& [device, values] = gradients[k];
      Floats& residual = residuals_[{device, seen[device]++}];
      residual.resize(count_);
      for (std::size_t i = 0; i < count_; ++i) {
        const float received = PlainReceived(options_, values[i], residual[i]);
        sum[i] = k == 0 ? received : sum[i] + received;
      }
    }
    return sum;
  }

 private:
  const CompressionOptions options_;
  const std::size_t count_;
  std::map<std::pair<int, int>, Floats> residuals_;
};

class CompressionTest : public StoreTest {
 protected:
  NDArray Array(const Floats& values, int device = 0, DType dtype = DType::kFloat32) {
    return NDArray::FromVector(values, {static_cast<std::int64_t>(values.size())}, dtype,
                               On(Cpu(device)), engine);
  }
};

const std::vector<CompressionOptions> kEveryOptions = {
    {"2bit", 0.5}, {"2bit", 0.03}, {"1bit", 0.5}, {"1bit", 0}, {"1bit", -0.25}};

// Random pushes of random keys with and without an optimizer, against the same store without
// compression that is pushed the sums of the plain loop: every pulled value is the same, bit by
// bit.
TEST_P(CompressionTest, EqualsThePlainLoop) {
  std::mt19937_64 random(TestSeed());
  const auto below = [&random](std::size_t end) { return static_cast<int>(random() % end); };
  std::normal_distribution<float> normal(0, 0.4F);
  for (const CompressionOptions& options : kEveryOptions) {
    for (const bool optimizer : {false, true}) {
      SCOPED_TRACE(options.type + " " + std::to_string(options.threshold));
      const auto compressed = NewStore();
      const auto plain = NewStore();
      compressed->SetGradientCompression(options);
      if (optimizer) {
        for (KVStore* s : {compressed.get(), plain.get()}) {
          s->SetOptimizer(Sgd({.learning_rate = 0.1, .momentum = 0.9}));
        }
      }
      struct PlainKey {
        DType dtype;
        std::size_t count;
        PlainSenders senders;
      };
      std::vector<PlainKey> keys;
      for (int key = 0; key < 4; ++key) {
        const DType dtype =
            std::vector{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[below(3)];
        const std::size_t count = key == 0 ? 1 : 1 + random() % 3000;
        keys.push_back({dtype, count, {options, count}});
        Floats first(count);
        for (float& value : first) value = normal(random);
        for (KVStore* s : {compressed.get(), plain.get()}) s->Init(key, Array(first, 0, dtype));
      }
      const int steps = GetParam().gpus != nullptr ? 10 : 30;  // of which each takes many ops
      for (int step = 0; step < steps; ++step) {
        const int key = below(keys.size());
        PlainKey& expected = keys[static_cast<std::size_t>(key)];
        std::vector<std::pair<int, Floats>> gradients;
        std::vector<NDArray> arrays;
        for (int n = 1 + below(5); n > 0; --n) {
          Floats values(expected.count);
          for (float& value : values) value = normal(random);
          const int device = below(3);
          arrays.push_back(Array(values, device, expected.dtype));
          // As they are in the key's dtype.
          gradients.emplace_back(device, arrays.back().ToVector<float>());
        }
        compressed->Push(key, arrays, below(3));
        plain->Push(key, Array(expected.senders.Sum(gradients), 0, expected.dtype));
        const NDArray out = Array(Floats(expected.count), 1);
        const NDArray plain_out = Array(Floats(expected.count), 1);
        compressed->Pull(key, out);
        plain->Pull(key, plain_out);
        ASSERT_EQ(out.ToVector<float>(), plain_out.ToVector<float>()) << "step " << step;
      }
    }
  }
}

TEST_P(CompressionTest, TheDocumentedExamplesArrive) {
  store->SetGradientCompression({.type = "2bit"});  // threshold 0.5
  store->Push("k", Array({0.6F, -0.7F, 0.1F, 0.5F}));
  const NDArray out = Array(Floats(4));
  store->Pull("k", out);
  EXPECT_EQ(out.ToVector<float>(), (Floats{0.5F, -0.5F, 0, 0.5F}));
  store->Push("k", Array({0.4F, -0.2F, 0.35F, 0.1F}));  // 0.5, -0.4, 0.45, 0.1
  store->Pull("k", out);
  EXPECT_EQ(out.ToVector<float>(), (Floats{0.5F, 0, 0, 0}));
}

// However small the gradients: what has arrived is never further from what was pushed than the
// threshold (2bit), or than one step beyond it (1bit).
TEST_P(CompressionTest, NothingIsLostOverManyPushes) {
  std::mt19937_64 random(TestSeed());
  std::uniform_real_distribution<float> uniform(-0.05F, 0.1F);
  for (const CompressionOptions& options :
       {CompressionOptions{"2bit", 0.25}, CompressionOptions{"1bit", 0}}) {
    const auto store = NewStore();
    store->SetGradientCompression(options);
    constexpr std::size_t kCount = 67;
    constexpr int kPushes = 300;
    store->Init("sum", Array(Floats(kCount)));
    store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
    std::vector<double> pushed(kCount);
    for (int push = 0; push < kPushes; ++push) {
      Floats values(kCount);
      for (std::size_t i = 0; i < kCount; ++i) pushed[i] += values[i] = uniform(random);
      store->Push("sum", Array(values));
    }
    const NDArray out = Array(Floats(kCount));
    store->Pull("sum", out);
    const Floats arrived = out.ToVector<float>();
    const double most = options.type == "2bit" ? 0.25 : 1.1;
    for (std::size_t i = 0; i < kCount; ++i) {
      EXPECT_NEAR(arrived[i], pushed[i], most + 1e-3) << options.type;
      EXPECT_GT(std::abs(pushed[i]), 1.0);  // much more than what may be missing
    }
  }
}

TEST_P(CompressionTest, AnUpdaterGetsWhatArrives) {
  store->SetGradientCompression({.type = "1bit", .threshold = 0});
  store->Init("k", Full(0));
  Floats seen;
  store->SetUpdater(
      [&](KeyRef, const NDArray& input, const NDArray&) { seen = input.ToVector<float>(); });
  store->Push("k", {Full(0.1, Cpu(0)), Full(-3, Cpu(1)), Full(0.2, Cpu(2))});
  EXPECT_EQ(seen, All(1));
}

TEST_P(CompressionTest, InitPullAndBroadcastStayWhole) {
  store->SetGradientCompression({.type = "2bit"});
  store->Init("k", Full(0.125));
  EXPECT_EQ(Pulled(*store, "k"), All(0.125));
  const NDArray out = Full(0);
  store->Broadcast("b", Full(0.375), out);
  EXPECT_EQ(out.ToVector<float>(), All(0.375));
  store->PushPull("k", Full(0.625), out);  // what arrives is stored and pulled whole
  EXPECT_EQ(out.ToVector<float>(), All(0.5));
}

// The setting comes before the first push of a key; of an empty list there is none.
TEST_P(CompressionTest, AnEmptyListIsNoPush) {
  store->Push(KeyList(std::vector<std::string>{}), ArrayLists(std::vector<NDArray>{}));
  EXPECT_NO_THROW(store->SetGradientCompression({.type = "2bit"}));
}

// Nothing of a push that fails counts, neither at the value nor at the senders.
TEST_P(CompressionTest, AFailedPushLeavesTheResidualsAsTheyWere) {
  store->SetGradientCompression({.type = "2bit"});
  store->Init("k", Full(7));
  store->SetUpdater([](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
  store->Push("k", {Full(0.375, Cpu(0)), Full(0.375, Cpu(1))});
  NDArray bad = Full(0, Cpu(1));
  engine.Push({.name = "fail", .writes = {bad.var()}}, [] { throw std::runtime_error("gone"); });
  store->Push("k", {Full(0.375, Cpu(0)), bad});
  store->Push("k", {Full(0.0625, Cpu(0)), Full(0.125, Cpu(1))});  // 0.4375 and 0.5
  EXPECT_EQ(Pulled(*store, "k"), All(7.5));
  EXPECT_THROW(engine.WaitForAll(), std::runtime_error);
}

TEST_P(CompressionTest, ResetForgetsTheResiduals) {
  store->SetGradientCompression({.type = "2bit"});
  store->Init("k", Full(0));
  store->Push("k", Full(0.25));
  store->Reset("k", Full(3));
  store->Push("k", Full(0.25));
  EXPECT_EQ(Pulled(*store, "k"), All(0));
  store->Push("k", Full(0.25));
  EXPECT_EQ(Pulled(*store, "k"), All(0.5));
}

// Whichever comes first: the second push alone is below the threshold.
TEST_P(CompressionTest, ResetForgetsTheResidualsInTheOrderOfThePushes) {
  if (GetParam().engine != "threaded") GTEST_SKIP() << "calls of several threads";
  const NDArray zero = Full(0);
  zero.WaitToRead();
  const NDArray small = Full(0.25);
  small.WaitToRead();
  for (int round = 0; round < Times(300); ++round) {
    store = NewStore();
    store->SetGradientCompression({.type = "2bit"});
    store->Init("k", zero);
    store->Push("k", Full(0.375));
    RunTogether(
        round, [&] { store->Push("k", zero); }, [&] { store->Reset("k", zero); });
    store->Push("k", Full(0.375));
    ASSERT_EQ(Pulled(*store, "k"), All(0)) << "in round " << round;
  }
}

TEST_P(CompressionTest, TransfersCountTheBytesOfTheCodes) {
  const auto array = [&](int device) { return Array(Floats(17), device); };
  store->Init("k", array(0));
  store->SetGradientCompression({.type = "2bit"});
  EXPECT_EQ(store->transfers().pushed_bytes, 0);
  store->Push("k", {array(0), array(1), array(2)});
  EXPECT_EQ(store->transfers().pushed_bytes, 3 * 8);
  EXPECT_EQ(store->transfers().pulled_bytes, 0);
  store->Pull("k", {array(0), array(1)});
  EXPECT_EQ(store->transfers().pulled_bytes, 2 * 68);
  const auto one_bit = NewStore();
  one_bit->SetGradientCompression({.type = "1bit"});
  one_bit->Push("k", {array(0), array(1), array(2)});
  EXPECT_EQ(one_bit->transfers().pushed_bytes, 3 * 4);
  const auto whole = NewStore();
  whole->PushPull("k", {array(0), array(1), array(2)}, array(0));
  EXPECT_EQ(whole->transfers().pushed_bytes, 3 * 68);
  EXPECT_EQ(whole->transfers().pulled_bytes, 68);
  EXPECT_THROW(whole->Push("k", Full(0)), InvalidArgument);
  EXPECT_EQ(whole->transfers().pushed_bytes, 3 * 68);
}

TEST_P(CompressionTest, SetTwiceDifferentlyIsAnErrorAndTheSameAgainIsNot) {
  store->SetGradientCompression({.type = "2bit", .threshold = 0.25});
  ExpectInvalid([&] { store->SetGradientCompression({.type = "2bit", .threshold = 0.5}); },
                {"2bit", "0.25", "0.5"});
  ExpectInvalid([&] { store->SetGradientCompression({.type = "1bit", .threshold = 0.25}); },
                {"2bit", "0.25", "1bit"});
  store->SetGradientCompression({.type = "2BIT", .threshold = 0.25});
  store->Push("k", Full(0.3));
  store->SetGradientCompression({.type = "2bit", .threshold = 0.25});
  EXPECT_EQ(Pulled(*store, "k"), All(0.25));  // the first setting holds
}

TEST_P(CompressionTest, SetAfterTheFirstPushIsAnError) {
  store->Init("k", Full(0));
  store->Push("k", Full(0.3));
  const std::string message =
      MessageOf<InvalidState>([&] { store->SetGradientCompression({.type = "2bit"}); });
  EXPECT_NE(message.find("before the first push"), std::string::npos) << message;
  EXPECT_NE(message.find("2bit"), std::string::npos) << message;
  store->Push("k", Full(0.3));
  EXPECT_EQ(Pulled(*store, "k"), All(0.3F));  // still whole
}

TEST_P(CompressionTest, OptionsThatCannotWorkAreErrors) {
  for (const double threshold : {0.0, -0.5, 1e-60, std::nan(""), 1e300}) {
    ExpectInvalid(
        [&] {
          store->SetGradientCompression({"2bit", threshold});
        },
        {"2bit", "threshold", "expected"});
  }
  ExpectInvalid(
      [&] {
        store->SetGradientCompression({"1bit", std::nan("")});
      },
      {"1bit", "threshold"});
  ExpectInvalid([&] { store->SetGradientCompression({"3bit", 0.5}); }, {"3bit", "1bit, 2bit"});
  ExpectInvalid([&] { store->SetGradientCompression({}); }, {"''", "1bit, 2bit"});
  store->Push("k", Full(0.3));
  EXPECT_EQ(Pulled(*store, "k"), All(0.3F));  // nothing was set
}

TEST_P(CompressionTest, OtherDTypesAreRefusedAndNothingChanges) {
  store->SetGradientCompression({.type = "2bit"});
  store->Init({"ints", "floats"}, {Full(5, Cpu(), DType::kInt32), Full(5)});
  ExpectInvalid([&] { store->Push("ints", Full(1, Cpu(), DType::kInt32)); },
                {"'ints'", "float32, float16 or bfloat16", "2bit", "int32"});
  ExpectInvalid(
      [&] {
        store->Push({"floats", "ints"}, {Full(1), Full(1, Cpu(), DType::kInt32)});
      },
      {"'ints'", "int32"});
  ExpectInvalid([&] { store->Push("doubles", Full(1, Cpu(), DType::kFloat64)); },
                {"'doubles'", "float64"});
  EXPECT_EQ(Pulled(*store, "ints"), All(5));
  EXPECT_EQ(Pulled(*store, "floats"), All(5));
  EXPECT_FALSE(store->Contains("doubles"));
  EXPECT_EQ(store->transfers().pushed_bytes, 0);
}

TEST_P(CompressionTest, EveryListedTypeWorks) {
  ASSERT_FALSE(CompressionTypes().empty());
  for (const std::string_view type : CompressionTypes()) {
    const auto fresh = NewStore();
    EXPECT_TRUE(fresh->IsCapable("compression"));
    fresh->SetGradientCompression({.type = std::string(type)});
    fresh->Push("k", Full(100));
    EXPECT_GT(Pulled(*fresh, "k")[0], 0) << type;
    EXPECT_LT(fresh->transfers().pushed_bytes, Full(0).bytes()) << type;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CompressionTest, testing::ValuesIn(AllSetups()), SetupName);
INSTANTIATE_TEST_SUITE_P(Gpus, CompressionTest, testing::ValuesIn(GpuSetups()), SetupName);

TEST(Compression, GivesTheSameBitsForEveryNumberOfWorkers) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal(0, 0.4F);
  constexpr std::size_t kCount = 300'001;  // several blocks
  std::vector<Floats> gradients(3, Floats(kCount));
  for (Floats& values : gradients) {
    for (float& value : values) value = normal(random);
  }
  const auto run = [&](const std::string& type, int workers) {
    Engine engine(OptionsOf({"device", "threaded", workers}));
    const auto store = KVStore::Create("device", engine);
    store->SetGradientCompression({.type = type});
    std::vector<NDArray> arrays;
    for (int d = 0; d < 3; ++d) {
      arrays.push_back(NDArray::FromVector(gradients[static_cast<std::size_t>(d)],
                                           {static_cast<std::int64_t>(kCount)}, DType::kFloat32,
                                           Cpu(d), engine));
    }
    const NDArray out({static_cast<std::int64_t>(kCount)}, DType::kFloat32, Cpu(), engine);
    store->Init("k", arrays[0]);
    store->SetOptimizer(Sgd({.learning_rate = 0.1}));
    for (int push = 0; push < 5; ++push) store->Push("k", arrays);
    store->Pull("k", out);
    return out.ToVector<float>();
  };
  for (const std::string type : {"1bit", "2bit"}) {
    const Floats expected = run(type, 1);
    for (const int workers : {2, 4}) EXPECT_EQ(run(type, workers), expected) << type;
  }
}

TEST(Compression, StoresWithoutItSaySo) {
  Engine engine;
  const auto store = KVStore::Create("teststore", engine);
  EXPECT_FALSE(store->IsCapable("compression"));
  const std::string message =
      MessageOf<InvalidState>([&] { store->SetGradientCompression({.type = "2bit"}); });
  EXPECT_NE(message.find("teststore"), std::string::npos) << message;
}

}  // namespace
}  // namespace heddle::kvstore_test
