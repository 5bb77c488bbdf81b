// Simulated GPUs with the updates of stores.
#pragma once

#include <cstddef>
#include <span>

#include "kvstore/optimizer/gpu_updates.h"
#include "tests/engine/sim_gpu.h"
#include "tests/kvstore/cuda/update_values.h"

namespace heddle::kvstore_test {

// Updates are those of the CPU, on the simulated streams.
class SimStoreGpu final : public engine_test::SimGpu, public kvstore::GpuUpdates {
 public:
  using SimGpu::SimGpu;

  bool Has(const internal::UpdateRule& rule) const override {
    return rule.numbers().type != nullptr;
  }
  std::size_t ScratchBytes(std::span<const internal::UpdateRun> runs, int passes) const override;
  void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
              int passes, void* scratch, GpuStream stream) const override;
  void UpdatePasses(const internal::UpdateRule& rule, const internal::UpdateRun& run,
                    const Passes& passes, void* scratch, GpuStream stream) const override;

 private:
  // One launch; `scratch`: null if there is one pass.
  void LaunchUpdate(const internal::UpdateRule& rule, const internal::UpdateRun& run,
                    const Passes& passes, kvstore::cuda::PassSums* scratch, GpuStream stream) const;
};

}  // namespace heddle::kvstore_test
