// Sums over simulated GPUs whose links differ: which copies and partial sums a push takes, its
// bits, its errors.
#include "kvstore/gpu_sums.h"

#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/optimizer.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/gpus.h"
#include "tests/kvstore/sim_store_gpu.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

using internal::GpuLink;
using kvstore::LinksBetween;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

constexpr GpuLink kNvlink{.access = true, .native_atomics = true, .rank = 0};
constexpr GpuLink kSlowNvlink{.access = true, .native_atomics = true, .rank = 1};
constexpr GpuLink kPcie{.access = true, .native_atomics = false, .rank = 2};
constexpr GpuLink kSlowPcie{.access = true, .native_atomics = false, .rank = 3};
constexpr GpuLink kNone{};

constexpr std::int64_t kLarge = 1 << 16;  // float32: 256 KiB

// What a machine's GPUs have between them.
enum class Links { kAlike, kRing, kIslands, kFarIslands, kNoPeers, kRandom };

std::string NameOf(Links links) {
  switch (links) {
    case Links::kAlike:
      return "all alike";
    case Links::kRing:
      return "a ring";
    case Links::kIslands:
      return "two islands, linked";
    case Links::kFarIslands:
      return "two islands, not linked";
    case Links::kNoPeers:
      return "no links";
    case Links::kRandom:
      return "random links";
  }
  return "";
}

class GpuSumsTest : public testing::Test {
 protected:
  static constexpr int kGpus = 8;

  // Fresh devices, linked so.
  void Start(Links links) {
    engine_.reset();
    gpu_ = std::make_shared<SimStoreGpu>(kGpus, random_());
    gpu_->set_turns_max(1);
    for (int a = 0; a < kGpus; ++a) {
      for (int b = a + 1; b < kGpus; ++b) gpu_->SetLink(a, b, LinkBetween(links, a, b));
    }
    EngineOptions options = EngineOptions::FromEnvironment();
    options.gpu_driver = gpu_;
    options.num_workers = 2;
    options.check_access = true;
    engine_ = std::make_unique<Engine>(options);
  }
  std::unique_ptr<KVStore> NewStore(GpuSums sums) const {
    return KVStore::Create("device", *engine_, {.gpu_sums = sums});
  }

  NDArray Full(float value, int gpu, std::int64_t count = kLarge,
               DType dtype = DType::kFloat32) const {
    return NDArray::Full({count}, value, dtype, Gpu(gpu), *engine_);
  }
  // Value i of a list on gpu(i).
  std::vector<NDArray> OneEach(const std::vector<float>& values, std::int64_t count = kLarge,
                               DType dtype = DType::kFloat32) const {
    std::vector<NDArray> arrays;
    for (const float value : values) {
      arrays.push_back(Full(value, static_cast<int>(arrays.size()), count, dtype));
    }
    return arrays;
  }
  static float FirstOf(const NDArray& array) { return array.Slice(0, 1).ToVector<float>()[0]; }
  // A store with one key for each GPU, whose values lie there: key i on gpu(i).
  std::unique_ptr<KVStore> StoreWithAKeyOnEach(GpuSums sums, std::int64_t count = kLarge,
                                               DType dtype = DType::kFloat32) const {
    auto store = NewStore(sums);
    std::vector<Key> keys;
    std::vector<std::vector<NDArray>> lists;
    for (int key = 0; key < kGpus; ++key) {
      keys.emplace_back(key);
      store->Init(key, NDArray::Full({count}, 0, dtype, Cpu(), *engine_));
      lists.push_back(OneEach(std::vector<float>(kGpus, 0), count, dtype));
    }
    store->Push(keys, lists);
    return store;
  }

  // What `call` issued: "1>0" is a copy from gpu(1) to gpu(0), "0:4" a sum of four arrays on
  // gpu(0).
  template <class Call>
  std::vector<std::string> StepsOf(const Call& call) {
    engine_->WaitForAll();
    gpu_->TakeSteps();
    call();
    engine_->WaitForAll();
    std::vector<std::string> steps;
    for (const engine_test::SimGpu::Step& step : gpu_->TakeSteps()) {
      steps.push_back(step.inputs == 0 ? fmt::format("{}>{}", step.from, step.device)
                                       : fmt::format("{}:{}", step.device, step.inputs));
    }
    return steps;
  }
  // `first` and `then` are among the steps, in that order.
  static void ExpectOrder(const std::vector<std::string>& steps, const std::string& first,
                          const std::string& then) {
    const auto place = std::ranges::find(steps, first);
    EXPECT_NE(std::find(place, steps.end(), then), steps.end())
        << first << ", " << then << ": " << testing::PrintToString(steps);
  }

  std::mt19937_64 random_{TestSeed()};
  std::shared_ptr<SimStoreGpu> gpu_;
  std::unique_ptr<Engine> engine_;

 private:
  GpuLink LinkBetween(Links links, int a, int b) {
    const bool one_island = a / 4 == b / 4;
    switch (links) {
      case Links::kAlike:
        return kNvlink;
      case Links::kRing:
        return b - a == 1 || b - a == kGpus - 1 ? kNvlink : kPcie;
      case Links::kIslands:
        return one_island ? kNvlink : kPcie;
      case Links::kFarIslands:
        return one_island ? kNvlink : kNone;
      case Links::kNoPeers:
        return kNone;
      case Links::kRandom:
        return std::vector{kNvlink, kSlowNvlink, kPcie, kSlowPcie, kNone}[random_() % 5];
    }
    return kNone;
  }
};

TEST_F(GpuSumsTest, LinksAreWhatTheDriverSays) {
  Start(Links::kNoPeers);
  gpu_->SetLink(0, 1, kNvlink);
  gpu_->SetLink(0, 2, kSlowNvlink);
  gpu_->SetLink(0, 3, kPcie);
  gpu_->SetLink(1, 3, kSlowPcie);
  const std::vector<int> devices = {0, 1, 2, 3};
  const auto links = [&] { return LinksBetween(storage::Gpus::Of(*engine_), devices); };
  const kvstore::LinkMatrix found = links();
  EXPECT_GT(found(0, 1), found(0, 2));
  EXPECT_EQ(found(0, 1), found(1, 0));
  EXPECT_GT(found(0, 2), found(0, 3));
  EXPECT_GT(found(0, 3), found(1, 3));
  EXPECT_GT(found(1, 3), found(1, 2));
  // Once is enough.
  gpu_->SetLink(0, 1, kNone);
  EXPECT_EQ(links()(0, 1), found(0, 1));
  // No context is made for the question.
  EXPECT_EQ(gpu_->devices_entered(), std::set<int>());
}

// In the order of the list one sum goes from the first island to the second one. If the value lies
// in the first one it comes back.
TEST_F(GpuSumsTest, OneSumCrossesBetweenIslandsInListOrder) {
  Start(Links::kIslands);
  const auto store = StoreWithAKeyOnEach(GpuSums::kRelay);
  // One by one, each 4 is lost in 1e8.
  const std::vector<NDArray> values = OneEach({1e8F, 0, 0, 0, 4, 4, 4, 4});
  const auto in_first = StepsOf([&] { store->Push(1, values); });
  EXPECT_THAT(in_first, UnorderedElementsAre("1>0", "2>0", "3>0", "0:4", "0>4", "5>4", "6>4", "7>4",
                                             "4:5", "4>1"));
  for (const char* const copy : {"1>0", "2>0", "3>0"}) ExpectOrder(in_first, copy, "0:4");
  ExpectOrder(in_first, "0:4", "0>4");
  for (const char* const copy : {"0>4", "5>4", "6>4", "7>4"}) ExpectOrder(in_first, copy, "4:5");
  ExpectOrder(in_first, "4:5", "4>1");
  const auto in_second = StepsOf([&] { store->Push(6, values); });
  EXPECT_THAT(in_second,
              UnorderedElementsAre("1>0", "2>0", "3>0", "0:4", "0>6", "4>6", "5>6", "7>6", "6:5"));
  ExpectOrder(in_second, "0:4", "0>6");
  ExpectOrder(in_second, "0>6", "6:5");
  for (const int key : {1, 6}) {
    const NDArray out = Full(-1, 3);
    store->Pull(key, out);
    EXPECT_THAT(out.ToVector<float>(), testing::Each(1e8F)) << key;
  }
  // Another list of the key has its own order.
  const std::vector<NDArray> reversed(values.rbegin(), values.rend());
  EXPECT_THAT(
      StepsOf([&] { store->Push(6, reversed); }),
      UnorderedElementsAre("5>4", "6>4", "7>4", "4:4", "4>0", "1>0", "2>0", "3>0", "0:5", "0>6"));
}

// Trees add up each island first, which gives other bits, the same in every run.
TEST_F(GpuSumsTest, ATreeAddsUpEachIslandFirst) {
  Start(Links::kIslands);
  const auto store = StoreWithAKeyOnEach(GpuSums::kTree);
  // In list order 1e8, as above.
  const std::vector<NDArray> values = OneEach({1e8F, 0, 0, 0, 4, 4, 4, 4});
  for (int run = 0; run < 3; ++run) {
    const auto steps = StepsOf([&] { store->Push(1, values); });
    EXPECT_THAT(
        steps, UnorderedElementsAre("5>4", "6>4", "7>4", "4:4", "0>1", "2>1", "3>1", "4>1", "1:5"));
    ExpectOrder(steps, "4:4", "4>1");
    ExpectOrder(steps, "4>1", "1:5");
    const NDArray out = Full(-1, 3);
    store->Pull(1, out);
    EXPECT_THAT(out.ToVector<float>(), testing::Each(1e8F + 16));
  }
}

// Where a plain push is as fast, where steps would be rounded, and where it is asked for.
TEST_F(GpuSumsTest, AllValuesGoStraightToTheValueWhereThatIsBest) {
  std::vector<std::string> direct = {"3:8"};
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    if (gpu != 3) direct.push_back(fmt::format("{}>3", gpu));
  }
  const auto steps_of = [&](Links links, GpuSums sums, std::int64_t count, DType dtype) {
    Start(links);
    const auto store = StoreWithAKeyOnEach(sums, count, dtype);
    const std::vector<NDArray> values = OneEach({1, 2, 3, 4, 5, 6, 7, 8}, count, dtype);
    auto steps = StepsOf([&] { store->Push(3, values); });
    const NDArray out = Full(-1, 3, count);
    store->Pull(3, out);
    EXPECT_THAT(out.ToVector<float>(), testing::Each(36.0F));
    return steps;
  };
  for (const GpuSums sums : {GpuSums::kRelay, GpuSums::kTree}) {
    EXPECT_THAT(steps_of(Links::kAlike, sums, kLarge, DType::kFloat32),
                UnorderedElementsAreArray(direct));
    EXPECT_THAT(steps_of(Links::kNoPeers, sums, kLarge, DType::kFloat32), ElementsAre("3:8"));
    EXPECT_THAT(steps_of(Links::kIslands, sums, 1000, DType::kFloat32),
                UnorderedElementsAreArray(direct));
  }
  EXPECT_THAT(steps_of(Links::kIslands, GpuSums::kDirect, kLarge, DType::kFloat32),
              UnorderedElementsAreArray(direct));
  EXPECT_THAT(steps_of(Links::kIslands, GpuSums::kRelay, 8 * kLarge, DType::kBFloat16),
              UnorderedElementsAreArray(direct));
  // Integers have the same bits in any order, so the best one is taken.
  EXPECT_THAT(steps_of(Links::kIslands, GpuSums::kRelay, kLarge, DType::kInt32),
              UnorderedElementsAre("5>4", "6>4", "7>4", "4:4", "0>3", "1>3", "2>3", "4>3", "3:5"));
}

// Small keys of a list call still share ops and launches; a large one beside them has its own.
TEST_F(GpuSumsTest, SmallKeysOfAListStillGoTogether) {
  constexpr int kKeys = 40;
  const auto push = [&](bool with_large) {
    Start(Links::kIslands);
    const auto store = NewStore(GpuSums::kRelay);
    std::vector<Key> keys;
    std::vector<std::vector<NDArray>> lists;
    for (int key = 0; key < kKeys; ++key) {
      keys.emplace_back(key);
      const auto count = static_cast<std::int64_t>(1 + random_() % 300);
      lists.push_back(OneEach({1, 2, 3, 4, 5, 6, 7, 8}, count));
    }
    if (with_large) {
      keys.emplace_back(kKeys);
      lists.push_back(OneEach({1, 2, 3, 4, 5, 6, 7, 8}));
    }
    store->Push(keys, lists);
    engine_->WaitForAll();
    const std::uint64_t ops = engine_->stats().pushed;
    const int launches = gpu_->launches();
    store->Push(keys, lists);
    engine_->WaitForAll();
    const auto took = std::pair(engine_->stats().pushed - ops, gpu_->launches() - launches);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      store->Pull(static_cast<int>(i), lists[i]);
      EXPECT_EQ(FirstOf(lists[i][2]), 36);
    }
    return took;
  };
  // A copy for each array that lies elsewhere; an op, and a launch, for each GPU.
  EXPECT_THAT(push(false), testing::Pair(kKeys * 7 + 8, kKeys * 7 + 8));
  // gpu(0) has the large one: eight copies, two sums and the op on the value.
  EXPECT_THAT(push(true), testing::Pair(kKeys * 7 + 7 + 11, kKeys * 7 + 7 + 11));
}

// Random links, lists, dtypes and updates. In the order of the list, the bits of "local" on CPUs;
// of a tree, those of the sums of its plan.
class GpuSumsRandom : public GpuSumsTest {
 protected:
  int Draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  // On the CPUs, step by step.
  NDArray SumByPlan(const std::vector<NDArray>& list, Device root,
                    const std::vector<NDArray>& on_cpus) const {
    std::vector<int> gpus;
    for (const NDArray& array : list) gpus.push_back(array.device().id);
    std::vector<int> numbered = gpus;
    numbered.push_back(root.id);
    std::ranges::sort(numbered);
    numbered.erase(std::unique(numbered.begin(), numbered.end()), numbered.end());
    std::vector<std::size_t> devices;
    const auto number_of = [&](int gpu) {
      return static_cast<std::size_t>(std::ranges::find(numbered, gpu) - numbered.begin());
    };
    for (const int gpu : gpus) devices.push_back(number_of(gpu));
    std::vector<NDArray> arrays = on_cpus;
    for (const kvstore::ReductionStep& step :
         PlanReduction(LinksBetween(storage::Gpus::Of(*engine_), numbered), devices,
                       number_of(root.id), list[0].bytes(), kvstore::Additions::kInAnyOrder)) {
      std::vector<NDArray> inputs;
      for (const std::size_t input : step.inputs) inputs.push_back(arrays[input]);
      const NDArray sum(inputs[0].shape(), inputs[0].dtype(), Cpu(), *engine_);
      Sum(inputs, sum);
      arrays.push_back(sum);
    }
    return arrays.back();
  }

  // One store with values on GPUs against "local" on CPUs.
  void RunStores(GpuSums sums) {
    const auto dtype = std::vector{DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                   DType::kBFloat16, DType::kInt32,   DType::kUInt8}[random_() % 6];
    const int kind = IsFloating(dtype) ? Draw(0, 2) : Draw(0, 1) * 2;  // assign, optimizer, updater
    const std::int64_t count = Draw(0, 3) == 0 ? Draw(1, 2000) : Draw(50'000, 120'000);
    SCOPED_TRACE(fmt::format("{} of {}, kind {}", count, Name(dtype), kind));
    const auto on_gpus = NewStore(sums);
    const auto on_cpus = KVStore::Create("local", *engine_);
    for (KVStore* const store : {on_gpus.get(), on_cpus.get()}) {
      store->Init("w", NDArray::Full({count}, 3, dtype, Cpu(), *engine_));
      if (kind == 1) store->SetOptimizer(Sgd({.learning_rate = 0.5, .momentum = 0.5}));
      if (kind == 2) {
        store->SetUpdater(
            [](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
      }
    }
    const Device root = Gpu(Draw(0, kGpus - 1));  // that pushes alone at first
    const NDArray first = NDArray::Full({count}, 7, dtype, root, *engine_);
    on_gpus->Push("w", first);
    on_cpus->Push("w", first);
    for (int step = 0; step < 3; ++step) {
      std::vector<NDArray> gpu_side, cpu_side;
      for (int i = Draw(2, 10); i > 0; --i) {
        std::vector<float> values(static_cast<std::size_t>(count));
        for (float& value : values) {
          const auto bits = static_cast<std::int32_t>(random_());
          value = IsFloating(dtype) ? 0x1p-31F * static_cast<float>(bits)
                                    : static_cast<float>(bits & 63);
        }
        cpu_side.push_back(NDArray::FromVector(values, {count}, dtype, Cpu(), *engine_));
        // Mostly in the order of the GPUs, as front ends make them.
        const int gpu = step < 2 ? static_cast<int>(gpu_side.size()) % kGpus : Draw(0, kGpus - 1);
        gpu_side.push_back(cpu_side.back().Copy(Gpu(gpu)));
      }
      on_gpus->Push("w", gpu_side);
      if (sums == GpuSums::kTree) cpu_side = {SumByPlan(gpu_side, root, cpu_side)};
      on_cpus->Push("w", cpu_side);
      const NDArray found(Shape{count}, dtype, Gpu(Draw(0, kGpus - 1)), *engine_);
      const NDArray expected(Shape{count}, dtype, Cpu(), *engine_);
      on_gpus->Pull("w", found);
      on_cpus->Pull("w", expected);
      ASSERT_EQ(found.ToVector<double>(), expected.ToVector<double>()) << "step " << step;
    }
  }
};

TEST_F(GpuSumsRandom, SumsHaveTheBitsOfTheCpusOverAllKindsOfLinks) {
  for (int round = 0; round < 2; ++round) {
    for (const Links links : {Links::kAlike, Links::kRing, Links::kIslands, Links::kFarIslands,
                              Links::kNoPeers, Links::kRandom}) {
      for (const GpuSums sums : {GpuSums::kRelay, GpuSums::kTree, GpuSums::kDirect}) {
        SCOPED_TRACE(fmt::format("{}, {}", NameOf(links), static_cast<int>(sums)));
        Start(links);
        RunStores(sums);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Whichever array has failed, the value stands, and pulls report it until a push succeeds.
TEST_F(GpuSumsTest, AFailedInputIsReportedAsEver) {
  for (const GpuSums sums : {GpuSums::kRelay, GpuSums::kTree}) {
    Start(Links::kIslands);
    const auto store = StoreWithAKeyOnEach(sums);
    for (std::size_t bad = 0; bad < kGpus; ++bad) {
      const std::vector<NDArray> good = OneEach({1, 2, 3, 4, 5, 6, 7, 8});
      store->Push(1, good);
      std::vector<NDArray> values = OneEach({1, 1, 1, 1, 1, 1, 1, 1});
      engine_->Push({.name = "backward", .writes = {values[bad].var()}},
                    [] { throw std::runtime_error("no gradient"); });
      const NDArray out = Full(-1, 2);
      store->Push(1, values);
      store->Pull(1, out);
      EXPECT_THAT([&] { out.WaitToRead(); },
                  testing::ThrowsMessage<std::runtime_error>("no gradient"));
      EXPECT_THROW(engine_->WaitForAll(), std::runtime_error);
      engine_->WaitForAll();  // once is enough
      store->Push(1, good);
      store->Pull(1, out);
      EXPECT_EQ(FirstOf(out), 36);
    }
  }
}

// An array that is not there yet holds up its own key alone; nothing waits for it in Push.
TEST_F(GpuSumsTest, KeysOfAListDoNotWaitForEachOther) {
  constexpr std::chrono::seconds kSoon{20};
  Start(Links::kIslands);
  const auto store = StoreWithAKeyOnEach(GpuSums::kRelay);
  std::vector<Key> keys;
  std::vector<std::vector<NDArray>> lists;
  std::vector<NDArray> out;
  for (int key = 0; key < kGpus; ++key) {
    keys.emplace_back(key);
    lists.push_back(OneEach({1, 2, 3, 4, 5, 6, 7, 8}));
    out.push_back(Full(-1, key));
  }
  engine_->WaitForAll();
  Hold backward(*engine_, {}, {lists[5][2].var()});
  store->Push(keys, lists);
  store->Pull(keys, out);
  for (std::size_t key = 0; key < kGpus; ++key) {
    if (key == 5) {
      EXPECT_THROW(out[key].WaitToRead(std::chrono::milliseconds(0)), TimeoutError);
    } else {
      out[key].WaitToRead(kSoon);
      EXPECT_EQ(FirstOf(out[key]), 36);
    }
  }
  backward.Release();
  EXPECT_EQ(FirstOf(out[5]), 36);
}

// Codes of compressed gradients are no values that could be added on their way.
TEST_F(GpuSumsTest, CodesGoStraight) {
  Start(Links::kIslands);
  const auto store = NewStore(GpuSums::kTree);
  store->SetGradientCompression({.type = "2bit", .threshold = 0.5});
  constexpr std::int64_t kMany = 8 * kLarge;
  store->Init("w", Full(0, 0, kMany));
  const std::vector<NDArray> values = OneEach({1, 1, 1, 1, 1, 1, 1, 1}, kMany);
  const auto steps = StepsOf([&] { store->Push("w", values); });
  EXPECT_THAT(steps, UnorderedElementsAre("1>0", "2>0", "3>0", "4>0", "5>0", "6>0", "7>0"));
  const NDArray out = Full(-1, 0, kMany);
  store->Pull("w", out);
  EXPECT_EQ(FirstOf(out), 4);
}

// Sets a variable for a while.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedVariable() { unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* const name_;
};

TEST_F(GpuSumsTest, TheOrderIsChosenByOptionOrVariable) {
  using kvstore::GpuSumsOf;
  EXPECT_EQ(GpuSumsOf({}), GpuSums::kRelay);
  const ScopedVariable mxnet("MXNET_KVSTORE_USETREE", "1");
  EXPECT_EQ(GpuSumsOf({}), GpuSums::kTree);
  for (const auto& [name, sums] : {std::pair("direct", GpuSums::kDirect),
                                   {"relay", GpuSums::kRelay},
                                   {"tree", GpuSums::kTree}}) {
    const ScopedVariable own("HEDDLE_GPU_SUMS", name);
    EXPECT_EQ(GpuSumsOf({}), sums);
    EXPECT_EQ(GpuSumsOf({.gpu_sums = GpuSums::kDirect}), GpuSums::kDirect);
  }
  Start(Links::kIslands);
  const ScopedVariable wrong("HEDDLE_GPU_SUMS", "trees");
  ExpectInvalid([&] { KVStore::Create("device", *engine_); },
                {"HEDDLE_GPU_SUMS", "direct", "relay", "tree", "trees"});
  KVStore::Create("local", *engine_);  // needs no order
}

}  // namespace
}  // namespace heddle::kvstore_test
