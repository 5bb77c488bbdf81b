// Gradients that reach a value as codes: the residuals of their senders, and, for values on GPUs,
// the ops on the devices where they lie.
#include <algorithm>
#include <utility>
#include <vector>

#include "engine/access_check.h"
#include "kvstore/array_kernels.h"
#include "kvstore/compression/compressed_sum.h"
#include "kvstore/near_arrays.h"
#include "kvstore/queue_op.h"
#include "kvstore/stored_value.h"
#include "storage/array_state.h"

namespace heddle::kvstore {

std::vector<NDArray> StoredValue::ResidualsOf(std::span<const NDArray> senders,
                                              const GpuWork* gpu) {
  std::vector<NDArray> found;
  for (std::size_t i = 0; i < senders.size(); ++i) {
    const Device device = senders[i].device();
    const auto place = static_cast<int>(
        std::ranges::count(senders.first(i), device, [](const NDArray& a) { return a.device(); }));
    {
      const MutexLock lock(residuals_mutex_);
      const auto known = std::ranges::find_if(residuals_, [&](const Residual& residual) {
        return residual.device == device && residual.place == place;
      });
      if (known != residuals_.end()) {
        found.push_back(known->array);
        continue;
      }
    }
    const NDArray fresh = internal::NewArrayWith(var(), shape(), DType::kFloat32,
                                                 IsOnGpu(device) ? device : Cpu(), engine());
    gpu != nullptr ? gpu->FillZero(fresh) : FillZero(fresh);
    found.push_back(fresh);
    const MutexLock lock(residuals_mutex_);
    residuals_.push_back({device, place, fresh});
  }
  return found;
}

std::vector<StoredValue::Residual> StoredValue::TakeResiduals() {
  const MutexLock lock(residuals_mutex_);
  return std::exchange(residuals_, {});
}

// The gradients of one device. An op that only reads the value, so that those of several devices
// run together; the ops that write the value order those of one device.
struct StoredValue::CompressOp {
  std::shared_ptr<StoredValue> value;
  std::vector<NDArray> gradients;
  std::vector<NDArray> codes;
  std::shared_ptr<const Compressor> compressor;
  bool needs_value;

  void operator()(const GpuWork* gpu = nullptr) const {
    if (needs_value && !value->has_value_) return;
    const engine::UncheckedScope unchecked;  // of residuals, ordered as said
    const std::vector<NDArray> residuals = value->ResidualsOf(gradients, gpu);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (gpu != nullptr) {
        gpu->Compress(*compressor, gradients[i], residuals[i], codes[i]);
      } else {
        CompressArray(gradients[i], *compressor, residuals[i].data<float>(), codes[i]);
      }
    }
  }
};

std::vector<NDArray> StoredValue::QueueCodes(const std::shared_ptr<StoredValue>& self,
                                             std::span<const NDArray> values,
                                             const std::shared_ptr<const Compressor>& compressor,
                                             bool needs_value, int priority) {
  std::vector<NDArray> codes;
  for (const NDArray& value : values) {
    codes.emplace_back(Shape{compressor->CodeBytes(value.size())}, DType::kUInt8, value.device(),
                       value.engine());
  }
  // All inputs, so that no residual changes if one of them has failed.
  std::vector<VarRef> reads = VarsOf(values);
  reads.push_back(self->var());
  std::vector<bool> queued(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (queued[i]) continue;
    const Device device = values[i].device();
    CompressOp op{self, {}, {}, compressor, needs_value};
    for (std::size_t k = i; k < values.size(); ++k) {
      if (values[k].device() != device) continue;
      queued[k] = true;
      op.gradients.push_back(values[k]);
      op.codes.push_back(codes[k]);
    }
    Queue(self->engine(),
          {.name = "kvstore.compress",
           .reads = reads,
           .writes = VarListOf<NDArray>(op.codes),
           .device = device,
           .priority = priority},
          op);
  }
  return codes;
}

}  // namespace heddle::kvstore
