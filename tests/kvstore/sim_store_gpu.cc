#include "tests/kvstore/sim_store_gpu.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"

namespace heddle::kvstore_test {

using kvstore::cuda::PassSums;

std::size_t SimStoreGpu::ScratchBytes(std::span<const internal::UpdateRun> runs, int passes) const {
  return passes > 1 ? runs.size() * sizeof(PassSums) : 0;
}

void SimStoreGpu::Update(const internal::UpdateRule& rule,
                         std::span<const internal::UpdateRun> runs, int passes, void* scratch,
                         GpuStream stream) const {
  auto* next = static_cast<PassSums*>(scratch);
  for (const internal::UpdateRun& run : runs) {
    LaunchUpdate(rule, run, {passes, 0, passes}, next, stream);
    if (next != nullptr) ++next;
  }
  CountLaunch();
}

void SimStoreGpu::UpdatePasses(const internal::UpdateRule& rule, const internal::UpdateRun& run,
                               const Passes& passes, void* scratch, GpuStream stream) const {
  LaunchUpdate(rule, run, passes, static_cast<PassSums*>(scratch), stream);
  CountLaunch();
}

void SimStoreGpu::LaunchUpdate(const internal::UpdateRule& rule, const internal::UpdateRun& run,
                               const Passes& passes, kvstore::cuda::PassSums* scratch,
                               GpuStream stream) const {
  CHECK((scratch != nullptr) == (passes.all > 1));
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
  const std::span<const internal::UpdateStateType> types = rule.states();
  for (std::size_t k = 0; k < run.states.size(); ++k) {
    if (run.states[k] == nullptr) continue;
    const std::int64_t size = bytes_of(wide ? sizeof(float) : SizeOf(run.dtype));
    const bool per_row = k < types.size() && types[k].per_row;
    add(run.states[k], per_row ? size / run.update->row_length : size);
  }
  if (scratch != nullptr) add(scratch, sizeof(PassSums));
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
             PassSums none = {};
             auto* const sums = passes.all > 1 ? reinterpret_cast<PassSums*>(*next++) : &none;
             kvstore::cuda::PassesOnCpu(rule, here, update, passes, sums);
           });
}

}  // namespace heddle::kvstore_test
