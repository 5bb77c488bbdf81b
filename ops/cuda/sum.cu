#include "ops/cuda/launch.cuh"
#include "ops/cuda/sum.h"
#include "ops/cuda/sum_plan.h"

namespace heddle::ops::cuda {

void Sum(DType dtype, std::span<const SumTask> tasks, Stream stream) {
  PlanSums(dtype, tasks, [&](const auto& table) { LaunchTable("sum", table, stream); });
}

}  // namespace heddle::ops::cuda
