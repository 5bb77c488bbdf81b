// For the .cu files that compile kernels of updates.
#pragma once

#include "kvstore/optimizer/cuda/gpu_planner.h"
#include "kvstore/optimizer/cuda/plans.h"
#include "ops/cuda/launch.cuh"

namespace heddle::kvstore::cuda {

// A warp for each block of ops::kReductionBlock elements.
template <class AnyTable>
__global__ void __launch_bounds__(ops::cuda::kBlockThreads)
    RunSumPass(const __grid_constant__ AnyTable table) {
  static_assert(sizeof(AnyTable) <= ops::cuda::kParameterBytes);
  using Body = typename AnyTable::Body;
  const std::uint32_t task = ops::cuda::TaskOfBlock(table.ends, table.size, blockIdx.x);
  const std::uint32_t first = task == 0 ? 0 : table.ends[task - 1];
  const std::uint64_t count = table.RunOf(task).count;
  const std::uint64_t block = std::uint64_t{blockIdx.x - first} * ops::cuda::kBlockWarps +
                              threadIdx.x / ops::cuda::kWarpLanes;
  if (block >= ops::ReductionBlocks(count)) return;  // the whole warp
  const unsigned lane = threadIdx.x % ops::cuda::kWarpLanes;
  double sums[Body::kSums];
  table.BodyOf(task).SumLane(count, block, lane, sums);
  HEDDLE_UNROLL
  for (int k = 0; k < Body::kSums; ++k) {
    HEDDLE_UNROLL
    for (unsigned half = ops::cuda::kWarpLanes / 2; half > 0; half /= 2) {
      sums[k] += __shfl_down_sync(0xFFFFFFFF, sums[k], half);
    }
    if (lane == 0) table.BodyOf(task).block_sums[k][block] = sums[k];
  }
}

// A warp for each row.
template <class AnyTable>
__global__ void __launch_bounds__(ops::cuda::kBlockThreads)
    RunRowPass(const __grid_constant__ AnyTable table) {
  static_assert(sizeof(AnyTable) <= ops::cuda::kParameterBytes);
  const std::uint32_t task = ops::cuda::TaskOfBlock(table.ends, table.size, blockIdx.x);
  const std::uint32_t first = task == 0 ? 0 : table.ends[task - 1];
  const std::uint64_t row = std::uint64_t{blockIdx.x - first} * ops::cuda::kBlockWarps +
                            threadIdx.x / ops::cuda::kWarpLanes;
  if (row >= table.RunOf(task).count) return;  // the whole warp
  const auto& body = table.BodyOf(task);
  const unsigned lane = threadIdx.x % ops::cuda::kWarpLanes;
  const auto state = body.states[row];
  double total = 0;
  for (std::uint64_t block = 0; block < body.BlocksOfRow(); ++block) {
    double sum = body.SumLane(row, block, lane);
    HEDDLE_UNROLL
    for (unsigned half = ops::cuda::kWarpLanes / 2; half > 0; half /= 2) {
      sum += __shfl_down_sync(0xFFFFFFFF, sum, half);
    }
    total += __shfl_sync(0xFFFFFFFF, sum, 0);
  }
  __syncwarp();  // all lanes have read the state
  body.Finish(row, lane, state, total);
}

template <class AnyTable>
void UpdateLaunch::operator()(const AnyTable& table) const {
  if constexpr (requires { AnyTable::Body::kIsSumPass; }) {
    RunSumPass<<<table.blocks(), ops::cuda::kBlockThreads, 0, stream>>>(table);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) ThrowCudaError(error, "sums of an update");
  } else if constexpr (requires { AnyTable::Body::kIsRowPass; }) {
    RunRowPass<<<table.blocks(), ops::cuda::kBlockThreads, 0, stream>>>(table);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) ThrowCudaError(error, "update by rows");
  } else {
    ops::cuda::LaunchTable("update", table, stream);
  }
}

template <class Numbers>
void PlanOnGpu(const Numbers& numbers, const GpuRun& run, GpuPlanner& planner) {
  Plan(numbers, run, planner);
}

}  // namespace heddle::kvstore::cuda

// Compiles the kernels that updates with these numbers take.
#define HEDDLE_KERNELS_OF(Numbers)                                                     \
  template void heddle::kvstore::cuda::PlanOnGpu(const heddle::kvstore::Numbers&,      \
                                                 const heddle::kvstore::cuda::GpuRun&, \
                                                 heddle::kvstore::cuda::GpuPlanner&)
