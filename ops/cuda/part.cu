#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.h"
#include "ops/cuda/part_plan.h"

namespace heddle::ops::cuda {

void Gather(std::size_t element_bytes, const void* array, const StridedPart& part, void* packed,
            Stream stream) {
  PlanPartCopy</*kScatter=*/false>(element_bytes, array, part, packed, [&](const auto& table) {
    LaunchTable("gather of a part", table, stream);
  });
}

void Scatter(std::size_t element_bytes, const void* packed, const StridedPart& part, void* array,
             Stream stream) {
  PlanPartCopy</*kScatter=*/true>(element_bytes, packed, part, array, [&](const auto& table) {
    LaunchTable("scatter to a part", table, stream);
  });
}

}  // namespace heddle::ops::cuda
