#include "ops/cuda/copy.h"
#include "ops/cuda/copy_plan.h"
#include "ops/cuda/launch.cuh"

namespace heddle::ops::cuda {

void Copy(std::span<const CopyTask> tasks, Stream stream) {
  PlanCopies(tasks, [&](const auto& table) { LaunchTable("copy", table, stream); });
}

void Fill(DType dtype, Scalar value, std::span<const FillTask> tasks, Stream stream) {
  PlanFills(dtype, value, tasks, [&](const auto& table) { LaunchTable("fill", table, stream); });
}

}  // namespace heddle::ops::cuda
