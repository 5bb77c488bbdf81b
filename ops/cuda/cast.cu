#include "ops/cuda/cast.h"
#include "ops/cuda/cast_plan.h"
#include "ops/cuda/launch.cuh"

namespace heddle::ops::cuda {

void Cast(DType from, DType to, std::span<const CastTask> tasks, Stream stream) {
  PlanCasts(from, to, tasks, [&](const auto& table) { LaunchTable("cast", table, stream); });
}

}  // namespace heddle::ops::cuda
