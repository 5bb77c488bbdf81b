#include "tests/engine/cuda/kernels.h"

namespace heddle::engine_test {
namespace {

__device__ unsigned long long NowNs() {
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void AwaitFlag(const volatile int* flag) {
  constexpr unsigned long long kMaxNs = 20'000'000'000ULL;
  const unsigned long long start = NowNs();
  while (*flag == 0 && NowNs() - start < kMaxNs) {
  }
}

__global__ void SlowIncrement(int* value, unsigned long long ns) {
  const unsigned long long start = NowNs();
  while (NowNs() - start < ns) {
  }
  ++*value;
}

__global__ void Write(int* value) { *value = 1; }

}  // namespace

void LaunchAwaitFlag(const int* flag, cudaStream_t stream) { AwaitFlag<<<1, 1, 0, stream>>>(flag); }

void LaunchSlowIncrement(int* value, int microseconds, cudaStream_t stream) {
  SlowIncrement<<<1, 1, 0, stream>>>(value, 1000ULL * static_cast<unsigned>(microseconds));
}

void LaunchIllegalWrite(cudaStream_t stream) {
  Write<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(0x10));
}

void LaunchTooManyThreads(cudaStream_t stream) { Write<<<1, 4096, 0, stream>>>(nullptr); }

}  // namespace heddle::engine_test
