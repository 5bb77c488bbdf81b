// The store type "nccl" of several processes, on a simulated NCCL.
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/optimizer.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvstore/nccl/sim_processes.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

using ::testing::HasSubstr;

class NcclProcessesTest : public testing::TestWithParam<ProcessesOptions> {
 protected:
  // Runs as many processes with as many devices each.
  void Run(int processes, int devices, const std::function<void(SimProcess& process)>& body) {
    ProcessesOptions options = GetParam();
    options.processes = processes;
    options.devices = devices;
    SimProcesses(options).Run(body);
  }
};
std::vector<ProcessesOptions> AllMeans() {
  return {{Means::kJob, "threaded"},
          {Means::kJob, "seeded"},
          {Means::kNccl, "threaded"},
          {Means::kNccl, "seeded"}};
}
INSTANTIATE_TEST_SUITE_P(All, NcclProcessesTest, testing::ValuesIn(AllMeans()),
                         [](const testing::TestParamInfo<ProcessesOptions>& info) {
                           return std::string(info.param.means == Means::kJob ? "Job" : "Nccl") +
                                  "_" + info.param.engine;
                         });

TEST_P(NcclProcessesTest, APushSumsOverTheDevicesOfAllProcesses) {
  Run(2, 2, [](SimProcess& process) {
    EXPECT_EQ(process.store->rank(), process.rank);
    EXPECT_EQ(process.store->num_workers(), 2);
    process.store->Init("w", process.Full(process.rank, process.devices[0]));
    process.store->Push("w", process.OnDevices(10 * (process.rank + 1)));  // 10, 11; 20, 21
    const std::vector<NDArray> out = process.OnDevices(0);
    process.store->Pull("w", out);
    for (const NDArray& array : out) EXPECT_EQ(array.ToVector<float>(), Six(62));
    EXPECT_GE(process.nccl->all_reductions(), 2);
    EXPECT_EQ(process.nccl->broadcasts(), 0);  // a pull is each process's own
  });
}

TEST_P(NcclProcessesTest, TheValueOfProcessZeroCounts) {
  Run(3, 1, [](SimProcess& process) {
    const double own = 5 + process.rank;
    process.store->Init({"a", "b"},
                        {process.Full(own, process.devices[0]),
                         NDArray::Full({6}, 2 * own, DType::kFloat64, Cpu(), *process.engine)});
    EXPECT_EQ(process.Pulled("a"), Six(5));
    EXPECT_EQ(process.Pulled("b"), Six(10));
    const NDArray out = process.Full(0, process.devices[0]);
    process.store->Broadcast("c", process.Full(own, process.devices[0]), out);
    EXPECT_EQ(out.ToVector<float>(), Six(5));
    process.store->Reset("a", process.Full(3 * own, process.devices[0]));
    EXPECT_EQ(process.Pulled("a"), Six(15));
  });
}

// Every process makes the calls of one random program, with gradients of its own, and pulls when it
// likes. A store of type "device" in one process, with all gradients, says what is right, to the
// bit.
TEST_P(NcclProcessesTest, RandomProgramsGiveTheBitsOfADeviceStore) {
  constexpr int kProcesses = 2, kDevices = 2, kKeys = 3;
  const std::uint64_t seed = TestSeed();
  struct Step {
    int kind, key, second, priority;
    std::vector<float> values;  // one for each device of all
  };
  std::mt19937_64 random(seed);
  const auto draw = [&](int n) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(n));
  };
  std::uniform_real_distribution<float> real(-1, 1);
  std::vector<Step> steps(60);
  for (Step& step : steps) {
    step = {draw(8), draw(kKeys), draw(kKeys), draw(5) - 2, {}};
    for (int i = 0; i < kProcesses * kDevices; ++i) step.values.push_back(real(random));
  }
  const auto shape_of = [](int key) { return Shape{3 + key}; };
  // What one store does; `arrays(step, key)` are its gradients.
  using Arrays = std::function<std::vector<NDArray>(const Step& step, int key)>;
  const auto run = [&](KVStore& store, const Arrays& arrays, bool pulls) {
    store.SetOptimizer(Sgd({.learning_rate = 0.125, .momentum = 0.5}));
    std::vector<std::pair<NDArray, std::size_t>> pulled;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const Step& step = steps[i];
      switch (step.kind) {
        case 0:
          store.Barrier();
          break;
        case 1:
          store.Reset(step.key, arrays(step, step.key)[0]);
          break;
        case 2:
          if (step.key != step.second) {
            store.Push({step.key, step.second}, {arrays(step, step.key), arrays(step, step.second)},
                       step.priority);
            break;
          }
          [[fallthrough]];
        default:
          store.Push(step.key, arrays(step, step.key), step.priority);
      }
      if (pulls || random() % 3 == 0) {
        const NDArray like = arrays(step, step.key)[0];
        const NDArray out(like.shape(), like.dtype(), like.device(), like.engine());
        store.Pull(step.key, out, step.priority);
        pulled.emplace_back(out, i);
      }
    }
    std::map<std::size_t, std::vector<float>> values;
    for (const auto& [array, step] : pulled) values[step] = array.ToVector<float>();
    return values;
  };
  const auto init = [&](KVStore& store, const Arrays& arrays) {
    for (int key = 0; key < kKeys; ++key) store.Init(key, arrays(steps[0], key)[0]);
  };

  EngineOptions options;
  options.gpu_driver = std::make_shared<SimStoreGpu>(kProcesses * kDevices, seed);
  Engine engine(options);
  const auto oracle = KVStore::Create("device", engine);
  const Arrays all = [&](const Step& step, int key) {
    std::vector<NDArray> arrays;
    for (int device = 0; device < kProcesses * kDevices; ++device) {
      arrays.push_back(
          NDArray::Full(shape_of(key), step.values[device], DType::kFloat32, Gpu(device), engine));
    }
    return arrays;
  };
  init(*oracle, all);
  const std::map<std::size_t, std::vector<float>> expected = run(*oracle, all, /*pulls=*/true);

  Run(kProcesses, kDevices, [&](SimProcess& process) {
    const Arrays own = [&](const Step& step, int key) {
      std::vector<NDArray> arrays;
      for (const int device : process.devices) {
        arrays.push_back(process.Full(step.values[device], device, shape_of(key)));
      }
      return arrays;
    };
    init(*process.store, own);
    for (const auto& [step, values] : run(*process.store, own, /*pulls=*/process.rank == 0)) {
      EXPECT_EQ(values, expected.at(step)) << "process " << process.rank << ", step " << step;
    }
  });
}

// A push that is ready, and more urgent, does not overtake one that waits for its input: the others
// would sum what does not belong together.
TEST_P(NcclProcessesTest, CollectivesKeepTheOrderOfTheCalls) {
  Run(2, 1, [](SimProcess& process) {
    const int device = process.devices[0];
    process.store->Init({"a", "b"}, {process.Full(0, device), process.Full(0, device, {2})});
    for (int round = 0; round < 10; ++round) {
      const NDArray late = process.Full(1, device);
      Hold hold(*process.engine, {}, {late.var()});
      if (process.rank == 1) hold.Release();
      process.store->Push("a", late, /*priority=*/-1);
      process.store->Push("b", process.Full(2, device, {2}), /*priority=*/5);
      process.Full(0, device).WaitToRead();  // time to overtake
      hold.Release();
      EXPECT_EQ(process.Pulled("b", {2}), std::vector<float>(2, 4));
      EXPECT_EQ(process.Pulled("a"), Six(2));
    }
  });
}

TEST_P(NcclProcessesTest, ValuesThatDifferInShapeOrDTypeAreRefusedInAllProcesses) {
  Run(2, 1, [](SimProcess& process) {
    const int device = process.devices[0];
    const Shape shape{5 + process.rank};
    ExpectInvalid(
        [&] {
          process.store->Init({"same", "other"},
                              {process.Full(1, device), process.Full(1, device, shape)});
        },
        {"'other'", "(5,)", "(6,)", "process 0", "process 1"});
    const DType dtype = process.rank == 0 ? DType::kFloat32 : DType::kFloat16;
    ExpectInvalid([&] { process.store->Init("other", process.Full(1, device, {6}, dtype)); },
                  {"'other'", "float32", "float16"});
    EXPECT_FALSE(process.store->Contains("same"));
    process.store->Init("other", process.Full(1, device));
    EXPECT_EQ(process.Pulled("other"), Six(1));
  });
}

TEST_P(NcclProcessesTest, WhatOneProcessRefusesNoneDoes) {
  Run(2, 1, [](SimProcess& process) {
    const int device = process.devices[0];
    process.store->Init("k", process.Full(1, device));
    const auto init = [&] {
      process.store->Init(process.rank == 0 ? "new" : "k", process.Full(1, device));
    };
    if (process.rank == 0) {
      ExpectInvalid(init, {"Init", "process 1 has refused", "'k'"});
    } else {
      ExpectInvalid(init, {"'k'"});
    }
    EXPECT_FALSE(process.store->Contains("new"));
    const auto poisoned = [&] {
      process.store->Init("new", process.rank == 0 ? process.Poisoned(device, "no weight")
                                                   : process.Full(1, device));
    };
    if (process.rank == 0) {
      EXPECT_THAT(MessageOf<std::runtime_error>(poisoned), HasSubstr("no weight"));
    } else {
      ExpectInvalid(poisoned, {"process 0", "no weight"});
    }
    process.store->Barrier();
  });
}

TEST_P(NcclProcessesTest, ABarrierReturnsWhenThePushesOfAllAreSummed) {
  std::latch coming(2);
  std::atomic<bool> released{false};
  Run(2, 1, [&](SimProcess& process) {
    const int device = process.devices[0];
    process.store->Init("k", process.Full(0, device));
    const NDArray late = process.Full(1, device);
    Hold hold(*process.engine, {}, {late.var()});
    if (process.rank == 0) hold.Release();
    process.store->Push("k", late);
    coming.count_down();
    std::jthread releaser;
    if (process.rank == 1) {
      releaser = std::jthread([&] {
        coming.wait();
        for (int i = 0; i < 1000; ++i) std::this_thread::yield();  // time to return too early
        released = true;
        hold.Release();
      });
    }
    process.store->Barrier();
    EXPECT_TRUE(released);
    EXPECT_EQ(process.Pulled("k"), Six(2));
  });
}

// It has not begun: the others are told, and all are in step.
TEST_P(NcclProcessesTest, ABarrierThatIsInterruptedBeforeTheOthersAreAskedIsRefused) {
  Run(2, 1, [](SimProcess& process) {
    static thread_local Hold* held;
    const int device = process.devices[0];
    process.store->Init("k", process.Full(0, device));
    const NDArray late = process.Full(1, device);
    Hold hold(*process.engine, {}, {late.var()});
    if (process.rank == 0) hold.Release();
    process.store->Push("k", late);  // the first, which compares
    if (process.rank == 1) {
      held = &hold;
      const WaitCheckScope checked(std::chrono::milliseconds(1), [] {
        if (held == nullptr) return;
        std::exchange(held, nullptr)->Release();
        throw Interrupted();
      });
      EXPECT_THROW(process.store->Barrier(), Interrupted);
    } else {
      ExpectInvalid([&] { process.store->Barrier(); }, {"Barrier", "process 1 has refused it"});
    }
    process.store->Barrier();
    EXPECT_EQ(process.Pulled("k"), Six(2));
  });
}

TEST_P(NcclProcessesTest, OtherCallsThanThoseOfTheOthersAreNamed) {
  Run(2, 1, [](SimProcess& process) {
    const int device = process.devices[0];
    process.store->Init("k", process.Full(1, device));
    ExpectInvalid(
        [&] {
          if (process.rank == 0) {
            process.store->Barrier();
          } else {
            process.store->Init("new", process.Full(1, device));
          }
        },
        {"'Barrier'", "'Init of 1 keys, 'new' the first'", "process 0", "process 1"});
    ExpectInvalid(
        [&] {
          if (process.rank == 0) {
            process.store->Push("k", process.Full(1, device));
          } else {
            process.store->Barrier();
          }
        },
        {"'Barrier'", "'the first Push, of 1 keys, 'k' the first'"});
    ExpectInvalid([&] { process.store->SetOptimizer(Sgd({.learning_rate = 0.5 + process.rank})); },
                  {"learning_rate 0.5", "learning_rate 1.5"});
    process.store->SetOptimizer(Sgd({.learning_rate = 0.5}));
    process.store->Push("k", process.Full(1, device));
    EXPECT_EQ(process.Pulled("k"), Six(0));
  });
}

TEST_P(NcclProcessesTest, APushThatCannotBeIsRefusedHereAndTheNextOneGoesOn) {
  Run(2, 2, [](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    const auto refused = [&] {
      ExpectInvalid([&] { process.store->Push("k", process.OnDevices(1, {2})); },
                    {"'k'", "(6,)", "(2,)"});
      ExpectInvalid([&] { process.store->Push("no", process.OnDevices(1)); }, {"'no'"});
      ExpectInvalid(
          [&] { process.store->Push("k", process.OnDevices(1)[0].AsType(DType::kInt32)); },
          {"'k'", "float32", "int32"});
      ExpectInvalid(
          [&] {
            process.store->Push("k", NDArray::Ones({6}, DType::kFloat32, Cpu(), *process.engine));
          },
          {"'k'", "gpu(i)", "cpu(0)"});
    };
    refused();  // in all processes
    process.store->Push("k", process.OnDevices(1));
    if (process.rank == 1) refused();  // in one
    ExpectInvalid([&] { process.store->Push("k", process.OnDevices(1)[0]); }, {"'k'", "gpu("});
    process.store->Push("k", process.OnDevices(2));
    EXPECT_EQ(process.Pulled("k"), Six(10));
    process.store->Barrier();
  });
}

TEST_P(NcclProcessesTest, ProcessesMayHaveDifferentNumbersOfDevices) {
  Run(2, 2, [](SimProcess& process) {
    if (process.rank == 1) process.devices.pop_back();
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));  // 1, 2; 1
    EXPECT_EQ(process.Pulled("k"), Six(4));
    EXPECT_GE(process.nccl->inits(), process.rank == 1 ? 1 : 2);
  });
}

// What processes say to each other has the keys in it, whatever is in these.
TEST_P(NcclProcessesTest, KeysMayBeOfAnyBytes) {
  Run(2, 1, [](SimProcess& process) {
    const int device = process.devices[0];
    const std::vector<std::string> keys = {"two\nlines", std::string("\0\n", 2), "3:a:b", "\n"};
    for (const std::string& key : keys) process.store->Init(key, process.Full(1, device));
    ExpectInvalid(
        [&] { process.store->Init("k\n" + std::to_string(process.rank), process.Full(1, device)); },
        {"k\\x0a0", "k\\x0a1", "process 0", "process 1"});
    for (const std::string& key : keys) {
      process.store->Push(key, process.Full(2, device));
      EXPECT_EQ(process.Pulled(key), Six(4));
    }
  });
}

TEST(NcclProcesses, WordsOfAnyBytesComeThroughAndOtherTextsAreRefused) {
  using kvstore::PackWords;
  using kvstore::UnpackWords;
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, round {}", TestSeed(), round));
    kvstore::Words words(random() % 4);
    for (std::string& word : words) {
      for (std::size_t left = random() % 12; left > 0; --left) {
        word += "0:9\n\xff"[random() % 6];  // the last is a 0
      }
    }
    EXPECT_EQ(UnpackWords(PackWords(words)), words);
  }
  for (const char* const text : {"x", ":", "1", "1:", "-1:a", "2:a", "1:ab", "1:a3:ab",
                                 "18446744073709551615:a", "18446744073709551616:a"}) {
    EXPECT_THROW(UnpackWords(text), InvalidState) << text;
  }
}

TEST_P(NcclProcessesTest, StoresMayBeDroppedWithPushesPending) {
  Run(2, 1, [](SimProcess& process) {
    const NDArray out = process.Full(0, process.devices[0]);
    process.store->Init("k", process.Full(1, process.devices[0]));
    for (int i = 0; i < 20; ++i) process.store->Push("k", process.Full(i, process.devices[0]));
    process.store->Pull("k", out);
    process.store.reset();
    EXPECT_EQ(out.ToVector<float>(), Six(38));
  });
}

}  // namespace
}  // namespace heddle::kvstore_test
