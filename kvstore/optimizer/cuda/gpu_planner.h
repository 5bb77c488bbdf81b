// The planner whose launches run on a GPU, and how its kernels are split over several .cu files.
#pragma once

#include "ops/cuda/stream.h"
#include "ops/cuda/update_plan.h"

namespace heddle::kvstore::cuda {

struct UpdateLaunch {
  template <class AnyTable>
  void operator()(const AnyTable& table) const;  // in gpu_plan.cuh

  ops::cuda::Stream stream;
};
struct GpuRun;  // plans.h
using GpuPlanner = ops::cuda::UpdatePlanner<UpdateLaunch>;

// Plan (plans.h). Compiled by nvcc, for the numbers that each .cu file names.
template <class Numbers>
void PlanOnGpu(const Numbers& numbers, const GpuRun& run, GpuPlanner& planner);

}  // namespace heddle::kvstore::cuda
