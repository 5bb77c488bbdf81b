// Collectives between devices, on a simulated NCCL.
#include "kvstore/nccl/device_group.h"

#include <heddle/error.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/sim_gpu.h"
#include "tests/engine/support.h"
#include "tests/kvstore/nccl/fake_clock.h"
#include "tests/kvstore/nccl/sim_nccl.h"
#include "tests/message_of.h"

namespace heddle::kvstore_test {
namespace {

using engine_test::BaseSeed;
using engine_test::kSoon;
using engine_test::SimGpu;
using kvstore::Collective;
using kvstore::DeviceGroup;
using kvstore::DeviceGroupOptions;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kDevices = 4;
const DeviceGroupOptions kNoDeadline{.deadline = milliseconds(0)};

// Waits for what no call waits for; false: it did not happen.
bool HappensSoon(const std::function<bool()>& has_happened) {
  const auto end = std::chrono::steady_clock::now() + kSoon;
  while (!has_happened() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return has_happened();
}

// One of each kind is enough: what differs between them is the engine's.
std::vector<engine_test::Config> Configs() {
  std::vector<engine_test::Config> configs = engine_test::AllConfigs();
  std::erase_if(configs, [](const engine_test::Config& config) {
    return config.label.starts_with("threaded") && !config.label.starts_with("threaded2");
  });
  return configs;
}

class DeviceGroupTest : public engine_test::EveryEngine {
 protected:
  void SetUp() override {
    EngineOptions options = GetParam().options;
    options.gpu_driver = gpu;
    engine.emplace(options);
  }
  void TearDown() override { engine.reset(); }

  std::shared_ptr<DeviceGroup> Group(const std::vector<int>& devices,
                                     const DeviceGroupOptions& options = kNoDeadline) {
    return DeviceGroup::Make(nccl, gpu, devices, kvstore::NcclOrderOf(*engine), options);
  }
  NDArray Full(double value, int device, DType dtype = DType::kFloat32, std::int64_t size = 5) {
    return NDArray::Full({size}, value, dtype, Gpu(device), *engine);
  }
  NDArray Poisoned(int device, const char* why) {
    NDArray array = Full(1, device);
    engine->PushGpu({.name = "fail", .writes = {array.var()}, .device = Gpu(device)},
                    [why](GpuStream) { throw std::runtime_error(why); });
    return array;
  }
  // 1 + 2 + ... on the root.
  Collective Sum(const std::vector<int>& devices, std::size_t root = 0) {
    Collective collective{.root = root, .key = "weight"};
    for (std::size_t i = 0; i < devices.size(); ++i) {
      collective.arrays.push_back(Full(static_cast<double>(i + 1), devices[i]));
    }
    collective.sum = Full(0, devices[root]);
    return collective;
  }

  // gpu(1) fails in a collective of gpu(0) to gpu(2), with this root.
  void FailACollective(std::size_t root) {
    gpu->set_patience(milliseconds(50));
    auto group = Group({0, 1, 2});  // no deadline
    nccl->LoseDevice(1, [] { throw 1; });
    const Collective lost = Sum({0, 1, 2}, root);
    DeviceGroup::Queue(group, "lost", {lost}, 0);
    EXPECT_THAT(MessageOf<CudaError>([&] { lost.sum.WaitToRead(kSoon); }),
                HasSubstr("cudaErrorIllegalAddress"));
    EXPECT_TRUE(HappensSoon([&] { return nccl->aborts() == 3; }));
    EXPECT_EQ((lost.arrays[2] + 1).ToVector<float>(), std::vector<float>(5, 4));
    // Its inputs may wait for what never comes, and then so does gpu(2).
    const Collective late = Sum({0, 1, 2}, 2);
    DeviceGroup::Queue(group, "late", {late}, 0);
    EXPECT_THROW(late.sum.WaitToRead(kSoon), Error);
    group.reset();
    EXPECT_EQ(nccl->finalizes(), 0);
  }

  const std::shared_ptr<SimGpu> gpu = std::make_shared<SimGpu>(kDevices, BaseSeed());
  const std::shared_ptr<SimNccl> nccl = std::make_shared<SimNccl>(gpu);
  std::optional<Engine> engine;
};
INSTANTIATE_TEST_SUITE_P(All, DeviceGroupTest, testing::ValuesIn(Configs()),
                         engine_test::ConfigLabel);

TEST_P(DeviceGroupTest, SumsEveryDTypeOnItsRoot) {
  const auto group = Group({0, 2, 3});
  std::size_t root = 0;
  for (const DType dtype : kAllDTypes) {
    if (!kvstore::Nccl::Sums(dtype)) continue;
    root = (root + 1) % 3;
    const std::vector<NDArray> in = {Full(1, 0, dtype), Full(20, 2, dtype), Full(40, 3, dtype)};
    const NDArray sum = Full(0, in[root].device().id, dtype);
    DeviceGroup::Queue(group, "sum", {{.arrays = in, .root = root, .sum = sum}}, 0);
    EXPECT_EQ(sum.AsType(DType::kFloat64).ToVector<double>(), std::vector<double>(5, 61))
        << Name(dtype);
  }
  EXPECT_EQ(nccl->inits(), 3);
}

// Random collectives among random kernels on the same arrays, against plain numbers.
TEST_P(DeviceGroupTest, RandomProgramsGiveTheResultsOfTheSerialOrder) {
  std::mt19937_64 random(BaseSeed());
  const auto draw = [&](int n) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(n));
  };
  constexpr int kArrays = 3;  // a device
  for (int round = 0; round < engine_test::Rounds(2); ++round) {
    SCOPED_TRACE(fmt::format("HEDDLE_TEST_SEED={}, round {}", BaseSeed(), round));
    const auto group = Group({0, 1, 2, 3});
    // Whole numbers below 2^53: sums are exact in any order.
    std::vector<std::vector<NDArray>> arrays(kDevices);
    std::vector<std::vector<double>> expected(kDevices, std::vector<double>(kArrays));
    for (int device = 0; device < kDevices; ++device) {
      for (int i = 0; i < kArrays; ++i) {
        arrays[device].push_back(Full(expected[device][i] = draw(10), device, DType::kFloat64));
      }
    }
    for (int step = 0; step < 40; ++step) {
      const int kind = draw(3);
      if (kind == 0) {
        const int device = draw(kDevices);
        const int i = draw(kArrays);
        arrays[device][i] += static_cast<double>(step);
        expected[device][i] += step;
        continue;
      }
      // One or two collectives, which do not touch what the other one writes.
      std::vector<Collective> collectives;
      const auto before = expected;
      const auto inputs = arrays;
      for (int n = draw(2); n >= 0; --n) {
        const auto root = static_cast<std::size_t>(draw(kDevices));
        Collective collective{.root = root};
        const int in = kind == 1 ? draw(kArrays) : n;
        for (int device = 0; device < kDevices; ++device) {
          collective.arrays.push_back(inputs[device][in]);
        }
        if (kind == 1) {
          // No input of this group.
          collective.sum = Full(0, static_cast<int>(root), DType::kFloat64);
          double sum = 0;
          for (int device = 0; device < kDevices; ++device) sum += before[device][in];
          arrays[root][n] = collective.sum;
          expected[root][n] = sum;
        } else {
          for (int device = 0; device < kDevices; ++device) {
            expected[device][in] = before[root][in];
          }
        }
        collectives.push_back(std::move(collective));
      }
      DeviceGroup::Queue(group, "random", std::move(collectives), draw(3) - 1);
    }
    for (int device = 0; device < kDevices; ++device) {
      for (int i = 0; i < kArrays; ++i) {
        ASSERT_EQ(arrays[device][i].ToVector<double>(),
                  std::vector<double>(5, expected[device][i]));
      }
    }
  }
}

TEST_P(DeviceGroupTest, SeveralCollectivesAreOneGroupOfNccl) {
  const auto group = Group({0, 1});
  std::vector<Collective> sums;
  for (int i = 0; i < 6; ++i) sums.push_back(Sum({0, 1}, static_cast<std::size_t>(i % 2)));
  std::vector<NDArray> out;
  for (const Collective& sum : sums) out.push_back(sum.sum);
  DeviceGroup::Queue(group, "sums", std::move(sums), 0);
  for (const NDArray& array : out) EXPECT_EQ(array.ToVector<float>(), std::vector<float>(5, 3));
  EXPECT_EQ(nccl->groups(), 1);
  EXPECT_EQ(nccl->reductions(), 12);
}

TEST_P(DeviceGroupTest, ArraysWithoutElementsAreLeftAlone) {
  const auto group = Group({0, 1});
  const NDArray sum = Full(0, 0, DType::kFloat32, 0);
  DeviceGroup::Queue(
      group, "sum",
      {{.arrays = {Full(0, 0, DType::kFloat32, 0), Full(0, 1, DType::kFloat32, 0)}, .sum = sum}},
      0);
  sum.WaitToRead();
  EXPECT_EQ(nccl->reductions(), 0);
}

TEST_P(DeviceGroupTest, OnlyTheOutputOfAPoisonedInputIsPoisoned) {
  const auto group = Group({0, 1});
  Collective good = Sum({0, 1});
  Collective bad = Sum({0, 1});
  bad.arrays[1] = Poisoned(1, "no gradient");
  Collective broadcast{.arrays = {Poisoned(0, "no weight"), Full(7, 1)}};
  const NDArray out = broadcast.arrays[1];
  DeviceGroup::Queue(group, "sums", {good, bad}, 0);
  DeviceGroup::Queue(group, "broadcast", {broadcast}, 0);
  EXPECT_EQ(good.sum.ToVector<float>(), std::vector<float>(5, 3));
  EXPECT_THAT(MessageOf<std::runtime_error>([&] { bad.sum.WaitToRead(); }),
              HasSubstr("no gradient"));
  EXPECT_THAT(MessageOf<std::runtime_error>([&] { out.WaitToRead(); }), HasSubstr("no weight"));
  // The group goes on.
  DeviceGroup::Queue(group, "sum", {Collective{{Full(4, 0), Full(5, 1)}, 0, bad.sum}}, 0);
  EXPECT_EQ(bad.sum.ToVector<float>(), std::vector<float>(5, 9));
  EXPECT_EQ(nccl->aborts(), 0);
}

TEST_P(DeviceGroupTest, WhatThereIsNoMemoryForFailsAlone) {
  const auto group = Group({0, 1});
  constexpr std::int64_t kLarge = 1 << 20;
  const Collective good = Sum({0, 1});
  Collective large;
  for (const int device : {0, 1}) {
    large.arrays.push_back(Full(1, device, DType::kFloat32, kLarge));
  }
  large.sum = NDArray({kLarge}, DType::kFloat32, Gpu(0), *engine);
  engine->WaitForAll();
  gpu->set_device_bytes(gpu->bytes_used(Gpu(0)) + kLarge);
  for (int round = 0; round < 2; ++round) {
    DeviceGroup::Queue(group, "sums", {large, good}, 0);
    EXPECT_THROW(large.sum.WaitToRead(), OutOfMemory);
    EXPECT_EQ(good.sum.ToVector<float>(), std::vector<float>(5, 3));
    DeviceGroup::Queue(group, "sum", {large}, 0);
    EXPECT_THROW(large.sum.WaitToRead(), OutOfMemory);
    EXPECT_EQ(nccl->reductions(), (round + 1) * 2);
  }
  EXPECT_EQ(nccl->aborts(), 0);
}

TEST_P(DeviceGroupTest, AListIsOneWriteOfEachOutput) {
  const auto group = Group({0, 1});
  const Collective sum = Sum({0, 1});
  const Collective broadcast{.arrays = {Full(7, 0), Full(8, 1)}};
  DeviceGroup::Queue(group, "both", {sum, broadcast}, 0);
  engine->WaitForAll();
  EXPECT_EQ(engine->version(sum.sum.var()), 2U);
  EXPECT_EQ(engine->version(broadcast.arrays[1].var()), 2U);
  EXPECT_EQ(broadcast.arrays[1].ToVector<float>(), std::vector<float>(5, 7));
}

TEST_P(DeviceGroupTest, DevicesThatAreNotThereOrNamedTwiceAreRefusedBeforeNcclIsCalled) {
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { Group({0, 3, 0}); }), HasSubstr("gpu(0) twice"));
  EXPECT_THAT(MessageOf<InvalidArgument>([&] { Group({1, kDevices}); }), HasSubstr("gpu(4)"));
  EXPECT_EQ(nccl->inits(), 0);
  EXPECT_TRUE(gpu->devices_entered().empty());
}

TEST_P(DeviceGroupTest, ASetUpThatDoesNotEndIsGivenUp) {
  nccl->NeverReady();
  FakeClock clock;
  clock.Run();
  EXPECT_THAT(MessageOf<TimeoutError>([&] {
                Group({0, 1}, clock.WithDeadline());
              }),
              AllOf(HasSubstr("gpu(0), gpu(1)"), HasSubstr("set-up"), HasSubstr("50 ms")));
  EXPECT_EQ(nccl->aborts(), 2);
}

// Whatever is thrown, also what is no std::exception. The simulated NCCL and GPUs miss what is
// left.
TEST_P(DeviceGroupTest, ASetUpThatIsLeftByAnyExceptionLeavesNothingBehind) {
  nccl->CallInInits([](int number) {
    if (number == 2) throw number;
  });
  EXPECT_THROW(Group({0, 1, 2, 3}), int);
  EXPECT_EQ(nccl->aborts(), 2);
  nccl->CallInInits(nullptr);
  const Collective sum = Sum({0, 1});
  DeviceGroup::Queue(Group({0, 1}), "sum", {sum}, 0);
  EXPECT_EQ(sum.sum.ToVector<float>(), std::vector<float>(5, 3));
}

TEST_P(DeviceGroupTest, ASetUpThatCannotConnectLeavesNothingBehind) {
  nccl->FailNextReduce();
  EXPECT_THAT(MessageOf<NcclError>([&] { Group({0, 1}); }), HasSubstr("out of luck"));
  EXPECT_EQ(nccl->aborts(), 2);
}

// What that takes was in the first push, which ran on a worker of the engine.
TEST_P(DeviceGroupTest, IsConnectedWhenItIsMade) {
  const auto group = Group({0, 1, 2});
  EXPECT_EQ(nccl->connects(), 3);
  const Collective sum = Sum({0, 1, 2});
  DeviceGroup::Queue(group, "sum", {sum}, 0);
  EXPECT_EQ(sum.sum.ToVector<float>(), std::vector<float>(5, 6));
  EXPECT_EQ(nccl->connects(), 3);
  EXPECT_EQ(nccl->reductions(), 3);
}

// On one device there was a kernel of the one group that waited for the other device, and there one
// of the other group.
TEST_P(DeviceGroupTest, GroupsWithTheSameDevicesDoNotHoldEachOtherUp) {
  nccl->FillDevices();
  const auto one = Group({0, 1}), two = Group({0, 1});
  std::vector<NDArray> sums;
  for (std::size_t i = 0; i < 60; ++i) {
    const Collective sum = Sum({0, 1}, i / 2 % 2);
    sums.push_back(sum.sum);
    DeviceGroup::Queue(i % 2 == 0 ? one : two, "sum", {sum}, 0);
  }
  for (const NDArray& sum : sums) {
    sum.WaitToRead(kSoon);
    EXPECT_EQ(sum.ToVector<float>(), std::vector<float>(5, 3));
  }
}

// They are ordered by their issue. By a variable that each of them writes, those whose inputs come
// first waited for those that were queued first: nothing was summed while gradients were computed.
TEST_P(DeviceGroupTest, GroupsWithTheSameDevicesGoAsTheirInputsCome) {
  const auto one = Group({0, 1}), two = Group({0, 1});
  const Collective late = Sum({0, 1}), early = Sum({0, 1}), other = Sum({0, 1}, 1);
  engine_test::Hold hold(*engine, {.writes = {late.arrays[0].var()}});
  DeviceGroup::Queue(one, "late", {late}, 1);
  DeviceGroup::Queue(one, "early", {early}, 0);
  DeviceGroup::Queue(two, "other", {other}, 0);
  for (const Collective* sum : {&early, &other}) {
    sum->sum.WaitToRead(kSoon);
    EXPECT_EQ(sum->sum.ToVector<float>(), std::vector<float>(5, 3));
  }
  hold.Release();
  EXPECT_EQ(late.sum.ToVector<float>(), std::vector<float>(5, 3));
}

// What was recorded behind its kernel never happens. The carrier waited for that for ever, beyond
// any deadline, and the kernels of the others for the failed one.
TEST_P(DeviceGroupTest, ADeviceThatFailsEndsTheGroup) { FailACollective(/*root=*/0); }

// The engine ends the op by itself, and nobody told the group.
TEST_P(DeviceGroupTest, ACarrierThatFailsEndsTheGroup) { FailACollective(/*root=*/1); }

// The op has ended, and its arrays were free for others, while kernels that use them ran on.
TEST_P(DeviceGroupTest, ArraysOfAFailedCarriersOpAreKeptUntilItsKernelsAreAborted) {
  std::latch may_abort(1);
  nccl->CallInAborts([&] { may_abort.wait(); });
  const auto group = Group({0, 1});
  nccl->LoseDevice(1, [] { throw 1; });
  const void* used = nullptr;
  {
    const Collective lost = Sum({0, 1}, /*root=*/1);
    lost.arrays[0].WaitToRead();
    used = lost.arrays[0].const_data();
    DeviceGroup::Queue(group, "lost", {lost}, 0);
    EXPECT_THROW(lost.sum.WaitToRead(kSoon), CudaError);
  }
  std::vector<NDArray> others;
  for (int i = 0; i < 20; ++i) {
    others.push_back(Full(1, 0));
    others.back().WaitToRead();
    EXPECT_NE(others.back().const_data(), used);
  }
  may_abort.count_down();
  EXPECT_TRUE(HappensSoon([&] { return nccl->aborts() == 2; }));
}

// ncclCommAbort waits for streams, which may wait for what never comes.
TEST_P(DeviceGroupTest, AnAbortThatDoesNotEndIsLeftBehind) {
  std::latch may_abort(1);
  nccl->CallInAborts([&] { may_abort.wait(); });
  nccl->NeverEnds();
  FakeClock clock;
  DeviceGroupOptions options = clock.WithDeadline();
  options.abort_patience = milliseconds(20);
  auto group = Group({0, 1}, options);
  const Collective sum = Sum({0, 1});
  DeviceGroup::Queue(group, "sum", {sum}, 0);
  EXPECT_EQ(sum.sum.ToVector<float>(), std::vector<float>(5, 3));
  engine->WaitForAll();
  clock.Run();
  group.reset();
  EXPECT_EQ(nccl->comms_left(), 2);
  const int streams = gpu->streams_left();
  may_abort.count_down();
  EXPECT_TRUE(HappensSoon([&] { return gpu->streams_left() == streams - 2; }));
  EXPECT_EQ(nccl->comms_left(), 0);
}

// It was the engine's reaper that took the group down: no op of a GPU ended meanwhile.
TEST_P(DeviceGroupTest, TheEndOfAGroupThatOnlyItsOpsHaveHoldsNobodyUp) {
  FakeClock clock;
  std::latch may_end(1);
  nccl->NeverEnds();
  const Collective sum = Sum({0, 1});
  engine->PushGpu({.name = "slow", .writes = {sum.arrays[1].var()}, .device = Gpu(1)},
                  [&](GpuStream stream) { SimGpu::Launch(stream, [&] { may_end.wait(); }); });
  DeviceGroup::Queue(Group({0, 1}, clock.WithDeadline()), "sum", {sum}, 0);
  may_end.count_down();
  sum.sum.WaitToRead(kSoon);
  EXPECT_EQ(sum.sum.ToVector<float>(), std::vector<float>(5, 3));
  engine->WaitForAll();
  const int streams = gpu->streams_left();
  clock.Run();
  EXPECT_TRUE(HappensSoon([&] { return gpu->streams_left() == streams - 2; }));
  EXPECT_EQ(nccl->comms_left(), 0);
}

// Of several processes, where also what is not issued ends the group.
TEST(DeviceGroupReaper, DoesNotWaitForWhoeverIsInNccl) {
  std::latch may_fail(1), is_in_nccl(1), may_leave(1);
  const auto gpu = std::make_shared<SimGpu>(kDevices, BaseSeed());
  gpu->set_patience(milliseconds(50));
  const auto nccl = std::make_shared<SimNccl>(gpu);
  EngineOptions options;
  options.num_workers = 2;
  options.worker_host = WorkerHost::kThreads;
  options.gpu_driver = gpu;
  Engine engine(options);
  const auto group = DeviceGroup::Make(nccl, gpu, {0, 1}, kvstore::NcclOrderOf(engine), kNoDeadline,
                                       kvstore::GroupPlace{.id = nccl->NewId(), .ranks = 2});
  const auto sums_of = [&](std::size_t root) {
    Collective collective{.root = root, .key = "weight"};
    for (const int device : group->devices()) {
      collective.arrays.push_back(NDArray::Full({5}, 1, DType::kFloat32, Gpu(device), engine));
      collective.sums.push_back(NDArray::Full({5}, 0, DType::kFloat32, Gpu(device), engine));
    }
    return collective;
  };
  nccl->LoseDevice(0, [&] {
    may_fail.wait();
    throw 1;
  });
  const Collective lost = sums_of(0), next = sums_of(1);
  DeviceGroup::Queue(group, "lost", {lost}, 0);
  EXPECT_TRUE(HappensSoon([&] { return nccl->groups() == 1; }));
  nccl->CallInGroups([&] {
    is_in_nccl.count_down();
    may_leave.wait();
  });
  DeviceGroup::Queue(group, "next", {next}, 0);
  is_in_nccl.wait();
  may_fail.count_down();
  EXPECT_THROW(lost.sums[0].WaitToRead(kSoon), CudaError);
  const Var other = engine.NewVar("other");
  engine.PushGpu({.name = "other", .writes = {other}, .device = Gpu(2)}, [](GpuStream) {});
  engine.WaitForVar(other, kSoon);
  may_leave.count_down();
  EXPECT_THROW(next.sums[1].WaitToRead(kSoon), Error);
  EXPECT_TRUE(HappensSoon([&] { return nccl->aborts() == 2; }));
}

// Two groups, on an engine with workers, where what is queued is issued.
class DeviceGroupTurns : public testing::Test {
 protected:
  DeviceGroupTurns() {
    EngineOptions options;
    options.num_workers = 2;
    options.worker_host = WorkerHost::kThreads;
    options.gpu_driver = gpu;
    engine.emplace(options);
  }

  std::shared_ptr<DeviceGroup> Group(const std::vector<int>& devices,
                                     const DeviceGroupOptions& options = kNoDeadline) {
    return DeviceGroup::Make(nccl, gpu, devices, kvstore::NcclOrderOf(*engine), options);
  }
  Collective Sum(const std::vector<int>& devices) {
    Collective collective{.key = "weight"};
    for (const int device : devices) {
      collective.arrays.push_back(NDArray::Full({5}, 1, DType::kFloat32, Gpu(device), *engine));
      collective.arrays.back().WaitToRead();
    }
    collective.sum = NDArray::Full({5}, 0, DType::kFloat32, Gpu(devices[0]), *engine);
    collective.sum.WaitToRead();
    return collective;
  }
  // Queues it on `group`, with a first input for which `input` is launched; returns when all is
  // issued.
  void QueueBehind(const std::shared_ptr<DeviceGroup>& group, const Collective& sum,
                   std::function<void()> input) {
    engine->PushGpu(
        {.name = "input", .writes = {sum.arrays[0].var()}, .device = sum.arrays[0].device()},
        [input = std::move(input)](GpuStream stream) { SimGpu::Launch(stream, input); });
    Queue(group, sum);
  }
  void Queue(const std::shared_ptr<DeviceGroup>& group, const Collective& sum) {
    const int groups = nccl->groups();
    DeviceGroup::Queue(group, "sum", {sum}, 0);
    EXPECT_TRUE(HappensSoon([&] { return nccl->groups() > groups; }));
  }

  const std::shared_ptr<SimGpu> gpu = std::make_shared<SimGpu>(kDevices, BaseSeed());
  const std::shared_ptr<SimNccl> nccl = std::make_shared<SimNccl>(gpu);
  std::optional<Engine> engine;
};

// The first one's streams wait for a fork that never happens. No event of the second one reported
// an error, so its waits and the engine's end took for ever.
TEST_F(DeviceGroupTurns, AGroupWhoseTurnNeverComesFails) {
  gpu->set_patience(milliseconds(50));
  const auto one = Group({0, 1, 2}), two = Group({1, 2});
  const Collective lost = Sum({0, 1, 2}), behind = Sum({1, 2});
  std::latch may_fail(1);
  QueueBehind(one, lost, [&] {
    may_fail.wait();
    throw 1;
  });
  Queue(two, behind);
  may_fail.count_down();
  EXPECT_THROW(lost.sum.WaitToRead(kSoon), CudaError);
  const auto text = AllOf(HasSubstr("gpu(1), gpu(2)"), HasSubstr("turn that never comes"));
  EXPECT_THAT(MessageOf<InvalidState>([&] { behind.sum.WaitToRead(kSoon); }), text);
  // Known by now: it is not set up, and no further GPU is lost to it.
  EXPECT_THAT(MessageOf<InvalidState>([&] { Group({2, 1}); }), HasSubstr("turn that never comes"));
}

// Its inputs were there, so it counted as running while the other one waited for its own.
TEST_F(DeviceGroupTurns, WaitingForAnotherGroupIsNotRunning) {
  FakeClock clock;
  std::latch open(1);
  const auto one = Group({0, 1}), two = Group({0, 1}, clock.WithDeadline());
  const Collective first = Sum({0, 1}), second = Sum({0, 1});
  QueueBehind(one, first, [&] { open.wait(); });
  Queue(two, second);
  clock.Run();
  clock.AwaitLooks(2);
  std::this_thread::sleep_for(milliseconds(20));  // for it to go wrong
  clock.Run(false);
  open.count_down();
  for (const Collective* sum : {&first, &second}) {
    sum->sum.WaitToRead(kSoon);
    EXPECT_EQ(sum->sum.ToVector<float>(), std::vector<float>(5, 2));
  }
}

TEST_P(DeviceGroupTest, ADeviceThatNeverComesEndsTheGroupAtItsDeadline) {
  FakeClock clock;
  auto group = Group({0, 1, 2}, clock.WithDeadline());
  nccl->LoseDevice(1, [&] { clock.Run(); });
  const Collective lost = Sum({0, 1, 2});
  Collective behind = Sum({0, 1, 2}, 1);
  behind.arrays[0] = lost.sum;
  DeviceGroup::Queue(group, "lost", {lost}, 0);
  DeviceGroup::Queue(group, "behind", {behind}, 0);
  const auto text = AllOf(HasSubstr("gpu(0), gpu(1), gpu(2)"), HasSubstr("lost of key 'weight'"),
                          HasSubstr("50 ms"));
  EXPECT_THAT(MessageOf<TimeoutError>([&] { lost.sum.WaitToRead(); }), text);
  EXPECT_THAT(MessageOf<TimeoutError>([&] { behind.sum.WaitToRead(); }), text);
  // From now on at once; all else goes on.
  const Collective late = Sum({0, 1, 2});
  DeviceGroup::Queue(group, "late", {late}, 0);
  EXPECT_THAT(MessageOf<TimeoutError>([&] { late.sum.WaitToRead(); }), text);
  EXPECT_EQ((late.arrays[1] + 1).ToVector<float>(), std::vector<float>(5, 3));
  group.reset();  // the watchdog has aborted all
  EXPECT_EQ(nccl->aborts(), 3);
}

TEST_P(DeviceGroupTest, WaitingForInputsIsNotRunning) {
  FakeClock clock;
  const auto group = Group({0, 1}, clock.WithDeadline());
  const Collective sum = Sum({0, 1});
  std::latch started(1), open(1);
  engine->PushGpu({.name = "slow", .writes = {sum.arrays[1].var()}, .device = Gpu(1)},
                  [&](GpuStream stream) {
                    SimGpu::Launch(stream, [&] {
                      started.count_down();
                      open.wait();
                    });
                  });
  DeviceGroup::Queue(group, "patient", {sum}, 0);
  std::thread waiter([&] { EXPECT_EQ(sum.sum.ToVector<float>(), std::vector<float>(5, 3)); });
  started.wait();
  while (nccl->groups() == 0) std::this_thread::yield();
  clock.Run();
  clock.AwaitLooks(5);
  clock.Run(false);
  open.count_down();
  waiter.join();
}

TEST_P(DeviceGroupTest, AnErrorThatNcclReportsLaterFailsWhatIsInFlight) {
  auto group = Group({0, 1});  // no deadline
  nccl->LoseDevice(0);
  const Collective sum = Sum({0, 1});
  DeviceGroup::Queue(group, "sum", {sum}, 0);
  engine->PushGpu({.name = "behind",
                   .reads = {sum.sum.var()},
                   .writes = {sum.arrays[0].var()},
                   .device = Gpu(0)},
                  [](GpuStream) {});
  nccl->ReportError();
  EXPECT_THAT(MessageOf<NcclError>([&] { sum.sum.WaitToRead(); }), HasSubstr("reported later"));
  EXPECT_THROW(sum.arrays[0].WaitToRead(), NcclError);  // issued behind it
  group.reset();
  EXPECT_EQ(nccl->aborts(), 2);
}

TEST_P(DeviceGroupTest, ACallThatFailsFailsItsOutputsAndTheGroup) {
  const auto group = Group({0, 1});
  nccl->FailNextReduce();
  const Collective sum = Sum({0, 1});
  DeviceGroup::Queue(group, "sum", {sum}, 0);
  EXPECT_THAT(MessageOf<NcclError>([&] { sum.sum.WaitToRead(); }),
              AllOf(HasSubstr("ncclInternalError"), HasSubstr("out of luck")));
  EXPECT_EQ(nccl->aborts(), 2);
  const Collective next = Sum({0, 1});
  DeviceGroup::Queue(group, "next", {next}, 0);
  EXPECT_THROW(next.sum.WaitToRead(), NcclError);
}

TEST_P(DeviceGroupTest, NothingIsMadeInSteadyState) {
  const auto group = Group({0, 1, 2});
  const Collective sum = Sum({0, 1, 2});
  const auto run = [&] {
    DeviceGroup::Queue(group, "sum", {sum}, 0);
    sum.sum.WaitToRead();
    engine->WaitForAll();
  };
  run();
  const int streams = gpu->streams_made();
  const int events = gpu->events_made();
  for (int i = 0; i < 20; ++i) run();
  // A GPU's further stream is made when one is busy; and the reaper may not have had the last event
  // back. If each run made some, there were more.
  EXPECT_LE(gpu->streams_made(), streams + 3);
  EXPECT_LE(gpu->events_made(), events + 3);
}

TEST_P(DeviceGroupTest, ArraysMayBeDroppedOnceTheyAreQueued) {
  const auto group = Group({0, 1});
  for (int round = 0; round < 100; ++round) {
    std::vector<Collective> sums;
    for (int i = 0; i < 6; ++i) sums.push_back(Sum({0, 1}));
    const NDArray last = sums.back().sum;
    DeviceGroup::Queue(group, "sums", std::move(sums), 0);
    EXPECT_EQ(last.ToVector<float>(), std::vector<float>(5, 3));
  }
}

TEST_P(DeviceGroupTest, EndsInOrder) {
  auto group = Group({0, 1});
  const Collective sum = Sum({0, 1});
  DeviceGroup::Queue(group, "sum", {sum}, 0);
  sum.sum.WaitToRead();
  engine->WaitForAll();
  group.reset();
  EXPECT_EQ(nccl->finalizes(), 2);
  EXPECT_EQ(nccl->destroys(), 2);
  EXPECT_EQ(nccl->aborts(), 0);
}

// ncclCommDestroy alone would wait for ever.
TEST_P(DeviceGroupTest, AnEndThatDoesNotComeIsGivenUpAtTheDeadline) {
  FakeClock clock;
  auto group = Group({0, 1}, clock.WithDeadline());
  nccl->NeverEnds();
  clock.Run();
  group.reset();
  EXPECT_EQ(nccl->finalizes(), 2);
  EXPECT_EQ(nccl->destroys(), 0);
  EXPECT_EQ(nccl->aborts(), 2);
}

TEST_P(DeviceGroupTest, MayBeDroppedWithOpsPending) {
  const Collective sum = Sum({0, 1});
  {
    const auto group = Group({0, 1});
    for (int i = 0; i < 5; ++i) DeviceGroup::Queue(group, "sum", {sum}, 0);
  }
  EXPECT_EQ(sum.sum.ToVector<float>(), std::vector<float>(5, 3));
}

TEST_P(DeviceGroupTest, NothingIsKeptOfAnEngineWhoseStoresAreGone) {
  kvstore::NcclOrders orders;
  Engine other(GetParam().options);
  auto one = orders.Of(*engine);
  EXPECT_EQ(orders.Of(*engine), one);
  auto two = orders.Of(other);
  EXPECT_NE(one, two);
  EXPECT_EQ(orders.size(), 2u);
  one.reset();
  EXPECT_EQ(orders.size(), 1u);
  one = orders.Of(*engine);
  EXPECT_EQ(orders.size(), 2u);
  one.reset();
  two.reset();
  EXPECT_EQ(orders.size(), 0u);
}

}  // namespace
}  // namespace heddle::kvstore_test
