#include "ops/cuda/launch.cuh"
#include "ops/cuda/quantise.h"
#include "ops/cuda/quantise_plan.h"

namespace heddle::ops::cuda {

void QuantiseTwoBit(float threshold, DType dtype, std::span<const QuantiseTask> tasks,
                    Stream stream) {
  PlanQuantise<2>(threshold, dtype, tasks,
                  [&](const auto& table) { LaunchTable("quantise (two-bit)", table, stream); });
}

void QuantiseOneBit(float threshold, DType dtype, std::span<const QuantiseTask> tasks,
                    Stream stream) {
  PlanQuantise<1>(threshold, dtype, tasks,
                  [&](const auto& table) { LaunchTable("quantise (one-bit)", table, stream); });
}

void DequantiseTwoBit(float threshold, std::span<const DequantiseTask> tasks, Stream stream) {
  PlanDequantise<2>(threshold, tasks,
                    [&](const auto& table) { LaunchTable("dequantise (two-bit)", table, stream); });
}

void DequantiseOneBit(std::span<const DequantiseTask> tasks, Stream stream) {
  PlanDequantise<1>(0, tasks,
                    [&](const auto& table) { LaunchTable("dequantise (one-bit)", table, stream); });
}

void SumTwoBit(float threshold, std::span<const void* const> codes, DType dtype, void* out,
               float* carry, std::size_t count, Stream stream) {
  PlanCodeSum<2>(threshold, codes, dtype, out, carry, count,
                 [&](const auto& table) { LaunchTable("sum of codes (two-bit)", table, stream); });
}

void SumOneBit(std::span<const void* const> codes, DType dtype, void* out, float* carry,
               std::size_t count, Stream stream) {
  PlanCodeSum<1>(0, codes, dtype, out, carry, count,
                 [&](const auto& table) { LaunchTable("sum of codes (one-bit)", table, stream); });
}

}  // namespace heddle::ops::cuda
