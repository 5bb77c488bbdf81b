// Random rounds of arrays on all devices, of one part and of many, against their sums.
//
// Values are whole numbers that differ from element to element, so that a part that is lost,
// doubled, in another's place or of another round shows. The calls of a worker follow one another
// without waiting; what each output must hold is known from the seed, and looked at in the end.
#include <heddle/error.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/engine/sim_gpu.h"
#include "tests/kvstore/dist/job.h"
#include "tests/sanitized.h"

namespace heddle::kvstore::dist {
namespace {

using Random = std::mt19937_64;
using Values = std::vector<float>;

constexpr int kWorkers = 2;
constexpr int kGpus = 2;
constexpr int kRounds = kSanitized ? 8 : 12;

std::int64_t Draw(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// What the ranks push in a round of a key: the same for whoever asks.
struct Push {
  std::vector<float> sizes;  // of the arrays of the list
  bool fails = false;        // the first of them

  float sum() const {
    float all = 0;
    for (const float size : sizes) all += size;
    return all;
  }
};
Push PushOf(std::uint64_t seed, int rank, int key, int round, bool may_fail) {
  Random random(seed * 1'000'003 + static_cast<std::uint64_t>((rank * 100 + key) * 100 + round));
  Push push;
  const std::int64_t arrays = Draw(random, 0, 2) == 0 ? Draw(random, 2, 3) : 1;
  for (std::int64_t i = 0; i < arrays; ++i) {
    push.sizes.push_back(static_cast<float>(Draw(random, -20, 20)));
  }
  push.fails = may_fail && Draw(random, 0, 9) == 0;
  return push;
}

// Element i of an array of size `size`.
float ElementOf(float size, std::int64_t i) { return size * static_cast<float>(1 + i % 251); }

Values ValuesOf(float size, std::int64_t count) {
  Values values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = ElementOf(size, i);
  return values;
}

struct RandomCase {
  const char* type;
  Network network;
};

class WorkerProgram {
 public:
  // sync: all workers push to a round of a key. Else nothing is known but that all ends.
  WorkerProgram(std::uint64_t seed, int rank, bool sync, KVStore& store, Engine& engine)
      : seed_(seed),
        rank_(rank),
        sync_(sync),
        store_(store),
        engine_(engine),
        random_(seed + static_cast<std::uint64_t>(rank) + 1) {}

  void Run() {
    Random common(seed_);
    for (int key = 0; key < kKeys; ++key) {
      // From a single part to shards on both servers.
      counts_.push_back(Draw(common, 0, 2) == 0 ? Draw(common, 1, 4096)
                                                : Draw(common, 4097, 60'000));
      store_.Init(key, NDArray::Zeros({counts_.back()}, DType::kFloat32, Cpu(), engine_));
    }
    for (int round = 0; round < kRounds; ++round) {
      std::vector<int> keys = {0, 1, 2, 3};
      std::shuffle(keys.begin(), keys.end(), random_);
      for (const int key : keys) Round(key, round);
      if (Draw(random_, 0, 5) == 0) Check();
    }
    Check();
  }

 private:
  static constexpr int kKeys = 4;

  struct Expected {
    NDArray out;
    int key;
    int round;
    float size;
    bool fails;
  };

  Device AnyDevice() {
    const std::int64_t pick = Draw(random_, 0, 5);
    return pick == 0 ? Cpu() : pick == 1 ? CpuPinned() : Gpu(static_cast<int>(pick % kGpus));
  }
  int Priority() { return static_cast<int>(Draw(random_, -2, 2)); }

  std::vector<NDArray> Inputs(int key, const Push& push, bool on_gpus) {
    const std::int64_t count = counts_[static_cast<std::size_t>(key)];
    std::vector<NDArray> inputs;
    for (const float size : push.sizes) {
      inputs.push_back(NDArray::FromVector(ValuesOf(size, count), {count}, DType::kFloat32,
                                           on_gpus ? Gpu(0) : AnyDevice(), engine_));
    }
    if (push.fails) {
      engine_.Push({.name = "backward", .writes = {inputs[0].var()}},
                   [] { throw std::runtime_error("no gradient"); });
    }
    return inputs;
  }
  NDArray Output(int key) {
    const DType dtype = Draw(random_, 0, 3) == 0 ? DType::kFloat64 : DType::kFloat32;
    return NDArray::Full({counts_[static_cast<std::size_t>(key)]}, -1, dtype, AnyDevice(), engine_);
  }

  void Round(int key, int round) {
    const Push mine = PushOf(seed_, rank_, key, round, sync_);
    float size = 0;
    bool fails = false;
    for (int rank = 0; rank < kWorkers; ++rank) {
      const Push push = PushOf(seed_, rank, key, round, sync_);
      size += push.sum();
      fails |= push.fails;
    }
    const std::int64_t call = Draw(random_, 0, 3);
    // Arrays that are pulled over themselves lie on GPUs: of one on a CPU the thread sanitizer
    // notes what was sent when it has been sent, and by then the answer may lie there already.
    const std::vector<NDArray> inputs = Inputs(key, mine, /*on_gpus=*/call == 3);
    std::vector<NDArray> outs;
    switch (call) {
      case 0:
        store_.Push(key, inputs, Priority());
        for (const NDArray& input : inputs) input.Fill(12345);  // the store has it
        break;
      case 1:
        store_.Push(key, inputs, Priority());
        outs = {Output(key), Output(key)};
        store_.Pull(key, outs, Priority());
        break;
      case 2:
        outs = {Output(key)};
        store_.PushPull(key, inputs, outs, Priority());
        break;
      default:
        outs = inputs;
        store_.PushPull(key, inputs, Priority());
    }
    if (!sync_) return;
    for (const NDArray& out : outs) expected_.push_back({out, key, round, size, fails});
  }

  void Check() {
    for (const Expected& expected : expected_) {
      SCOPED_TRACE(fmt::format("worker {}, key {} of {} elements, round {}, {} {}", rank_,
                               expected.key, expected.out.size(), expected.round,
                               Name(expected.out.dtype()), ToString(expected.out.device())));
      if (expected.fails) {
        EXPECT_THROW(expected.out.WaitToRead(), std::exception);
        continue;
      }
      ASSERT_EQ(expected.out.ToVector<float>(), ValuesOf(expected.size, expected.out.size()));
    }
    expected_.clear();
  }

  const std::uint64_t seed_;
  const int rank_;
  const bool sync_;
  KVStore& store_;
  Engine& engine_;
  Random random_;
  std::vector<std::int64_t> counts_;
  std::vector<Expected> expected_;
};

class DistGpuRandom : public ::testing::TestWithParam<RandomCase> {
 protected:
  void RunJob(const std::function<void(int rank, KVStore& store, Engine& engine)>& body) {
    Job job({.network = GetParam().network,
             .num_workers = kWorkers,
             .num_servers = 2,
             .seed = seed_,
             .engine = [this] {
               EngineOptions options = EngineOptions::FromEnvironment();
               auto gpu = std::make_shared<engine_test::SimGpu>(kGpus, seed_);
               if (seed_ % 3 == 0) gpu->Unlink();
               options.gpu_driver = std::move(gpu);
               options.num_workers = 2;
               return options;
             }});
    job.RunWorkers(GetParam().type, body);
  }
  static void Forget(Engine& engine) {
    for (bool more = true; more;) {
      try {
        engine.WaitForAll();
        more = false;
      } catch (const std::exception&) {
      }
    }
  }

  const std::uint64_t seed_ = kvstore_test::TestSeed();
};

INSTANTIATE_TEST_SUITE_P(All, DistGpuRandom,
                         ::testing::Values(RandomCase{"dist_sync", Network::kSim},
                                           RandomCase{"dist_sync", Network::kTcp},
                                           RandomCase{"dist_device_sync", Network::kSim},
                                           RandomCase{"dist_device_sync", Network::kTcp},
                                           RandomCase{"dist_device_async", Network::kSim},
                                           RandomCase{"dist_device_async", Network::kTcp}),
                         [](const auto& info) {
                           return std::string(info.param.type) +
                                  (info.param.network == Network::kSim ? "_sim" : "_tcp");
                         });

TEST_P(DistGpuRandom, RoundsAreTheSumsOfWhatTheRanksPushed) {
  RunJob([&](int rank, KVStore& store, Engine& engine) {
    const bool sync = std::string(GetParam().type).find("async") == std::string::npos;
    WorkerProgram(seed_, rank, sync, store, engine).Run();
    Forget(engine);
  });
}

// All pushes of all ranks, each once: servers add them.
TEST_P(DistGpuRandom, NoPartIsLostOrDoubled) {
  constexpr std::int64_t kCount = 50'000;
  constexpr int kPushes = 30;
  RunJob([&](int rank, KVStore& store, Engine& engine) {
    Random random(seed_ + static_cast<std::uint64_t>(rank));
    store.SetOptimizer(Sgd({.learning_rate = 1}));
    store.Init("w", NDArray::Zeros({kCount}, DType::kFloat32, Cpu(), engine));
    NDArray kept =
        NDArray::FromVector(ValuesOf(1, kCount), {kCount}, DType::kFloat32, Gpu(0), engine);
    const NDArray ones = kept.Copy(Gpu(1));
    for (int i = 0; i < kPushes; ++i) {
      const NDArray out({kCount}, DType::kFloat32, Gpu(1), engine);
      switch (Draw(random, 0, 3)) {
        case 0:
          store.PushPull("w", ones, out);
          break;
        case 1:
          store.Push("w", {ones, ones, kept * -1});
          break;
        case 2:
          store.Push("w", ones, /*priority=*/1);
          store.Pull("w", out);
          break;
        default:
          store.Push("w", kept);
      }
    }
    store.Barrier();
    const NDArray out({kCount}, DType::kFloat32, Gpu(0), engine);
    store.Pull("w", out);
    EXPECT_EQ(out.ToVector<float>(), ValuesOf(-kWorkers * kPushes, kCount));
    store.Barrier();
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
