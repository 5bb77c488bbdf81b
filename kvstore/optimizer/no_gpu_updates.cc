// Updates on GPUs in a build without CUDA: there is no device that any of these could come for.
#include "base/check.h"
#include "kvstore/optimizer/gpu_updates.h"

namespace heddle::kvstore {
namespace {

class NoUpdates final : public GpuUpdates {
 public:
  bool Has(const internal::UpdateRule&) const override { Unreachable(); }
  std::size_t ScratchBytes(std::span<const internal::UpdateRun>, int) const override {
    Unreachable();
  }
  void Update(const internal::UpdateRule&, std::span<const internal::UpdateRun>, int, void*,
              GpuStream) const override {
    Unreachable();
  }
  void UpdatePasses(const internal::UpdateRule&, const internal::UpdateRun&, const Passes&, void*,
                    GpuStream) const override {
    Unreachable();
  }

 private:
  [[noreturn]] static void Unreachable() {
    ::heddle::internal::CheckFailed(__FILE__, __LINE__,
                                    "updates on GPUs are used in a build without CUDA");
  }
};

}  // namespace

const GpuUpdates& CudaUpdates() {
  static const NoUpdates updates;
  return updates;
}

}  // namespace heddle::kvstore
