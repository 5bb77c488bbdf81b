// What the GPUs of this machine did, as CUPTI tells it, from the engine to the file.
// device_trace_test.cc has what simulated ones can show.
#include <heddle/engine.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/cuda/check.h"
#include "base/gpus.h"
#include "tests/engine/cuda/kernels.h"
#include "tests/engine/support.h"
#include "tools/heddle/trace_file.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using internal::DeviceWork;

// A chain that goes back and forth between two streams: the host issues all of it while the first
// kernels run, and each op runs after the one before it, by the device's own clock.
TEST(CudaTrace, OpsThatDependOnEachOtherOnTwoStreamsAreIssuedWithoutWaitingForTheDevice) {
  if (GpuCount() == 0) GTEST_SKIP() << WhyNoGpu(0);
  if (std::getenv("HEDDLE_TEST_COMPUTE_SANITIZER") != nullptr) {
    GTEST_SKIP() << "compute-sanitizer has CUPTI for itself";
  }
  constexpr int kPairs = 5;
  constexpr int kMicroseconds = 20'000;
  constexpr std::size_t kBytes = 1 << 20;
  const TempFolder folder;
  const std::string path = folder / "t.trace";
  engine_test::LogCapture log;
  void* pinned = nullptr;
  void* memory = nullptr;
  CUDA_CHECK(cudaHostAlloc(&pinned, kBytes, cudaHostAllocPortable));
  CUDA_CHECK(cudaMalloc(&memory, kBytes));
  CUDA_CHECK(cudaMemset(memory, 0, kBytes));
  {
    Engine engine;
    const Var x = engine.NewVar("x");
    const auto push = [&](int microseconds) {
      engine.PushGpu({.name = "add", .reads = {x}, .writes = {x}, .device = Gpu(0)}, [=](auto on) {
        engine_test::LaunchSlowIncrement(static_cast<int*>(memory), microseconds,
                                         static_cast<cudaStream_t>(on.handle));
      });
      engine.PushGpu(
          {.name = "copy", .reads = {x}, .writes = {x}, .device = Gpu(0), .lane = Lane::kCopyOut},
          [=](auto on) {
            CUDA_CHECK(cudaMemcpyAsync(pinned, memory, kBytes, cudaMemcpyDeviceToHost,
                                       static_cast<cudaStream_t>(on.handle)));
          });
    };
    push(0);  // makes streams, and loads the kernel
    engine.WaitForAll();
    engine.StartTrace(path);
    for (int i = 0; i < kPairs; ++i) push(kMicroseconds);
    engine.WaitForAll();
    engine.StopTrace();
  }
  EXPECT_EQ(*static_cast<int*>(pinned), kPairs + 1);
  CUDA_CHECK(cudaFree(memory));
  CUDA_CHECK(cudaFreeHost(pinned));
  if (log.HasLine({"CUPTI is not there"})) GTEST_SKIP() << log.Text();

  const TraceFile trace = ReadTraceFile(path);
  ASSERT_EQ(trace.ops.size(), 2u * kPairs);
  std::map<std::uint64_t, std::vector<TracedWork>> works;
  for (const TracedWork& work : trace.works) works[work.ticket].push_back(work);
  std::uint64_t before_ended = 0;
  for (const TracedOp& op : trace.ops) {
    const std::vector<TracedWork>& mine = works[op.ticket];
    ASSERT_EQ(mine.size(), 1u) << trace.NameOf(op) << ' ' << op.ticket;
    ASSERT_TRUE(op.run && op.completion);
    const TracedWork& work = mine[0];
    if (trace.NameOf(op) == "add") {
      EXPECT_EQ(work.kind, DeviceWork::Kind::kKernel);
      EXPECT_THAT(trace.names.at(work.name), testing::HasSubstr("SlowIncrement"));
      EXPECT_GE(work.ended_ns - work.started_ns, kMicroseconds * 1000u * 9 / 10);
    } else {
      EXPECT_EQ(work.kind, DeviceWork::Kind::kCopy);
      EXPECT_EQ(work.bytes, kBytes);
    }
    EXPECT_GE(work.started_ns, before_ended) << "it waits for the op before it";
    EXPECT_LT(work.started_ns, work.ended_ns);
    // CUPTI puts a device's times on the host's clock to within some microseconds.
    constexpr std::uint64_t kClockNs = 1'000'000;
    EXPECT_GE(work.started_ns + kClockNs, op.run->started_ns);
    EXPECT_LE(work.ended_ns, op.completion->completed_ns + kClockNs);
    before_ended = work.ended_ns;
  }
  EXPECT_NE(works[trace.ops[0].ticket][0].stream, works[trace.ops[1].ticket][0].stream);
  EXPECT_LT(trace.ops.back().run->ended_ns, works[trace.ops[2].ticket][0].ended_ns)
      << "the last op is issued before the second kernel ends";
}

}  // namespace
}  // namespace heddle::tools
