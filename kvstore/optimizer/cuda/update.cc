#include "kvstore/optimizer/cuda/update.h"

#include <heddle/error.h>

#include "kvstore/optimizer/cuda/all_numbers.h"
#include "kvstore/optimizer/cuda/gpu_planner.h"
#include "kvstore/optimizer/cuda/passes.h"

namespace heddle::kvstore::cuda {

bool HasKernels(const internal::UpdateRule& rule) {
  return AllNumbers::VisitOne(rule.numbers(), [](const auto& /*numbers*/) {});
}

std::size_t ScratchBytes(std::span<const internal::UpdateRun> runs, int passes) {
  return SumsBytes(runs, passes);
}

void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
            const GpuUpdates::Passes& passes, void* scratch, ops::cuda::Stream stream) {
  const UpdateLaunch launch{stream};
  GpuPlanner planner(launch);
  const bool known = AllNumbers::VisitOne(rule.numbers(), [&](const auto& numbers) {
    PlanPasses(runs, passes, scratch, planner,
               [&](const GpuRun& run, GpuPlanner& to) { PlanOnGpu(numbers, run, to); });
  });
  if (!known) throw InvalidState("update on a GPU: this optimizer has no kernels for GPUs");
}

}  // namespace heddle::kvstore::cuda
