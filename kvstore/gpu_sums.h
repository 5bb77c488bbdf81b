// Sums of arrays that lie on several GPUs, in the order that suits the links between these.
//
// The planner is reduction_order.h. A plan of one step is that of all other lists: copies to the
// value's GPU, and one sum there, which the op on the value makes. Of another plan the steps but
// the last are queued here, as ops of the GPUs where they sum, and the op on the value gets what
// the last step adds.
#pragma once

#include <heddle/device.h>
#include <heddle/kvstore.h>
#include <heddle/ndarray.h>
#include <heddle/row_sparse.h>

#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "kvstore/near_arrays.h"
#include "kvstore/reduction_order.h"
#include "storage/gpus.h"

namespace heddle::kvstore {

// What the options say, or the environment.
GpuSums GpuSumsOf(const KVStoreOptions& options);

// What is known of the links between these GPUs, in bytes a second: by kind and rank, not measured.
LinkMatrix LinksBetween(storage::Gpus& gpus, std::span<const int> devices);

// Plans the sums of one value's lists, which are alike from push to push: it keeps the last plan.
// Threads: all methods, any thread.
class GpuSumPlanner {
 public:
  explicit GpuSumPlanner(GpuSums how) : how_(how) {}

  GpuSums how() const { return how_; }
  // The order in which the sum of `arrays` is made on `root`, by the numbers of the GPUs. Null: in
  // one step there. Shape, dtype and root are the same in every call.
  std::shared_ptr<const ReductionOrder> Plan(std::span<const NDArray> arrays, Device root)
      EXCLUDES(mutex_);

 private:
  const GpuSums how_;
  Mutex mutex_;
  std::vector<int> gpus_ GUARDED_BY(mutex_);  // where the arrays of the last list lie
  std::shared_ptr<const ReductionOrder> order_ GUARDED_BY(mutex_);
};

// Queues all steps but the last; returns what that one adds. A failure of an array is one of the
// sums that it is in.
std::vector<NDArray> QueueSteps(const ReductionOrder& order, std::span<const NDArray> arrays,
                                int priority);

// Inputs of an op that sums them on `device`: the arrays near it (near_arrays.h), or what the last
// step of their order adds. The arrays outlive it.
template <class Array>
class InputsOfSum {
 public:
  // `planner`: null for what are no values, such as codes.
  InputsOfSum(std::span<const Array> arrays, Device device, GpuSumPlanner* planner, int priority)
      : of_last_step_(OfLastStep(arrays, device, planner, priority)),
        near_(of_last_step_.empty() ? arrays : std::span<const Array>(of_last_step_), device,
              priority) {}

  std::span<const Array> view() const { return near_.view(); }

 private:
  static std::vector<NDArray> OfLastStep(std::span<const NDArray> arrays, Device device,
                                         GpuSumPlanner* planner, int priority) {
    const auto order = planner != nullptr ? planner->Plan(arrays, device) : nullptr;
    return order != nullptr ? QueueSteps(*order, arrays, priority) : std::vector<NDArray>();
  }
  static std::vector<RowSparseNDArray> OfLastStep(std::span<const RowSparseNDArray> /*arrays*/,
                                                  Device /*device*/, GpuSumPlanner* /*planner*/,
                                                  int /*priority*/) {
    return {};
  }

  const std::vector<Array> of_last_step_;
  const NearInputs<Array> near_;
};

}  // namespace heddle::kvstore
