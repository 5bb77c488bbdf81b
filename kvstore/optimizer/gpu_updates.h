// The updates of values on GPUs, behind one interface: CUDA's (cuda/update.h), or those of
// simulated devices in tests.
#pragma once

#include <heddle/gpu.h>

#include <cstddef>
#include <span>

#include "kvstore/optimizer/update_rule.h"

namespace heddle::kvstore {

// Threads: all methods, any thread.
class GpuUpdates {
 public:
  virtual ~GpuUpdates() = default;

  // Whether the rule's updates have kernels for GPUs.
  virtual bool Has(const internal::UpdateRule& rule) const = 0;
  // Bytes of memory of the device, aligned to 8, that Update needs until the stream is done.
  virtual std::size_t ScratchBytes(std::span<const internal::UpdateRun> runs, int passes) const = 0;
  // Issues on `stream`, whose device is current, all passes of the updates of runs whose arrays lie
  // in that device's memory and which are whole values: what rule.Update does for each. `passes`:
  // what rule.Begin returned, for all runs alike; update->pass and block_sums do not matter. `rule`
  // and the runs' texts live until the stream is done.
  //
  // Bits:   those of the CPU, except where a formula takes logarithms or angles (sgld).
  // Errors: InvalidState if Has is false; CudaError if a launch fails.
  virtual void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
                      int passes, void* scratch, GpuStream stream) const = 0;

  // Some of the passes of one update. What they sum stays in `scratch`, the same for all of them
  // and of the size for the whole value. Of a lazy rule the last pass may have some rows alone,
  // one after another in arrays of their own, per-row states too.
  struct Passes {
    int all;
    int begin;
    int end;
  };
  virtual void UpdatePasses(const internal::UpdateRule& rule, const internal::UpdateRun& run,
                            const Passes& passes, void* scratch, GpuStream stream) const = 0;
};

// Those of cuda/. Without CUDA there is no device to call them for.
const GpuUpdates& CudaUpdates();

}  // namespace heddle::kvstore
