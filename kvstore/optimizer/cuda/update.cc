#include "kvstore/optimizer/cuda/update.h"

#include <heddle/error.h>

#include "kvstore/optimizer/cuda/all_numbers.h"
#include "kvstore/optimizer/cuda/gpu_planner.h"

namespace heddle::kvstore::cuda {

bool HasKernels(const internal::UpdateRule& rule) {
  return AllNumbers::VisitOne(rule.numbers(), [](const auto& /*numbers*/) {});
}

void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
            ops::cuda::Stream stream) {
  const UpdateLaunch launch{stream};
  GpuPlanner planner(launch);
  const bool known = AllNumbers::VisitOne(rule.numbers(), [&](const auto& numbers) {
    for (const internal::UpdateRun& run : runs) PlanOnGpu(numbers, run, planner);
  });
  if (!known) {
    throw InvalidState("update on a GPU: this optimizer has no kernels for GPUs");
  }
  planner.Flush();
}

}  // namespace heddle::kvstore::cuda
