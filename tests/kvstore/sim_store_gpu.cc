#include "tests/kvstore/sim_store_gpu.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "ops/reduce.h"
#include "tests/kvstore/cuda/update_values.h"

namespace heddle::kvstore_test {

std::size_t SimStoreGpu::ScratchBytes(std::span<const internal::UpdateRun> runs, int passes) const {
  return passes > 1 ? runs.size() * sizeof(double) : 0;
}

void SimStoreGpu::Update(const internal::UpdateRule& rule,
                         std::span<const internal::UpdateRun> runs, int passes, void* scratch,
                         GpuStream stream) const {
  CHECK((scratch != nullptr) == (ScratchBytes(runs, passes) > 0));
  CountLaunch();
  for (const internal::UpdateRun& run : runs) {
    const auto bytes_of = [&](std::size_t element) {
      return static_cast<std::int64_t>(run.count * element);
    };
    std::vector<const void*> arrays = {run.weight, run.gradient};
    std::vector<std::int64_t> bytes(2, bytes_of(SizeOf(run.dtype)));
    const auto add = [&](const void* array, std::int64_t size) {
      arrays.push_back(array);
      bytes.push_back(size);
    };
    const bool wide = run.master != nullptr;
    if (wide) add(run.master, bytes_of(sizeof(float)));
    for (const void* state : run.states) {
      if (state != nullptr) add(state, bytes_of(wide ? sizeof(float) : SizeOf(run.dtype)));
    }
    if (scratch != nullptr) add(scratch, sizeof(double));
    LaunchOn(stream, std::move(arrays), std::move(bytes),
             [&rule, run, update = *run.update, passes, wide](const std::vector<std::byte*>& at) {
               internal::UpdateRun here = run;
               auto next = at.begin();
               here.weight = *next++;
               here.gradient = *next++;
               if (wide) here.master = reinterpret_cast<float*>(*next++);
               for (void*& state : here.states) {
                 if (state != nullptr) state = *next++;
               }
               kvstore::cuda::UpdateOnCpu(rule, here, update, passes);
             });
  }
}

}  // namespace heddle::kvstore_test
