#include "kvstore/optimizer/gpu_updates.h"

#include "kvstore/optimizer/cuda/update.h"

namespace heddle::kvstore {
namespace {

class AllCudaUpdates final : public GpuUpdates {
 public:
  bool Has(const internal::UpdateRule& rule) const override { return cuda::HasKernels(rule); }
  std::size_t ScratchBytes(std::span<const internal::UpdateRun> runs, int passes) const override {
    return cuda::ScratchBytes(runs, passes);
  }
  void Update(const internal::UpdateRule& rule, std::span<const internal::UpdateRun> runs,
              int passes, void* scratch, GpuStream stream) const override {
    cuda::Update(rule, runs, {passes, 0, passes}, scratch,
                 static_cast<ops::cuda::Stream>(stream.handle));
  }
  void UpdatePasses(const internal::UpdateRule& rule, const internal::UpdateRun& run,
                    const Passes& passes, void* scratch, GpuStream stream) const override {
    cuda::Update(rule, {&run, 1}, passes, scratch, static_cast<ops::cuda::Stream>(stream.handle));
  }
};

}  // namespace

const GpuUpdates& CudaUpdates() {
  static const AllCudaUpdates updates;
  return updates;
}

}  // namespace heddle::kvstore
