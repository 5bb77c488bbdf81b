// Simulated GPUs with the updates of stores.
#pragma once

#include <cstddef>
#include <span>

#include "kvstore/optimizer/gpu_updates.h"
#include "tests/engine/sim_gpu.h"

namespace heddle::kvstore_test {

// Updates are those of the CPU, on the simulated streams.
class SimStoreGpu final : public engine_test::SimGpu, public kvstore::GpuUpdates {
 public:
  using SimGpu::SimGpu;

  bool Has(const internal::UpdateRule& rule) const override { return !rule.by_rows(); }
  std::size_t ScratchBytes(std::span<const internal::UpdateRun> runs, int passes) const override;
  void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
              int passes, void* scratch, GpuStream stream) const override;
};

}  // namespace heddle::kvstore_test
