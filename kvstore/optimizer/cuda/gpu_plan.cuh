// For the .cu files that compile kernels of updates.
#pragma once

#include "kvstore/optimizer/cuda/gpu_planner.h"
#include "kvstore/optimizer/cuda/plans.h"
#include "ops/cuda/launch.cuh"

namespace heddle::kvstore::cuda {

template <class AnyTable>
void UpdateLaunch::operator()(const AnyTable& table) const {
  ops::cuda::LaunchTable("update", table, stream);
}

template <class Numbers>
void PlanOnGpu(const Numbers& numbers, const internal::UpdateRun& run, GpuPlanner& planner) {
  Plan(numbers, run, planner);
}

}  // namespace heddle::kvstore::cuda

// Compiles the kernels that updates with these numbers take.
#define HEDDLE_KERNELS_OF(Numbers)                                                   \
  template void heddle::kvstore::cuda::PlanOnGpu(const heddle::kvstore::Numbers&,    \
                                                 const heddle::internal::UpdateRun&, \
                                                 heddle::kvstore::cuda::GpuPlanner&)
