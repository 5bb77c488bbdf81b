#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.h"
#include "ops/cuda/math_plan.h"

namespace heddle::ops::cuda {

void Compare(CompareOp op, DType dtype, const void* a, const void* b, std::uint8_t* out,
             std::size_t count, Stream stream) {
  PlanCompare(op, dtype, a, b, 0, out, count,
              [&](const auto& table) { LaunchTable("comparison", table, stream); });
}

void CompareWithScalar(CompareOp op, DType dtype, const void* a, Scalar b, std::uint8_t* out,
                       std::size_t count, Stream stream) {
  PlanCompare(op, dtype, a, nullptr, b, out, count,
              [&](const auto& table) { LaunchTable("comparison", table, stream); });
}

}  // namespace heddle::ops::cuda
