#include "base/cuda/current_device.h"

#include <heddle/error.h>

#include <thread>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "base/cuda/check.h"
#include "base/gpus.h"
#include "tests/base/cuda/has_context.h"

namespace heddle {
namespace {

int CurrentDevice() {
  int current = -1;
  CUDA_CHECK(cudaGetDevice(&current));
  return current;
}

TEST(CurrentDevice, OneThatIsNotThereIsRefused) {
  EXPECT_THROW(EnterDevice(GpuCount()), CudaError);
  EXPECT_THROW(EnterDevice(-1), CudaError);
}

TEST(CurrentDevice, AThreadThatHadNoneHasNoneAgain) {
  if (GpuCount() == 0) GTEST_SKIP() << WhyNoGpu(0);
  const int last = GpuCount() - 1;
  const bool zero_had_one = HasContext(0);
  std::thread([&] {
    EXPECT_EQ(CurrentDevice(), 0);
    {
      const DeviceGuard guard(last);
      EXPECT_EQ(CurrentDevice(), last);
      void* block = nullptr;
      CUDA_CHECK(cudaMalloc(&block, 1 << 20));  // the runtime goes by what was entered
      cudaPointerAttributes attributes{};
      CUDA_CHECK(cudaPointerGetAttributes(&attributes, block));
      EXPECT_EQ(attributes.device, last);
      CUDA_CHECK(cudaFree(block));
    }
    EXPECT_EQ(CurrentDevice(), 0);
  }).join();
  EXPECT_TRUE(HasContext(last));
  if (last > 0) {
    EXPECT_EQ(HasContext(0), zero_had_one);
  }
}

// A capture in CUDA's default mode, as torch.cuda.graph makes it, forbids every other thread these
// calls, and one of them would spoil it.
TEST(CurrentDevice, CapturesOfOthersForbidAThreadInAGuardNothing) {
  if (GpuCount() == 0) GTEST_SKIP() << WhyNoGpu(0);
  CUDA_CHECK(cudaSetDevice(0));
  cudaStream_t captured = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
  std::thread([] {
    {
      const DeviceGuard guard(0);
      cudaEvent_t event = nullptr;
      EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
      EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
      EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
      void* block = nullptr;
      EXPECT_EQ(cudaHostAlloc(&block, 1 << 20, cudaHostAllocPortable), cudaSuccess);
      EXPECT_EQ(cudaFreeHost(block), cudaSuccess);
    }
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    EXPECT_EQ(mode, cudaStreamCaptureModeGlobal) << "what the thread had before";
  }).join();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
  if (graph != nullptr) CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaStreamDestroy(captured));
}

TEST(CurrentDevice, GuardsNestAndBringTheOuterOneBack) {
  if (GpuCount() < 2) GTEST_SKIP() << "needs two GPUs; " << WhyNoGpu(1);
  std::thread([] {
    CUDA_CHECK(cudaSetDevice(1));
    {
      const DeviceGuard guard(0);
      EXPECT_EQ(CurrentDevice(), 0);
      const DeviceGuard inner(1);
      EXPECT_EQ(CurrentDevice(), 1);
    }
    EXPECT_EQ(CurrentDevice(), 1);
  }).join();
}

}  // namespace
}  // namespace heddle
