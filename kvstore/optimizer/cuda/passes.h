// The passes of updates on a GPU, and where their sums lie.
#pragma once

#include <cstddef>
#include <span>

#include "kvstore/optimizer/gpu_updates.h"
#include "kvstore/optimizer/update_rule.h"
#include "ops/reduce.h"

namespace heddle::kvstore::cuda {

using internal::UpdateRun;

// A run of a rule that may sum. block_sums lie in the GPU's memory, too.
struct GpuRun : UpdateRun {
  // What the passes sum, in the GPU's memory: sum k of pass p at p * internal::kUpdateSumsMax + k.
  double* sums;

  double* SumsOfPass(int pass) const {
    return sums + static_cast<std::size_t>(pass) * internal::kUpdateSumsMax;
  }
};

// Bytes of GPU memory for the sums of such updates: none if there is one pass.
inline std::size_t SumsBytes(std::span<const UpdateRun> runs, int passes) {
  if (passes == 1) return 0;
  std::size_t doubles = 0;
  for (const UpdateRun& run : runs) {
    doubles += internal::kUpdateSumsMax *
               (internal::kUpdatePassesMax - 1 + ops::ReductionBlocks(run.count));
  }
  return doubles * sizeof(double);
}

// Calls plan(run, planner) for each run in each of these passes, and launches what it planned, pass
// by pass.
template <class Planner, class PlanRun>
void PlanPasses(std::span<const UpdateRun> runs, const GpuUpdates::Passes& passes, void* scratch,
                Planner& planner, const PlanRun& plan) {
  for (int pass = passes.begin; pass < passes.end; ++pass) {
    auto* free = static_cast<double*>(scratch);
    for (const UpdateRun& run : runs) {
      internal::KeyUpdate update = *run.update;
      update.pass = pass;
      GpuRun gpu_run = {run, nullptr};
      gpu_run.update = &update;
      if (passes.all > 1) {
        gpu_run.sums = free;
        free += (internal::kUpdatePassesMax - 1) * internal::kUpdateSumsMax;
        for (double*& block_sums : gpu_run.block_sums) {
          block_sums = free;
          free += ops::ReductionBlocks(run.count);
        }
      }
      plan(gpu_run, planner);
    }
    planner.Flush();
  }
}

}  // namespace heddle::kvstore::cuda
