// Pushes of arrays on GPUs that cannot end as they should: the memory for what comes back is short,
// or the engine stops while they are queued. Rounds go on in step all the same.
#include <heddle/engine.h>
#include <heddle/error.h>
#include <heddle/kvstore.h>
#include <heddle/memory.h>
#include <heddle/ndarray.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvstore/dist/protocol/placement.h"
#include "kvstore/dist/worker/parts_call.h"
#include "kvstore/dist/worker/staged_parts.h"
#include "storage/gpus.h"
#include "tests/engine/sim_gpu.h"
#include "tests/kvstore/dist/job.h"
#include "tests/kvstore/support.h"
#include "tests/message_of.h"

namespace heddle::kvstore::dist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

EngineOptions GpuEngine() {
  EngineOptions options = EngineOptions::FromEnvironment();
  auto gpu = std::make_shared<engine_test::SimGpu>(1, kvstore_test::TestSeed());
  gpu->set_turns_max(1);
  options.gpu_driver = std::move(gpu);
  options.num_workers = 2;
  return options;
}

JobOptions TwoWorkers() {
  return {.network = Network::kSim,
          .num_workers = 2,
          .op_deadline = std::chrono::seconds(60),  // of what would hang
          .engine = &GpuEngine};
}

// The errors of ops that nothing else reports.
void Forget(Engine& engine) {
  for (bool more = true; more;) {
    more = false;
    try {
      engine.WaitForAll();
    } catch (const Error&) {
      more = true;
    }
  }
}

// ---- Memory

struct MemoryCase {
  const char* name;
  std::int64_t parts;
  Device from;
};

class PushPullMemoryTest : public ::testing::TestWithParam<MemoryCase> {};
INSTANTIATE_TEST_SUITE_P(All, PushPullMemoryTest,
                         ::testing::Values(MemoryCase{"OnePart", 1, Cpu()},
                                           MemoryCase{"OnePartOfTheGpu", 1, Gpu(0)},
                                           MemoryCase{"Parts", 5, Cpu()},
                                           MemoryCase{"PartsOfTheGpu", 5, Gpu(0)}),
                         [](const auto& info) { return std::string(info.param.name); });

// The push was dropped with the pull, and from then on the worker was a round behind the others.
TEST_P(PushPullMemoryTest, APushIsSentThoughThereIsNoMemoryForWhatComesBack) {
  const std::int64_t count = GetParam().parts * kPartAlignment;
  Job job(TwoWorkers());
  job.RunWorkers("dist_sync", [&](int rank, KVStore& store, Engine& engine) {
    const auto full = [&](double value, Device device) {
      return NDArray::Full({count}, value, DType::kFloat32, device, engine);
    };
    store.Init("w", full(0, Cpu()));
    const NDArray out = full(-1, Gpu(0));
    for (int round = 1; round <= 4; ++round) {
      const NDArray gradient = full(10 * round + rank, GetParam().from);
      engine.WaitForAll();
      storage::Gpus& gpus = storage::Gpus::Of(engine);
      const bool is_short = rank == 1 && round == 2;
      NDArray others;
      if (is_short) {
        gpus.Trim(DeviceType::kCpuPinned);
        // Only for what a GPU pushes.
        const std::int64_t bytes = GetParam().from == Gpu(0) ? 4 * count : 0;
        gpus.Configure(DeviceType::kCpuPinned, {.bytes_max = 4 * count + bytes + 1000});
        others = full(0, CpuPinned(0));
        engine.WaitForAll();
      }
      store.PushPull("w", gradient, out);
      if (is_short) {
        EXPECT_THAT(MessageOf<OutOfMemory>([&] { out.WaitToRead(); }), HasSubstr("pinned"));
        gpus.Configure(DeviceType::kCpuPinned, {});
        Forget(engine);
        const NDArray pulled = full(-1, Cpu());
        store.Pull("w", pulled);
        EXPECT_EQ(pulled.ToVector<float>()[0], 41);
      } else {
        const std::vector<float> sum(static_cast<std::size_t>(count),
                                     static_cast<float>(20 * round + 1));
        EXPECT_EQ(out.ToVector<float>(), sum);
      }
    }
  });
}

// ---- An engine that stops

bool IsStopping(Engine& engine) {
  try {
    engine.NewVar();
  } catch (const InvalidState&) {
    return true;
  }
  return false;
}

// The requests have their places by then, and await their values: Stop waits for them, as do the
// other workers.
TEST(StagedPushTest, EndsOnAnEngineThatIsBeingStopped) {
  const Shape shape{5 * kPartAlignment};
  Job job(TwoWorkers());
  std::thread other([&] {
    const auto node = job.Join(1);
    {
      Engine engine(GpuEngine());
      const auto store = MakeDistStore(engine, "dist_sync", node, node->NewStore());
      store->Init("w", NDArray::Zeros(shape, DType::kFloat32, Cpu(), engine));
      const NDArray out = NDArray::Zeros(shape, DType::kFloat32, Cpu(), engine);
      store->PushPull("w", NDArray::Full(shape, 1, DType::kFloat32, Cpu(), engine), out);
      EXPECT_THAT(MessageOf<Error>([&] { out.WaitToRead(); }),
                  AllOf(HasSubstr("worker 0"), HasSubstr("'kvstore.supply'"),
                        HasSubstr("the engine has been stopped")));
      EXPECT_THROW(engine.WaitForAll(), Error);
    }
    node->Close();
  });
  const auto node = job.Join(0);
  {
    Engine engine(GpuEngine());
    const std::uint32_t number = node->NewStore();
    const auto store = MakeDistStore(engine, "dist_sync", node, number);
    store->Init("w", NDArray::Zeros(shape, DType::kFloat32, Cpu(), engine));
    // As the store does it, up to where it queues the values.
    const auto key = std::make_shared<DistKey>(node, number, Key("w"), shape, DType::kFloat32,
                                               /*row_sparse=*/false);
    ASSERT_EQ(key->parts().size(), 5u);
    const auto calls = std::make_shared<CallCount>();
    CallOptions options;
    options.kind = Kind::kPush;
    const auto call = PartsCall::Make(calls, key, options);
    call->AwaitElements();
    const OutgoingParts outgoing(key, NDArray::Full(shape, 1, DType::kFloat32, Gpu(0), engine), 0);
    PushOpOf(call, engine,
             {.name = "kvstore.push", .reads = {outgoing.first()}, .run_when_poisoned = true},
             [](PartsCall&) {});
    std::thread stopper([&] { EXPECT_NO_THROW(engine.Stop(std::chrono::seconds(60))); });
    while (!IsStopping(engine)) std::this_thread::yield();
    EXPECT_THROW(outgoing.SupplyTo(call, 0), InvalidState);
    stopper.join();
  }
  node->Close();
  other.join();
}

}  // namespace
}  // namespace heddle::kvstore::dist
