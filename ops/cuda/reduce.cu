#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.h"
#include "ops/cuda/reduce_plan.h"

namespace heddle::ops::cuda {

namespace {

// A warp for each block of kReductionBlock elements.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) RunDotBlocks(const DotBlocksBody<T> body) {
  const std::uint64_t block = std::uint64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarpLanes;
  if (block >= ReductionBlocks(body.count)) return;  // the whole warp
  const unsigned lane = threadIdx.x % kWarpLanes;
  double sum = body.SumLane(block, lane);
  HEDDLE_UNROLL
  for (unsigned half = kWarpLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xFFFFFFFF, sum, half);
  }
  if (lane == 0) body.blocks[block] = sum;
}

}  // namespace

void SumAxis(DType dtype, const void* a, std::size_t outer, std::size_t length, std::size_t inner,
             std::size_t divisor, void* out, void* scratch, Stream stream) {
  PlanSumAxis(dtype, a, outer, length, inner, divisor, out, scratch,
              [&](const auto& table) { LaunchTable("sum along an axis", table, stream); });
}

void DotBlocks(DType dtype, const void* a, const void* b, std::size_t count, double* blocks,
               Stream stream) {
  RequireFloating("dot product", dtype);
  if (count == 0) return;
  DispatchFloating(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto grid =
        static_cast<unsigned>((ReductionBlocks(count) + kBlockWarps - 1) / kBlockWarps);
    RunDotBlocks<<<grid, kBlockThreads, 0, stream>>>(
        DotBlocksBody<T>{static_cast<const T*>(a), static_cast<const T*>(b), count, blocks});
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) ThrowCudaError(error, "dot product");
  });
}

void Norm(DType dtype, const void* x, std::size_t count, void* out, void* scratch, Stream stream) {
  auto* const blocks = static_cast<double*>(scratch);
  DotBlocks(dtype, x, x, count, blocks, stream);
  PlanNorm(dtype, blocks, ReductionBlocks(count), out,
           [&](const auto& table) { LaunchTable("norm", table, stream); });
}

}  // namespace heddle::ops::cuda
