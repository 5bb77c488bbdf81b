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

#include "tests/kvstore/nccl/fake_clock.h"
#include "tests/kvstore/nccl/sim_processes.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<float> Six(double value) { return std::vector<float>(6, static_cast<float>(value)); }

// Waits for what needs no call; false: it did not come.
bool Comes(const std::function<bool()>& has_come) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!has_come() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return has_come();
}

// What Python's Ctrl-C does to a wait.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

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
        {"k\n0", "k\n1", "process 0", "process 1"});
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

// --- failures ------------------------------------------------------------------------------------

TEST(NcclProcessesFailures, TheSameGpuInTwoProcessesIsRefusedBeforeNcclIsCalled) {
  SimProcesses processes({.processes = 3, .devices = 2});
  processes.gpu->MakeAlias(5, 0);  // of process 2, and of process 0
  processes.Run([](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    ExpectInvalid([&] { process.store->Push("k", process.OnDevices(1)); },
                  {"simulated GPU 0", "process 0", "process 2", "CUDA_VISIBLE_DEVICES"});
    EXPECT_EQ(process.nccl->inits(), 0);
    process.store->Barrier();
  });
}

TEST(NcclProcessesFailures, AProcessThatDiesMidwayIsNamedAndNothingHangs) {
  SimProcesses processes({.processes = 3, .devices = 2, .fails = true});
  std::latch pulled(3), in_flight(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(9));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      in_flight.wait();
      process.Die();
      return;
    }
    const int groups = process.nccl->groups();
    process.store->Push("k", process.OnDevices(1));
    const NDArray out = process.Full(0, process.devices[0]);
    process.store->Pull("k", out);
    std::thread watcher([&] {
      while (process.nccl->groups() == groups) std::this_thread::yield();
      in_flight.count_down();
    });
    EXPECT_THAT(MessageOf<NetworkError>([&] { out.WaitToRead(); }),
                AllOf(HasSubstr("worker 1"), HasSubstr("kvstore.nccl.reduce of key 'k'"),
                      HasSubstr(fmt::format("process {} of 3", process.rank))));
    watcher.join();
    EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 2; }));
    // Later ones at once.
    EXPECT_THROW(process.store->Push("k", process.OnDevices(1)), NetworkError);
    EXPECT_THROW(process.store->Barrier(), NetworkError);
    EXPECT_EQ(process.store->NumDeadNodes(), 1);
    EXPECT_EQ((process.Full(1, process.devices[0]) + 1).ToVector<float>(), Six(2));
  });
}

// Whose next call is long in coming: its GPUs do not wait for the others' until then.
TEST(NcclProcessesFailures, AnIdleProcessNoticesThatAnotherIsGone) {
  SimProcesses processes({.processes = 3, .devices = 2, .fails = true});
  std::latch pulled(3);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(9));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      process.Die();
      return;
    }
    EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 2; }));
    EXPECT_THAT(
        MessageOf<NetworkError>([&] { process.store->Push("k", process.OnDevices(1)); }),
        AllOf(HasSubstr("worker 1"), HasSubstr(fmt::format("process {} of 3", process.rank))));
  });
}

// The sum that an aborted NCCL leaves was added to the value, which then looked as good as any.
TEST(NcclProcessesFailures, AnUpdatersValueIsSpoiltByAPushThatAProcessDiesIn) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch pulled(2), issued(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->SetUpdater(
        [](KeyRef, const NDArray& input, const NDArray& stored) { stored += input; });
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(7));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      issued.wait();
      process.Die();
      return;
    }
    const NDArray out = process.Full(0, process.devices[0]);
    process.store->Push("k", process.OnDevices(1));
    process.store->Push("k", process.OnDevices(1));
    process.store->Pull("k", out);
    process.engine->PushGpu({.name = "issued",
                             .reads = {out.var()},
                             .writes = {process.engine->NewVar()},
                             .device = Gpu(process.devices[0]),
                             .run_when_poisoned = true},
                            [&](GpuStream) { issued.count_down(); });
    EXPECT_THAT(MessageOf<NetworkError>([&] { out.WaitToRead(); }), HasSubstr("worker 1"));
    process.store->Push("k", process.OnDevices(1));
    process.store->Pull("k", out);
    EXPECT_THROW(out.WaitToRead(), NetworkError);
  });
}

TEST(NcclProcessesFailures, AProcessThatDiesBeforeTheFirstPushIsNamed) {
  SimProcesses processes({.processes = 2, .devices = 1, .fails = true});
  std::latch initialised(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    initialised.arrive_and_wait();
    if (process.rank == 1) {
      process.Die();
      return;
    }
    EXPECT_THAT(MessageOf<NetworkError>([&] { process.store->Push("k", process.OnDevices(1)); }),
                HasSubstr("worker 1"));
  });
}

// Process 2 lives, and goes on without pushing.
TEST(NcclProcessesFailures, AProcessThatNeverPushesEndsTheOthersAtTheirDeadline) {
  FakeClock clock;
  SimProcesses processes(
      {.processes = 3, .devices = 1, .fails = true, .group = clock.WithDeadline()});
  std::latch failed(2), pulled(3);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(3));
    pulled.arrive_and_wait();
    if (process.rank == 2) {
      clock.Run();
      failed.wait();
      EXPECT_THROW(process.store->Barrier(), NetworkError);  // it has been told
      return;
    }
    // The first to give up tells the other one.
    EXPECT_THAT(process.MessageOfPush<Error>("k", process.OnDevices(1)),
                AllOf(HasSubstr("kvstore.nccl.reduce of key 'k'"), HasSubstr("50 ms"),
                      HasSubstr(fmt::format("process {} of 3", process.rank))));
    failed.count_down();
  });
}

TEST(NcclProcessesFailures, AFailedInputOfOneProcessEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch pulled(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init({"k", "l"},
                        {process.Full(1, process.devices[0]), process.Full(1, process.devices[0])});
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(6));
    pulled.arrive_and_wait();
    std::vector<NDArray> gradients = process.OnDevices(1);
    if (process.rank == 1) gradients[1] = process.Poisoned(process.devices[1], "no gradient");
    const NDArray out = process.Full(0, process.devices[0]);
    const auto push = [&] {
      process.store->Push({"l", "k"}, {process.OnDevices(1), gradients});
      process.store->Pull("k", out);
      out.WaitToRead();
    };
    if (process.rank == 1) {
      EXPECT_THAT(MessageOf<std::runtime_error>(push), HasSubstr("no gradient"));
    } else {
      EXPECT_THAT(MessageOf<NetworkError>(push),
                  AllOf(HasSubstr("worker 1"), HasSubstr("key 'k'"), HasSubstr("no gradient")));
    }
    EXPECT_ANY_THROW(process.store->Barrier());
  });
}

TEST(NcclProcessesFailures, ACallOfNcclThatFailsIsToldToTheOthers) {
  SimProcesses processes({.processes = 2, .devices = 1, .fails = true});
  std::latch pulled(2);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(2));
    pulled.arrive_and_wait();
    if (process.rank == 0) process.nccl->FailNextReduce();
    const std::string message = process.MessageOfPush<Error>("k", process.OnDevices(1));
    EXPECT_THAT(message, HasSubstr("out of luck"));
    if (process.rank == 1) {
      EXPECT_THAT(message, HasSubstr("worker 0"));
    }
  });
}

// Only then: what it had heard of before, it would not have begun.
TEST(NcclProcessesFailures, AProcessThatDiesWhileOthersDropTheirStoresHoldsNobodyUp) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch ends(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(6));
    if (process.rank == 1) {
      ends.wait();
      process.Die();
      return;
    }
    std::thread watcher([&] {
      while (process.nccl->finalizes() < 2) std::this_thread::yield();
      ends.count_down();
    });
    process.store.reset();
    watcher.join();
    EXPECT_EQ(process.nccl->aborts(), 2);
  });
}

// Process 1 would miss a part of the call that process 0 makes, and take the next one for it.
TEST(NcclProcessesFailures, ACallThatIsInterruptedMidwayEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  std::latch interrupted(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(6));
    process.engine->WaitForAll();
    const auto midway =
        AllOf(HasSubstr("Barrier: process 1 of 2 has left it midway"), HasSubstr("interrupted"));
    if (process.rank == 1) {
      {
        const WaitCheckScope checked(std::chrono::milliseconds(1), [] { throw Interrupted(); });
        EXPECT_THROW(process.store->Barrier(), Interrupted);
      }
      EXPECT_EQ(process.nccl->aborts(), 2);
      EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Barrier(); }), midway);
      EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Push("k", process.OnDevices(1)); }),
                  midway);
      interrupted.count_down();
      return;
    }
    interrupted.wait();
    EXPECT_THAT(MessageOf<NetworkError>([&] { process.store->Barrier(); }),
                AllOf(HasSubstr("worker 1"), midway));
    EXPECT_THAT(MessageOf<NetworkError>([&] { process.store->Push("k", process.OnDevices(1)); }),
                AllOf(HasSubstr("worker 1"), midway));
    EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 2; }));
    EXPECT_EQ(process.Pulled("k"), Six(6));  // to be saved
  });
}

TEST(NcclProcessesFailures, ASetUpThatFailsInOneProcessEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 2, .fails = true});
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    const auto push = [&] { process.store->Push("k", process.OnDevices(1)); };
    if (process.rank == 1) {
      process.nccl->CallInInits([](int) { throw NcclError("no set-up", 3); });
      EXPECT_EQ(MessageOf<NcclError>(push), "no set-up");
      process.nccl->CallInInits(nullptr);
      EXPECT_THAT(MessageOf<NetworkError>(push),  // of the job, which this process has failed
                  AllOf(HasSubstr("Push: process 1 of 2"), HasSubstr("no set-up")));
    } else {
      const auto told = AllOf(HasSubstr("worker 1"), HasSubstr("no set-up"));
      EXPECT_THAT(MessageOf<NetworkError>(push), told);
      EXPECT_THAT(MessageOf<NetworkError>(push), told);
    }
  });
}

TEST(NcclProcessesFailures, AnUpdaterThatThrowsInOneProcessEndsTheStoresOfAll) {
  SimProcesses processes({.processes = 2, .devices = 1, .fails = true});
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    int updates = 0;
    process.store->SetUpdater([&](KeyRef, const NDArray& input, const NDArray& stored) {
      if (process.rank == 1 && ++updates == 2) throw InvalidArgument("no update");
      NDArray value = stored;
      value += input;
    });
    const auto push = [&] { process.store->Push("k", process.OnDevices(1)); };
    push();
    EXPECT_EQ(process.Pulled("k"), Six(3));
    process.store->Barrier();
    const auto midway = AllOf(HasSubstr("the updater of key 'k': process 1 of 2"),
                              HasSubstr("has left it midway"), HasSubstr("no update"));
    if (process.rank == 1) {
      EXPECT_EQ(MessageOf<InvalidArgument>(push), "no update");
      EXPECT_THAT(MessageOf<InvalidState>(push), midway);
    } else {
      EXPECT_TRUE(Comes([&] { return process.nccl->aborts() == 1; }));
      EXPECT_THAT(MessageOf<NetworkError>(push), AllOf(HasSubstr("worker 1"), midway));
    }
  });
}

// --- without a scheduler -------------------------------------------------------------------------

TEST(NcclProcessesFailures, WithoutASchedulerAGpuThatAnotherProcessUsesIsRefused) {
  SimProcesses processes({.means = Means::kNccl, .processes = 2, .devices = 1});
  const kvstore::DeviceClaim other(processes.id(), 0, processes.gpu->UniqueName(0));
  processes.Run([](SimProcess& process) {
    if (process.rank == 1) return;
    ExpectInvalid([&] { process.store->Init("k", process.Full(1, process.devices[0])); },
                  {"gpu(0)", "simulated GPU 0", "another process", "HEDDLE_NCCL_ID"});
    EXPECT_EQ(process.nccl->inits(), 0);
  });
}

TEST(NcclProcessesFailures, WithoutASchedulerAProcessThatNeverComesEndsTheSetUp) {
  FakeClock clock;
  clock.Run();
  SimProcesses processes(
      {.means = Means::kNccl, .processes = 2, .devices = 1, .group = clock.WithDeadline()});
  processes.Run([](SimProcess& process) {
    if (process.rank == 1) return;
    EXPECT_THAT(MessageOf<TimeoutError>(
                    [&] { process.store->Init("k", process.Full(1, process.devices[0])); }),
                AllOf(HasSubstr("process 0 of 2"), HasSubstr("the set-up")));
    EXPECT_EQ(process.nccl->aborts(), 1);
  });
}

// Process 1 keeps its store.
TEST(NcclProcessesFailures, WithoutASchedulerAStoreIsDroppedAtTheDeadline) {
  FakeClock clock;
  SimProcesses processes(
      {.means = Means::kNccl, .processes = 2, .devices = 1, .group = clock.WithDeadline()});
  std::latch pulled(2), dropped(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(2));
    pulled.arrive_and_wait();
    if (process.rank == 1) {
      dropped.wait();
      return;
    }
    clock.Run();
    process.store.reset();
    EXPECT_EQ(process.nccl->aborts(), 2);  // of the store and of its meeting
    dropped.count_down();
  });
}

TEST(NcclProcessesFailures, WithoutASchedulerAnInterruptedCallEndsTheStoresOfAll) {
  FakeClock clock;
  SimProcesses processes(
      {.means = Means::kNccl, .processes = 2, .devices = 1, .group = clock.WithDeadline()});
  std::latch interrupted(1);
  processes.Run([&](SimProcess& process) {
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Push("k", process.OnDevices(1));
    EXPECT_EQ(process.Pulled("k"), Six(2));
    process.engine->WaitForAll();
    if (process.rank == 1) {
      {
        const WaitCheckScope checked(std::chrono::milliseconds(1), [] { throw Interrupted(); });
        EXPECT_THROW(process.store->Barrier(), Interrupted);
      }
      EXPECT_EQ(process.nccl->aborts(), 2);  // of the store and of its meeting
      EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Barrier(); }),
                  HasSubstr("Barrier: process 1 of 2 has left it midway"));
      interrupted.count_down();
      return;
    }
    interrupted.wait();
    clock.Run();
    EXPECT_THAT(MessageOf<TimeoutError>([&] { process.store->Barrier(); }),
                HasSubstr("kvstore.nccl.meet"));
    EXPECT_EQ(process.nccl->aborts(), 2);
    EXPECT_THROW(process.store->Push("k", process.OnDevices(1)), Error);
  });
}

TEST(NcclProcessesFailures, WithoutASchedulerMeetingNeedsAGpu) {
  SimProcesses({.means = Means::kNccl, .processes = 2, .devices = 1}).Run([](SimProcess& process) {
    EXPECT_THAT(MessageOf<InvalidState>([&] { process.store->Barrier(); }), HasSubstr("gpu(i)"));
    process.store->SetOptimizer(Sgd({.learning_rate = 1}));  // nobody to compare it with yet
    process.store->Init("k", process.Full(1, process.devices[0]));
    process.store->Barrier();
  });
}

}  // namespace
}  // namespace heddle::kvstore_test
