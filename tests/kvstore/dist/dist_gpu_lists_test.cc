// Lists of arrays on GPUs in a job: what the types with "device" in their name add up on the GPUs
// before they send it.
#include <heddle/engine.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/gpu_tasks.h"
#include "tests/engine/sim_gpu.h"
#include "tests/kvstore/dist/job.h"
#include "tests/kvstore/support.h"

namespace heddle::kvstore::dist {
namespace {

using engine_test::SimGpu;
using ::testing::Each;
using ::testing::UnorderedElementsAre;

// Two groups of four GPUs, between which links are narrow.
std::shared_ptr<SimGpu> TwoIslands() {
  auto gpu = std::make_shared<SimGpu>(8, kvstore_test::TestSeed());
  gpu->set_turns_max(1);
  for (int a = 0; a < 8; ++a) {
    for (int b = a + 1; b < 8; ++b) {
      gpu->SetLink(a, b, {.access = true, .native_atomics = a / 4 == b / 4, .rank = 0});
    }
  }
  return gpu;
}

// A job of one worker, whose arrays lie on these GPUs.
void RunJob(const std::string& type,
            const std::function<void(KVStore& store, Engine& engine, SimGpu& gpu)>& body) {
  Job job({.num_workers = 1, .engine = [] {
             EngineOptions options = EngineOptions::FromEnvironment();
             options.gpu_driver = TwoIslands();
             options.num_workers = 2;
             options.check_access = true;
             return options;
           }});
  job.RunWorkers(type, [&](int, KVStore& store, Engine& engine) {
    body(store, engine, dynamic_cast<SimGpu&>(*engine.options().gpu_driver));
  });
}

std::vector<std::string> StepsOf(Engine& engine, SimGpu& gpu, const std::function<void()>& call) {
  engine.WaitForAll();
  gpu.TakeSteps();
  call();
  engine.WaitForAll();
  std::vector<std::string> steps;
  for (const SimGpu::Step& step : gpu.TakeSteps()) {
    steps.push_back(step.inputs == 0 ? fmt::format("{}>{}", step.from, step.device)
                                     : fmt::format("{}:{}", step.device, step.inputs));
  }
  return steps;
}

class DistGpuListsTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, DistGpuListsTest,
                         testing::Values("dist_device_sync", "dist_device_async"));

TEST_P(DistGpuListsTest, AListOfAnyLengthIsSummedOnAGpu) {
  constexpr std::size_t kInputs = ops::kGpuSumInputsMax + 12;
  RunJob(GetParam(), [&](KVStore& store, Engine& engine, SimGpu& gpu) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      const int key = static_cast<int>(dtype);
      store.Init(key, NDArray::Full({50}, 0, dtype, Cpu(), engine));
      // One rounding at the end: 2048 + 1 is 2048 in float16.
      std::vector<NDArray> list = {NDArray::Full({50}, 2048, dtype, Gpu(1), engine)};
      while (list.size() < kInputs) list.push_back(NDArray::Full({50}, 1, dtype, Gpu(1), engine));
      EXPECT_THAT(StepsOf(engine, gpu, [&] { store.Push(key, list); }),
                  UnorderedElementsAre(fmt::format("1:{}", kInputs)));
      const NDArray out = NDArray::Full({50}, -1, DType::kFloat32, Gpu(0), engine);
      store.Pull(key, out);
      const auto expected = NDArray::Full({50}, 2048 + kInputs - 1, dtype, Cpu(), engine);
      EXPECT_EQ(out.ToVector<float>(), expected.ToVector<float>());
    }
  });
}

// The first array lies on gpu(0), to which the sum comes back.
TEST_P(DistGpuListsTest, ListsAreSummedAlongTheLinksInTheirOrder) {
  constexpr std::int64_t kCount = 1 << 16;
  RunJob(GetParam(), [&](KVStore& store, Engine& engine, SimGpu& gpu) {
    store.Init("w", NDArray::Full({kCount}, 0, DType::kFloat32, Cpu(), engine));
    std::vector<NDArray> list;
    for (int i = 0; i < 8; ++i) {
      // One by one each 4 is lost in 1e8.
      const float value = i == 0 ? 1e8F : i < 4 ? 0 : 4;
      list.push_back(NDArray::Full({kCount}, value, DType::kFloat32, Gpu(i), engine));
    }
    EXPECT_THAT(
        StepsOf(engine, gpu, [&] { store.Push("w", list); }),
        UnorderedElementsAre("1>0", "2>0", "3>0", "0:4", "0>4", "5>4", "6>4", "7>4", "4:5", "4>0"));
    const NDArray out = NDArray::Full({kCount}, -1, DType::kFloat32, Gpu(5), engine);
    store.Pull("w", out);
    EXPECT_THAT(out.ToVector<float>(), Each(1e8F));
  });
}

}  // namespace
}  // namespace heddle::kvstore::dist
